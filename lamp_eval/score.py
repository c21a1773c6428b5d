"""The scorer: `python -m lamp_eval.score --golds G --preds P`, as the benchmark's evaluator."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lamp_eval.data.lamp import Outputs, pairs_of, read_outputs
from lamp_eval.errors import UserError, fail, raise_if_any
from lamp_eval.metrics import RULES, arm_metrics
from lamp_eval.tasks import TASKS, Task


def score_files(
    golds: Path, predictions: Path, task: Task | None = None, rules: Sequence[str] = RULES
) -> dict[str, dict[str, Any]]:
    """Scores files in the benchmark's format.

    ROUGE is the exact mean over queries, where the benchmark's evaluator reports the median of a
    bootstrap of it.

    Args:
        golds: a JSON file `{task, golds: [{id, output}]}`, or a folder or zip archive of them.
        predictions: the same, with the same ids.
        task: the task to score; None: every task in `golds`.
        rules: some of `RULES`.

    Returns:
        By the benchmark's id of a task: `n_queries`, and by rule set the metrics.

    Raises:
        UserError: a file cannot be read, ids differ or a gold is not a label.
    """
    return {
        task.lamp_id: {
            "n_queries": len(gold.by_id),
            **arm_metrics(task, [*predicted.by_id.values()], [*gold.by_id.values()], rules),
        }
        for task, gold, predicted in checked_pairs(
            read_outputs(golds), read_outputs(predictions), task
        )
    }


def checked_pairs(
    golds: Mapping[str, Outputs], predictions: Mapping[str, Outputs], task: Task | None
) -> list[tuple[Task, Outputs, Outputs]]:
    """Pairs golds and predictions of each task as `pairs_of`, and checks the golds as well.

    Raises:
        UserError: with all problems.
    """
    found = pairs_of(golds, predictions, task)
    raise_if_any(
        [
            UserError(
                expected=f"one of {', '.join(task.labels)}",
                found=repr(gold),
                where=f"{outputs.where}, id {query_id!r}, field 'output'",
                fix="correct the gold, or check that the file belongs to this task",
            )
            for task, outputs, _ in found
            if task.labels
            for query_id, gold in outputs.by_id.items()
            if gold not in task.labels
        ]
    )
    return found


def task_named(name: str) -> Task:
    """A task by its own name or the benchmark's; raises what argparse shows as a mistake."""
    by_name = TASKS | {task.lamp_id: task for task in TASKS.values()}
    if name not in by_name:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(by_name)}")
    return by_name[name]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; exits with 2 after a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m lamp_eval.score",
        description="Scores predictions in the format of the LaMP benchmark.",
    )
    form = "{task, golds: [{id, output}]}, or a folder or zip archive of such files"
    parser.add_argument("--golds", type=Path, required=True, help=form)
    parser.add_argument("--preds", type=Path, required=True, help="the same, with the same ids")
    parser.add_argument("--task", type=task_named, help="LaMP_1 … LaMP_7 (all if not given)")
    parser.add_argument("--rules", choices=[*RULES, "both"], default="both")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    rules = RULES if options.rules == "both" else (options.rules,)
    try:
        scores = score_files(options.golds, options.preds, options.task, rules)
    except UserError as error:
        fail(error)
    if options.json:
        print(json.dumps(scores, indent=2))
    else:
        _show(scores, rules)


def _show(scores: Mapping[str, Mapping[str, Any]], rules: Sequence[str]) -> None:
    table = Table()
    for name in ("task", "queries", "metric"):
        table.add_column(name, justify="right" if name == "queries" else "left")
    for name in rules:
        table.add_column(name, justify="right")
    for lamp_id, found in scores.items():
        for metric in found[rules[0]]:
            values = [found[name][metric] for name in rules]
            cells = ["" if value is None else f"{value:.6f}" for value in values]
            table.add_row(lamp_id, str(found["n_queries"]), metric, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
