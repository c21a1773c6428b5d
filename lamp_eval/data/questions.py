"""The benchmark's own files as users (`data=lamp`): a user for each question, with their profile.

The official training file of LaMP-3 holds 20,000 profiles in 2–3 GB. It is read once as a stream
into an Arrow table in the cache; users are made from its rows when they are asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, overload

from lamp_eval.config import DataConfig
from lamp_eval.data.checks import query_notes
from lamp_eval.data.files import stream_objects, unreadable
from lamp_eval.data.lamp import outputs_of, read_outputs
from lamp_eval.environment import cache_dir
from lamp_eval.errors import UserError, raise_if_any
from lamp_eval.records import Query, Record, User
from lamp_eval.tasks import Task

TABLE_VERSION = 1  # part of a table's name: another layout never meets an old table
_ROWS_PER_BATCH = 100
_MAX_PROBLEMS = 100
_QUESTIONS = "a JSON list of {id, input, profile}"
# The benchmark's folders that are not named after the task's id: movie tagging took over LaMP_2.
_OTHER_FOLDERS = {"LaMP_2M": ("LaMP_2",)}


@dataclass(frozen=True)
class Found:
    """What the files hold: evaluated users, those of the task adapter, and what is odd in it.

    Attributes:
        users: to evaluate; all of the split, or the selected ones.
        task_users: of the training split, without the evaluated users; made when asked for.
        files: SHA-256 of each file, by path.
        notes: what a person should know about the data.
    """

    users: ArrowUsers
    task_users: ArrowUsers | None
    files: dict[str, str]
    notes: list[str]


@dataclass(frozen=True)
class _Person:
    """Rows of one user; `owner` is the benchmark's user id, or the question's where it has none."""

    id: str
    owner: str
    rows: tuple[int, ...]
    n_records: int


class ArrowUsers(Sequence[User]):
    """Users whose records stay in the table until they are asked for.

    Args:
        table: the questions.
        people: whose they are.
        golds: by question id.
        made: what becomes of a user that is asked for.
    """

    def __init__(
        self,
        table: Any,
        people: Sequence[_Person],
        golds: Mapping[str, str],
        made: Callable[[User], User],
    ) -> None:
        self._table, self._people, self._golds, self._made = table, people, golds, made

    def __len__(self) -> int:
        return len(self._people)

    @overload
    def __getitem__(self, index: int) -> User: ...
    @overload
    def __getitem__(self, index: slice) -> ArrowUsers: ...
    def __getitem__(self, index: int | slice) -> User | ArrowUsers:
        if isinstance(index, slice):
            return self.pick(range(len(self))[index])
        person = self._people[index]
        first, *more = (self._table[row] for row in person.rows)
        history = tuple(
            Record({n: v for n, v in item.items() if n != "date" and v is not None}, item["date"])
            for item in first["profile"]
        )
        queries = tuple(
            Query(row["id"], row["input"], self._golds[row["id"]]) for row in (first, *more)
        )
        return self._made(User(person.id, history, queries))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    def pick(self, positions: Sequence[int]) -> ArrowUsers:
        """The users at some positions."""
        people = [self._people[i] for i in positions]
        return ArrowUsers(self._table, people, self._golds, self._made)

    def each(self, made: Callable[[User], User]) -> ArrowUsers:
        """The users, each of them changed when it is asked for."""
        return ArrowUsers(
            self._table, self._people, self._golds, lambda user: made(self._made(user))
        )

    @property
    def ids(self) -> list[str]:
        """The users' ids, without making the users."""
        return [person.id for person in self._people]


def read(
    task: Task, data: DataConfig, select: Callable[[Sequence[str], Sequence[int]], list[int]]
) -> Found:
    """Reads the users of a task.

    The files lie in `<data.dir>/[time/]<LaMP id>/<split>/`, as `lamp_eval.download` leaves them. A
    question is a user of its own. Where the file names users, the questions of a user with the same
    profile belong together.

    Args:
        task: the task.
        data: `dir`, `kind`, `split` and `task_users` say which files.
        select: chooses users to evaluate by their ids and numbers of records.

    Raises:
        UserError: a file is missing or holds something else; with all problems found in it.
    """
    if data.dir is None:
        raise UserError(
            expected="a directory with the benchmark's files",
            found="no data.dir",
            where="option data.dir",
            fix="give data.dir=…; python -m lamp_eval.download lamp fetches the files",
        )
    notes: list[str] = []
    evaluated = _Split(task, _folder(task, data, data.split), notes)
    chosen = select([p.id for p in evaluated.people], [p.n_records for p in evaluated.people])
    users = evaluated.users([evaluated.people[i] for i in chosen])
    files = dict(evaluated.files)
    task_users = None
    wanted = data.task_users == "others" or (
        data.task_users == "auto" and _folder(task, data, "train").is_dir()
    )
    if wanted:
        train = evaluated
        if data.split != "train":
            train = _Split(task, _folder(task, data, "train"), notes)
            files |= train.files
        served = {evaluated.people[i].owner for i in chosen}
        others = [person for person in train.people if person.owner not in served]
        if data.split != "train" and len(others) < len(train.people):
            notes.append(
                f"{len(train.people) - len(others)} users of the training split are evaluated, and "
                "are not shown to the task adapter"
            )
        task_users = train.users(sorted(others, key=lambda person: person.id))
    return Found(users, task_users, files, notes)


def _folder(task: Task, data: DataConfig, split: str) -> Path:
    """Where a split should be; where it is, if it is somewhere."""
    root = Path(data.dir or "") / ("time" if data.kind == "time" else "")
    names = (task.lamp_id, *_OTHER_FOLDERS.get(task.lamp_id, ()))
    folders: list[Path] = [root / name / split for name in names]
    return next((folder for folder in folders if folder.is_dir()), folders[0])


class _Split:
    """Questions and golds of one split, and whose they are."""

    def __init__(self, task: Task, folder: Path, notes: list[str]) -> None:
        self.task = task
        questions = folder / f"{folder.name}_questions.json"
        outputs = folder / f"{folder.name}_outputs.json"
        missing = [path for path in (questions, outputs) if not path.is_file()]
        raise_if_any(
            [
                UserError(
                    expected="the benchmark's file",
                    found="no such file",
                    where=str(path),
                    fix=f"python -m lamp_eval.download lamp --task {task.lamp_id} --split "
                    f"{folder.name}, or check data.dir, data.kind and data.split",
                )
                for path in missing
            ]
        )
        self.files = {str(path): _sha256(path) for path in (questions, outputs)}
        self.golds = outputs_of(read_outputs(outputs), task).by_id
        self.table = _table(task, questions, self.files[str(questions)])
        ids = self._column("id")
        if not ids:
            raise UserError(
                expected=_QUESTIONS,
                found="an empty list",
                where=str(questions),
                fix="download or write the file again",
            )
        raise_if_any(
            [
                UserError(
                    expected=f"an output for each question, in {outputs}",
                    found=f"none for {query_id!r}",
                    where=f"{questions}, question {query_id!r}",
                    fix="download both files again; ids must match letter by letter",
                )
                for query_id in ids
                if query_id not in self.golds
            ]
        )
        if len(self.golds) > len(ids):
            notes.append(
                f"{outputs}: {len(self.golds) - len(ids)} of {len(self.golds)} outputs belong to "
                "no question"
            )
        queries = (
            Query(query_id, text, self.golds[query_id])
            for query_id, text in zip(ids, self._column("input"), strict=True)
        )
        notes += query_notes(queries, task, str(questions))
        self.people = self._people(ids, notes, str(questions))

    def users(self, people: Sequence[_Person]) -> ArrowUsers:
        return ArrowUsers(self.table, people, self.golds, lambda user: user)

    def _column(self, name: str) -> list[Any]:
        column: list[Any] = self.table.data.column(name).to_pylist()
        return column

    def _people(self, ids: Sequence[str], notes: list[str], where: str) -> list[_Person]:
        owners = [o or i for o, i in zip(self._column("user_id"), ids, strict=True)]
        lengths, profiles = self._column("n_records"), self._column("profile_hash")
        rows_of: dict[tuple[str, str], list[int]] = defaultdict(list)
        for row, key in enumerate(zip(owners, profiles, strict=True)):
            rows_of[key].append(row)
        n_profiles: dict[str, int] = defaultdict(int)
        for owner, _ in rows_of:
            n_profiles[owner] += 1
        several = sum(n > 1 for n in n_profiles.values())
        if several:
            notes.append(
                f"{where}: {several} users have several profiles; each profile counts as a user of "
                "its own"
            )
        return [
            _Person(
                owner if n_profiles[owner] == 1 else f"{owner}, question {ids[rows[0]]}",
                owner,
                tuple(rows),
                lengths[rows[0]],
            )
            for (owner, _), rows in rows_of.items()
        ]


# The table


def _table(task: Task, path: Path, sha256: str) -> Any:
    """The questions as a memory-mapped `datasets.Dataset`, read into the cache if need be."""
    import datasets

    folder = cache_dir() / "data"
    file = folder / f"{task.lamp_id}-{sha256[:32]}-{TABLE_VERSION}.arrow"
    if not file.is_file():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            needed, free = path.stat().st_size, shutil.disk_usage(folder).free
            if free < needed:
                raise UserError(
                    expected=f"about {needed / 1e9:.1f} GB of free space for the table of {path}",
                    found=f"{free / 1e9:.1f} GB",
                    where=str(folder),
                    fix="free some space, or set XDG_CACHE_HOME to another disk",
                )
            handle, partial = tempfile.mkstemp(prefix=".partial-", dir=folder)
            os.close(handle)
            try:
                _write_table(task, path, Path(partial))
                os.replace(partial, file)
            finally:
                Path(partial).unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                expected="a folder to write the table of questions into",
                found=error.strerror or str(error),
                where=str(folder),
                fix="free some space, or set XDG_CACHE_HOME to another disk",
            ) from error
    return datasets.Dataset.from_file(str(file))


def _write_table(task: Task, path: Path, target: Path) -> None:
    import pyarrow as pa

    text = pa.string()
    profile = pa.struct([(name, text) for name in (*task.record_fields, "date")])
    schema = pa.schema(
        {
            "id": text,
            "user_id": text,
            "input": text,
            "profile_hash": text,
            "n_records": pa.int32(),
            "profile": pa.list_(profile),
        }
    )
    rows = _rows(task, path)
    with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        while batch := list(islice(rows, _ROWS_PER_BATCH)):
            try:
                writer.write_batch(pa.RecordBatch.from_pylist(batch, schema))
            except UnicodeEncodeError as error:  # half of a surrogate pair, as JSON may have it
                odd = next(row["id"] for row in batch if not _is_text(row))
                raise _wrong(error.object, "valid Unicode", f"{path}, question {odd!r}") from error


def _rows(task: Task, path: Path) -> Iterator[dict[str, Any]]:
    """The table's rows, checked; all problems are raised at the end, or once there are many."""
    problems: list[UserError] = []
    ids: set[str] = set()
    for position, entry in enumerate(stream_objects(path, _QUESTIONS)):
        query_id = entry.get("id")
        named = isinstance(query_id, str) and query_id != ""
        where = f"{path}, question {query_id!r}" if named else f"{path}, entry {position}"
        if not named:
            problems.append(_wrong(query_id, "a string, not empty", f"{where}, field 'id'"))
        elif query_id in ids:
            problems.append(_wrong(query_id, "each id once", f"{where}, field 'id'"))
        ids.add(str(query_id))
        user_id, text, profile = entry.get("user_id"), entry.get("input"), entry.get("profile")
        if isinstance(user_id, int) and not isinstance(user_id, bool):
            user_id = str(user_id)
        if user_id is not None and (not isinstance(user_id, str) or not user_id):
            problems.append(_wrong(user_id, "a string, not empty", f"{where}, field 'user_id'"))
        if not isinstance(text, str):
            problems.append(_wrong(text, "a string", f"{where}, field 'input'"))
        if not isinstance(profile, list):
            problems.append(_wrong(profile, "a list of records", f"{where}, field 'profile'"))
            profile = []
        records = [_record(task, item, f"{where}, record {i}", problems)
                   for i, item in enumerate(profile)]  # fmt: skip
        if all(record["date"] for record in records):
            records.sort(key=lambda record: record["date"])
        if len(problems) > _MAX_PROBLEMS:
            break
        if not problems:
            yield {
                "id": query_id,
                "user_id": user_id,
                "input": text,
                "profile_hash": hashlib.sha256(repr(records).encode()).hexdigest()[:32],
                "n_records": len(records),
                "profile": records,
            }
    raise_if_any(problems)


def _record(task: Task, item: Any, where: str, problems: list[UserError]) -> dict[str, str]:
    """The fields of a record that the task knows; text and answer must be there, if it has any.

    Records of citation identification name no paper cited.
    """
    item = item if isinstance(item, dict) else {}
    record = {}
    for name in (*task.record_fields, "date"):
        value = item.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        needed = name == task.text_field or (name == task.gold_field and task.labelled_records)
        if isinstance(value, str):
            record[name] = value
        elif value is not None or needed:
            problems.append(_wrong(value, "a string or an integer", f"{where}, field {name!r}"))
    return record | {"date": record.get("date", "")}


def _is_text(row: Mapping[str, Any]) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _wrong(found: Any, expected: str, where: str) -> UserError:
    return UserError(
        expected=expected,
        found="nothing" if found is None else f"{type(found).__name__} {found!r:.60}",
        where=where,
        fix="correct the field, or check that this is a file of the benchmark's questions",
    )


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error
