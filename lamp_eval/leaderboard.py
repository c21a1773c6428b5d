"""From predictions to rows: the leaderboard of a run and its per-user results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

from lamp_eval.arms import Arm, comparisons
from lamp_eval.config import RunConfig
from lamp_eval.data import Corpus
from lamp_eval.metrics import LOWER_IS_BETTER, QUERY_SCORES, RULES, arm_metrics, paired_scores
from lamp_eval.records import Prediction
from lamp_eval.results import LEADERBOARD_COLUMNS
from lamp_eval.statistics import compare
from lamp_eval.tasks import TASKS, Task

_DECODING = {
    "greedy": "greedy",
    "labels": "labels by log-likelihood per token",
    "oppu_sampled": "sampled, temperature 0.1, top-k 10, top-p 0.9",
}


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
    """One row per arm, reference, metric and rule set, with all of `LEADERBOARD_COLUMNS`.

    Δ is over the queries on which both arms have a score; `n_users` and `n_queries` count those.

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
    metrics = {
        name: arm_metrics(task, [p.output for p in own], [p.gold for p in own])
        for name, own in predictions.items()
    }
    pairs: list[tuple[str, str | None]] = []
    for name in arms:
        references = [r for a, r in comparisons(arms) if a == name]
        pairs += [(name, reference) for reference in references]
        if not references:
            pairs.append((name, None))
    rows = []
    for (name, reference), metric, rules in product(pairs, task.metrics, RULES):
        chosen = arms[name]
        value = metrics[name][rules][metric]
        other = metrics[reference][rules][metric] if reference else None
        higher = metric not in LOWER_IS_BETTER
        known: dict[str, Any] = {
            "n_users": len(corpus.users),
            "n_queries": len(predictions[name]),
            "delta": None if value is None or other is None else value - other,
        }
        if reference and metric in QUERY_SCORES:
            both = paired_scores(
                [p.user_id for p in predictions[name]],
                [p.scores for p in predictions[name]],
                [p.scores for p in predictions[reference]],
                rules,
                metric,
            )
            if both:
                comparison = compare(
                    *zip(*both, strict=True),
                    higher_is_better=higher,
                    seed=config.seed,
                    n_resamples=config.n_resamples,
                )
                known |= asdict(comparison)
        known |= {
            "task": config.task,
            "arm": name,
            "reference": reference,
            "metric": metric,
            "rules": rules,
            "higher_is_better": higher,
            "value": value,
            "reference_value": other,
            "failed_parse_rate": metrics[name][rules]["failed_parse_rate"],
            "cut_rate": cut_rates[name],
            "model": None if chosen.method else config.model.name,
            "quantization": None if chosen.method else config.quantization.name,
            "blocks": n_blocks if chosen.user_adapter else None,
            "rank": config.adapter.user.rank if chosen.user_adapter else None,
            "backend": config.adapter.user.backend if chosen.user_adapter else None,
            "protocol": config.protocol.name,
            "decoding": None if chosen.method else _DECODING[config.protocol.decoding],
            "retrieval": config.protocol.retrieval if chosen.n_retrieved else None,
            "k": None if chosen.method else chosen.n_retrieved,
            "seed": config.seed,
            "synthetic": corpus.synthetic,
            "task_users": corpus.task_users_origin if chosen.task_adapter else None,
            "commit": commit,
            "run": run,
        }
        rows.append({column: known.get(column) for column in LEADERBOARD_COLUMNS})
    return rows


def main_rows(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows that a table shows: each task's main metric by the official rules."""
    return [
        row
        for row in rows
        if row["rules"] == "official" and row["metric"] == TASKS[row["task"]].metrics[0]
    ]


def user_rows(
    task: Task,
    corpus: Corpus,
    predictions: Mapping[str, Sequence[Prediction]],
    adapter_of: Mapping[tuple[str, str], str | None],
) -> list[dict[str, Any]]:
    """One row per user and arm: the user's own main metric by both rule sets.

    Args:
        task: the task.
        corpus: who was evaluated.
        predictions: of each arm.
        adapter_of: whose adapter served (arm, user id); None: nobody's.
    """
    metric = task.metrics[0]
    rows = []
    for name, arm_predictions in predictions.items():
        by_user: dict[str, list[Prediction]] = {}
        for prediction in arm_predictions:
            by_user.setdefault(prediction.user_id, []).append(prediction)
        for user in corpus.users:
            own = by_user[user.id]
            row: dict[str, Any] = {
                "user_id": user.id,
                "arm": name,
                "n_records": len(user.history),
                "n_queries": len(own),
                "adapter_of": adapter_of[name, user.id],
            }
            for rules in RULES:
                scores = [p.scores[rules] for p in own]
                known = [v for s in scores if (v := s[QUERY_SCORES[metric]]) is not None]
                row[f"{rules}_{metric}"] = sum(known) / len(known) if known else None
                row[f"{rules}_failed_parses"] = sum(s["failed_parse"] == 1 for s in scores)
            rows.append(row)
    return rows
