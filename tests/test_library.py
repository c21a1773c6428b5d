"""`import lamp_eval`: what a notebook gets, that it is light, and what it says of mistakes."""

from __future__ import annotations

import copy
import csv
import inspect
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from test_results import record, row, write

import lamp_eval
from lamp_eval import Query, Record, Request, User, UserError
from lamp_eval.compose import CONF_DIR
from lamp_eval.config import DataConfig, ProtocolConfig, RunConfig
from lamp_eval.data import load_corpus
from lamp_eval.metrics import arm_metrics, score_output
from lamp_eval.prompts import OppuEncoder
from lamp_eval.results import LEADERBOARD_COLUMNS

ROOT = Path(__file__).resolve().parents[1]
MOVIES = lamp_eval.TASKS["movie_tagging"]
HEAVY = (
    "torch", "mlx", "mlx_lm", "transformers", "peft", "datasets", "evaluate", "scipy", "sklearn",
    "hydra", "omegaconf", "pydantic", "rich", "numpy",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def users() -> tuple[User, ...]:
    return lamp_eval.load_data("movie_tagging", n_users=2, n_records=6, n_queries=3).users


# What importing it costs and gives


def test_importing_is_light() -> None:
    code = (
        "import sys, time\n"
        "before = set(sys.modules)\n"
        "start = time.process_time()\n"
        "import lamp_eval\n"
        "print(time.process_time() - start)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
        "print(sorted(lamp_eval.__all__) == sorted(set(lamp_eval.__all__) & set(dir(lamp_eval))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    seconds, heavy, complete = done.stdout.splitlines()
    assert float(seconds) < 0.5  # of the CPU; measured: 0.03
    assert heavy == "[]"
    assert complete == "True"


def test_everything_public_is_documented_and_typed() -> None:
    for name in lamp_eval.__all__:
        thing = getattr(lamp_eval, name)
        if inspect.isfunction(thing):
            assert thing.__module__ == "lamp_eval"
            assert "Raises:" in thing.__doc__ and "Returns:" in thing.__doc__
            parameters = inspect.signature(thing).parameters.values()
            assert all(p.annotation is not inspect.Parameter.empty for p in parameters)
            for parameter in parameters:
                assert parameter.name == "output_dir" or f"{parameter.name}: " in thing.__doc__
        else:
            assert thing.__doc__
    functions = {n for n, f in vars(lamp_eval).items() if inspect.isfunction(f) and n[0] != "_"}
    assert functions <= set(lamp_eval.__all__)
    assert (Path(lamp_eval.__file__).parent / "py.typed").is_file()


def test_no_name_is_that_of_a_module() -> None:
    # Or importing the module, as the command line does, would put it in the function's place.
    modules = {path.stem for path in Path(lamp_eval.__file__).parent.iterdir()}
    assert modules & set(lamp_eval.__all__) == set()


# Users


def test_data_are_those_of_the_command_line() -> None:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        overrides = ["task=movie_tagging", "data=sample", "data.n_users=2", "data.signal=0"]
        composed = compose("config", overrides=overrides)
    data = DataConfig(**composed.data)
    assert (data.n_users, data.n_records) == (2, 24)  # one that is given, one from conf/
    found = lamp_eval.load_data("movie_tagging", "sample", n_users=2, signal=0)
    assert found == load_corpus(MOVIES, data)
    assert found.synthetic
    assert lamp_eval.load_data(MOVIES, n_users=2, signal=0) == found


def test_data_from_files(tmp_path: Path, users: tuple[User, ...]) -> None:
    folder = tmp_path / "a folder, with = and [brackets]"
    folder.mkdir()
    rows = [
        {
            "user_id": user.id,
            "profile": [dict(r.fields) for r in user.history],
            "query": [{"id": q.id, "input": q.input, "gold": q.gold} for q in user.queries],
        }
        for user in users
    ]
    (folder / "user_top_100_history.json").write_text(json.dumps(rows))
    found = lamp_eval.load_data("movie_tagging", "oppu", dir=folder)
    assert found.users == users
    assert not found.synthetic
    fewer = lamp_eval.load_data("movie_tagging", "oppu", dir=str(folder), max_queries=1)
    assert [len(user.queries) for user in fewer.users] == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("music",), {}, "one of citation, movie_tagging"),
        (("movie_tagging", "web"), {}, "oppu"),
        (("movie_tagging",), {"n_user": 2}, "data.n_users"),
        (("movie_tagging",), {"n_users": "many"}, "many"),
        (("movie_tagging",), {"n_users": 0}, "at least 1"),
        (("movie_tagging", "oppu"), {}, "data.dir"),
        (("movie_tagging", "oppu"), {"dir": "/nowhere"}, "/nowhere"),
        (("movie_rating", "sample"), {}, "movie_tagging"),
    ],
)
def test_mistakes_in_data(arguments: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        lamp_eval.load_data(*arguments, **options)


def test_an_application_with_hydra_keeps_its_own() -> None:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        own = GlobalHydra.instance().hydra
        lamp_eval.load_data("movie_tagging", n_users=1)
        with pytest.raises(UserError):
            lamp_eval.load_data("movie_tagging", "web")
        assert own is not None
        assert GlobalHydra.instance().hydra is own
        compose("config")
    assert not GlobalHydra.instance().is_initialized()


# Requests


@pytest.mark.parametrize(
    ("arm", "k"),
    [("base", 0), ("base_retrieval", 2), ("task_retrieval", 2), ("task", 1), ("user", 1),
     ("cross_user", 1)],
)  # fmt: skip
def test_requests_are_those_of_a_run(
    tokenizer: Any, users: tuple[User, ...], arm: str, k: int
) -> None:
    found = lamp_eval.build_requests(
        "movie_tagging", users, tokenizer, arm=arm, k=2, adapter_k=1, eval_words=30
    )
    protocol = ProtocolConfig(name="oppu", k=2, adapter_k=1, eval_words=30)
    encoder = OppuEncoder(tokenizer, MOVIES, protocol)
    assert found == [request for user in users for request in encoder.requests(user, k)]
    assert [r.query_id for r in found] == [query.id for user in users for query in user.queries]
    assert [r.gold for r in found] == [query.gold for user in users for query in user.queries]


@pytest.mark.parametrize("protocol", sorted(p.stem for p in (CONF_DIR / "protocol").glob("*.yaml")))
def test_requests_of_every_protocol_hold_the_input(
    tokenizer: Any, users: tuple[User, ...], protocol: str
) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    found = lamp_eval.build_requests(MOVIES, users, tokenizer, arm="base", protocol=protocol)
    inputs = [query.input for user in users for query in user.queries]
    assert [request.input for request in found] == inputs
    assert all(isinstance(request, Request) and request.prompt for request in found)


def test_random_retrieval_has_a_seed(tokenizer: Any, users: tuple[User, ...]) -> None:
    def prompts(seed: int) -> list[tuple[int, ...]]:
        found = lamp_eval.build_requests(
            MOVIES, users, tokenizer, arm="base_retrieval", retrieval="random", seed=seed
        )
        return [request.prompt for request in found]

    assert prompts(0) == prompts(0)
    assert prompts(0) != prompts(1)


def test_users_of_ones_own_need_no_golds(tokenizer: Any, users: tuple[User, ...]) -> None:
    asked = users[0].queries[0].input
    anna = User("anna", (Record({"description": "Spies.", "tag": "romance"}),),
                (Query("q", asked, ""),))  # fmt: skip
    (request,) = lamp_eval.build_requests(MOVIES, [anna], tokenizer, arm="base_retrieval")
    assert request.gold == ""
    text = tokenizer.decode(request.prompt)
    assert text.startswith("description: Spies. tag: romance\n")


def test_mistakes_in_requests(tokenizer: Any, users: tuple[User, ...]) -> None:
    def message(*, of: Any = users, arm: str = "base", **options: Any) -> str:
        with pytest.raises(UserError) as error:
            lamp_eval.build_requests(MOVIES, of, tokenizer, arm=arm, **options)
        return str(error.value)

    assert "one of base, base_retrieval" in message(arm="nobody")
    assert "oppu_released" in message(protocol="chat")
    assert "protocol.adapter_k" in message(kk=2)
    assert "protocol.k" in message(arm="base_retrieval", k=0)
    assert "option seed" in message(seed=-1)
    assert "protocol.max_tokens" in message(max_tokens=64)  # too short for the instruction
    assert "at least one user" in message(of=[])
    one = users[0]
    no_field = replace(one, history=(Record({"text": "Spies.", "tag": "romance"}),))
    assert "record 0" in message(of=[no_field]) and "description" in message(of=[no_field])
    wrong_type = replace(one, history=(Record({"description": "Spies.", "tag": 3}),))  # type: ignore[dict-item]
    assert "none in tag" in message(of=[wrong_type])
    wrong_label = replace(one, history=(Record({"description": "Spies.", "tag": "spies"}),))
    assert "'spies'" in message(of=[wrong_label])
    wrong_input = replace(one, queries=(Query("q", "What is it?", "comedy"),))
    assert "field 'input'" in message(of=[wrong_input])
    assert "each user once" in message(of=[one, one])


# Scores


def test_scores_of_each_output_and_of_all() -> None:
    outputs, golds = ["comedy", "A comedy!", "?"], ["comedy", "comedy", "action"]
    scores = lamp_eval.score_outputs("movie_tagging", outputs, golds)
    assert scores == [score_output(MOVIES, o, g) for o, g in zip(outputs, golds, strict=True)]
    assert [s["official"]["correct"] for s in scores] == [1, 0, 0]
    assert [s["protocol"]["correct"] for s in scores] == [1, 1, 0]
    metrics = lamp_eval.score_arm("movie_tagging", outputs, golds)
    assert metrics == arm_metrics(MOVIES, outputs, golds)
    assert metrics["official"]["accuracy"] == pytest.approx(1 / 3)
    assert metrics["protocol"]["failed_parse_rate"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("outputs", "golds", "said"),
    [
        (["comedy"], ["comedy", "action"], "length 1"),
        ("comedy", ["comedy"], "str of length 6"),
        (["comedy", None], ["comedy", "action"], "NoneType as item 1"),
        (["comedy"], [None], "the golds"),
        (["comedy"], ["spies"], "'spies'"),
    ],
)
def test_mistakes_in_scores(outputs: Any, golds: Any, said: str) -> None:
    for function in (lamp_eval.score_outputs, lamp_eval.score_arm):
        with pytest.raises(UserError, match=said):
            function("movie_tagging", outputs, golds)


def test_no_outputs_have_no_metrics() -> None:
    assert lamp_eval.score_outputs("movie_tagging", [], []) == []
    with pytest.raises(UserError, match="at least one"):
        lamp_eval.score_arm("movie_tagging", [], [])


# Comparisons


def test_comparison_leaves_out_what_has_no_score() -> None:
    golds = ["1", "1", "5", "5"]
    ours = lamp_eval.score_outputs("product_rating", ["1", "2", "5", "no idea"], golds)
    theirs = lamp_eval.score_outputs("product_rating", ["2", "3", "4", "4"], golds)
    ids = ["a", "a", "b", "b"]
    found = lamp_eval.compare_scores(ids, ours, theirs, metric="mae", rules="protocol")
    assert (found.n_users, found.n_queries) == (2, 3)
    assert found.delta == pytest.approx(-1)  # errors: negative is better
    assert (found.query_wins, found.query_losses, found.improves) == (3, 0, True)
    official = lamp_eval.compare_scores(ids, ours, theirs, metric="mae")
    assert official.n_queries == 4  # officially "no idea" is as far off as possible
    assert official.delta == pytest.approx((-1 - 1 - 1 + 3) / 4)


def test_comparison_has_the_defaults_of_a_run() -> None:
    parameters = inspect.signature(lamp_eval.compare_scores).parameters
    config = RunConfig()
    assert parameters["n_resamples"].default == config.n_resamples
    assert parameters["seed"].default == config.seed


def test_mistakes_in_comparisons() -> None:
    scores = lamp_eval.score_outputs("movie_tagging", ["comedy"] * 2, ["comedy", "action"])

    def message(ids: list[str], ours: Any, theirs: Any, **options: Any) -> str:
        with pytest.raises(UserError) as error:
            lamp_eval.compare_scores(ids, ours, theirs, **{"metric": "accuracy"} | options)
        return str(error.value)

    assert "1 user ids, 2 scores" in message(["a"], scores, scores)
    assert "accuracy" in message(["a", "b"], scores, scores, metric="mae")
    assert "macro_f1" in message(["a", "b"], scores, scores, metric="macro_f1")
    assert "protocol" in message(["a", "b"], scores, scores, rules="ours")
    assert "at least one" in message([], [], [])


# Leaderboards


def test_leaderboard_as_rows_and_written(tmp_path: Path) -> None:
    write(tmp_path / "movies" / "a", [row(arm="base", value=1 / 3, rules="official")])
    write(tmp_path / "movies" / "b", [row(arm="user", value=0.5)])
    (tmp_path / "movies" / "c").mkdir()
    (tmp_path / "movies" / "c" / "run.json").write_text("{")
    rows, unreadable = lamp_eval.read_leaderboard(str(tmp_path))
    assert [(r["arm"], r["value"], r["delta"]) for r in rows] == [
        ("base", 1 / 3, None), ("user", 0.5, None),
    ]  # fmt: skip
    assert tuple(rows[0]) == LEADERBOARD_COLUMNS
    assert len(unreadable) == 1 and "movies/c" in unreadable[0]
    assert not (tmp_path / "leaderboard.csv").exists()
    path, again = lamp_eval.rebuild_leaderboard(tmp_path)
    assert path == tmp_path / "leaderboard.csv"
    assert again == unreadable
    with path.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert written == [{k: "" if v is None else str(v) for k, v in r.items()} for r in rows]


@pytest.mark.parametrize("function", [lamp_eval.read_leaderboard, lamp_eval.rebuild_leaderboard])
def test_a_folder_that_is_not_there(function: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        function(tmp_path / "nothing")


def test_a_record_without_methods_is_still_read() -> None:
    old = record([]).model_dump()
    del old["methods"]
    assert type(record([])).model_validate(old).methods == {}


def test_profiles_stand_in_prompts(tokenizer: Any, users: tuple[User, ...]) -> None:
    def first(**options: Any) -> str:
        found = lamp_eval.build_requests(MOVIES, users, tokenizer, arm="base", **options)
        return str(tokenizer.decode(found[0].prompt))

    assert first(profiles={users[0].id: "Likes films."}) == "Likes films.\n" + first()


def test_dense_retrieval_is_for_runs(tokenizer: Any, users: tuple[User, ...]) -> None:
    with pytest.raises(UserError, match="dense"):
        lamp_eval.build_requests(
            MOVIES, users, tokenizer, arm="base", retrieval="dense", embedding_model="x"
        )
