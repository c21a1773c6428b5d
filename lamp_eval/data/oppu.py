"""The released per-user files of OPPU: `user_top_100_history.json` and `user_others.json`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from lamp_eval.config import DataConfig
from lamp_eval.data.files import parse_json, read_bytes
from lamp_eval.errors import UserError, raise_if_any
from lamp_eval.records import Query, Record, User
from lamp_eval.tasks import Task

EVALUATED = "user_top_100_history.json"
EVALUATED_TWEETS = "user_more_100_history.json"  # as tweets were released
OTHERS = "user_others.json"


def read(task: Task, data: DataConfig) -> tuple[tuple[User, ...], tuple[User, ...], dict[str, str]]:
    """Reads the users of a task.

    The files lie in `data.dir` itself or in its folder named after the task.

    Returns:
        The evaluated users; the other users, on whom the task adapter is trained (empty if
        `data.task_users` says so or, with `auto`, if there is no such file); the SHA-256 of
        each file.

    Raises:
        UserError: the directory or a file is missing, is not JSON, or lacks a field.
    """
    if data.dir is None:
        raise UserError(
            expected="a directory with the released per-user files",
            found="no data.dir",
            where="option data.dir",
            fix="give data.dir=…, or use data=sample",
        )
    root = Path(data.dir)
    candidates = [f / n for f in (root / task.name, root) for n in (EVALUATED, EVALUATED_TWEETS)]
    evaluated_path = next((path for path in candidates if path.is_file()), None)
    if evaluated_path is None:
        raise UserError(
            expected=f"{EVALUATED} in {root / task.name} or {root}",
            found="no such file" if root.is_dir() else f"{root} is not a directory",
            where="option data.dir",
            fix=f"point data.dir at the folder that holds {task.name}/{EVALUATED}",
        )
    folder = evaluated_path.parent
    users, digest = _read_file(evaluated_path, task)
    files = {str(evaluated_path): digest}
    others: tuple[User, ...] = ()
    if data.task_users == "others" or (data.task_users == "auto" and (folder / OTHERS).is_file()):
        others, files[str(folder / OTHERS)] = _read_file(folder / OTHERS, task)
        evaluated = {user.id for user in users}
        raise_if_any(
            [
                UserError(
                    expected="users who are not evaluated",
                    found="a user who is also evaluated",
                    where=f"{folder / OTHERS}, user {user.id!r}",
                    fix="remove the user from this file: the task adapter must not see them",
                )
                for user in others
                if user.id in evaluated
            ]
        )
    return users, others, files


def _read_file(path: Path, task: Task) -> tuple[tuple[User, ...], str]:
    content = read_bytes(path)
    rows = parse_json(content, str(path), "a JSON list of users")
    if not isinstance(rows, list):
        raise UserError(
            expected="a JSON list of users",
            found=f"a JSON {type(rows).__name__}",
            where=str(path),
            fix="check that this is a file of the per-user format",
        )
    problems: list[UserError] = []
    users = tuple(_user(row, i, path, task, problems) for i, row in enumerate(rows))
    raise_if_any(problems)
    return users, hashlib.sha256(content).hexdigest()


def _user(row: Any, index: int, path: Path, task: Task, problems: list[UserError]) -> User:
    """One user; what is missing or of the wrong type is appended to `problems`."""

    def text(item: Any, name: str, where: str) -> str:
        value = item.get(name) if isinstance(item, dict) else None
        empty_id = name in ("user_id", "id") and value == ""
        if isinstance(value, bool) or not isinstance(value, str | int) or empty_id:
            problems.append(
                UserError(
                    expected="a string or an integer" + (", not empty" if empty_id else ""),
                    found="nothing" if value is None else f"{type(value).__name__} {value!r:.60}",
                    where=f"{path}, {where}, field {name!r}",
                    fix="add the field to the file, or correct it",
                )
            )
            return ""
        return str(value)

    def items(name: str, where: str) -> list[Any]:
        value = row.get(name) if isinstance(row, dict) else None
        if not isinstance(value, list):
            problems.append(
                UserError(
                    expected="a list",
                    found="nothing" if value is None else type(value).__name__,
                    where=f"{path}, {where}, field {name!r}",
                    fix="add the field to the file",
                )
            )
            return []
        return value

    user_id = text(row, "user_id", f"user {index}")
    where = f"user {user_id or index!r}"

    def record(item: Any, where: str) -> Record:
        needed = task.text_field, task.gold_field
        fields = {
            name: text(item, name, where)
            for name in task.record_fields
            if name in needed or (isinstance(item, dict) and name in item)
        }
        dated = isinstance(item, dict) and "date" in item
        return Record(fields, text(item, "date", where) if dated else "")

    history = tuple(
        record(item, f"{where}, record {i}") for i, item in enumerate(items("profile", where))
    )
    queries = tuple(
        Query(*(text(item, name, f"{where}, query {i}") for name in ("id", "input", "gold")))
        for i, item in enumerate(items("query", where))
    )
    return User(user_id, history, queries)
