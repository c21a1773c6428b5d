"""BM25 over a growing history equals rank-bm25 made anew for each prefix; other methods."""

from __future__ import annotations

import math
import random
import re

import numpy as np
import pytest
from rank_bm25 import BM25Okapi

from lamp_eval.retrieval import OKAPI, History


def found(history: History, query: str, k: int, *, before: int) -> list[str]:
    return [history.documents[i] for i in history.retrieve(query, k, before=before)]


def texts(rng: random.Random, n: int, n_words: int = 30) -> list[str]:
    """Texts over a small vocabulary: words in more than half of them have a negative idf."""
    vocabulary = [f"w{i}" for i in range(n_words)] + ["", "the", "the", "the", "a\n"]
    return [
        " ".join(rng.choice(vocabulary) for _ in range(rng.randint(1, 25))) + f" id{i}"
        for i in range(n)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_equals_a_fresh_index_for_every_prefix(seed):
    rng = random.Random(seed)
    documents = texts(rng, 40)
    history = History(documents)
    for before in range(1, len(documents) + 1):
        if rng.random() < 0.3:
            continue  # the index must also grow by several at once
        query = texts(rng, 1)[0]
        fresh = BM25Okapi([document.split(" ") for document in documents[:before]])
        scores = fresh.get_scores(query.split(" "))
        expected = sorted(range(before), key=lambda i: (scores[i], i), reverse=True)
        for k in (1, 3, before):
            assert history.retrieve(query, k, before=before) == expected[:k]
        np.testing.assert_array_equal(history.scores(query, before), scores)


@pytest.mark.parametrize("seed", range(3))
def test_scores_as_high_as_what_the_released_code_finds(seed):
    # Not the same documents: its sort is unstable, so of equal ones it finds any.
    rng = random.Random(100 + seed)
    documents = [text.rsplit(" ", 1)[0] for text in texts(rng, 12, n_words=3)]  # many ties
    history = History(documents)
    for before in range(1, len(documents) + 1):
        query = rng.choice(documents)
        fresh = BM25Okapi([document.split(" ") for document in documents[:before]])
        score = dict(zip(documents, fresh.get_scores(query.split(" ")), strict=False))
        released = fresh.get_top_n(query.split(" "), documents[:before], n=4)
        best = found(history, query, 4, before=before)
        assert [score[text] for text in best] == [score[text] for text in released]


@pytest.mark.parametrize("n", [2, 5, 16, 17, 100, 947])
def test_of_equal_scores_the_later_comes_first(n):
    documents = [f"same words here n{i}" for i in range(n)]
    history = History(documents)
    assert found(history, "same words", 3, before=n) == documents[::-1][:3]
    # Nothing in common with any: all scores are 0.
    assert found(history, "unknown", n, before=n) == documents[::-1]


def test_only_earlier_documents_are_found():
    documents = ["red apple", "green pear", "blue plum", "red red apple"]
    history = History(documents)
    assert found(history, "red apple", 9, before=1) == ["red apple"]
    assert found(history, "red apple", 1, before=3) == ["red apple"]
    assert "red red apple" not in found(history, "red apple", 9, before=3)
    assert "red red apple" in found(history, "red apple", 9, before=4)


def test_k_of_zero_and_an_empty_history_find_nothing():
    history = History(["a b", "c d"])
    assert found(history, "a", 0, before=2) == []
    assert found(history, "a", 1, before=0) == []
    assert found(History([]), "a", 3, before=0) == []
    assert found(history, "a", 1, before=1) == ["a b"]  # and neither call grew the index


def test_k_larger_than_the_history_finds_all_of_it_once():
    documents = ["a b", "c d", "e f"]
    assert sorted(found(History(documents), "a", 100, before=3)) == documents


def test_words_are_split_at_single_spaces_and_keep_their_case():
    documents = ["Apple,", "apple", "apple\n", "x y"]
    assert found(History(documents), "apple", 1, before=4) == ["apple"]
    assert found(History(documents), "Apple,", 1, before=4) == ["Apple,"]
    assert found(History(documents), "apple\n", 1, before=4) == ["apple\n"]


def test_the_index_only_grows():
    history = History(["a", "b", "c"])
    found(history, "a", 1, before=3)
    with pytest.raises(ValueError, match="3 > 2"):
        found(history, "a", 1, before=2)


def test_histories_do_not_share_state():
    first, second = History(["a b", "c d", "x y"]), History(["e f", "g h", "x y"])
    found(first, "a", 1, before=3)
    assert found(second, "e", 1, before=3) == ["e f"]
    assert found(second, "a", 3, before=3) == ["x y", "g h", "e f"]  # no score: the order
    assert found(first, "a", 1, before=3) == ["a b"]


def test_recency_finds_the_newest_before():
    history = History([*"abcde"], "recency")
    assert found(history, "a", 2, before=4) == ["d", "c"]
    assert found(history, "a", 9, before=3) == ["c", "b", "a"]
    assert found(history, "a", 2, before=0) == found(history, "a", 0, before=3) == []


def test_random_retrieval_depends_on_seed_query_and_position_alone():
    documents = [f"d{i}" for i in range(50)]

    def drawn(seed, query, before, *, asked_first=()):
        history = History(documents, "random", seed=seed)
        for other in asked_first:
            history.retrieve(other, 3, before=50)
        return found(history, query, 3, before=before)

    first = drawn(1, "q", 40)
    assert len(set(first)) == 3
    assert set(first) <= set(documents[:40])
    assert first == drawn(1, "q", 40, asked_first=["x", "q"])
    assert len({tuple(drawn(*case)) for case in [(1, "q", 40), (2, "q", 40), (1, "p", 40)]}) == 3
    assert sorted(drawn(1, "q", 2)) == ["d0", "d1"]
    every = {document for i in range(200) for document in drawn(0, str(i), 50)}
    assert every == set(documents)


# The variant of `lamp_chat`


def okapi_scores(documents: list[str], query: str) -> list[float]:
    """The formula, word by word (protocol.md, "lamp_chat")."""
    words = [re.findall("[a-z0-9]+", document.lower()) for document in documents]
    mean_length = sum(map(len, words)) / len(words) or 1
    scores = []
    for own in words:
        score = 0.0
        for word in re.findall("[a-z0-9]+", query.lower()):
            n_with = sum(word in other for other in words)
            idf = math.log(1 + (len(words) - n_with + 0.5) / (n_with + 0.5))
            count = own.count(word)
            damping = 1.5 * (1 - 0.75 + 0.75 * len(own) / mean_length)
            score += idf * count * 2.5 / (count + damping)
        scores.append(score)
    return scores


@pytest.mark.parametrize("seed", range(4))
def test_okapi_is_its_formula_for_every_prefix(seed):
    rng = random.Random(seed)
    documents = [f"{text} W{i % 3}-É" for i, text in enumerate(texts(rng, 30))] + ["…", ""]
    history = History(documents, bm25=OKAPI)
    for before in range(1, len(documents) + 1):
        query = f"W1, w2! {texts(rng, 1)[0]} w1"
        expected = okapi_scores(documents[:before], query)
        np.testing.assert_allclose(history.scores(query, before), expected, rtol=1e-12)
        order = sorted(range(before), key=lambda i: -round(expected[i], 9))  # stable
        assert history.retrieve(query, 5, before=before) == order[:5]


def test_okapi_takes_the_earlier_of_equal_scores():
    history = History(["same words", "Same, words!", "SAME WORDS", "other"], bm25=OKAPI)
    assert history.retrieve("same words", 4, before=4) == [0, 1, 2, 3]
    assert history.retrieve("unknown", 2, before=4) == [0, 1]


def test_okapi_counts_every_occurrence_in_the_query():
    history = History(["red apple", "green pear"], bm25=OKAPI)
    once, twice = history.scores("red", 2), history.scores("red red", 2)
    assert twice[0] == 2 * once[0] > 0
    assert history.retrieve("red green green", 1, before=2) == [1]


@pytest.mark.parametrize("documents", [["…", "!"], [""]])
def test_okapi_without_any_word(documents):
    history = History(documents, bm25=OKAPI)
    assert history.scores("a", len(documents)).tolist() == [0.0] * len(documents)


def test_dense_retrieval_takes_the_highest_product_among_the_earlier():
    vectors = {"a": [1, 0], "b": [0.6, 0.8], "c": [0, 1], "q": [0, 1], "p": [1, 0]}
    history = History(
        [*"abc"],
        "dense",
        embed=lambda texts: np.array([vectors[text] for text in texts], np.float32),
        searches=["q", "p"],
    )
    assert history.retrieve("q", 2, before=3) == [2, 1]
    assert history.retrieve("q", 2, before=2) == [1, 0]
    assert history.retrieve("p", 9, before=3) == [0, 1, 2]
