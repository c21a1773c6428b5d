"""The benchmark's own files: golds and predictions `{task, golds: [{id, output}]}`, questions."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from lamp_eval.data.files import DAMAGED_ZIP, parse_json, read_bytes
from lamp_eval.errors import UserError, raise_if_any
from lamp_eval.tasks import TASKS, Task

_MAX_UNPACKED_BYTES = 2 * 2**30
_OUTPUTS = "{task, golds: [{id, output}]}"


@dataclass(frozen=True)
class Outputs:
    """Golds or predictions of one task: `by_id` in the file's order, and where they come from."""

    by_id: dict[str, str]
    where: str


def read_outputs(path: Path) -> dict[str, Outputs]:
    """Reads golds or predictions: a JSON file, a zip archive of them, or a folder of them.

    A JSON file holds `{task, golds: [{id, output}]}` as the benchmark has it, or `{id: output}`,
    which names no task. An archive is read in memory; nothing is unpacked.

    Returns:
        The outputs by the task that their file names; "" where it names none.

    Raises:
        UserError: with all problems of all files.
    """
    problems: list[UserError] = []
    found: dict[str, Outputs] = {}
    for where, content in _json_files(path):
        try:
            task, by_id = _outputs(parse_json(content, where, _OUTPUTS), where)
        except UserError as error:
            problems.append(error)
            continue
        if task in found:
            problems.append(
                UserError(
                    expected="each task in one file",
                    found=f"{task or 'no task'} also in {found[task].where}",
                    where=f"{where}, field 'task'",
                    fix="remove one of the files",
                )
            )
        found[task] = Outputs(by_id, where)
    raise_if_any(problems)
    return found


def write_outputs(path: Path, task: Task, by_id: Mapping[str, str]) -> None:
    """Writes golds or predictions in the benchmark's format."""
    golds = [{"id": query_id, "output": output} for query_id, output in by_id.items()]
    text = json.dumps({"task": task.lamp_id, "golds": golds}, ensure_ascii=False, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def pairs_of(
    golds: Mapping[str, Outputs], predictions: Mapping[str, Outputs], task: Task | None
) -> list[tuple[Task, Outputs, Outputs]]:
    """Golds and predictions of each task, with the same ids.

    Args:
        golds: as read.
        predictions: as read.
        task: the only one wanted. It is found by its id, or is the only one in a file that names
            none or uses an id of its own: the benchmark renamed `LaMP_2`. None: all with golds.

    Returns:
        (task, golds, predictions), both with the golds' order of ids.

    Raises:
        UserError: a task is missing or unknown, or the ids differ; these are listed.
    """
    if task is not None:
        named = [(task, outputs_of(golds, task), outputs_of(predictions, task))]
    else:
        by_lamp_id = {task.lamp_id: task for task in TASKS.values()}
        for name, outputs in golds.items():
            if name not in by_lamp_id:
                raise UserError(
                    expected=f"one of {', '.join(by_lamp_id)}",
                    found=repr(name) if name else "no task",
                    where=f"{outputs.where}, field 'task'",
                    fix="say which task it is with --task",
                )
        named = [
            (by_lamp_id[n], o, outputs_of(predictions, by_lamp_id[n])) for n, o in golds.items()
        ]
    raise_if_any([p for _, gold, prediction in named for p in _id_problems(gold, prediction)])
    return [
        (task, gold, Outputs({i: prediction.by_id[i] for i in gold.by_id}, prediction.where))
        for task, gold, prediction in named
    ]


def outputs_of(found: Mapping[str, Outputs], task: Task) -> Outputs:
    """The outputs of one task: by its id, or the only ones, if their id is of no other task.

    Raises:
        UserError: there are none of this task.
    """
    if task.lamp_id in found:
        return found[task.lamp_id]
    if len(found) == 1 and not {t.lamp_id for t in TASKS.values()} & set(found):
        return next(iter(found.values()))
    raise UserError(
        expected=f"a file of the task {task.lamp_id}",
        found=", ".join(name or "no task" for name in found),
        where=", ".join(outputs.where for outputs in found.values()),
        fix="add it, or say with --task which one is wanted",
    )


def read_users(path: Path) -> tuple[dict[str, str], dict[str, int]]:
    """Reads whose each query is, and how many records each user has.

    Args:
        path: the benchmark's questions `[{id, user_id, profile}]`, or `{id: user_id}`, or
            `{id: {user_id, n_records}}` as a run writes it.

    Returns:
        The user id of each query id; the number of records of each user id, empty if the file does
        not tell. Where a user's queries have profiles of their own the longest counts.

    Raises:
        UserError: with all problems of the file.
    """
    expected = "[{id, user_id, profile}], {id: user_id} or {id: {user_id, n_records}}"
    found = parse_json(read_bytes(path), str(path), expected)
    rows: list[tuple[Any, Any, Any]] = []  # query id, user id, records
    if isinstance(found, dict):
        for query_id, of in found.items():
            of = of if isinstance(of, dict) else {"user_id": of}
            rows.append((query_id, of.get("user_id"), of.get("n_records")))
    elif isinstance(found, list):
        for row in found:
            row = row if isinstance(row, dict) else {}
            profile = row.get("profile")
            n_records = len(profile) if isinstance(profile, list) else None
            rows.append((row.get("id"), row.get("user_id"), n_records))
    if not rows:
        raise UserError(
            expected=expected,
            found=f"a JSON {type(found).__name__} without queries",
            where=str(path),
            fix="give a file of this form",
        )
    problems: list[UserError] = []
    user_of: dict[str, str] = {}
    n_records_of: dict[str, int] = {}
    for position, (query_id, user_id, n_records) in enumerate(rows):
        where = f"{path}, query {query_id!r}" if query_id else f"{path}, entry {position}"
        for name, value in (("id", query_id), ("user_id", user_id)):
            if not isinstance(value, str) or not value:
                problems.append(_not_text(value, f"{where}, field {name!r}"))
        if n_records is not None and (
            isinstance(n_records, bool) or not isinstance(n_records, int)
        ):
            problems.append(_not_text(n_records, f"{where}, field 'n_records'", "an integer"))
        elif not problems:
            if query_id in user_of:
                problems.append(_twice(f"{where}, field 'id'"))
            user_of[query_id] = user_id
            if n_records is not None:
                n_records_of[user_id] = max(n_records, n_records_of.get(user_id, 0))
    raise_if_any(problems)
    return user_of, n_records_of


def _json_files(path: Path) -> list[tuple[str, bytes]]:
    """Name and content of each JSON file that a path stands for."""
    if path.is_dir():
        files = [(str(p), read_bytes(p)) for p in sorted(path.rglob("*.json"))]
    elif (content := read_bytes(path)).startswith(b"PK"):  # as no JSON does
        files = _unzipped(content, path)
    else:
        files = [(str(path), content)]
    if not files:
        raise UserError(
            expected="at least one JSON file",
            found="none",
            where=str(path),
            fix="check the path",
        )
    return files


def _unzipped(content: bytes, path: Path) -> list[tuple[str, bytes]]:
    try:
        with zipfile.ZipFile(BytesIO(content)) as archive:
            members = [
                member
                for member in archive.infolist()
                if member.filename.endswith(".json") and not member.filename.startswith("__MACOSX/")
            ]
            size = sum(member.file_size for member in members)
            if size <= _MAX_UNPACKED_BYTES:
                return [(f"{path}/{m.filename}", archive.read(m)) for m in members]
    except DAMAGED_ZIP as error:
        raise UserError(
            expected="a whole zip archive without a password",
            found=str(error) or type(error).__name__,
            where=str(path),
            fix="pack or download it again",
        ) from error
    raise UserError(
        expected=f"JSON files of at most {_MAX_UNPACKED_BYTES >> 20} MB together",
        found=f"{size >> 20} MB",
        where=str(path),
        fix="unpack it and give the folder",
    )


def _outputs(found: Any, where: str) -> tuple[str, dict[str, str]]:
    """The task a file names, and its outputs by id."""
    task: Any = ""
    if isinstance(found, dict) and "golds" in found:
        task, rows = found.get("task", ""), found["golds"]
        rows = rows if isinstance(rows, list) else None
    elif isinstance(found, dict):
        rows = [{"id": query_id, "output": output} for query_id, output in found.items()]
    else:
        rows = None
    if not rows or not isinstance(task, str):
        raise UserError(
            expected=f"{_OUTPUTS} or {{id: output}}, not empty",
            found=f"a JSON {type(found).__name__}" if rows is None else "no outputs, or no task",
            where=where,
            fix="check that this is a file of golds or of predictions",
        )
    problems: list[UserError] = []
    by_id: dict[str, str] = {}
    for position, row in enumerate(rows):
        row = row if isinstance(row, dict) else {}
        query_id, output = row.get("id"), row.get("output")
        at = f"{where}, entry {position}"
        if not isinstance(query_id, str) or not query_id:
            problems.append(_not_text(query_id, f"{at}, field 'id'"))
        elif query_id in by_id:
            problems.append(_twice(f"{at}, field 'id', {query_id!r}"))
        if not isinstance(output, str):
            problems.append(_not_text(output, f"{at}, id {query_id!r}, field 'output'"))
        if isinstance(query_id, str) and isinstance(output, str):
            by_id[query_id] = output
    raise_if_any(problems)
    return task, by_id


def _id_problems(golds: Outputs, predictions: Outputs) -> list[UserError]:
    """What is missing in the predictions, and what is there without a gold."""
    problems = []
    for those, others, what in (
        (golds, predictions, "a prediction for each gold"),
        (predictions, golds, "a gold for each prediction"),
    ):
        missing = [query_id for query_id in those.by_id if query_id not in others.by_id]
        if missing:
            shown = ", ".join(map(repr, missing[:10])) + (", …" if len(missing) > 10 else "")
            problems.append(
                UserError(
                    expected=f"{what} in {those.where}",
                    found=f"none for {len(missing)} of {len(those.by_id)} ids: {shown}",
                    where=others.where,
                    fix="ids must match letter by letter, leading zeros included",
                )
            )
    return problems


def _not_text(found: Any, where: str, expected: str = "a string") -> UserError:
    return UserError(
        expected=expected + (", not empty" if found == "" else ""),
        found="nothing" if found is None else f"{type(found).__name__} {found!r:.60}",
        where=where,
        fix="correct the field",
    )


def _twice(where: str) -> UserError:
    return UserError(
        expected="each id once",
        found="an id that came before",
        where=where,
        fix="remove one of the two",
    )
