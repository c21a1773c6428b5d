"""BM25 over a user's history, with the exact scores of rank-bm25 (part of the OPPU protocol)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rank_bm25 import BM25Okapi


class History:
    """A user's documents, oldest first, searchable up to any position.

    rank-bm25 indexes a fixed corpus. A training record may only see the records before it, so the
    index grows here one document at a time; the scores are computed by rank-bm25's own code.

    Args:
        documents: one string per record; words are split at single spaces, as released.
    """

    def __init__(self, documents: Sequence[str]) -> None:
        self.documents = list(documents)
        self._index = BM25Okapi([[""]])  # it cannot be made empty
        self._index.corpus_size, self._index.doc_len = 0, []
        self._index.doc_freqs, self._index.idf = [], {}
        self._n_docs_with: dict[str, int] = {}
        self._n_words = 0

    def retrieve(self, query: str, k: int, *, before: int) -> list[str]:
        """The `k` best documents among the first `before`, best first; of equals the later first.

        Calls must come with `before` not decreasing: the index only grows.
        """
        index = self._index
        if k == 0 or before == 0:
            return []
        if index.corpus_size > before:
            raise ValueError(f"the index already holds {index.corpus_size} > {before} documents")
        if index.corpus_size < before:
            self._grow(before)
        scores = index.get_scores(query.split(" "))
        # rank-bm25 reverses an unstable sort; among equals the later first, on every machine.
        best = np.argsort(scores, kind="stable")[::-1][:k]
        return [self.documents[i] for i in best]

    def _grow(self, size: int) -> None:
        index = self._index
        for document in self.documents[index.corpus_size : size]:
            words = document.split(" ")
            counts: dict[str, int] = {}
            for word in words:
                counts[word] = counts.get(word, 0) + 1
            for word in counts:
                self._n_docs_with[word] = self._n_docs_with.get(word, 0) + 1
            index.doc_freqs.append(counts)
            index.doc_len.append(len(words))
            self._n_words += len(words)
        index.corpus_size = size
        index.avgdl = self._n_words / size
        index.idf = {}
        index._calc_idf(self._n_docs_with)
