"""One run, station by station: users → task adapter → base → user adapters → arms → results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from lamp_eval import display, environment, methods
from lamp_eval.config import RunConfig
from lamp_eval.data import load_corpus
from lamp_eval.data.card import data_card
from lamp_eval.data.corpus import user_ids
from lamp_eval.leaderboard import leaderboard_rows, main_rows, user_rows
from lamp_eval.metrics import RULES
from lamp_eval.pipeline import Pipeline
from lamp_eval.plan import Plan
from lamp_eval.results import (
    RunRecord,
    StageRecord,
    rebuild_leaderboard,
    write_run,
    write_submissions,
)
from lamp_eval.seeds import user_seed
from lamp_eval.tasks import TASKS


def report_data(config: RunConfig, console: Console) -> None:
    """Shows the data card of an experiment, and runs nothing.

    Raises:
        UserError: a mistake in the data.
    """
    task = TASKS[config.task]
    corpus = load_corpus(task, config.data)
    display.show_card(console, data_card(task, corpus), title=f"{config.name}: the data")
    for note in corpus.notes:
        console.print(note, style="yellow", markup=False, soft_wrap=True)


def run(config: RunConfig, run_dir: Path, overrides: Sequence[str], console: Console) -> RunRecord:
    """Runs an experiment; what is already there from earlier runs is reused.

    Args:
        config: a checked configuration.
        run_dir: where the results go; written only when the run is complete.
        overrides: the command line's, for the record.
        console: where to show progress and the result.

    Returns:
        The record, which is also `run.json`.

    Raises:
        UserError: a mistake in the input, before anything is computed where possible.
    """
    started_at, start = datetime.now(UTC), time.perf_counter()
    task = TASKS[config.task]
    corpus = load_corpus(task, config.data)
    corpus = replace(corpus, users=tuple(corpus.users))  # a run needs them all, again and again
    plan = Plan(config, task, corpus, console)
    with plan.child:
        plan.check()
        plan.show_header()
        pipeline = Pipeline(plan, console)
        with display.progress(console) as progress:
            pipeline.execute(progress)
    predictions = {name: pipeline.predictions(name) for name in config.arms}
    made = environment.provenance()
    n_cut = {
        name: [r.n_cut_words for user in corpus.users for r in plan.inputs.requests(name, user)]
        for name in config.arms
    }
    rows = leaderboard_rows(
        config,
        task,
        corpus,
        plan.arms,
        predictions,
        n_blocks=plan.recipe.blocks,
        cut_rates={
            name: sum(n > 0 for n in counts) / len(counts) for name, counts in n_cut.items()
        },
        run=str(run_dir),
        commit=made.commit,
    )
    record = RunRecord(
        name=config.name,
        started_at=started_at.isoformat(timespec="seconds"),
        seconds=time.perf_counter() - start,
        config=asdict(config),
        overrides=list(overrides),
        **made._asdict(),
        model_origin=plan.model.origin,
        model_fingerprint=plan.model.fingerprint,
        data_checksum=corpus.checksum,
        data_files=corpus.files,
        synthetic=corpus.synthetic,
        task_users_origin=corpus.task_users_origin,
        n_users=len(corpus.users),
        n_queries=sum(len(user.queries) for user in corpus.users),
        n_task_users=len(corpus.task_users),
        users_without_history=[user.id for user in corpus.users if not user.history],
        task_user_ids=user_ids(corpus.task_users),
        data_notes=list(corpus.notes),
        donors=plan.donors,
        seeds={user.id: user_seed(config.seed, user.id) for user in corpus.users},
        methods={name: methods.described(name) for name in plan.methods},
        parity_error=pipeline.parity_errors(),
        stopped_users=pipeline.stopped_users(),
        backward=asdict(plan.backward) if plan.base_units else {},
        failed_parses={
            name: {
                rules: sum(p.scores[rules]["failed_parse"] == 1 for p in arm_predictions)
                for rules in RULES
            }
            for name, arm_predictions in predictions.items()
        },
        cut_words={name: sum(counts) for name, counts in n_cut.items()},
        stages=pipeline.stages,
        seconds_by_stage=_seconds_by_stage(pipeline.stages)
        | ({"methods": pipeline.method_seconds} if plan.methods else {}),
        peak_memory_bytes=pipeline.peak_memory_bytes(),
        leaderboard=rows,
    )
    adapter_of = {
        (name, user.id): owner.id if (owner := plan.adapter_owner(name, user)) else None
        for name in config.arms
        for user in corpus.users
    }
    write_submissions(run_dir, task, corpus.users, predictions)
    write_run(run_dir, record, predictions, user_rows(task, corpus, predictions, adapter_of))
    leaderboard_path, unreadable = rebuild_leaderboard(Path(config.output_dir))
    for line in unreadable:
        console.print(f"[yellow]left out of the leaderboard:[/] {line}")
    kind = "synthetic users" if corpus.synthetic else "users"
    title = f"{config.name}: {record.n_users} {kind}, {record.n_queries} queries"
    display.show_leaderboard(console, main_rows(rows), title=title)
    for user_id, reason in record.stopped_users.items():
        line = f"the adapter of user {user_id!r} is not trained to the end, {reason}"
        console.print(f"{line}; the one of the step before is kept", style="yellow", markup=False)
    reused = sum(stage.reused for stage in pipeline.stages)
    console.print(
        f"{display.duration(record.seconds)}, peak memory {record.peak_memory_bytes / 1e9:.1f} GB, "
        f"{reused} of {len(pipeline.stages)} stage outputs reused; "
        f"all runs: {leaderboard_path}"
    )
    console.print(f"results: {run_dir}", style="bold", soft_wrap=True)
    return record


def _seconds_by_stage(stages: Iterable[StageRecord]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for stage in stages:
        totals[stage.stage] = totals.get(stage.stage, 0.0) + stage.seconds
    return totals
