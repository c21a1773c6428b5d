"""Reading JSON that a user gives us."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lamp_eval.errors import UserError


def read_bytes(path: Path) -> bytes:
    """The content of a file.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            expected="a readable file",
            found=error.strerror or str(error),
            where=str(path),
            fix="check the path and its permissions",
        ) from error


def parse_json(content: bytes, where: str, expected: str) -> Any:
    """The value of a JSON text.

    Args:
        content: the text.
        where: its file, for the message.
        expected: what it should be, for the message.

    Raises:
        UserError: it is not JSON.
    """
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # ValueError: of JSON or of UTF-8
        raise UserError(
            expected=expected,
            found=f"not JSON: {error}",
            where=where,
            fix="download or write the file again; it may be cut short",
        ) from error
