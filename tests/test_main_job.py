"""The main job end to end: the command line on a tiny random model."""

import csv
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny_model

from lamp_eval import __main__ as command_line
from lamp_eval import pipeline
from lamp_eval.compare import pairs_of_files, report
from lamp_eval.config import ARMS, BACKWARD_PATHS
from lamp_eval.data.lamp import read_users
from lamp_eval.metrics import RULES
from lamp_eval.prompts import oppu
from lamp_eval.results import RunRecord
from lamp_eval.score import score_files
from lamp_eval.tasks import TASKS

REPOSITORY = Path(__file__).resolve().parents[1]
EXPERIMENT = "movie_tagging_per_user"
TASK = TASKS["movie_tagging"]
FIELDS = {
    "query_id", "user_id", "donor_id", "prompt_hash", "output", "gold", "finished", "scores",
}  # fmt: skip


@dataclass
class Runs:
    """The tiny model, and the first run, which other tests reuse."""

    model: Path
    output_dir: Path
    first: Path  # the folder of the first run

    def options(self, output_dir: Path | None = None, **changed: Any) -> list[str]:
        return _options(self.model, output_dir or self.output_dir, **changed)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("main_job")
    model, output_dir = make_tiny_model(root / "model"), root / "outputs"
    done = _launch(_options(model, output_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "leaked" not in done.stderr  # as multiprocessing says of what the child left behind
    return Runs(model, output_dir, _finished(output_dir)[0])


def _options(model: Path, output_dir: Path, **changed: Any) -> list[str]:
    options: dict[str, Any] = {
        "experiment": EXPERIMENT,
        "model.path": model,
        "output_dir": output_dir,
        "quantization.group_size": 32,
        "data.n_users": 3,
        "data.n_task_users": 4,
        "data.n_records": 5,
        "data.n_queries": 3,
        "adapter.task.batch_size": 4,
        "adapter.task.max_steps": 2,
        "adapter.user.epochs": 1,
        "adapter.user.accumulation": 2,
        "n_resamples": 99,
    } | {name.replace("__", "."): value for name, value in changed.items()}
    return [f"{name}={value}" for name, value in options.items() if value is not None]


def _command(options: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "lamp_eval", *options]


def _environment() -> dict[str, str]:
    # One thread: more cost more than they save on a model this small.
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def _launch(options: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(options), env=_environment(), capture_output=True, text=True, timeout=120
    )


def _finished(output_dir: Path) -> list[Path]:
    """The folders of finished runs, oldest first."""
    files = output_dir.glob(f"{EXPERIMENT}/**/run.json")
    return [path.parent for path in sorted(files, key=lambda path: path.stat().st_mtime_ns)]


def _record(run_dir: Path) -> RunRecord:
    return RunRecord.model_validate_json((run_dir / "run.json").read_bytes())


def _predictions(run_dir: Path, arm: str) -> list[dict[str, Any]]:
    lines = (run_dir / "predictions" / f"{arm}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _reused(record: RunRecord, stage: str) -> list[bool]:
    return [s.reused for s in record.stages if s.stage == stage]


def _run_here(options: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line in this process, which saves the imports."""
    for name in ("HYDRA_FULL_ERROR", "TRANSFORMERS_VERBOSITY"):  # `main` sets them
        monkeypatch.setenv(name, os.environ.get(name, ""))
    for name in ("_finished", "_mistakes"):  # of a command run before, in this process
        monkeypatch.setattr(command_line, name, [])
    monkeypatch.setattr(sys, "argv", ["lamp_eval", *options])
    command_line.main()


def _with_stages(runs: Runs, output_dir: Path, *stages: str) -> Path:
    """A folder of results that has these stages of the first run to reuse."""
    for stage in stages:
        shutil.copytree(runs.output_dir / "stages" / stage, output_dir / "stages" / stage)
    return output_dir


# A whole run


def test_run_record(runs: Runs) -> None:
    record = _record(runs.first)
    assert record.name == EXPERIMENT
    assert record.synthetic is True
    assert (record.n_users, record.n_queries, record.n_task_users) == (3, 9, 4)
    assert record.users_without_history == []
    assert record.model_origin == "path"
    assert record.config["adapter"]["user"]["epochs"] == 1
    assert "adapter.user.epochs=1" in record.overrides
    assert set(record.parity_error) == {"base", "task base"}
    assert max(record.parity_error.values()) < 1e-4
    assert record.backward["path"] in BACKWARD_PATHS
    assert record.backward["requested"] == "auto"
    assert record.backward["mistakes"] == {}
    assert not any(stage.reused for stage in record.stages)
    counts = {
        name: len(_reused(record, name))
        for name in ("task_adapters", "bases", "user_adapters", "predictions")
    }
    expected = {"task_adapters": 1, "bases": 2, "user_adapters": 3, "predictions": 6 * 3}
    assert counts == expected
    assert all(Path(stage.path).is_dir() for stage in record.stages)
    assert len(set(record.seeds.values())) == 3


def test_donors_are_a_derangement(runs: Runs) -> None:
    donors = _record(runs.first).donors
    assert sorted(donors) == sorted(donors.values()) == [f"sample-00{i}" for i in range(3)]
    assert all(user != donor for user, donor in donors.items())
    rows = _predictions(runs.first, "cross_user")
    assert {row["user_id"]: row["donor_id"] for row in rows} == donors


def test_predictions_of_all_arms(runs: Runs) -> None:
    asked = None
    for arm in ARMS:
        rows = _predictions(runs.first, arm)
        assert len(rows) == 9
        assert all(set(row) == FIELDS for row in rows)
        assert all(row["gold"] in TASK.labels for row in rows)
        assert all(isinstance(row["output"], str) for row in rows)
        assert all(isinstance(row["finished"], bool) for row in rows)
        assert all(set(row["scores"]) == set(RULES) for row in rows)
        scored = [row["scores"][rules] for row in rows for rules in RULES]
        assert all(set(scores) == {"correct", "failed_parse"} for scores in scored)
        asked = asked or [(row["user_id"], row["query_id"], row["gold"]) for row in rows]
        assert [(row["user_id"], row["query_id"], row["gold"]) for row in rows] == asked
        if arm != "cross_user":
            assert all(row["donor_id"] is None for row in rows)
    prompts = {a: [r["prompt_hash"] for r in _predictions(runs.first, a)] for a in ARMS}
    assert prompts["task"] == prompts["user"] == prompts["cross_user"]
    assert prompts["task_retrieval"] == prompts["base_retrieval"] != prompts["task"]


def test_tables(runs: Runs) -> None:
    users = _rows(runs.first / "users.csv")
    assert len(users) == 3 * len(ARMS)
    for arm in ARMS:
        rows = _predictions(runs.first, arm)
        for user in (user for user in users if user["arm"] == arm):
            own = [row["scores"] for row in rows if row["user_id"] == user["user_id"]]
            for rules in RULES:
                correct = sum(scores[rules]["correct"] for scores in own)
                assert float(user[f"{rules}_accuracy"]) == pytest.approx(correct / len(own))
    board = _rows(runs.first / "leaderboard.csv")
    assert {row["arm"] for row in board} == set(ARMS)
    assert all(row["synthetic"] == "True" for row in board)
    assert {row["metric"] for row in board} == set(TASK.metrics)
    assert {row["reference"] for row in board if row["arm"] == "user"} == {"task", "cross_user"}
    for row in board:
        rows = _predictions(runs.first, row["arm"])
        if row["metric"] == "accuracy":
            correct = sum(r["scores"][row["rules"]]["correct"] for r in rows)
            assert float(row["value"]) == pytest.approx(correct / len(rows))
    shared = _rows(runs.output_dir / "leaderboard.csv")
    assert [row for row in shared if row["run"] == str(runs.first)] == board


def test_submissions_pass_the_scorer_and_the_comparison(runs: Runs) -> None:
    folder = runs.first / "submissions"
    board = [row for row in _rows(runs.first / "leaderboard.csv") if row["metric"] == "accuracy"]
    for arm in ARMS:
        scores = score_files(folder / "golds.json", folder / f"{arm}.json")[TASK.lamp_id]
        assert scores["n_queries"] == 9
        for row in board:
            if row["arm"] == arm:
                assert float(row["value"]) == pytest.approx(scores[row["rules"]]["accuracy"])
    user_of, n_records = read_users(folder / "users.json")
    assert set(n_records.values()) == {5}
    paired = pairs_of_files(
        folder / "golds.json", [folder / "user.json"], folder / "task.json",
        cross_user=folder / "cross_user.json", user_of=user_of,
    )  # fmt: skip
    for found in report(paired, n_records, n_resamples=99):
        (row,) = (
            row for row in board
            if row["rules"] == "official" and row["arm"] == found["arm"]
            and row["reference"] == found["reference"]
        )  # fmt: skip
        for name in ("delta", "delta_u", "ci_low", "ci_u_high", "p"):
            assert float(row[name]) == pytest.approx(found[name], abs=1e-12), name


def test_nothing_partial_is_left(runs: Runs) -> None:
    assert list(runs.output_dir.rglob(".partial*")) == []
    for stage in (runs.output_dir / "stages").iterdir():
        assert all((folder / "key.json").is_file() for folder in stage.iterdir())


def test_data_report_shows_the_data_and_runs_nothing(tmp_path: Path) -> None:
    # No model: none is looked for.
    options = _options(tmp_path / "no model", tmp_path / "outputs", **{"data.report": "true"})
    done = _launch(options)
    assert done.returncode == 0, done.stderr
    assert "queries whose text is in a record of their user" in done.stdout
    assert not (tmp_path / "outputs").exists() or not any((tmp_path / "outputs").iterdir())


# Repetition


def test_second_identical_run_reuses_all(runs: Runs) -> None:
    before = {p: p.stat().st_mtime_ns for p in (runs.output_dir / "stages").glob("*/*/*")}
    done = _launch(runs.options())
    assert done.returncode == 0, done.stdout + done.stderr
    second = _finished(runs.output_dir)[-1]
    assert second != runs.first
    record = _record(second)
    assert all(stage.reused for stage in record.stages)
    for arm in ARMS:
        assert _predictions(second, arm) == _predictions(runs.first, arm)
    assert {p: p.stat().st_mtime_ns for p in (runs.output_dir / "stages").glob("*/*/*")} == before


def test_fewer_users_from_scratch_give_the_same_predictions(runs: Runs, tmp_path: Path) -> None:
    """Determinism, and nothing of a user depends on who else is evaluated."""
    done = _launch(runs.options(tmp_path / "outputs", data__n_users=2))
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = _finished(tmp_path / "outputs")
    assert not any(stage.reused for stage in _record(run_dir).stages)
    for arm in ("base", "base_retrieval", "task", "task_retrieval", "user"):
        ours = _predictions(run_dir, arm)
        assert {row["user_id"] for row in ours} == {"sample-000", "sample-001"}
        theirs = [r for r in _predictions(runs.first, arm) if r["user_id"] != "sample-002"]
        assert ours == theirs
    # The trained weights too, to the last bit: their folders are named by their inputs.
    for path in (tmp_path / "outputs" / "stages").glob("user_adapters/*/*.safetensors"):
        other = runs.output_dir / path.relative_to(tmp_path / "outputs")
        assert path.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_device_agreement_trains_the_same_adapters_twice(runs: Runs) -> None:
    done = _launch(runs.options(experiment="device_agreement"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "one recipe, two backends, 3 SYNTHETIC users" in " ".join(done.stdout.split())
    (path,) = runs.output_dir.glob("device_agreement/*/agreement.csv")
    rows = _rows(path)
    assert [row["user_id"] for row in rows] == [f"sample-00{i}" for i in range(3)]
    assert all(0 < float(row["loss_difference"]) < 1e-4 for row in rows)
    ours, theirs = (_record(path.parent / job) for job in ("0", "1"))
    assert all(stage.reused for stage in ours.stages)  # of the first run
    assert not any(_reused(theirs, "user_adapters"))
    assert all(stage.reused for stage in theirs.stages if stage.stage in ("task_adapters", "bases"))
    trained = [row for row in theirs.leaderboard if row["arm"] == "user"]
    assert {row["backend"] for row in trained} == {"torch"}
    folders = [
        {s.what: s.path for s in r.stages if s.stage == "user_adapters"} for r in (ours, theirs)
    ]
    for user_id, folder in folders[0].items():
        tensors = [
            (Path(where) / "adapters.safetensors").read_bytes()
            for where in (folder, folders[1][user_id])
        ]
        assert tensors[0] != tensors[1]  # torch's own


def test_sweep_over_blocks_shares_the_first_stages(runs: Runs) -> None:
    done = _launch(["-m", *runs.options(adapter__user__blocks="4,2")])
    assert done.returncode == 0, done.stdout + done.stderr
    four, two = _finished(runs.output_dir)[-2:]
    records = [_record(four), _record(two)]
    for record in records:
        assert _reused(record, "task_adapters") == [True]
        assert _reused(record, "bases") == [True, True]
    # All four blocks are what "all" meant in the first run.
    assert _reused(records[0], "user_adapters") == [True] * 3
    assert _reused(records[1], "user_adapters") == [False] * 3
    board = _rows(runs.output_dir / "leaderboard.csv")
    blocks = {
        run: {row["blocks"] for row in board if row["run"] == str(run) and row["arm"] == "user"}
        for run in (four, two)
    }
    assert blocks == {four: {"4"}, two: {"2"}}
    assert _predictions(four, "user") == _predictions(runs.first, "user")
    assert "sweep: 2 runs side by side" in done.stdout


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_interrupted_run_continues(
    runs: Runs, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    output_dir = _with_stages(runs, tmp_path / "outputs", "task_adapters", "bases")
    options = runs.options(output_dir, arms="[task,user]", data__n_users=3, adapter__user__epochs=8)
    adapters = output_dir / "stages" / "user_adapters"

    def whole() -> list[Path]:
        if not adapters.is_dir():
            return []
        return [path for path in adapters.iterdir() if not path.name.startswith(".")]

    # Where SIGINT is ignored (a background job of a shell), a child would ignore it as well.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            _command(options),
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, handler)
    deadline = time.monotonic() + 60
    while not whole() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stdout + stderr
    assert "Traceback" not in stdout + stderr
    assert "continues from there" in stdout
    kept = whole()
    assert 1 <= len(kept) < 3
    for folder in kept:
        assert {p.name for p in folder.iterdir()} == {
            "adapter_config.json",
            "adapters.safetensors",
            "key.json",
            "metrics.jsonl",
            "training.json",
        }
    assert list(output_dir.rglob(".partial*")) == []
    assert _finished(output_dir) == []

    done = _launch(options)
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = _finished(output_dir)
    record = _record(run_dir)
    assert sum(_reused(record, "user_adapters")) == len(kept)
    assert all(folder.name[0] != "." for folder in adapters.iterdir())
    assert _reused(record, "bases") == [True]


def test_answers_chosen_among_the_labels(runs: Runs) -> None:
    done = _launch(runs.options(runs.output_dir, arms="[task,user]", protocol__decoding="labels"))
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = _finished(runs.output_dir)[-1]
    record = _record(run_dir)
    assert all(_reused(record, "user_adapters"))
    for arm in ("task", "user"):
        answers = [row["output"] for row in _predictions(run_dir, arm)]
        assert len(answers) == 9
        assert set(answers) <= set(TASK.labels)
    rows = _rows(run_dir / "leaderboard.csv")
    assert {row["decoding"] for row in rows} == {"labels by log-likelihood per token"}
    assert {float(row["failed_parse_rate"]) for row in rows} == {0.0}


def _answer_keys(output_dir: Path) -> dict[str, dict[str, Any]]:
    """The keys of all answers, by the names of their folders."""
    files = (output_dir / "stages" / "predictions").glob("*/key.json")
    return {path.parent.name: json.loads(path.read_text()) for path in files}


def test_sampled_answers(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oppu, "N_SAMPLED_TOKENS", 20)  # 200 take their time

    def predictions(name: str, **changed: Any) -> dict[str, list[dict[str, Any]]]:
        stages = ("task_adapters", "bases", "user_adapters")
        output_dir = _with_stages(runs, tmp_path / name, *stages)
        changed = {"arms": "[base,task,user]", "protocol__decoding": "oppu_sampled"} | changed
        _run_here(runs.options(output_dir, **changed), monkeypatch)
        (run_dir,) = _finished(output_dir)
        rows = _rows(run_dir / "leaderboard.csv")
        assert {row["decoding"] for row in rows} == {
            "sampled, temperature 0.1, top-k 10, top-p 0.9"
        }
        return {arm: _predictions(run_dir, arm) for arm in _record(run_dir).config["arms"]}

    first = predictions("first")
    assert predictions("again") == first
    assert predictions("other seed", arms="[base]", seed=1)["base"] != first["base"]
    keys, greedy = _answer_keys(tmp_path / "first"), _answer_keys(runs.output_dir)
    assert len(keys) == 3 * 3
    assert not keys.keys() & greedy.keys()
    assert {key["max_new_tokens"] for key in keys.values()} == {20}
    assert all(len(key["sample_seeds"]) == 3 for key in keys.values())
    assert not any("sample_seeds" in key for key in greedy.values())


# Users with one query each, as in a run over the benchmark


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The prompts of each call that generates answers; further calls append to it."""
    module = importlib.import_module("on_device.generate")
    counts: list[int] = []

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def generate(model: Any, prompts: Any, *others: Any, **options: Any) -> Any:
            counts.append(len(prompts))
            return real(model, prompts, *others, **options)

        return generate

    for name in ("generate", "label_log_likelihoods"):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    return counts


@pytest.mark.parametrize("decoding", ["greedy", "labels", "oppu_sampled"])
def test_users_answered_together_get_the_answers_of_each_alone(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generated: list[int], decoding: str
) -> None:
    monkeypatch.setattr(oppu, "N_SAMPLED_TOKENS", 20)
    found = {}
    for name, passes, n_calls in (("together", pipeline.PASSES_AT_ONCE, 1), ("alone", 0, 6)):
        monkeypatch.setattr(pipeline, "PASSES_AT_ONCE", passes)
        output_dir = _with_stages(runs, tmp_path / name, "bases")
        options = runs.options(
            output_dir,
            arms="[base]",
            data__n_users=6,
            data__n_queries=1,
            protocol__decoding=decoding,
        )
        _run_here(options, monkeypatch)
        assert generated == [6 // n_calls] * n_calls
        generated.clear()
        (run_dir,) = _finished(output_dir)
        record = _record(run_dir)
        stages = [stage for stage in record.stages if stage.stage == "predictions"]
        assert sorted(stage.what for stage in stages) == [f"base, sample-00{i}" for i in range(6)]
        assert all(stage.seconds > 0 and not stage.reused for stage in stages)
        assert sum(stage.seconds for stage in stages) < record.seconds
        found[name] = _predictions(run_dir, "base"), _answer_keys(output_dir)
        _run_here(options, monkeypatch)
        assert generated == []  # all of it is there
    assert found["together"] == found["alone"]
    assert len({row["output"] for row in found["alone"][0]}) > 1


def test_what_was_answered_before_a_stop_is_kept(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generated: list[int], capsys: Any
) -> None:
    module = importlib.import_module("on_device.generate")
    output_dir = _with_stages(runs, tmp_path / "outputs", "bases")
    changed = {"arms": "[base]", "data__n_users": 5, "data__n_queries": 1}
    options = runs.options(output_dir, **changed)
    count = module.generate

    def fails(*args: Any, **options: Any) -> Any:
        if len(generated) == 1:
            raise MemoryError("no more")
        return count(*args, **options)

    monkeypatch.setattr(module, "generate", fails)
    monkeypatch.setattr(pipeline, "PASSES_AT_ONCE", 0.7)  # about two users' prompts
    message = _fails(options, monkeypatch, capsys)
    first = generated[0]
    assert 1 < first < 5
    assert re.search(r"predictions, base, sample-00\d and \d more", message)
    assert len(_answer_keys(output_dir)) == first

    monkeypatch.setattr(module, "generate", count)
    _run_here(options, monkeypatch)
    assert sum(generated) == 5
    (run_dir,) = _finished(output_dir)
    assert sum(_reused(_record(run_dir), "predictions")) == first


def test_a_row_for_each_step_of_each_user(runs: Runs) -> None:
    stages = _record(runs.first).stages
    folders = [Path(stage.path) for stage in stages if stage.stage == "user_adapters"]
    assert len(folders) == 3
    for folder in folders:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 2, 3]  # 5 records in windows of 2
        assert {"loss", "learning_rate", "gradient_norm", "tokens", "seconds"} < set(rows[0])
        training = json.loads((folder / "training.json").read_text())
        assert training == {"stopped": None, "checkpoint": None, "predicted_peak_bytes": None}


def test_a_user_whose_training_is_stopped_stops_nobody_else(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """One user's loss is not finite from the first step on: the task model serves that user."""
    output_dir = _with_stages(runs, tmp_path / "outputs", "task_adapters", "bases")
    from on_device import trainer

    real, calls = trainer.trouble, []

    def trouble(loss: float, norm: float, rows: Any, n_tokens: int) -> str | None:
        calls.append(loss)
        return real(float("nan") if len(calls) == 4 else loss, norm, rows, n_tokens)

    monkeypatch.setattr(trainer, "trouble", trouble)
    for _ in range(2):  # the second time from disk
        _run_here(runs.options(output_dir, arms="[task,user]"), monkeypatch)
        assert "is not trained to the end, step 1 of 3: the loss is nan" in capsys.readouterr().out
        run_dir = _finished(output_dir)[-1]
        record = _record(run_dir)
        (stopped,) = record.stopped_users
        answers = {
            arm: [row["output"] for row in _predictions(run_dir, arm) if row["user_id"] == stopped]
            for arm in ("task", "user")
        }
        assert answers["task"] == answers["user"]
        whole = _predictions(runs.first, "user")
        others = [row for row in _predictions(run_dir, "user") if row["user_id"] != stopped]
        assert others == [row for row in whole if row["user_id"] != stopped]


@pytest.mark.slow
def test_interrupted_stage_1_leaves_nothing(runs: Runs, tmp_path: Path) -> None:
    """It computes in a child process, which must be gone before its folder is removed."""
    output_dir = tmp_path / "outputs"
    endless = {"adapter__task__max_steps": None, "adapter__task__epochs": 100_000}
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            _command(runs.options(output_dir, **endless)),
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, handler)
    deadline = time.monotonic() + 60
    while not list(output_dir.glob("stages/task_adapters/.partial*")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    time.sleep(3)  # it trains
    pids = children.read_text().split() if children.exists() else []
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stdout + stderr
    assert "Traceback" not in stdout + stderr
    assert "leaked" not in stderr
    deadline = time.monotonic() + 10
    while any(_runs(int(pid)) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list((output_dir / "stages" / "task_adapters").iterdir()) == []


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_full_disk_is_a_mistake_that_loses_nothing(runs: Runs, tmp_path: Path) -> None:
    """Files of at most 8 KiB: the user adapters are larger, and MLX only says "Unable to write"."""
    output_dir = _with_stages(runs, tmp_path / "outputs", "task_adapters", "bases")
    limited = ["bash", "-c", 'ulimit -f 8; exec "$@"', "_", *_command(runs.options(output_dir))]
    done = subprocess.run(limited, env=_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "Unable to write" in done.stderr
    assert "user_adapters" in done.stderr
    assert "free some space" in done.stderr
    assert list((output_dir / "stages" / "user_adapters").iterdir()) == []
    assert _finished(output_dir) == []


@pytest.mark.slow
def test_two_runs_of_the_real_model_predict_the_same(tmp_path: Path) -> None:
    """With all threads and from scratch: the embedded model, reduced sizes."""
    found = []
    for name in ("first", "second"):
        options = [
            f"experiment={EXPERIMENT}", "data.n_users=2", "data.n_queries=4", "data.n_records=8",
            "adapter.task.max_steps=4", f"output_dir={tmp_path / name}",
        ]  # fmt: skip
        done = subprocess.run(_command(options), capture_output=True, text=True, cwd=REPOSITORY)
        assert done.returncode == 0, done.stdout + done.stderr
        (run_dir,) = _finished(tmp_path / name)
        weights = sorted((tmp_path / name).glob("stages/user_adapters/*/*.safetensors"))
        found.append(
            ([_predictions(run_dir, arm) for arm in ARMS], [path.read_bytes() for path in weights])
        )
    assert len(found[0][1]) == 2
    assert found[0] == found[1]


# Data of one's own


def _user(user_id: str, n_records: int, n_queries: int = 2) -> dict[str, Any]:
    tags = ", ".join(TASK.labels)
    return {
        "user_id": user_id,
        "profile": [
            {
                "id": f"{user_id}-r{i}",
                "description": f"Film {i} of {user_id} about the sea.",
                "tag": TASK.labels[(i + len(user_id)) % 15],
            }
            for i in range(n_records)
        ],
        "query": [
            {
                "id": f"{user_id}-q{i}",
                "input": "Which tag does this movie relate to among the following tags? Just answer"
                f" with the tag name without further explanation. tags: [{tags}] description: "
                f"Another film {i} with dragons.",
                "gold": TASK.labels[i],
            }
            for i in range(n_queries)
        ],
    }


def _write_oppu(root: Path, content: object) -> Path:
    root.mkdir()
    text = content if isinstance(content, str) else json.dumps(content)
    (root / "user_top_100_history.json").write_text(text)
    return root


def _oppu_options(runs: Runs, output_dir: Path, data: Path, **changed: Any) -> list[str]:
    sample_only = dict.fromkeys(
        ("data__n_users", "data__n_task_users", "data__n_records", "data__n_queries")
    )
    return runs.options(output_dir, data="oppu", data__dir=data, **sample_only | changed)


@pytest.mark.slow
def test_user_without_history_is_served_by_the_task_arm(runs: Runs, tmp_path: Path) -> None:
    data = _write_oppu(tmp_path / "data", [_user("u1", 4), _user("new", 0), _user("u22", 3)])
    done = _launch(_oppu_options(runs, tmp_path / "outputs", data))
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = _finished(tmp_path / "outputs")
    record = _record(run_dir)
    assert record.users_without_history == ["new"]
    assert record.synthetic is False
    assert record.task_users_origin == "evaluated"
    assert record.n_users == 3
    assert record.donors == {"u1": "u22", "u22": "u1"}
    assert len(_reused(record, "user_adapters")) == 2
    task = [row["output"] for row in _predictions(run_dir, "task") if row["user_id"] == "new"]
    assert len(task) == 2
    for arm in ("user", "cross_user"):
        rows = [row for row in _predictions(run_dir, arm) if row["user_id"] == "new"]
        assert [row["output"] for row in rows] == task
        assert [row["donor_id"] for row in rows] == [None, None]
    served = {
        (row["arm"], row["user_id"]): row["adapter_of"] for row in _rows(run_dir / "users.csv")
    }
    assert served["user", "new"] == served["cross_user", "new"] == ""
    assert served["cross_user", "u1"] == "u22"


@pytest.mark.slow
def test_users_in_another_order_get_the_same_predictions(runs: Runs, tmp_path: Path) -> None:
    """Stage 1 trains on the evaluated users here, so their order must not matter there either."""
    users = [_user(user_id, 3) for user_id in ("u1", "u22", "u333")]
    found = []
    for name, content in (("there", users), ("back", users[::-1])):
        data = _write_oppu(tmp_path / f"{name}-data", content)
        done = _launch(_oppu_options(runs, tmp_path / name, data))
        assert done.returncode == 0, done.stdout + done.stderr
        (run_dir,) = _finished(tmp_path / name)
        found.append(
            {
                (arm, row["user_id"], row["query_id"]): row
                for arm in ARMS
                for row in _predictions(run_dir, arm)
            }
        )
    assert len(found[0]) == len(ARMS) * 6
    assert found[0] == found[1]


# Mistakes: exit code 2, what to do, and no traceback


def _fails(
    options: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Runs the command line and returns its message."""
    with pytest.raises(SystemExit) as caught:
        _run_here(options, monkeypatch)
    message = capsys.readouterr().err
    assert caught.value.code == 2, message
    assert "lamp_eval: error:" in message
    assert "Traceback" not in message
    assert "to do:" in message
    return message


def test_too_many_blocks(runs: Runs, tmp_path: Path) -> None:
    done = _launch(runs.options(tmp_path / "outputs", adapter__user__blocks=5))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "adapter.user.blocks" in done.stderr
    assert "4" in done.stderr
    assert _finished(tmp_path / "outputs") == []


def test_model_without_tokenizer(runs: Runs, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    model = tmp_path / "model"
    shutil.copytree(runs.model, model)
    for path in model.glob("*token*"):
        path.unlink()
    message = _fails(_options(model, tmp_path / "outputs"), monkeypatch, capsys)
    assert "tokenizer" in message
    assert str(model) in message


def test_output_dir_is_a_file(runs: Runs, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "outputs").write_text("mine")
    message = _fails(runs.options(tmp_path / "outputs"), monkeypatch, capsys)
    assert "output" in message
    assert (tmp_path / "outputs").read_text() == "mine"


def test_data_that_is_not_json(runs: Runs, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    data = _write_oppu(tmp_path / "data", json.dumps([_user("u1", 2)])[:-20])
    message = _fails(_oppu_options(runs, tmp_path / "outputs", data), monkeypatch, capsys)
    assert "user_top_100_history.json" in message
    assert "not JSON" in message


def test_gold_outside_the_labels(runs: Runs, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    user = _user("u1", 2)
    user["query"][1]["gold"] = "western"
    data = _write_oppu(tmp_path / "data", [user, _user("u22", 2)])
    message = _fails(_oppu_options(runs, tmp_path / "outputs", data), monkeypatch, capsys)
    assert "western" in message
    assert "'u1'" in message
    assert "u1-q1" in message


def test_misspelt_option(runs: Runs, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    options = runs.options(tmp_path / "outputs", **{"adapter.user.epoch": 1})
    assert "adapter.user.epochs" in _fails(options, monkeypatch, capsys)
