"""The `oppu` protocol: raw-text prompts as token ids (OPPU, `OPPU.py` and `task_LoRA.py`).

Training sees `[retrieved records + newline +] record_prompt + " " + answer + EOS`; evaluation sees
`[retrieved records + newline +] query_prompt` and generates the answer. A text about the user, if
there is one, stands before all of it with a newline of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lamp_eval.config import ProtocolConfig
from lamp_eval.errors import UserError, raise_if_any
from lamp_eval.prompts.fit import Fitted, fit
from lamp_eval.records import Example, Query, Record, Request, User
from lamp_eval.retrieval import Embed, History
from lamp_eval.seeds import user_seed
from lamp_eval.tasks import Task


@dataclass(frozen=True)
class OppuEncoder:
    """Builds token ids with one tokenizer, task and protocol.

    Args:
        tokenizer: a transformers tokenizer with an EOS token.
        task: the task.
        protocol: its `max_tokens` bounds prompt + answer.
        seed: of random retrieval.
        embed: of dense retrieval.
        profiles: by user id, a text about the user for all their prompts.
    """

    tokenizer: Any
    task: Task
    protocol: ProtocolConfig
    seed: int = 0
    embed: Embed | None = None
    profiles: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _answer_ids(self) -> dict[str, list[int]]:
        """Of the answers so far: labels come again and again."""
        return {}

    @property
    def max_new_tokens(self) -> int:
        """Upper bound of an answer's length in tokens, EOS included."""
        return self.task.max_new_tokens

    @property
    def eos_token_id(self) -> int:
        """What ends an answer."""
        return int(self.tokenizer.eos_token_id)

    def answer_text(self, tokens: Sequence[int]) -> str:
        """The answer that generated tokens stand for."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def user_examples(self, user: User, k: int) -> list[Example]:
        """One training example per record, each retrieving among the records before it.

        In `oppu_released`, citation identification and tweets retrieve nothing here, although they
        do in evaluation.

        Raises:
            UserError: records without an answer to learn, or an instruction that is too long.
        """
        oppu, words = self.task.oppu, self.protocol.train_words
        if oppu.trains_alone and self.protocol.name == "oppu_released":
            k = 0
        self._check_answers(user)
        records = [_first_words(record, words) for record in user.history]
        searches = [oppu.retrieval_query_train.format(**fields) for fields in records]
        history, documents = self._history(user, records, searches)
        return [
            self._example(
                user,
                _shown(history.retrieve(searches[i], k, before=i), documents),
                lambda text, fields=fields: oppu.record_prompt.format(  # type: ignore[misc]
                    **{**fields, self.task.text_field: text}
                ),
                fields[self.task.text_field],
                fields[self.task.gold_field],
                f"user {user.id!r}, record {i}",
            )
            for i, fields in enumerate(records)
            if fields[self.task.gold_field]
        ]

    def task_examples(self, user: User, k: int) -> list[Example]:
        """The task adapter's examples: one per query, retrieving in the whole history.

        As released, the query keeps `train_words` and the retrieved records `eval_words`; with
        options, it stays as it is.

        Raises:
            UserError: an instruction that is too long.
        """
        return [
            self._example(
                user,
                retrieved,
                self._query_prompt(options),
                text if options else _cut(text, self.protocol.train_words),
                query.gold,
                f"user {user.id!r}, query {query.id!r}",
            )
            for query, text, options, retrieved in self._queries(user, k)
        ]

    def requests(self, user: User, k: int) -> list[Request]:
        """One request per query, retrieving in the whole history.

        Raises:
            UserError: an instruction that is too long.
        """
        room = self.protocol.max_tokens - self.max_new_tokens
        requests = []
        for query, text, options, retrieved in self._queries(user, k):
            where = f"user {user.id!r}, query {query.id!r}"
            _, found = self._fit(user, retrieved, self._query_prompt(options), text, room, where)
            ids, n_cut = tuple(found.ids), found.n_cut_words
            requests.append(Request(user.id, query.id, ids, query.gold, n_cut, query.input))
        return requests

    def _check_answers(self, user: User) -> None:
        gold = self.task.gold_field
        raise_if_any(
            [
                UserError(
                    expected=f"a field {gold!r}, the answer that an adapter learns",
                    found=f"only {', '.join(record.fields)}",
                    where=f"user {user.id!r}, record {i}",
                    fix="choose protocol=lamp_chat, or data=oppu, whose records have it",
                )
                for i, record in enumerate(user.history)
                if gold not in record.fields
            ]
        )

    def _query_prompt(self, options: Sequence[str]) -> Callable[[str], str]:
        return lambda text: self.task.oppu.query_prompt.format(text, *options)

    def _queries(
        self, user: User, k: int
    ) -> Iterator[tuple[Query, str, tuple[str, ...], list[str]]]:
        """Each query with its text, options and retrieved documents."""
        oppu, words = self.task.oppu, self.protocol.eval_words
        records = [_first_words(record, words) for record in user.history]
        texts = [oppu.texts(query.input) or (query.input,) for query in user.queries]
        searches = [oppu.retrieval_query_test.format(text) for text, *_ in texts]
        history, documents = self._history(user, records, searches)
        for query, (text, *options), search in zip(user.queries, texts, searches, strict=True):
            retrieved = _shown(history.retrieve(search, k, before=len(documents)), documents)
            yield query, text, tuple(options), retrieved

    def _history(
        self, user: User, records: Sequence[dict[str, str]], searches: Sequence[str]
    ) -> tuple[History, list[str]]:
        documents = [self.task.oppu.retrieval_history.format(**fields) for fields in records]
        history = History(
            documents,
            self.protocol.retrieval,
            embed=self.embed,
            searches=searches,
            seed=user_seed(self.seed, user.id),
        )
        return history, documents

    def _example(
        self,
        user: User,
        retrieved: Sequence[str],
        prompt_of: Callable[[str], str],
        text: str,
        answer: str,
        where: str,
    ) -> Example:
        if answer not in self._answer_ids:
            self._answer_ids[answer] = self._ids(" " + answer, special=False)
        answer_ids = self._answer_ids[answer]
        room = self.protocol.max_tokens - len(answer_ids) - 1
        prompt, found = self._fit(user, retrieved, prompt_of, text, room, where)
        full_ids = self._ids(prompt + " " + answer)
        if full_ids[: len(found.ids)] != found.ids:
            # The tokenizer merges across the border: train on what generation will start from.
            full_ids = found.ids + answer_ids
        return Example((*full_ids, self.tokenizer.eos_token_id), len(found.ids))

    def _fit(
        self,
        user: User,
        retrieved: Sequence[str],
        prompt_of: Callable[[str], str],
        text: str,
        max_tokens: int,
        where: str,
    ) -> tuple[str, Fitted]:
        """The prompt in at most `max_tokens` tokens, and what is left of its parts."""
        profile = self.profiles.get(user.id)
        about = profile + "\n" if profile else ""

        def prompt(documents: str, text: str) -> str:
            return about + (documents + "\n" if documents else "") + prompt_of(text)

        found = fit(
            lambda documents, text: self._ids(prompt(documents, text)),
            "".join(retrieved),
            text,
            max_tokens=max_tokens,
            where=where,
        )
        return prompt(found.documents, found.text), found

    def _ids(self, text: str, *, special: bool = True) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special)
        # Some tokenizers close with EOS; a prompt must not.
        if special and ids and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        return ids


def _shown(positions: Sequence[int], documents: Sequence[str]) -> list[str]:
    return [documents[i] for i in positions]


def _first_words(record: Record, n_words: int) -> dict[str, str]:
    return {name: _cut(value, n_words) for name, value in record.fields.items()}


def _cut(text: str, n_words: int) -> str:
    return " ".join(text.split()[:n_words])
