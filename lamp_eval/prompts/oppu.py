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

from lamp_eval.config import N_SAMPLED_TOKENS, ProtocolConfig
from lamp_eval.errors import UserError, raise_if_any
from lamp_eval.prompts.fit import Prompt, encode, fit
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
        if self.protocol.decoding == "oppu_sampled":
            return N_SAMPLED_TOKENS
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
        answers, prompts = [], []
        for i, fields in enumerate(records):
            if not fields[self.task.gold_field]:
                continue
            answers.append(fields[self.task.gold_field])
            prompts.append(
                self._prompt(
                    user,
                    _shown(history.retrieve(searches[i], k, before=i), documents),
                    lambda text, fields=fields: oppu.record_prompt.format(  # type: ignore[misc]
                        **{**fields, self.task.text_field: text}
                    ),
                    fields[self.task.text_field],
                    self._room(answers[-1]),
                    f"user {user.id!r}, record {i}",
                )
            )
        return self._examples(prompts, answers)

    def task_examples(self, user: User, k: int) -> list[Example]:
        """The task adapter's examples: one per query, retrieving in the whole history.

        As released, the query keeps `train_words` and the retrieved records `eval_words`; with
        options, it stays as it is.

        Raises:
            UserError: an instruction that is too long.
        """
        prompts = [
            self._prompt(
                user,
                retrieved,
                self._query_prompt(options),
                text if options else _cut(text, self.protocol.train_words),
                self._room(query.gold),
                f"user {user.id!r}, query {query.id!r}",
            )
            for query, text, options, retrieved in self._queries(user, k)
        ]
        return self._examples(prompts, [query.gold for query in user.queries])

    def requests(self, user: User, k: int) -> list[Request]:
        """One request per query, retrieving in the whole history.

        Raises:
            UserError: an instruction that is too long.
        """
        room = self.protocol.max_tokens - self.max_new_tokens
        prompts = [
            self._prompt(
                user,
                retrieved,
                self._query_prompt(options),
                text,
                room,
                f"user {user.id!r}, query {query.id!r}",
            )
            for query, text, options, retrieved in self._queries(user, k)
        ]
        return [
            Request(user.id, query.id, tuple(ids), query.gold, n_cut, query.input)
            for query, (_, ids, n_cut) in zip(user.queries, fit(prompts, self._encode), strict=True)
        ]

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

    def answer_ids(self, answer: str) -> list[int]:
        """Token ids of an answer behind a prompt, its EOS included."""
        return [*self._ids_of_answer(answer), self.eos_token_id]

    def _ids_of_answer(self, answer: str) -> list[int]:
        if answer not in self._answer_ids:
            self._answer_ids[answer] = encode(self.tokenizer, [" " + answer])[0]
        return self._answer_ids[answer]

    def _room(self, answer: str) -> int:
        """What an answer and its EOS leave to the prompt, in tokens."""
        return self.protocol.max_tokens - len(self._ids_of_answer(answer)) - 1

    def _examples(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[Example]:
        found = fit(prompts, self._encode)
        wholes = self._encode(
            [prompt.text + " " + answer for prompt, answer in zip(found, answers, strict=True)]
        )
        examples = []
        for (_, ids, _), whole, answer in zip(found, wholes, answers, strict=True):
            if whole[: len(ids)] != ids:
                # The tokenizer merges across the border: train on what generation will start from.
                whole = ids + self._ids_of_answer(answer)
            examples.append(Example((*whole, self.eos_token_id), len(ids)))
        return examples

    def _prompt(
        self,
        user: User,
        retrieved: Sequence[str],
        prompt_of: Callable[[str], str],
        text: str,
        max_tokens: int,
        where: str,
    ) -> Prompt:
        profile = self.profiles.get(user.id)
        about = profile + "\n" if profile else ""

        def render(documents: str, text: str) -> str:
            return about + (documents + "\n" if documents else "") + prompt_of(text)

        return Prompt(render, "".join(retrieved), text, max_tokens, where)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        found = encode(self.tokenizer, texts, special=True)
        for ids in found:
            # Some tokenizers close with EOS; a prompt must not.
            if ids and ids[-1] == self.tokenizer.eos_token_id:
                ids.pop()
        return found


def _shown(positions: Sequence[int], documents: Sequence[str]) -> list[str]:
    return [documents[i] for i in positions]


def _first_words(record: Record, n_words: int) -> dict[str, str]:
    return {name: _cut(value, n_words) for name, value in record.fields.items()}


def _cut(text: str, n_words: int) -> str:
    return " ".join(text.split()[:n_words])
