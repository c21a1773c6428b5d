"""Prompts as token ids, by protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lamp_eval.config import ProtocolConfig
from lamp_eval.errors import UserError
from lamp_eval.prompts.chat import ChatEncoder
from lamp_eval.prompts.oppu import OppuEncoder
from lamp_eval.retrieval import Embed
from lamp_eval.tasks import Task

Encoder = OppuEncoder | ChatEncoder


def make_encoder(
    tokenizer: Any,
    task: Task,
    protocol: ProtocolConfig,
    seed: int = 0,
    embed: Embed | None = None,
    profiles: Mapping[str, str] | None = None,
) -> Encoder:
    """The encoder of a protocol.

    Args:
        tokenizer: a transformers tokenizer with an EOS token; for `lamp_chat` with a chat template.
        task: the task.
        protocol: its name chooses the encoder.
        seed: of random retrieval.
        embed: of dense retrieval.
        profiles: by user id, a text about the user for all their prompts.

    Raises:
        UserError: the tokenizer or the task lacks what the protocol needs.
    """
    if protocol.retrieval == "dense" and embed is None:
        raise UserError(
            expected="retrieval that needs no model",
            found="dense",
            where="option protocol.retrieval",
            fix="choose bm25, recency or random, or run the command line",
        )
    of = ChatEncoder if protocol.name == "lamp_chat" else OppuEncoder
    return of(tokenizer, task, protocol, seed, embed, profiles or {})


__all__ = ["ChatEncoder", "Encoder", "OppuEncoder", "make_encoder"]
