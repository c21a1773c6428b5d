"""Sampling as in One PEFT Per User's released code: transformers' filters, in transformers' order.

mlx-lm's own samplers filter in another order, and draw from a state that the whole batch shares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import mlx.core as mx

TEMPERATURE, TOP_K, TOP_P = 0.1, 10, 0.9


def candidates(logits: mx.array) -> tuple[mx.array, mx.array]:
    """What temperature, then top-k, then top-p leave of the next token's distribution.

    As in transformers, top-k keeps whatever equals the k-th largest, and top-p removes from the
    smallest up while their sum is at most 1 − p. Which of equal ones is left to chance there: here
    the lower id goes first.

    Args:
        logits: (B, V), V ≥ 10.

    Returns:
        Token ids (B, N), ascending, N at least 10 and more where logits are equal; and their
        probabilities (B, N), 0 for those that are not left.
    """
    scores = logits.astype(mx.float32) / TEMPERATURE
    smallest = mx.topk(scores, TOP_K, axis=-1).min(axis=-1, keepdims=True)  # (B, 1)
    # Only these few are sorted: to sort the vocabulary would take longer than a small model's step.
    n = int((scores >= smallest).sum(axis=-1).max().item())
    ids = mx.sort(mx.argpartition(scores, -n, axis=-1)[:, -n:], axis=-1)  # (B, N)
    scores = mx.take_along_axis(scores, ids, axis=-1)
    scores = mx.where(scores < smallest, -mx.inf, scores)

    order = mx.argsort(scores, axis=-1)  # stable: equal ones by id
    ascending = mx.softmax(mx.take_along_axis(scores, order, axis=-1), axis=-1)
    kept = mx.cumsum(ascending, axis=-1) > 1 - TOP_P
    kept = mx.take_along_axis(kept, mx.argsort(order, axis=-1), axis=-1)  # by id again
    return ids, mx.softmax(mx.where(kept, scores, -mx.inf), axis=-1)


def sample(logits: mx.array, numbers: Sequence[float]) -> mx.array:
    """Draws a token id for each row, (B,).

    Args:
        logits: (B, V).
        numbers: one of each row, in [0, 1), see `random_number`. The same number and logits give
            the same token, and nearly the same logits nearly always.
    """
    ids, probabilities = candidates(logits)
    # Rounding may let the sum creep on where the probability is 0.
    sums = mx.where(probabilities > 0, mx.cumsum(probabilities, axis=-1), 0)
    reached = sums > mx.array(numbers)[:, None] * sums.max(axis=-1, keepdims=True)
    first = mx.argmax(reached, axis=-1, keepdims=True)
    return mx.take_along_axis(ids, first, axis=-1)[:, 0]


def random_number(seed: int, step: int) -> float:
    """A number in [0, 1) for a query's n-th new token, whatever else is drawn before or beside it.

    It has 23 bits, so that in float32 its product with a positive sum stays below that sum.
    """
    digest = hashlib.sha256(f"{seed}\0{step}".encode()).digest()
    return (int.from_bytes(digest[:4], "big") >> 9) / 2**23
