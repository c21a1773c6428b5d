"""Stage 2 as far as it is the same for whoever computes it, MLX or torch.

Initial values, the order of examples and the guards are equal, so that two adapters of one user
differ by their arithmetic alone.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lamp_eval.config import UserAdapterConfig
from lamp_eval.errors import UserError, raise_if_any
from lamp_eval.records import Example

METRICS = "metrics.jsonl"  # beside a user adapter: a row for each optimizer step


@dataclass(frozen=True)
class Training:
    """How the training of one adapter went.

    Attributes:
        rows: per optimizer step `step`, `loss` (nats per answer token), `learning_rate`,
            `gradient_norm` (before clipping), `tokens`, `seconds`, `peak_bytes` (MLX's or CUDA's;
            on a CPU torch does not count them).
        stopped: why it ended before its last step; None: it did not.
        checkpoint: blocks that were recomputed at a time; None: none.
        predicted_peak_bytes: see `on_device.memory`; None without a budget.
    """

    rows: tuple[dict[str, float], ...]
    stopped: str | None
    checkpoint: int | None = None
    predicted_peak_bytes: float | None = None


def initial_values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """A tensor of a fresh adapter: A uniform in ±1/√fan_in as in PEFT and mlx-lm, B zero.

    It depends on the tensor's name and the seed alone, not on which other blocks are adapted.

    Args:
        name: mlx-lm's, e.g. `model.layers.0.self_attn.q_proj.lora_a`.
        shape: (in, r) of A, (r, out) of B.
        seed: the user's own.

    Returns:
        float32 of that shape.
    """
    if not name.endswith("lora_a"):
        return np.zeros(shape, np.float32)
    own = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    bound = shape[0] ** -0.5
    return np.random.default_rng([seed, own]).uniform(-bound, bound, shape).astype(np.float32)


def windows(
    examples: Sequence[Example], recipe: UserAdapterConfig, seed: int
) -> list[list[Example]]:
    """The examples of each optimizer step; a window never crosses the end of an epoch."""
    rng, found = random.Random(seed), []
    for _ in range(recipe.epochs):
        order = rng.sample(range(len(examples)), len(examples))
        for start in range(0, len(order), recipe.accumulation):
            found.append([examples[i] for i in order[start : start + recipe.accumulation]])
    return found


def check_examples(examples: Sequence[Example]) -> None:
    """Raises `UserError` for all examples without a prompt or without an answer."""
    raise_if_any(
        [
            UserError(
                expected="a prompt, and an answer of at least one token behind it",
                found=f"{len(example.tokens)} tokens, the answer from {example.answer_start} on",
                where=f"stage 2, example {i}",
                fix="correct or leave out the record",
            )
            for i, example in enumerate(examples)
            if not 0 < example.answer_start < len(example.tokens)
        ]
    )


def trouble(
    loss: float, gradient_norm: float, rows: Sequence[Mapping[str, float]], n_tokens: int
) -> str | None:
    """Why training should not go on; None: it should.

    A loss explodes if it is thrice the first one and twice that of a guess among all tokens.

    Args:
        loss: of this step, in nats per answer token.
        gradient_norm: of this step.
        rows: the metrics of the steps before.
        n_tokens: size of the vocabulary.
    """
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(gradient_norm):
        return f"the gradient's norm is {gradient_norm}"
    if rows and loss > max(3 * rows[0]["loss"], 2 * math.log(n_tokens)):
        return f"the loss went from {rows[0]['loss']:.3g} to {loss:.3g} nats"
    return None
