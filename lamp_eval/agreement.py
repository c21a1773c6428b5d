"""MLX-trained against torch-trained adapters of the same users (paper, Section 7, "on phone")."""

from __future__ import annotations

import copy
import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamp_eval.leaderboard import main_rows
from lamp_eval.metrics import paired_scores
from lamp_eval.results import RunRecord, write_csv
from lamp_eval.statistics import Comparison, compare
from lamp_eval.tasks import TASKS
from lamp_eval.training import METRICS

BACKENDS = ("mlx", "torch")
AGREEMENT_FILE = "agreement.csv"


@dataclass(frozen=True)
class Agreement:
    """How far the adapters of two backends agree.

    Attributes:
        task: its name.
        metric: the task's main one, by the official rules.
        synthetic: whether the users are.
        rows: of each backend its leaderboard row of `user` against `task`.
        comparison: MLX's answers against torch's, query by query.
        share_different: of all queries, those with another answer, in [0, 1].
        loss_difference: the largest of all users and steps, relative to the larger loss; None if no
            user has a history.
        users: a row per user: `user_id`, `n_records`, `n_queries`, `n_different`, the metric's mean
            with no adapter and with each backend's (`task_value`, `mlx_value`, `torch_value`), and
            `loss_difference`, None without a history.
    """

    task: str
    metric: str
    synthetic: bool
    rows: dict[str, Mapping[str, Any]]
    comparison: Comparison
    share_different: float
    loss_difference: float | None
    users: tuple[dict[str, Any], ...]


def backend_pairs(records: Sequence[RunRecord]) -> list[dict[str, RunRecord]]:
    """The runs of a sweep that differ in `adapter.user.backend` alone, by backend."""
    groups: dict[str, dict[str, RunRecord]] = {}
    for record in records:
        config = copy.deepcopy(record.config)
        backend = config["adapter"]["user"].pop("backend")
        groups.setdefault(json.dumps(config, sort_keys=True), {})[backend] = record
    return [
        group
        for group in groups.values()
        if set(group) == set(BACKENDS) and {"task", "user"} <= set(group["mlx"].config["arms"])
    ]


def agreement(pair: dict[str, RunRecord]) -> Agreement:
    """Compares the two runs of a pair.

    Args:
        pair: by backend, as `backend_pairs` gives it; their folders are read.
    """
    first = pair["mlx"]
    task = TASKS[first.config["task"]]
    metric = task.metrics[0]
    ours, theirs = (_predictions(pair[name]) for name in BACKENDS)
    rows = {
        name: next(
            row
            for row in main_rows(record.leaderboard)
            if (row["arm"], row["reference"]) == ("user", "task")
        )
        for name, record in pair.items()
    }
    paired = paired_scores(
        [row["user_id"] for row in ours],
        [row["scores"] for row in ours],
        [row["scores"] for row in theirs],
        "official",
        metric,
    )
    different: dict[str, int] = {}
    for own, other in zip(ours, theirs, strict=True):
        changed = own["output"].strip() != other["output"].strip()
        different[own["user_id"]] = different.get(own["user_id"], 0) + changed
    results = {name: _user_rows(record) for name, record in pair.items()}
    losses = {name: _losses(record) for name, record in pair.items()}
    value = f"official_{metric}"
    users: list[dict[str, Any]] = [
        {
            "user_id": user_id,
            "n_records": results["mlx"]["user", user_id]["n_records"],
            "n_queries": results["mlx"]["user", user_id]["n_queries"],
            "n_different": n_different,
            "task_value": results["mlx"]["task", user_id][value],
            "mlx_value": results["mlx"]["user", user_id][value],
            "torch_value": results["torch"]["user", user_id][value],
            "loss_difference": _largest_difference(
                losses["mlx"].get(user_id, ()), losses["torch"].get(user_id, ())
            ),
        }
        for user_id, n_different in different.items()
    ]
    return Agreement(
        task=first.config["task"],
        metric=metric,
        synthetic=first.synthetic,
        rows=rows,
        comparison=compare(
            *zip(*paired, strict=True),
            higher_is_better=rows["mlx"]["higher_is_better"],
            seed=first.config["seed"],
            n_resamples=first.config["n_resamples"],
        ),
        share_different=sum(different.values()) / len(ours),
        loss_difference=max(
            (user["loss_difference"] for user in users if user["loss_difference"] is not None),
            default=None,
        ),
        users=tuple(users),
    )


def write_agreement(sweep_dir: Path, found: Sequence[Agreement]) -> Path:
    """Writes the users of all pairs as `agreement.csv`, and returns its path."""
    path = sweep_dir / AGREEMENT_FILE
    rows = [
        {"task": one.task, "metric": one.metric, "seed": one.rows["mlx"]["seed"]} | user
        for one in found
        for user in one.users
    ]
    write_csv(path, tuple(rows[0]), rows)
    return path


def _folder(record: RunRecord) -> Path:
    return Path(record.leaderboard[0]["run"])


def _predictions(record: RunRecord) -> list[dict[str, Any]]:
    """The answers of the arm `user`, in the corpus's order."""
    path = _folder(record) / "predictions" / "user.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _user_rows(record: RunRecord) -> dict[tuple[str, str], dict[str, str]]:
    """The lines of `users.csv` by arm and user."""
    with (_folder(record) / "users.csv").open(newline="", encoding="utf-8") as file:
        return {(row["arm"], row["user_id"]): row for row in csv.DictReader(file)}


def _largest_difference(own: Sequence[float], other: Sequence[float]) -> float | None:
    """Of the steps that both made, as one may have been stopped; two losses of 0 are equal."""
    pairs = zip(own, other, strict=False)
    return max((abs(a - b) / max(a, b) if a != b else 0.0 for a, b in pairs), default=None)


def _losses(record: RunRecord) -> dict[str, list[float]]:
    """By user the loss of each step."""
    return {
        stage.what: [
            json.loads(line)["loss"]
            for line in (Path(stage.path) / METRICS).read_text().splitlines()
        ]
        for stage in record.stages
        if stage.stage == "user_adapters"
    }
