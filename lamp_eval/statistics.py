"""Paired comparison of two arms: Δ over queries, Δᵤ over users, and how certain they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from lamp_eval.errors import UserError

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float] | tuple[None, None]

# Elements of the largest array of one batch of resamples: 32 MB, whatever the number of users.
_BATCH_ELEMENTS = 4_000_000
# Differences that vanish at this many decimals are float noise: they are ties.
_DECIMALS = 12
# The least records of a user in each class of history length (protocol.md, "Δ and Δᵤ").
HISTORY_CLASSES = {"<25": 0, "25–49": 25, "50–99": 50, "≥100": 100}
_Z_POWER = float(stats.norm.ppf(0.975) + stats.norm.ppf(0.8))  # 2.80


@dataclass(frozen=True)
class Comparison:
    """An arm against its reference, on the same queries.

    Differences are value − reference in the metric's unit, whichever direction is better. With
    one user nothing is known about other users: intervals and p-values are None.

    Attributes:
        n_users: number of users.
        n_queries: number of queries of all users.
        value: the arm's mean over queries.
        reference_value: the reference's mean over queries.
        delta: Δ, the mean difference over queries.
        ci_low: lower end of Δ's 95 % percentile bootstrap interval, users resampled.
        ci_high: its upper end.
        delta_u: Δᵤ, the mean over users of the user's mean difference.
        ci_u_low: lower end of Δᵤ's 95 % percentile bootstrap interval, users resampled.
        ci_u_high: its upper end.
        normal_ci_low: Δ − 1.96·sd/√n over queries (n − 1), as the published tables have it; it
            takes the queries of one user as independent.
        normal_ci_high: Δ + 1.96·sd/√n.
        normal_ci_u_low: Δᵤ − 1.96·sd/√n over users.
        normal_ci_u_high: Δᵤ + 1.96·sd/√n.
        mde: minimum detectable effect: the smallest |Δᵤ| that a two-sided 5 % test of as many
            such users finds with 80 % power, (z.975 + z.80)·sd/√n over users.
        p: two-sided sign-flip permutation test of the users' mean differences.
        wilcoxon_p: two-sided Wilcoxon signed-rank test of the same, ties dropped.
        query_wins: queries on which the arm is better than the reference.
        query_ties: queries on which both score the same.
        query_losses: queries on which the arm is worse.
        user_wins: users whose mean is better.
        user_ties: users whose mean is the same.
        user_losses: users whose mean is worse.
        improves: whether Δ points in the better direction; None if Δ is 0.
    """

    n_users: int
    n_queries: int
    value: float
    reference_value: float
    delta: float
    ci_low: float | None
    ci_high: float | None
    delta_u: float
    ci_u_low: float | None
    ci_u_high: float | None
    normal_ci_low: float | None
    normal_ci_high: float | None
    normal_ci_u_low: float | None
    normal_ci_u_high: float | None
    mde: float | None
    p: float | None
    wilcoxon_p: float | None
    query_wins: int
    query_ties: int
    query_losses: int
    user_wins: int
    user_ties: int
    user_losses: int
    improves: bool | None


def compare(
    user_ids: Sequence[str],
    values: Sequence[float],
    reference_values: Sequence[float],
    *,
    higher_is_better: bool,
    seed: int,
    n_resamples: int = 9999,
) -> Comparison:
    """Compares an arm with its reference (protocol.md, "Δ and Δᵤ").

    The order of the rows changes nothing, not even the last digit.

    Args:
        user_ids: the user of each query, (n_queries,).
        values: the arm's score of each query, (n_queries,).
        reference_values: the reference's score of the same query, (n_queries,).
        higher_is_better: the metric's direction; decides wins, losses and `improves`.
        seed: seed of the bootstrap and of the permutation test, ≥ 0.
        n_resamples: resamples of each of them, ≥ 1.

    Raises:
        UserError: if there are no rows, the lengths differ or a score is not finite.
    """
    _check_rows(user_ids, values, reference_values)
    users, user_of_row = np.unique(np.asarray(user_ids), return_inverse=True)
    value, reference = np.asarray(values, np.float64), np.asarray(reference_values, np.float64)
    # Float sums depend on the order of their terms, and resampling on the order of the users.
    order = np.lexsort((reference, value, user_of_row))
    user_of_row, value, reference = user_of_row[order], value[order], reference[order]

    differences = value - reference  # (n_queries,)
    sums = np.bincount(user_of_row, weights=differences).astype(np.float64)  # (n_users,)
    counts = np.bincount(user_of_row).astype(np.float64)  # (n_users,)
    user_differences = sums / counts  # (n_users,)
    delta, delta_u = float(differences.mean()), float(user_differences.mean())

    ci: Interval = (None, None)
    ci_u, normal_ci, normal_ci_u = ci, ci, ci
    mde = p = wilcoxon_p = None
    if len(users) > 1:
        rng = np.random.default_rng(seed)
        ci = _bootstrap_interval(_ratio_of_sums, (sums, counts), rng, n_resamples)
        ci_u = _bootstrap_interval(np.mean, (user_differences,), rng, n_resamples)
        normal_ci, normal_ci_u = _normal_interval(differences), _normal_interval(user_differences)
        mde = _Z_POWER * float(user_differences.std(ddof=1)) / len(users) ** 0.5
        p = _sign_flip_p(user_differences, rng, n_resamples)
        wilcoxon_p = _wilcoxon_p(user_differences)

    better = 1 if higher_is_better else -1
    query_wins, query_ties, query_losses = _wins_ties_losses(better * differences)
    user_wins, user_ties, user_losses = _wins_ties_losses(better * user_differences)
    return Comparison(
        n_users=len(users),
        n_queries=len(differences),
        value=float(value.mean()),
        reference_value=float(reference.mean()),
        delta=delta,
        ci_low=ci[0],
        ci_high=ci[1],
        delta_u=delta_u,
        ci_u_low=ci_u[0],
        ci_u_high=ci_u[1],
        normal_ci_low=normal_ci[0],
        normal_ci_high=normal_ci[1],
        normal_ci_u_low=normal_ci_u[0],
        normal_ci_u_high=normal_ci_u[1],
        mde=mde,
        p=p,
        wilcoxon_p=wilcoxon_p,
        query_wins=query_wins,
        query_ties=query_ties,
        query_losses=query_losses,
        user_wins=user_wins,
        user_ties=user_ties,
        user_losses=user_losses,
        improves=None if round(delta, _DECIMALS) == 0 else better * delta > 0,
    )


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction for several comparisons; None stays None and does not count.

    Source: Holm (1979), "A simple sequentially rejective multiple test procedure".
    """
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, i) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        corrected[i] = largest
    return corrected


def by_history_length(
    user_ids: Sequence[str],
    values: Sequence[float],
    reference_values: Sequence[float],
    n_records: Mapping[str, int],
    **options: Any,
) -> dict[str, Comparison]:
    """Compares within each class of users by length of history; empty classes are left out.

    Args:
        user_ids: as for `compare`.
        values: likewise.
        reference_values: likewise.
        n_records: records in the history of each user id.
        options: the other arguments of `compare`.
    """
    rows: dict[str, list[tuple[str, float, float]]] = {name: [] for name in HISTORY_CLASSES}
    for row in zip(user_ids, values, reference_values, strict=True):
        least = n_records[row[0]]
        rows[[name for name, n in HISTORY_CLASSES.items() if n <= least][-1]].append(row)
    return {name: compare(*zip(*own, strict=True), **options) for name, own in rows.items() if own}


def _check_rows(
    user_ids: Sequence[str], values: Sequence[float], reference_values: Sequence[float]
) -> None:
    lengths = (len(user_ids), len(values), len(reference_values))
    where = "the paired scores of an arm and its reference"
    if len(set(lengths)) > 1 or lengths[0] == 0:
        raise UserError(
            expected="as many user ids as scores and reference scores, at least one",
            found="{} user ids, {} scores, {} reference scores".format(*lengths),
            where=where,
            fix="compare arms that answered the same queries",
        )
    finite = np.isfinite(values) & np.isfinite(reference_values)
    if not finite.all():
        row = int(np.argmin(finite))
        raise UserError(
            expected="finite scores",
            found=f"{values[row]} and {reference_values[row]} in row {row}, "
            f"user {user_ids[row]} ({int((~finite).sum())} such rows)",
            where=where,
            fix="leave these queries out of both arms, or score them again",
        )


def _ratio_of_sums(sums: Floats, counts: Floats, axis: int) -> Floats:
    """Δ from the users' sums of differences and numbers of queries, both (…, n_users)."""
    ratio: Floats = sums.sum(axis=axis) / counts.sum(axis=axis)
    return ratio


def _bootstrap_interval(
    statistic: Callable[..., Floats],
    samples: tuple[Floats, ...],
    rng: np.random.Generator,
    n_resamples: int,
) -> tuple[float, float]:
    """95 % percentile interval of `statistic(*samples, axis)`; `samples` are (n_users,) each."""
    interval = stats.bootstrap(
        samples,
        statistic,
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=n_resamples,
        batch=_batch(len(samples[0])),
        rng=rng,
    ).confidence_interval
    return float(interval.low), float(interval.high)


def _normal_interval(differences: Floats) -> tuple[float, float]:
    """Mean ± 1.96·sd/√n with n − 1 degrees of freedom, for n > 1."""
    mean = float(differences.mean())
    half = 1.96 * float(differences.std(ddof=1)) / len(differences) ** 0.5
    return mean - half, mean + half


def _sign_flip_p(user_differences: Floats, rng: np.random.Generator, n_resamples: int) -> float:
    """Two-sided p; exact where there are at most `n_resamples` ways to flip the signs."""
    rounded = np.round(user_differences, _DECIMALS)
    moved = rounded[rounded != 0]  # flipping a zero changes nothing
    if len(moved) < 2:
        return 1.0

    def rounded_mean(sample: Floats, axis: int) -> Floats:
        # Equal means must compare as equal, whichever order their terms were summed in.
        means: Floats = sample.mean(axis=axis)
        return means.round(_DECIMALS)

    test = stats.permutation_test(
        (moved,),
        rounded_mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=n_resamples,
        batch=_batch(len(moved)),
        rng=rng,
    )
    return float(test.pvalue)


def _wilcoxon_p(user_differences: Floats) -> float:
    """Two-sided p; ties dropped (`zero_method="wilcox"`), as in the published tables."""
    rounded = np.round(user_differences, _DECIMALS)
    if not rounded.any():
        return 1.0
    return float(stats.wilcoxon(rounded, zero_method="wilcox").pvalue)


def _wins_ties_losses(gains: Floats) -> tuple[int, int, int]:
    """How many gains are positive, zero and negative."""
    rounded = np.round(gains, _DECIMALS)
    return int((rounded > 0).sum()), int((rounded == 0).sum()), int((rounded < 0).sum())


def _batch(n_users: int) -> int:
    """Resamples drawn at once."""
    return max(1, _BATCH_ELEMENTS // n_users)
