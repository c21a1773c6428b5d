"""Finished runs as one page: `python -m lamp_eval.report outputs/… [--out DIR]`."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from lamp_eval import plots
from lamp_eval.arms import COMPARISONS
from lamp_eval.config import ARMS
from lamp_eval.display import duration
from lamp_eval.errors import UserError, fail
from lamp_eval.metrics import LOWER_IS_BETTER
from lamp_eval.plots import signed
from lamp_eval.results import RUN_FILE
from lamp_eval.runs import (
    CONFIGURATION,
    GAIN,
    PERSONAL,
    MeasuredRun,
    Row,
    Run,
    number,
    plain,
    read_measurements,
    read_runs,
    run_files,
    sweeps,
)
from lamp_eval.statistics import HISTORY_CLASSES, holm
from lamp_eval.tasks import TASKS, Task

REPORT_FILE, PLOTS_DIR = "report.html", "report"
SHORT_TEXT = 160  # characters of an answer that are shown unfolded


@dataclass(frozen=True)
class Plot:
    """A figure of the report: its kind and task name the file."""

    task: Task
    name: str
    caption: str
    drawing: plots.Drawing


def write_report(paths: Sequence[Path], out: Path) -> tuple[Path, list[str]]:
    """Writes `report.html` and its plots; the same runs give the same bytes.

    Args:
        paths: folders of runs, of sweeps or of many runs.
        out: the folder to write into; made if it is not there.

    Returns:
        The page, and a line for each run that could not be read.

    Raises:
        UserError: no run can be read, or nothing can be written.
    """
    files = {file.resolve(): file for path in paths for file in run_files(path)}
    runs, unreadable = read_runs([*files.values()])
    measured = read_measurements([*files.values()], len(runs) + 1)
    if not runs and not measured:
        raise UserError(
            expected=f"at least one finished run ({RUN_FILE})",
            found="; ".join(unreadable) or "none",
            where=", ".join(map(str, paths)),
            fix="give the folder of a run, of a sweep or of all runs, such as outputs",
        )
    pictures = draw_plots(runs)
    page = render(runs, measured, unreadable, pictures)
    try:
        folder = out / PLOTS_DIR
        folder.mkdir(parents=True, exist_ok=True)
        for plot in pictures:
            _write(folder / f"{plot.name}.svg", plot.drawing.svg.encode())
            _write(folder / f"{plot.name}.png", plot.drawing.png)
        # Plots of an earlier report would pass for plots of this one; other files are not ours.
        ours = re.compile(rf"(intervals|history|depth)-({'|'.join(TASKS)})(-\d+)?\.(svg|png)")
        kept = {plot.name for plot in pictures}
        for old in folder.iterdir():
            if ours.fullmatch(old.name) and old.stem not in kept:
                old.unlink()
        # Text from anywhere may hold half a surrogate pair.
        _write(out / REPORT_FILE, page.encode("utf-8", "replace"))
    except OSError as error:
        raise UserError(
            expected="a folder to write into",
            found=error.strerror or str(error),
            where=str(error.filename or out),
            fix="choose another one with --out DIR",
        ) from error
    return out / REPORT_FILE, unreadable


def draw_plots(runs: Sequence[Run]) -> list[Plot]:
    """All figures, by task; none of them grows with the number of runs, there are more of them."""
    return [
        plot
        for task in dict.fromkeys(run.task.name for run in runs)
        for own in [[run for run in runs if run.task.name == task]]
        for plot in (*_interval_plots(own), *_history_plots(own), *_depth_plots(own))
    ]


def render(
    runs: Sequence[Run],
    measured: Sequence[MeasuredRun],
    unreadable: Sequence[str],
    pictures: Sequence[Plot],
) -> str:
    """The page as HTML that needs nothing else; all text in it is escaped."""
    import jinja2

    template = resources.files("lamp_eval").joinpath("report.html.jinja")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    tasks = [TASKS[name] for name in dict.fromkeys(run.task.name for run in runs)]
    every: list[Run | MeasuredRun] = [*runs, *measured]
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        runs=runs,
        measured=measured,
        unreadable=unreadable,
        facts=_facts(runs, measured),
        synthetic=_numbers(run for run in runs if run.record.synthetic),
        dirty=_numbers(run for run in every if run.record.dirty),
        summaries=[(task, _summary(runs, task)) for task in tasks] if len(runs) > 1 else [],
        arm_tables={run.number: _arm_table(run.rows, full=False) for run in runs},
        other_tables={
            run.number: _arm_table(
                [row for row in run.record.leaderboard if row not in run.rows], full=True
            )
            for run in runs
        },
        figures={
            task.name: [
                (plot, plots.inline(plot.drawing.svg, f"{plot.name}-", plot.caption))
                for plot in pictures
                if plot.task == task
            ]
            for task in tasks
        },
        metric_of={task.name: _metric(task) for task in tasks},
        measured_tables={
            run.number: [
                (table.title, (table.columns, table.cells())) for table in run.measurement.tables
            ]
            for run in measured
        },
        sources=_sources(every),
        versions=_versions(every),
        short_text=SHORT_TEXT,
        signed=signed,
    )


def _interval_plots(runs: Sequence[Run]) -> list[Plot]:
    task = runs[0].task
    present = [pair for pair in COMPARISONS if any(run.row(*pair) for run in runs)]
    if not present:
        return []
    look: dict[str, Any] = {"metric": task.metrics[0], "higher_is_better": _higher(task)}
    if len(runs) == 1:
        run = runs[0]
        rows = {pair: run.row(*pair) or {} for pair in present}
        labels = [
            f"{arm} − {reference}\n"
            f"{_value(row.get('value'))} against {_value(row.get('reference_value'))}"
            for (arm, reference), row in rows.items()
        ]
        column = {"arm − reference": [_estimate(row) for row in rows.values()]}
        caption = (
            f"{task.name}, run {run.number}: every comparison of two arms with its 95 % intervals "
            "(whole bar: Δᵤ; broken bar: Δ). Numbers on the right are Δᵤ."
        )
        return [Plot(task, f"intervals-{task.name}", caption, plots.forest(labels, column, **look))]
    pairs = [pair for pair in (GAIN, PERSONAL) if pair in present] or present[:2]
    made = []
    parts = _parts(runs, plots.MAX_PANEL_ROWS)
    for i, part in enumerate(parts, start=1):
        columns = {
            f"{arm} − {reference}": [_estimate(run.row(arm, reference)) for run in part]
            for arm, reference in pairs
        }
        caption = (
            f"{task.name}: {' and '.join(columns)} with 95 % intervals (whole bar: Δᵤ; broken bar: "
            f"Δ), a row for each of the runs {_numbers(part)}{_part_of(i, parts)}. "
            "Numbers on the right are Δᵤ; other comparisons are in the runs' tables."
        )
        drawing = plots.forest([_shorten(run.label) for run in part], columns, **look)
        made.append(Plot(task, _plot_name("intervals", task, i), caption, drawing))
    return made


def _history_plots(runs: Sequence[Run]) -> list[Plot]:
    task = runs[0].task
    known = [run for run in runs if run.gains]
    made = []
    parts = _parts(known, plots.MAX_PANELS, step=3)
    for i, part in enumerate(parts, start=1):
        panels = {
            _shorten(run.label, 34): [
                plots.UserPoint(user.n_records, user.gain, user.n_queries) for user in run.gains
            ]
            for run in part
        }
        n_without = sum(run.n_without_gain for run in part)
        caption = (
            f"{task.name}: each user's gain, user − task, against the length of the history; "
            f"{'run' if len(part) == 1 else 'runs'} {_numbers(part)}{_part_of(i, parts)}. "
            "The area of a point grows with the user's queries, ×n marks n users at one place. "
            f"Bars are means of the users with {', '.join(HISTORY_CLASSES)} records; above them, "
            "where there is room, the mean and the number of these users."
            + (f" Left out, without a score in both arms: {n_without} users." if n_without else "")
        )
        drawing = plots.gain_by_history(
            panels, metric=task.metrics[0], higher_is_better=_higher(task)
        )
        made.append(Plot(task, _plot_name("history", task, i), caption, drawing))
    return made


def _depth_plots(runs: Sequence[Run]) -> list[Plot]:
    task = runs[0].task
    parts = _parts(sweeps(runs), plots.MAX_DEPTH_PANELS)
    made = []
    for i, part in enumerate(parts, start=1):
        columns = []
        for group in part:
            own = list(group.values())
            gain_rows = [run.row(*GAIN) or {} for run in own]
            cross_rows = [run.row("cross_user", "task") or {} for run in own]
            columns.append(
                plots.Depth(
                    title=f"runs {_numbers(own)}"
                    + (" (several commits)" if len({r.record.commit for r in own}) > 1 else ""),
                    blocks=tuple(group),
                    values={
                        "user": [number(row.get("value")) for row in gain_rows],
                        "cross_user": [number(row.get("value")) for row in cross_rows],
                        "task": [number(row.get("reference_value")) for row in gain_rows],
                    },
                    gains={
                        f"{arm} − {reference}": [_estimate(run.row(arm, reference)) for run in own]
                        for arm, reference in (GAIN, PERSONAL)
                    },
                )
            )
        caption = (
            f"{task.name}: runs that differ only in how many last blocks carry the user adapter"
            f"{_part_of(i, parts)}. Above the arms' {task.metrics[0]}, below Δᵤ with its 95 % "
            "interval."
        )
        drawing = plots.depth(columns, metric=task.metrics[0], higher_is_better=_higher(task))
        made.append(Plot(task, _plot_name("depth", task, i), caption, drawing))
    return made


def _estimate(row: Row | None) -> plots.Estimate | None:
    names = ("delta", "ci_low", "ci_high", "delta_u", "ci_u_low", "ci_u_high")
    return plots.Estimate(*(number(row.get(name)) for name in names)) if row else None


def _parts(items: Sequence[Any], most: int, step: int = 1) -> list[Sequence[Any]]:
    """As few parts as possible, of nearly equal size, a multiple of `step`."""
    n = math.ceil(len(items) / most)
    size = step * math.ceil(len(items) / max(1, n) / step)
    return [items[i * size : (i + 1) * size] for i in range(n)]


def _part_of(i: int, parts: Sequence[Any]) -> str:
    return f" (figure {i} of {len(parts)})" if len(parts) > 1 else ""


def _plot_name(kind: str, task: Task, i: int) -> str:
    return f"{kind}-{task.name}" + (f"-{i}" if i > 1 else "")


def _shorten(text: str, most: int = 44) -> str:
    """For a figure: printable and not too long."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= most else text[: most - 1] + "…"


# Tables: (headings, rows of cells)

_Table = tuple[list[str], list[list[str]]]
_95 = "[95\N{NO-BREAK SPACE}%]"


def _arm_table(rows: Iterable[Row], *, full: bool) -> _Table:
    """The rows of a leaderboard; `full` names metric and rules."""
    headings = [
        *(["metric", "rules"] if full else []),
        "arm", "against", "users", "queries", "value", "reference", f"Δ {_95}", f"Δᵤ {_95}", "p",
        "users +/=/−", "detectable |Δᵤ|", "unparsed", *(["cut prompts"] if full else []),
    ]  # fmt: skip
    cells = [
        [
            *([plain(row.get("metric")), plain(row.get("rules"))] if full else []),
            plain(row.get("arm")),
            plain(row.get("reference")),
            plain(row.get("n_users")),
            plain(row.get("n_queries")),
            _value(row.get("value")),
            _value(row.get("reference_value")),
            _interval(row, "delta", "ci_low", "ci_high"),
            _interval(row, "delta_u", "ci_u_low", "ci_u_high"),
            _p(row.get("p")),
            ""
            if row.get("user_wins") is None
            else "/".join(plain(row.get(f"user_{name}")) for name in ("wins", "ties", "losses")),
            _value(row.get("mde")),
            _share(row.get("failed_parse_rate")),
            *([_share(row.get("cut_rate"))] if full else []),
        ]
        for row in rows
    ]
    return headings, cells


def _summary(runs: Sequence[Run], task: Task) -> _Table:
    """One line for each run of a task; p corrected over all runs of the report."""
    corrected = {
        pair: dict(
            zip(
                (run.number for run in runs),
                holm([number((run.row(*pair) or {}).get("p")) for run in runs]),
                strict=True,
            )
        )
        for pair in (GAIN, PERSONAL)
    }
    own = [run for run in runs if run.task == task]
    with_differs = any(run.differs for run in own)
    headings = [
        "run", *(heading for heading, _ in CONFIGURATION),
        *(["other options"] if with_differs else []),
        "users", "task → user", f"user − task: Δᵤ {_95}", "p (Holm)",
        f"user − cross_user: Δᵤ {_95}", "p (Holm)", "marks",
    ]  # fmt: skip
    lines = []
    for run in own:
        cells = [str(run.number), *(plain(column(run)) for _, column in CONFIGURATION)]
        if with_differs:
            cells.append(run.differs)
        gain = run.row(*GAIN) or {}
        values = [_value(gain.get("reference_value")), _value(gain.get("value"))]
        cells += [str(run.record.n_users), " → ".join(values) if any(values) else ""]
        for pair in (GAIN, PERSONAL):
            row = run.row(*pair) or {}
            p, holm_p = _p(row.get("p")), _p(corrected[pair][run.number])
            cells += [
                _interval(row, "delta_u", "ci_u_low", "ci_u_high"),
                f"{p} ({holm_p})" if p else "",
            ]
        marks = ["SYNTHETIC"] * run.record.synthetic + ["dirty"] * bool(run.record.dirty)
        lines.append([*cells, ", ".join([*marks, *["incomplete"] * bool(run.problems)])])
    return headings, lines


def _facts(runs: Sequence[Run], measured: Sequence[MeasuredRun]) -> list[tuple[str, str]]:
    """The head of the report."""
    records = [run.record for run in runs]
    every = [*records, *(run.record for run in measured)]
    facts = [("runs", str(len(every)))]
    if runs:
        named = {str(row.get("arm")) for record in records for row in record.leaderboard}
        quantized = {f"{plain(r.known('model'))}, {plain(r.known('quantization'))}" for r in runs}
        facts += [
            ("tasks", ", ".join(dict.fromkeys(f"{r.task.name} ({r.task.lamp_id})" for r in runs))),
            ("arms", ", ".join(arm for arm in ARMS if arm in named)),
            ("users in a run", _range(record.n_users for record in records)),
            ("queries in a run", _range(record.n_queries for record in records)),
            ("models", "; ".join(sorted(quantized))),
        ]
    if measured:
        names = dict.fromkeys(run.record.name for run in measured)
        facts.append(("measurements", ", ".join(names)))
    commits = {
        (record.commit or "unknown")[:12] + (" + uncommitted changes" if record.dirty else "")
        for record in every
    }
    dates = sorted(record.started_at for record in every)
    return [
        *facts,
        ("commits", ", ".join(sorted(commits))),
        ("started", dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"),
    ]


def _sources(runs: Sequence[Run | MeasuredRun]) -> _Table:
    headings = ["run", "folder", "data checksum", "model", "commit", "started", "took", "machine"]
    lines = [
        [
            str(run.number),
            str(run.folder),
            (record.data_checksum[:16] or "none") + (" (synthetic)" if record.synthetic else ""),
            f"{record.model_origin}, {record.model_fingerprint[:16]}",
            (record.commit or "unknown")[:12] + (" (dirty)" if record.dirty else ""),
            record.started_at,
            duration(record.seconds) if math.isfinite(record.seconds) else "",
            ", ".join(record.device.values()),
        ]
        for run in runs
        for record in [run.record]
    ]
    return headings, lines


def _versions(runs: Sequence[Run | MeasuredRun]) -> list[tuple[str, str]]:
    """Run numbers by the versions of their packages."""
    by_versions: dict[str, list[Run | MeasuredRun]] = {}
    for run in runs:
        text = ", ".join(f"{name} {version}" for name, version in run.record.versions.items())
        by_versions.setdefault(text, []).append(run)
    return [(_numbers(own), text) for text, own in by_versions.items()]


# Values as text; what is not there is empty, never 0


def _value(value: object) -> str:
    known = number(value)
    return "" if known is None else f"{known:.3f}".removeprefix("0")


def _share(value: object) -> str:
    known = number(value)
    return "" if known is None else f"{known:.1%}"


def _p(value: object) -> str:
    known = number(value)
    if known is None:
        return ""
    return "<.001" if known < 0.001 else _value(known)


def _interval(row: Row, name: str, low: str, high: str) -> str:
    value, ends = number(row.get(name)), (number(row.get(low)), number(row.get(high)))
    if value is None:
        return ""
    known = [signed(end) for end in ends if end is not None]
    return f"{signed(value)} [{', '.join(known)}]" if len(known) == 2 else signed(value)


def _metric(task: Task) -> str:
    metric = task.metrics[0]
    return f"{metric}, {'higher' if _higher(task) else 'lower'} is better"


def _higher(task: Task) -> bool:
    return task.metrics[0] not in LOWER_IS_BETTER


def _range(values: Iterable[int]) -> str:
    own = list(values)
    return str(min(own)) if min(own) == max(own) else f"{min(own)} to {max(own)}"


def _numbers(runs: Iterable[Run | MeasuredRun]) -> str:
    """Numbers of runs, e.g. `1–3, 7`."""
    spans: list[list[int]] = []
    for n in sorted(run.number for run in runs):
        if spans and spans[-1][-1] == n - 1:
            spans[-1].append(n)
        else:
            spans.append([n])
    return ", ".join(
        f"{span[0]}–{span[-1]}" if len(span) > 2 else ", ".join(map(str, span)) for span in spans
    )


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(f".partial-{path.name}")
    partial.write_bytes(content)
    os.replace(partial, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; exits with 2 after a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m lamp_eval.report",
        description="Writes finished runs as one page, report.html, and its plots as files.",
    )
    parser.add_argument(
        "paths", type=Path, nargs="+", help="folders of runs, of sweeps or of many runs"
    )
    parser.add_argument("--out", type=Path, help="where to write (default: into the first path)")
    options = parser.parse_args(arguments)
    first = options.paths[0]
    try:
        out = options.out or (first.parent if first.name == RUN_FILE else first)
        page, unreadable = write_report(options.paths, out)
    except UserError as error:
        fail(error)
    for line in unreadable:
        print(f"lamp_eval: left out of the report: {line}", file=sys.stderr)
    print(f"report: {page}")


if __name__ == "__main__":
    main()
