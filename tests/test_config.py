"""The configurations in `conf/`, the checks of their values, and the command line's refusals."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lamp_eval.__main__ import CONF_DIR  # registers the schema
from lamp_eval.compose import compose_config
from lamp_eval.config import ARMS, MEASURES, RunConfig, check, n_adapted_blocks
from lamp_eval.data import load_corpus
from lamp_eval.errors import InputProblems, UserError
from lamp_eval.tasks import LAMP_TASKS, TASKS

EXPERIMENTS = sorted(path.stem for path in (CONF_DIR / "experiment").glob("*.yaml"))
SETTINGS = ("sample", "paper")


def composed(*overrides: str) -> RunConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        config = OmegaConf.to_object(compose("config", overrides=list(overrides)))
    assert isinstance(config, RunConfig)
    return config


# What conf/ holds


def test_there_are_experiments():
    assert EXPERIMENTS
    assert Path(CONF_DIR).parent == Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes(experiment, setting):
    config = composed(f"experiment={experiment}", f"setting={setting}")
    assert config.name == experiment
    assert config.setting == setting
    assert config.task in TASKS
    assert bool(config.arms) == (experiment not in MEASURES)
    assert set(config.arms) <= set(ARMS)
    assert config.measure == (experiment if experiment in MEASURES else None)
    real = "lamp" if experiment.endswith("_benchmark") else "oppu"
    own_data = {"movie_raters_per_user": "movie_raters"}
    assert config.data.source == own_data.get(
        experiment, {"sample": "sample", "paper": real}[setting]
    )


@pytest.mark.parametrize("task", LAMP_TASKS)
def test_every_task_has_sample_users(task):
    config = composed(f"experiment={task}_per_user")
    corpus = load_corpus(TASKS[config.task], config.data)
    assert (config.task, corpus.synthetic) == (task, True)
    assert (len(corpus.users), len(corpus.task_users)) == (5, 60)


def test_every_file_of_every_group_is_usable():
    files = sorted(p for p in CONF_DIR.rglob("*.yaml") if p.parent != CONF_DIR)
    assert len(files) > 10
    groups: dict[str, list[str]] = {}
    for path in files:
        groups.setdefault(path.parent.relative_to(CONF_DIR).as_posix(), []).append(path.stem)
    for i in range(max(map(len, groups.values()))):
        chosen = (f"{group}={names[i % len(names)]}" for group, names in groups.items())
        # Not every experiment fits every protocol: with as many records, two arms are the same.
        composed(*chosen, "protocol.adapter_k=0")


def test_without_any_argument_the_sample_runs():
    config = composed()
    assert (config.name, config.task, config.setting) == ("movie_tagging",) * 2 + ("sample",)
    assert config.arms == list(ARMS)


BENCHMARKS = [name for name in EXPERIMENTS if name.endswith("_benchmark")]
PER_USER = [name for name in EXPERIMENTS if name not in (*BENCHMARKS, *MEASURES)]


def test_each_task_has_both_experiments():
    for task in LAMP_TASKS:
        assert composed(f"experiment={task}_per_user").task == task
        assert composed(f"experiment={task}_benchmark").task == task


@pytest.mark.parametrize("experiment", BENCHMARKS)
def test_paper_setting_carries_the_benchmarks_recipe(experiment):
    config = composed(f"experiment={experiment}", "setting=paper")
    task, protocol = config.adapter.task, config.protocol
    assert (task.rank, task.alpha, len(task.projections)) == (4, 8, 7)
    assert (task.learning_rate, task.schedule, task.warmup_ratio) == (3e-4, "cosine", 0.03)
    assert (task.batch_size, task.epochs, task.max_steps) == (32, 1, None)
    assert (task.clip_norm, task.dropout, task.weight_decay) == (1.0, 0.05, 0)
    assert (protocol.name, protocol.k, protocol.adapter_k) == ("lamp_chat", 4, 0)
    assert (protocol.train_k, protocol.max_tokens) == (4, 2048)
    assert config.arms == ["base", "base_retrieval", "task", "task_retrieval"]
    assert (config.data.source, config.data.max_users) == ("lamp", None)
    assert config.model.hub_id == "HuggingFaceTB/SmolLM3-3B"
    assert config.quantization.bits == 4


@pytest.mark.parametrize("experiment", PER_USER)
def test_paper_setting_carries_the_papers_recipes(experiment):
    config = composed(f"experiment={experiment}", "setting=paper")
    user, task = config.adapter.user, config.adapter.task
    assert (user.rank, user.alpha, user.projections) == (8, 16, ["q_proj", "v_proj"])
    assert (user.learning_rate, user.schedule, user.warmup_ratio) == (1e-5, "cosine", 0.03)
    assert (user.weight_decay, user.clip_norm) == (0.01, 1.0)
    assert (user.accumulation, user.epochs, user.blocks) == (8, 3, "all")
    assert (task.rank, task.alpha, task.projections) == (8, 8, ["q_proj", "k_proj", "v_proj"])
    assert (task.learning_rate, task.schedule, task.warmup_ratio) == (1e-4, "linear", 0.1)
    assert (task.batch_size, task.epochs, task.max_steps) == (16, 3, None)
    assert (task.clip_norm, task.dropout) == (0.3, 0.05)
    protocol = config.protocol
    assert (protocol.name, protocol.k, protocol.adapter_k) == ("oppu", 1, 1)
    assert (protocol.train_words, protocol.eval_words) == (768, 368)
    assert (config.quantization.bits, config.quantization.group_size) == (4, 64)
    assert config.model.hub_id == "HuggingFaceTB/SmolLM3-3B"
    own_arms = {"device_agreement": ["task", "user"]}
    assert config.arms == own_arms.get(experiment, ["task", "user", "cross_user"])
    assert config.data.max_users == 100


def test_the_command_line_wins_over_the_setting():
    assert composed("setting=sample", "data=oppu").data.source == "oppu"
    assert composed("data=oppu", "setting=sample").data.source == "oppu"
    paper = composed("setting=paper", "data=sample", "model=smollm2_135m", "data.max_users=3")
    assert (paper.data.source, paper.model.name) == ("sample", "smollm2_135m")
    assert paper.data.max_users == 3
    assert paper.adapter.user.learning_rate == 1e-5  # the rest of the setting stays
    assert composed("setting=sample", "quantization=4bit_g64").quantization.bits == 4
    assert composed("setting=sample", "quantization=4bit_g64").quantization.embedding_bits == 4
    recipe = composed("setting=sample", "adapter/user=oppu").adapter.user
    assert recipe.learning_rate == 1e-5
    assert composed("setting=paper", "arms=[task]").arms == ["task"]


def test_sample_setting_tells_task_and_task_retrieval_apart():
    config = composed("setting=sample")
    assert (config.protocol.k, config.protocol.adapter_k) == (1, 0)
    assert config.quantization.bits == 8


# Ranges


@pytest.fixture(scope="module")
def default_config() -> RunConfig:
    return composed()


@pytest.fixture
def config(default_config) -> RunConfig:
    return copy.deepcopy(default_config)


OUT_OF_RANGE = {
    "task": "music",
    "arms": ["base", "nobody"],
    "n_resamples": 98,
    "seed": -1,
    "data.source": "web",
    "data.task_users": "all",
    "data.max_users": 0,
    "data.max_queries": 0,
    "data.max_records": -1,
    "data.n_users": 0,
    "data.n_task_users": 0,
    "data.n_queries": 0,
    "data.n_records": -1,
    "data.signal": 1.01,
    "protocol.name": "chat",
    "protocol.k": -1,
    "protocol.adapter_k": -1,
    "protocol.train_words": 0,
    "protocol.eval_words": 0,
    "protocol.max_tokens": 63,
    "protocol.retrieval": "nearest",
    "model.dtype": "int8",
    "executor.torch_device": "tpu",
    "on_device.backward": "fast",
    "on_device.checkpoint": 0,
    "on_device.memory_budget_gb": -1,
    "on_device.save_every": 0,
    "adapter.task.rank": 0,
    "adapter.task.alpha": 0.0,
    "adapter.task.projections": [],
    "adapter.task.dropout": 0.91,
    "adapter.task.learning_rate": 1.0,
    "adapter.task.schedule": "constant",
    "adapter.task.warmup_ratio": 0.91,
    "adapter.task.weight_decay": -0.1,
    "adapter.task.batch_size": 0,
    "adapter.task.epochs": 0,
    "adapter.task.max_steps": 0,
    "adapter.task.clip_norm": 0.0,
    "adapter.user.backend": "jax",
    "adapter.user.rank": 0,
    "adapter.user.alpha": -1.0,
    "adapter.user.projections": [],
    "adapter.user.blocks": 0,
    "adapter.user.learning_rate": 0.0,
    "adapter.user.schedule": "none",
    "adapter.user.warmup_ratio": -0.01,
    "adapter.user.weight_decay": float("nan"),
    "adapter.user.accumulation": 0,
    "adapter.user.epochs": 0,
    "adapter.user.clip_norm": float("nan"),
    "quantization.bits": 7,
    "quantization.group_size": 48,
    "quantization.embedding_bits": 1,
}


def set_option(config: RunConfig, option: str, value: object) -> None:
    *parents, name = option.split(".")
    node: object = config
    for parent in parents:
        node = getattr(node, parent)
    assert hasattr(node, name)
    setattr(node, name, value)


@pytest.mark.parametrize(("option", "value"), [("memory_budget_gb", 6.0), ("checkpoint", 2)])
def test_torch_takes_no_option_that_it_would_not_follow(config, option, value):
    set_option(config, f"on_device.{option}", value)
    check(config)
    config.adapter.user.backend = "torch"
    with pytest.raises(UserError, match=f"on_device.{option}"):
        check(config)


@pytest.mark.parametrize("option", OUT_OF_RANGE)
def test_each_range_is_checked_and_named(config, option):
    check(config)
    set_option(config, option, OUT_OF_RANGE[option])
    with pytest.raises(UserError) as error:
        check(config)
    named = re.findall(r"in option (\S+)", str(error.value))
    assert named == [option]


def test_all_ranges_are_checked_at_once(config):
    for option, value in OUT_OF_RANGE.items():
        if option != "data.source":  # it decides whether the sample's sizes are checked
            set_option(config, option, value)
    with pytest.raises(InputProblems) as error:
        check(config)
    named = {problem.where.removeprefix("option ") for problem in error.value.problems}
    assert named >= set(OUT_OF_RANGE) - {"data.source"}
    assert "more" in str(error.value)  # too many to show: they are counted


@pytest.mark.parametrize("blocks", [True, 1.5, -0.5, "some", None, 0.0, -3])
def test_blocks_that_mean_nothing(config, blocks):
    config.adapter.user.blocks = blocks
    with pytest.raises(UserError, match="adapter.user.blocks"):
        check(config)


@pytest.mark.parametrize("blocks", ["all", 1, 15, 0.5, 1.0])
def test_blocks_that_mean_something(config, blocks):
    config.adapter.user.blocks = blocks
    check(config)


def test_number_of_adapted_blocks():
    assert n_adapted_blocks("all", 30) == 30
    assert n_adapted_blocks(20, 30) == 20
    assert n_adapted_blocks(30, 30) == 30
    assert n_adapted_blocks(0.5, 30) == 15
    assert n_adapted_blocks(1.0, 30) == 30
    assert n_adapted_blocks(0.001, 30) == 1
    with pytest.raises(UserError, match="at most 30 blocks"):
        n_adapted_blocks(31, 30)


@pytest.mark.parametrize(
    ("arms", "named"),
    [
        ([], "at least one of"),
        (["task", "task"], "each arm once"),
        (["user"], "'task', the reference of user arms"),
        (["base", "cross_user"], "'task', the reference of user arms"),
    ],
)
def test_arms_that_cannot_be_compared(config, arms, named):
    config.arms = arms
    with pytest.raises(UserError) as error:
        check(config)
    assert named in str(error.value)
    assert "option arms" in str(error.value)


def test_two_arms_that_would_be_the_same_are_refused(config):
    config.protocol = replace(config.protocol, k=1, adapter_k=1)
    with pytest.raises(UserError, match=r"protocol\.adapter_k"):
        check(config)
    config.arms.remove("task_retrieval")
    check(config)


def test_retrieval_arms_need_something_to_retrieve(config):
    config.protocol = replace(config.protocol, k=0, adapter_k=1)
    with pytest.raises(UserError, match=r"protocol\.k"):
        check(config)


def test_sizes_of_the_sample_are_not_asked_of_real_data():
    assert composed("data=oppu", "data.dir=/x").data.n_users == 0


# The command line, as a user meets it

MISTAKES = {
    "typo": (["adapter.user.rnk=4"], ["adapter.user.rnk", "did you mean adapter.user.rank"]),
    "several": (
        ["data.signal=2", "adapter.user.epochs=0", "arms=[user]", "seed=-1"],
        ["option data.signal", "option adapter.user.epochs", "option arms", "option seed"],
    ),
    "range": (["adapter.user.rank=0"], ["option adapter.user.rank", "at least 1"]),
    "group typo": (["datta=oppu"], ["datta", "did you mean data"]),
    "type": (["adapter.user.rank=many"], ["adapter.user.rank", "many"]),
    "experiment": (["experiment=music"], ["music", *EXPERIMENTS]),
    "no data": (["data=oppu"], ["option data.dir"]),
    "other people": (["data=movie_raters"], ["task=movie_tagging", "movie_rating"]),
    "no raters": (
        ["experiment=movie_raters_per_user", "data.dir=nowhere"],
        ["nowhere/vaderSentiment-0.5.zip", "data.dir="],
    ),
}
OWN_PROCESS = ("typo", "several")  # the others share one, to save the imports
ONE_AFTER_THE_OTHER = """
import contextlib, io, json, os, sys
from lamp_eval.__main__ import main
found = {}
for name, (folder, arguments) in json.loads(sys.argv[1]).items():
    os.chdir(folder)
    sys.argv[1:] = arguments
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = main()
        except SystemExit as stop:
            code = stop.code
    found[name] = code, output.getvalue()
print(json.dumps(found))
"""


def start(arguments, folder, cache) -> subprocess.Popen:
    environment = os.environ | {
        "PYTHONPATH": str(CONF_DIR.parent),
        "XDG_CACHE_HOME": str(cache),
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=folder, env=environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Exit code, output and what was written, of each mistaken command."""
    folders = {name: tmp_path_factory.mktemp("mistake") for name in MISTAKES}
    cache = tmp_path_factory.mktemp("cache")
    shared = {
        name: (str(folders[name]), MISTAKES[name][0])
        for name in MISTAKES
        if name not in OWN_PROCESS
    }
    running = {
        name: start(["-m", "lamp_eval", *MISTAKES[name][0]], folders[name], cache)
        for name in OWN_PROCESS
    }
    running["shared"] = start(["-c", ONE_AFTER_THE_OTHER, json.dumps(shared)], cache, cache)
    found = {}
    for name, process in running.items():
        try:
            output, errors = process.communicate(timeout=120)
        finally:
            process.kill()
        if name == "shared":
            assert process.returncode == 0, errors
            found |= json.loads(output.splitlines()[-1])
        else:
            found[name] = process.returncode, output + errors
    return {
        name: (*answer, sorted(str(p.relative_to(folders[name])) for p in folders[name].rglob("*")))
        for name, answer in found.items()
    }


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_on_the_command_line_is_explained(answers, mistake):
    code, output, _ = answers[mistake]
    assert code == 2, output
    assert "Traceback" not in output
    for part in ["lamp_eval: error:", *MISTAKES[mistake][1]]:
        assert part in output


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_on_the_command_line_writes_nothing(answers, mistake):
    # The folder of all results may be there; no folder of an experiment or of a run.
    assert answers[mistake][2] in ([], ["outputs"])


def test_free_text_has_no_labels_to_choose_from() -> None:
    by_labels = {"protocol": {"decoding": "labels"}}
    with pytest.raises(UserError, match="news_headline has no labels"):
        compose_config({"task": "news_headline"}, by_labels)
    assert compose_config({"task": "product_rating"}, by_labels).protocol.decoding == "labels"


def test_sampled_answers_need_room() -> None:
    sampled = {"decoding": "oppu_sampled", "max_tokens": 263}
    with pytest.raises(UserError, match="protocol.max_tokens to a number of at least 264"):
        compose_config({}, {"protocol": sampled})
    assert (
        compose_config({}, {"protocol": sampled | {"max_tokens": 264}}).protocol.max_tokens == 264
    )
