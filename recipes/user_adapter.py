"""Stage 2 on a server: the same recipe as on the device, with transformers + peft.

The base is the device's own: its 4-bit values, dequantized.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx.utils import tree_flatten
from peft import LoraConfig, PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from lamp_eval.config import UserAdapterConfig
from lamp_eval.errors import UserError
from lamp_eval.records import Example, passes
from lamp_eval.schedule import TrainingStep, learning_rate_factor
from lamp_eval.training import Training, check_examples, initial_values, trouble, windows
from recipes.formats import dequantized, to_mlx
from recipes.lora import dtype_on, loss_sum, with_lora

_PROBE = list(range(1, 9))  # token ids of any vocabulary
_TOLERANCE = 1e-3  # of the largest logit; float32 on both sides agrees to 2e-5


def train_user_adapter(
    base_dir: Path,
    examples: Sequence[Example],
    recipe: UserAdapterConfig,
    *,
    seed: int,
    device: str,
    tokens_per_pass: int,
    adapter_dir: Path,
    report: Callable[[TrainingStep], None],
) -> Training:
    """Trains one user's adapter and writes it in mlx-lm's format.

    Recipe, initial values, order of examples and guards are those of `on_device.trainer`. The base
    is loaded once and kept for the next user.

    Args:
        base_dir: an MLX checkpoint, quantized or not.
        examples: the user's examples, oldest first; not empty.
        recipe: with `blocks` as a number.
        seed: the user's own; of the adapter's initial values and the order of examples.
        device: `cuda`, `mps` or `cpu`; the base is bfloat16 on CUDA, float32 elsewhere.
        tokens_per_pass: bounds the memory; longer windows are computed in parts.
        adapter_dir: an existing, empty directory.
        report: called after each optimizer step.

    Raises:
        UserError: an example without an answer, or a base that transformers computes differently.
    """
    check_examples(examples)
    base = _loaded(
        base_dir, recipe.rank, recipe.alpha, tuple(recipe.projections), recipe.blocks, device
    )
    base.reset(seed)
    parameters = list(base.adapter.values())
    optimizer = torch.optim.AdamW(
        parameters,
        lr=recipe.learning_rate,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=recipe.weight_decay,
    )
    steps, stopped = windows(examples, recipe, seed), None
    rows: list[dict[str, float]] = []
    good = [parameter.detach().clone() for parameter in parameters]
    for step, window in enumerate(steps):
        start = time.perf_counter()
        n_supervised, loss = sum(example.n_supervised_tokens for example in window), 0.0
        for part in passes(window, tokens_per_pass):
            mean = loss_sum(base.model, part, device) / n_supervised
            mean.backward()
            loss += mean.item()
        norm = torch.nn.utils.clip_grad_norm_(parameters, recipe.clip_norm).item()
        stopped = trouble(loss, norm, rows, base.n_tokens)
        if stopped:
            stopped = f"step {step + 1} of {len(steps)}: {stopped}"
            with torch.no_grad():
                for parameter, value in zip(parameters, good, strict=True):
                    parameter.copy_(value)
            break
        rate = recipe.learning_rate * learning_rate_factor(
            step, len(steps), recipe.warmup_ratio, recipe.schedule
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        good = [parameter.detach().clone() for parameter in parameters]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        n_tokens = sum(len(example.tokens) for example in window)
        rows.append(
            {
                "step": step + 1,
                "loss": loss,
                "learning_rate": rate,
                "gradient_norm": norm,
                "tokens": n_tokens,
                "seconds": time.perf_counter() - start,
            }
            | ({"peak_bytes": torch.cuda.max_memory_allocated()} if device == "cuda" else {})
        )
        report(TrainingStep(step + 1, len(steps), loss, n_tokens))
    if base.frozen_hash() != base.hash:
        raise RuntimeError("the base has changed while an adapter was trained")
    base.save(adapter_dir)
    return Training(tuple(rows), stopped)


class _Base:
    """A dequantized base with LoRA, whose adapter is exchanged from user to user.

    Attributes:
        model: with PEFT's adapter.
        adapter: the adapter's tensors, (r, in) and (out, r), by mlx-lm's names.
        n_tokens: size of the vocabulary.
        hash: SHA-256 of all that no training may change.
    """

    def __init__(self, model: PeftModel, n_blocks: int) -> None:
        self.model, self._n_blocks = model.train(), n_blocks
        self.adapter = {
            _mlx_name(name): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self.n_tokens = int(model.get_input_embeddings().weight.shape[0])
        self.hash = self.frozen_hash()

    def reset(self, seed: int) -> None:
        """A fresh adapter, see `initial_values`, without gradients."""
        with torch.no_grad():
            for name, parameter in self.adapter.items():
                values = initial_values(name, tuple(parameter.shape[::-1]), seed)
                parameter.copy_(torch.from_numpy(values.T.copy()))
                parameter.grad = None

    def frozen_hash(self) -> str:
        digest = hashlib.sha256()
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                digest.update(name.encode())
                digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
        return digest.hexdigest()

    def save(self, adapter_dir: Path) -> None:
        peft_dir = adapter_dir / "peft"
        self.model.save_pretrained(peft_dir, save_embedding_layers=False)
        to_mlx(peft_dir, adapter_dir, n_blocks=self._n_blocks)
        shutil.rmtree(peft_dir)


@lru_cache(maxsize=1)
def _loaded(
    base_dir: Path,
    rank: int,
    alpha: float,
    projections: tuple[str, ...],
    n_adapted: int,
    device: str,
) -> _Base:
    """The base with LoRA in its last blocks; the last one is kept, as users follow one another."""
    dense, values = dequantized(base_dir)
    config = AutoConfig.for_model(**values)
    weights = {name: torch.from_numpy(np.array(t)) for name, t in tree_flatten(dense.parameters())}
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config))
    model, info = kind.from_pretrained(
        None, config=config, state_dict=weights, dtype=torch.float32, output_loading_info=True
    )
    odd = sorted({*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]})
    with torch.inference_mode():
        found = model(torch.tensor([_PROBE])).logits[0].numpy()
    expected = np.array(dense(mx.array([_PROBE])))[0]
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    if odd or not error <= _TOLERANCE:
        raise UserError(
            expected="a base that transformers computes as MLX does",
            found=f"tensors without a place, e.g. {odd[0]}" if odd else f"logits {error:.1%} off",
            where=str(base_dir),
            fix="set adapter.user.backend=mlx, or choose another model",
        )
    n_blocks = config.num_hidden_layers
    lora = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(projections),
        layers_to_transform=list(range(n_blocks - n_adapted, n_blocks)),
        task_type="CAUSAL_LM",
    )
    adapted = with_lora(model.to(dtype_on(device)), lora, option="adapter.user")
    return _Base(adapted.to(device), n_blocks)


def _mlx_name(name: str) -> str:
    """`base_model.model.….q_proj.lora_A.default.weight` → `….q_proj.lora_a`."""
    layer, side = name.removeprefix("base_model.model.").split(".lora_")
    return f"{layer}.lora_{side[0].lower()}"
