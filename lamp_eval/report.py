"""Finished runs as one page: `python -m lamp_eval.report outputs/… [--out DIR]`."""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from lamp_eval import plots
from lamp_eval.arms import COMPARISONS
from lamp_eval.config import ARMS
from lamp_eval.display import duration
from lamp_eval.errors import UserError, fail
from lamp_eval.leaderboard import main_rows
from lamp_eval.metrics import LOWER_IS_BETTER, QUERY_SCORES, RULES
from lamp_eval.plots import signed
from lamp_eval.results import RUN_FILE, RunRecord, find_runs, read_run
from lamp_eval.statistics import HISTORY_CLASSES, holm
from lamp_eval.tasks import TASKS, Task

REPORT_FILE, PLOTS_DIR = "report.html", "report"
GAIN, PERSONAL = ("user", "task"), ("user", "cross_user")
SHORT_TEXT = 160  # characters of an answer that are shown unfolded

# Options that a summary has a column for, or that change no result.
_NOT_NAMED = re.compile(
    r"(name|task|output_dir|seed|n_resamples|adapter\.user\.blocks|protocol\.(name|adapter_k))$"
    r"|(model|quantization|executor)\."
)
_Row = Mapping[str, Any]


@dataclass(frozen=True)
class UserGain:
    """One user's main metric by the official rules in the arms `user` and `task`.

    Attributes:
        user_id: the user.
        n_records: length of the history.
        n_queries: number of queries.
        gain: user − task, in the metric's unit.
    """

    user_id: str
    n_records: int
    n_queries: int
    gain: float


@dataclass(frozen=True)
class Answer:
    """What an arm answered to a query; `scores` names the rules."""

    arm: str
    output: str
    scores: str


@dataclass(frozen=True)
class ExampleQuery:
    """A query with its gold and the answers of all arms."""

    query_id: str
    gold: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class ExampleUser:
    """A user who gained or lost most, with some of their queries."""

    rank: str
    user: UserGain
    queries: tuple[ExampleQuery, ...]


@dataclass(frozen=True)
class Run:
    """A finished run as the report shows it.

    Attributes:
        number: its number in the report, from 1.
        label: the number, and in what it differs from the other runs of its task.
        differs: that alone, options without a column of their own.
        folder: where it is.
        record: its record.
        task: its task.
        rows: the leaderboard's rows of the main metric by the official rules.
        gains: of each user with a score in both arms.
        n_without_gain: how many users have none.
        examples: the users who lost and gained most.
        problems: what is missing in the folder or cannot be read.
    """

    number: int
    label: str
    differs: str
    folder: Path
    record: RunRecord
    task: Task
    rows: tuple[_Row, ...]
    gains: tuple[UserGain, ...] = ()
    n_without_gain: int = 0
    examples: tuple[ExampleUser, ...] = ()
    problems: tuple[str, ...] = ()

    def row(self, arm: str, reference: str) -> _Row | None:
        """The main row of a comparison, if the run has it."""
        pair = (arm, reference)
        return next((r for r in self.rows if (r.get("arm"), r.get("reference")) == pair), None)

    def known(self, column: str) -> Any:
        """A column of the arm `user`, or of the first arm that has it."""
        rows = sorted(self.rows, key=lambda row: row.get("arm") != "user")
        return next((v for row in rows if (v := row.get(column)) is not None), None)


@dataclass(frozen=True)
class Plot:
    """A figure of the report."""

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
    files = list(dict.fromkeys(file.resolve() for path in paths for file in run_files(path)))
    shown = {file.resolve(): file for path in paths for file in run_files(path)}
    runs, unreadable = read_runs([shown[file] for file in files])
    if not runs:
        raise UserError(
            expected=f"at least one finished run ({RUN_FILE})",
            found="; ".join(unreadable) or "none",
            where=", ".join(map(str, paths)),
            fix="give the folder of a run, of a sweep or of all runs, such as outputs",
        )
    pictures = draw_plots(runs)
    page = render(runs, unreadable, pictures)
    try:
        folder = out / PLOTS_DIR
        folder.mkdir(parents=True, exist_ok=True)
        for plot in pictures:
            _write(folder / f"{plot.name}.svg", plot.drawing.svg.encode())
            _write(folder / f"{plot.name}.png", plot.drawing.png)
        # Plots of an earlier report would pass for plots of this one; other files are not ours.
        kinds = "|".join(("intervals", "history", "depth"))
        ours = re.compile(rf"({kinds})-({'|'.join(TASKS)})(-\d+)?\.(svg|png)")
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


def run_files(path: Path) -> list[Path]:
    """The `run.json` of all finished runs at or below a run, a sweep, an experiment or `outputs`.

    Raises:
        UserError: there is no such folder.
    """
    if path.name == RUN_FILE:
        path = path.parent
    if not path.is_dir():
        raise UserError(
            expected="the folder of a run, of a sweep or of all runs",
            found="no such folder",
            where=str(path),
            fix="check the path; runs are in outputs/<experiment>/<time>",
        )
    if (path / RUN_FILE).exists():
        return [path / RUN_FILE]
    below = (file for depth in ("*", "*/*") for file in path.glob(f"{depth}/{RUN_FILE}"))
    own = [file for file in below if file.relative_to(path).parts[0] != "stages"]
    return sorted({*own, *find_runs(path)})


def read_runs(files: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Reads runs, ordered by task and configuration and numbered.

    Returns:
        The runs, and a line for each that cannot be read.
    """
    runs: list[Run] = []
    unreadable = []
    for file in files:
        record = read_run(file)
        if isinstance(record, str):
            unreadable.append(record)
            continue
        names = {str(row.get("task")) for row in record.leaderboard}
        names = names or {str(record.config.get("task"))}
        if len(names) > 1 or not names <= set(TASKS):
            unreadable.append(f"{file}: not one task of this version: {', '.join(sorted(names))}")
            continue
        task = TASKS[names.pop()]
        rows = [row for row in record.leaderboard if {"rules", "metric"} <= set(row)]
        runs.append(Run(0, "", "", file.parent, record, task, rows=tuple(main_rows(rows))))
    runs.sort(key=_order)
    options = [_flat(run.record.config) for run in runs]
    numbered = []
    for i, run in enumerate(runs):
        others = [o for r, o in zip(runs, options, strict=True) if r.task == run.task]
        differs = " · ".join(
            f"{name}={_plain(options[i].get(name))}"
            for name in sorted({name for own in others for name in own})
            if not _NOT_NAMED.match(name) and len({json.dumps(o.get(name)) for o in others}) > 1
        )
        own = [r for r in runs if r.task == run.task]
        columns = [
            f"{heading} {_plain(column(run))}"
            for heading, column in _CONFIGURATION
            if len({_plain(column(r)) for r in own}) > 1
        ]
        label = " · ".join([f"run {i + 1}", *columns, *([differs] if differs else [])])
        numbered.append(replace(run, number=i + 1, differs=differs, label=label))
    n_users, n_queries = (2, 3) if len(runs) <= 5 else (1, 2)
    return [_with_users(run, n_users, n_queries) for run in numbered], unreadable


def draw_plots(runs: Sequence[Run]) -> list[Plot]:
    """All figures, by task; none of them grows with the number of runs, there are more of them."""
    return [
        plot
        for task in dict.fromkeys(run.task.name for run in runs)
        for own in [[run for run in runs if run.task.name == task]]
        for plot in (*_interval_plots(own), *_history_plots(own), *_depth_plots(own))
    ]


def render(runs: Sequence[Run], unreadable: Sequence[str], pictures: Sequence[Plot]) -> str:
    """The page as HTML that needs nothing else; all text in it is escaped."""
    import jinja2

    template = resources.files("lamp_eval").joinpath("report.html.jinja")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    figures = [
        (p.name, p.caption, plots.inline(p.drawing.svg, f"plot{i}-", p.caption))
        for i, p in enumerate(pictures, start=1)
    ]
    tasks = [TASKS[name] for name in dict.fromkeys(run.task.name for run in runs)]
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        runs=runs,
        unreadable=unreadable,
        facts=_facts(runs),
        synthetic=_numbers(run for run in runs if run.record.synthetic),
        dirty=_numbers(run for run in runs if run.record.dirty),
        summaries=[(task, _summary(runs, task)) for task in tasks] if len(runs) > 1 else [],
        arm_tables={run.number: _arm_table(run.rows, full=False) for run in runs},
        other_tables={
            run.number: _arm_table(
                [row for row in run.record.leaderboard if row not in run.rows], full=True
            )
            for run in runs
        },
        figures={
            task.name: [f for f in figures if re.sub(r"^[a-z]+-|-\d+$", "", f[0]) == task.name]
            for task in tasks
        },
        metric_of={task.name: _metric(task) for task in tasks},
        sources=_sources(runs),
        versions=_versions(runs),
        short_text=SHORT_TEXT,
        signed=signed,
    )


# Reading a run's folder


class _PredictionRow(BaseModel):
    """What the report shows of a line of `predictions/<arm>.jsonl`."""

    query_id: str
    user_id: str
    output: str
    gold: str
    finished: bool
    scores: dict[str, dict[str, float | None]]


def _with_users(run: Run, n_users: int, n_queries: int) -> Run:
    """The run with its per-user results and examples, as far as its folder has them."""
    try:
        gains, n_without = _user_gains(run.folder / "users.csv", run.task.metrics[0])
    except (OSError, ValueError, KeyError, csv.Error) as error:
        problem = f"no results by user: users.csv {_why(error)}"
        return replace(run, problems=(problem,))
    run = replace(run, gains=tuple(gains), n_without_gain=n_without)
    named = {row.get("arm") for row in run.record.leaderboard}
    predictions, problems = {}, []
    ranked = _worst_and_best(gains, n_users, run.task)
    user_ids = {user.user_id for _, user in ranked}
    for arm in (arm for arm in ARMS if arm in named and ranked):
        try:
            predictions[arm] = _read_predictions(run.folder / f"predictions/{arm}.jsonl", user_ids)
        except (OSError, ValueError) as error:
            problems.append(f"no answers of arm {arm}: predictions/{arm}.jsonl {_why(error)}")
    examples = [
        ExampleUser(rank, user, _example_queries(predictions, user.user_id, run.task, n_queries))
        for rank, user in ranked
    ]
    return replace(run, examples=tuple(examples), problems=tuple(problems))


def _user_gains(path: Path, metric: str) -> tuple[list[UserGain], int]:
    """Each user's gain, and how many users of the arm `user` have none.

    By the official rules every query of the main metric has a score, so that the difference of a
    user's means is the mean of their differences.
    """
    values: dict[str, dict[str, float | None]] = {arm: {} for arm in GAIN}
    sizes: dict[str, tuple[int, int]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file, strict=True):
            if row["arm"] in values:
                text = row[f"official_{metric}"]
                values[row["arm"]][row["user_id"]] = number(float(text)) if text else None
                sizes[row["user_id"]] = int(row["n_records"]), int(row["n_queries"])
    gains = [
        UserGain(user_id, *sizes[user_id], value - reference)
        for user_id, value in values["user"].items()
        if value is not None and (reference := values["task"].get(user_id)) is not None
    ]
    return gains, len(values["user"]) - len(gains)


def _worst_and_best(gains: Sequence[UserGain], n: int, task: Task) -> list[tuple[str, UserGain]]:
    """The n users who lost most and the n others who gained most, with their ranks."""
    better = -1 if task.metrics[0] in LOWER_IS_BETTER else 1
    ranked = sorted(gains, key=lambda user: (better * round(user.gain, 12), user.user_id))
    worst = ranked[:n]
    best = ranked[len(worst) :][-n:][::-1]
    return [
        (f"{word} {i} of {len(ranked)}", user)
        for word, own in (("worst", worst), ("best", best))
        for i, user in enumerate(own, start=1)
    ]


def _read_predictions(path: Path, user_ids: set[str]) -> dict[tuple[str, str], _PredictionRow]:
    """The predictions for some users, by user and query."""
    found = {}
    with path.open("rb") as file:
        for i, line in enumerate(file, start=1):
            try:
                row = _PredictionRow.model_validate_json(line)
            except ValidationError as error:
                message = error.errors(include_url=False)[0]["msg"]
                raise ValueError(f"line {i}: {message}") from error
            if row.user_id in user_ids:
                found[row.user_id, row.query_id] = row
    return found


def _example_queries(
    predictions: Mapping[str, Mapping[tuple[str, str], _PredictionRow]],
    user_id: str,
    task: Task,
    n: int,
) -> tuple[ExampleQuery, ...]:
    """The queries on which the arms `user` and `task` differ most; of equal ones the first."""
    score = QUERY_SCORES[task.metrics[0]]

    def official(arm: str, key: tuple[str, str]) -> float:
        row = predictions.get(arm, {}).get(key)
        return (number(row.scores.get("official", {}).get(score)) if row else None) or 0.0

    keys = dict.fromkeys(key for own in predictions.values() for key in own if key[0] == user_id)
    chosen = sorted(keys, key=lambda key: -abs(official("user", key) - official("task", key)))[:n]
    queries = []
    for key in chosen:
        rows = {arm: own[key] for arm, own in predictions.items() if key in own}
        answers = []
        for arm, row in rows.items():
            scores = [
                f"{rules}\N{NO-BREAK SPACE}{_plain(number(row.scores.get(rules, {}).get(score)))}"
                for rules in RULES
            ]
            cut = [] if row.finished else ["cut off at the limit of tokens"]
            answers.append(Answer(arm, row.output, " · ".join([*scores, *cut])))
        queries.append(ExampleQuery(key[1], next(iter(rows.values())).gold, tuple(answers)))
    return tuple(queries)


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}"
    if isinstance(error, KeyError):
        return f"has no column {error}"
    return f"cannot be read: {error}"


# Runs side by side

# Columns of a summary that say how a run was configured.
_CONFIGURATION: tuple[tuple[str, Callable[[Run], Any]], ...] = (
    ("model", lambda run: run.known("model")),
    ("quantization", lambda run: run.known("quantization")),
    ("blocks", lambda run: run.known("blocks")),
    ("protocol", lambda run: run.known("protocol")),
    ("k", lambda run: run.known("k")),
    ("seed", lambda run: run.known("seed")),
)


def _order(run: Run) -> tuple[Any, ...]:
    values = [column(run) for _, column in _CONFIGURATION]
    # Numbers by size, whatever else by its text.
    keys = [(number(v) is None, number(v) or 0.0, str(v)) for v in values]
    return ([*TASKS].index(run.task.name), keys, run.record.started_at, str(run.folder))


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by their names on the command line."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        inner = isinstance(value, Mapping)
        flat |= _flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return flat


def _sweeps(runs: Sequence[Run]) -> list[dict[int, Run]]:
    """Groups of runs that differ in adapted blocks only, by blocks; the newest of equal ones."""
    groups: dict[str, dict[int, Run]] = {}
    for run in sorted(runs, key=lambda run: run.record.started_at):
        blocks = run.known("blocks")
        if run.row(*GAIN) is None or not isinstance(blocks, int):
            continue
        options = {
            name: value
            for name, value in _flat(run.record.config).items()
            if name not in ("output_dir", "adapter.user.blocks") and not name.startswith("executor")
        }
        record = run.record
        same = [options, record.model_fingerprint, record.data_checksum, record.synthetic]
        groups.setdefault(json.dumps(same, sort_keys=True), {})[blocks] = run
    found = [dict(sorted(group.items())) for group in groups.values() if len(group) > 1]
    return sorted(found, key=lambda group: next(iter(group.values())).number)


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
            "(one bar: Δᵤ; broken bar: Δ). Numbers on the right are Δᵤ."
        )
        return [Plot(f"intervals-{task.name}", caption, plots.forest(labels, column, **look))]
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
        made.append(Plot(_plot_name("intervals", task, i), caption, drawing))
    return made


def _history_plots(runs: Sequence[Run]) -> list[Plot]:
    task = runs[0].task
    known = [run for run in runs if run.gains]
    made = []
    parts = _parts(known, plots.MAX_PANELS, step=3)
    for i, part in enumerate(parts, start=1):
        panels = {
            _shorten(run.label): [
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
        made.append(Plot(_plot_name("history", task, i), caption, drawing))
    return made


def _depth_plots(runs: Sequence[Run]) -> list[Plot]:
    task = runs[0].task
    parts = _parts(_sweeps(runs), plots.MAX_DEPTH_PANELS)
    made = []
    for i, part in enumerate(parts, start=1):
        sweeps = []
        for group in part:
            own = list(group.values())
            gain_rows = [run.row(*GAIN) or {} for run in own]
            cross_rows = [run.row("cross_user", "task") or {} for run in own]
            sweeps.append(
                plots.Depth(
                    title=f"runs {_numbers(own)}",
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
        drawing = plots.depth(sweeps, metric=task.metrics[0], higher_is_better=_higher(task))
        made.append(Plot(_plot_name("depth", task, i), caption, drawing))
    return made


def _estimate(row: _Row | None) -> plots.Estimate | None:
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


def _arm_table(rows: Iterable[_Row], *, full: bool) -> _Table:
    """The rows of a leaderboard; `full` names metric and rules."""
    headings = [
        *(["metric", "rules"] if full else []),
        "arm", "against", "users", "queries", "value", "reference", "Δ [95 %]", "Δᵤ [95 %]", "p",
        "users +/=/−", "detectable |Δᵤ|", "unparsed", *(["cut prompts"] if full else []),
    ]  # fmt: skip
    cells = [
        [
            *([_plain(row.get("metric")), _plain(row.get("rules"))] if full else []),
            _plain(row.get("arm")),
            _plain(row.get("reference")),
            _plain(row.get("n_users")),
            _plain(row.get("n_queries")),
            _value(row.get("value")),
            _value(row.get("reference_value")),
            _interval(row, "delta", "ci_low", "ci_high"),
            _interval(row, "delta_u", "ci_u_low", "ci_u_high"),
            _p(row.get("p")),
            ""
            if row.get("user_wins") is None
            else "/".join(_plain(row.get(f"user_{name}")) for name in ("wins", "ties", "losses")),
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
        "run", *(heading for heading, _ in _CONFIGURATION),
        *(["other options"] if with_differs else []),
        "users", "task → user", "user − task: Δᵤ [95 %]", "p (Holm)",
        "user − cross_user: Δᵤ [95 %]", "p (Holm)", "marks",
    ]  # fmt: skip
    lines = []
    for run in own:
        cells = [str(run.number), *(_plain(column(run)) for _, column in _CONFIGURATION)]
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


def _facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """The head of the report."""
    records = [run.record for run in runs]
    named = {str(row.get("arm")) for record in records for row in record.leaderboard}
    commits = {
        (record.commit or "unknown")[:12] + (" + uncommitted changes" if record.dirty else "")
        for record in records
    }
    dates = sorted(record.started_at for record in records)
    quantized = {f"{_plain(r.known('model'))}, {_plain(r.known('quantization'))}" for r in runs}
    return [
        ("runs", str(len(runs))),
        ("tasks", ", ".join(dict.fromkeys(f"{r.task.name} ({r.task.lamp_id})" for r in runs))),
        ("arms", ", ".join(arm for arm in ARMS if arm in named)),
        ("users in a run", _range(record.n_users for record in records)),
        ("queries in a run", _range(record.n_queries for record in records)),
        ("models", "; ".join(sorted(quantized))),
        ("commits", ", ".join(sorted(commits))),
        ("started", dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"),
    ]


def _sources(runs: Sequence[Run]) -> _Table:
    headings = ["run", "folder", "data checksum", "model", "commit", "started", "took", "machine"]
    lines = [
        [
            str(run.number),
            str(run.folder),
            record.data_checksum[:16] + (" (synthetic)" if record.synthetic else ""),
            f"{record.model_origin}, {record.model_fingerprint[:16]}",
            (record.commit or "unknown")[:12] + (" (dirty)" if record.dirty else ""),
            record.started_at,
            duration(record.seconds),
            ", ".join(record.device.values()),
        ]
        for run in runs
        for record in [run.record]
    ]
    return headings, lines


def _versions(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Run numbers by the versions of their packages."""
    by_versions: dict[str, list[Run]] = {}
    for run in runs:
        text = ", ".join(f"{name} {version}" for name, version in run.record.versions.items())
        by_versions.setdefault(text, []).append(run)
    return [(_numbers(own), text) for text, own in by_versions.items()]


# Values as text; what is not there is empty, never 0


def number(value: object) -> float | None:
    """A finite number as such; None for anything else that a record may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None  # as no NaN is


def _plain(value: object) -> str:
    known = number(value)
    if known is not None:
        return f"{known:.0f}" if known == int(known) else f"{known:.3g}"
    return "" if value is None or isinstance(value, float) else str(value)


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


def _interval(row: _Row, name: str, low: str, high: str) -> str:
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


def _numbers(runs: Iterable[Run]) -> str:
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
