"""Two backward paths against each other: what is measured of them, and what it says (Section 5.3).

A step is timed twice. In phases, each of which ends with an evaluation: `batch` (token ids as
arrays), `graph` (loss and gradients as a graph, nothing computed), `forward` (embeddings, and the
loss is evaluated), `backward` (then the gradients, with the blocks that are recomputed),
`optimizer` (mean, clipping, AdamW), `readback` (loss and norm as numbers). And `fused`: one step of
the trainer itself, which evaluates loss and gradients together.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lamp_eval.config import KernelAbConfig
from lamp_eval.results import Table

PHASES = ("batch", "graph", "forward", "backward", "optimizer", "readback")
FUSED = "fused"
# Paths that multiply by the same kernel on the way forward.
SAME_FORWARD = {"packed", "packed_generic"}
# A median ratio this near to 1 counts as no difference.
_SAME = 0.05


@dataclass(frozen=True)
class Timing:
    """Seconds of one phase of a step, or of the whole: `FUSED`.

    Attributes:
        order: the step's number among all that were timed, from 0.
        length_tokens: of its example; the last token is predicted and never read.
        round: from 0; in each both paths take a step in phases and a fused one.
        path: one of the two.
        phase: one of `PHASES`, or `FUSED`.
        seconds: wall clock.
    """

    order: int
    length_tokens: int
    round: int
    path: str
    phase: str
    seconds: float


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
        timings: in the order of time.
        losses: by path, the trainer's loss of each step on the same records, nats per answer token.
        stopped: by path, why its training ended early.
    """

    timings: tuple[Timing, ...]
    losses: dict[str, tuple[float, ...]]
    stopped: dict[str, str]


@dataclass(frozen=True)
class Ratio:
    """Both paths in one phase at one length.

    Attributes:
        length_tokens: of the steps.
        phase: one of `PHASES`, or `FUSED`.
        first: median seconds of the first path over the rounds.
        second: of the second.
        ratio: median of the rounds' ratios, second to first.
        low: the smallest of them.
        high: the largest.
        n_rounds: how many there are.
    """

    length_tokens: int
    phase: str
    first: float
    second: float
    ratio: float
    low: float
    high: float
    n_rounds: int


@dataclass(frozen=True)
class Agreement:
    """How alike the two losses run.

    Attributes:
        n_steps: that both paths made.
        correlation: Pearson's; None of fewer than three steps, or of a loss that never changes.
        max_relative_difference: the largest |second − first| / |first|.
        first: mean loss of the last third of the steps, of the first path.
        second: of the second.
    """

    n_steps: int
    correlation: float | None
    max_relative_difference: float
    first: float
    second: float


def n_tokens(config: KernelAbConfig, epochs: int) -> int:
    """Tokens that each path computes: a step to warm up, two in each round, the trajectory."""
    timed = sum(config.lengths) * (1 + 2 * config.rounds)
    return timed + epochs * sum(trajectory_lengths(config))


def n_steps(config: KernelAbConfig, epochs: int) -> int:
    """Steps of both paths, those to warm up among them."""
    return 2 * (len(config.lengths) * (1 + 2 * config.rounds) + epochs * config.n_records)


def trajectory_lengths(config: KernelAbConfig) -> list[int]:
    """Tokens of each record of the loss trajectories: the measured lengths in turn."""
    return [config.lengths[i % len(config.lengths)] for i in range(config.n_records)]


def describe(config: KernelAbConfig, epochs: int) -> list[str]:
    """What will be measured, in a few lines."""
    first, second = config.paths
    lengths = ", ".join(map(str, config.lengths))
    return [
        f"{first} against {second}, {config.rounds} rounds of steps of {lengths} tokens, each in "
        "phases and fused, batch 1",
        f"then {config.n_records} records × {epochs} passes with each path: do the losses agree?",
        f"{n_tokens(config, epochs):,} training tokens with each path, random ones",
    ]


def ratios(timings: Iterable[Timing], paths: Sequence[str]) -> list[Ratio]:
    """The paths compared by length and phase; a ratio pairs the two steps of a round."""
    seconds: dict[tuple[int, str], dict[int, dict[str, float]]] = {}
    for timing in timings:
        rounds = seconds.setdefault((timing.length_tokens, timing.phase), {})
        rounds.setdefault(timing.round, {})[timing.path] = timing.seconds
    found = []
    for (length, phase), rounds in seconds.items():
        pairs = [(own[paths[0]], own[paths[1]]) for own in rounds.values()]
        each = [second / first for first, second in pairs]
        first, second = (statistics.median(column) for column in zip(*pairs, strict=True))
        found.append(
            Ratio(
                length, phase, first, second, statistics.median(each), min(each), max(each),
                len(pairs),
            )
        )  # fmt: skip
    return found


def agreement(first: Sequence[float], second: Sequence[float]) -> Agreement | None:
    """Two losses step by step, as far as both go; None if one has no step."""
    pairs = list(zip(first, second, strict=False))
    if not pairs:
        return None
    columns = list(zip(*pairs, strict=True))
    try:
        correlation = statistics.correlation(*columns) if len(pairs) > 2 else None
    except statistics.StatisticsError:  # one of them is constant
        correlation = None
    last = pairs[-max(1, len(pairs) // 3) :]
    ends = [statistics.fmean(column) for column in zip(*last, strict=True)]
    largest = max(abs(b - a) / abs(a) for a, b in pairs)
    return Agreement(len(pairs), correlation, largest, ends[0], ends[1])


def findings(
    measured: Measured,
    compared: Sequence[Ratio],
    agreed: Agreement | None,
    paths: Sequence[str],
    *,
    dispatched: bool,
    reason: str,
) -> list[str]:
    """What the numbers say, a sentence each.

    Args:
        measured: what was measured.
        compared: from `ratios`.
        agreed: from `agreement`.
        paths: the two.
        dispatched: whether this MLX dispatches the repaired kernel here.
        reason: why (not).
    """
    first, second = paths
    lines = [
        f"{second} takes {_span(compared, 'backward')} × the backward time of {first}, "
        f"{_span(compared, FUSED)} × the step"
    ]
    for i, path in enumerate(paths):
        back = [_seconds(compared, "backward", i)[n] / s
                for n, s in _seconds(compared, "forward", i).items()]  # fmt: skip
        whole = [sum(_seconds(compared, phase, i)[n] for phase in PHASES) / s
                 for n, s in _seconds(compared, FUSED, i).items()]  # fmt: skip
        lines.append(
            f"{path}: the backward pass takes {_range(back)} × the forward pass; the six phases "
            f"sum to {_range(whole)} × the fused step"
        )
    lines.append(_control(compared, paths))
    if set(paths) == SAME_FORWARD:
        lines.append(_dispatch(compared, dispatched, reason))
    for path, why in measured.stopped.items():
        lines.append(f"losses: the training with {path} ended early, {why}")
    if agreed:
        known = "undefined" if agreed.correlation is None else f"{agreed.correlation:.6f}"
        lines.append(
            f"losses over {agreed.n_steps} steps: correlation {known}, largest relative difference "
            f"{agreed.max_relative_difference:.1e}; mean of the last third {agreed.first:.4f} with "
            f"{first}, {agreed.second:.4f} with {second}"
        )
    return lines


def tables(
    measured: Measured, compared: Sequence[Ratio], agreed: Agreement | None, paths: Sequence[str]
) -> tuple[list[Table], list[Table]]:
    """The tables to show, and those with every single value."""
    first, second = paths
    phases = Table(
        name="phases",
        title=f"seconds of a step with {first} and with {second}: medians of the rounds; the ratio "
        "pairs the steps of a round",
        columns=["length_tokens", "phase", f"{first}_seconds", f"{second}_seconds", "ratio",
                 "ratio_min", "ratio_max", "n_rounds"],
        rows=[[r.length_tokens, r.phase, r.first, r.second, r.ratio, r.low, r.high, r.n_rounds]
              for r in compared],
    )  # fmt: skip
    shown = [phases]
    if agreed:
        shown.append(
            Table(
                name="agreement",
                title="the two losses, step by step on the same records",
                columns=["n_steps", "correlation", "max_relative_difference",
                         f"{first}_last_third", f"{second}_last_third"],
                rows=[[agreed.n_steps, agreed.correlation, agreed.max_relative_difference,
                       agreed.first, agreed.second]],
            )
        )  # fmt: skip
    timings = Table(
        name="timings",
        title="every phase of every timed step",
        columns=["order", "length_tokens", "round", "path", "phase", "seconds"],
        rows=[[t.order, t.length_tokens, t.round, t.path, t.phase, t.seconds]
              for t in measured.timings],
    )  # fmt: skip
    losses = Table(
        name="losses",
        title="nats per answer token",
        columns=["path", "step", "loss"],
        rows=[[path, step, loss] for path in paths
              for step, loss in enumerate(measured.losses[path], start=1)],
    )  # fmt: skip
    return shown, [timings, losses]


def _control(compared: Sequence[Ratio], paths: Sequence[str]) -> str:
    if set(paths) != SAME_FORWARD:
        return (
            "control: does not apply, the forward passes of these two paths differ by design: "
            f"{_span(compared, 'forward')} ×"
        )
    forward = [r for r in compared if r.phase == "forward"]
    moved = [r for r in forward if abs(r.ratio - 1) > _SAME]
    if any(r.low > 1 or r.high < 1 for r in moved):
        verdict = "does NOT hold, more than the backward pass differs"
    else:
        verdict = "is undecided, the rounds scatter too much" if moved else "holds"
    worst = max(forward, key=lambda r: abs(r.ratio - 1))
    return (
        f"control {verdict}: the forward time moved by at most {abs(worst.ratio - 1):.1%} (at "
        f"{worst.length_tokens} tokens, rounds {worst.low:.3f} to {worst.high:.3f} ×)"
    )


def _dispatch(compared: Sequence[Ratio], dispatched: bool, reason: str) -> str:
    moved = max(abs(r.ratio - 1) for r in compared if r.phase == FUSED)
    if not dispatched:
        return f"the repaired kernel is not dispatched here, both take the generic one: {reason}"
    if moved <= _SAME:
        return (
            f"the steps differ by at most {moved:.1%}: the repaired kernel was never dispatched, "
            f"though it should be: {reason}"
        )
    return f"the repaired kernel is dispatched: {reason}"


def _seconds(compared: Sequence[Ratio], phase: str, path: int) -> dict[int, float]:
    """Median seconds by length, of the first (0) or the second path (1)."""
    return {r.length_tokens: (r.first, r.second)[path] for r in compared if r.phase == phase}


def _span(compared: Sequence[Ratio], phase: str) -> str:
    return _range([r.ratio for r in compared if r.phase == phase])


def _range(values: Sequence[float]) -> str:
    """Over the lengths, e.g. `1.65 to 2.13`."""
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"
