"""A text about each user, for profile-augmented prompts."""

from __future__ import annotations

import hashlib
from pathlib import Path

from lamp_eval.data.files import parse_json, read_bytes
from lamp_eval.errors import UserError, raise_if_any


def read_profiles(path: Path) -> tuple[dict[str, str], str]:
    """Reads `{user id: text}`.

    Returns:
        The texts by user id, and the file's SHA-256.

    Raises:
        UserError: with all problems of the file.
    """
    content = read_bytes(path)
    found = parse_json(content, str(path), "{user id: text}")
    if not isinstance(found, dict):
        raise UserError(
            expected="a JSON object {user id: text}",
            found=f"a JSON {type(found).__name__}",
            where=str(path),
            fix="write a text for each user under the user's id",
        )
    raise_if_any(
        [
            UserError(
                expected="a text, not empty",
                found=f"{type(text).__name__} {text!r:.60}",
                where=f"{path}, user {user_id!r}",
                fix="write a text about this user",
            )
            for user_id, text in found.items()
            if not isinstance(text, str) or not text.strip()
        ]
    )
    return found, hashlib.sha256(content).hexdigest()
