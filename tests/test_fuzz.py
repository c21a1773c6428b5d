"""Whatever a file holds, a reader reads it or says what is wrong: no other error comes out."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamp_eval.compare import pairs_of_scores, report
from lamp_eval.config import DataConfig
from lamp_eval.data import load_corpus
from lamp_eval.data.card import data_card
from lamp_eval.data.lamp import read_users
from lamp_eval.data.oppu import EVALUATED
from lamp_eval.errors import UserError
from lamp_eval.score import score_files
from lamp_eval.tasks import TASKS

RATINGS = TASKS["product_rating"]
REVIEW = (
    "What is the score of the following review on a scale of 1 to 5? just answer with 1, 2, 3, 4, "
    "or 5 without further explanation. review: "
)
USERS = [
    {
        "user_id": "u",
        "profile": [{"text": "good", "score": "5"}, {"text": "bad", "score": 1}],
        "query": [{"id": "q0", "input": REVIEW + "fine", "gold": "4"}],
    },
    {"user_id": 7, "profile": [], "query": [{"id": 1, "input": REVIEW + "poor", "gold": 2}]},
]
OUTPUTS = {"task": "LaMP_3", "golds": [{"id": "1", "output": "5"}, {"id": "2", "output": "3"}]}
QUESTIONS = [{"id": "1", "user_id": "u", "profile": [{"text": "x"}]}, {"id": "2", "user_id": "v"}]
LAMP = [
    {
        "id": "1",
        "input": REVIEW + "fine",
        "profile": [{"text": "good", "score": "5", "date": 2014}],
    },
    {"id": "2", "input": REVIEW + "poor", "user_id": "u", "profile": []},
]
SCORES = [{"user_id": "u", "score": 1.0, "reference_score": 0}, {"user_id": "v", "oppu_score": 0,
           "task_score": 1, "diff": -1}]  # fmt: skip


def _read_users(path: Path) -> None:
    folder = path.parent / "users"
    folder.mkdir()
    path.rename(folder / EVALUATED)
    corpus = load_corpus(RATINGS, DataConfig(source="oppu", dir=str(folder)))
    data_card(RATINGS, corpus)


def _read_lamp(path: Path) -> None:
    """The benchmark's questions, in a cache of their own."""
    folder = path.parent / "LaMP_3" / "dev"
    folder.mkdir(parents=True)
    path.rename(folder / "dev_questions.json")
    golds = [{"id": query_id, "output": "4"} for query_id in ("1", "2", "u")]
    (folder / "dev_outputs.json").write_text(json.dumps({"task": "LaMP_3", "golds": golds}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(path.parent / "cache"))
        corpus = load_corpus(RATINGS, DataConfig(source="lamp", dir=str(path.parent)))
        data_card(RATINGS, corpus)


def _read_profiles(path: Path) -> None:
    data = DataConfig(source="sample", n_users=1, n_task_users=1, n_records=1, n_queries=1)
    load_corpus(TASKS["movie_tagging"], replace(data, profiles=str(path)))


def _read_scores(path: Path) -> None:
    rows = json.loads(path.read_bytes())
    rows = rows if isinstance(rows, list) else [rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report([pairs_of_scores(path)], n_resamples=99)


# What reads a file, and a file that it reads.
READERS: dict[str, tuple[Callable[[Path], Any], Any]] = {
    "users": (_read_users, USERS),
    "golds": (lambda path: score_files(path, path), OUTPUTS),
    "golds of a task": (lambda path: score_files(path, path, RATINGS), OUTPUTS),
    "questions": (read_users, QUESTIONS),
    "questions as users": (_read_lamp, LAMP),
    "profiles": (_read_profiles, {"sample-000": "Likes films.", "other-000": "Likes none."}),
    "scores": (_read_scores, SCORES),
}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    | st.sampled_from(["../../etc", "/", "5", "\ud800", "\x00", 10**400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all values inside a JSON value, itself included."""
    inside = value.items() if isinstance(value, dict) else enumerate(value or ()) \
        if isinstance(value, list) else ()  # fmt: skip
    return [path, *(found for key, inner in inside for found in _places(inner, (*path, key)))]


def _changed(content: Any, place: tuple[Any, ...], new: Any, action: str) -> Any:
    if not place:
        return new
    content = copy.deepcopy(content)
    around = content
    for key in place[:-1]:
        around = around[key]
    if action == "remove":
        del around[place[-1]]
    elif action == "double" and isinstance(around, list):
        around.append(around[place[-1]])
    else:
        around[place[-1]] = new
    return content


@pytest.mark.parametrize("name", READERS)
def test_the_files_that_are_changed_here_are_good(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(READERS[name][1]))
    READERS[name][0](path)


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=120, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_changed_file_is_read_or_refused(name: str, data: st.DataObject) -> None:
    read, content = READERS[name]
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(_places(content)))
        action = data.draw(st.sampled_from(["replace", "remove", "double"]))
        content = _changed(content, place, data.draw(ANYTHING), action)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.json"
        path.write_text(json.dumps(content))
        try:
            read(path)
        except UserError as error:
            assert str(error).startswith("in ") and "to do:" in str(error)


@pytest.mark.parametrize("name", [name for name in READERS if name != "scores"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(name: str, data: st.DataObject) -> None:
    read, content = READERS[name]
    raw = json.dumps(content).encode()
    start = data.draw(st.integers(0, len(raw)))
    end = data.draw(st.integers(start, len(raw)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.json"
        path.write_bytes(raw[:start] + data.draw(st.binary(max_size=8)) + raw[end:])
        try:
            read(path)
        except UserError as error:
            assert str(path.parent) in str(error)
