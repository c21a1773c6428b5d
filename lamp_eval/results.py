"""What a run leaves behind: `run.json`, predictions, per-user results and leaderboards."""

from __future__ import annotations

import csv
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from lamp_eval.data.lamp import write_outputs
from lamp_eval.records import Prediction, User
from lamp_eval.tasks import Task

RUN_FILE = "run.json"
LEADERBOARD_COLUMNS = (
    "task", "arm", "reference", "metric", "rules", "higher_is_better", "n_users", "n_queries",
    "value", "reference_value", "delta", "ci_low", "ci_high", "delta_u", "ci_u_low", "ci_u_high",
    "p", "mde", "query_wins", "query_ties", "query_losses", "user_wins", "user_ties", "user_losses",
    "improves", "failed_parse_rate", "cut_rate", "model", "quantization", "blocks", "rank",
    "backend", "protocol", "decoding", "retrieval", "k", "seed", "synthetic", "task_users",
    "commit", "run",
)  # fmt: skip


class StageRecord(BaseModel):
    """One stage output: its folder, whether it was there already, and how long it took."""

    model_config = ConfigDict(extra="forbid")
    stage: str
    what: str
    path: str
    reused: bool
    seconds: float


class Table(BaseModel):
    """Numbers that were measured; a file `<name>.csv`, whose title people read."""

    model_config = ConfigDict(extra="forbid")
    name: str
    title: str
    columns: list[str]
    rows: list[list[str | int | float | None]]

    def cells(self) -> list[list[str]]:
        """The rows as text: four digits of a number that is no count, nothing for None."""
        return [[_cell(value) for value in row] for row in self.rows]


class Measurement(BaseModel):
    """What a run that evaluates no arms has measured; `findings` are sentences about it."""

    model_config = ConfigDict(extra="forbid")
    tables: list[Table]
    findings: list[str]


class RunRecord(BaseModel):
    """All that is needed to judge, compare and repeat a run."""

    model_config = ConfigDict(extra="forbid")
    schema_version: Literal[2] = 2
    name: str
    started_at: str
    seconds: float
    config: dict[str, Any]
    overrides: list[str]
    versions: dict[str, str]
    commit: str | None
    dirty: bool | None
    device: dict[str, str]
    model_origin: str
    model_fingerprint: str
    data_checksum: str
    data_files: dict[str, str]
    synthetic: bool
    task_users_origin: str
    n_users: int
    n_queries: int
    n_task_users: int
    users_without_history: list[str]
    task_user_ids: list[str] = []
    data_notes: list[str] = []
    donors: dict[str, str]
    seeds: dict[str, int]
    methods: dict[str, str] = {}  # the function behind each registered arm, and its package
    parity_error: dict[str, float]
    stopped_users: dict[str, str] = {}  # why the training of an adapter ended early
    backward: dict[str, Any] = {}  # `lamp_eval.doctor.Backward`; empty if MLX computed nothing
    failed_parses: dict[str, dict[str, int]]  # by arm and rule set
    cut_words: dict[str, int]
    stages: list[StageRecord]
    seconds_by_stage: dict[str, float]
    peak_memory_bytes: int
    leaderboard: list[dict[str, Any]]
    measurement: Measurement | None = None  # of a run without arms


def write_run(
    run_dir: Path,
    record: RunRecord,
    predictions: Mapping[str, Sequence[Prediction]],
    users: Sequence[Mapping[str, Any]],
) -> None:
    """Writes all files of a run; `run.json` last, which makes the run a finished one.

    Args:
        run_dir: the run's folder; made if it is not there.
        record: the run record.
        predictions: of each arm.
        users: rows of `users.csv`; all with the same columns, at least one.
    """
    (run_dir / "predictions").mkdir(parents=True, exist_ok=True)
    for arm, rows in predictions.items():
        lines = [json.dumps(_prediction_row(row), ensure_ascii=False) + "\n" for row in rows]
        _write(run_dir / "predictions" / f"{arm}.jsonl", lines)
    write_csv(run_dir / "users.csv", tuple(users[0]), users)
    write_csv(run_dir / "leaderboard.csv", LEADERBOARD_COLUMNS, record.leaderboard)
    _write(run_dir / RUN_FILE, [record.model_dump_json(indent=2) + "\n"])


def write_measurement(run_dir: Path, record: RunRecord, details: Sequence[Table]) -> None:
    """Writes all files of a run that measures; `run.json` last, which makes it a finished one.

    Args:
        run_dir: the run's folder; made if it is not there.
        record: the run record, with a measurement.
        details: tables with every single value, which the record leaves out.
    """
    assert record.measurement is not None
    run_dir.mkdir(parents=True, exist_ok=True)
    for table in (*record.measurement.tables, *details):
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        write_csv(run_dir / f"{table.name}.csv", table.columns, rows)
    _write(run_dir / RUN_FILE, [record.model_dump_json(indent=2) + "\n"])


def write_submissions(
    run_dir: Path,
    task: Task,
    users: Sequence[User],
    predictions: Mapping[str, Sequence[Prediction]],
) -> None:
    """Writes what `lamp_eval.score` and `lamp_eval.compare` read, in the folder `submissions`.

    `golds.json` and `<arm>.json` in the benchmark's format, and `users.json`: whose each query is
    and how many records that user has.

    Args:
        run_dir: the run's folder; made if it is not there.
        task: the task.
        users: the evaluated users.
        predictions: of each arm.
    """
    folder = run_dir / "submissions"
    folder.mkdir(parents=True, exist_ok=True)
    golds = {query.id: query.gold for user in users for query in user.queries}
    write_outputs(folder / "golds.json", task, golds)
    for arm, rows in predictions.items():
        write_outputs(folder / f"{arm}.json", task, {row.query_id: row.output for row in rows})
    owners = {
        query.id: {"user_id": user.id, "n_records": len(user.history)}
        for user in users
        for query in user.queries
    }
    _write(folder / "users.json", [json.dumps(owners, ensure_ascii=False, indent=1) + "\n"])


def rebuild_leaderboard(output_dir: Path) -> tuple[Path, list[str]]:
    """Writes `leaderboard.csv` from all finished runs below a folder.

    Returns:
        The file, and a line for each `run.json` that could not be read.
    """
    rows, unreadable = read_leaderboard(output_dir)
    path = output_dir / "leaderboard.csv"
    write_csv(path, LEADERBOARD_COLUMNS, rows)
    return path, unreadable


def read_leaderboard(output_dir: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of all finished runs below a folder, and a line for each that could not be read."""
    rows: list[dict[str, Any]] = []
    unreadable = []
    for path in find_runs(output_dir):
        record = read_run(path)
        if isinstance(record, str):
            unreadable.append(record)
            continue
        unknown = {column for row in record.leaderboard for column in row}
        unknown -= set(LEADERBOARD_COLUMNS)
        if unknown:
            unreadable.append(f"{path}: unknown columns {', '.join(sorted(unknown))}")
        else:
            rows += record.leaderboard
    return rows, unreadable


def read_run(path: Path) -> RunRecord | str:
    """Reads a `run.json`; a line that says what is wrong with it if it cannot be read."""
    try:
        return RunRecord.model_validate_json(path.read_bytes())
    except OSError as error:
        return f"{path}: {error.strerror}"
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        return f"{path}: not a run record of this version: {field} {first['msg']}"


def find_runs(output_dir: Path) -> list[Path]:
    """The `run.json` of all finished runs: `<experiment>/<time>[/<job of a sweep>]/run.json`."""
    experiments = [p for p in sorted(output_dir.iterdir()) if p.is_dir() and p.name != "stages"]
    return [
        path
        for experiment in experiments
        for pattern in (f"*/{RUN_FILE}", f"*/*/{RUN_FILE}")
        for path in sorted(experiment.glob(pattern))
    ]


def _cell(value: str | int | float | None) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _prediction_row(prediction: Prediction) -> dict[str, Any]:
    return {
        "query_id": prediction.query_id,
        "user_id": prediction.user_id,
        "donor_id": prediction.donor_id,
        "prompt_hash": prediction.prompt_hash,
        "output": prediction.output,
        "gold": prediction.gold,
        "finished": prediction.finished,
        "scores": dict(prediction.scores),
    }


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes rows in full precision; an absent value is empty."""
    with tempfile.NamedTemporaryFile(
        "w", newline="", encoding="utf-8", dir=path.parent, prefix=".partial-", delete=False
    ) as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="raise")
        writer.writeheader()
        writer.writerows(rows)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def _write(path: Path, lines: Iterable[str]) -> None:
    partial = path.with_name(f".partial-{path.name}")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(lines)
    os.replace(partial, path)
