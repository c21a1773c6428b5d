"""Finished runs read back: their records, each user's gain, examples, and how they differ."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from lamp_eval.config import ARMS
from lamp_eval.errors import UserError
from lamp_eval.leaderboard import main_rows
from lamp_eval.metrics import LOWER_IS_BETTER, QUERY_SCORES, RULES
from lamp_eval.results import RUN_FILE, Measurement, RunRecord, read_run
from lamp_eval.tasks import TASKS, Task

Row = Mapping[str, Any]
GAIN, PERSONAL = ("user", "task"), ("user", "cross_user")

# Options that a summary has a column for, or that change no result.
_NOT_NAMED = re.compile(
    r"name|task|seed|output_dir|executor\..*|adapter\.user\.blocks|protocol\.adapter_k|[^.]+\.name"
)


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
    rows: tuple[Row, ...]
    gains: tuple[UserGain, ...] = ()
    n_without_gain: int = 0
    examples: tuple[ExampleUser, ...] = ()
    problems: tuple[str, ...] = ()

    def row(self, arm: str, reference: str) -> Row | None:
        """The main row of a comparison, if the run has it."""
        pair = (arm, reference)
        return next((r for r in self.rows if (r.get("arm"), r.get("reference")) == pair), None)

    def known(self, column: str) -> Any:
        """A column of the arm `user`, or of the first arm that has it."""
        rows = sorted(self.rows, key=lambda row: row.get("arm") != "user")
        return next((v for row in rows if (v := row.get(column)) is not None), None)


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run that measured and has no arms; numbered behind those that have.

    Attributes:
        number: its number in the report.
        label: the number, its name, and what it measured on.
        folder: where it is.
        record: its record.
        measurement: what it measured.
    """

    number: int
    label: str
    folder: Path
    record: RunRecord
    measurement: Measurement


# Columns of a summary that say how a run was configured.
CONFIGURATION: tuple[tuple[str, Callable[[Run], Any]], ...] = (
    ("model", lambda run: run.known("model")),
    ("quantization", lambda run: run.known("quantization")),
    ("blocks", lambda run: run.known("blocks")),
    ("protocol", lambda run: run.known("protocol")),
    ("k", lambda run: run.known("k")),
    ("seed", lambda run: run.known("seed")),
)


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
    below = [file for depth in ("*", "*/*", "*/*/*") for file in path.glob(f"{depth}/{RUN_FILE}")]
    return sorted(file for file in below if file.relative_to(path).parts[0] != "stages")


def read_runs(files: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Reads the runs with arms, ordered by task and configuration and numbered.

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
        if record.measurement is not None:
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
    numbered: list[Run] = []
    for name in dict.fromkeys(run.task.name for run in runs):
        of_task = [run for run in runs if run.task.name == name]
        varied = [
            heading
            for heading, column in CONFIGURATION
            if len({plain(column(run)) for run in of_task}) > 1
        ]
        for run, differs in zip(of_task, _differing(of_task), strict=True):
            columns = [f"{h} {plain(column(run))}" for h, column in CONFIGURATION if h in varied]
            i = len(numbered) + 1
            label = " · ".join([f"run {i}", *columns, *differs])
            numbered.append(replace(run, number=i, differs=" · ".join(differs), label=label))
    n_users, n_queries = (2, 3) if len(runs) <= 5 else (1, 2)
    return [_with_users(run, n_users, n_queries) for run in numbered], unreadable


def read_measurements(files: Sequence[Path], first_number: int) -> list[MeasuredRun]:
    """Reads the runs that measured, by name and time; those that cannot be read are left out."""
    found = [
        (file.parent, record, record.measurement)
        for file in files
        if isinstance(record := read_run(file), RunRecord) and record.measurement is not None
    ]
    found.sort(key=lambda run: (run[1].name, run[1].started_at, str(run[0])))
    return [
        MeasuredRun(number, _measured_label(number, record), folder, record, measurement)
        for number, (folder, record, measurement) in enumerate(found, start=first_number)
    ]


def _measured_label(number: int, record: RunRecord) -> str:
    options = _flat(record.config)
    chosen = [plain(options.get(f"{group}.name")) for group in ("model", "quantization")]
    return " · ".join([f"run {number}", record.name, *chosen, *record.device.values()])


def _differing(runs: Sequence[Run]) -> list[list[str]]:
    """For each run its options without a column of their own in which the runs differ.

    Options of a group with a name are compared where the names are the same: that models differ
    says it all.
    """
    options = [_flat(run.record.config) for run in runs]
    shown: list[list[str]] = [[] for _ in runs]
    for name in sorted({name for own in options for name in own}):
        if _NOT_NAMED.fullmatch(name):
            continue
        groups = [str(own.get(f"{name.split('.')[0]}.name")) for own in options]
        values: dict[str, set[str]] = {}
        for group, own in zip(groups, options, strict=True):
            values.setdefault(group, set()).add(json.dumps(own.get(name)))
        for group, own, texts in zip(groups, options, shown, strict=True):
            if len(values[group]) > 1:
                texts.append(f"{name}={plain(own.get(name))}")
    return shown


def _order(run: Run) -> tuple[Any, ...]:
    values = [column(run) for _, column in CONFIGURATION]
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


def sweeps(runs: Sequence[Run]) -> list[dict[int, Run]]:
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
    except (OSError, ValueError, TypeError, KeyError, csv.Error) as error:
        problem = f"no results by user: users.csv {_why(error)}"
        return replace(run, problems=(problem,))
    run = replace(run, gains=tuple(gains), n_without_gain=n_without)
    named = {str(row.get("arm")) for row in run.record.leaderboard}
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
    # Most lines are of other users and need not be parsed; JSON writes an id in one of two ways.
    ids = {json.dumps(i, ensure_ascii=a).encode() for i in user_ids for a in (True, False)}
    found = {}
    with path.open("rb") as file:
        for i, line in enumerate(file, start=1):
            if not any(user_id in line for user_id in ids):
                continue
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
                f"{rules}\N{NO-BREAK SPACE}{plain(number(row.scores.get(rules, {}).get(score)))}"
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


# Values, whatever a record holds


def number(value: object) -> float | None:
    """A finite number as such; None for anything else that a record may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None  # as no NaN is


def plain(value: object) -> str:
    """As text: three digits of a number, nothing for None."""
    known = number(value)
    if known is not None:
        return f"{known:.0f}" if known == int(known) else f"{known:.3g}"
    return "" if value is None or isinstance(value, float) else str(value)
