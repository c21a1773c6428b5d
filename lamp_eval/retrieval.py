"""Which of a user's records a prompt shows: the best by BM25 or by meaning, the newest, or any.

BM25 comes in the exact variants of both protocols, scores and order of ties included.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rank_bm25 import BM25Okapi

_DEFAULTS = BM25Okapi([[""]])

# (n_texts,) → (n_texts, dimension) of unit length
Embed = Callable[[Sequence[str]], npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Bm25:
    """A variant of BM25.

    Attributes:
        words: splits a text.
        k1: saturation of a word's count in a document.
        b: how much a document's length matters.
        epsilon: a negative idf becomes this share of the mean idf, which is
            ln((N − n + .5) / (n + .5)). None: it is ln(1 + (N − n + .5) / (n + .5)) instead.
        later_first: of equal scores, whether the later record comes first.
    """

    words: Callable[[str], list[str]]
    k1: float
    b: float
    epsilon: float | None
    later_first: bool


# rank-bm25's `BM25Okapi` over `text.split(" ")`, as in the released OPPU code.
RANK_BM25 = Bm25(lambda text: text.split(" "), _DEFAULTS.k1, _DEFAULTS.b, _DEFAULTS.epsilon, True)
# Of the chat-template harness behind the paper's Table 7.
OKAPI = Bm25(lambda text: re.findall("[a-z0-9]+", text.lower()), 1.5, 0.75, None, False)


class History:
    """A user's documents, oldest first, searchable up to any position.

    rank-bm25 indexes a fixed corpus, in time that grows with the history for each query. A training
    record may only see the records before it; here all of them share one index, in which each
    word's documents stand in order, so that those before any position are the first few. Sums are
    made in rank-bm25's order: the scores are the same to the last bit.

    Args:
        documents: one string per record: what is searched.
        method: `bm25`, `dense`, `recency` or `random`.
        bm25: the variant.
        embed: of `dense`: the vectors of texts, whose products are the scores.
        searches: of `dense`: all that will be searched for, as vectors are faster made together.
        seed: of `random`; with it, the query and the position decide, nothing else.
    """

    def __init__(
        self,
        documents: Sequence[str],
        method: str = "bm25",
        *,
        bm25: Bm25 = RANK_BM25,
        embed: Embed | None = None,
        searches: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        self.documents = list(documents)
        self._method, self._bm25, self._seed = method, bm25, seed
        if method == "bm25":
            self._build_index()
        elif method == "dense":
            assert embed is not None
            found = embed([*self.documents, *searches]) if documents else np.zeros((0, 1))
            self._vectors = found[: len(documents)]  # (n_documents, dimension)
            self._found = dict(zip(searches, found[len(documents) :], strict=False))

    def _build_index(self) -> None:
        self._word_ids: dict[str, int] = {}  # numbered as they appear
        words: list[int] = []  # of each word of each document: the word's id,
        in_document: list[int] = []  # the document,
        counts: list[int] = []  # how often the word is in it
        self._n_known = [0]  # words in the first 0, 1, … documents
        lengths = []
        for i, document in enumerate(self.documents):
            split = self._bm25.words(document)
            in_this: dict[int, int] = {}
            for word in split:
                word_id = self._word_ids.setdefault(word, len(self._word_ids))
                in_this[word_id] = in_this.get(word_id, 0) + 1
            words += in_this
            in_document += [i] * len(in_this)
            counts += in_this.values()
            self._n_known.append(len(self._word_ids))
            lengths.append(len(split))
        by_word = np.argsort(np.asarray(words, np.int64), kind="stable")
        self._words = np.asarray(words, np.int64)  # by document
        self._ends = np.searchsorted(in_document, range(1, len(lengths) + 1))
        self._in_document = np.asarray(in_document, np.int64)[by_word]  # by word, then by document
        self._counts = np.asarray(counts, np.float64)[by_word]
        self._starts = np.searchsorted(self._words[by_word], range(len(self._word_ids)))
        self._lengths = np.asarray(lengths, np.float64)
        # As rank-bm25 takes them, one by one: NumPy's logarithm may differ in the last bit.
        self._logs = np.array([math.log(n + 0.5) for n in range(len(lengths) + 1)])
        self._size = 0
        self._n_with = np.zeros(len(self._word_ids), np.int64)  # documents with each word
        self._idf = np.zeros(0)

    def retrieve(self, query: str, k: int, *, before: int) -> list[int]:
        """The positions of up to `k` of the first `before` documents, the best first.

        By BM25, calls must come with `before` not decreasing, as the index only grows. By recency
        the newest comes first.
        """
        if k == 0 or before == 0:
            return []
        if self._method == "recency":
            return list(range(before))[: -k - 1 : -1]
        if self._method == "random":
            rng = random.Random(f"{self._seed}\0{before}\0{query}")
            return rng.sample(range(before), min(k, before))
        later_first = self._bm25.later_first
        if self._method == "dense":
            scores = self._vectors[:before] @ self._found[query]  # (before,)
        else:
            scores = self.scores(query, before)
        # rank-bm25 reverses an unstable sort; here ties have one order, on every machine.
        if later_first:
            return [int(i) for i in np.argsort(scores, kind="stable")[::-1][:k]]
        return [int(i) for i in np.argsort(-scores, kind="stable")[:k]]

    def scores(self, query: str, before: int) -> npt.NDArray[np.float64]:
        """BM25 of the first `before` documents, (before,); `before` > 0, not decreasing."""
        if self._size > before:
            raise ValueError(f"the index already holds {self._size} > {before} documents")
        if self._size < before:
            self._grow(before)
        unknown = len(self._idf)
        found = (self._word_ids.get(word, unknown) for word in self._bm25.words(query))
        words = np.array([word for word in found if word < unknown], np.int64)
        n_with = self._n_with[words]
        # The first entries of each word of the query, one word after the other.
        entries = np.arange(n_with.sum()) + np.repeat(
            self._starts[words] - (n_with.cumsum() - n_with), n_with
        )
        documents, counts = self._in_document[entries], self._counts[entries]
        k1, b = self._bm25.k1, self._bm25.b
        # Only documents without any word have a mean length of 0; no query finds them.
        damping = k1 * (1 - b + b * self._lengths[:before] / (self._lengths_mean or 1.0))
        gains = np.repeat(self._idf[words], n_with) * (
            counts * (k1 + 1) / (counts + damping[documents])
        )
        summed = np.bincount(documents, weights=gains, minlength=before)
        return summed.astype(np.float64, copy=False)

    def _grow(self, size: int) -> None:
        start = self._ends[self._size - 1] if self._size else 0
        # A document holds each of its words once here, but several documents may share some.
        np.add.at(self._n_with, self._words[start : self._ends[size - 1]], 1)
        self._size = size
        self._lengths_mean = self._lengths[:size].sum() / size
        n_with = self._n_with[: self._n_known[size]]
        if self._bm25.epsilon is None:
            self._idf = np.log(1 + (size - n_with + 0.5) / (n_with + 0.5))
            return
        idf = self._logs[size - n_with] - self._logs[n_with]
        mean = idf.cumsum()[-1] / len(idf)  # summed one by one, as rank-bm25 does
        self._idf = np.where(idf < 0, self._bm25.epsilon * mean, idf)
