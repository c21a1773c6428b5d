"""States in front of the first adapted block, of each example, which no training changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from lamp_eval.records import Example

States = Iterable[tuple[Example, mx.array]]


def n_bytes(examples: Iterable[Example], width: int, dtype: mx.Dtype) -> int:
    """What the states (T − 1, D) of examples of T tokens take: the last token is never read."""
    return sum((len(example.tokens) - 1) * width * dtype.size for example in examples)


class StatesOnDisk:
    """States (T − 1, D) of examples in one file; in memory is only what is asked for.

    Args:
        path: the file; one of this size that is there already is of these very examples, as the
            folder is of this training alone.
        examples: all of them.
        width: D.
        dtype: of the states.
        compute: gives each example's states, in any order.
    """

    def __init__(
        self,
        path: Path,
        examples: Sequence[Example],
        width: int,
        dtype: mx.Dtype,
        compute: Callable[[], States],
    ) -> None:
        self._width, self._dtype, self._spans = width, dtype, {}
        end = 0
        for example in examples:
            start, end = end, end + n_bytes([example], width, dtype)
            self._spans[example] = start, end - start
        if not path.is_file() or path.stat().st_size != end:
            self._write(path, compute())
        self._file = path.open("rb")

    def _write(self, path: Path, states: States) -> None:
        """Whole or not at all, as an interrupted training finds it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".partial-{os.getpid()}-{path.name}")
        with partial.open("wb") as file:
            for example, own in states:
                file.seek(self._spans[example][0])
                file.write(memoryview(mx.contiguous(own).view(mx.uint8)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)

    def __getitem__(self, example: Example) -> mx.array:
        """Its states (T − 1, D)."""
        start, size = self._spans[example]
        self._file.seek(start)
        values = np.frombuffer(self._file.read(size), np.uint8)
        return mx.array(values).view(self._dtype).reshape(-1, self._width)
