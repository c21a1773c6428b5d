"""A text about each user: read from a file, shown in all their prompts, never forgotten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_prompts import MOVIE, encoder, make_tokenizer, movie_fan  # noqa: F401  # a fixture

from lamp_eval.config import DataConfig, ProtocolConfig
from lamp_eval.data import load_corpus
from lamp_eval.errors import UserError
from lamp_eval.prompts import make_encoder
from lamp_eval.tasks import TASKS

MOVIES = TASKS["movie_tagging"]


def sample(profiles: Path | None, **options) -> DataConfig:
    sizes = {"n_users": 2, "n_task_users": 2, "n_records": 3, "n_queries": 2}
    return DataConfig(
        source="sample", profiles=None if profiles is None else str(profiles), **sizes, **options
    )


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


USERS = ("sample-000", "sample-001", "other-000", "other-001")


def test_profiles_are_part_of_the_corpus(tmp_path):
    path = write(tmp_path / "profiles.json", {name: f"I am {name}." for name in USERS} | {"x": "y"})
    corpus = load_corpus(MOVIES, sample(path))
    assert corpus.profiles["sample-001"] == "I am sample-001."
    assert list(corpus.files) == [str(path)]
    other = write(tmp_path / "other.json", dict.fromkeys(USERS, "Somebody."))
    checksums = {load_corpus(MOVIES, sample(p)).checksum for p in (path, other, None)}
    assert len(checksums) == 3


def test_every_user_needs_one_those_of_the_task_adapter_too(tmp_path):
    path = write(tmp_path / "profiles.json", dict.fromkeys(USERS[:3], "Somebody."))
    with pytest.raises(UserError, match="none for 1 of 4: 'other-001'"):
        load_corpus(MOVIES, sample(path))
    assert load_corpus(MOVIES, sample(path, task_users="evaluated")).profiles


@pytest.mark.parametrize("content", [[], {"a": 1}, {"a": " "}, {"a": None}])
def test_what_is_no_profile_is_refused(tmp_path, content):
    path = write(tmp_path / "profiles.json", content)
    with pytest.raises(UserError, match=r"profiles\.json"):
        load_corpus(MOVIES, sample(path))
    with pytest.raises(UserError, match="no_such_file"):
        load_corpus(MOVIES, sample(tmp_path / "no_such_file"))


def test_it_stands_before_the_retrieved_records_in_all_prompts(movie_fan):  # noqa: F811
    tokenizer = make_tokenizer()
    protocol = ProtocolConfig(name="oppu")
    about = make_encoder(tokenizer, MOVIES, protocol, profiles={"u": "Likes castles."})
    plain = encoder(tokenizer)
    for k in (0, 1):
        pairs = zip(
            about.user_examples(movie_fan, k) + about.task_examples(movie_fan, k),
            plain.user_examples(movie_fan, k) + plain.task_examples(movie_fan, k),
            strict=True,
        )
        for with_it, without in pairs:
            assert tokenizer.decode(with_it.tokens) == "Likes castles.\n" + tokenizer.decode(
                without.tokens
            )
            assert with_it.n_supervised_tokens == without.n_supervised_tokens
    (request,) = about.requests(movie_fan, 0)
    assert tokenizer.decode(request.prompt) == "Likes castles.\n" + MOVIE.format(
        "strangers dream at midnight"
    )


def test_it_is_never_cut(movie_fan):  # noqa: F811
    tokenizer = make_tokenizer()
    protocol = ProtocolConfig(name="oppu", max_tokens=400)
    text = "Likes castles. " * 5
    encode = make_encoder(tokenizer, MOVIES, protocol, profiles={"u": text})
    (request,) = encode.requests(movie_fan, 1)
    assert tokenizer.decode(request.prompt).startswith(text + "\n")
    assert request.n_cut_words > 0
    encode = make_encoder(tokenizer, MOVIES, protocol, profiles={"u": text * 9})
    with pytest.raises(UserError, match=r"protocol\.max_tokens"):
        encode.requests(movie_fan, 1)
