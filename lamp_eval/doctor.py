"""The device under examination: `python -m lamp_eval.doctor`.

Which path a gradient takes through the quantized base is measured, once per device, release of MLX
and model: a path whose gradients are wrong is never used, and `auto` is the fastest of the others.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lamp_eval import environment
from lamp_eval.child import Child
from lamp_eval.config import QuantizationConfig
from lamp_eval.errors import UserError, fail
from lamp_eval.layers import Layer, quantized_layers, smollm3_layers
from lamp_eval.store import key_hash

# Raised when the examination itself changes: older outcomes are then measured again.
_VERSION = 1


@dataclass(frozen=True)
class Backward:
    """Which path the gradients take, and what was measured of all.

    Attributes:
        path: one of `BACKWARD_PATHS`.
        requested: the option, `auto` or a path.
        dtype: of activations and gradients.
        seconds: by path, of a model's frozen products, forward and backward, for 64 tokens.
        errors: by path, the largest over all shapes, relative to the largest value.
        mistakes: by path, what it gets wrong; such a path is not used.
        notes: why a path is not considered.
    """

    path: str
    requested: str
    dtype: str
    seconds: dict[str, float]
    errors: dict[str, float]
    mistakes: dict[str, list[str]]
    notes: list[str]


def choose_backward(
    requested: str, layers: Sequence[Layer], dtype: str, budget_gb: float | None = None
) -> Backward:
    """Examines this device, or remembers it, and chooses.

    Args:
        requested: `auto` or a path.
        layers: the model's quantized layers; empty if it is not quantized.
        dtype: what the model computes in.
        budget_gb: of memory; None: what MLX says there is.

    Raises:
        UserError: the requested path, or every path, gets something wrong here.
    """
    if not layers:
        path = "resident" if requested == "auto" else requested
        return Backward(path, requested, dtype, {}, {}, {}, ["no layer is quantized"])
    found = examination(layers, dtype)
    mistakes = {path: wrong for path in found if (wrong := _mistakes(found[path]["checks"]))}
    if requested in mistakes or len(mistakes) == len(found):
        wrong = mistakes[requested if requested in mistakes else next(iter(mistakes))]
        raise UserError(
            expected="right gradients through the quantized layers on this device",
            found=f"{len(wrong)} wrong, among them: {wrong[0]}",
            where=f"option on_device.backward={requested}, {dtype}",
            fix="choose on_device.backward=auto, and run python -m lamp_eval.doctor to see all",
        )
    seconds = {path: found[path]["seconds"] for path in found if "seconds" in found[path]}
    allowed, notes = dict(seconds), []
    dense, limit = _dense_bytes(layers, dtype), min(_memory_bytes(), 1e9 * (budget_gb or math.inf))
    if 2 * dense > limit and len(allowed) > 1 and allowed.pop("resident", None):
        notes.append(f"resident: {dense / 1e9:.1f} GB of {limit / 1e9:.1f} GB, more than half")
    path = fastest(allowed) if requested == "auto" else requested
    errors = {path: max(check["error"] for check in found[path]["checks"]) for path in found}
    return Backward(path, requested, dtype, seconds, errors, mistakes, notes)


def _measured(layers: Sequence[Layer], dtype: str) -> dict[str, dict[str, Any]]:
    """In a process of its own, which gives its memory back."""
    with Child() as child:
        found: dict[str, dict[str, Any]] = child.run(
            "on_device.probe:examine", layers, dtype, report=lambda path: None
        )
    return found


def fastest(seconds: Mapping[str, float]) -> str:
    """The fastest path; within a tenth the one that needs less memory, which comes first."""
    limit = 1.1 * min(seconds.values())
    return next(path for path, taken in seconds.items() if taken <= limit)


def examination(
    layers: Sequence[Layer], dtype: str, *, fresh: bool = False
) -> dict[str, dict[str, Any]]:
    """What `on_device.probe.examine` finds; kept in the cache, so that `auto` stays what it is.

    Args:
        layers: the model's quantized layers.
        dtype: what the model computes in.
        fresh: measure again.
    """
    key = {
        "version": _VERSION,
        "mlx": environment.versions("mlx"),
        "device": environment.device(),
        "layers": [asdict(layer) for layer in layers],
        "dtype": dtype,
    }
    path = environment.cache_dir() / "backward" / f"{key_hash(key)}.json"
    if not fresh and path.is_file():
        found: dict[str, dict[str, Any]] = json.loads(path.read_text())["paths"]
        return found
    found = _measured(layers, dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump({"key": key, "paths": found}, file, indent=1)
    os.replace(file.name, path)
    return found


def _mistakes(checks: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{check['shape']}: error {check['error']:.2g}, {check['mistake']} ({check['issue']})"
        for check in checks
        if check["mistake"]
    ]


def _dense_bytes(layers: Sequence[Layer], dtype: str) -> int:
    item = 4 if dtype == "float32" else 2
    return sum(item * layer.count * layer.n_out * layer.n_in for layer in layers)


def _memory_bytes() -> float:
    from on_device import kernel

    limits = kernel.limits()
    return limits.get("max_recommended_working_set_size") or max(limits.values(), default=math.inf)


# The command line


def main(arguments: Sequence[str] | None = None) -> None:
    """Shows what this device is and does; exits with 1 where no path is right."""
    parser = argparse.ArgumentParser(
        prog="python -m lamp_eval.doctor",
        description="Examines MLX on this device: which gradients are right, which are fast.",
    )
    parser.add_argument("--model", type=Path, help="checkpoint whose layers are measured, not yet "
                        "quantized (default: the layers of SmolLM3-3B)")  # fmt: skip
    parser.add_argument("--bits", type=int, choices=(2, 3, 4, 5, 6, 8), default=4)
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), default=64)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"),
                        help="default: what runs use, float32 on a CPU, else bfloat16")  # fmt: skip
    parser.add_argument(
        "--fresh", action="store_true", help="measure again, and use that from now on"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(arguments)
    try:
        usable = _report(options, _layers(options))
    except UserError as error:
        fail(error)
    if not usable:
        raise SystemExit(1)


def _layers(options: argparse.Namespace) -> list[Layer]:
    bits, group_size = options.bits, options.group_size
    if options.model is None:
        return smollm3_layers(bits, group_size)
    quantization = QuantizationConfig("", bits, group_size, embedding_bits=bits)
    layers = quantized_layers(options.model, quantization)
    if not layers:
        raise UserError(
            expected="a checkpoint with layers to quantize, in *.safetensors",
            found="none",
            where=f"--model {options.model}",
            fix="name the folder of a transformers checkpoint",
        )
    return layers


def _report(options: argparse.Namespace, layers: Sequence[Layer]) -> bool:
    from on_device import kernel

    dtype = options.dtype or environment.mlx_dtype("bfloat16")
    repaired = kernel.this_kernel()
    found = examination(layers, dtype, fresh=options.fresh)
    try:
        chosen: Backward | UserError = choose_backward("auto", layers, dtype)
    except UserError as error:
        chosen = error
    facts = {
        "versions": {"python": platform.python_version()}
        | environment.versions("mlx", "mlx-lm", "torch"),
        "device": environment.device(),
        "repaired_kernel": repaired._asdict(),
        "memory_bytes": dict(kernel.limits()),
        "dtype": dtype,
    }
    if options.json:
        auto = asdict(chosen) if isinstance(chosen, Backward) else None
        print(json.dumps(facts | {"paths": found, "auto": auto}, indent=2))
        return auto is not None
    console = Console()
    _show_facts(console, facts)
    _show_paths(console, found, dtype)
    if isinstance(chosen, UserError):
        console.print(str(chosen), style="red", markup=False)
        return False
    for note in chosen.notes:
        console.print(note, style="yellow", markup=False)
    console.print(f"on_device.backward=auto takes [bold]{chosen.path}[/]")
    return True


def _show_facts(console: Console, facts: Mapping[str, Any]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("versions", ", ".join(f"{n} {v}" for n, v in facts["versions"].items()))
    device = facts["device"]
    table.add_row("device", f"{device['mlx']}, {device['system']}")
    kernel = facts["repaired_kernel"]
    table.add_row(
        "repaired kernel", f"{'yes' if kernel['dispatched'] else 'no'}: {kernel['reason']}"
    )
    blas = {
        "torch": "torch's, loaded before MLX",
        "reference": "the reference BLAS, about 20 times slower: see the warning",
        "system": "the system's",
    }
    table.add_row("BLAS on the CPU", blas[device["blas"]])
    memory = [f"{name} {size / 1e9:.1f} GB" for name, size in facts["memory_bytes"].items()]
    table.add_row("memory", ", ".join(memory) or "MLX does not say")
    table.add_row("dtype", facts["dtype"])
    console.print(table)


def _show_paths(console: Console, found: Mapping[str, Mapping[str, Any]], dtype: str) -> None:
    table = Table(title=f"gradients in {dtype}: largest error over the largest value",
                  title_justify="left")  # fmt: skip
    table.add_column("dY · W", no_wrap=True)
    for path in found:
        table.add_column(path, justify="right")
    for row in zip(*(found[path]["checks"] for path in found), strict=True):
        cells = [f"[red]{c['error']:.1e}[/]" if c["mistake"] else f"{c['error']:.1e}" for c in row]
        table.add_row(row[0]["shape"], *cells)
    table.add_section()
    seconds = [found[path].get("seconds") for path in found]
    cells = ["not used" if taken is None else f"{taken:.3f} s" for taken in seconds]
    table.add_row("all frozen products of the model, 64 tokens", *cells)
    console.print(table)
    for path in found:
        for line in _mistakes(found[path]["checks"]):
            console.print(f"{path}: {line}", style="red", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
