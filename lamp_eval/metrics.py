"""Scoring by both rule sets: per query (`score_output`) and per arm (`arm_metrics`)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from statistics import fmean
from typing import TYPE_CHECKING, Any

from sklearn.metrics import f1_score, mean_absolute_error, root_mean_squared_error

from lamp_eval.errors import UserError
from lamp_eval.tasks import Task

if TYPE_CHECKING:
    import evaluate

# `official`: as the LaMP evaluator; `protocol`: an answer is looked for in the output.
RULES = ("official", "protocol")
# A metric's score of one query; a metric without one has no interval.
QUERY_SCORES = {
    "accuracy": "correct",
    "mae": "absolute_error",
    "rouge1": "rouge1",
    "rougeL": "rougeL",
}
LOWER_IS_BETTER = ("mae", "rmse")

Scores = dict[str, float | None]


def score_output(task: Task, output: str, gold: str) -> dict[str, Scores]:
    """Scores one output by each of the `RULES` (protocol.md, "Scoring").

    | | official | protocol |
    |---|---|---|
    | label | exact, case included, after stripping | found in the output, whatever the case |
    | rating | `float`; else the farther end of the scale | the first signed digit in the labels |
    | text | ROUGE F1 without stemmer | with stemmer |

    Officially "45" is an error of 40 or more, and what `float` makes nothing finite of is as far
    off as the scale allows. ROUGE knows the letters a–z and digits only: without any, two texts
    have nothing in common, even if they are equal.

    Args:
        task: the task.
        output: what the model answered.
        gold: the right answer; one of the task's labels if it has any.

    Returns:
        By rule set `failed_parse` (1 if the output names no label, or holds no text) and
        `correct` (0 or 1) for labels and ratings; `absolute_error` (≥ 0, in the labels' unit; under
        the protocol's rules None where nothing was parsed) for ratings; `rouge1` and `rougeL` in
        [0, 1] for texts.

    Raises:
        UserError: if the gold is not a label of the task. The official evaluator scores it as
            matched by any output that is no label either.
    """
    if task.kind != "text" and gold not in task.labels:
        raise UserError(
            expected=f"one of {', '.join(task.labels)}",
            found=repr(gold),
            where=f"the gold of a {task.name} query",
            fix="correct the gold, or check that the file belongs to this task",
        )
    return {rules: _score(task, rules, output, gold) for rules in RULES}


def paired_scores(
    user_ids: Sequence[str],
    scores: Sequence[Mapping[str, Mapping[str, float | None]]],
    reference_scores: Sequence[Mapping[str, Mapping[str, float | None]]],
    rules: str,
    metric: str,
) -> list[tuple[str, float, float]]:
    """User id, score and reference's score of the queries on which both have one.

    Args:
        user_ids: the user of each query, (n_queries,).
        scores: of an arm, as `score_output` gives them, (n_queries,).
        reference_scores: the reference's of the same queries.
        rules: one of `RULES`.
        metric: one of `QUERY_SCORES`, and of the task.
    """
    name = QUERY_SCORES[metric]
    pairs = [
        (user_id, own[rules][name], other[rules][name])
        for user_id, own, other in zip(user_ids, scores, reference_scores, strict=True)
    ]
    return [(u, s, r) for u, s, r in pairs if s is not None and r is not None]


def arm_metrics(
    task: Task, outputs: Sequence[str], golds: Sequence[str], rules: Sequence[str] = RULES
) -> dict[str, dict[str, float | None]]:
    """Computes the metrics of one arm over all its queries, by rule set.

    Args:
        task: the task.
        outputs: what the arm answered, (n_queries,).
        golds: the right answers, (n_queries,); labels of the task if it has any.
        rules: some of `RULES`.

    Returns:
        By rule set the task's metrics, the main one first, then `failed_parse_rate` in [0, 1]. None
        where no output could be parsed that a metric needs.

    Raises:
        UserError: if there are no predictions.
    """
    if not outputs:
        raise UserError(
            expected="at least one prediction",
            found="none",
            where=f"the predictions of an arm on {task.name}",
            fix="run the arm before scoring it",
        )
    # Not by way of `evaluate`, whose import takes longer than all of this.
    return {name: _metrics(task, name, outputs, golds) for name in rules}


def evaluate_metric(task: Task, rules: str, cache_dir: str | None = None) -> evaluate.Metric:
    """Builds the `evaluate.Metric` of a task; nothing is fetched from the hub.

    Its `compute(predictions=…, references=…)` takes outputs and golds as the strings they are, and
    gives what `arm_metrics` gives.

    Args:
        task: the task.
        rules: one of `RULES`.
        cache_dir: a writable folder. `evaluate` makes empty folders in it, or in the user's home
            if there is none; the data themselves stay in memory.
    """
    # Here, not above: it imports transformers and torch.
    import datasets
    import evaluate

    class TaskMetrics(evaluate.Metric):  # type: ignore[misc]  # evaluate is untyped
        def _info(self) -> evaluate.MetricInfo:
            text = datasets.Value("string")
            return evaluate.MetricInfo(
                description=f"Metrics of {task.lamp_id} by the {rules} rules.",
                citation="Salemi et al., LaMP: When Large Language Models Meet Personalization",
                features=datasets.Features({"predictions": text, "references": text}),
            )

        def _compute(
            self, predictions: list[str], references: list[str]
        ) -> dict[str, float | None]:
            return _metrics(task, rules, predictions, references)

    return TaskMetrics(cache_dir=cache_dir, keep_in_memory=True)


def _metrics(
    task: Task, rules: str, outputs: Sequence[str], golds: Sequence[str]
) -> dict[str, float | None]:
    pairs = list(zip(outputs, golds, strict=True))
    scores = [_score(task, rules, output, gold) for output, gold in pairs]

    def mean(name: str) -> float:
        return fmean(score[name] or 0.0 for score in scores)

    metrics: dict[str, float | None] = {}
    if task.kind == "label":
        # Whatever is no label becomes "": it costs recall, and has no F1 of its own.
        parsed = [_parse_label(task, rules, output) or "" for output in outputs]
        f1 = f1_score(golds, parsed, labels=task.labels, average="macro", zero_division=0)
        metrics = {"accuracy": mean("correct"), "macro_f1": float(f1)}
    elif task.kind == "rating":
        read = [
            (float(gold), rating)
            for output, gold in pairs
            if (rating := _parse_rating(task, rules, output, gold)[0]) is not None
        ]
        right, rated = zip(*read, strict=True) if read else ((), ())
        metrics = {
            "mae": float(mean_absolute_error(right, rated)) if read else None,
            "rmse": float(root_mean_squared_error(right, rated)) if read else None,
            "accuracy": mean("correct"),
        }
    else:
        metrics = {name: mean(name) for name in task.metrics}
    return metrics | {"failed_parse_rate": mean("failed_parse")}


def _score(task: Task, rules: str, output: str, gold: str) -> Scores:
    if task.kind == "text":
        rouge1, rouge_l = _rouge(output, gold)[rules]
        return {"rouge1": rouge1, "rougeL": rouge_l, "failed_parse": float(not output.strip())}
    if task.kind == "rating":
        rating, failed = _parse_rating(task, rules, output, gold)
        return {
            "correct": float(rating == float(gold)),
            "failed_parse": float(failed),
            "absolute_error": None if rating is None else abs(rating - float(gold)),
        }
    label = _parse_label(task, rules, output)
    return {"correct": float(label == gold), "failed_parse": float(label is None)}


def _parse_label(task: Task, rules: str, output: str) -> str | None:
    """The label that an output names; None: none."""
    if rules == "official":
        return output.strip() if output.strip() in task.labels else None
    if task.answer_pattern:
        found = re.search(task.answer_pattern, output.replace("\N{MINUS SIGN}", "-"))
        if found is None or found[1] in task.labels:  # "4" is also a part of "-4"
            return found[1] if found else None
        return next(label for label in task.labels if found[1] in label)
    text = " ".join(output.lower().split())
    # The longest first; of equal length in the order of the alphabet.
    by_length = sorted(task.labels, key=lambda label: (-len(label), label))
    exact = next((label for label in by_length if label.lower() == text), None)
    return exact or next((label for label in by_length if label.lower() in text), None)


def _parse_rating(task: Task, rules: str, output: str, gold: str) -> tuple[float | None, bool]:
    """The rating that an output counts as, and whether it names none of the labels."""
    if rules == "protocol":
        label = _parse_label(task, rules, output)
        return (None, True) if label is None else (float(label), False)
    scale = [float(label) for label in task.labels]
    try:
        rating = float(output.strip())
    except ValueError:
        rating = math.nan
    if math.isfinite(rating):
        return rating, rating not in scale
    # From a gold in the middle both ends are as far, and the error is the same.
    return max(scale, key=lambda end: abs(end - float(gold))), True


@lru_cache(maxsize=2**18)  # arms often answer the same, and each answer is scored twice
def _rouge(output: str, gold: str) -> dict[str, tuple[float, float]]:
    """F1 of ROUGE-1 and of ROUGE-L as rouge-score computes them, by rule set."""
    tokens, scorer = _rouge_score()
    texts = gold.strip(), output.strip()

    def f1(stemmed: bool) -> tuple[float, float]:
        right, answered = (set(tokens(text, stemmed)) for text in texts)
        if right.isdisjoint(answered):
            return 0.0, 0.0
        scores = scorer(stemmed).score(*texts)
        return float(scores["rouge1"].fmeasure), float(scores["rougeL"].fmeasure)

    words, stems = ([t for text in texts for t in tokens(text, stem)] for stem in (False, True))
    plain = f1(False)
    # Where no two words have a stem in common, the same words are equal, stemmed or not.
    same = len(words) == len(stems) and len(set(words)) == len(set(stems))
    return {"official": plain, "protocol": plain if same else f1(True)}


@lru_cache(maxsize=1)
def _rouge_score() -> tuple[Callable[[str, bool], list[str]], Callable[[bool], Any]]:
    """rouge-score's tokens of a text and its scorer, each with or without stemming."""
    from nltk.stem.porter import PorterStemmer  # here: nltk is slow to import
    from rouge_score import rouge_scorer
    from rouge_score.tokenize import tokenize

    class CachedStemmer:
        """The same words come again, and stemming one takes longer than all the rest."""

        stem = staticmethod(lru_cache(maxsize=2**16)(PorterStemmer().stem))

    @lru_cache(maxsize=4)  # two texts, each with and without stemming
    def tokens(text: str, stemmed: bool) -> list[str]:
        return list(tokenize(text, CachedStemmer if stemmed else None))

    class Tokenizer:
        def __init__(self, stemmed: bool) -> None:
            self.stemmed = stemmed

        def tokenize(self, text: str) -> list[str]:
            return tokens(text, self.stemmed)

    @lru_cache(maxsize=2)
    def scorer(stemmed: bool) -> Any:
        return rouge_scorer.RougeScorer(["rouge1", "rougeL"], tokenizer=Tokenizer(stemmed))

    return tokens, scorer
