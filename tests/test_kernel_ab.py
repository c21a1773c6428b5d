"""Two backward paths against each other: the steps that are measured, and what is said of them."""

from __future__ import annotations

import tiny  # isort: skip  # noqa: F401  # loads the BLAS, before MLX

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from made_runs import make_run
from rich.console import Console
from test_config import composed

from lamp_eval import kernel_ab, measures
from lamp_eval.__main__ import main
from lamp_eval.config import MEASURES, KernelAbConfig, QuantizationConfig, UserAdapterConfig
from lamp_eval.errors import UserError
from lamp_eval.kernel_ab import FUSED, PHASES, Agreement, Measured, Timing
from lamp_eval.report import write_report
from lamp_eval.results import RunRecord, read_leaderboard, read_run, rebuild_leaderboard
from lamp_eval.training import windows
from on_device.kernel_ab import (
    PhasedTraining,
    load_models,
    measure_kernel_ab,
    random_example,
)
from on_device.model import DeviceModel
from on_device.trainer import train_user_adapter
from recipes.base import build_base

REPOSITORY = Path(__file__).resolve().parents[1]
PACKED = QuantizationConfig(name="4bit_g32", bits=4, group_size=32, embedding_bits=4)
RECIPE = UserAdapterConfig(
    rank=4, projections=["q_proj", "v_proj"], learning_rate=2e-3, accumulation=1, epochs=2
)
PATHS = ["packed", "packed_generic"]
CONFIG = KernelAbConfig(paths=PATHS, lengths=[8, 13], rounds=3, n_records=3)


@pytest.fixture(scope="module")
def base_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    build_base(
        model_dir, None, PACKED, dtype="float32", base_dir=directory, report=lambda line: None
    )
    return directory


# The steps


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("blocks", "checkpoint"), [("all", None), (2, None), ("all", 1)])
def test_a_step_in_phases_is_the_trainers(
    base_dir: Path, path: str, blocks: int | str, checkpoint: int | None
) -> None:
    """What is measured is what trains: the same adapter and losses, to the last bit."""
    recipe = replace(RECIPE, blocks=blocks)
    model = DeviceModel(base_dir, recipe, path=path)
    examples = [random_example(8 + 3 * i, model.n_tokens, f"{i}") for i in range(3)]
    training = train_user_adapter(
        model, examples, recipe, seed=5, tokens_per_pass=64, report=lambda step: None,
        checkpoint=checkpoint or "none",
    )  # fmt: skip
    expected = {name: np.array(tensor) for name, tensor in model.adapter().items()}
    assert any(tensor.any() for name, tensor in expected.items() if name.endswith("lora_b"))

    phased = PhasedTraining(model, recipe, n_steps=6, seed=5, checkpoint=checkpoint)
    steps = [phased.step(example) for (example,) in windows(examples, recipe, seed=5)]
    assert [step.loss for step in steps] == [row["loss"] for row in training.rows]
    assert {name: np.array(t).tobytes() for name, t in phased.adapter.items()} == {
        name: tensor.tobytes() for name, tensor in expected.items()
    }
    for step in steps:
        assert set(step.seconds) == set(PHASES)
        assert min(step.seconds.values()) > 0


def test_both_models_share_the_base(base_dir: Path) -> None:
    before = mx.get_active_memory()
    first = DeviceModel(base_dir, RECIPE, path="packed")
    mx.eval(first.model.parameters())
    alone = mx.get_active_memory() - before
    del first
    models = load_models(base_dir, RECIPE, PATHS)
    mx.eval([model.model.parameters() for model in models.values()])
    assert mx.get_active_memory() - before < 1.1 * alone


@pytest.fixture(scope="module")
def measured(base_dir: Path) -> Measured:
    reported: list[tuple[str, int]] = []
    found = measure_kernel_ab(
        base_dir, replace(RECIPE, accumulation=8), CONFIG, checkpoint=None, seed=0,
        report=reported.append,
    )  # fmt: skip
    assert len(reported) == kernel_ab.n_steps(CONFIG, RECIPE.epochs)
    n_tokens = sum(n for _, n in reported)
    assert n_tokens == 2 * kernel_ab.n_tokens(CONFIG, RECIPE.epochs)
    return found


def test_every_phase_of_every_round_is_there(measured: Measured) -> None:
    found = [(t.length_tokens, t.round, t.path, t.phase) for t in measured.timings]
    assert len(found) == len(set(found)) == 2 * 3 * 2 * (len(PHASES) + 1)
    assert {length for length, *_ in found} == {8, 13}
    assert {phase for *_, phase in found} == {*PHASES, FUSED}
    assert all(t.seconds > 0 for t in measured.timings)


def test_the_steps_of_the_paths_alternate(measured: Measured) -> None:
    """A B A B, then B A B A: in phases with each path, then fused with each."""
    steps: dict[int, tuple[int, int, bool, str]] = {}
    for t in measured.timings:
        steps[t.order] = t.length_tokens, t.round, t.phase == FUSED, t.path
    assert list(steps) == list(range(2 * 3 * 4))
    a, b = PATHS
    assert list(steps.values()) == [
        (length, round, fused, path)
        for length in (8, 13)
        for round, order in enumerate(([a, b], [b, a], [a, b]))
        for fused in (False, True)
        for path in order
    ]


def test_both_paths_train_alike(measured: Measured) -> None:
    first, second = (measured.losses[path] for path in PATHS)
    assert len(first) == len(second) == 6  # three records, twice
    np.testing.assert_allclose(first, second, rtol=1e-5)
    assert sum(first[3:]) < sum(first[:3])
    assert measured.stopped == {}


def test_a_loss_that_is_not_finite_is_a_mistake(
    base_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from on_device import trainer

    monkeypatch.setattr(trainer, "trouble", lambda *given: "the loss is nan")
    with pytest.raises(UserError, match="the loss is nan") as caught:
        measure_kernel_ab(
            base_dir, RECIPE, CONFIG, checkpoint=None, seed=0, report=lambda step: None
        )
    assert "packed" in caught.value.where


# What the numbers say


def _timings(seconds: dict[str, list[tuple[float, float]]], length: int = 8) -> list[Timing]:
    """By phase, of each round, the seconds of both paths."""
    return [
        Timing(0, length, round, path, phase, own)
        for phase, rounds in seconds.items()
        for round, pair in enumerate(rounds)
        for path, own in zip(PATHS, pair, strict=True)
    ]


def test_ratios_pair_the_steps_of_a_round() -> None:
    (found,) = kernel_ab.ratios(_timings({"backward": [(1.0, 5.0), (5.0, 5.0), (2.0, 3.0)]}), PATHS)
    assert (found.length_tokens, found.phase, found.n_rounds) == (8, "backward", 3)
    assert (found.first, found.second) == (2.0, 5.0)
    assert (found.ratio, found.low, found.high) == (1.5, 1.0, 5.0)


def test_agreement_of_losses() -> None:
    found = kernel_ab.agreement([4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.5, 9.0])
    assert found is not None
    assert found.n_steps == 4  # as far as both go
    assert found.correlation == pytest.approx(np.corrcoef([4, 3, 2, 1], [4, 3, 2, 1.5])[0, 1])
    assert found.max_relative_difference == 0.5
    assert (found.first, found.second) == (1.0, 1.5)
    assert kernel_ab.agreement([2.0] * 3, [2.0] * 3) == Agreement(3, None, 0.0, 2.0, 2.0)
    assert kernel_ab.agreement([2.0, 1.0], [2.0, 1.0]) == Agreement(2, None, 0.0, 1.0, 1.0)
    assert kernel_ab.agreement([], [1.0]) is None


def _said(
    forward: list[tuple[float, float]], fused: float, paths: Sequence[str] = PATHS,
    *, dispatched: bool,
) -> str:  # fmt: skip
    seconds = {phase: [(1.0, 1.0)] * 2 for phase in PHASES}
    seconds |= {"forward": forward, "backward": [(2.0, 4.0)] * 2, FUSED: [(1.0, fused)] * 2}
    compared = kernel_ab.ratios(_timings(seconds), PATHS)
    measured = Measured((), {}, {})
    lines = kernel_ab.findings(
        measured, compared, None, paths, dispatched=dispatched, reason="why it is so"
    )
    return "\n".join(lines)


def test_findings() -> None:
    said = _said([(1.0, 1.01), (1.0, 1.02)], 1.5, dispatched=True)
    assert "packed_generic takes 2.00 × the backward time of packed, 1.50 × the step" in said
    assert "packed: the backward pass takes 2.00 × the forward pass; the six phases sum" in said
    assert "sum to 7.00 × the fused step" in said
    assert "control holds: the forward time moved by at most 1.5% (at 8 tokens" in said
    assert "the repaired kernel is dispatched: why it is so" in said


@pytest.mark.parametrize(
    ("forward", "verdict"),
    [([(1.0, 1.2), (1.0, 1.3)], "does NOT hold"), ([(1.0, 0.9), (1.0, 1.4)], "is undecided")],
)
def test_a_control_that_moved(forward: list[tuple[float, float]], verdict: str) -> None:
    assert f"control {verdict}" in _said(forward, 1.5, dispatched=True)


def test_steps_that_do_not_differ_mean_that_no_kernel_was_dispatched() -> None:
    even = [(1.0, 1.0)] * 2
    assert "was never dispatched, though it should be" in _said(even, 1.01, dispatched=True)
    assert "is not dispatched here, both take the generic one: why it is so" in _said(
        even, 1.01, dispatched=False
    )


def test_no_control_between_paths_that_differ_forward() -> None:
    said = _said([(1.0, 3.0)] * 2, 3.0, ["packed", "resident"], dispatched=False)
    assert "control: does not apply" in said and "3.00 ×" in said
    assert "dispatched" not in said


# Configuration


def test_every_measure_is_there() -> None:
    assert tuple(measures.MEASURES) == MEASURES


@pytest.mark.parametrize(
    ("option", "more"),
    [
        ("kernel_ab.paths=[packed,packed]", ()),
        ("kernel_ab.paths=[packed,fast]", ()),
        ("kernel_ab.paths=[packed,resident,dequantize]", ()),
        ("kernel_ab.lengths=[]", ()),
        ("kernel_ab.lengths=[16,8]", ()),
        ("kernel_ab.lengths=[8,8]", ()),
        ("kernel_ab.lengths=[7,8]", ()),
        ("kernel_ab.rounds=1", ()),
        ("kernel_ab.n_records=2", ("adapter.user.epochs=1",)),
        ("on_device.memory_budget_gb=4", ()),
        ("arms=[base]", ()),
        ("measure=speed", ()),
        ("data.report=true", ()),
    ],
)
def test_values_out_of_range(option: str, more: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=f"option {option.split('=')[0]}\n"):
        composed("experiment=kernel_ab", option, *more)


def test_a_measure_without_its_values_names_them_all() -> None:
    with pytest.raises(UserError) as caught:
        composed("measure=kernel_ab", "arms=[]")
    for name in ("paths", "lengths", "rounds", "n_records"):
        assert f"option kernel_ab.{name}\n" in str(caught.value)


def test_the_papers_lengths_and_recomputation() -> None:
    config = composed("experiment=kernel_ab", "setting=paper")
    assert config.kernel_ab is not None
    assert len(config.kernel_ab.lengths) == 6
    assert (config.kernel_ab.lengths[0], config.kernel_ab.lengths[-1]) == (50, 1000)
    assert (config.on_device.checkpoint, config.quantization.bits) == (1, 4)
    assert composed("experiment=kernel_ab", "kernel_ab=paper").on_device.checkpoint == 1
    assert composed("experiment=movie_tagging_per_user").kernel_ab is None


# A whole run


def _options(model_dir: Path, output_dir: Path, *more: str) -> list[str]:
    return [
        "experiment=kernel_ab", f"model.path={model_dir}", f"output_dir={output_dir}",
        "quantization.group_size=32", "kernel_ab.lengths=[8,12]", "kernel_ab.rounds=2", *more,
    ]  # fmt: skip


def _launch(options: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lamp_eval", *options], env=_environment(), capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def run_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output_dir = tmp_path_factory.mktemp("run") / "outputs"
    make_run(output_dir / "movies" / "1")
    done = _launch(_options(model_dir, output_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for text in ("packed against packed_generic", "estimated time", "bases: 1 to do", "control ",
                 "the repaired kernel is not dispatched here", "losses over 9 steps"):  # fmt: skip
        assert text in done.stdout
    (found,) = (output_dir / "kernel_ab").iterdir()
    return found


@pytest.mark.slow
def test_the_record_of_a_run_that_measures(run_dir: Path) -> None:
    record = read_run(run_dir / "run.json")
    assert isinstance(record, RunRecord)
    assert (record.name, record.config["measure"]) == ("kernel_ab", "kernel_ab")
    assert (record.leaderboard, record.n_users) == ([], 0)
    assert [stage.what for stage in record.stages] == ["base"]
    assert set(record.seconds_by_stage) == {"bases", "measurement"}
    assert record.peak_memory_bytes > 0
    assert record.measurement is not None
    for table in record.measurement.tables:
        rows = _rows(run_dir / f"{table.name}.csv")
        assert [list(row) for row in rows] == [table.columns] * len(table.rows)
        assert [[str("" if v is None else v) for v in row] for row in table.rows] == [
            list(row.values()) for row in rows
        ]


@pytest.mark.slow
def test_the_tables_of_a_run_that_measures(run_dir: Path) -> None:
    timings, phases = _rows(run_dir / "timings.csv"), _rows(run_dir / "phases.csv")
    assert len(timings) == 2 * 2 * 2 * 7
    assert [(row["length_tokens"], row["phase"]) for row in phases] == [
        (length, phase) for length in ("8", "12") for phase in (*PHASES, FUSED)
    ]
    for row in phases:
        pairs: dict[str, dict[str, float]] = {}
        for t in timings:
            if (t["length_tokens"], t["phase"]) == (row["length_tokens"], row["phase"]):
                pairs.setdefault(t["round"], {})[t["path"]] = float(t["seconds"])
        each = [pair["packed_generic"] / pair["packed"] for pair in pairs.values()]
        assert float(row["ratio"]) == pytest.approx(np.median(each))
        assert float(row["ratio_min"]) == pytest.approx(min(each))
        assert row["n_rounds"] == "2"
    losses = _rows(run_dir / "losses.csv")
    assert [row["step"] for row in losses] == [str(i) for i in range(1, 10)] * 2
    (agreement,) = _rows(run_dir / "agreement.csv")
    assert float(agreement["correlation"]) > 0.999
    assert float(agreement["max_relative_difference"]) < 1e-5


@pytest.mark.slow
def test_the_leaderboard_has_no_row_of_it(run_dir: Path) -> None:
    output_dir = run_dir.parents[1]
    before = (output_dir / "leaderboard.csv").read_bytes()
    rows, unreadable = read_leaderboard(output_dir)
    assert unreadable == []
    assert rows and {Path(row["run"]).parent.name for row in rows} == {"movies"}
    assert rebuild_leaderboard(output_dir)[0].read_bytes() == before


@pytest.mark.slow
def test_the_report_shows_it_beside_the_others_and_alone(run_dir: Path, tmp_path: Path) -> None:
    from test_report import Page, check_self_contained

    record = read_run(run_dir / "run.json")
    assert isinstance(record, RunRecord) and record.measurement is not None
    (phases, _) = record.measurement.tables
    for path, number in ((run_dir.parents[1], 2), (run_dir, 1)):
        file, unreadable = write_report([path], tmp_path / str(number))
        assert unreadable == []
        page = Page(file)
        check_self_contained(page)
        assert all(line in page.text for line in record.measurement.findings)
        assert all(cells in page.rows for cells in phases.cells())
        assert f"run {number} · kernel_ab · smollm2_135m · 4bit_g64" in page.text
        assert page.row(str(number), str(run_dir))
        assert ("SYNTHETIC users" in page.text) == (number == 2)  # the other run's


@pytest.mark.slow
def test_a_dry_run_says_what_it_would_measure_and_writes_nothing(
    run_dir: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    options = _options(model_dir, run_dir.parents[1], "dry_run=true")
    before = sorted(run_dir.parents[1].rglob("*"))
    monkeypatch.setattr(sys, "argv", ["lamp_eval", *options])
    main()
    assert "packed against packed_generic, 2 rounds" in capsys.readouterr().out
    assert sorted(run_dir.parents[1].rglob("*")) == before


def test_unpacked_weights_are_refused_before_a_base_is_made(
    model_dir: Path, tmp_path: Path
) -> None:
    config = composed(
        "experiment=kernel_ab", f"model.path={model_dir}", f"output_dir={tmp_path / 'outputs'}",
        "quantization=none",
    )  # fmt: skip
    with pytest.raises(UserError, match="quantization=none"):
        measures.run(config, tmp_path / "outputs/run", [], Console(quiet=True))
    assert not (tmp_path / "outputs" / "stages" / "bases").exists()


def test_a_path_whose_gradients_are_wrong_is_refused(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lamp_eval import plan as module

    real = module.choose_backward

    def wrong(*given: Any) -> Any:
        return replace(real(*given), mistakes={"packed_generic": ["64 rows: error 1"]})

    monkeypatch.setattr(module, "choose_backward", wrong)
    config = composed(
        "experiment=kernel_ab", f"model.path={model_dir}", f"output_dir={tmp_path / 'outputs'}",
        "quantization.group_size=32",
    )  # fmt: skip
    with pytest.raises(UserError, match="kernel_ab.paths, packed_generic"):
        measures.run(config, tmp_path / "outputs/run", [], Console(quiet=True))


@pytest.mark.slow
def test_too_little_memory_is_a_mistake(
    run_dir: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> Any:
        raise RuntimeError("[metal::malloc] Attempting to allocate 9 bytes")

    small = replace(measures.MEASURES["kernel_ab"], measure=full)
    monkeypatch.setitem(measures.MEASURES, "kernel_ab", small)
    config = composed(*_options(model_dir, run_dir.parents[1]))
    with pytest.raises(UserError, match="on_device.checkpoint=1"):
        measures.run(config, run_dir.parent / "full", [], Console(quiet=True))
    assert not (run_dir.parent / "full").exists()


@pytest.mark.slow
def test_an_interrupted_measurement_leaves_the_base_and_no_run(
    run_dir: Path, model_dir: Path
) -> None:
    output_dir = run_dir.parents[1]
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "lamp_eval",
             *_options(model_dir, output_dir, "kernel_ab.rounds=100000", "name=endless")],
            env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, handler)
    assert process.stdout is not None
    shown = ""
    while "estimated time" not in shown:  # the base is there: it measures next
        line = process.stdout.readline()
        assert line, shown
        shown += line
    assert "bases: 0 to do, 1 reused" in shown
    time.sleep(3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, shown + stdout + stderr
    assert "Traceback" not in stdout + stderr
    assert not (output_dir / "endless").exists()
    assert list(output_dir.rglob(".partial*")) == []


@pytest.mark.slow
def test_a_sweep_of_measurements_shows_no_empty_table(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from lamp_eval import __main__ as module

    monkeypatch.setattr(module, "_finished", [read_run(run_dir / "run.json")] * 2)
    module._show_sweep()
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_records_of_before_still_load(run_dir: Path) -> None:
    path = run_dir.parents[1] / "movies" / "1" / "run.json"
    record = json.loads(path.read_text())
    del record["measurement"], record["config"]["measure"], record["config"]["kernel_ab"]
    found = RunRecord.model_validate(record)
    assert found.measurement is None and found.leaderboard
