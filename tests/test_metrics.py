"""Scoring by both rule sets: golden cases, the arms' metrics, and published predictions."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lamp_eval.errors import UserError
from lamp_eval.metrics import RULES, arm_metrics, evaluate_metric, score_output
from lamp_eval.tasks import TASKS, Task

MOVIES, RATINGS = TASKS["movie_tagging"], TASKS["product_rating"]
MOVIE_RATINGS = TASKS["movie_rating"]
CITATIONS, HEADLINES = TASKS["citation"], TASKS["news_headline"]


@pytest.mark.parametrize(
    ("output", "gold", "correct", "failed_parse"),
    [
        ("comedy", "comedy", 1, 0),
        (" comedy\n", "comedy", 1, 0),
        ("action", "comedy", 0, 0),
        ("Comedy", "comedy", 0, 1),
        ("comedy.", "comedy", 0, 1),
        ("based on a  book", "based on a book", 0, 1),
        ("based on a true story", "true story", 0, 1),
        ("", "comedy", 0, 1),
    ],
)
def test_labels_match_exactly_after_stripping(
    output: str, gold: str, correct: float, failed_parse: float
) -> None:
    assert score_output(MOVIES, output, gold)["official"] == {
        "correct": correct,
        "failed_parse": failed_parse,
    }


@pytest.mark.parametrize(
    ("output", "gold", "error", "correct", "failed_parse"),
    [
        ("4", "4", 0, 1, 0),
        (" 4.0\n", "4", 0, 1, 0),
        ("1", "5", 4, 0, 0),
        ("great", "3", 2, 0, 1),  # both ends are 2 away; protocol.md's golden case
        ("4 stars", "5", 4, 0, 1),  # counts as 1; protocol.md's golden case
        ("great", "1", 4, 0, 1),
        ("great", "2", 3, 0, 1),
        ("", "4", 3, 0, 1),
        ("45", "5", 40, 0, 1),
        ("1e3", "5", 995, 0, 1),
        ("4.5", "5", 0.5, 0, 1),
        ("0", "1", 1, 0, 1),
        ("nan", "5", 4, 0, 1),
        ("inf", "5", 4, 0, 1),
        ("-inf", "2", 3, 0, 1),
    ],
)
def test_ratings_are_read_as_numbers_or_count_as_the_farther_end(
    output: str, gold: str, error: float, correct: float, failed_parse: float
) -> None:
    assert score_output(RATINGS, output, gold)["official"] == {
        "correct": correct,
        "failed_parse": failed_parse,
        "absolute_error": error,
    }


@pytest.mark.parametrize(
    ("task", "output", "gold", "correct", "failed_parse"),
    [
        (MOVIES, "Comedy.", "comedy", 1, 0),
        (MOVIES, "It is a  Dark\nComedy", "dark comedy", 1, 0),  # not "comedy": the longest wins
        (MOVIES, "It is a dark comedy", "comedy", 0, 0),
        (MOVIES, "comedy or action", "action", 1, 0),  # equally long: in the alphabet's order
        (MOVIES, "based on a true story", "true story", 1, 0),
        (MOVIES, "horror", "comedy", 0, 1),
        (MOVIES, "", "comedy", 0, 1),
        (TASKS["news_categorize"], "Category: Food & Drink", "food & drink", 1, 0),
        (CITATIONS, "[2]", "[2]", 1, 0),
        (CITATIONS, "The answer is [ 2 ], not [1]", "[2]", 1, 0),
        (CITATIONS, "1", "[1]", 1, 0),
        (CITATIONS, "12", "[1]", 1, 0),  # the first match
        (CITATIONS, "neither", "[1]", 0, 1),
    ],
)
def test_the_protocol_looks_for_the_label_in_the_output(
    task: Task, output: str, gold: str, correct: float, failed_parse: float
) -> None:
    assert score_output(task, output, gold)["protocol"] == {
        "correct": correct,
        "failed_parse": failed_parse,
    }


@pytest.mark.parametrize(
    ("output", "gold", "error", "correct", "failed_parse"),
    [
        ("4 stars", "5", 1, 0, 0),
        ("I give it 4.0 of 5", "4", 0, 1, 0),
        ("45", "5", 1, 0, 0),
        ("0.5", "5", 0, 1, 0),
        ("great", "3", None, 0, 1),
        ("", "3", None, 0, 1),
    ],
)
def test_the_protocol_takes_the_first_digit_that_is_a_rating(
    output: str, gold: str, error: float | None, correct: float, failed_parse: float
) -> None:
    assert score_output(RATINGS, output, gold)["protocol"] == {
        "correct": correct,
        "failed_parse": failed_parse,
        "absolute_error": error,
    }


@pytest.mark.parametrize(
    ("output", "gold", "official", "protocol"),
    [
        # By hand: F1 = 2·common / (words of both); ROUGE-L counts the longest common subsequence.
        ("dogs running home", "the dog runs home", (2 / 7, 2 / 7), (6 / 7, 6 / 7)),
        ("home run", "run home", (1.0, 0.5), (1.0, 0.5)),
        (" Run, home!\n", "run home", (1.0, 1.0), (1.0, 1.0)),
        ("run run", "run", (2 / 3, 2 / 3), (2 / 3, 2 / 3)),
        ("日本語", "日本語", (0.0, 0.0), (0.0, 0.0)),  # no letters that ROUGE knows
        ("", "run home", (0.0, 0.0), (0.0, 0.0)),
    ],
)
def test_texts_get_rouge_without_and_with_stemmer(
    output: str, gold: str, official: tuple[float, float], protocol: tuple[float, float]
) -> None:
    failed = float(output == "")
    for rules, (rouge1, rouge_l) in (("official", official), ("protocol", protocol)):
        assert score_output(HEADLINES, output, gold)[rules] == pytest.approx(
            {"rouge1": rouge1, "rougeL": rouge_l, "failed_parse": failed}, abs=1e-12
        )


@pytest.mark.parametrize(
    ("task", "gold"), [(MOVIES, "horror"), (MOVIES, "Comedy"), (RATINGS, "6"), (RATINGS, "4.0")]
)
def test_a_gold_that_is_no_label_is_an_error(task: Task, gold: str) -> None:
    # The official evaluator would count "horror" as right for any output that is no label.
    with pytest.raises(UserError, match=f"found: +'{gold}'"):
        score_output(task, "horror", gold)


@pytest.mark.parametrize(
    ("output", "gold", "official", "protocol"),  # errors; None: nothing was parsed
    [
        ("-4", "-4", 0, 0),
        ("4", "-4", 8, 8),  # "4" is a part of "-4", the first label
        (" -3\n", "-3", 0, 0),
        ("\N{MINUS SIGN}3", "-3", 7, 0),  # a sign that `float` does not know
        ("+2", "2", 0, 0),
        ("+2", "-2", 4, 4),
        ("0", "0", 0, 0),
        ("-0", "0", 0, 0),
        ("2 out of 4", "2", 6, 0),
        ("-1 on a scale of -4 to 4", "0", 4, 1),
        ("score: -2.", "-2", 6, 0),
        ("score-3", "3", 7, 0),  # a hyphen
        ("-2.5", "-2", 0.5, 0),
        ("10", "4", 6, None),
        ("5", "4", 1, None),
        ("-12", "-1", 11, None),
        ("nan", "0", 4, None),
        ("good", "0", 4, None),  # both ends are as far
        ("good", "-1", 5, None),
        ("good", "1", 5, None),
        ("", "-4", 8, None),
    ],
)
def test_ratings_may_be_negative(
    output: str, gold: str, official: float, protocol: float | None
) -> None:
    scores = score_output(MOVIE_RATINGS, output, gold)
    assert scores["official"]["absolute_error"] == official
    assert scores["protocol"]["absolute_error"] == protocol
    for rules, error in (("official", official), ("protocol", protocol)):
        assert scores[rules]["correct"] == (error == 0)
    assert scores["protocol"]["failed_parse"] == (protocol is None)


@pytest.mark.parametrize("label", MOVIE_RATINGS.labels)
def test_every_negative_and_positive_label_is_found_as_itself(label: str) -> None:
    for output in (label, f" {label}\n", f"The score is {label}, or so."):
        for other in MOVIE_RATINGS.labels:
            scores = score_output(MOVIE_RATINGS, output, other)["protocol"]
            assert scores["correct"] == (label == other)
            assert scores["absolute_error"] == abs(int(label) - int(other))
    assert score_output(MOVIE_RATINGS, label, label)["official"] == {
        "correct": 1,
        "failed_parse": 0,
        "absolute_error": 0,
    }


def _metrics(task: Task, *outputs_and_golds: tuple[str, str]) -> dict[str, dict[str, Any]]:
    return arm_metrics(task, *zip(*outputs_and_golds, strict=True))


def test_label_metrics_run_over_the_full_label_list() -> None:
    rows = (" comedy", "comedy"), ("action", "comedy"), ("action", "action"), ("Horror", "sci-fi")
    metrics = _metrics(MOVIES, *rows)
    # By hand: F1 is 2/3 for comedy and for action and 0 for the other 13 of 15 labels.
    assert metrics["official"] == metrics["protocol"]
    assert metrics["official"] == pytest.approx(
        {"accuracy": 0.5, "macro_f1": (2 / 3 + 2 / 3) / 15, "failed_parse_rate": 0.25}, abs=1e-12
    )
    assert list(metrics["official"]) == [*MOVIES.metrics, "failed_parse_rate"]
    found = _metrics(MOVIES, ("A comedy.", "comedy"))
    assert found["official"]["accuracy"] == 0.0
    assert found["protocol"] == pytest.approx(
        {"accuracy": 1.0, "macro_f1": 1 / 15, "failed_parse_rate": 0.0}, abs=1e-12
    )


def test_rating_metrics_use_the_official_value_of_every_output() -> None:
    metrics = _metrics(RATINGS, ("5", "5"), ("4.0", "3"), ("great", "3"), ("45", "5"))
    # By hand: absolute errors 0, 1, 2, 40.
    assert metrics["official"] == pytest.approx(
        {
            "mae": 43 / 4,
            "rmse": math.sqrt((1 + 4 + 1600) / 4),
            "accuracy": 0.25,
            "failed_parse_rate": 0.5,
        },
        abs=1e-12,
    )
    assert list(metrics["official"]) == [*RATINGS.metrics, "failed_parse_rate"]
    # By hand: errors 0, 1, none, 1.
    assert metrics["protocol"] == pytest.approx(
        {"mae": 2 / 3, "rmse": math.sqrt(2 / 3), "accuracy": 0.25, "failed_parse_rate": 0.25},
        abs=1e-12,
    )


def test_without_a_readable_rating_there_is_no_error_to_average() -> None:
    metrics = _metrics(RATINGS, ("great", "5"))["protocol"]
    assert metrics == {"mae": None, "rmse": None, "accuracy": 0.0, "failed_parse_rate": 1.0}


def test_text_metrics_are_means_over_queries() -> None:
    metrics = _metrics(HEADLINES, ("home run", "run home"), ("", "run home"))
    expected = {"rouge1": 0.5, "rougeL": 0.25, "failed_parse_rate": 0.5}
    assert metrics["official"] == pytest.approx(expected, abs=1e-12)
    assert metrics["protocol"] == pytest.approx(expected, abs=1e-12)


def test_real_headlines_get_the_scores_of_rouge_score(lamp_data: Path) -> None:
    """1,925 real predictions, among them non-ASCII ones, against the library as it comes."""
    from rouge_score.rouge_scorer import RougeScorer

    golds = json.loads((lamp_data / "lamp/LaMP_4/dev/dev_outputs.json").read_text())["golds"]
    outputs = json.loads((lamp_data / "predictions/LaMP_4_dev_preds.json").read_text())["golds"]
    output_of = {row["id"]: row["output"] for row in outputs}
    assert len(golds) == 1925
    kinds = ["rouge1", "rougeL"]
    scorers = {"official": RougeScorer(kinds), "protocol": RougeScorer(kinds, use_stemmer=True)}
    for gold in golds:
        output = output_of[gold["id"]]
        found = score_output(HEADLINES, output, gold["output"])
        for rules, scorer in scorers.items():
            expected = scorer.score(gold["output"].strip(), output.strip())
            assert [found[rules][kind] for kind in kinds] == [
                expected[kind].fmeasure for kind in kinds
            ]


def test_an_arm_without_predictions_is_an_error() -> None:
    with pytest.raises(UserError, match="at least one prediction"):
        arm_metrics(MOVIES, [], [])


def test_metrics_need_no_network_no_home_and_leave_no_files(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from lamp_eval.metrics import arm_metrics, evaluate_metric\n"
        "assert not {'torch', 'transformers', 'mlx'} & set(sys.modules), 'heavy import'\n"
        "from lamp_eval.tasks import TASKS\n"
        "assert arm_metrics(TASKS['product_rating'], ['4'], ['4'])['official']['mae'] == 0\n"
        "assert arm_metrics(TASKS['news_headline'], ['4'], ['4'])['protocol']['rouge1'] == 1\n"
        "assert 'evaluate' not in sys.modules, 'seconds of imports'\n"
        "import tempfile\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    metric = evaluate_metric(TASKS['news_headline'], 'official', folder)\n"
        "    for _ in range(20):\n"
        "        assert metric.compute(predictions=['a'], references=['a'])['rouge1'] == 1\n"
    )
    work, temporary = tmp_path / "work", tmp_path / "tmp"
    work.mkdir()
    temporary.mkdir()
    environment = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    environment |= {
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        "HOME": "/dev/null",  # nothing can be made below it, not even by root
        "HF_HOME": "/dev/null/huggingface",
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(temporary),
    }
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=work, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert list(work.iterdir()) == []
    # torch, which evaluate imports, makes a folder of its own.
    left = [path.name for path in temporary.iterdir() if not path.name.startswith("torch")]
    assert left == []


@pytest.mark.parametrize(
    ("predictions_file", "score", "n_right"),
    [
        ("preds_movie_tagging_r5q4t.json", "oppu_score", 1610),
        ("preds_movie_tagging_task_k1_q4.json", "task_score", 1192),
    ],
)
def test_published_movie_predictions_get_their_published_scores(
    lamp_data: Path, predictions_file: str, score: str, n_right: int
) -> None:
    folder = lamp_data / "table8"
    outputs = json.loads((folder / predictions_file).read_text())
    golds = json.loads((folder / "movie_tagging_golds.json").read_text())
    lines = (folder / "score_movie_tagging_r5q4t.pairs.jsonl").read_text().splitlines()
    published = {pair["id"]: pair[score] for pair in map(json.loads, lines)}

    scored = {
        query_id: score_output(MOVIES, outputs[query_id], entry["gold"])["official"]["correct"]
        for query_id, entry in golds.items()
        if entry["gold"] is not None
    }
    assert len(scored) == 1690
    assert scored == {query_id: published[query_id] for query_id in scored}
    # A query without a known gold is one that no arm got right.
    assert sum(score or 0 for score in scored.values()) == sum(published.values()) == n_right


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(
    ("task", "outputs", "golds"),
    [
        ("movie_tagging", ["comedy", "a comedy", "none"], ["comedy", "action", "comedy"]),
        ("product_rating", ["4", "4 stars", "?"], ["5", "4", "1"]),
        ("news_headline", ["A bridge", "", "Rivers run"], ["The bridge", "A", "River runs"]),
    ],
)
def test_metrics_as_evaluate_has_them(task, outputs, golds, rules, tmp_path) -> None:
    import evaluate

    metric = evaluate_metric(TASKS[task], rules, str(tmp_path))
    assert isinstance(metric, evaluate.Metric)
    expected = arm_metrics(TASKS[task], outputs, golds)[rules]
    assert metric.compute(predictions=outputs, references=golds) == expected
    metric.add_batch(predictions=outputs[:2], references=golds[:2])
    metric.add(prediction=outputs[2], reference=golds[2])
    assert metric.compute() == expected
