"""Δ and Δᵤ: the published Table 8, hand-made cases, and the intervals' own properties."""

import json
import math
import tracemalloc
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamp_eval.errors import UserError
from lamp_eval.statistics import Comparison, by_history_length, compare, holm

TABLE8 = ("movie_tagging_r5q4t", "movie_tagging_r5q4tshuf", "tweet_paraphrase_r5q4t")
TABLE8 += ("citation_r5q4t",)


def _published(lamp_data: Path, name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    folder = lamp_data / "table8"
    lines = (folder / f"score_{name}.pairs.jsonl").read_text().splitlines()
    summary = json.loads((folder / f"score_{name}.json").read_text())
    return [json.loads(line) for line in lines], summary


def _compare_pairs(pairs: list[dict[str, Any]], user_key: str = "user_id") -> Comparison:
    return compare(
        [pair[user_key] for pair in pairs],
        [pair["oppu_score"] for pair in pairs],
        [pair["task_score"] for pair in pairs],
        higher_is_better=True,
        seed=0,
        n_resamples=999,
    )


@pytest.mark.parametrize("name", TABLE8)
def test_published_comparisons_come_out_exactly(lamp_data: Path, name: str) -> None:
    pairs, published = _published(lamp_data, name)
    result = _compare_pairs(pairs)
    ours = {
        "n_queries": result.n_queries,
        "n_users": result.n_users,
        "query_level_mean_diff": result.delta,
        "query_level_ci95_lo": result.normal_ci_low,
        "query_level_ci95_hi": result.normal_ci_high,
        "query_level_wins": result.query_wins,
        "query_level_ties": result.query_ties,
        "query_level_losses": result.query_losses,
        "user_grouped_mean_diff": result.delta_u,
        "user_grouped_ci95_lo": result.normal_ci_u_low,
        "user_grouped_ci95_hi": result.normal_ci_u_high,
        "user_grouped_wilcoxon_p": result.wilcoxon_p,
        "user_grouped_wins": result.user_wins,
        "user_grouped_ties": result.user_ties,
        "user_grouped_losses": result.user_losses,
    }
    assert ours == pytest.approx({key: published[key] for key in ours}, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("name", [name for name in TABLE8 if "tweet" not in name])
def test_published_arm_means_come_out(lamp_data: Path, name: str) -> None:
    # Not the tweets: their published means are the evaluator's bootstrap medians (protocol.md).
    pairs, published = _published(lamp_data, name)
    result = _compare_pairs(pairs)
    assert result.value == pytest.approx(published["oppu_accuracy"], abs=1e-12)
    assert result.reference_value == pytest.approx(published["task_accuracy"], abs=1e-12)


@pytest.mark.parametrize("name", TABLE8)
def test_published_query_level_wilcoxon_comes_out(lamp_data: Path, name: str) -> None:
    # Every query as its own user. The published tweet scores carry float noise that splits tied
    # ranks, which moves p in the sixth digit.
    pairs, published = _published(lamp_data, name)
    p = _compare_pairs(pairs, user_key="id").wilcoxon_p
    assert p == pytest.approx(published["query_level_wilcoxon_p"], rel=2e-5)


def test_movie_tagging_as_the_data_readme_states_it(lamp_data: Path) -> None:
    result = _compare_pairs(_published(lamp_data, "movie_tagging_r5q4t")[0])
    assert (round(result.reference_value, 6), round(result.value, 6)) == (0.360993, 0.487583)
    assert (round(result.delta, 6), round(result.delta_u, 6)) == (0.12659, 0.029848)
    assert (result.query_wins, result.query_ties, result.query_losses) == (471, 2778, 53)
    assert (result.user_wins, result.user_ties, result.user_losses) == (40, 50, 10)
    assert result.improves is True
    assert result.p is not None and result.p < 0.01
    # Users differ in their number of queries and in their gain: the interval that knows the
    # users is much wider for Δ than the one that takes queries as independent.
    assert result.ci_low is not None and result.ci_high is not None
    assert result.ci_low < result.delta < result.ci_high
    assert result.ci_high - result.ci_low > 3 * (0.139475 - 0.113705)
    # For Δᵤ the users are the sample in both; two methods, 100 users: equal to about a tenth.
    assert result.ci_u_low == pytest.approx(0.012387, abs=0.004)
    assert result.ci_u_high == pytest.approx(0.047309, abs=0.004)


def test_by_hand() -> None:
    result = compare(
        ["a", "a", "a", "b", "c"],
        [1.0, 1.0, 0.0, 0.0, 1.0],
        [0.0, 1.0, 1.0, 1.0, 0.0],
        higher_is_better=True,
        seed=0,
    )
    assert (result.n_users, result.n_queries) == (3, 5)
    assert (result.value, result.reference_value, result.delta) == (0.6, 0.6, 0.0)
    assert result.delta_u == 0.0  # users: 0, −1, 1
    assert (result.query_wins, result.query_ties, result.query_losses) == (2, 1, 2)
    assert (result.user_wins, result.user_ties, result.user_losses) == (1, 1, 1)
    assert result.improves is None
    assert result.normal_ci_high == pytest.approx(1.96 * 1.0 / math.sqrt(5))  # sd of 1,0,−1,−1,1
    assert result.normal_ci_u_high == pytest.approx(1.96 * 1.0 / math.sqrt(3))  # sd of 0,−1,1
    assert (result.p, result.wilcoxon_p) == (1.0, 1.0)


def test_delta_weighs_queries_and_delta_u_weighs_users() -> None:
    result = compare(
        ["a", "a", "a", "b"], [1, 1, 1, 0], [0, 0, 0, 0], higher_is_better=True, seed=0
    )
    assert (result.delta, result.delta_u) == (0.75, 0.5)
    # Two users drawn from two: Δ is 1 (a, a), 3/4 (a, b) or 0 (b, b).
    assert (result.ci_low, result.ci_high) == (0.0, 1.0)


def test_lower_is_better_keeps_the_difference_and_turns_wins() -> None:
    users, errors, reference = ["a", "b", "c"], [0.0, 0.0, 2.0], [1.0, 3.0, 1.0]
    lower = compare(users, errors, reference, higher_is_better=False, seed=0)
    higher = compare(users, errors, reference, higher_is_better=True, seed=0)
    assert lower.delta == higher.delta == -1.0
    assert (lower.ci_low, lower.ci_high) == (higher.ci_low, higher.ci_high)
    assert (lower.query_wins, lower.query_losses) == (lower.user_wins, lower.user_losses) == (2, 1)
    assert (higher.query_wins, higher.query_losses) == (1, 2)
    assert (lower.improves, higher.improves) == (True, False)


def test_the_sign_flip_test_is_exact_with_few_users() -> None:
    # Eight users, all better by the same: only all-plus and all-minus are as far out, 2/2^8.
    users = [str(user) for user in range(8)]
    result = compare(users, [1] * 8, [0] * 8, higher_is_better=True, seed=0)
    assert result.p == pytest.approx(2 / 2**8)
    # Tied users change nothing about it.
    users = [str(user) for user in range(100)]
    result = compare(users, [1] * 8 + [0] * 92, [0] * 100, higher_is_better=True, seed=0)
    assert result.p == pytest.approx(2 / 2**8)


def test_the_sign_flip_test_counts_equal_means_as_equal() -> None:
    # Flipped means that are 0 but for float noise must count as far out as the observed 0.
    values = [0.5, 0.6, -0.6, -0.5]
    assert compare([*"abcd"], values, [0] * 4, higher_is_better=True, seed=0).p == 1.0


@pytest.mark.filterwarnings("error")
def test_all_ties_give_p_1_and_the_empty_width_interval() -> None:
    result = compare(
        ["a", "a", "b", "c"], [0.1, 1, 0, 1], [0.1, 1, 0, 1], higher_is_better=True, seed=0
    )
    assert (result.p, result.wilcoxon_p) == (1.0, 1.0)
    assert (result.delta, result.ci_low, result.ci_high) == (0.0, 0.0, 0.0)
    assert (result.delta_u, result.ci_u_low, result.ci_u_high) == (0.0, 0.0, 0.0)
    assert (result.query_wins, result.query_ties, result.query_losses) == (0, 4, 0)
    assert (result.user_wins, result.user_ties, result.user_losses) == (0, 3, 0)
    assert result.improves is None


def test_float_noise_is_a_tie() -> None:
    # User a's differences 0.1, 0.2 and −0.3 add up to 2.8e-17 in this order.
    assert 0.1 + 0.2 - 0.3 != 0
    users, values, reference = ["a", "a", "a", "b"], [0.1, 0.2, 0, 0], [0, 0, 0.3, 0]
    result = compare(users, values, reference, higher_is_better=True, seed=0)
    assert (result.user_wins, result.user_ties, result.user_losses) == (0, 2, 0)
    assert (result.p, result.wilcoxon_p, result.improves) == (1.0, 1.0, None)


def test_one_user_has_no_interval_and_no_p() -> None:
    result = compare(["a", "a"], [1, 1], [0, 1], higher_is_better=True, seed=0)
    fields = asdict(result)
    empty = {"mde", "p", "wilcoxon_p"} | {name for name in fields if "ci_" in name}
    assert len(empty) == 11
    assert {name for name, value in fields.items() if value is None} == empty
    assert (result.delta, result.delta_u, result.improves) == (0.5, 0.5, True)


def _noisy_rows(n_users: int, n_queries: int, effect: float) -> tuple[list[str], Any, Any]:
    rng = np.random.default_rng(7)
    users = [str(user) for user in rng.integers(0, n_users, n_queries)]
    reference = rng.normal(size=n_queries)
    return users, reference + rng.normal(effect, 1, n_queries), reference


def test_the_order_of_the_rows_changes_nothing() -> None:
    users, values, reference = _noisy_rows(20, 200, effect=0.1)
    order = np.random.default_rng(1).permutation(200)
    options: dict[str, Any] = {"higher_is_better": True, "seed": 3, "n_resamples": 200}
    shuffled = [users[row] for row in order], values[order], reference[order]
    assert compare(users, values, reference, **options) == compare(*shuffled, **options)


def test_the_seed_alone_decides_the_resamples() -> None:
    rows = _noisy_rows(20, 200, effect=0.1)
    first, second, other = (
        compare(*rows, higher_is_better=True, seed=seed, n_resamples=200) for seed in (0, 0, 1)
    )
    assert first == second
    assert (first.ci_low, first.ci_u_low, first.p) != (other.ci_low, other.ci_u_low, other.p)
    assert first.normal_ci_low == other.normal_ci_low


def test_a_known_effect_is_found_and_no_effect_is_not() -> None:
    found = compare(*_noisy_rows(100, 1000, effect=0.5), higher_is_better=True, seed=0)
    assert found.ci_low is not None and found.ci_high is not None
    assert found.ci_low < 0.5 < found.ci_high
    # Independent queries of sd 1: the interval's half width is 1.96/√1000, within a fifth.
    assert (found.ci_high - found.ci_low) / 2 == pytest.approx(1.96 / math.sqrt(1000), rel=0.2)
    assert found.p == pytest.approx(2 / 10_000)  # the smallest that 9,999 resamples can give
    none = compare(*_noisy_rows(100, 1000, effect=0.0), higher_is_better=True, seed=0)
    assert none.ci_low is not None and none.ci_high is not None and none.p is not None
    assert none.ci_low < 0 < none.ci_high
    assert none.p > 0.05


def test_ten_thousand_users_fit_in_memory() -> None:
    rows = _noisy_rows(10_000, 30_000, effect=0.0)
    tracemalloc.start()
    compare(*rows, higher_is_better=True, seed=0, n_resamples=1000)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 400e6  # measured: 263 MB however many resamples; 617 MB in one batch


@pytest.mark.parametrize(
    ("users", "values", "reference", "message"),
    [
        ([], [], [], "0 user ids"),
        (["a"], [1, 2], [1, 2], "1 user ids, 2 scores, 2 reference scores"),
        (["a", "b"], [1, 2], [1], "1 reference scores"),
        (["a", "b"], [1, math.nan], [1, 1], "nan and 1 in row 1, user b"),
        (["a", "b"], [1, 1], [math.inf, 1], "1 and inf in row 0, user a"),
    ],
)
def test_rows_that_cannot_be_paired_are_errors(
    users: list[str], values: list[float], reference: list[float], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        compare(users, values, reference, higher_is_better=True, seed=0)


def test_the_detectable_effect_is_found_in_four_of_five_samples() -> None:
    rng = np.random.default_rng(0)
    users = [str(user) for user in range(50)]
    values = rng.normal(0, 1, 50)
    result = compare(users, values, [0.0] * 50, higher_is_better=True, seed=0)
    assert result.mde is not None
    sd = values.std(ddof=1)
    samples = rng.normal(result.mde, sd, (20_000, 50))
    z = samples.mean(axis=1) / (sd / math.sqrt(50))
    assert (np.abs(z) > 1.96).mean() == pytest.approx(0.8, abs=0.01)


def test_holm_by_hand() -> None:
    assert holm([]) == []
    assert holm([0.04]) == [0.04]
    # 3 × .01, then 2 × .02, then 1 × .03 but not below the one before.
    assert holm([0.03, None, 0.01, 0.02]) == pytest.approx([0.04, None, 0.03, 0.04])
    assert holm([0.5, 0.9]) == [1.0, 1.0]


def test_classes_of_history_length() -> None:
    n_records = {"a": 0, "b": 24, "c": 25, "d": 99, "e": 100}
    users, values = [*"aabcde"], [1, 0, 1, 1, 0, 1]
    found = by_history_length(
        users, values, [0] * 6, n_records, higher_is_better=True, seed=0, n_resamples=99
    )
    assert {name: (c.n_users, c.n_queries, c.delta_u) for name, c in found.items()} == {
        "<25": (2, 3, 0.75),
        "25–49": (1, 1, 1.0),
        "50–99": (1, 1, 0.0),
        "≥100": (1, 1, 1.0),
    }


def _skewed_counts(rng: np.random.Generator) -> Any:
    """Queries of 100 users as in the published movie tagging: 3,302, one user with 452."""
    counts = 1 + rng.multinomial(3302 - 452 - 99, rng.dirichlet([0.6] * 99))
    return np.append(counts, 452)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["accuracy", "error"])
def test_without_an_effect_the_test_rejects_and_the_intervals_miss_one_in_twenty(kind: str) -> None:
    """Users differ in how well either arm does and in their queries; the arms do not differ."""
    n_samples, rng = 1000, np.random.default_rng(0)
    rejected, covered, covered_u = 0, 0, 0
    for sample in range(n_samples):
        counts = _skewed_counts(rng)
        user_of = np.repeat(np.arange(100), counts)
        n = len(user_of)
        if kind == "accuracy":
            # Each user's two rates come from the same distribution: no effect on average.
            rates = rng.beta(2, 2, (2, 100))
            arm, reference = (rng.random(n) < rates[:, user_of]).astype(float)
        else:
            levels = rng.exponential(0.5, (2, 100))
            arm, reference = np.round(rng.exponential(1, (2, n)) * (0.5 + levels[:, user_of]), 1)
        found = compare(
            user_of.astype(str), arm, reference, higher_is_better=True, seed=sample, n_resamples=499
        )
        assert found.p is not None and found.ci_low is not None and found.ci_high is not None
        assert found.ci_u_low is not None and found.ci_u_high is not None
        rejected += found.p <= 0.05
        covered += found.ci_low <= 0 <= found.ci_high
        covered_u += found.ci_u_low <= 0 <= found.ci_u_high
    assert 0.03 <= rejected / n_samples <= 0.07
    assert 0.93 <= covered_u / n_samples <= 0.97
    assert 0.93 <= covered / n_samples <= 0.97
