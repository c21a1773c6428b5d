"""The one exception for mistakes a user can mend: wrong input, wrong option, missing file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn


class UserError(Exception):
    """A mistake in the input, printed without a traceback; the process exits with code 2.

    Args:
        expected: what was expected.
        found: what was found instead.
        where: file, user id, record and field, or the option's name.
        fix: what to do about it.
    """

    def __init__(self, *, expected: str, found: str, where: str, fix: str) -> None:
        self.expected, self.found, self.where, self.fix = expected, found, where, fix
        super().__init__(str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """For the way from a child process: the arguments are keywords, which pickle leaves out."""
        return partial(type(self), **self._arguments()), (), self.__dict__

    def _arguments(self) -> dict[str, Any]:
        return {"expected": self.expected, "found": self.found, "where": self.where,
                "fix": self.fix}  # fmt: skip

    def __str__(self) -> str:
        return (
            f"in {self.where}\n"
            f"  expected: {self.expected}\n"
            f"  found:    {self.found}\n"
            f"  to do:    {self.fix}"
        )


class InputProblems(UserError):
    """All problems of one input, gathered and raised once.

    Args:
        problems: the problems, in the order in which they were met; not empty.
    """

    SHOWN = 20

    def __init__(self, problems: Sequence[UserError]) -> None:
        self.problems = list(problems)
        first = self.problems[0]
        super().__init__(
            expected=first.expected, found=first.found, where=first.where, fix=first.fix
        )

    def _arguments(self) -> dict[str, Any]:
        return {"problems": self.problems}

    def __str__(self) -> str:
        lines = [str(problem) for problem in self.problems[: self.SHOWN]]
        if len(self.problems) > self.SHOWN:
            lines.append(f"… and {len(self.problems) - self.SHOWN} more")
        return "\n".join(lines)


def raise_if_any(problems: Sequence[UserError]) -> None:
    """Raises `InputProblems` if there is at least one problem."""
    if problems:
        raise problems[0] if len(problems) == 1 else InputProblems(problems)


def fail(message: object) -> NoReturn:
    """Ends a command after a user's mistake: the message on stderr, exit code 2."""
    print(f"lamp_eval: error: {message}", file=sys.stderr)
    sys.exit(2)
