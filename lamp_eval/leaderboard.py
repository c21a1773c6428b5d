"""From predictions to rows: the leaderboard of a run and its per-user results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lamp_eval.arms import COMPARISONS, Arm
from lamp_eval.compare import compare
from lamp_eval.config import RunConfig
from lamp_eval.data import Corpus
from lamp_eval.metrics import arm_metrics
from lamp_eval.records import Prediction
from lamp_eval.results import LEADERBOARD_COLUMNS
from lamp_eval.tasks import Task

# The metric's per-query score; a metric without one has no interval.
QUERY_SCORES = {"accuracy": "correct", "mae": "absolute_error"}
LOWER_IS_BETTER = ("mae", "rmse")


def leaderboard_rows(
    config: RunConfig,
    task: Task,
    corpus: Corpus,
    arms: Mapping[str, Arm],
    predictions: Mapping[str, Sequence[Prediction]],
    *,
    n_blocks: int,
    cut_rates: Mapping[str, float],
    run: str,
    commit: str | None,
) -> list[dict[str, Any]]:
    """One row per arm, reference and metric, with all columns of `LEADERBOARD_COLUMNS`.

    Args:
        config: the run's.
        task: the task.
        corpus: who was evaluated.
        arms: by name.
        predictions: of each arm, in the same order of queries.
        n_blocks: blocks that carry a user adapter.
        cut_rates: share of each arm's prompts that were cut to length, in [0, 1].
        run: the run's folder.
        commit: of the source tree, if known.
    """
    metrics = {name: arm_metrics(task, rows) for name, rows in predictions.items()}
    pairs: list[tuple[str, str | None]] = []
    for name in arms:
        references = [r for a, r in COMPARISONS if a == name and r in arms]
        pairs += [(name, reference) for reference in references]
        if not references:
            pairs.append((name, None))
    rows = []
    for name, reference in pairs:
        chosen = arms[name]
        for metric in task.metrics:
            value = metrics[name][metric]
            other = metrics[reference][metric] if reference else None
            higher = metric not in LOWER_IS_BETTER
            known: dict[str, Any] = {}
            if reference and metric in QUERY_SCORES:
                comparison = compare(
                    [p.user_id for p in predictions[name]],
                    _scores(predictions[name], metric),
                    _scores(predictions[reference], metric),
                    higher_is_better=higher,
                    seed=config.seed,
                    n_resamples=config.n_resamples,
                )
                known = asdict(comparison)
            known |= {
                "task": config.task,
                "arm": name,
                "reference": reference,
                "metric": metric,
                "higher_is_better": higher,
                "n_users": len(corpus.users),
                "n_queries": len(predictions[name]),
                "value": value,
                "reference_value": other,
                "delta": None if other is None else value - other,
                "failed_parse_rate": metrics[name]["failed_parse_rate"],
                "cut_rate": cut_rates[name],
                "model": config.model.name,
                "quantization": config.quantization.name,
                "blocks": n_blocks if chosen.user_adapter else None,
                "rank": config.adapter.user.rank if chosen.user_adapter else None,
                "protocol": config.protocol.name,
                "decoding": "greedy",
                "retrieval": "bm25" if chosen.n_retrieved else None,
                "k": chosen.n_retrieved,
                "seed": config.seed,
                "synthetic": corpus.synthetic,
                "task_users": corpus.task_users_origin if chosen.task_adapter else None,
                "commit": commit,
                "run": run,
            }
            rows.append({column: known.get(column) for column in LEADERBOARD_COLUMNS})
    return rows


def user_rows(
    task: Task,
    corpus: Corpus,
    predictions: Mapping[str, Sequence[Prediction]],
    adapter_of: Mapping[tuple[str, str], str | None],
) -> list[dict[str, Any]]:
    """One row per user and arm: the mean of the main metric's per-query score.

    Args:
        task: the task.
        corpus: who was evaluated.
        predictions: of each arm.
        adapter_of: whose adapter served (arm, user id); None: nobody's.
    """
    score = QUERY_SCORES[task.metrics[0]]
    rows = []
    for name, arm_predictions in predictions.items():
        by_user: dict[str, list[Prediction]] = {}
        for prediction in arm_predictions:
            by_user.setdefault(prediction.user_id, []).append(prediction)
        for user in corpus.users:
            own = by_user[user.id]
            rows.append(
                {
                    "user_id": user.id,
                    "arm": name,
                    "n_records": len(user.history),
                    "n_queries": len(own),
                    "adapter_of": adapter_of[name, user.id],
                    f"mean_{score}": sum(_scores(own, task.metrics[0])) / len(own),
                    "n_failed_parses": sum(p.scores["failed_parse"] == 1 for p in own),
                }
            )
    return rows


def _scores(predictions: Sequence[Prediction], metric: str) -> list[float]:
    scores = [prediction.scores[QUERY_SCORES[metric]] for prediction in predictions]
    return [score for score in scores if score is not None]
