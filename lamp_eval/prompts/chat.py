"""The `lamp_chat` protocol: chat prompts as token ids (the paper's Table 7).

The system message shows retrieved records, the user's message is the benchmark's input verbatim,
the assistant's is the answer. There is no system message where there is no record to show.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from typing import Any

from lamp_eval.config import N_SAMPLED_TOKENS, ProtocolConfig
from lamp_eval.errors import UserError
from lamp_eval.prompts.fit import Prompt, encode, fit
from lamp_eval.records import Example, Query, Record, Request, User
from lamp_eval.retrieval import OKAPI, Embed, History
from lamp_eval.seeds import user_seed
from lamp_eval.tasks import Task
from lamp_eval.tasks.task import ChatPrompts

PREAMBLE = (
    "The following are examples of this user's past activity. "
    "Use them to match this user's preferences and writing style.\n\n"
)
# Characters of a field that a shown record keeps; labels are never cut.
FIELD_CHARS = {"title": 200, "abstract": 600, "description": 600, "text": 600}
MISSING = "?"


@dataclass(frozen=True)
class ChatEncoder:
    """Builds token ids with one tokenizer, task and protocol.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        task: the task.
        protocol: its `max_tokens` bounds prompt + answer; a template takes its `date` for today.
        seed: of random retrieval.
        embed: of dense retrieval.
        profiles: by user id, a text about the user for all their prompts.

    Raises:
        UserError: the tokenizer has no chat template, or the task no chat prompts.
    """

    tokenizer: Any
    task: Task
    protocol: ProtocolConfig
    seed: int = 0
    embed: Embed | None = None
    profiles: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise UserError(
                expected="a tokenizer with a chat template",
                found="none",
                where="protocol lamp_chat, the chat template of the model's tokenizer",
                fix="choose an instruction-tuned model, or protocol=oppu",
            )
        self._prompts  # noqa: B018  # raises if the task has none

    @cached_property
    def _prompts(self) -> ChatPrompts:
        if self.task.chat is None:
            raise UserError(
                expected="a task with prompts of the protocol lamp_chat",
                found=self.task.name,
                where="option protocol",
                fix="choose protocol=oppu",
            )
        return self.task.chat

    @cached_property
    def _template(self) -> str:
        """The tokenizer's template on the pinned date, or its prompts would change every day."""
        today = date.fromisoformat(self.protocol.date)
        parts = "".join(f"|replace('%{c}', '{today.strftime('%' + c)}')" for c in "aAbBdjmUwWxyY")
        macro = f"{{%- macro strftime_now(form) -%}}{{{{ form{parts} }}}}{{%- endmacro %}}\n"
        return macro + str(self.tokenizer.get_chat_template())

    @cached_property
    def max_new_tokens(self) -> int:
        """Upper bound of an answer's length in tokens, EOS included; the longest label fits."""
        if self.protocol.decoding == "oppu_sampled":
            return N_SAMPLED_TOKENS
        labels = [len(self._ids(label)) + 1 for label in self.task.labels]
        return max(self.task.max_new_tokens, *labels, 0)

    @cached_property
    def eos_token_id(self) -> int:
        """What ends the assistant's turn in the template, which may not be the tokenizer's EOS."""
        mark = "ANSWER"
        turn = self._render([_message("user", ""), _message("assistant", mark)])
        rest = self._ids(turn.rpartition(mark)[2])
        marks = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        return int(rest[0] if rest and rest[0] in marks else self.tokenizer.eos_token_id)

    @cached_property
    def _answer_ids(self) -> dict[str, list[int]]:
        """Of the answers so far: labels come again and again."""
        return {}

    def answer_text(self, tokens: Sequence[int]) -> str:
        """The answer that generated tokens stand for, without a block of thinking."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return re.sub("<think>.*?</think>", "", text, flags=re.DOTALL).strip()

    def user_examples(self, user: User, k: int) -> list[Example]:
        """One training example per record with a text and an answer.

        It retrieves among the records of a strictly earlier date, or of an earlier position where
        not all are dated. Where the task has no prompt for records, the example is the record's
        text alone, with loss on every token.

        Raises:
            UserError: an instruction that is too long, or a template that fails.
        """
        prompts, gold = self._prompts, self.task.gold_field
        if prompts.user_text is None:
            return [self._text_example(record) for record in user.history if self._raw_text(record)]
        before, _, after = prompts.user_text.partition("{}")
        texts = [record.fields.get(self.task.text_field, "") for record in user.history]
        texts = [text.strip() if prompts.strips else text for text in texts]
        history = self._history(user, [before + text + after for text in texts])
        answers, chosen = [], []
        for i, (text, n_earlier) in enumerate(zip(texts, _n_earlier(user.history), strict=True)):
            answer = user.history[i].fields.get(gold, "")
            if not text.strip() or not answer.strip():
                continue
            answers.append(self.answer_ids(answer))
            retrieved = history.retrieve(before + text + after, k, before=n_earlier)
            room = self.protocol.max_tokens - len(answers[-1])
            where = f"user {user.id!r}, record {i}"
            chosen.append(self._prompt(user, retrieved, (before, text, after), room, where))
        return [
            Example((*prompt.ids, *answer), len(prompt.ids))
            for prompt, answer in zip(fit(chosen, self._encode), answers, strict=True)
        ]

    def task_examples(self, user: User, k: int) -> list[Example]:
        """The task adapter's examples: of the records of its users, as the paper has it."""
        return self.user_examples(user, k)

    def requests(self, user: User, k: int) -> list[Request]:
        """One request per query, retrieving in the whole history.

        Raises:
            UserError: an instruction that is too long, or a template that fails.
        """
        room = self.protocol.max_tokens - self.max_new_tokens
        prompts = [
            self._prompt(user, retrieved, parts, room, f"user {user.id!r}, query {query.id!r}")
            for query, parts, retrieved in self._queries(user, k)
        ]
        return [
            Request(user.id, query.id, tuple(ids), query.gold, n_cut, query.input)
            for query, (_, ids, n_cut) in zip(user.queries, fit(prompts, self._encode), strict=True)
        ]

    def _queries(
        self, user: User, k: int
    ) -> Iterator[tuple[Query, tuple[str, str, str], list[int]]]:
        """Each query with its input in three parts, the text in the middle, and what it finds."""
        history = self._history(user, [query.input for query in user.queries])
        for query in user.queries:
            start, end = self.task.oppu.span(query.input)
            parts = query.input[:start], query.input[start:end], query.input[end:]
            retrieved = history.retrieve(query.input, k, before=len(user.history))
            yield query, parts, retrieved

    def _history(self, user: User, searches: Sequence[str]) -> History:
        return History(
            [self._searched(record) for record in user.history],
            self.protocol.retrieval,
            bm25=OKAPI,
            embed=self.embed,
            searches=searches,
            seed=user_seed(self.seed, user.id),
        )

    def _searched(self, record: Record) -> str:
        fields = (record.fields.get(name, "") for name in self._prompts.index_fields)
        return next((text for text in fields if text), "")

    def _shown(self, record: Record) -> str:
        names = set(re.findall(r"{(\w+)}", self._prompts.record))
        return self._prompts.record.format(
            **{name: _trimmed(record.fields.get(name, ""), FIELD_CHARS.get(name)) for name in names}
        )

    def _raw_text(self, record: Record) -> str:
        texts = [record.fields.get(name, "") for name in self._prompts.raw_fields]
        return "\n\n".join(text for text in texts if text.strip())

    def _text_example(self, record: Record) -> Example:
        ids = self.tokenizer.encode(self._raw_text(record))[: self.protocol.max_tokens - 1]
        if ids[-1] == self.tokenizer.eos_token_id:  # some tokenizers close with EOS
            ids.pop()
        return Example((*ids, self.tokenizer.eos_token_id), 1)

    def answer_ids(self, answer: str) -> list[int]:
        """Token ids of an answer behind a prompt, its EOS included."""
        if answer not in self._answer_ids:
            self._answer_ids[answer] = [*self._ids(answer), self.eos_token_id]
        return self._answer_ids[answer]

    def _prompt(
        self,
        user: User,
        retrieved: Sequence[int],
        parts: tuple[str, str, str],
        max_tokens: int,
        where: str,
    ) -> Prompt:
        before, text, after = parts
        profile = self.profiles.get(user.id)

        def render(documents: str, text: str) -> str:
            system = [profile] if profile else []
            system += [PREAMBLE + documents] if documents else []
            messages = [_message("system", "\n\n".join(system))] if system else []
            return self._render([*messages, _message("user", before + text + after)])

        documents = "\n".join(self._shown(user.history[i]) for i in retrieved)
        return Prompt(render, documents, text, max_tokens, where)

    def _render(self, messages: list[dict[str, str]]) -> str:
        import jinja2

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    chat_template=self._template,
                    tokenize=False,
                    add_generation_prompt=messages[-1]["role"] != "assistant",
                    enable_thinking=False,
                )
            )
        except jinja2.TemplateError as error:
            raise UserError(
                expected="a chat template for system and user messages, in this order",
                found=str(error),
                where="protocol lamp_chat, the tokenizer's chat template",
                fix="choose a model with such a template, or protocol=oppu",
            ) from error

    def _ids(self, text: str) -> list[int]:
        return self._encode([text])[0]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return encode(self.tokenizer, texts)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _trimmed(text: str, n_chars: int | None) -> str:
    text = " ".join(text.split())
    if n_chars is not None and len(text) > n_chars:
        text = text[:n_chars] + "…"
    return text or MISSING


def _n_earlier(history: Sequence[Record]) -> list[int]:
    """How many records are strictly earlier than each: by date, if all have one, in order."""
    dates, positions = [record.date for record in history], list(range(len(history)))
    if all(dates) and dates == sorted(dates):
        positions = [bisect_left(dates, own) for own in dates]
    return positions
