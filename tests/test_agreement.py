"""Adapters of two backends side by side: gains, answers that differ, losses."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run
from rich.console import Console

from lamp_eval import display
from lamp_eval.agreement import agreement, backend_pairs, write_agreement
from lamp_eval.results import RunRecord, StageRecord

ARMS, N_QUERIES = ("task", "user"), 11


def _run(folder: Path, backend: str, losses: dict[str, list[float]]) -> RunRecord:
    """A made-up run with the losses of its users' trainings."""
    record = make_run(folder, backend=backend, arms=ARMS, n_queries=N_QUERIES)
    stages = []
    for user_id, own in losses.items():
        stage = folder / user_id
        stage.mkdir()
        rows = [json.dumps({"loss": loss}) + "\n" for loss in own]
        (stage / "metrics.jsonl").write_text("".join(rows))
        stages.append(
            StageRecord(
                stage="user_adapters", what=user_id, path=str(stage), reused=False, seconds=1
            )
        )
    return record.model_copy(update={"stages": stages})


def _outputs(folder: Path, arm: str) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (folder / f"predictions/{arm}.jsonl").read_text().splitlines()]


@pytest.fixture
def pair(tmp_path: Path) -> list[RunRecord]:
    return [
        _run(tmp_path / "0", "mlx", {"ann": [2.0, 1.0, 0.0], "bob": [2.0, 1.02]}),
        # Bob's training was stopped before its second step; cem has no history.
        _run(tmp_path / "1", "torch", {"ann": [2.0, 1.25, 0.0], "bob": [2.0]}),
    ]


def test_numbers_are_those_of_the_files(pair: list[RunRecord], tmp_path: Path) -> None:
    (both,) = backend_pairs(pair)
    found = agreement(both)
    ours, theirs = _outputs(tmp_path / "0", "user"), _outputs(tmp_path / "1", "user")
    changed = [
        a["user_id"] for a, b in zip(ours, theirs, strict=True) if a["output"] != b["output"]
    ]
    assert 0 < len(changed) < len(ours)
    assert found.share_different == len(changed) / len(ours)
    correct = [[row["scores"]["official"]["correct"] for row in rows] for rows in (ours, theirs)]
    assert sum(correct[0]) != sum(correct[1])
    assert found.comparison.delta == pytest.approx((sum(correct[0]) - sum(correct[1])) / len(ours))
    # Both have the same reference, so that Δ differs by what their values differ.
    gains = [found.rows[name]["delta"] for name in ("mlx", "torch")]
    assert gains[0] - gains[1] == pytest.approx(found.comparison.delta)
    for user in found.users:
        own = [i for i, row in enumerate(ours) if row["user_id"] == user["user_id"]]
        assert int(user["n_queries"]) == len(own) == N_QUERIES
        assert user["n_different"] == changed.count(user["user_id"])
        for name, scores in zip(("mlx_value", "torch_value"), correct, strict=True):
            assert float(user[name]) == pytest.approx(sum(scores[i] for i in own) / N_QUERIES)


def test_losses(pair: list[RunRecord]) -> None:
    found = agreement(*backend_pairs(pair))
    by_user = {user["user_id"]: user["loss_difference"] for user in found.users}
    assert by_user == {"ann": pytest.approx(0.2), "bob": 0.0, "cem": None}
    assert found.loss_difference == pytest.approx(0.2)


def test_file_and_table(pair: list[RunRecord], tmp_path: Path) -> None:
    found = agreement(*backend_pairs(pair))
    path = write_agreement(tmp_path, [found])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["user_id"] for row in rows] == ["ann", "bob", "cem"]
    assert {row["task"] for row in rows} == {"movie_tagging"}
    assert rows[2]["loss_difference"] == ""
    console = Console(record=True, width=120)
    display.show_agreement(console, found)
    shown = console.export_text()
    assert "SYNTHETIC" in shown
    assert f"{found.share_different:.1%}" in shown


def test_only_runs_that_differ_in_the_backend_alone(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "0", arms=ARMS, backend="mlx"),
        make_run(tmp_path / "1", arms=ARMS, backend="torch", seed=1),
        make_run(tmp_path / "2", arms=ARMS, backend="mlx", seed=1),
        make_run(tmp_path / "3", arms=("task",), backend="mlx", seed=2),
        make_run(tmp_path / "4", arms=("task",), backend="torch", seed=2),
    ]
    (only,) = backend_pairs(runs)
    assert only == {"mlx": runs[2], "torch": runs[1]}
