"""Stage outputs, content-addressed: a folder named by the hash of all that determines it.

One mechanism gives resume, sharing between the jobs of a sweep, and safety against kills: a folder
is written under a temporary name and renamed when complete, so what exists is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KEY_FILE = "key.json"  # what determined the folder, for people


def key_hash(key: Mapping[str, Any]) -> str:
    """20 hex digits that stand for a key of plain JSON values."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]


class Store:
    """Finished stage outputs under one folder.

    Args:
        root: the folder; made on first use.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, stage: str, key: Mapping[str, Any]) -> Path:
        """Where the output of a stage is, or will be."""
        return self.root / stage / key_hash(key)

    def has(self, stage: str, key: Mapping[str, Any]) -> bool:
        """Whether the output is there, and so complete."""
        return (self.path(stage, key) / KEY_FILE).is_file()

    def work_path(self, stage: str, key: Mapping[str, Any]) -> Path:
        """A folder for what an interrupted stage needs to go on; removed with its success."""
        return self.root / stage / f".work-{key_hash(key)}"

    @contextmanager
    def build(self, stage: str, key: Mapping[str, Any]) -> Iterator[Path]:
        """An empty folder to write the output into; it gets its name when the block succeeds."""
        final = self.path(stage, key)
        final.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=final.parent))
        try:
            yield partial
            (partial / KEY_FILE).write_text(json.dumps(key, indent=2, sort_keys=True) + "\n")
            try:
                os.replace(partial, final)
            except OSError:
                if not self.has(stage, key):  # else another process finished it first
                    raise
            shutil.rmtree(self.work_path(stage, key), ignore_errors=True)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
