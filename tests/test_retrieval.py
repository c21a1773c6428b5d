"""BM25 over a growing history equals rank-bm25 made anew for each prefix; other methods."""

from __future__ import annotations

import random

import numpy as np
import pytest
from rank_bm25 import BM25Okapi

from lamp_eval.retrieval import History


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
            assert history.retrieve(query, k, before=before) == [documents[i] for i in expected[:k]]
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
        found = history.retrieve(query, 4, before=before)
        assert [score[text] for text in found] == [score[text] for text in released]


@pytest.mark.parametrize("n", [2, 5, 16, 17, 100, 947])
def test_of_equal_scores_the_later_comes_first(n):
    documents = [f"same words here n{i}" for i in range(n)]
    history = History(documents)
    assert history.retrieve("same words", 3, before=n) == documents[::-1][:3]
    # Nothing in common with any: all scores are 0.
    assert history.retrieve("unknown", n, before=n) == documents[::-1]


def test_only_earlier_documents_are_found():
    documents = ["red apple", "green pear", "blue plum", "red red apple"]
    history = History(documents)
    assert history.retrieve("red apple", 9, before=1) == ["red apple"]
    assert history.retrieve("red apple", 1, before=3) == ["red apple"]
    assert "red red apple" not in history.retrieve("red apple", 9, before=3)
    assert "red red apple" in history.retrieve("red apple", 9, before=4)


def test_k_of_zero_and_an_empty_history_find_nothing():
    history = History(["a b", "c d"])
    assert history.retrieve("a", 0, before=2) == []
    assert history.retrieve("a", 1, before=0) == []
    assert History([]).retrieve("a", 3, before=0) == []
    assert history.retrieve("a", 1, before=1) == ["a b"]  # and neither call grew the index


def test_k_larger_than_the_history_finds_all_of_it_once():
    documents = ["a b", "c d", "e f"]
    assert sorted(History(documents).retrieve("a", 100, before=3)) == documents


def test_words_are_split_at_single_spaces_and_keep_their_case():
    documents = ["Apple,", "apple", "apple\n", "x y"]
    assert History(documents).retrieve("apple", 1, before=4) == ["apple"]
    assert History(documents).retrieve("Apple,", 1, before=4) == ["Apple,"]
    assert History(documents).retrieve("apple\n", 1, before=4) == ["apple\n"]


def test_the_index_only_grows():
    history = History(["a", "b", "c"])
    history.retrieve("a", 1, before=3)
    with pytest.raises(ValueError, match="3 > 2"):
        history.retrieve("a", 1, before=2)


def test_histories_do_not_share_state():
    first, second = History(["a b", "c d", "x y"]), History(["e f", "g h", "x y"])
    first.retrieve("a", 1, before=3)
    assert second.retrieve("e", 1, before=3) == ["e f"]
    assert second.retrieve("a", 3, before=3) == ["x y", "g h", "e f"]  # no score: the order
    assert first.retrieve("a", 1, before=3) == ["a b"]


def test_recency_finds_the_newest_before():
    history = History([*"abcde"], "recency")
    assert history.retrieve("a", 2, before=4) == ["d", "c"]
    assert history.retrieve("a", 9, before=3) == ["c", "b", "a"]
    assert history.retrieve("a", 2, before=0) == history.retrieve("a", 0, before=3) == []


def test_random_retrieval_depends_on_seed_query_and_position_alone():
    documents = [f"d{i}" for i in range(50)]

    def found(seed, query, before, *, asked_first=()):
        history = History(documents, "random", seed=seed)
        for other in asked_first:
            history.retrieve(other, 3, before=50)
        return history.retrieve(query, 3, before=before)

    first = found(1, "q", 40)
    assert len(set(first)) == 3
    assert set(first) <= set(documents[:40])
    assert first == found(1, "q", 40, asked_first=["x", "q"])
    assert len({tuple(found(*case)) for case in [(1, "q", 40), (2, "q", 40), (1, "p", 40)]}) == 3
    assert sorted(found(1, "q", 2)) == ["d0", "d1"]
    every = {document for i in range(200) for document in found(0, str(i), 50)}
    assert every == set(documents)
