"""The report's figures: intervals, gain by length of history, depth. Equal inputs, equal bytes.

They read in greyscale: series differ in marker, filling and line as well as in luminance, and are
named where they are. Text stays text in the SVG; all of it is shown literally (no mathtext).
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import warnings
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lamp_eval.statistics import HISTORY_CLASSES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_PANEL_ROWS = 12  # rows of a forest plot, as many as still read well on a page
MAX_PANELS = 12  # small multiples in one figure: three columns, four rows
MAX_DEPTH_PANELS = 3  # each is two panels high

INK, GRID = "#111111", "#dddddd"
# Relative luminance .03, .16 and .35: apart in greyscale as well as for colour-blind readers.
DARK, MIDDLE, LIGHT = "#08306b", "#b5520a", "#5aa9d6"
_STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titley": 1.0,  # not searched for, which takes a tenth of all time
    "axes.edgecolor": INK,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "lamp_eval",  # ids are random otherwise
    "text.parse_math": False,
    "savefig.dpi": 150,
}
_ARM_LINES: dict[str, dict[str, Any]] = {
    "user": {"color": DARK, "marker": "o", "linestyle": "-"},
    "cross_user": {"color": MIDDLE, "marker": "^", "linestyle": "--"},
    "task": {"color": LIGHT, "marker": "s", "linestyle": ":"},
}
_GAIN_LINES: dict[str, dict[str, Any]] = {
    "user − task": {"color": DARK, "marker": "o", "linestyle": "-"},
    "user − cross_user": {"color": MIDDLE, "marker": "D", "linestyle": "--"},
}


@dataclass(frozen=True)
class Estimate:
    """Δ and Δᵤ of a comparison with their intervals, in the metric's unit; None: not known."""

    delta: float | None
    ci_low: float | None
    ci_high: float | None
    delta_u: float | None
    ci_u_low: float | None
    ci_u_high: float | None


@dataclass(frozen=True)
class UserPoint:
    """One user: length of history, gain in the metric's unit, number of queries."""

    n_records: int
    gain: float
    n_queries: int


@dataclass(frozen=True)
class Depth:
    """Runs that differ in their adapted blocks only.

    Attributes:
        title: what they have in common.
        blocks: how many last blocks carry an adapter, ascending.
        values: the metric of each arm at each depth.
        gains: the estimate of each comparison at each depth.
    """

    title: str
    blocks: tuple[int, ...]
    values: Mapping[str, Sequence[float | None]]
    gains: Mapping[str, Sequence[Estimate | None]]


@dataclass(frozen=True)
class Drawing:
    """A figure as both files."""

    svg: str
    png: bytes


def forest(
    labels: Sequence[str],
    panels: Mapping[str, Sequence[Estimate | None]],
    *,
    metric: str,
    higher_is_better: bool,
) -> Drawing:
    """Δ and Δᵤ with their intervals and the zero line: a row for each label, a panel each column.

    Args:
        labels: of the rows, at most `MAX_PANEL_ROWS`, of one or two lines.
        panels: by title the estimate of each row; None: the row has no such comparison.
        metric: its name, for the axis.
        higher_is_better: its direction, for the axis.
    """
    with _style():
        left = 0.25 + 0.072 * max(len(line) for label in labels for line in label.split("\n"))
        numbers = 1.75 if len(panels) == 1 else 0.55
        panel = max(2.1, (9.2 - left - len(panels) * numbers) / len(panels))
        width = left + len(panels) * (panel + numbers) + 0.1
        top, bottom = 0.62, 0.58
        height = top + bottom + 0.4 * len(labels)
        figure = _figure(width, height)
        estimates = [e for column in panels.values() for e in column if e is not None]
        limits = _limits([v for e in estimates for v in vars(e).values() if v is not None])
        for i, (title, column) in enumerate(panels.items()):
            x = left + i * (panel + numbers)
            axes = figure.add_axes(
                (x / width, bottom / height, panel / width, 1 - (top + bottom) / height)
            )
            _forest_panel(axes, column, with_intervals=len(panels) == 1)
            axes.set(xlim=limits, ylim=(len(labels) - 0.5, -0.5), yticks=range(len(labels)))
            axes.set_yticklabels(labels if i == 0 else [])
            axes.tick_params(axis="y", length=0)
            axes.set_title(title, loc="left")
            direction = "better →" if higher_is_better else "← better"
            axes.set_xlabel(f"difference in {metric}   ({direction})")
        handles = [
            _marker(**_DELTA_U, label="Δᵤ, mean of users"),
            _marker(**_DELTA, label="Δ, all queries"),
        ]
        figure.legend(handles=handles, loc="upper right", ncols=2, borderaxespad=0.1)
        return _drawing(figure)


def gain_by_history(
    panels: Mapping[str, Sequence[UserPoint]], *, metric: str, higher_is_better: bool
) -> Drawing:
    """Each user's gain against the length of their history; a panel for each run.

    The area of a point grows with the user's queries; users at the same place are one point with
    their number. Bars are the means of the classes of history length.

    Args:
        panels: by title its users; at least one user in all, at most `MAX_PANELS` panels.
        metric: its name, for the axis.
        higher_is_better: its direction, for the axis.
    """
    with _style():
        n_columns = min(3, len(panels))
        n_rows = math.ceil(len(panels) / n_columns)
        small = len(panels) > 2
        width = 9.2 if len(panels) > 1 else 7.2
        figure = _figure(width, 0.75 + n_rows * (2.1 if small else 3.3))
        grid = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False)
        figure.subplots_adjust(
            left=0.75 / width,
            right=1 - 0.12 / width,
            bottom=0.5 / figure.get_figheight(),
            top=1 - 0.3 / figure.get_figheight(),
            hspace=0.3,
            wspace=0.06,
        )
        points = [point for own in panels.values() for point in own]
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        most_queries = max(1, *(point.n_queries for point in points))
        for axes, (title, own) in zip(grid.flat, panels.items(), strict=False):
            _scale_records(axes, [point.n_records for point in points])
            low, high = _limits([point.gain for point in points])
            axes.set_ylim(low, high + (0.22 if small else 0.14) * (high - low))  # for the means
            _gain_panel(axes, own, most_queries, small)
            axes.set_title(title, loc="left", fontsize=8 if small else 9)
        direction = "better ↑" if higher_is_better else "better ↓"
        figure.supylabel(f"user − task, {metric}   ({direction})", fontsize=9, x=0.012)
        figure.supxlabel("records in the user's history", fontsize=9, y=0.012)
        return _drawing(figure)


def depth(sweeps: Sequence[Depth], *, metric: str, higher_is_better: bool) -> Drawing:
    """The arms' values, and Δᵤ with its interval, against the number of adapted blocks.

    Args:
        sweeps: a column each, at most `MAX_DEPTH_PANELS`.
        metric: its name, for the axes.
        higher_is_better: its direction, for the axes.
    """
    with _style():
        width = 9.2 if len(sweeps) > 1 else 5.6
        figure = _figure(width, 5.2)
        grid = figure.subplots(2, len(sweeps), sharex="col", sharey="row", squeeze=False)
        figure.subplots_adjust(
            left=0.75 / width, right=1 - 1.05 / width, bottom=0.1, top=0.94, hspace=0.12, wspace=0.5
        )
        direction = "better ↑" if higher_is_better else "better ↓"
        values = [v for s in sweeps for own in s.values.values() for v in own if v is not None]
        gains = [e for s in sweeps for own in s.gains.values() for e in own if e is not None]
        ends = [v for e in gains for v in (e.delta_u, e.ci_u_low, e.ci_u_high) if v is not None]
        for column, sweep in enumerate(sweeps):
            above, below = grid[0][column], grid[1][column]
            above.set_ylim(*_limits(values, with_zero=False))
            below.set_ylim(*_limits(ends))
            above.set_title(sweep.title, loc="left", fontsize=8)
            _lines(above, sweep.blocks, sweep.values, _ARM_LINES)
            _lines(
                below,
                sweep.blocks,
                {
                    name: [e.delta_u if e else None for e in own]
                    for name, own in sweep.gains.items()
                },
                _GAIN_LINES,
                {name: [_interval(e) for e in own] for name, own in sweep.gains.items()},
            )
            below.axhline(0, color=INK, linewidth=0.9)
            below.set_xticks(sweep.blocks)
            below.set_xlabel("adapted blocks")
        grid[0][0].set_ylabel(f"{metric}   ({direction})")
        grid[1][0].set_ylabel(f"Δᵤ, {metric}   ({direction})")
        return _drawing(figure)


def inline(svg: str, prefix: str, label: str) -> str:
    """An SVG to stand inside HTML: ids of its own, sized by the page, named for screen readers.

    Args:
        svg: as `Drawing.svg`.
        prefix: what its ids begin with; another for each figure of a page.
        label: what it shows.
    """
    ET.register_namespace("", "http://www.w3.org/2000/svg")
    root = ET.fromstring(svg)
    link = "{http://www.w3.org/1999/xlink}href"
    for element in root.iter():
        if "id" in element.attrib:
            element.set("id", prefix + element.attrib["id"])
        if link in element.attrib:
            element.set("href", element.attrib.pop(link).replace("#", f"#{prefix}", 1))
        for name, value in element.attrib.items():
            if "url(#" in value:
                element.set(name, value.replace("url(#", f"url(#{prefix}"))
    width = re.sub(r"pt$", "", root.attrib.pop("width"))
    root.attrib.pop("height")
    root.set("style", f"max-width: {float(width) * 4 / 3:.0f}px")
    root.set("role", "img")
    root.set("aria-label", label)
    return ET.tostring(root, encoding="unicode")


_DELTA_U: dict[str, Any] = {
    "marker": "s",
    "color": DARK,
    "markerfacecolor": DARK,
    "markersize": 5.5,
}
_DELTA: dict[str, Any] = {
    "marker": "o",
    "color": MIDDLE,
    "markerfacecolor": "white",
    "markersize": 5.5,
}


def _forest_panel(
    axes: Axes, estimates: Sequence[Estimate | None], *, with_intervals: bool
) -> None:
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.axvline(0, color=INK, linewidth=0.9)
    at_the_right = axes.get_yaxis_transform()
    for y, estimate in enumerate(estimates):
        if y % 2:
            axes.axhspan(y - 0.5, y + 0.5, color="#f5f5f5", zorder=0)
        known = estimate is not None and estimate.delta is not None
        if estimate is None or not known:
            axes.text(1.02, y, "–", transform=at_the_right, va="center", color=INK)
            continue
        drawn = (
            (y - 0.14, estimate.delta_u, estimate.ci_u_low, estimate.ci_u_high, "-", _DELTA_U),
            (y + 0.18, estimate.delta, estimate.ci_low, estimate.ci_high, (0, (4, 1.5)), _DELTA),
        )
        for at, value, low, high, line, look in drawn:
            if low is not None and high is not None:
                axes.plot([low, high], [at, at], color=look["color"], linewidth=1.5, linestyle=line)
            if value is not None:
                axes.plot([value], [at], linestyle="none", **look)
        if estimate.delta_u is not None:
            text = signed(estimate.delta_u)
            if with_intervals and estimate.ci_u_low is not None and estimate.ci_u_high is not None:
                text += f" [{signed(estimate.ci_u_low)}, {signed(estimate.ci_u_high)}]"
            axes.text(1.02, y, text, transform=at_the_right, va="center", color=DARK, fontsize=8)


def _gain_panel(axes: Axes, points: Sequence[UserPoint], most_queries: int, small: bool) -> None:
    axes.grid(color=GRID, linewidth=0.6)
    axes.axhline(0, color=INK, linewidth=0.9)
    if not points:
        axes.text(0.5, 0.5, "no user with both scores", transform=axes.transAxes, ha="center")
        return
    places = Counter((p.n_records, round(p.gain, 9)) for p in points)
    queries = Counter[tuple[int, float]]()
    for p in points:
        queries[p.n_records, round(p.gain, 9)] += p.n_queries
    largest = 26 if small else 80
    axes.scatter(
        [x for x, _ in places],
        [y for _, y in places],
        s=[max(5.0, largest * min(2.0, queries[place] / most_queries)) for place in places],
        facecolor=LIGHT,
        edgecolor=DARK,
        linewidth=0.6,
        alpha=0.8,
    )
    if len(places) <= 12:
        for (x, y), n in places.items():
            if n > 1:
                axes.annotate(
                    f"×{n}", (x, y), xytext=(7, -3), textcoords="offset points", fontsize=7
                )
    _class_means(axes, points, fontsize=6 if small else 8)


def _class_means(axes: Axes, points: Sequence[UserPoint], fontsize: float) -> None:
    """A bar over each class of history length, its mean and number of users above the points."""
    low, high = axes.get_xlim()
    starts = [*HISTORY_CLASSES.values(), math.inf]
    for start, end in zip(starts, starts[1:], strict=False):
        own = [p.gain for p in points if start <= p.n_records < end]
        if not own:
            continue
        mean = fmean(own)
        ends = [max(low, start), min(high, end)]
        axes.plot(ends, [mean, mean], color="white", linewidth=4, solid_capstyle="butt")
        axes.plot(ends, [mean, mean], color=INK, linewidth=2, solid_capstyle="butt")
        if end < high:
            axes.axvline(end, color=INK, linewidth=0.6, linestyle=":")
        # In the middle of the class as it is seen, on a log axis too; in inches.
        a, b = (axes.transData.transform((x, 0))[0] / axes.figure.dpi for x in ends)
        if b - a > fontsize * 0.055:  # two lines of about six letters
            middle = axes.transData.inverted().transform(((a + b) / 2 * axes.figure.dpi, 0))[0]
            axes.text(
                middle,
                0.985,
                f"{signed(mean)}\n({len(own)})",
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="top",
                fontsize=fontsize,
                linespacing=1.05,
            )


def _scale_records(axes: Axes, n_records: Sequence[int]) -> None:
    """Logarithmic where the histories' lengths span more than a decade."""
    from matplotlib.ticker import MaxNLocator

    low, high = min(n_records), max(n_records)
    if high > 10 * max(1, low):
        if low < 1:  # someone without a history
            axes.set_xscale("symlog", linthresh=1)
            axes.set_xlim(-0.3, high * 1.3)
        else:
            axes.set_xscale("log")
            axes.set_xlim(low / 1.3, high * 1.3)
        steps = [m * 10**k for k in range(9) for m in (1, 3)]
        ticks = [0] * (low < 1) + [t for t in steps if low / 1.3 <= t <= high * 1.3]
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.minorticks_off()
    else:
        pad = max(1.0, 0.08 * (high - low))
        axes.set_xlim(low - pad, high + pad)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1, prune="both"))


def _lines(
    axes: Axes,
    x: Sequence[int],
    series: Mapping[str, Sequence[float | None]],
    looks: Mapping[str, Mapping[str, Any]],
    intervals: Mapping[str, Sequence[tuple[float, float] | None]] | None = None,
) -> None:
    """Lines named at their right end; `intervals` stand beside each other, not on each other."""
    axes.grid(color=GRID, linewidth=0.6)
    span = max(x) - min(x)
    axes.set_xlim(min(x) - 0.08 * span, max(x) + 0.08 * span)
    ends: list[tuple[float, str]] = []
    for i, (name, values) in enumerate(series.items()):
        shift = 0.012 * span * (2 * i - len(series) + 1) if intervals else 0.0
        known = [(a + shift, v) for a, v in zip(x, values, strict=True) if v is not None]
        if not known:
            continue
        axes.plot(*zip(*known, strict=True), markersize=5, linewidth=1.4, **looks[name])
        for a, interval in zip(x, intervals[name] if intervals else (), strict=False):
            if interval:
                axes.plot([a + shift] * 2, interval, color=looks[name]["color"], linewidth=1.2)
        ends.append((known[-1][1], name))
    low, high = axes.get_ylim()
    gap, lowest = 0.07 * (high - low), -math.inf
    for value, name in sorted(ends):
        lowest = max(value, lowest + gap)  # names do not cover each other
        axes.annotate(
            name.replace(" − ", " −\n"),
            (1.02, lowest),
            xycoords=axes.get_yaxis_transform(),
            va="center",
            fontsize=8,
            color=looks[name]["color"] if looks[name]["color"] != LIGHT else INK,
            annotation_clip=False,
        )
        lowest += gap if " − " in name else 0.0


def _interval(estimate: Estimate | None) -> tuple[float, float] | None:
    if estimate is None or estimate.ci_u_low is None or estimate.ci_u_high is None:
        return None
    return estimate.ci_u_low, estimate.ci_u_high


def signed(value: float) -> str:
    """With its sign, to three decimals: `+.200`, `−.050`."""
    text = f"{value:+.3f}".replace("-", "−")
    return text[0] + text[2:] if text[1:].startswith("0.") else text


def _limits(values: Sequence[float], with_zero: bool = True) -> tuple[float, float]:
    low, high = min([*values, *[0.0] * with_zero]), max([*values, *[0.0] * with_zero])
    pad = 0.08 * (high - low) or 0.1
    return low - pad, high + pad


def _marker(**look: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], linestyle="none", **look)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


@contextlib.contextmanager
def _style() -> Iterator[None]:
    """Matplotlib's own defaults and ours, whatever a `matplotlibrc` says."""
    import matplotlib
    import matplotlib.style

    matplotlib.use("Agg")
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        # A letter that the font lacks is still right in the SVG.
        warnings.filterwarnings("ignore", message="Glyph")
        yield


def _drawing(figure: Figure) -> Drawing:
    svg, png = io.StringIO(), io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(svg, format="svg", metadata=nothing)
    figure.savefig(png, format="png", metadata={"Software": None})
    return Drawing(svg.getvalue(), png.getvalue())
