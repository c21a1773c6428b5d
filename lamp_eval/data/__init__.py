"""Readers: from files, or from a generator, to users."""

from lamp_eval.data.corpus import Corpus, load_corpus

__all__ = ["Corpus", "load_corpus"]
