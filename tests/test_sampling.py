"""Sampling against transformers' own filters, and its random numbers."""

import tiny  # isort: skip  # noqa: F401  # loads the BLAS, before MLX

from collections import Counter
from functools import partial
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lamp_eval.seeds import query_seed
from on_device.sampling import TEMPERATURE, TOP_K, TOP_P, candidates, random_number, sample

V = 500
RNG = np.random.default_rng(0)
NORMAL = RNG.normal(size=(40, V)).astype(np.float32)


def _with(value: float, ids: list[int], low: float = -3.0) -> np.ndarray:
    row = np.full((1, V), low, np.float32)
    row[0, ids] = value
    return row


LOGITS = {
    "peaked": 20 * NORMAL,  # one token is left
    "broad": 0.1 * NORMAL,  # all ten are left, or nearly
    "between": 0.5 * NORMAL,
    "rounded": np.round(0.2 * NORMAL, 1),  # ties within, and around the tenth
    "all equal": np.zeros((2, V), np.float32),  # top-k keeps all, top-p drops the lowest ids
    "a tie at the tenth": np.concatenate([_with(1.0, [7, 90, 3]), _with(0.01, list(range(9)), 0)]),
    "a tie at top-p's edge": np.concatenate(
        [_with(1.0, list(range(i, i + n))) for n in (2, 9, 10, 11, 12) for i in (0, 100)]
    ),
    "one alone": _with(100.0, [42], -100.0),
    "nothing but −∞ below": _with(0.0, [1, 2, 3], -np.inf),
}


FILTERS = [TemperatureLogitsWarper(TEMPERATURE), TopKLogitsWarper(TOP_K), TopPLogitsWarper(TOP_P)]


def _transformers(logits: np.ndarray, *, stable: bool = True) -> np.ndarray:
    """The probabilities; top-p's sort, which torch leaves free to mix equal ones, made stable."""
    with mock.patch.object(torch, "sort", partial(torch.sort, stable=stable)):
        return LogitsProcessorList(FILTERS)(None, torch.tensor(logits)).softmax(-1).numpy()


@pytest.mark.parametrize("name", LOGITS)
def test_of_equal_ones_as_many_are_left_as_in_transformers(name: str) -> None:
    _, found = candidates(mx.array(LOGITS[name]))
    expected = np.sort(_transformers(LOGITS[name], stable=False), axis=1)
    found = np.sort(np.array(found), axis=1)
    np.testing.assert_allclose(found, expected[:, -found.shape[1] :], rtol=1e-4, atol=1e-7)
    assert (found > 0).sum() == (expected > 0).sum()


@pytest.mark.parametrize("name", LOGITS)
def test_what_is_left_is_what_transformers_leaves(name: str) -> None:
    ids, probabilities = map(np.array, candidates(mx.array(LOGITS[name])))
    assert (np.diff(ids, axis=1) > 0).all()
    found = np.zeros_like(LOGITS[name])
    np.put_along_axis(found, ids, probabilities, axis=1)
    expected = _transformers(LOGITS[name])
    assert (found > 0).tolist() == (expected > 0).tolist()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)


def test_the_premises_of_the_cases() -> None:
    left = {name: (_transformers(logits) > 0).sum(1) for name, logits in LOGITS.items()}
    assert max(left["peaked"]) < min(left["broad"])
    assert max(left["rounded"]) > TOP_K
    assert set(left["all equal"]) == {V * 9 // 10}
    assert set(left["one alone"]) == {1}


def test_the_order_of_the_filters_matters() -> None:
    """Top-p before the temperature, as in mlx-lm, would leave more."""
    backwards = LogitsProcessorList(FILTERS[::-1])
    other = backwards(None, torch.tensor(LOGITS["between"])).softmax(-1).numpy()
    assert ((other > 0).sum(1) > (_transformers(LOGITS["between"]) > 0).sum(1)).any()


def test_drawn_in_proportion() -> None:
    logits = mx.array(LOGITS["broad"][:1])
    expected = _transformers(LOGITS["broad"][:1])[0].astype(float)
    n = 20_000
    numbers = [random_number(seed=i, step=1) for i in range(n)]
    drawn = sample(mx.repeat(logits, n, axis=0), numbers).tolist()
    counts = Counter(drawn)
    for token in np.flatnonzero(expected):
        spread = 5 * np.sqrt(expected[token] * (1 - expected[token]) / n)
        assert abs(counts.pop(int(token)) / n - expected[token]) < spread
    assert not counts


@pytest.mark.parametrize("number", [0.0, 1 - 2**-23])
@pytest.mark.parametrize("name", LOGITS)
def test_the_ends_of_the_range_draw_the_first_and_the_last(name: str, number: float) -> None:
    logits = LOGITS[name]
    drawn = sample(mx.array(logits), [number] * len(logits)).tolist()
    left = [np.flatnonzero(row) for row in _transformers(logits)]
    assert drawn == [row[0 if number == 0 else -1] for row in left]


def test_half_precision_is_filtered_in_single() -> None:
    logits = mx.array(LOGITS["between"]).astype(mx.bfloat16)
    _, found = candidates(logits)
    assert found.dtype == mx.float32
    np.testing.assert_array_equal(found, candidates(logits.astype(mx.float32))[1])


def test_random_numbers() -> None:
    numbers = np.array([random_number(seed, step) for seed in range(100) for step in range(1, 201)])
    assert len(set(numbers)) > 0.99 * len(numbers)
    assert 0 <= numbers.min() < 0.001
    assert 0.999 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
    # Golden: the first 23 bits of the SHA-256 of "7\x001", so that no version draws otherwise.
    assert random_number(7, 1) == 6278304 / 2**23


def test_a_query_s_seed_depends_on_run_user_and_query() -> None:
    seeds = [query_seed(run, user, query) for run in (0, 1) for user in "ab" for query in "ab"]
    assert len(set(seeds)) == 8
    assert query_seed(0, "a", "b") == seeds[1]
