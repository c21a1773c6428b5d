"""The data card: what is in a corpus, and what in it could spoil a result."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from lamp_eval.data.corpus import Corpus
from lamp_eval.records import Query, User
from lamp_eval.tasks import Task


def data_card(task: Task, corpus: Corpus) -> dict[str, dict[str, Any]]:
    """Describes the users that a run would use.

    Args:
        task: the task.
        corpus: the evaluated users and those of the task adapter.

    Returns:
        By section (`size`, `answers`, `problems`) names and values: counts, shares in [0, 1], or
        texts. Problems count what may be harmless; each is explained where it is computed.
    """
    users = corpus.users
    queries = [query for user in users for query in user.queries]
    per_user = [len(user.queries) for user in users]
    size: dict[str, Any] = {
        "users": len(users),
        "users of the task adapter": f"{len(corpus.task_users)} ({corpus.task_users_origin})",
        "synthetic": "yes" if corpus.synthetic else "no",
        "records": sum(len(user.history) for user in users),
        "records without an answer, left out": corpus.n_records_left_out,
        "records of a user": _spread([len(user.history) for user in users]),
        "queries": len(queries),
        "queries of a user": _spread(per_user),
        "largest share of the queries": max(per_user) / len(queries),
    }
    if corpus.groups:
        size["groups of users with the same items"] = len(set(corpus.groups.values()))
    return {
        "size": size,
        "answers": _answers(task, users, queries),
        "problems": {
            "users without a history": sum(not user.history for user in users),
            "records that repeat an earlier one": sum(map(_n_repeated, users)),
            "queries that repeat an earlier one": sum(
                len(user.queries) - len({query.input for query in user.queries}) for user in users
            ),
            **_leaks(task, corpus),
        },
    }


def _answers(task: Task, users: Sequence[User], queries: Sequence[Query]) -> dict[str, Any]:
    """Labels with their shares among golds and records; of texts, their lengths."""
    # Records of citation identification may name no paper cited.
    of_records = [record.fields.get(task.gold_field, "") for u in users for record in u.history]
    of_queries = [query.gold for query in queries]
    if not task.labels:
        return {
            "words of a gold": _spread([len(gold.split()) for gold in of_queries]),
            "words of a record's answer": _spread([len(text.split()) for text in of_records]),
        }
    golds, records = Counter(of_queries), Counter(of_records)
    n_records = len(of_records) if task.labelled_records else 0
    shares = {}
    for label in task.labels:
        share = f"{golds[label] / len(queries):.3f} of the golds"
        shares[label] = share + (
            f", {records[label] / n_records:.3f} of records" if n_records else ""
        )
    return shares


def _leaks(task: Task, corpus: Corpus) -> dict[str, int]:
    """How many queries could be answered by looking them up.

    A query's text may stand in a record of its user, or belong to the users who train the task
    adapter; a free-text gold may stand in a record of its user, word for word. A text in another
    evaluated user's record is known to that user's adapter, which may be a donor's. Users who are
    asked the same are not independent of each other, as intervals over users take them to be.
    """
    of_others = set()
    if corpus.task_users_origin == "others":
        for user in corpus.task_users:
            of_others |= {record.fields[task.text_field].strip() for record in user.history}
            of_others |= {_text(task, query) for query in user.queries}

    def in_own_record(user: User, wanted: Callable[[Query], str]) -> int:
        texts = [value for record in user.history for value in record.fields.values()]
        return sum(any(wanted(query) in text for text in texts) for query in user.queries)

    asked, recorded = defaultdict(set), defaultdict(set)  # user ids by text
    for user in corpus.users:
        for query in user.queries:
            asked[_text(task, query)].add(user.id)
        for record in user.history:
            recorded[record.fields[task.text_field].strip()].add(user.id)

    def n_shared(by_text: Mapping[str, set[str]]) -> int:
        return sum(
            not by_text.get(_text(task, query), set()) <= {user.id}
            for user in corpus.users
            for query in user.queries
        )

    found = {
        "queries whose text is in a record of their user": sum(
            in_own_record(user, lambda query: _text(task, query)) for user in corpus.users
        ),
        "queries whose text the task adapter's users have": sum(
            _text(task, query) in of_others for user in corpus.users for query in user.queries
        ),
        "queries whose text is in a record of another user": n_shared(recorded),
        "queries whose text another user is asked as well": n_shared(asked),
    }
    if not task.labels:
        found["golds that are in a record of their user"] = sum(
            in_own_record(user, lambda query: query.gold.strip()) for user in corpus.users
        )
    return found


def _text(task: Task, query: Query) -> str:
    texts = task.oppu.texts(query.input)
    return (texts[0] if texts else query.input).strip()


def _n_repeated(user: User) -> int:
    return len(user.history) - len({tuple(sorted(r.fields.items())) for r in user.history})


def _spread(numbers: Sequence[int]) -> str:
    if not numbers:
        return "none"
    return f"{min(numbers)} … {max(numbers)}, median {median(numbers):g}, mean {fmean(numbers):.1f}"
