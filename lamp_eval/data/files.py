"""Reading JSON and archives that a user gives us."""

from __future__ import annotations

import json
import lzma
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lamp_eval.errors import UserError

# What zipfile and its decompressors raise for a damaged, cut or encrypted archive.
DAMAGED_ZIP = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
)

_CHUNK_CHARS = 2**22
_MAX_ENTRY_CHARS = 2**26
_SPACE = re.compile(r"[ \t\n\r]*")


def read_bytes(path: Path) -> bytes:
    """The content of a file.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> UserError:
    """The mistake behind a file that cannot be read."""
    return UserError(
        expected="a readable file",
        found=error.strerror or str(error),
        where=str(path),
        fix="check the path and its permissions",
    )


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


def stream_objects(path: Path, expected: str) -> Iterator[dict[str, Any]]:
    """The objects in a JSON list one by one, in the memory of a few of them.

    Args:
        path: the file; of any size.
        expected: what it should hold, for the message.

    Raises:
        UserError: it cannot be read, or is not a JSON list of objects.
    """
    decode = json.JSONDecoder().raw_decode
    text, start = "", 0  # what has been read, and how much of it is done

    def not_a_list(found: str) -> UserError:
        return UserError(
            expected=expected,
            found=found,
            where=str(path),
            fix="download or write the file again; it may be cut short",
        )

    try:
        with path.open(encoding="utf-8") as file:

            def more() -> bool:
                nonlocal text, start
                text, start = text[start:] + (chunk := file.read(_CHUNK_CHARS)), 0
                return bool(chunk)

            def next_char() -> str:
                """The next character that is not white space; "" at the end of the file."""
                nonlocal start
                while True:
                    start = _after_space(text, start)
                    if start < len(text) or not more():
                        return text[start : start + 1]

            if next_char() != "[":
                raise not_a_list("no list")
            start += 1
            n_values = 0
            while (char := next_char()) != "]":
                if n_values:
                    if char != ",":
                        raise not_a_list(f"not JSON after entry {n_values - 1}")
                    start += 1
                    char = next_char()
                if char != "{":  # an object also shows where it ends, as a number does not
                    raise not_a_list(f"no JSON object in entry {n_values}")
                while True:
                    try:
                        value, end = decode(text, start)
                        break
                    except (ValueError, RecursionError) as error:
                        # An entry that is not there in full; the list ends with a bracket.
                        if isinstance(error, RecursionError) or not more():
                            raise not_a_list(f"not JSON in entry {n_values}: {error}") from error
                        if len(text) > _MAX_ENTRY_CHARS:
                            raise not_a_list(f"not JSON, or too large, entry {n_values}") from error
                start, n_values = end, n_values + 1
                yield value
            start += 1
            if next_char():
                raise not_a_list("more text after the list")
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise not_a_list(f"not JSON: {error}") from error


def _after_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return found.end() if found else start
