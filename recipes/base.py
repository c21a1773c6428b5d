"""Merge the task adapter in full precision, convert to MLX, compare the logits, quantize."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import load_peft_weights
from transformers import AutoModelForCausalLM

from lamp_eval.config import QuantizationConfig
from lamp_eval.errors import UserError
from recipes.model_source import load_tokenizer

PARITY_PROMPT = "The film was directed in 1998 by a woman who had never seen the sea. Its tag is"
# float32 on both sides agrees to about 1e-5 of the largest logit; a lost rope_theta costs 1e-1.
PARITY_TOLERANCE = 1e-2


def build_base(
    model_dir: Path,
    adapter: str | None,
    quantization: QuantizationConfig,
    *,
    dtype: str,
    base_dir: Path,
    report: Callable[[str], None],
) -> float:
    """Writes the MLX checkpoint that user adapters are trained on.

    Args:
        model_dir: a transformers checkpoint.
        adapter: a PEFT adapter, local or on the hub, to merge; None: the model as it is.
        quantization: bits, group size and the embedding's bits.
        dtype: of the merged weights, and so of the quantization's scales.
        base_dir: an existing, empty directory.
        report: called with a line for each step.

    Returns:
        The largest difference of the logits of torch and MLX, both in float32 before
        quantization, relative to the largest logit.

    Raises:
        UserError: the adapter does not fit the model, or the logits differ.
    """
    merged_dir = base_dir / "merged"
    report("merging in float32" if adapter else "converting")
    expected = _merge(model_dir, adapter, merged_dir)
    report("comparing the logits of torch and MLX")
    model, config = load_model(merged_dir)
    prompt = mx.array(_prompt_ids(model_dir))[None]
    found = np.array(model(prompt).astype(mx.float32))[0]
    error = parity_error(expected, found)
    if not error <= PARITY_TOLERANCE:
        raise UserError(
            expected=f"the same logits from torch and MLX within {PARITY_TOLERANCE:.0%}",
            found=f"a difference of {error:.1%} of the largest logit",
            where=f"the conversion of {model_dir} to MLX, before quantization",
            fix="a parameter of config.json is lost in the conversion (rope_theta, most often); "
            "compare the two config.json, or choose another model",
        )
    report(f"quantizing ({quantization.name})")
    model.set_dtype(getattr(mx, dtype))
    if quantization.bits is not None:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the bits per weight
            model, config = quantize_model(
                model,
                config,
                group_size=quantization.group_size,
                bits=quantization.bits,
                quant_predicate=_predicate(quantization),
            )
    save_model(base_dir, model, donate_model=True)
    save_config(config, base_dir / "config.json")
    load_tokenizer(model_dir).save_pretrained(base_dir)
    shutil.rmtree(merged_dir)
    return error


def parity_error(expected: np.ndarray, found: np.ndarray) -> float:
    """Largest absolute difference of two arrays of logits over the largest expected magnitude."""
    return float(np.abs(expected - found).max() / np.abs(expected).max())


def _merge(model_dir: Path, adapter: str | None, merged_dir: Path) -> np.ndarray:
    """Writes the merged float32 checkpoint; returns its logits (T, V) on the parity prompt."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    prompt = torch.tensor([_prompt_ids(model_dir)])
    with torch.inference_mode():
        logits = model(prompt).logits[0]
    if adapter is not None:
        before = logits
        model = _with_adapter(model, adapter).merge_and_unload()
        with torch.inference_mode():
            logits = model(prompt).logits[0]
        if torch.equal(before, logits):
            raise UserError(
                expected="a task adapter that changes the logits",
                found="the same logits with and without it",
                where=f"the task adapter {adapter}",
                fix="check that it was trained, and for this model",
            )
    model.save_pretrained(merged_dir)
    _restore_rope_theta(merged_dir / "config.json")
    return logits.numpy()


def _with_adapter(model: Any, adapter: str) -> Any:
    """The model with a PEFT adapter, every tensor of which found its place.

    PEFT itself only warns about tensors that it cannot place.
    """
    try:
        saved = load_peft_weights(adapter, device="cpu")
        model = PeftModel.from_pretrained(model, adapter)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UserError(
            expected="a PEFT adapter for this model: a directory, or an id on the hub",
            found=str(error).splitlines()[0],
            where=f"the task adapter {adapter}",
            fix="check adapter.task.path, and that the adapter was trained for this model",
        ) from error
    loaded = get_peft_model_state_dict(model)
    odd = sorted(
        name
        for name in saved.keys() | loaded.keys()
        if name not in saved
        or name not in loaded
        or not torch.equal(saved[name].float(), loaded[name].float())
    )
    if odd:
        raise UserError(
            expected="every tensor of the adapter in its place in the model",
            found=f"{len(odd)} tensors that are not, e.g. {odd[0]}",
            where=f"the task adapter {adapter}",
            fix="choose an adapter that was trained for this model",
        )
    return model


def _restore_rope_theta(path: Path) -> None:
    """Writes rope_theta at the top level as well.

    transformers ≥ 5 writes it under `rope_parameters`; mlx-lm reads the top level and silently
    takes 10000 where it finds nothing.
    """
    config = json.loads(path.read_text())
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        config.setdefault("rope_theta", rope["rope_theta"])
        if rope.get("rope_type", "default") != "default":
            config.setdefault("rope_scaling", rope)
    path.write_text(json.dumps(config, indent=2))


def _prompt_ids(model_dir: Path) -> list[int]:
    ids: list[int] = load_tokenizer(model_dir).encode(PARITY_PROMPT)
    return ids


def _predicate(quantization: QuantizationConfig) -> Callable[[str, Any], bool | dict[str, Any]]:
    def choose(path: str, module: Any) -> bool | dict[str, Any]:
        if not path.endswith(("embed_tokens", "lm_head")):
            return True
        if quantization.embedding_bits is None:
            return False
        return {
            "group_size": quantization.group_size,
            "bits": quantization.embedding_bits,
            "mode": "affine",
        }

    return choose
