"""Whether a path's gradients are right on this device, and how long its products take.

Known mistakes of MLX's kernels, each of which gave wrong numbers without a word, decide the shapes:
a gradient dX[M, N] = dY[M, K] · W[K, N] through a layer of K outputs and N inputs.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lamp_eval.config import BACKWARD_PATHS
from lamp_eval.layers import Layer
from on_device.backward import use_path

# The largest error over the largest value of the product. bfloat16 and float16 round the result to
# 2⁻⁹ and 2⁻¹² of itself; sums in them, as MLX's CPU has it, are wrong by 5 % and more.
TOLERANCE = {"float32": 1e-3, "float16": 4e-3, "bfloat16": 1.5e-2}
_N_TIMES = 3
_ROWS_AT_ONCE = 8192  # of the reference's weights, to bound its memory


@dataclass(frozen=True)
class Case:
    """A gradient to check, of M rows, and which mistake of MLX it would show."""

    n_rows: int
    layer: Layer
    issue: str


def _cases() -> tuple[Case, ...]:
    nax = "mlx #4051, the kernel on matrix units before its repair"
    cases = [Case(64, Layer(512, 2048), nax), Case(64, Layer(2048, 512), nax)]
    rows = (4, 31, 32, 33, 63, 65, 97, 127, 129, 250)
    cases += [Case(n, Layer(512, 2048), f"{nax}: rows that fill no tile") for n in rows]
    cases += [Case(64, Layer(k, 128, 32), "mlx #4201, group size 32") for k in (64, 128, 256)]
    split = "mlx #4250, a vector's product in parts (up to 0.32.0)"
    cases += [Case(1, Layer(1024, n, 32), split) for n in (32, 96)]
    cases += [Case(n, Layer(2048, 128), "mlx #3497, two or three rows (up to 0.31.2)")
              for n in (2, 3)]  # fmt: skip
    cases += [Case(32, Layer(k, 128), "mlx #2355, a number of terms that fills no tile")
              for k in (33, 48, 80)]  # fmt: skip
    return tuple(cases)


CASES = _cases()


@dataclass(frozen=True)
class Check:
    """One gradient compared with the float32 reference.

    Attributes:
        case: which.
        error: the largest error over the largest magnitude of the reference; the largest float if
            a value is not finite, as JSON has no word for infinity.
        mistake: what the wrong values look like; "" if the gradient is right.
    """

    case: Case
    error: float
    mistake: str


MakeLayer = Callable[[nn.QuantizedLinear], Callable[[mx.array], mx.array]]


def make_layer(path: str) -> MakeLayer:
    """What makes the layer of a path out of a quantized one."""

    def make(layer: nn.QuantizedLinear) -> Callable[[mx.array], mx.array]:
        holder = nn.Module()
        holder.layer = layer
        made: Callable[[mx.array], mx.array] = use_path(holder, path).layer
        return made

    return make


def probe(make: MakeLayer, dtype: str, cases: Sequence[Case] = CASES) -> list[Check]:
    """Compares a path's gradients with float32 products of contiguous dequantized weights.

    Args:
        make: as `make_layer` gives it.
        dtype: of activations and scales: `float32`, `float16` or `bfloat16`.
        cases: the gradients to check.
    """
    return [_check(make, dtype, case) for case in cases]


def _check(make: MakeLayer, dtype: str, case: Case) -> Check:
    layer = _random_layer(case.layer, dtype)
    cotangent = _random((case.n_rows, case.layer.n_out), 1, dtype)
    primal = _random((case.n_rows, case.layer.n_in), 2, dtype)
    expected = _reference(layer, cotangent)
    _, gradients = mx.vjp(make(layer), [primal], [cotangent])
    found = np.array(gradients[0].astype(mx.float32))
    if found.shape != expected.shape or not np.isfinite(found).all():
        return Check(case, sys.float_info.max, "not finite")
    errors = np.abs(found - expected) / np.abs(expected).max()
    return Check(case, float(errors.max()), _mistake(found, expected, errors > TOLERANCE[dtype]))


def _reference(layer: nn.QuantizedLinear, cotangent: mx.array) -> np.ndarray:
    """The gradient (M, N) in float32, where codes, scales and the rounded dY are exact."""
    rows = np.array(cotangent.astype(mx.float32))
    weight = np.array(layer.weight)
    scales, biases = (np.array(a.astype(mx.float32)) for a in (layer.scales, layer.biases))
    total = np.zeros((len(rows), scales.shape[1] * layer.group_size), np.float32)
    for start in range(0, len(weight), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        # Arrays of their own: mlx 0.32.1 dequantizes slices wrongly (#4370).
        packed = (mx.array(array[part]) for array in (weight, scales, biases))
        total += rows[:, part] @ np.array(mx.dequantize(*packed, layer.group_size, layer.bits))
    return total


def _mistake(found: np.ndarray, expected: np.ndarray, wrong: np.ndarray) -> str:
    """What wrong values look like, from where they are."""
    if not wrong.any():
        return ""
    if not found.any():
        return "all zeros"
    rows, columns = np.flatnonzero(wrong.any(axis=1)), np.flatnonzero(wrong.any(axis=0))
    n_rows, n_columns = wrong.shape
    if 0 < n_rows // 32 * 32 <= rows[0]:
        return f"rows from {rows[0]} on are wrong, behind the last whole tile"
    if columns[0] > 0 and columns[0] % 32 == 0 and len(columns) > (n_columns - columns[0]) // 2:
        return f"columns from {columns[0]} on are wrong"
    if np.linalg.norm(found - expected) < 0.5 * np.linalg.norm(expected):
        return "inexact, as sums in the dtype of the activations are, or a few missing terms"
    return "wrong everywhere, as in a wrong layout of the weights"


def time_paths(layers: Sequence[Layer], dtype: str, paths: Sequence[str]) -> dict[str, float]:
    """Seconds of a model's frozen products, forward and backward, for a prompt of 64 tokens.

    The paths take turns, layer by layer, so that a slower spell of the machine falls on all.
    """
    seconds = dict.fromkeys(paths, 0.0)
    for layer in layers:
        x = _random((layer.n_tokens, layer.n_in), 2, dtype)
        y = _random((layer.n_tokens, layer.n_out), 1, dtype)
        mx.eval(x, y)
        ready = {path: make_layer(path)(_random_layer(layer, dtype)) for path in paths}
        times: dict[str, list[float]] = {path: [] for path in paths}
        for _ in range(1 + _N_TIMES):
            for path, product in ready.items():
                start = time.perf_counter()
                mx.eval(mx.vjp(product, [x], [y]))
                times[path].append(time.perf_counter() - start)
            # No need to see again how slow a path is that takes a second and many times the best.
            limit = max(1.0, 8 * min(times[path][-1] for path in ready))
            ready = {p: product for p, product in ready.items() if times[p][-1] < limit}
        for path in paths:
            # The first turn makes kernels, and dense weights.
            seconds[path] += layer.count * statistics.median(times[path][1:] or times[path])
    return seconds


def examine(
    layers: Sequence[Layer], dtype: str, *, report: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """All paths on this device: what each gets wrong, and how long it takes.

    Args:
        layers: of the model that is going to be used.
        dtype: what it computes in.
        report: called with each path before its gradients are checked.

    Returns:
        Plain values by path: `checks` (`shape`, `issue`, `error`, `mistake` of each), and `seconds`
        (see `time_paths`) of a path without mistakes.
    """
    own = [Case(layer.n_tokens - 1, layer, "a layer of this model") for layer in layers]
    found: dict[str, dict[str, Any]] = {}
    for path in BACKWARD_PATHS:
        report(path)
        checks = probe(make_layer(path), dtype, [*CASES, *own])
        found[path] = {"checks": [_plain(check) for check in checks]}
    right = [
        path for path in BACKWARD_PATHS if not any(c["mistake"] for c in found[path]["checks"])
    ]
    for path, seconds in time_paths(layers, dtype, right).items():
        found[path]["seconds"] = seconds
    return found


def _plain(check: Check) -> dict[str, Any]:
    case = check.case
    shape = f"{case.n_rows} rows, {case.layer}"
    return {"shape": shape, "issue": case.issue, "error": check.error, "mistake": check.mistake}


def _random_layer(shape: Layer, dtype: str) -> nn.QuantizedLinear:
    """Any bits are codes; each group has a scale and an offset of its own, none is symmetric."""
    layer = nn.QuantizedLinear(shape.n_in, shape.n_out, False, shape.group_size, shape.bits)
    size = shape.n_out, shape.n_in * shape.bits // 32
    layer.weight = mx.array(np.random.default_rng(0).integers(0, 2**32, size, dtype=np.uint32))
    groups = (shape.n_out, shape.n_in // shape.group_size)
    scales = mx.random.uniform(0.5, 1.5, groups, key=mx.random.key(1)) * 2.0**-shape.bits
    offsets = mx.random.uniform(0.2, 0.6, groups, key=mx.random.key(2))
    layer.scales = scales.astype(getattr(mx, dtype))
    layer.biases = (-offsets).astype(getattr(mx, dtype))
    mx.eval(layer.parameters())
    return layer


def _random(shape: tuple[int, int], seed: int, dtype: str) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(getattr(mx, dtype))
