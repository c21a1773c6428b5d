"""Steps and learning rates of both stages."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lamp_eval.config import TaskAdapterConfig, UserAdapterConfig


@dataclass(frozen=True)
class TrainingStep:
    """One optimizer step: its number from 1, mean loss per answer token in nats, and its tokens."""

    step: int
    n_steps: int
    loss: float
    n_tokens: int


def learning_rate_factor(step: int, n_steps: int, warmup_ratio: float, schedule: str) -> float:
    """The factor on the peak learning rate at a step, as in transformers.

    Args:
        step: 0 … n_steps − 1. Counted from 0, so that with any warm-up step 0 has factor 0.
        n_steps: optimizer steps of the whole run.
        warmup_ratio: share of the steps with a linear rise, rounded up.
        schedule: `linear` or `cosine`, both down to 0.

    Returns:
        A number in [0, 1].
    """
    n_warmup = math.ceil(warmup_ratio * n_steps)
    if step < n_warmup:
        return step / n_warmup
    progress = (step - n_warmup) / max(1, n_steps - n_warmup)
    return 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress


def n_task_steps(n_examples: int, recipe: TaskAdapterConfig) -> int:
    """Optimizer steps of the recipe; the last batch of an epoch may be smaller."""
    steps = recipe.epochs * math.ceil(n_examples / recipe.batch_size)
    return steps if recipe.max_steps is None else min(steps, recipe.max_steps)


def n_user_steps(n_examples: int, recipe: UserAdapterConfig) -> int:
    """`epochs · ceil(n / accumulation)`: a window never crosses the end of an epoch."""
    return recipe.epochs * math.ceil(n_examples / recipe.accumulation)
