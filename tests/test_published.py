"""The paper's tables: the published numbers, ours beside them, and one command for each."""

from __future__ import annotations

import json

import pytest
from hydra import compose, initialize_config_dir
from rich.console import Console

from lamp_eval.__main__ import CONF_DIR
from lamp_eval.config import ARMS
from lamp_eval.display import show_paper_table
from lamp_eval.published import RULES, TABLES, paper_table
from lamp_eval.tasks import TASKS


def row(task, arm, reference, metric, rules, value, **more):
    return {
        "task": task, "arm": arm, "reference": reference, "metric": metric, "rules": rules,
        "value": value, "n_users": 4, "n_queries": 10, "delta": None, "delta_u": None,
        "reference_value": None, "synthetic": False,
    } | more  # fmt: skip


def line(lines, task, metric, whose):
    (found,) = [
        one for one in lines if (one["task"], one["metric"], one["whose"]) == (task, metric, whose)
    ]
    return found


@pytest.mark.parametrize(
    "task", ["citation", "movie_tagging", "news_categorize", "news_headline", "product_rating",
             "scholarly_title", "tweet_paraphrase"],
)  # fmt: skip
def test_table8_is_the_published_scores(lamp_data, task):
    scores = json.loads((lamp_data / "table8" / f"score_{task}_r5q4t.json").read_text())
    metric = TASKS[task].metrics[0]
    found = line(paper_table("table8", []), task, metric, "paper")
    name = {"accuracy": "accuracy", "rouge1": "rouge_1", "mae": "MAE"}[metric]
    sign = -1 if metric == "mae" else 1  # these files turn the sign of errors
    assert found["users"] == scores["n_users"]
    assert found["queries/user"] == pytest.approx(scores["n_queries"] / scores["n_users"], 0.05)
    tasks = scores[f"task_{name}"]
    assert found["task arm"] == pytest.approx(tasks, abs=6e-4)
    assert found["user arm"] == pytest.approx(scores[f"oppu_{name}"], abs=5.1e-4)
    assert found["Δ"] == pytest.approx(sign * scores["query_level_mean_diff"], abs=5.1e-4)
    assert found["Δᵤ"] == pytest.approx(sign * scores["user_grouped_mean_diff"], abs=5.1e-4)


@pytest.mark.parametrize("name", sorted(TABLES))
def test_published_differences_fit_the_published_values(name):
    for found in paper_table(name, []):
        if found["whose"] == "ours":
            assert set(found.values()) <= {found["task"], found["metric"], "ours", False, None}
        elif name == "table8":
            assert found["user arm"] - found["task arm"] == pytest.approx(found["Δ"], abs=1.6e-3)
        else:
            for arm in ("task", "task_retrieval"):
                gain = found[f"{arm} arm"] - found["base_retrieval arm"]
                assert gain == pytest.approx(found[f"Δ {arm}"], abs=1.6e-3)
    assert set(TASKS[task].lamp_id for task, _ in TABLES[name][1]) == {
        "LaMP_1", "LaMP_2M", "LaMP_2N", "LaMP_3", "LaMP_4", "LaMP_5", "LaMP_7",
    }  # fmt: skip


def test_table8_takes_the_user_arm_against_the_task_arm():
    rows = [
        row("movie_tagging", "user", "task", "accuracy", "official", 0.5, reference_value=0.4,
            delta=0.1, delta_u=0.2, synthetic=True),
        row("movie_tagging", "user", "cross_user", "accuracy", "official", 0.5, delta=9),
        row("movie_tagging", "user", "task", "accuracy", "protocol", 0.9, delta=9),
        row("movie_tagging", "user", "task", "macro_f1", "official", 0.9, delta=9),
    ]  # fmt: skip
    ours = line(paper_table("table8", rows), "movie_tagging", "accuracy", "ours")
    assert [ours[name] for name in TABLES["table8"][0]] == [4, 2.5, 0.4, 0.5, 0.1, 0.2]
    assert ours["synthetic"]


def test_table7_compares_with_the_base_that_retrieves():
    rows = [
        row("product_rating", "base", None, "mae", "protocol", 0.7),
        row("product_rating", "base_retrieval", "base", "mae", "protocol", 0.6, delta=-0.1),
        row("product_rating", "task", "base", "mae", "protocol", 0.5, delta=-0.2),
        row("product_rating", "task", "base_retrieval", "mae", "protocol", 0.5, delta=-0.1),
        row("product_rating", "task_retrieval", "base_retrieval", "mae", "protocol", 0.4,
            delta=-0.2, n_queries=9),
        row("product_rating", "base", None, "mae", "official", 9),
    ]  # fmt: skip
    ours = line(paper_table("table7", rows), "product_rating", "mae", "ours")
    assert [ours[name] for name in TABLES["table7"][0]] == [10, 0.7, 0.6, 0.5, -0.1, 0.4, -0.2]


@pytest.mark.parametrize("name", sorted(TABLES))
def test_the_table_shows_ours_and_the_papers(name):
    console = Console(width=160, record=True, file=open("/dev/null", "w"))
    show_paper_table(console, name, paper_table(name, []))
    text = console.export_text()
    assert all(f"│ {task} " in text for task, _ in TABLES[name][1])
    assert text.count("│ ours ") == text.count("│ paper ") == len(TABLES[name][1])
    assert ("-0.111" if name == "table7" else "-0.018") in text
    assert "SYNTHETIC" not in text


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_suite_runs_an_experiment_for_each_task_of_its_table(name):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        config = compose("config", overrides=[f"suite={name}"], return_hydra_config=True)
        assert config.suite == name
        assert config.hydra.mode.name == "MULTIRUN"
        experiments = [e.strip() for e in config.hydra.sweeper.params.experiment.split(",")]
        tasks = []
        for experiment in experiments:
            one = compose("config", overrides=[f"suite={name}", f"experiment={experiment}"])
            assert one.suite == name
            assert set(one.arms) <= set(ARMS)
            assert one.protocol.name == {"table7": "lamp_chat", "table8": "oppu"}[name]
            tasks.append(one.task)
    assert tasks == list(dict.fromkeys(task for task, _ in TABLES[name][1]))
    assert RULES[name] in ("official", "protocol")
