"""A corpus: the users to evaluate, and the users the task adapter is trained on."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lamp_eval.config import DataConfig
from lamp_eval.errors import UserError, raise_if_any
from lamp_eval.records import User
from lamp_eval.tasks import Task


@dataclass(frozen=True)
class Corpus:
    """What a run evaluates on.

    Attributes:
        users: the users to evaluate, in the order of the file.
        task_users: the users whose examples train the task adapter.
        task_users_origin: `others` if those are different people; `evaluated` if they are the
            evaluated users themselves, of whom only the histories are used, never a query.
        synthetic: True if the texts were generated.
        n_records_left_out: records of all users that have no answer and teach nothing.
        checksum: SHA-256 over all users, histories, queries and golds that the run uses.
        files: SHA-256 of each file read, by path.
    """

    users: tuple[User, ...]
    task_users: tuple[User, ...]
    task_users_origin: str
    synthetic: bool
    n_records_left_out: int
    checksum: str
    files: dict[str, str]


def load_corpus(task: Task, data: DataConfig) -> Corpus:
    """Reads or generates the users of a run, checks them, and keeps the newest of each.

    Raises:
        UserError: with all problems found in the input.
    """
    from lamp_eval.data import oppu, sample

    if data.source == "sample":
        users, task_users = sample.generate(task, data)
        files: dict[str, str] = {}
    else:
        users, task_users, files = oppu.read(task, data)
    users, n_left_out = _answered(users[: data.max_users], task)
    users = tuple(_newest(user, data) for user in users)
    sources = [*files, "data=sample"]  # the evaluated users' file first
    check_users(users, task, sources[0])
    if task_users and data.task_users != "evaluated":
        origin = "others"
        task_users, n_more = _answered(task_users, task)
        n_left_out += n_more
        check_users(task_users, task, sources[min(1, len(sources) - 1)])
    else:
        origin, task_users = "evaluated", users
    return Corpus(
        users,
        task_users,
        origin,
        synthetic=data.source == "sample",
        n_records_left_out=n_left_out,
        checksum=_checksum(users, task_users),
        files=files,
    )


def check_users(users: Sequence[User], task: Task, source: str, *, golds: bool = True) -> None:
    """Raises `UserError` with every problem that would spoil a result.

    An empty history is not a problem: such users are counted and served by the task arm.

    Args:
        users: in any order.
        task: whose labels the golds must be.
        source: the file, named in the messages.
        golds: whether queries need one.
    """
    problems = [
        UserError(
            expected="each user once",
            found=f"{count} users with this id",
            where=f"{source}, user {user_id!r}",
            fix="merge them, or give them different ids",
        )
        for user_id, count in Counter(user.id for user in users).items()
        if count > 1
    ]
    if not users:
        problems.append(
            UserError(
                expected="at least one user",
                found="none",
                where=source,
                fix="check data.dir and data.max_users",
            )
        )
    query_owner: dict[str, str] = {}
    for user in users:
        if not user.queries:
            problems.append(
                UserError(
                    expected="at least one query",
                    found="none",
                    where=f"{source}, user {user.id!r}, field 'query'",
                    fix="add queries or remove the user",
                )
            )
        for query in user.queries:
            where = f"{source}, user {user.id!r}, query {query.id!r}"
            if query.id in query_owner:
                problems.append(
                    UserError(
                        expected="each query id once",
                        found=f"it also belongs to user {query_owner[query.id]!r}",
                        where=f"{where}, field 'id'",
                        fix="make the ids unique",
                    )
                )
            query_owner[query.id] = user.id
            known = query.gold in task.labels if task.labels else bool(query.gold.strip())
            if golds and not known:
                problems.append(_bad_answer(query.gold, task.labels, f"{where}, field 'gold'"))
            if task.oppu.texts(query.input) is None:
                problems.append(
                    UserError(
                        expected=f"a text of the form {task.oppu.input_pattern}",
                        found=repr(query.input[:80]),
                        where=f"{where}, field 'input'",
                        fix=f"check that this is a file of the task {task.name}",
                    )
                )
        labels = task.labels if task.labelled_records else ()
        for position, record in enumerate(user.history):
            lacking = [
                name
                for name in (task.text_field, task.gold_field)
                if not isinstance(record.fields.get(name), str)
            ]
            if lacking:
                problems.append(
                    UserError(
                        expected=f"a string in each of {task.text_field}, {task.gold_field}",
                        found=f"none in {', '.join(lacking)}",
                        where=f"{source}, user {user.id!r}, record {position}",
                        fix="add the field",
                    )
                )
                continue
            answer = record.fields[task.gold_field]
            if labels and answer not in labels:
                where = f"{source}, user {user.id!r}, record {position}, field {task.gold_field!r}"
                problems.append(_bad_answer(answer, labels, where))
    raise_if_any(problems)


def _bad_answer(found: str, labels: Sequence[str], where: str) -> UserError:
    return UserError(
        expected=f"one of {', '.join(labels)}" if labels else "a text",
        found=repr(found),
        where=where,
        fix="correct it, or choose the task the file belongs to",
    )


def _answered(users: Sequence[User], task: Task) -> tuple[tuple[User, ...], int]:
    """The users with only the records that have an answer, and how many have none."""
    kept = tuple(
        replace(user, history=tuple(r for r in user.history if r.fields[task.gold_field].strip()))
        for user in users
    )
    n_kept = sum(len(user.history) for user in kept)
    return kept, sum(len(user.history) for user in users) - n_kept


def _newest(user: User, data: DataConfig) -> User:
    """The user with at most `max_records` newest records and `max_queries` newest queries."""
    history, queries = user.history, user.queries
    if data.max_records is not None:
        history = history[-data.max_records :] if data.max_records else ()
    if data.max_queries is not None:
        queries = queries[-data.max_queries :]
    return replace(user, history=history, queries=queries)


def _checksum(*groups: Iterable[User]) -> str:
    digest = hashlib.sha256()
    for group in groups:
        for user in group:
            row = [
                user.id,
                [dict(record.fields) for record in user.history],
                [[query.id, query.input, query.gold] for query in user.queries],
            ]
            digest.update(json.dumps(row, sort_keys=True).encode())
        digest.update(b"\n")
    return digest.hexdigest()
