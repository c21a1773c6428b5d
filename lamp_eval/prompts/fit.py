"""Prompts within their length: what is cut, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lamp_eval.errors import UserError

Encode = Callable[[list[str]], list[list[int]]]


class Prompt(NamedTuple):
    """A prompt that may have to be cut.

    Args:
        render: its text, from the documents ("": none) and the item's text.
        documents: the retrieved ones, joined.
        text: the item's.
        max_tokens: its limit.
        where: names it in a message.
    """

    render: Callable[[str, str], str]
    documents: str
    text: str
    max_tokens: int
    where: str


class Fitted(NamedTuple):
    """The prompt's text as cut, its tokens, and how many words were cut."""

    text: str
    ids: list[int]
    n_cut_words: int


def encode(tokenizer: Any, texts: list[str], *, special: bool = False) -> list[list[int]]:
    """Token ids of each text, computed in parallel; `special`: with the tokenizer's own marks."""
    if not texts:
        return []
    options = {"add_special_tokens": special, "return_attention_mask": False}
    ids: list[list[int]] = tokenizer(texts, **options)["input_ids"]
    return ids


def fit(prompts: Sequence[Prompt], encode: Encode) -> list[Fitted]:
    """Each prompt in at most its `max_tokens` tokens.

    Words are cut from the end of the retrieved documents first, then from the middle of the item's
    text. The instruction is never cut, nor is the answer, for which the caller keeps room.

    Args:
        prompts: any number of them; those that need no cut are encoded in one call.
        encode: token ids of many texts, which a tokenizer computes in parallel.

    Raises:
        UserError: an instruction alone is longer.
    """
    texts = [prompt.render(prompt.documents, prompt.text) for prompt in prompts]
    return [
        Fitted(text, ids, 0) if len(ids) <= prompt.max_tokens else _cut(prompt, encode)
        for prompt, text, ids in zip(prompts, texts, encode(texts), strict=True)
    ]


def _cut(prompt: Prompt, encode: Encode) -> Fitted:
    def fitted(documents: str, text: str, n_cut: int) -> Fitted:
        whole = prompt.render(documents, text)
        return Fitted(whole, encode([whole])[0], n_cut)

    def fits(documents: str, text: str) -> bool:
        return len(fitted(documents, text, 0).ids) <= prompt.max_tokens

    shown = prompt.documents.split(" ")
    n_kept = _largest(len(shown), lambda n: fits(" ".join(shown[:n]), prompt.text))
    if n_kept is not None:
        return fitted(" ".join(shown[:n_kept]), prompt.text, len(shown) - n_kept)
    words = prompt.text.split(" ")

    def without_middle(n: int) -> str:
        return " ".join(words[: (n + 1) // 2] + words[len(words) - n // 2 :])

    n_kept = _largest(len(words), lambda n: fits("", without_middle(n)))
    if n_kept is None:
        raise UserError(
            expected=f"an instruction of at most {prompt.max_tokens} tokens",
            found=f"{len(fitted('', '', 0).ids)} tokens without any text",
            where=f"{prompt.where}, option protocol.max_tokens",
            fix="raise protocol.max_tokens",
        )
    n_documents = len(shown) if prompt.documents else 0
    return fitted("", without_middle(n_kept), n_documents + len(words) - n_kept)


def _largest(upper: int, ok: Callable[[int], bool]) -> int | None:
    """The largest n in 0…upper with `ok(n)`, which holds up to some n; None if for none."""
    if not ok(0):
        return None
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if ok(middle) else (low, middle - 1)
    return low
