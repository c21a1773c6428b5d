"""Vectors of texts for dense retrieval, computed once for each set of texts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lamp_eval import environment
from lamp_eval.child import Child
from lamp_eval.errors import UserError
from lamp_eval.store import Store


class Embedder:
    """Gives vectors of texts: from memory, from the store, or from the model in a child process.

    Args:
        model_dir: a sentence-embedding model.
        store: where vectors are kept.
        device: torch's.
        child: torch works in it.

    Raises:
        UserError: there is no such directory.
    """

    def __init__(self, model_dir: Path, store: Store, device: str, child: Child) -> None:
        if not (model_dir / "config.json").is_file():
            raise UserError(
                expected="a directory with a sentence-embedding model",
                found="no config.json in it" if model_dir.is_dir() else "no such directory",
                where=f"{model_dir}, option protocol.embedding_model",
                fix="give the directory of such a model",
            )
        self._model_dir, self._store, self._device, self._child = model_dir, store, device, child
        files = sorted(
            p for p in model_dir.rglob("*") if p.suffix in (".json", ".safetensors", ".txt")
        )
        self._fingerprint = hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()
        self._vectors: dict[str, npt.NDArray[np.float32]] = {}

    def __call__(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """The vectors, (n_texts, dimension), of unit length."""
        new = sorted({text for text in texts if text not in self._vectors})
        if new:
            self._vectors.update(zip(new, self._computed(new), strict=True))
        return np.stack([self._vectors[text] for text in texts])

    def _computed(self, texts: list[str]) -> npt.NDArray[np.float32]:
        key = {
            "model": self._fingerprint,
            "packages": environment.versions("torch", "transformers"),
            "device": self._device,
            "texts": hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).hexdigest(),
        }
        if not self._store.has("embeddings", key):
            vectors = self._child.run(
                "recipes.embeddings:embed_texts",
                self._model_dir,
                texts,
                device=self._device,
                report=lambda done: None,
            )
            with self._store.build("embeddings", key) as folder:
                np.save(folder / "vectors.npy", vectors, allow_pickle=False)
        path = self._store.path("embeddings", key) / "vectors.npy"
        found: npt.NDArray[np.float32] = np.load(path, allow_pickle=False)
        return found
