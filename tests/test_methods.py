"""Arms of one's own: what a registered function sees and may return, and what a run makes of it."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lamp_eval import methods
from lamp_eval.__main__ import main
from lamp_eval.arms import Arm, arm, comparisons
from lamp_eval.compose import compose_config
from lamp_eval.config import ARMS, ProtocolConfig, RunConfig
from lamp_eval.errors import UserError
from lamp_eval.metrics import RULES, arm_metrics
from lamp_eval.records import Query, Record, Request, User
from lamp_eval.results import RunRecord
from lamp_eval.tasks import TASKS

TASK = TASKS["news_headline"]
GOLD = "the gold that nobody may see"
USERS = tuple(
    User(
        f"u{i}",
        (Record({"text": f"text {i}", "title": f"title {i}"}),),
        (Query(f"u{i}-q", "Generate a headline for the following article: Rain.", GOLD),),
    )
    for i in range(3)
)
REQUESTS = [Request(u.id, u.queries[0].id, (1, 2), GOLD, 0, u.queries[0].input) for u in USERS]
PROTOCOL = ProtocolConfig(name="oppu", k=1, adapter_k=0)

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package as pip does: a module, and the metadata with its entry points."""

    def installed(code: str, names: Mapping[str, str] | None = None, package: str = "mine") -> Path:
        folder = tmp_path / package
        information = folder / f"{package}-1.5.dist-info"
        information.mkdir(parents=True)
        (folder / f"{package}.py").write_text(code)
        (information / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n"
        )
        entries = [f"{k} = {v}" for k, v in (names or {"mine": f"{package}:answer"}).items()]
        (information / "entry_points.txt").write_text("\n".join(["[lamp_eval.arms]", *entries, ""]))
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, package, raising=False)
        return folder / f"{package}.py"

    return installed


def answers(method: Any) -> list[str]:
    return methods.answers("mine", method, TASK, USERS, REQUESTS)


def composed(*arms: str) -> RunConfig:
    return compose_config({}, {"arms": list(arms)})


def refused(*arms: str) -> str:
    with pytest.raises(UserError) as error:
        composed(*arms)
    return str(error.value)


# What it gets and what it returns


def test_it_sees_everything_but_the_golds(install: Install) -> None:
    install("")
    seen: dict[str, Any] = {}

    def method(task: Any, users: Any, requests: Any) -> list[str]:
        seen.update(task=task, users=users, requests=requests)
        return [f"{request.user_id}: {request.input}" for request in requests]

    assert answers(method) == [f"{user.id}: {user.queries[0].input}" for user in USERS]
    assert GOLD in repr(USERS) and GOLD in repr(REQUESTS)  # so the search below can find it
    assert GOLD not in repr(seen)
    assert seen["task"] is TASK
    blind = [dataclasses.replace(r, gold="") for r in REQUESTS]
    assert list(seen["requests"]) == blind
    assert [user.history for user in seen["users"]] == [user.history for user in USERS]
    assert [user.queries[0].gold for user in seen["users"]] == [""] * 3


def test_nothing_that_it_changes_reaches_the_run(install: Install) -> None:
    install("")
    before = repr(USERS)

    def method(task: Any, users: Any, requests: Any) -> list[str]:
        for user in users:
            user.history[0].fields["title"] = "changed"
        return ["x"] * len(requests)

    answers(method)
    assert repr(USERS) == before


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (None, "NoneType None"),
        ("abc", "str 'abc'"),
        (["a", "b"], "2 items"),
        (["a"] * 4, "4 items"),
        ({"u0-q": "a"}, "dict"),
        ((x for x in "abc"), "generator"),
        (["a", 2, None], r"int 2 as item 1 \(2 such items\)"),
        (b"abc", "int 97 as item 0"),
        (["a", "b", "half a pair: \ud800"], "as item 2"),
    ],
)
def test_what_it_returns_is_checked(install: Install, returned: Any, found: str) -> None:
    install("")
    with pytest.raises(UserError, match=found) as error:
        answers(lambda task, users, requests: returned)
    assert error.value.where == "arm mine, mine:answer (mine 1.5)"
    assert "a list of 3 strings" in str(error.value)


def test_tuples_and_subclasses_of_strings_are_strings(install: Install) -> None:
    install("")

    class Text(str):
        pass

    found = answers(lambda task, users, requests: (Text("a"), "", "c"))
    assert found == ["a", "", "c"]
    assert {type(text) for text in found} == {str}


@pytest.mark.parametrize("code", ["1 / 0", "raise SystemExit(0)", "open('/nowhere/at/all')"])
def test_its_exception_is_shown_with_its_own_lines(install: Install, code: str) -> None:
    path = install(f"def answer(task, users, requests):\n    return help_it()\n\n\n"
                   f"def help_it():\n    {code}\n")  # fmt: skip
    with pytest.raises(UserError) as error:
        answers(methods.load("mine"))
    message = str(error.value)
    assert "arm mine, mine:answer (mine 1.5)" in message
    assert f'File "{path}", line 2, in answer' in message
    assert f'File "{path}", line 6, in help_it' in message
    assert "methods.py" not in message  # none of ours
    assert error.value.__cause__ is not None


# Names


def test_a_registered_name_is_an_arm_and_its_module_is_not_imported(install: Install) -> None:
    install("raise RuntimeError('imported')")
    assert composed("mine").arms == ["mine"]
    assert arm("mine", PROTOCOL) == Arm("mine", False, None, 0, method=True)
    with pytest.raises(UserError, match="RuntimeError: imported"):
        methods.load("mine")


@pytest.mark.parametrize(
    ("value", "said"),
    [("mine:nothing", "no attribute 'nothing'"), ("not_there:answer", "No module named"),
     ("mine:answer", "int 3")],
)  # fmt: skip
def test_what_cannot_be_loaded(install: Install, value: str, said: str) -> None:
    install("answer = 3", {"mine": value})
    with pytest.raises(UserError, match=said) as error:
        methods.load("mine")
    assert error.value.where == f"arm mine, {value} (mine 1.5)"


def test_an_unknown_name_lists_the_registered_ones(install: Install) -> None:
    assert "cross_user\n" in refused("nobody")
    install("", {"majority": "mine:answer", "minority": "mine:answer"})
    assert f"one of {', '.join(ARMS)}, majority, minority" in refused("majority", "nobody")


@pytest.mark.parametrize("name", ["golds", "users", *ARMS])
def test_names_that_are_taken(install: Install, name: str) -> None:
    install("", {name: "mine:answer"})
    message = refused(*dict.fromkeys(("task", name)))
    assert f"arm {name}, registered as mine:answer (mine 1.5)" in message
    assert "a name other than" in message


def test_a_taken_name_harms_no_run_that_does_not_ask_for_it(install: Install) -> None:
    install("", {"cross_user": "mine:answer", "Bad/Name": "mine:answer"})
    assert composed("task", "user").arms == ["task", "user"]
    assert arm("cross_user", PROTOCOL).user_adapter == "donor"


@pytest.mark.parametrize("name", ["Majority", "../up", "two words", "1st", "a.b"])
def test_names_that_are_no_file_names(install: Install, name: str) -> None:
    install("", {name: "mine:answer"})
    assert "a name of a–z" in refused(name)


def test_two_packages_with_the_same_name(install: Install) -> None:
    install("", {"mine": "one:answer"}, package="one")
    install("", {"mine": "two:answer"}, package="two")
    message = refused("mine")
    assert "one:answer (one 1.5)" in message and "two:answer (two 1.5)" in message
    assert "2 of them" in message


def test_a_name_like_a_retrieval_arm_asks_for_no_retrieval(install: Install) -> None:
    install("", {"my_retrieval": "mine:answer"})
    config = compose_config({}, {"arms": ["my_retrieval"], "protocol": {"k": 0}})
    assert config.protocol.k == 0


def test_what_it_is_compared_with(install: Install) -> None:
    install("", {"one": "mine:answer", "two": "mine:answer"})

    def pairs(*names: str) -> set[tuple[str, str]]:
        found = comparisons({name: arm(name, PROTOCOL) for name in names})
        assert len(found) == len(set(found))
        return set(found)

    ours = pairs(*ARMS)
    assert pairs(*ARMS, "one", "two") - ours == {
        ("one", "base"), ("one", "task"), ("two", "base"), ("two", "task"),
        ("user", "one"), ("user", "two"),
    }  # fmt: skip
    assert pairs("one", "base") == {("one", "base")}
    assert pairs("one", "two") == set()


# A run


CODE = """
def answer(task, users, requests):
    assert all(user.queries[0].gold == "" for user in users)
    assert all(request.gold == "" and request.prompt and request.input for request in requests)
    return ["{}"] * len(requests)
"""


def run(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """The command line in this process, which saves the imports."""
    for name in ("HYDRA_FULL_ERROR", "TRANSFORMERS_VERBOSITY"):  # `main` sets them
        monkeypatch.setenv(name, "")
    monkeypatch.setattr("lamp_eval.__main__._mistakes", [])
    monkeypatch.setattr("lamp_eval.__main__._finished", [])
    monkeypatch.setattr(
        sys, "argv", ["lamp_eval", "data.n_users=3", "data.n_queries=2", "data.n_records=4",
                      "n_resamples=99", *options],
    )  # fmt: skip
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, "".join(capfd.readouterr())


def the_run(output_dir: Path) -> Path:
    (run_dir,) = (output_dir / "movie_tagging").iterdir()
    return run_dir


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_without_a_model(
    install: Install,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = install(CODE.format("comedy"), {"mine": "mine:answer", "broken": "mine:nothing"})
    output_dir = tmp_path / "outputs"
    options = [f"model.path={model_dir}", f"output_dir={output_dir}"]

    # A function that is not there is found before anything runs.
    code, output = run([*options, "arms=[mine,broken]"], monkeypatch, capfd)
    assert code == 2 and "has no attribute 'nothing'" in output
    assert "Traceback (most recent call last)" in output
    assert not list(output_dir.glob("movie_tagging/*"))

    # Nor is the device examined, for whom MLX computes nothing.
    monkeypatch.setattr("lamp_eval.plan.choose_backward", None)
    code, output = run([*options, "arms=[mine]"], monkeypatch, capfd)
    assert code == 0, output
    assert "mine: mine:answer (mine 1.5), called each time" in output
    assert "nothing to compute" not in output
    assert list((output_dir / "stages").iterdir()) == []  # no base, no adapter, no answers kept
    run_dir = the_run(output_dir)
    record = RunRecord.model_validate_json((run_dir / "run.json").read_bytes())
    assert record.methods == {"mine": "mine:answer (mine 1.5)"}
    assert (record.stages, record.parity_error) == ([], {})
    assert set(record.seconds_by_stage) == {"methods"}
    lines = (run_dir / "predictions" / "mine.jsonl").read_text().splitlines()
    predictions = [json.loads(line) for line in lines]
    assert len(predictions) == 6
    assert {p["output"] for p in predictions} == {"comedy"}
    golds = [p["gold"] for p in predictions]
    assert all(gold in TASKS["movie_tagging"].labels for gold in golds)
    submitted = json.loads((run_dir / "submissions" / "mine.json").read_text())
    assert [row["output"] for row in submitted["golds"]] == ["comedy"] * 6
    right = json.loads((run_dir / "submissions" / "golds.json").read_text())
    assert [row["output"] for row in right["golds"]] == golds
    assert [row["arm"] for row in rows_of(run_dir / "users.csv")] == ["mine"] * 3
    metrics = arm_metrics(TASKS["movie_tagging"], ["comedy"] * 6, golds)
    board = rows_of(run_dir / "leaderboard.csv")
    assert board == rows_of(output_dir / "leaderboard.csv")
    assert len(board) == 2 * len(RULES)
    for row in board:
        assert float(row["value"]) == pytest.approx(metrics[row["rules"]][row["metric"]])
        assert (row["arm"], row["protocol"], row["n_queries"]) == ("mine", "oppu", "6")
        for column in ("model", "quantization", "blocks", "rank", "decoding", "retrieval", "k",
                       "task_users", "reference"):  # fmt: skip
            assert row[column] == "", column

    # Its code is in no key: changed, it answers anew.
    shutil.rmtree(output_dir / "movie_tagging")
    path.write_text(CODE.format("action, not comedy"))
    sys.modules.pop("mine")
    code, output = run([*options, "arms=[mine]"], monkeypatch, capfd)
    assert code == 0, output
    lines = (the_run(output_dir) / "predictions" / "mine.jsonl").read_text().splitlines()
    assert {json.loads(line)["output"] for line in lines} == {"action, not comedy"}


def test_a_run_with_a_wrong_answer(
    install: Install,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    install("def answer(task, users, requests):\n    return ['a'] * 5\n")
    output_dir = tmp_path / "outputs"
    options = [f"model.path={model_dir}", f"output_dir={output_dir}", "arms=[mine]"]
    code, output = run(options, monkeypatch, capfd)
    assert code == 2
    assert "in arm mine, mine:answer (mine 1.5)" in output
    assert "expected: a list of 6 strings" in output and "found:    5 items" in output
    assert "Traceback" not in output
    assert not (output_dir / "leaderboard.csv").exists()
    assert not list(output_dir.glob("movie_tagging/*"))
