"""Benchmark-wide runs on the benchmark's own files, and the paper's tables as one command each."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import make_tiny_model

from lamp_eval.published import TABLES
from lamp_eval.results import RunRecord
from lamp_eval.score import score_files
from lamp_eval.tasks import TASKS

REPOSITORY = Path(__file__).resolve().parents[1]
CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ASKED = "Generate a headline for the following article: "


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The tiny model, with a chat template."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model"))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def launch(model: Path, output_dir: Path, *options: str) -> str:
    sizes = [
        f"model.path={model}", f"output_dir={output_dir}", "quantization.group_size=32",
        "data.n_users=2", "data.n_task_users=3", "data.n_records=4", "data.n_queries=2",
        "adapter.task.batch_size=4", "adapter.task.max_steps=2", "adapter.user.epochs=1",
        "adapter.user.accumulation=2", "n_resamples=99",
    ]  # fmt: skip
    if any(option.startswith("data=") for option in options):
        sizes = [size for size in sizes if not size.startswith("data.")]
    done = subprocess.run(
        [sys.executable, "-m", "lamp_eval", *options, *sizes],
        env=os.environ | {
            "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(output_dir / "cache"),
        },
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def records(output_dir: Path) -> list[RunRecord]:
    files = sorted(output_dir.glob("*/**/run.json"), key=lambda path: path.stat().st_mtime_ns)
    return [RunRecord.model_validate_json(path.read_bytes()) for path in files]


def headlines(root: Path, split: str, n_users: int) -> None:
    folder = root / "LaMP_4" / split
    folder.mkdir(parents=True)
    rows = [
        {
            "id": f"0{split[0]}{user}",
            "input": f"{ASKED}the story of river {user}",
            "profile": [
                {
                    "id": str(i),
                    "text": f"a story of bridge {i}",
                    "title": f"Bridge {i}",
                    "date": f"201{i}",
                }
                for i in range(user + 2)
            ],
        }
        for user in range(n_users)
    ]
    golds = [{"id": row["id"], "output": f"River {row['id']}"} for row in rows]
    (folder / f"{split}_questions.json").write_text(json.dumps(rows))
    (folder / f"{split}_outputs.json").write_text(json.dumps({"task": "LaMP_4", "golds": golds}))


@pytest.mark.slow
def test_a_benchmark_run_on_the_benchmarks_own_files(model, tmp_path):
    headlines(tmp_path / "lamp", "train", 4)
    headlines(tmp_path / "lamp", "dev", 3)
    output_dir = tmp_path / "outputs"
    text = launch(
        model, output_dir, "experiment=news_headline_benchmark", "data=lamp",
        f"data.dir={tmp_path / 'lamp'}", "data.select=longest", "data.max_users=2",
    )  # fmt: skip
    assert "1 of 3 outputs belong to no question" not in text
    (record,) = records(output_dir)
    assert record.task_users_origin == "others"
    assert record.task_user_ids == ["0t0", "0t1", "0t2", "0t3"]
    assert sorted(record.seeds) == ["0d1", "0d2"]  # the longest histories
    assert not record.synthetic
    pairs = {(row["arm"], row["reference"]) for row in record.leaderboard}
    assert {("task", "base_retrieval"), ("task_retrieval", "base_retrieval")} <= pairs
    by_arm = {row["arm"]: row for row in record.leaderboard}
    assert {arm: row["k"] for arm, row in by_arm.items()} == {
        "base": 0, "base_retrieval": 4, "task": 0, "task_retrieval": 4,
    }  # fmt: skip
    assert {row["protocol"] for row in record.leaderboard} == {"lamp_chat"}
    (run_dir,) = {Path(row["run"]) for row in record.leaderboard}
    submissions = run_dir / "submissions"
    scored = score_files(submissions / "golds.json", submissions / "task.json")
    (value,) = {
        row["value"]
        for row in record.leaderboard
        if (row["arm"], row["metric"], row["rules"]) == ("task", "rouge1", "official")
    }
    assert scored["LaMP_4"]["official"]["rouge1"] == value
    lines = (run_dir / "predictions" / "task.jsonl").read_text().splitlines()
    assert [json.loads(line)["user_id"] for line in lines] == ["0d1", "0d2"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_suite_ends_in_the_papers_table(model, tmp_path, name):
    text = launch(model, tmp_path, f"suite={name}")
    assert f"the paper's {name}, ours of SYNTHETIC users" in text
    found = records(tmp_path)
    assert [record.config["task"] for record in found] == list(
        dict.fromkeys(task for task, _ in TABLES[name][1])
    )
    with (tmp_path / f"{name}.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 2 * len(TABLES[name][1])
    for line in lines:
        if (line["metric"], line["whose"]) != ("mae", "ours"):  # this model rates nothing
            assert all(line[column] for column in TABLES[name][0]), line
    assert {line["task"] for line in lines} <= set(TASKS)


@pytest.mark.slow
def test_the_depth_sweep_shares_stage_1(model, tmp_path):
    launch(model, tmp_path, "experiment=depth_sweep")
    found = records(tmp_path)
    assert [
        next(row["blocks"] for row in record.leaderboard if row["arm"] == "user")
        for record in found
    ] == [4, 3, 2]
    trained = [s.reused for r in found for s in r.stages if s.stage == "task_adapters"]
    assert trained == [False, True, True]
