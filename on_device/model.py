"""A quantized base with a LoRA adapter that is exchanged from user to user."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.base import create_causal_mask
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model

from lamp_eval.config import UserAdapterConfig, n_adapted_blocks
from lamp_eval.errors import UserError
from lamp_eval.training import initial_values
from on_device import cpu
from on_device.backward import use_path

WEIGHTS = "adapters.safetensors"  # the file names of mlx-lm's adapter format
CONFIG = "adapter_config.json"
CACHE_BYTES = 2**30  # what MLX may keep of freed memory, instead of as much as there is
_PROBE_TOKENS = mx.arange(1, 9)  # any will do, of any vocabulary


class DeviceModel:
    """A base loaded once; user adapters are set, trained and taken off without reloading it.

    On the CPU, where MLX's quantized product is scalar and accumulates in the activation's dtype,
    it computes in float32.

    Args:
        base_dir: an MLX checkpoint.
        recipe: which blocks and projections carry LoRA, its rank and scale; None: no adapter.
        path: how quantized layers are multiplied, one of `BACKWARD_PATHS`.

    Raises:
        UserError: the recipe does not fit the model, or the architecture is not supported.
    """

    def __init__(
        self, base_dir: Path, recipe: UserAdapterConfig | None = None, *, path: str = "resident"
    ) -> None:
        mx.set_cache_limit(CACHE_BYTES)
        self.model, _ = load_model(base_dir)
        if mx.default_device() == mx.cpu:
            self.model.set_dtype(mx.float32)
        self.model = use_path(self.model, path)
        if mx.default_device() == mx.cpu:
            cpu.speed_up(sys.modules[type(self.model).__module__])
        self.model.eval()
        self.model.freeze()
        inner = self.model.model
        if not all(hasattr(inner, name) for name in ("embed_tokens", "layers", "norm")):
            raise UserError(
                expected="a decoder with embed_tokens, layers and norm (Llama, SmolLM3, Qwen …)",
                found=type(self.model).__module__,
                where=str(base_dir),
                fix="choose another model",
            )
        self.blocks: list[nn.Module] = inner.layers
        self.first_adapted_block = len(self.blocks)
        if recipe is not None:
            self._attach(recipe)
        self._base_logits = self._probe_logits()  # with an adapter whose B is zero, or none
        self._check_forward()

    @property
    def n_tokens(self) -> int:
        """Size of the vocabulary."""
        return int(self.model.model.embed_tokens.weight.shape[0])

    def base_hash(self) -> str:
        """SHA-256 of everything but the adapter, which no training may change."""
        digest = hashlib.sha256()
        for name, tensor in sorted(tree_flatten(self.model.parameters())):
            if name.rsplit(".", 1)[-1] not in ("lora_a", "lora_b"):
                digest.update(name.encode())
                digest.update(memoryview(tensor.view(mx.uint8)))
        return digest.hexdigest()

    def hidden(self, tokens: mx.array) -> mx.array:
        """Normed states (B, T, D) of token ids (B, T) without padding."""
        return self.model.model.norm(self.run_blocks(self.model.model.embed_tokens(tokens), 0))

    def run_blocks(
        self,
        states: mx.array,
        first: int,
        caches: Sequence[Any] | None = None,
        *,
        last: int | None = None,
        checkpoint: int | None = None,
    ) -> mx.array:
        """States (B, T, D) after the blocks `first` … `last` − 1, causal; no padding in front.

        Args:
            states: (B, T, D).
            first: the first block to run.
            caches: per block run, the keys and values in front of T, in mlx-lm's form.
            last: one past the last block; None: to the end.
            checkpoint: so many blocks at a time keep only their input, and are computed again in
                the backward pass; without caches only, whose gradients it would lose.
        """
        blocks = self.blocks[first:last]
        if not blocks:
            return states
        mask = "causal" if states.shape[1] > 1 else None
        if checkpoint:
            for start in range(0, len(blocks), checkpoint):
                states = _recomputed(blocks[start : start + checkpoint], states, mask)
            return states
        for block, cache in zip(blocks, caches or [None] * len(blocks), strict=True):
            states = block(states, mask, cache)
        return states

    def run_last_block(
        self, states: mx.array, positions: mx.array, cache: Any | None = None
    ) -> mx.array:
        """States (B, A, D) after the last block, at some positions only; the rest is not computed.

        Args:
            states: (B, S, D) in front of the block.
            positions: (B, A) in S, ascending by one in a row; repetitions of the last may follow,
                whose states mean nothing.
            cache: the block's keys and values in front of S, in mlx-lm's form.
        """
        block, n_before = self.blocks[-1], cache.offset if cache else 0
        queried = _Queried(cache)
        block(states, create_causal_mask(states.shape[1], n_before), queried)
        queried.offset = n_before + positions[:, 0]
        keys = mx.arange(n_before + states.shape[1])
        mask = keys <= n_before + positions[:, None, :, None]  # (B, 1, A, S)
        return block(mx.take_along_axis(states, positions[..., None], axis=1), mask, queried)

    def head(self, states: mx.array) -> mx.array:
        """Logits (…, V) of normed states (…, D)."""
        if "lm_head" in self.model:
            return self.model.lm_head(states)
        return self.model.model.embed_tokens.as_linear(states)

    # The adapter

    def adapter(self) -> dict[str, mx.array]:
        """The adapter's tensors by their name in the model."""
        return dict(tree_flatten(self.model.trainable_parameters()))

    def set_adapter(self, tensors: dict[str, mx.array]) -> None:
        """Replaces the adapter's tensors."""
        self.model.update(tree_unflatten(list(tensors.items())))

    def reset_adapter(self, seed: int) -> None:
        """A fresh adapter, see `initial_values`; the model then answers exactly like its base."""
        self.set_adapter(
            {
                name: mx.array(initial_values(name, old.shape, seed))
                for name, old in self.adapter().items()
            }
        )

    def save_adapter(self, adapter_dir: Path, recipe: UserAdapterConfig) -> None:
        """Writes the adapter in mlx-lm's format."""
        mx.save_safetensors(str(adapter_dir / WEIGHTS), self.adapter(), {"format": "mlx"})
        config = {
            "fine_tune_type": "lora",
            "num_layers": len(self.blocks) - self.first_adapted_block,
            "lora_parameters": _lora_parameters(recipe, self.blocks),
        }
        (adapter_dir / CONFIG).write_text(json.dumps(config, indent=2) + "\n")

    def load_adapter(self, adapter_dir: Path, *, may_be_zero: bool = False) -> None:
        """Sets a saved adapter.

        Args:
            adapter_dir: its folder.
            may_be_zero: accept one that changes nothing, as after a training that was stopped.

        Raises:
            UserError: a tensor is missing, unknown or of another shape, the scale is another, or
                no logit moves.
        """
        path = adapter_dir / WEIGHTS
        scale = json.loads((adapter_dir / CONFIG).read_text())["lora_parameters"]["scale"]
        if scale != self._scale:
            raise UserError(
                expected=f"an adapter of scale {self._scale} (α/r)",
                found=f"{scale}",
                where=str(adapter_dir / CONFIG),
                fix="set adapter.user.alpha and adapter.user.rank as in its training",
            )
        tensors = mx.load(str(path))
        shapes = {name: tuple(old.shape) for name, old in self.adapter().items()}
        found = {name: tuple(new.shape) for name, new in tensors.items()}
        if shapes != found:
            odd = sorted(name for name in shapes | found if shapes.get(name) != found.get(name))
            raise UserError(
                expected=f"{len(shapes)} tensors, among them {odd[0]}: {shapes.get(odd[0])}",
                found=f"{len(found)} tensors, {odd[0]}: {found.get(odd[0], 'missing')}",
                where=str(path),
                fix="delete this folder; the adapter is then trained again",
            )
        before = self.adapter()
        self.set_adapter(tensors)
        if not may_be_zero and mx.array_equal(self._probe_logits(), self._base_logits).item():
            self.set_adapter(before)
            raise UserError(
                expected="an adapter that moves the model's logits",
                found="the same logits as without it",
                where=str(path),
                fix="check adapter.user.learning_rate, delete this folder and train again",
            )

    def _attach(self, recipe: UserAdapterConfig) -> None:
        n_blocks = n_adapted_blocks(recipe.blocks, len(self.blocks))
        self.first_adapted_block = len(self.blocks) - n_blocks
        parameters = _lora_parameters(recipe, self.blocks)
        known = {name.rsplit(".", 1)[-1] for name, _ in self.blocks[0].named_modules()}
        missing = [name for name in recipe.projections if name not in known]
        if missing:
            raise UserError(
                expected="projections of the model: "
                + ", ".join(sorted(name for name in known if name.endswith("_proj"))),
                found=", ".join(missing),
                where="option adapter.user.projections",
                fix="name projections that the model has",
            )
        linear_to_lora_layers(self.model, n_blocks, parameters)
        for block in self.blocks[self.first_adapted_block :]:
            block.unfreeze(keys=["lora_a", "lora_b"], strict=False)
        self._scale = parameters["scale"]
        self.reset_adapter(0)

    def _probe_logits(self) -> mx.array:
        return self.head(self.hidden(_PROBE_TOKENS[None]))

    def _check_forward(self) -> None:
        """Our walks over the blocks must be the model's own, whatever its architecture."""
        theirs, n = self.model(_PROBE_TOKENS[None]), _PROBE_TOKENS.size
        states = self.run_blocks(self.model.model.embed_tokens(_PROBE_TOKENS[None]), 0, last=-1)
        last = self.run_last_block(states, mx.arange(n // 2, n)[None])
        errors = [
            mx.abs(ours - theirs[:, -ours.shape[1] :]).max()
            for ours in (self._base_logits, self.head(self.model.model.norm(last)))
        ]
        error = mx.max(mx.stack(errors)) / mx.abs(theirs).max()
        if not error.item() < 1e-3:
            raise UserError(
                expected="a decoder whose blocks can be run one after the other",
                found=f"logits that differ by {error.item():.1%}",
                where=type(self.model).__module__,
                fix="choose another model",
            )


def _lora_parameters(recipe: UserAdapterConfig, blocks: Sequence[nn.Module]) -> dict[str, Any]:
    """The recipe in mlx-lm's words. Its `scale` is α/r: α itself would be r times too strong."""
    paths = [
        name
        for name, _ in blocks[-1].named_modules()
        if name.rsplit(".", 1)[-1] in recipe.projections
    ]
    return {
        "rank": recipe.rank,
        "scale": recipe.alpha / recipe.rank,
        "dropout": 0.0,
        "keys": sorted(paths),
    }


class _Queried:
    """The cache of a block that is called twice: for its keys and values, then for some queries.

    MLX computes nothing that no result depends on: of the first call only keys and values, and of
    the second all but them.
    """

    def __init__(self, cache: Any | None) -> None:
        self._cache, self._kept = cache, None
        self.offset: Any = cache.offset if cache else 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values (B, H, P + S, D) of the first call."""
        if self._kept is None:
            update = self._cache.update_and_fetch if self._cache else lambda *both: both
            self._kept = update(keys, values)
        return self._kept


def _recomputed(blocks: Sequence[nn.Module], states: mx.array, mask: Any) -> mx.array:
    """Blocks whose activations are computed again in the backward pass instead of being kept."""

    def run(parameters: list[dict[str, Any]], states: mx.array) -> mx.array:
        for block, own in zip(blocks, parameters, strict=True):
            block.update(own)
            states = block(states, mask, None)
        return states

    return mx.checkpoint(run)([block.trainable_parameters() for block in blocks], states)


def device_name() -> str:
    """The device that MLX computes on, e.g. `cpu (x86_64)`."""
    kind = "cpu" if mx.default_device() == mx.cpu else "gpu"
    return f"{kind} ({mx.device_info().get('architecture', 'unknown')})"
