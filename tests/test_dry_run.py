"""What a run would take, before a model is loaded: counts, the phone's law, disk, no network."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from test_config import composed
from tiny import make_tiny_model

from lamp_eval import dry_run as module
from lamp_eval.data import load_corpus
from lamp_eval.dry_run import dry_run
from lamp_eval.errors import UserError
from lamp_eval.plan import Plan
from lamp_eval.tasks import TASKS
from recipes import model_source
from recipes.model_source import find_tokenizer, load_tokenizer, rough_tokenizer

SMALL = ("data.n_users=2", "data.n_task_users=3", "data.n_records=5", "data.n_queries=3")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def still(monkeypatch):
    """A machine of one known speed."""
    monkeypatch.setattr(module.estimate, "flops_per_second", lambda: 1e9)


def shown(config) -> tuple[list[module.Cost], str]:
    console = Console(width=160, record=True, quiet=False, file=open("/dev/null", "w"))
    return dry_run(config, console), console.export_text()


def test_tokens_are_those_of_the_run(model, tmp_path):
    config = composed("experiment=movie_tagging_per_user", f"model.path={model}", *SMALL,
                      "adapter.task.max_steps=2", "adapter.task.batch_size=4",
                      f"output_dir={tmp_path / 'outputs'}")  # fmt: skip
    costs, text = shown(config)
    assert not (tmp_path / "outputs").exists()
    corpus = load_corpus(TASKS["movie_tagging"], config.data)
    inputs = Plan(config, TASKS["movie_tagging"], corpus, Console(quiet=True)).inputs
    by_stage = {cost.stage: cost for cost in costs}
    assert list(by_stage) == ["task adapter", "user adapters", *(f"arm {a}" for a in config.arms)]
    for name in config.arms:
        prompts = [r.prompt for user in corpus.users for r in inputs.requests(name, user)]
        assert by_stage[f"arm {name}"].n_tokens == sum(map(len, prompts))
        assert by_stage[f"arm {name}"].count == "6 queries"
    n_tokens = sum(len(e.tokens) for user in corpus.users for e in inputs.user_examples(user))
    adapters = by_stage["user adapters"]
    assert adapters.n_tokens == 3 * n_tokens
    assert adapters.phone_seconds == pytest.approx(0.0112 * 3 * n_tokens + 2 * 13)
    assert adapters.phone_joules == pytest.approx(0.04 * 3 * n_tokens)
    # Two batches of four of nine examples.
    n_task = sum(len(e.tokens) for e in inputs.task_examples)
    assert by_stage["task adapter"].n_tokens == round(n_task * 8 / 9)
    assert f"{sum(cost.n_tokens for cost in costs):,}" in text
    assert "SYNTHETIC" in text
    assert "estimated from words" not in text
    assert all(cost.seconds > 0 for cost in costs)


def test_twice_the_parameters_take_twice_the_time(model):
    config = composed("experiment=movie_tagging_per_user", f"model.path={model}", *SMALL)
    first = shown(config)[0]
    config.model = replace(config.model, n_parameters=2 * config.model.n_parameters)
    for before, after in zip(first, shown(config)[0], strict=True):
        assert after.seconds == pytest.approx(2 * before.seconds)


def test_the_paper_without_a_hub(monkeypatch, lamp_data):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(model_source, "_first_line", lambda error: "not reached")
    config = composed(
        "experiment=product_rating_per_user", "setting=paper", "data.max_records=20",
        f"data.dir={lamp_data / 'oppu'}", "model.hub_id=nobody/nothing-such",
    )  # fmt: skip
    costs, text = shown(config)
    assert "estimated from words" in text and "not reached" in text
    assert [cost.stage for cost in costs] == [
        "task adapter", "user adapters", "arm task", "arm user", "arm cross_user",
    ]  # fmt: skip
    # 4 bits, a 16-bit scale and bias for each 64 weights: 4.5 bits, of 3.08 billion.
    assert "1 × 1.73 GB for the bases" in text


def test_sizes_of_user_adapters_are_those_written(model, tmp_path):
    config = composed("experiment=movie_tagging_per_user", f"model.path={model}", *SMALL)
    shape = json.loads((model / "config.json").read_text())
    # Two of four blocks; 64 → 64 and 64 → 32, rank 8.
    config.adapter.user = replace(config.adapter.user, blocks=2)
    assert module._adapter_size(config, shape) == 2 * 8 * ((64 + 64) + (64 + 32))
    config.adapter.user.projections = ["down_proj"]
    assert module._adapter_size(config, shape) == 2 * 8 * (128 + 64)


@pytest.mark.slow
def test_rough_tokens_are_about_as_many(lamp_data, smollm2_dir):
    real, rough = load_tokenizer(smollm2_dir), rough_tokenizer()
    reviews = json.loads((lamp_data / "oppu/product_rating/user_top_100_history.json").read_text())[
        0
    ]["profile"][:100]
    papers = json.loads((lamp_data / "lamp/LaMP_5/train/train_questions.json").read_text())[:100]
    tweets = json.loads((lamp_data / "lamp/LaMP_7/dev/dev_questions.json").read_text())[:300]
    for texts in (
        [r["text"] for r in reviews],
        *([r["input"] for r in rs] for rs in (papers, tweets)),
    ):
        n_real, n_rough = (sum(len(t.encode(text)) for text in texts) for t in (real, rough))
        assert 0.8 < n_rough / n_real < 1.2


def test_where_a_tokenizer_is_found(model, tmp_path, monkeypatch):
    def find(**options):
        known = {"name": "m", "hub_id": None, "path": None, "revision": None, "cache_dir": tmp_path}
        return find_tokenizer(**known | options)

    assert find(path=str(model)) == (model, "")
    with pytest.raises(UserError, match="no such directory"):
        find(path=str(tmp_path / "nowhere"))
    assert find()[0] is None
    converted = tmp_path / f"m-0.1.2-{model_source.CONVERTER_VERSION}"
    converted.symlink_to(model)
    assert find()[0] == converted


def test_dense_retrieval_needs_a_model(model):
    config = composed("experiment=movie_tagging_per_user", "protocol.retrieval=dense",
                      "protocol.embedding_model=x", f"model.path={model}")  # fmt: skip
    with pytest.raises(UserError, match="choose bm25"):
        shown(config)
