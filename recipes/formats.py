"""Adapters and bases between mlx-lm and transformers + peft: `python -m recipes.formats`.

| | mlx-lm | PEFT |
|---|---|---|
| A | `….q_proj.lora_a` (in, r) | `base_model.model.….q_proj.lora_A.weight` (r, in) |
| B | `….q_proj.lora_b` (r, out) | `base_model.model.….q_proj.lora_B.weight` (out, r) |
| scale | `scale` | `lora_alpha / r`, or `lora_alpha / √r` with `use_rslora` |
| where | the last `num_layers` blocks, `keys` in each | `layers_to_transform`, `target_modules` |
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, load_model
from peft import LoraConfig

from lamp_eval.errors import UserError, fail, raise_if_any

MLX_WEIGHTS, PEFT_WEIGHTS = "adapters.safetensors", "adapter_model.safetensors"
CONFIG = "adapter_config.json"  # of both formats

_PEFT_PREFIX = "base_model.model."
_BLOCK = re.compile(r"\.layers\.(\d+)\.(.+)$")
# What mlx-lm's format has no word for, and the value that PEFT gives to its absence.
_ABSENT = {
    "use_dora": False, "use_qalora": False, "use_bdlora": None, "alora_invocation_tokens": None,
    "bias": "none", "lora_bias": False, "modules_to_save": None, "fan_in_fan_out": False,
    "rank_pattern": {}, "alpha_pattern": {}, "layer_replication": None,
    "trainable_token_indices": None, "target_parameters": None,
}  # fmt: skip


def to_peft(adapter_dir: Path, peft_dir: Path, *, base: str | None = None) -> None:
    """Writes an adapter of mlx-lm's format in PEFT's; every value is kept.

    Args:
        adapter_dir: with `adapters.safetensors` and `adapter_config.json`.
        peft_dir: made if it is not there.
        base: the model it belongs to, for the record.

    Raises:
        UserError: a file is missing or damaged, or holds something else than LoRA.
    """
    config, tensors = _read(adapter_dir, MLX_WEIGHTS)
    parameters = config.get("lora_parameters") or {}
    where = str(adapter_dir / CONFIG)
    if config.get("fine_tune_type") != "lora" or not {"rank", "scale"} <= set(parameters):
        raise UserError(
            expected="fine_tune_type 'lora' with lora_parameters of a rank and a scale",
            found=f"{config.get('fine_tune_type')!r} with {sorted(parameters)}",
            where=where,
            fix="name the folder of a LoRA adapter of mlx-lm",
        )
    rank = int(parameters["rank"])
    places = _places(tensors, ("lora_a", "lora_b"), rank, str(adapter_dir / MLX_WEIGHTS))
    peft = LoraConfig(
        r=rank,
        lora_alpha=parameters["scale"] * rank,
        lora_dropout=parameters.get("dropout", 0.0),
        target_modules=sorted({name.rsplit(".", 1)[-1] for _, name in places}),
        layers_to_transform=sorted({block for block, _ in places}),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    peft_dir.mkdir(parents=True, exist_ok=True)
    renamed = {}
    for name, tensor in tensors.items():
        layer, side = name.rsplit(".", 1)
        renamed[f"{_PEFT_PREFIX}{layer}.lora_{side[-1].upper()}.weight"] = mx.contiguous(tensor.T)
    mx.save_safetensors(str(peft_dir / PEFT_WEIGHTS), renamed, {"format": "pt"})
    peft.save_pretrained(str(peft_dir))


def to_mlx(peft_dir: Path, adapter_dir: Path, *, n_blocks: int) -> None:
    """Writes an adapter of PEFT's format in mlx-lm's; every value is kept.

    Args:
        peft_dir: with `adapter_model.safetensors` and `adapter_config.json`.
        adapter_dir: made if it is not there.
        n_blocks: of the model, whose last blocks the adapter has to be in.

    Raises:
        UserError: a file is missing or damaged, or the adapter has what mlx-lm's format has not.
    """
    config, tensors = _read(peft_dir, PEFT_WEIGHTS)
    where = str(peft_dir / CONFIG)
    problems = [
        UserError(
            expected=f"{option} = {absent!r}: mlx-lm's format has nothing else",
            found=repr(config[option]),
            where=where,
            fix="train the adapter without it",
        )
        for option, absent in _ABSENT.items()
        if config.get(option, absent) not in (absent, None)
    ]
    if config.get("peft_type") != "LORA":
        problems.append(
            UserError(
                expected="peft_type LORA",
                found=repr(config.get("peft_type")),
                where=where,
                fix="name the folder of a LoRA adapter of PEFT",
            )
        )
    raise_if_any(problems)
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    named = {
        name.removeprefix(_PEFT_PREFIX).removesuffix(".weight"): tensor
        for name, tensor in tensors.items()
    }
    flipped = {name: mx.contiguous(tensor.T) for name, tensor in named.items()}
    places = _places(flipped, ("lora_A", "lora_B"), rank, str(peft_dir / PEFT_WEIGHTS))
    blocks, names = {block for block, _ in places}, {name for _, name in places}
    last = set(range(n_blocks - len(blocks), n_blocks))
    if blocks != last or len(places) != len(blocks) * len(names):
        raise UserError(
            expected=f"the same projections in each of the last blocks of {n_blocks}",
            found=f"blocks {sorted(blocks)}, {', '.join(sorted(names))}: {len(places)} layers",
            where=str(peft_dir / PEFT_WEIGHTS),
            fix="check the base, or train the adapter in the last blocks",
        )
    adapter_dir.mkdir(parents=True, exist_ok=True)
    renamed = {
        name[: -len("lora_A")] + name[-len("lora_A") :].lower(): t for name, t in flipped.items()
    }
    mx.save_safetensors(str(adapter_dir / MLX_WEIGHTS), renamed, {"format": "mlx"})
    parameters = {
        "rank": rank,
        "scale": alpha / (rank**0.5 if config.get("use_rslora") else rank),
        "dropout": float(config.get("lora_dropout") or 0.0),
        "keys": sorted(names),
    }
    about = {"fine_tune_type": "lora", "num_layers": len(blocks), "lora_parameters": parameters}
    (adapter_dir / CONFIG).write_text(json.dumps(about, indent=2) + "\n")


def dequantize_base(base_dir: Path, model_dir: Path) -> None:
    """Writes a quantized MLX checkpoint as one that transformers loads: the same values, float32.

    Args:
        base_dir: an MLX checkpoint, quantized or not.
        model_dir: made if it is not there.

    Raises:
        UserError: it is no checkpoint.
    """
    model, config = dequantized(base_dir)
    model_dir.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(model_dir / "model.safetensors"), weights, {"format": "pt"})
    (model_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in base_dir.iterdir():
        if file.name.startswith(
            ("tokenizer", "special_tokens", "chat_template", "generation_config")
        ):
            shutil.copy(file, model_dir / file.name)


def dequantized(base_dir: Path) -> tuple[nn.Module, dict[str, Any]]:
    """A quantized MLX checkpoint in float32 without quantized layers, and its configuration.

    Args:
        base_dir: an MLX checkpoint, quantized or not.

    Returns:
        The model, whose tensors have transformers' names, and `config.json` as transformers reads
        it.

    Raises:
        UserError: it is no checkpoint.
    """
    if not (base_dir / "config.json").is_file():
        raise UserError(
            expected="an MLX checkpoint with a config.json",
            found="none",
            where=str(base_dir),
            fix="name a folder of outputs/stages/bases, or another checkpoint of mlx-lm",
        )
    model, config = load_model(base_dir)
    model.set_dtype(mx.float32)  # scales first: float32 holds every product of code and scale
    own = {k: v for k, v in config.items() if k not in ("quantization", "quantization_config")}
    own |= {"dtype": "float32"}
    own.pop("torch_dtype", None)
    return dequantize_model(model), own


def _read(folder: Path, weights: str) -> tuple[dict[str, Any], dict[str, mx.array]]:
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
        tensors: dict[str, mx.array] = mx.load(str(folder / weights))
        mx.eval(tensors)
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG} holds no object")
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            expected=f"an adapter: {CONFIG} and {weights}",
            found=str(error).splitlines()[0],
            where=str(folder),
            fix="name the folder of an adapter of this format",
        ) from error
    return config, tensors


def _places(
    tensors: Mapping[str, mx.array], sides: tuple[str, str], rank: int, where: str
) -> set[tuple[int, str]]:
    """Block and layer of each pair A (in, r), B (r, out); every tensor is one of a pair."""
    problems, places = [], set()
    for name, tensor in tensors.items():
        layer, _, side = name.rpartition(".")
        found = _BLOCK.search(layer)
        other = f"{layer}.{sides[1 - sides.index(side)]}" if side in sides else None
        axis = 1 if side == sides[0] else 0
        if found is None or other not in tensors or tensor.ndim != 2 or tensor.shape[axis] != rank:
            problems.append(
                UserError(
                    expected=f"pairs of {sides[0]} and {sides[1]} of rank {rank}, in blocks",
                    found=f"{name} {tuple(tensor.shape)}",
                    where=where,
                    fix="export the adapter again",
                )
            )
        else:
            places.add((int(found[1]), found[2]))
    raise_if_any(problems)
    if not places:
        raise UserError(
            expected="tensors of an adapter", found="none", where=where, fix="export it again"
        )
    return places


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; exits with 2 after a user's mistake."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m recipes.formats", description=__doc__, formatter_class=form
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, source, about in (
        ("to-peft", "adapter", "an adapter of mlx-lm's format in PEFT's"),
        ("to-mlx", "adapter", "an adapter of PEFT's format in mlx-lm's"),
        ("dequantize", "base", "a quantized MLX checkpoint as one for transformers, in float32"),
    ):
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument(f"--{source}", type=Path, required=True, help="its folder")
        command.add_argument("--out", type=Path, required=True, help="the folder to write")
        if source == "adapter":
            command.add_argument("--base", type=Path, required=name == "to-mlx",
                                 help="the checkpoint it belongs to")  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        if options.command == "to-peft":
            to_peft(options.adapter, options.out, base=options.base and str(options.base))
        elif options.command == "to-mlx":
            to_mlx(options.adapter, options.out, n_blocks=_n_blocks(options.base))
        else:
            dequantize_base(options.base, options.out)
    except UserError as error:
        fail(error)
    print(options.out)


def _n_blocks(base_dir: Path) -> int:
    try:
        return int(json.loads((base_dir / "config.json").read_text())["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            expected="a checkpoint whose config.json has num_hidden_layers",
            found=str(error),
            where=str(base_dir),
            fix="name the folder of the model that the adapter belongs to",
        ) from error


if __name__ == "__main__":
    main()
