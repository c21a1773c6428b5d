"""A corpus: the users to evaluate, and the users the task adapter is trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from lamp_eval.config import DataConfig
from lamp_eval.data.checks import check_users
from lamp_eval.data.profiles import read_profiles
from lamp_eval.data.questions import ArrowUsers
from lamp_eval.errors import UserError
from lamp_eval.records import User
from lamp_eval.seeds import user_seed
from lamp_eval.tasks import Task


@dataclass(frozen=True)
class Corpus:
    """What a run evaluates on.

    Attributes:
        users: the users to evaluate, in the order of the file.
        task_users: the users whose examples train the task adapter, in the order of their ids. Both
            of `data=lamp` are made anew each time they are asked for.
        task_users_origin: `others` if those are different people; `evaluated` if they are the
            evaluated users themselves, of whom only the histories are used, never a query.
        synthetic: True if the texts were generated.
        n_records_left_out: records of all users that have no answer and teach nothing.
        checksum: SHA-256 over all users, histories, queries and golds that the run uses.
        files: SHA-256 of each file read, by path.
        notes: what is odd in the data.
        profiles: a text about each user, by user id; empty if there are none.
        groups: who saw the same items, as a group's name by user id; a donor is then of the user's
            own group, or what the items have in common would pass for something personal. Empty:
            anyone may be a donor.
    """

    users: Sequence[User]
    task_users: Sequence[User]
    task_users_origin: str
    synthetic: bool
    n_records_left_out: int
    checksum: str
    files: dict[str, str]
    notes: tuple[str, ...] = ()
    profiles: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)


def load_corpus(task: Task, data: DataConfig) -> Corpus:
    """Reads or generates the users of a run, checks them, and keeps the newest of each.

    Raises:
        UserError: with all problems found in the input.
    """
    from lamp_eval.data import movie_raters, oppu, questions, sample

    notes: list[str] = []
    groups: dict[str, str] = {}
    n_left_out = 0
    users: Sequence[User]
    task_users: Sequence[User]
    files: dict[str, str] = {}
    if data.source == "lamp":  # whose users are checked as they are read
        found = questions.read(task, data, partial(_selected, data=data))
        users = found.users.each(partial(_newest, data=data))
        task_users, files = found.task_users or (), found.files
        notes += found.notes
    else:
        if data.source == "sample":
            all_users, task_users = sample.generate(task, data)
        elif data.source == "movie_raters":
            all_users, task_users, files = movie_raters.read(task, data)
            groups = {user.id: movie_raters.block_of(user.id) for user in all_users}
        else:
            all_users, task_users, files = oppu.read(task, data)
        ids, lengths = [u.id for u in all_users], [len(u.history) for u in all_users]
        chosen = tuple(all_users[i] for i in _selected(ids, lengths, data))
        answered, n_left_out = _answered(chosen, task)
        users = tuple(_newest(user, data) for user in answered)
        sources = [*files] or [f"data={data.source}"]  # the evaluated users' file first
        notes += check_users(users, task, sources[0])
        if task_users:
            task_users, n_more = _answered(task_users, task)
            n_left_out += n_more
            notes += check_users(task_users, task, sources[min(1, len(sources) - 1)])
            # Users in another order in a file are the same users.
            task_users = tuple(sorted(task_users, key=lambda user: user.id))
    origin = "others"
    if not task_users or data.task_users == "evaluated":
        ids = user_ids(users)
        origin, task_users = (
            "evaluated",
            _picked(users, sorted(range(len(ids)), key=ids.__getitem__)),
        )
    if data.max_task_users is not None and origin == "others":
        kept = sorted(_random_order(user_ids(task_users), data.seed)[: data.max_task_users])
        task_users = _picked(task_users, kept)
    profiles: dict[str, str] = {}
    if data.profiles is not None:
        profiles, files[data.profiles] = read_profiles(Path(data.profiles))
        _check_profiles(profiles, [*user_ids(users), *user_ids(task_users)], data.profiles)
    return Corpus(
        users,
        task_users,
        origin,
        synthetic=data.source == "sample",
        n_records_left_out=n_left_out,
        notes=tuple(notes),
        profiles=profiles,
        checksum=_checksum(users, task_users, profiles, data, files),
        files=files,
        groups=groups,
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


def user_ids(users: Sequence[User]) -> list[str]:
    """The ids, without making users that are made when they are asked for."""
    return users.ids if isinstance(users, ArrowUsers) else [user.id for user in users]


def _picked(users: Sequence[User], positions: Sequence[int]) -> Sequence[User]:
    if isinstance(users, ArrowUsers):
        return users.pick(positions)
    return tuple(users[i] for i in positions)


def _selected(ids: Sequence[str], n_records: Sequence[int], data: DataConfig) -> list[int]:
    """Positions of the users to evaluate, in the order of the file."""
    order = list(range(len(ids)))
    if data.select == "longest":
        order.sort(key=lambda i: (-n_records[i], ids[i]))
    elif data.select == "random":
        order = _random_order(ids, data.seed)
    return sorted(order[: data.max_users])


def _random_order(ids: Sequence[str], seed: int) -> list[int]:
    """Positions in an order that depends on seed and ids alone."""
    return sorted(range(len(ids)), key=lambda i: (user_seed(seed, ids[i]), ids[i]))


def _check_profiles(profiles: Mapping[str, str], ids: Sequence[str], where: str) -> None:
    missing = [user_id for user_id in ids if user_id not in profiles]
    if missing:
        shown = ", ".join(map(repr, missing[:10])) + (", …" if len(missing) > 10 else "")
        raise UserError(
            expected="a text for each user, those of the task adapter included",
            found=f"none for {len(missing)} of {len(ids)}: {shown}",
            where=where,
            fix="add them, or set data.task_users=evaluated",
        )


def _checksum(
    users: Sequence[User],
    task_users: Sequence[User],
    profiles: Mapping[str, str],
    data: DataConfig,
    files: Mapping[str, str],
) -> str:
    digest = hashlib.sha256()
    for group in (users, task_users):
        if isinstance(group, ArrowUsers):  # files have checksums of their own
            limits = data.max_records, data.max_queries
            digest.update(json.dumps([group.ids, limits, sorted(files.values())]).encode())
            continue
        for user in group:
            row = [
                user.id,
                [dict(record.fields) for record in user.history],
                [[query.id, query.input, query.gold] for query in user.queries],
            ]
            digest.update(json.dumps(row, sort_keys=True).encode())
        digest.update(b"\n")
    if profiles:
        digest.update(json.dumps(dict(profiles), sort_keys=True).encode())
    return digest.hexdigest()
