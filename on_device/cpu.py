"""What MLX's CPU backend computes slowly on Linux, from operations that it computes fast.

Its exponential works on one value at a time, 13 ns each; sums and products are vectorized. The SiLU
of the MLP and the softmax of the attention, a third of a small model's forward pass, are therefore
built on an exponential of sums and products: four times faster, with the same rounding error.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models import activations, base

_ROUND = 1.5 * 2**23  # added to a float32 it leaves an integer in the lowest bits
_TAYLOR = [1 / math.factorial(n) for n in range(7, -1, -1)]  # enough for |x| ≤ ln 2 / 2


@mx.custom_function
def exp(x: mx.array) -> mx.array:
    """The exponential of float32 values, relative error as of `mx.exp`; x is cut to ±87."""
    scaled = mx.clip(x, -87.0, 87.0) * math.log2(math.e)
    rounded = scaled + _ROUND
    rest = (scaled - (rounded - _ROUND)) * math.log(2)
    power = mx.array(_TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        power = power * rest + coefficient
    exponent = mx.left_shift(rounded.view(mx.int32), 23)
    return (power.view(mx.int32) + exponent).view(mx.float32)


@exp.vjp
def _(x: mx.array, cotangent: mx.array, y: mx.array) -> mx.array:
    return cotangent * y


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """`silu(gate) · x`; fast in float32."""
    if gate.dtype != mx.float32:
        return activations.swiglu(gate, x)
    return gate / (1 + exp(-gate)) * x


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
    **others: Any,
) -> mx.array:
    """Softmax attention (B, H, T, D) with keys and values (B, K, S, D), H a multiple of K.

    Fast in float32, without a quantized cache.
    """
    if others or hasattr(cache, "bits") or queries.dtype != mx.float32:
        return base.scaled_dot_product_attention(
            queries, keys, values, cache, scale=scale, mask=mask, **others
        )
    n_rows, n_heads, length, depth = queries.shape
    n_keys = keys.shape[1]
    grouped = (queries * scale).reshape(n_rows, n_keys, -1, depth)  # (B, K, H/K · T, D)
    scores = grouped @ keys.swapaxes(-1, -2)  # (B, K, H/K · T, S)
    if mask is not None:
        if isinstance(mask, str):
            mask = base.create_causal_mask(length, keys.shape[2] - length)
        scores = scores.reshape(n_rows, n_keys, n_heads // n_keys, length, -1)
        mask = mask[:, :, None] if mask.ndim == 4 else mask
        scores = mx.where(mask, scores, -1e9) if mask.dtype == mx.bool_ else scores + mask
        scores = scores.reshape(n_rows, n_keys, -1, scores.shape[-1])
    weights = exp(scores - mx.stop_gradient(scores.max(axis=-1, keepdims=True)))
    out = (weights @ values) / weights.sum(axis=-1, keepdims=True)
    return out.reshape(n_rows, n_heads, length, depth)


def speed_up(architecture: ModuleType) -> None:
    """Puts these functions in the place of mlx-lm's in the module of a model."""
    for name, ours in (("swiglu", swiglu), ("scaled_dot_product_attention", attention)):
        if hasattr(architecture, name):
            setattr(architecture, name, ours)
