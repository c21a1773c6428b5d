"""What a task is: its fields, its labels, its prompts and its metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass

METRICS = {
    "label": ("accuracy", "macro_f1"),
    "rating": ("mae", "rmse", "accuracy"),
    "text": ("rouge1", "rougeL"),
}


@dataclass(frozen=True)
class OppuPrompts:
    """The prompt strings of one task; LaMP's as released (`TamSiuhin/OPPU`, `prompt/prompt.json`).

    `{field}` names a record's field. A query's input gives its item's text, and in citation
    identification two options after it: `query_prompt` takes all as `{}`, `retrieval_query_test`
    the text alone.

    Attributes:
        query_prompt: asks for the answer to a query.
        record_prompt: the same of a record (released as OPPU_input); the answer follows after one
            space.
        retrieval_history: a record as it is shown.
        retrieval_query_train: what a record searches with.
        retrieval_query_test: what a query searches with.
        input_pattern: finds the text in a query's input as group 1, and options as groups 2 and 3.
        trains_alone: as released, a user's records are trained on without retrieved ones.
    """

    query_prompt: str
    record_prompt: str
    retrieval_history: str
    retrieval_query_train: str
    retrieval_query_test: str
    input_pattern: str
    trains_alone: bool = False

    def texts(self, query_input: str) -> tuple[str, ...] | None:
        """The text of a query's input, and its options if it has any; None: not of this task."""
        found = re.search(self.input_pattern, query_input, re.DOTALL)
        return found.groups() if found else None

    def span(self, query_input: str) -> tuple[int, int]:
        """Where the text stands in a query's input; all of it, if it is of another form."""
        found = re.search(self.input_pattern, query_input, re.DOTALL)
        return found.span(1) if found else (0, len(query_input))


@dataclass(frozen=True)
class ChatPrompts:
    """The strings of one task in the protocol `lamp_chat`; a query's input is shown as it is.

    Attributes:
        index_fields: what of a record is searched: the first of these that is not empty.
        record: a record as it is shown; `{field}` names a field.
        user_text: asks for a record's answer; `{}` is the record's text. None: records teach no
            answer, and an adapter learns to continue their text.
        strips: whether white space around a record's text is removed in `user_text`.
        raw_fields: the text to continue, where `user_text` is None.
    """

    index_fields: tuple[str, ...]
    record: str
    user_text: str | None = None
    strips: bool = False
    raw_fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: as in configs and files, e.g. `movie_tagging`.
        lamp_id: the benchmark's id, e.g. `LaMP_2M`; the name again if the task is not of LaMP.
        kind: what an answer is: `label`, `rating` (a label with an order) or `text`.
        text_field: the record's field with the text.
        gold_field: the record's field with the answer.
        max_new_tokens: upper bound of an answer's length in tokens, EOS included.
        oppu: prompts of the protocol `oppu`.
        chat: prompts of the protocol `lamp_chat`; None: it has none.
        more_fields: fields that records of some sources have besides text and answer.
        labels: all valid answers; none if the answer is free text.
        labelled_records: whether records carry the same labels as queries.
        answer_pattern: under the protocol's rules, finds an answer in an output; its group 1 is a
            label, or part of one label only. U+2212 is read as "-". None: the label itself is
            looked for.
        labels_pattern: finds the labels that an input lists, divided by ", ", as group 1.
    """

    name: str
    lamp_id: str
    kind: str
    text_field: str
    gold_field: str
    max_new_tokens: int
    oppu: OppuPrompts
    chat: ChatPrompts | None = None
    more_fields: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    labelled_records: bool = True
    answer_pattern: str | None = None
    labels_pattern: str | None = None

    def listed_labels(self, query_input: str) -> list[str] | None:
        """The labels that an input lists, in its own order; None: it lists none."""
        if not self.labels_pattern:
            return None
        found = re.search(self.labels_pattern, query_input)
        return found[1].split(", ") if found else None

    @property
    def record_fields(self) -> tuple[str, ...]:
        """All fields that a record may have, each once."""
        return tuple(dict.fromkeys((self.text_field, self.gold_field, *self.more_fields)))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics reported, the main one first."""
        return METRICS[self.kind]
