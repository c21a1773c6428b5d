"""What must be right about users before anything is computed on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from lamp_eval.errors import UserError, raise_if_any
from lamp_eval.records import Query, User
from lamp_eval.tasks import Task

# The published files hold a few odd entries: one movie input lacks its instruction. More of them
# than one in so many, and the file belongs to another task.
ODD_ONE_IN = 100


def check_users(users: Sequence[User], task: Task, source: str, *, golds: bool = True) -> list[str]:
    """Checks what would spoil a result.

    An empty history is not a problem: such users are counted and served by the task arm.

    Args:
        users: in any order.
        task: whose labels the golds must be.
        source: the file, named in the messages.
        golds: whether queries need one.

    Returns:
        Notes on what is odd, but rare enough to be so in the published files.

    Raises:
        UserError: with every problem.
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
            if query.id in query_owner:
                problems.append(
                    UserError(
                        expected="each query id once",
                        found=f"it also belongs to user {query_owner[query.id]!r}",
                        where=f"{source}, user {user.id!r}, query {query.id!r}, field 'id'",
                        fix="make the ids unique",
                    )
                )
            query_owner[query.id] = user.id
    notes = []
    try:
        queries = (query for user in users for query in user.queries)
        notes += query_notes(queries, task, source, query_owner, golds=golds)
    except UserError as error:
        problems.append(error)
    bad_records, n_records = [], 0
    needed = dict.fromkeys((task.text_field, *([task.gold_field] * task.labelled_records)))
    for user in users:
        for position, record in enumerate(user.history):
            n_records += 1
            where = f"{source}, user {user.id!r}, record {position}"
            lacking = [name for name in needed if not isinstance(record.fields.get(name), str)]
            if lacking:
                problems.append(
                    UserError(
                        expected=f"a string in each of {', '.join(needed)}",
                        found=f"none in {', '.join(lacking)}",
                        where=where,
                        fix="add the field",
                    )
                )
            elif task.labels and task.labelled_records:
                answer = record.fields[task.gold_field]
                if answer not in task.labels:
                    where += f", field {task.gold_field!r}"
                    bad_records.append(_bad_answer(answer, task.labels, where))
    if _is_rare(len(bad_records), n_records):
        notes.append(f"{source}: {len(bad_records)} of {n_records} records have no label of the "
                     f"task, such as {bad_records[0].found}")  # fmt: skip
    else:
        problems += bad_records
    raise_if_any(problems)
    return notes


def query_notes(
    queries: Iterable[Query],
    task: Task,
    source: str,
    owners: dict[str, str] | None = None,
    *,
    golds: bool = True,
) -> list[str]:
    """Checks golds and the form of inputs.

    Args:
        queries: of any users.
        task: whose labels the golds must be.
        source: the file, named in the messages.
        owners: user id by query id, named in the messages.
        golds: whether queries need one.

    Returns:
        Notes on what is odd, but rare enough to be so in the published files.

    Raises:
        UserError: with every problem.
    """
    problems, odd, n_queries = [], [], 0
    for query in queries:
        n_queries += 1
        of_user = f", user {owners[query.id]!r}" if owners else ""
        where = f"{source}{of_user}, query {query.id!r}"
        known = query.gold in task.labels if task.labels else bool(query.gold.strip())
        if golds and not known:
            problems.append(_bad_answer(query.gold, task.labels, f"{where}, field 'gold'"))
        if task.oppu.texts(query.input) is None:
            odd.append(
                UserError(
                    expected=f"a text of the form {task.oppu.input_pattern}",
                    found=repr(query.input[:80]),
                    where=f"{where}, field 'input'",
                    fix=f"check that this is a file of the task {task.name}",
                )
            )
        listed = task.listed_labels(query.input)
        if listed is not None and set(listed) != set(task.labels):
            problems.append(
                UserError(
                    expected=f"the labels {', '.join(task.labels)}, in any order",
                    found=", ".join(listed),
                    where=f"{where}, field 'input'",
                    fix=f"check that this is a file of the task {task.name}: the benchmark has "
                    "renamed tasks",
                )
            )
    notes = []
    if _is_rare(len(odd), n_queries):
        where = odd[0].where.removeprefix(source + ", ").removesuffix(", field 'input'")
        notes.append(
            f"{source}: {len(odd)} of {n_queries} inputs are not of the usual form, such as {where}"
        )
    else:
        problems += odd
    raise_if_any(problems)
    return notes


def _is_rare(n_odd: int, n: int) -> bool:
    return 0 < n_odd * ODD_ONE_IN <= n


def _bad_answer(found: str, labels: Sequence[str], where: str) -> UserError:
    return UserError(
        expected=f"one of {', '.join(labels)}" if labels else "a text",
        found=repr(found),
        where=where,
        fix="correct it, or choose the task the file belongs to",
    )
