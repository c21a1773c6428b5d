"""Official LaMP scoring: per query (`score_output`) and per arm (`arm_metrics`)."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from sklearn.metrics import f1_score, mean_absolute_error, root_mean_squared_error

from lamp_eval.errors import UserError
from lamp_eval.records import Prediction
from lamp_eval.tasks import Task

if TYPE_CHECKING:
    import evaluate


def score_output(task: Task, output: str, gold: str) -> dict[str, float | None]:
    """Scores one output by the rules of the LaMP evaluator (protocol.md, "Scoring", `official`).

    A label must match exactly, case included; only surrounding whitespace is stripped. A rating is
    what `float` makes of the output, so "45" is an error of 40 or more; what it makes nothing
    finite of counts as the farther end of the scale.

    Args:
        task: the task.
        output: what the model answered.
        gold: the right answer, one of the task's labels.

    Returns:
        `correct` (0 or 1), `failed_parse` (1 if the output names none of the labels) and, for
        ordinal tasks, `absolute_error` (≥ 0, in the labels' unit).

    Raises:
        UserError: if the gold is not a label of the task. The official evaluator scores it as
            matched by any output that is no label either.
    """
    if gold not in task.labels:
        raise UserError(
            expected=f"one of {', '.join(task.labels)}",
            found=repr(gold),
            where=f"the gold of a {task.name} query",
            fix="correct the gold, or check that the file belongs to this task",
        )
    if task.ordinal:
        rating, failed = _parse_rating(task, output, gold)
        return {
            "correct": float(rating == float(gold)),
            "failed_parse": float(failed),
            "absolute_error": abs(rating - float(gold)),
        }
    label = output.strip()
    return {"correct": float(label == gold), "failed_parse": float(label not in task.labels)}


def arm_metrics(task: Task, predictions: Sequence[Prediction]) -> dict[str, float]:
    """Computes the metrics of one arm over all its queries.

    Args:
        task: the task.
        predictions: the arm's predictions, one per query, in any order.

    Returns:
        The task's metrics, the main one first, then `failed_parse_rate` in [0, 1].

    Raises:
        UserError: if there are no predictions, or a gold is not a label of the task.
    """
    if not predictions:
        raise UserError(
            expected="at least one prediction",
            found="none",
            where=f"the predictions of an arm on {task.name}",
            fix="run the arm before scoring it",
        )
    with tempfile.TemporaryDirectory() as cache_dir:
        scores: dict[str, float] = evaluate_metric(task, cache_dir).compute(
            predictions=[prediction.output for prediction in predictions],
            references=[prediction.gold for prediction in predictions],
        )
    return scores


def evaluate_metric(task: Task, cache_dir: str) -> evaluate.Metric:
    """Builds the `evaluate.Metric` of a task; nothing is fetched from the hub.

    Its `compute(predictions=…, references=…)` takes outputs and golds as the strings they are.

    Args:
        task: the task.
        cache_dir: a writable folder. `evaluate` makes empty folders in it and by default would in
            the user's home; the data themselves stay in memory.
    """
    # Here, not above: `evaluate` imports transformers and torch, which takes seconds.
    import datasets
    import evaluate

    class TaskMetrics(evaluate.Metric):  # type: ignore[misc]  # evaluate is untyped
        def _info(self) -> evaluate.MetricInfo:
            text = datasets.Value("string")
            return evaluate.MetricInfo(
                description=f"Official LaMP metrics of {task.lamp_id}.",
                citation="Salemi et al., LaMP: When Large Language Models Meet Personalization",
                features=datasets.Features({"predictions": text, "references": text}),
            )

        def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
            pairs = list(zip(predictions, references, strict=True))
            scores = [score_output(task, output, gold) for output, gold in pairs]
            metrics = {"accuracy": fmean(score["correct"] == 1.0 for score in scores)}
            if task.ordinal:
                golds = [float(gold) for gold in references]
                ratings = [_parse_rating(task, output, gold)[0] for output, gold in pairs]
                metrics["mae"] = mean_absolute_error(golds, ratings)
                metrics["rmse"] = root_mean_squared_error(golds, ratings)
            else:
                # Whatever is no label becomes "": it costs recall, and has no F1 of its own.
                outputs = [output.strip() for output in predictions]
                labels = [output if output in task.labels else "" for output in outputs]
                metrics["macro_f1"] = f1_score(
                    references, labels, labels=task.labels, average="macro", zero_division=0
                )
            failed_parse_rate = fmean(score["failed_parse"] == 1.0 for score in scores)
            return {name: float(metrics[name]) for name in task.metrics} | {
                "failed_parse_rate": failed_parse_rate
            }

    return TaskMetrics(cache_dir=cache_dir, keep_in_memory=True)


def _parse_rating(task: Task, output: str, gold: str) -> tuple[float, bool]:
    """Reads a rating as the official evaluator does, and whether it names none of the labels."""
    scale = [float(label) for label in task.labels]
    try:
        rating = float(output.strip())
    except ValueError:
        rating = math.nan
    if math.isfinite(rating):
        return rating, rating not in scale
    # From a gold in the middle both ends are as far, and the error is the same.
    return max(scale, key=lambda end: abs(end - float(gold))), True
