"""The records that flow through the pipeline; frozen, so no stage changes what another reads."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Record:
    """One past item of a user, e.g. `{"description": …, "tag": …}`; the task names the fields.

    `date` orders records as a string; "" if it is not known.
    """

    fields: Mapping[str, str]
    date: str = ""


@dataclass(frozen=True, slots=True)
class Query:
    """One question: `input` is the benchmark's own string, `gold` the right answer."""

    id: str
    input: str
    gold: str


@dataclass(frozen=True, slots=True)
class User:
    """One person: `history` oldest first, and the queries asked of the model on their behalf."""

    id: str
    history: tuple[Record, ...]
    queries: tuple[Query, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """A training example as token ids: `tokens[answer_start:]` is the answer and its EOS.

    Only `tokens[answer_start:]` is supervised; `0 < answer_start < len(tokens)`.
    """

    tokens: tuple[int, ...]
    answer_start: int

    @property
    def n_supervised_tokens(self) -> int:
        """Tokens that carry loss: the answer and the end-of-sequence token."""
        return len(self.tokens) - self.answer_start


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to answer: exact token ids, and whose query it is; `input` is the query's own."""

    user_id: str
    query_id: str
    prompt: tuple[int, ...]
    gold: str
    n_cut_words: int = 0
    input: str = ""

    @property
    def prompt_hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the prompt's token ids."""
        return hashlib.sha256(",".join(map(str, self.prompt)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What an arm answered to one query, and how it was scored."""

    arm: str
    user_id: str
    query_id: str
    prompt_hash: str
    output: str
    gold: str
    donor_id: str | None = None
    finished: bool = True  # False: cut off by the limit of new tokens
    scores: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)  # by rule set


def n_common_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Length of the prompts' common beginning; each prompt keeps at least one token of its own."""
    if not prompts:
        return 0
    shortest = min(len(prompt) for prompt in prompts)
    return min(len(os.path.commonprefix([list(prompt) for prompt in prompts])), shortest - 1)


def passes(examples: Sequence[Example], max_tokens: int) -> list[list[Example]]:
    """Examples in groups of at most `max_tokens` computed tokens, those of like length together.

    The prompts' common beginning counts once, the rest with its padding. An example that is longer
    is a group of its own.
    """
    n_common = n_common_tokens([example.tokens[: example.answer_start] for example in examples])
    lengths = [len(example.tokens) for example in examples]
    return [[examples[i] for i in rows] for rows in like_lengths(lengths, n_common, max_tokens)]


def like_lengths(lengths: Sequence[int], n_common: int, max_tokens: int) -> list[list[int]]:
    """Rows in groups of at most `max_tokens` tokens, padding included, the shortest rows first.

    Args:
        lengths: tokens of each row; at least one row.
        n_common: tokens at the beginning of all rows, which a group counts once.
        max_tokens: a row that is longer is a group of its own.
    """
    groups: list[list[int]] = [[]]
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        n_rows = len(groups[-1]) + 1
        if n_rows > 1 and n_common + n_rows * (lengths[row] - n_common) > max_tokens:
            groups.append([])
        groups[-1].append(row)
    return groups
