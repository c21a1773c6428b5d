"""Greedy generation, batched, and the likelihood of labels; a common beginning is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import BatchKVCache, KVCache

from lamp_eval.errors import UserError
from lamp_eval.records import like_lengths, n_common_tokens
from on_device.model import DeviceModel


@dataclass(frozen=True)
class Answer:
    """Generated token ids without EOS; `finished` is False if the limit cut the answer off."""

    tokens: tuple[int, ...]
    finished: bool


def generate(
    device_model: DeviceModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_token_id: int,
    tokens_per_pass: int,
) -> list[Answer]:
    """Answers each prompt greedily; batched answers equal those of one prompt at a time.

    Args:
        device_model: a model; its adapter, if it has one, is in effect.
        prompts: token ids, none empty.
        max_new_tokens: per prompt, EOS included.
        eos_token_id: ends an answer.
        tokens_per_pass: bounds the prompts computed together by their tokens and padding.

    Returns:
        One answer per prompt, in the order of `prompts`.

    Raises:
        UserError: the model's attention cache cannot be batched.
    """
    answers: dict[int, Answer] = {}
    n_common = n_common_tokens(prompts)
    prefix = _prefill(device_model, prompts[0][:n_common]) if n_common else None
    # A batch does not compute the common beginning, which is therefore not counted.
    own_lengths = [len(prompt) - n_common for prompt in prompts]
    for rows in like_lengths(own_lengths, 0, tokens_per_pass):
        found = _answer_batch(
            device_model,
            prefix,
            [prompts[i][n_common:] for i in rows],
            max_new_tokens,
            eos_token_id,
        )
        answers.update(zip(rows, found, strict=True))
    return [answers[i] for i in range(len(prompts))]


def label_log_likelihoods(
    device_model: DeviceModel,
    prompts: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]],
    *,
    tokens_per_pass: int,
) -> list[list[float]]:
    """How likely each label is as the answer to each prompt: the mean over its tokens.

    Args:
        device_model: a model; its adapter, if it has one, is in effect.
        prompts: token ids, none empty.
        labels: token ids of each label, its EOS included.
        tokens_per_pass: bounds the labels computed together, by the tokens of the prompt that each
            of them attends to, and their own.

    Returns:
        A row per prompt, with log-likelihoods per token in nats, those of `labels` in their order.

    Raises:
        UserError: the model's attention cache cannot be batched.
    """
    n_common = n_common_tokens(prompts)
    common = _prefill(device_model, prompts[0][:n_common]) if n_common else None
    longest = max(map(len, labels))
    found = []
    for prompt in prompts:
        cache = [
            BatchKVCache.merge([c]) if common else BatchKVCache([0])
            for c in common or device_model.blocks
        ]
        states = device_model.model.model(mx.array(prompt[n_common:])[None], cache=cache)[:, -1:]
        first, read = device_model.head(states), [c.extract(0) for c in cache]  # (1, 1, V)
        n_at_once = max(1, tokens_per_pass // (len(prompt) + longest))
        row: list[float] = []
        for start in range(0, len(labels), n_at_once):
            row += _mean_log_likelihoods(device_model, first, read, labels[start:][:n_at_once])
        found.append(row)
    return found


def _mean_log_likelihoods(
    device_model: DeviceModel,
    first: mx.array,
    read: Sequence[KVCache],
    labels: Sequence[Sequence[int]],
) -> list[float]:
    """Of labels computed together, behind the prompt that is in `read`; `first`: its logits."""
    targets = _padded_right(labels)  # (N, T)
    lengths = mx.array([len(label) for label in labels])
    logits = mx.broadcast_to(first, (len(labels), 1, first.shape[-1]))
    if targets.shape[1] > 1:
        cache = [BatchKVCache.merge([c] * len(labels)) for c in read]
        rest = device_model.head(device_model.model.model(targets[:, :-1], cache=cache))
        logits = mx.concatenate([logits, rest], axis=1)
    losses = nn.losses.cross_entropy(logits.astype(mx.float32), targets, reduction="none")
    weights = mx.arange(targets.shape[1]) < lengths[:, None]
    means: list[float] = (-(losses * weights).sum(axis=1) / lengths).tolist()
    return means


def _padded_right(rows: Sequence[Sequence[int]]) -> mx.array:
    length = max(map(len, rows))
    return mx.array([[*row, *[0] * (length - len(row))] for row in rows], mx.int32)


def _prefill(device_model: DeviceModel, tokens: Sequence[int]) -> list[KVCache]:
    cache = _new_cache(device_model)
    device_model.model.model(mx.array(tokens)[None], cache=cache)
    mx.eval([c.state for c in cache])
    return cache


def _new_cache(device_model: DeviceModel) -> list[KVCache]:
    model = device_model.model
    cache = (
        model.make_cache() if hasattr(model, "make_cache") else [KVCache() for _ in model.layers]
    )
    if not all(isinstance(c, KVCache) for c in cache):
        raise UserError(
            expected="a model with full attention in every block",
            found=f"{sorted({type(c).__name__ for c in cache})}",
            where=type(model).__module__,
            fix="choose another model",
        )
    return cache


def _answer_batch(
    device_model: DeviceModel,
    prefix: list[KVCache] | None,
    suffixes: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_token_id: int,
) -> list[Answer]:
    n_rows, length = len(suffixes), max(len(suffix) for suffix in suffixes)
    padding = [length - len(suffix) for suffix in suffixes]
    tokens = mx.array(
        [[*suffix, *[0] * pad] for suffix, pad in zip(suffixes, padding, strict=True)]
    )
    # Right-padded for the prompt; `finalize` then rolls the padding in front of each row.
    cache = [
        BatchKVCache.merge([c] * n_rows) if prefix else BatchKVCache([0] * n_rows)
        for c in prefix or device_model.blocks
    ]
    for c in cache:
        c.prepare(right_padding=padding)
    states = device_model.model.model(tokens, cache=cache)  # (B, T, D)
    last = mx.array([len(suffix) - 1 for suffix in suffixes])
    states = mx.take_along_axis(states, last[:, None, None], axis=1)  # (B, 1, D)
    for c in cache:
        c.finalize()

    answers: list[list[int]] = [[] for _ in suffixes]
    open_rows = list(range(n_rows))  # the row of `cache` → the row of `answers`
    finished = [False] * n_rows
    for n_new in range(1, max_new_tokens + 1):
        next_tokens = mx.argmax(device_model.head(states[:, -1]), axis=-1)
        mx.eval(next_tokens, [c.state[:2] for c in cache])
        keep = []
        for position, token in enumerate(next_tokens.tolist()):
            if token == eos_token_id:
                finished[open_rows[position]] = True
            else:
                answers[open_rows[position]].append(token)
                keep.append(position)
        if not keep or n_new == max_new_tokens:
            break
        if len(keep) < len(open_rows):
            open_rows = [open_rows[position] for position in keep]
            next_tokens = next_tokens[mx.array(keep)]
            for c in cache:
                c.filter(mx.array(keep))
        states = device_model.model.model(next_tokens[:, None], cache=cache)
    return [Answer(tuple(a), f) for a, f in zip(answers, finished, strict=True)]
