"""The `oppu` protocol: raw-text prompts as token ids (OPPU, `OPPU.py` and `task_LoRA.py`).

Training sees `[retrieved records + newline +] record_prompt + " " + answer + EOS`; evaluation sees
`[retrieved records + newline +] query_prompt` and generates the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lamp_eval.config import ProtocolConfig
from lamp_eval.errors import UserError
from lamp_eval.records import Example, Record, Request, User
from lamp_eval.retrieval import History
from lamp_eval.seeds import user_seed
from lamp_eval.tasks import Task


def encoder(tokenizer: Any, task: Task, protocol: ProtocolConfig, seed: int = 0) -> Encoder:
    """What builds the prompts of a protocol; the arguments are those of `Encoder`."""
    return Encoder(tokenizer, task, protocol, seed)


@dataclass(frozen=True)
class Encoder:
    """Builds token ids with one tokenizer, task and protocol.

    Args:
        tokenizer: a transformers tokenizer with an EOS token.
        task: the task.
        protocol: its `max_tokens` bounds prompt + answer.
        seed: of random retrieval.
    """

    tokenizer: Any
    task: Task
    protocol: ProtocolConfig
    seed: int = 0

    def user_examples(self, user: User, k: int) -> list[Example]:
        """One training example per record, each retrieving among the records before it.

        In `oppu_released`, citation identification and tweets retrieve nothing here, although they
        do in evaluation.
        """
        oppu, words = self.task.oppu, self.protocol.train_words
        if oppu.trains_alone and self.protocol.name == "oppu_released":
            k = 0
        records = [_first_words(record, words) for record in user.history]
        history = self._history(user, records)
        return [
            self._example(
                history.retrieve(oppu.retrieval_query_train.format(**fields), k, before=i),
                lambda text, fields=fields: oppu.record_prompt.format(  # type: ignore[misc]
                    **{**fields, self.task.text_field: text}
                ),
                fields[self.task.text_field],
                fields[self.task.gold_field],
                f"user {user.id!r}, record {i}",
            )
            for i, fields in enumerate(records)
        ]

    def query_examples(self, user: User, k: int) -> list[Example]:
        """One training example per query, retrieving in the whole history (the task adapter's).

        As released, the query keeps `train_words` and the retrieved records `eval_words`; with
        options, it stays as it is.
        """
        return [
            self._example(
                retrieved,
                self._query_prompt(options),
                text if options else _cut(text, self.protocol.train_words),
                gold,
                f"user {user.id!r}, query {query_id!r}",
            )
            for query_id, text, options, gold, retrieved in self._queries(user, k)
        ]

    def requests(self, user: User, k: int) -> list[Request]:
        """One request per query, retrieving in the whole history."""
        room = self.protocol.max_tokens - self.task.max_new_tokens
        requests = []
        inputs = {query.id: query.input for query in user.queries}
        for query_id, text, options, gold, retrieved in self._queries(user, k):
            _, prompt_ids, n_cut_words = self._fit(
                retrieved,
                self._query_prompt(options),
                text,
                room,
                f"user {user.id!r}, query {query_id!r}",
            )
            requests.append(
                Request(user.id, query_id, tuple(prompt_ids), gold, n_cut_words, inputs[query_id])
            )
        return requests

    def _query_prompt(self, options: Sequence[str]) -> Callable[[str], str]:
        return lambda text: self.task.oppu.query_prompt.format(text, *options)

    def _queries(
        self, user: User, k: int
    ) -> Iterator[tuple[str, str, tuple[str, ...], str, list[str]]]:
        """Query id, text, options, gold and retrieved documents of each query."""
        oppu, words = self.task.oppu, self.protocol.eval_words
        history = self._history(user, [_first_words(record, words) for record in user.history])
        for query in user.queries:
            text, *options = oppu.texts(query.input) or (query.input,)
            search = oppu.retrieval_query_test.format(text)
            retrieved = history.retrieve(search, k, before=len(user.history))
            yield query.id, text, tuple(options), query.gold, retrieved

    def _history(self, user: User, records: Sequence[dict[str, str]]) -> History:
        return History(
            [self.task.oppu.retrieval_history.format(**fields) for fields in records],
            self.protocol.retrieval,
            seed=user_seed(self.seed, user.id),
        )

    def _example(
        self,
        retrieved: Sequence[str],
        prompt_of: Callable[[str], str],
        text: str,
        answer: str,
        where: str,
    ) -> Example:
        n_answer = len(self._ids(" " + answer, special=False)) + 1
        prompt, prompt_ids, _ = self._fit(
            retrieved, prompt_of, text, self.protocol.max_tokens - n_answer, where
        )
        full_ids = self._ids(prompt + " " + answer)
        if full_ids[: len(prompt_ids)] != prompt_ids:
            # The tokenizer merges across the border: train on what generation will start from.
            full_ids = prompt_ids + self._ids(" " + answer, special=False)
        return Example((*full_ids, self.tokenizer.eos_token_id), len(prompt_ids))

    def _fit(
        self,
        retrieved: Sequence[str],
        prompt_of: Callable[[str], str],
        text: str,
        max_tokens: int,
        where: str,
    ) -> tuple[str, list[int], int]:
        """The prompt in at most `max_tokens` tokens, these, and how many words were cut for that.

        Words are cut from the end of the retrieved documents first, then from the middle of the
        item's text; the instruction and the answer are never cut.
        """

        def prompt(shown: Sequence[str], text: str) -> str:
            return ("".join(shown) + "\n" if shown else "") + prompt_of(text)

        def fits(candidate: str) -> bool:
            return len(self._ids(candidate)) <= max_tokens

        def fitted(shown: Sequence[str], text: str, n_cut: int) -> tuple[str, list[int], int]:
            found = prompt(shown, text)
            return found, self._ids(found), n_cut

        whole = prompt(retrieved, text)
        whole_ids = self._ids(whole)
        if len(whole_ids) <= max_tokens:
            return whole, whole_ids, 0
        documents = "".join(retrieved).split(" ")
        kept = _largest(
            len(documents), lambda n: fits(prompt([" ".join(documents[:n])] if n else [], text))
        )
        if kept is not None:
            shown = [" ".join(documents[:kept])] if kept else []
            return fitted(shown, text, len(documents) - kept)
        words = text.split(" ")

        def without_middle(n: int) -> str:
            return " ".join(words[: (n + 1) // 2] + words[len(words) - n // 2 :])

        kept = _largest(len(words), lambda n: fits(prompt([], without_middle(n))))
        if kept is None:
            raise UserError(
                expected=f"an instruction of at most {max_tokens} tokens",
                found=f"{len(self._ids(prompt([], '')))} tokens without any text",
                where=f"{where}, option protocol.max_tokens",
                fix="raise protocol.max_tokens",
            )
        n_documents = len(documents) if retrieved else 0
        return fitted([], without_middle(kept), n_documents + len(words) - kept)

    def _ids(self, text: str, *, special: bool = True) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special)
        # Some tokenizers close with EOS; a prompt must not.
        if special and ids and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        return ids


def _first_words(record: Record, n_words: int) -> dict[str, str]:
    return {name: _cut(value, n_words) for name, value in record.fields.items()}


def _cut(text: str, n_words: int) -> str:
    return " ".join(text.split()[:n_words])


def _largest(upper: int, ok: Callable[[int], bool]) -> int | None:
    """The largest n in 0…upper with `ok(n)`, which holds up to some n; None if for none."""
    if not ok(0):
        return None
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if ok(middle) else (low, middle - 1)
    return low
