"""A prompt within its length: what is cut, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lamp_eval.errors import UserError


class Fitted(NamedTuple):
    """What is left of the retrieved documents and of the text, its tokens, and the words cut."""

    documents: str
    text: str
    ids: list[int]
    n_cut_words: int


def fit(
    ids_of: Callable[[str, str], list[int]],
    documents: str,
    text: str,
    *,
    max_tokens: int,
    where: str,
) -> Fitted:
    """A prompt in at most `max_tokens` tokens.

    Words are cut from the end of the retrieved documents first, then from the middle of the item's
    text. The instruction is never cut, nor is the answer, for which the caller keeps room.

    Args:
        ids_of: the prompt's token ids, from the documents ("": none) and the text.
        documents: the retrieved ones, joined.
        text: the item's.
        max_tokens: the limit.
        where: names the prompt in the message.

    Raises:
        UserError: the instruction alone is longer.
    """

    def fits(documents: str, text: str) -> bool:
        return len(ids_of(documents, text)) <= max_tokens

    ids = ids_of(documents, text)
    if len(ids) <= max_tokens:
        return Fitted(documents, text, ids, 0)
    shown = documents.split(" ")
    n_kept = _largest(len(shown), lambda n: fits(" ".join(shown[:n]), text))
    if n_kept is not None:
        documents = " ".join(shown[:n_kept])
        return Fitted(documents, text, ids_of(documents, text), len(shown) - n_kept)
    words = text.split(" ")

    def without_middle(n: int) -> str:
        return " ".join(words[: (n + 1) // 2] + words[len(words) - n // 2 :])

    n_kept = _largest(len(words), lambda n: fits("", without_middle(n)))
    if n_kept is None:
        raise UserError(
            expected=f"an instruction of at most {max_tokens} tokens",
            found=f"{len(ids_of('', ''))} tokens without any text",
            where=f"{where}, option protocol.max_tokens",
            fix="raise protocol.max_tokens",
        )
    n_documents = len(shown) if documents else 0
    text = without_middle(n_kept)
    return Fitted("", text, ids_of("", text), n_documents + len(words) - n_kept)


def _largest(upper: int, ok: Callable[[int], bool]) -> int | None:
    """The largest n in 0…upper with `ok(n)`, which holds up to some n; None if for none."""
    if not ok(0):
        return None
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if ok(middle) else (low, middle - 1)
    return low
