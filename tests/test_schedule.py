"""The learning-rate schedules are those of transformers."""

from __future__ import annotations

import math

import pytest

from lamp_eval.schedule import learning_rate_factor


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup_ratio", [0.0, 0.03, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("n_steps", [1, 2, 3, 9, 36, 100, 101])
def test_factors_are_those_of_transformers(schedule, warmup_ratio, n_steps):
    from transformers import optimization

    n_warmup = math.ceil(warmup_ratio * n_steps)
    for step in range(n_steps):
        if schedule == "linear":
            expected = optimization._get_linear_schedule_with_warmup_lr_lambda(
                step, num_warmup_steps=n_warmup, num_training_steps=n_steps
            )
        else:
            expected = optimization._get_cosine_schedule_with_warmup_lr_lambda(
                step, num_warmup_steps=n_warmup, num_training_steps=n_steps, num_cycles=0.5
            )
        found = learning_rate_factor(step, n_steps, warmup_ratio, schedule)
        assert found == pytest.approx(expected, abs=1e-12)
        assert 0 <= found <= 1


def test_cosine_by_hand():
    # ceil(.25 · 8) = 2 steps of warm-up, six of descent; counted from 0.
    factors = [learning_rate_factor(step, 8, 0.25, "cosine") for step in range(8)]
    cosines = [0.5 * (1 + math.cos(math.pi * i / 6)) for i in range(6)]
    assert factors == pytest.approx([0, 0.5, *cosines])
    assert factors[2] == 1


def test_linear_by_hand():
    factors = [learning_rate_factor(step, 10, 0.11, "linear") for step in range(10)]
    assert factors == pytest.approx([0, 0.5, *(i / 8 for i in range(8, 0, -1))])


def test_warmup_is_rounded_up_and_starts_at_zero():
    # 3 % of 9 steps is less than one step: still one, and it has factor 0.
    assert learning_rate_factor(0, 9, 0.03, "cosine") == 0
    assert learning_rate_factor(1, 9, 0.03, "cosine") == 1
    assert learning_rate_factor(0, 9, 0.0, "cosine") == 1
