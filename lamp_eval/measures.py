"""Runs that measure what training costs on this device: no arms, nobody's data.

They share plan, store, base and run record with the runs that evaluate. What is measured is
computed in a process of its own, where torch never was and which gives its memory back.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from lamp_eval import display, environment, kernel_ab
from lamp_eval.child import Child
from lamp_eval.config import RunConfig
from lamp_eval.data import Corpus
from lamp_eval.errors import UserError, raise_if_any
from lamp_eval.layers import PROMPT_TOKENS
from lamp_eval.pipeline import NO_MEMORY, Pipeline
from lamp_eval.plan import Plan
from lamp_eval.results import (
    Measurement,
    RunRecord,
    Table,
    rebuild_leaderboard,
    write_measurement,
)
from lamp_eval.tasks import TASKS


@dataclass(frozen=True)
class Measure:
    """One thing to measure.

    Attributes:
        describe: what will be measured, in lines; needs no model.
        estimate_seconds: about how long, from the device's examination.
        check: raises `UserError` for what can be known to fail before a base is made.
        measure: does it, on the base in a folder; gives the measurement, and tables of every single
            value.
    """

    describe: Callable[[RunConfig], list[str]]
    estimate_seconds: Callable[[Plan], float]
    check: Callable[[Plan], None]
    measure: Callable[[Plan, Path, Progress], tuple[Measurement, list[Table]]]


def run(config: RunConfig, run_dir: Path, overrides: Sequence[str], console: Console) -> RunRecord:
    """Measures, and writes a finished run; the base is reused, measurements never are.

    Args:
        config: a checked configuration whose `measure` is set.
        run_dir: where the results go; written only when the run is complete.
        overrides: the command line's, for the record.
        console: where to show progress and the result.

    Returns:
        The record, which is also `run.json`.

    Raises:
        UserError: a mistake in the input, before anything is measured where possible.
    """
    started_at, start = datetime.now(UTC), time.perf_counter()
    chosen = MEASURES[config.measure or ""]
    nobody = Corpus((), (), "others", synthetic=True, n_records_left_out=0, checksum="", files={})
    plan = Plan(config, TASKS[config.task], nobody, console)
    with plan.child:
        plan.check()
        chosen.check(plan)
        _show_header(plan, chosen, console)
        pipeline = Pipeline(plan, console)
        with display.progress(console) as progress:
            pipeline.execute(progress)
            base_dir = Path(pipeline.stages[-1].path)
            before = time.perf_counter()
            try:
                measurement, details = chosen.measure(plan, base_dir, progress)
            except RuntimeError as error:
                if any(words in str(error) for words in NO_MEMORY):
                    raise _too_little_memory(config, str(error)) from error
                raise
            measured_seconds = time.perf_counter() - before
    record = RunRecord(
        name=config.name,
        started_at=started_at.isoformat(timespec="seconds"),
        seconds=time.perf_counter() - start,
        config=asdict(config),
        overrides=list(overrides),
        **environment.provenance()._asdict(),
        model_origin=plan.model.origin,
        model_fingerprint=plan.model.fingerprint,
        data_checksum=nobody.checksum,
        data_files=nobody.files,
        synthetic=nobody.synthetic,
        task_users_origin=nobody.task_users_origin,
        n_users=0,
        n_queries=0,
        n_task_users=0,
        users_without_history=[],
        donors={},
        seeds={},
        parity_error=pipeline.parity_errors(),
        backward=asdict(plan.backward),
        failed_parses={},
        cut_words={},
        stages=pipeline.stages,
        seconds_by_stage={
            "bases": sum(stage.seconds for stage in pipeline.stages),
            "measurement": measured_seconds,
        },
        peak_memory_bytes=max(
            pipeline.peak_memory_bytes(), environment.peak_memory_bytes(resource.RUSAGE_CHILDREN)
        ),
        leaderboard=[],
        measurement=measurement,
    )
    write_measurement(run_dir, record, details)
    _, unreadable = rebuild_leaderboard(Path(config.output_dir))
    for line in unreadable:
        console.print(f"[yellow]left out of the leaderboard:[/] {line}")
    display.show_measurement(console, measurement)
    console.print(
        f"{display.duration(record.seconds)}, peak memory {record.peak_memory_bytes / 1e9:.1f} GB"
    )
    console.print(f"results: {run_dir}", style="bold", soft_wrap=True)
    return record


def dry_run(config: RunConfig, console: Console) -> None:
    """Shows what a run would measure, without a model and without computing anything."""
    console.print(
        f"[bold]{config.name}[/] · setting {config.setting} · measures {config.measure} · dry run"
    )
    for line in MEASURES[config.measure or ""].describe(config):
        console.print(f"  {line}")
    console.print("  how long it takes is said before it begins, from this device's examination")


def _show_header(plan: Plan, chosen: Measure, console: Console) -> None:
    config = plan.config
    say = console.print
    say(f"[bold]{config.name}[/] · setting {config.setting} · measures {config.measure}")
    for line in chosen.describe(config):
        say(f"  {line}")
    say(f"  model: {config.model.name} ({plan.model.origin}), {config.quantization.name}")
    say(f"  device: {environment.mlx_device()}, {plan.backward.dtype}")
    missing = [unit for unit in plan.base_units.values() if not plan.done(unit)]
    say(f"  bases: {len(missing)} to do" if missing else "  bases: 0 to do, 1 reused")
    seconds = chosen.estimate_seconds(plan) + 5 * len(missing)
    say(f"  estimated time: {display.duration(seconds)}")


def _too_little_memory(config: RunConfig, message: str) -> UserError:
    return UserError(
        expected="enough memory for the longest step",
        found=message.splitlines()[0],
        where=f"measure={config.measure}",
        fix="measure shorter steps, or set on_device.checkpoint=1",
    )


# Two backward paths (Section 5.3)


def _describe_kernel_ab(config: RunConfig) -> list[str]:
    assert config.kernel_ab is not None  # as `config.check` has it
    return kernel_ab.describe(config.kernel_ab, config.adapter.user.epochs)


def _check_kernel_ab(plan: Plan) -> None:
    config = plan.config.kernel_ab
    assert config is not None
    if not plan.backward.seconds:
        raise UserError(
            expected="quantized layers, of which the two paths are ways to multiply",
            found="none",
            where=f"option quantization={plan.config.quantization.name}",
            fix="choose quantization=4bit_g64",
        )
    raise_if_any(
        [
            UserError(
                expected="a path whose gradients are right on this device",
                found=f"{len(mistakes)} wrong, among them: {mistakes[0]}",
                where=f"option kernel_ab.paths, {path}",
                fix="choose another one, and run python -m lamp_eval.doctor to see all",
            )
            for path, mistakes in plan.backward.mistakes.items()
            if path in config.paths
        ]
    )


def _estimate_kernel_ab(plan: Plan) -> float:
    """From the products of each path as they were timed, which take most of a step."""
    config = plan.config.kernel_ab
    assert config is not None
    per_token = sum(plan.backward.seconds[path] for path in config.paths) / PROMPT_TOKENS
    return 10 + per_token * kernel_ab.n_tokens(config, plan.config.adapter.user.epochs)


def _measure_kernel_ab(
    plan: Plan, base_dir: Path, progress: Progress
) -> tuple[Measurement, list[Table]]:
    from on_device.kernel import this_kernel

    config, checkpoint = plan.config.kernel_ab, plan.config.on_device.checkpoint
    assert config is not None
    epochs = plan.config.adapter.user.epochs
    bar = progress.add_task("steps", total=kernel_ab.n_steps(config, epochs), tokens=0)
    n_tokens = 0

    def show(step: tuple[str, int]) -> None:
        nonlocal n_tokens
        n_tokens += step[1]
        progress.update(bar, advance=1, description=step[0], tokens=n_tokens)

    with Child() as child:
        measured: kernel_ab.Measured = child.run(
            "on_device.kernel_ab:measure_kernel_ab",
            base_dir,
            plan.recipe,
            config,
            checkpoint=checkpoint if isinstance(checkpoint, int) else None,
            seed=plan.config.seed,
            report=show,
        )
    progress.update(bar, description="steps")
    compared = kernel_ab.ratios(measured.timings, config.paths)
    agreed = kernel_ab.agreement(*(measured.losses[path] for path in config.paths))
    kernel = this_kernel()
    findings = kernel_ab.findings(
        measured, compared, agreed, config.paths, dispatched=kernel.dispatched, reason=kernel.reason
    )
    shown, details = kernel_ab.tables(measured, compared, agreed, config.paths)
    return Measurement(tables=shown, findings=findings), details


MEASURES = {
    "kernel_ab": Measure(
        describe=_describe_kernel_ab,
        estimate_seconds=_estimate_kernel_ab,
        check=_check_kernel_ab,
        measure=_measure_kernel_ab,
    ),
}
