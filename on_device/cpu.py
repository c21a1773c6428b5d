"""What MLX's CPU backend computes slowly on Linux, from operations that it computes fast.

Its exponential works on one value at a time, 13 ns each; sums and products are vectorized. The SiLU
of the MLP and the softmax of the attention, a third of a small model's forward pass, are therefore
built on an exponential of sums and products: four times faster, with the same rounding error. Both
have gradients of their own, for which they keep less than automatic differentiation does.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models import activations, base

_ROUND = 1.5 * 2**23  # added to a float32 it leaves an integer in the lowest bits
# Of 2^x on [−½, ½], highest power first: smallest largest relative error (2e-9) with 2^0 = 1.
_POWER = [
    0.00015353361677,
    0.00133988744565,
    0.00961843738115,
    0.05550332472993,
    0.24022647913613,
    0.69314720285515,
    1.0,
]
# e^−64 is nothing beside 1, and its products are no denormal numbers, with which some processors
# compute fifty times slower.
_LIMIT = 64.0
_QUERIES = 128  # of a causal mask computed at a time: later keys are not looked at


def exp(x: mx.array) -> mx.array:
    """The exponential of float32 values, relative error as of `mx.exp`; x is cut to ±64."""
    scaled = mx.clip(x, -_LIMIT, _LIMIT) * math.log2(math.e)
    rounded = scaled + _ROUND
    rest = scaled - (rounded - _ROUND)
    power = mx.array(_POWER[0])
    for coefficient in _POWER[1:]:
        power = power * rest + coefficient
    exponent = mx.left_shift(rounded.view(mx.int32), 23)
    return (power.view(mx.int32) + exponent).view(mx.float32)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """`silu(gate) · x`; fast in float32, and of all it computes only its arguments are kept."""
    if gate.dtype != mx.float32:
        return activations.swiglu(gate, x)
    return _swiglu(gate, x)


@mx.custom_function
def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    return gate / (1 + exp(-gate)) * x


@_swiglu.vjp
def _(primals: tuple[mx.array, mx.array], cotangent: mx.array, y: mx.array) -> list[mx.array]:
    # Not before the gradient arrives: else all blocks' would be computed first, and held.
    gate, x = mx.depends(list(primals), [cotangent])
    sigmoid = 1 / (1 + exp(-gate))
    silu = gate * sigmoid
    return [cotangent * x * (sigmoid + silu * (1 - sigmoid)), cotangent * silu]


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

    Fast in float32, without a quantized cache. For the gradient the weights (B, H, T, S) are kept.

    With the mask `causal` the last query sees all keys, and of the weights little more than the
    half that is not zero is computed.
    """
    if others or hasattr(cache, "bits") or queries.dtype != mx.float32:
        return base.scaled_dot_product_attention(
            queries, keys, values, cache, scale=scale, mask=mask, **others
        )
    n_rows, n_heads, length, depth = queries.shape
    n_keys, n_seen = keys.shape[1:3]
    grouped = (queries * scale).reshape(n_rows, n_keys, -1, length, depth)
    if mask is None or isinstance(mask, mx.array):
        out = _attend(grouped, keys, values, mask)
    else:
        n_before, parts = n_seen - length, []
        for start in range(0, length, _QUERIES):
            part = grouped[..., start : start + _QUERIES, :]
            end = n_before + start + part.shape[3]
            causal = base.create_causal_mask(part.shape[3], n_before + start)
            parts.append(_attend(part, keys[:, :, :end], values[:, :, :end], causal))
        out = mx.concatenate(parts, axis=3)
    return out.reshape(n_rows, n_heads, length, -1)


def _attend(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None) -> mx.array:
    """Softmax attention of scaled queries (B, K, H/K, T, D); the mask is not differentiated."""
    shape = (*queries.shape[:4], keys.shape[2])  # (B, K, H/K, T, S)
    if mask is not None and mask.ndim == 4:
        mask = mask[:, :, None]  # (B, 1, 1, T, S)

    @mx.custom_function
    def attend(queries: mx.array, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        scores = queries @ keys.swapaxes(-1, -2)
        if mask is not None:
            full = scores.reshape(shape)
            full = mx.where(mask, full, -1e9) if mask.dtype == mx.bool_ else full + mask
            scores = full.reshape(scores.shape)
        weights = exp(scores - scores.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        return weights @ values, weights

    @attend.vjp
    def _(
        primals: tuple[mx.array, ...],
        cotangents: tuple[mx.array, ...],
        outputs: tuple[mx.array, ...],
    ) -> list[mx.array]:
        (queries, keys, values), (out, weights), cotangent = primals, outputs, cotangents[0]
        by_weights = cotangent @ values.swapaxes(-1, -2)
        mean = (cotangent * out).sum(axis=-1, keepdims=True)  # of by_weights, so weighted
        by_scores = weights * (by_weights - mean)
        return [
            by_scores @ keys,
            by_scores.swapaxes(-1, -2) @ queries,
            weights.swapaxes(-1, -2) @ cotangent,
        ]

    together = queries.reshape(*shape[:2], -1, queries.shape[-1])  # (B, K, H/K · T, D)
    return attend(together, keys, values)[0].reshape(*shape[:4], -1)


def speed_up(architecture: ModuleType) -> None:
    """Puts these functions in the place of mlx-lm's in the module of a model."""
    for name, ours in (("swiglu", swiglu), ("scaled_dot_product_attention", attention)):
        if hasattr(architecture, name):
            setattr(architecture, name, ours)
