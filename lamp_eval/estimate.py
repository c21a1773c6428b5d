"""How long a run will take, from its counted tokens and the machine's speed."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lamp_eval.config import TaskAdapterConfig, UserAdapterConfig
from lamp_eval.records import Example, n_common_tokens

# Float operations per token and parameter that a stage would need at the speed of a plain float32
# product, as measured on a 2-core CPU with SmolLM2-135M.
TASK_ADAPTER, USER_ADAPTER, ANSWERS = 6.5, 8, 4.5


def n_task_tokens(examples: Sequence[Example], recipe: TaskAdapterConfig) -> float:
    """Tokens that stage 1 computes."""
    n_steps = recipe.epochs * len(examples) / recipe.batch_size
    share = min(1.0, (recipe.max_steps or n_steps) / n_steps)
    return share * recipe.epochs * _n_computed(examples, recipe.batch_size)


def n_user_tokens(examples: Sequence[Example], recipe: UserAdapterConfig) -> float:
    """Tokens that stage 2 computes for a user."""
    return recipe.epochs * _n_computed(examples, recipe.accumulation)


def n_answer_tokens(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
    """Tokens of prompts and answers; the prompts' common beginning is computed once."""
    n_common = n_common_tokens(prompts)
    return n_common + sum(len(prompt) - n_common + max_new_tokens for prompt in prompts)


def flops_per_second() -> float:
    """Speed of a float32 matrix product in MLX: the fastest in a moment, whatever else ran."""
    import on_device  # noqa: F401  # loads the BLAS before MLX

    import mlx.core as mx  # isort: skip

    a, b = mx.random.uniform(shape=(256, 1024)), mx.random.uniform(shape=(1024, 1024))
    mx.eval(a @ b)
    fastest, end = float("inf"), time.perf_counter() + 0.1
    while (start := time.perf_counter()) < end:
        mx.eval(a @ b)
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * 256 * 1024 * 1024 / fastest


def _n_computed(examples: Sequence[Example], batch_size: int) -> float:
    """Tokens of one epoch when each batch computes the common beginning once."""
    n_common = n_common_tokens([example.tokens[: example.answer_start] for example in examples])
    n_own = sum(len(example.tokens) - n_common for example in examples)
    return n_own + n_common * len(examples) / batch_size
