"""What a task is: its fields, its labels, its prompts and its metrics. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OppuPrompts:
    """The released prompt strings of one task (`TamSiuhin/OPPU`, `prompt/prompt.json`).

    `{field}` names a record's field; `query_prompt` and `retrieval_query_test` take the text
    extracted from a query's input as `{}`.
    """

    query_prompt: str
    record_prompt: str  # released as OPPU_input; the answer follows after one space
    retrieval_history: str
    retrieval_query_train: str
    retrieval_query_test: str
    input_marker: str  # the query's text starts after it


@dataclass(frozen=True)
class Task:
    """One LaMP task.

    Attributes:
        name: as in configs and files, e.g. `movie_tagging`.
        lamp_id: the benchmark's id, e.g. `LaMP_2M`.
        text_field: the record's field with the text.
        gold_field: the record's field with the answer.
        labels: all valid answers.
        ordinal: True if the labels are numbers with an order (scored by MAE and RMSE as well).
        max_new_tokens: upper bound of an answer's length in tokens, EOS included.
        oppu: prompts of the per-user protocol.
    """

    name: str
    lamp_id: str
    text_field: str
    gold_field: str
    labels: tuple[str, ...]
    ordinal: bool
    max_new_tokens: int
    oppu: OppuPrompts

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics reported, the main one first."""
        return ("mae", "rmse", "accuracy") if self.ordinal else ("accuracy", "macro_f1")
