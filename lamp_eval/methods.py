"""Arms of one's own: functions that installed packages register under `lamp_eval.arms`.

In the package's pyproject.toml:

    [project.entry-points."lamp_eval.arms"]
    majority_label = "my_arms:majority_label"
"""

from __future__ import annotations

import re
import textwrap
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from importlib import metadata

from lamp_eval.errors import UserError
from lamp_eval.records import Record, Request, User
from lamp_eval.tasks import Task

GROUP = "lamp_eval.arms"
# Answers every request of all users, one string each, in their order.
Method = Callable[[Task, Sequence[User], Sequence[Request]], Sequence[str]]

# An arm's name is a file's name in `predictions/` and `submissions/`, where two are taken.
_NAME, _TAKEN = re.compile(r"[a-z][a-z0-9_]*"), ("golds", "users")


def registered() -> dict[str, list[metadata.EntryPoint]]:
    """The entry points of each registered name; none of their modules is imported."""
    found: dict[str, list[metadata.EntryPoint]] = {}
    for entry_point in metadata.entry_points(group=GROUP):
        found.setdefault(entry_point.name, []).append(entry_point)
    return found


def name_problems(name: str, arms: Collection[str]) -> list[UserError]:
    """What keeps a registered name from being an arm; nothing if nobody registered it.

    Args:
        name: the arm's.
        arms: the names of the arms that are not registered.
    """
    entry_points = registered().get(name, [])
    where = f"arm {name}, registered as {' and as '.join(map(_described, entry_points))}"

    def problem(expected: str, found: str) -> UserError:
        fix = "rename the entry point, or uninstall its package"
        return UserError(expected=expected, found=found, where=where, fix=fix)

    problems = []
    if entry_points and (name in arms or name in _TAKEN):
        problems.append(problem(f"a name other than {', '.join((*arms, *_TAKEN))}", repr(name)))
    elif entry_points and not _NAME.fullmatch(name):
        expected = "a name of a–z, 0–9 and _, with a letter first"
        problems.append(problem(expected, repr(name)))
    if len(entry_points) > 1:
        problems.append(problem("one function with this name", f"{len(entry_points)} of them"))
    return problems


def described(name: str) -> str:
    """The function behind a registered arm, e.g. `my_arms:majority_label (my-arms 0.1)`."""
    return _described(registered()[name][0])


def load(name: str) -> Method:
    """Imports the function behind a registered arm.

    Raises:
        UserError: it cannot be imported, with the traceback; or it is no function.
    """
    where = f"arm {name}, {described(name)}"
    try:
        method: Method = registered()[name][0].load()
    except (Exception, SystemExit) as error:
        raise UserError(
            expected="a module that can be imported, with the function in it",
            found=_shown(error),
            where=where,
            fix="correct the module or the entry point; of the latter, install the change",
        ) from error
    if not callable(method):
        raise UserError(
            expected="a function of a task, users and requests",
            found=f"{type(method).__name__} {method!r:.60}",
            where=where,
            fix="let the entry point name a function",
        )
    return method


def answers(
    name: str, method: Method, task: Task, users: Sequence[User], requests: Sequence[Request]
) -> list[str]:
    """Calls the function behind a registered arm, and checks what it returns.

    It gets copies that hold no gold, so neither can it look one up nor change what is scored.

    Args:
        name: the arm's.
        method: the function.
        task: the task.
        users: all users of the run, with their histories and queries.
        requests: of all users and queries.

    Returns:
        One answer for each request, in their order.

    Raises:
        UserError: the function raised an exception, whose traceback is in the message, or did not
            return one string for each request.
    """
    where = f"arm {name}, {described(name)}"
    expected = f"a list of {len(requests)} strings, one for each request in their order"
    fix = "correct the function; what the other arms have computed is kept"

    def problem(found: str) -> UserError:
        return UserError(expected=expected, found=found, where=where, fix=fix)

    try:
        outputs = method(
            task,
            tuple(_without_golds(user) for user in users),
            tuple(replace(request, gold="") for request in requests),
        )
    except (Exception, SystemExit) as error:
        raise problem(_shown(error)) from error
    if not isinstance(outputs, Sequence) or isinstance(outputs, str):
        raise problem(f"{type(outputs).__name__} {outputs!r:.60}")
    if len(outputs) != len(requests):
        raise problem(f"{len(outputs)} items")
    wrong = [i for i, o in enumerate(outputs) if not isinstance(o, str) or not _is_unicode(o)]
    if wrong:
        output, more = outputs[wrong[0]], f" ({len(wrong)} such items)" if len(wrong) > 1 else ""
        raise problem(f"{type(output).__name__} {output!r:.60} as item {wrong[0]}{more}")
    return [str(output) for output in outputs]


def _without_golds(user: User) -> User:
    return replace(
        user,
        history=tuple(Record(dict(record.fields), record.date) for record in user.history),
        queries=tuple(replace(query, gold="") for query in user.queries),
    )


def _is_unicode(text: str) -> bool:
    """Whether files can hold the text: half of a surrogate pair is no character."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _described(entry_point: metadata.EntryPoint) -> str:
    package = entry_point.dist
    of = f" ({package.name} {package.version})" if package else ""
    return f"{entry_point.value}{of}"


def _shown(error: BaseException) -> str:
    """The traceback from the called code on, indented for a `UserError`."""
    first = error.__traceback__.tb_next if error.__traceback__ else None
    lines = "".join(traceback.format_exception(type(error), error, first))
    return textwrap.indent(lines.rstrip(), " " * 4).lstrip()
