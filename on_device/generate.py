"""Answers, greedy or sampled, and the likelihood of labels, in batches.

The common beginning of all prompts is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import BatchKVCache, KVCache

from lamp_eval.errors import UserError
from lamp_eval.records import like_lengths, n_common_tokens
from on_device.model import DeviceModel
from on_device.sampling import random_number, sample


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
    seeds: Sequence[int] | None = None,
) -> list[Answer]:
    """Answers each prompt; batched answers equal those of one prompt at a time.

    Args:
        device_model: a model; its adapter, if it has one, is in effect.
        prompts: token ids, none empty.
        max_new_tokens: per prompt, EOS included.
        eos_token_id: ends an answer.
        tokens_per_pass: bounds the prompts computed together by their tokens and padding.
        seeds: one of each prompt, to sample as in `on_device.sampling`; None: greedily.

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
            [seeds[i] for i in rows] if seeds else None,
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
        tokens_per_pass: bounds the prompts computed together by their tokens and padding, and the
            labels by the tokens of the prompt that each of them attends to, and their own.

    Returns:
        A row per prompt, with log-likelihoods per token in nats, those of `labels` in their order.

    Raises:
        UserError: the model's attention cache cannot be batched.
    """
    n_common = n_common_tokens(prompts)
    prefix = _prefill(device_model, prompts[0][:n_common]) if n_common else None
    found = [[0.0] * len(labels) for _ in prompts]
    # The labels of like length together, of whichever prompts, so that few of them are padded.
    shortest_first = sorted(range(len(labels)), key=lambda label: len(labels[label]))
    own_lengths = [len(prompt) - n_common for prompt in prompts]
    for rows in like_lengths(own_lengths, 0, tokens_per_pass):
        cache, states = _read(device_model, prefix, [prompts[i][n_common:] for i in rows])
        first = device_model.head(states)  # (B, 1, V)
        pairs = [(row, label) for label in shortest_first for row in range(len(rows))]
        n_attended = cache[0].size() + max(map(len, labels))
        n_at_once = max(1, tokens_per_pass // n_attended)
        for start in range(0, len(pairs), n_at_once):
            own_rows, own_labels = zip(*pairs[start:][:n_at_once], strict=True)
            means = _mean_log_likelihoods(
                device_model, first, cache, own_rows, [labels[label] for label in own_labels]
            )
            for row, label, mean in zip(own_rows, own_labels, means, strict=True):
                found[rows[row]][label] = mean
    return found


def _mean_log_likelihoods(
    device_model: DeviceModel,
    first: mx.array,
    cache: Sequence[BatchKVCache],
    rows: Sequence[int],
    labels: Sequence[Sequence[int]],
) -> list[float]:
    """Of labels computed together, each behind the prompt in its row of `cache`.

    `first` (B, 1, V) has the logits of the labels' first tokens.
    """
    targets = _padded_right(labels)  # (N, T)
    lengths = mx.array([len(label) for label in labels])
    logits = first[mx.array(rows)]  # (N, 1, V)
    n_read = targets.shape[1] - 1
    if n_read:
        copies = [_copied_rows(c, mx.array(rows), n_read) for c in cache]
        rest = device_model.head(device_model.model.model(targets[:, :-1], cache=copies))
        logits = mx.concatenate([logits, rest], axis=1)
    losses = nn.losses.cross_entropy(logits.astype(mx.float32), targets, reduction="none")
    weights = mx.arange(targets.shape[1]) < lengths[:, None]
    means: list[float] = (-(losses * weights).sum(axis=1) / lengths).tolist()
    return means


def _copied_rows(cache: BatchKVCache, rows: mx.array, n_free: int) -> BatchKVCache:
    """A cache of these rows, each as often as it is named, with room for `n_free` more tokens."""
    keys, values, offset, left_padding, n_read = cache.state
    room = [(0, 0), (0, 0), (0, n_free), (0, 0)]
    copy = BatchKVCache([])
    copy.state = (
        mx.pad(keys[rows, :, :n_read], room),
        mx.pad(values[rows, :, :n_read], room),
        offset[rows],
        left_padding[rows],
        n_read,
    )
    return copy


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


def _read(
    device_model: DeviceModel, prefix: list[KVCache] | None, suffixes: Sequence[Sequence[int]]
) -> tuple[list[BatchKVCache], mx.array]:
    """Keys and values of prompts, the common prefix included, and their last states (B, 1, D)."""
    n_rows, lengths = len(suffixes), [len(suffix) for suffix in suffixes]
    # Right-padded for the prompt; `finalize` then rolls the padding in front of each row.
    cache = [
        BatchKVCache.merge([c] * n_rows) if prefix else BatchKVCache([0] * n_rows)
        for c in prefix or device_model.blocks
    ]
    for c in cache:
        c.prepare(right_padding=[max(lengths) - length for length in lengths])
    states = device_model.model.model(_padded_right(suffixes), cache=cache)  # (B, T, D)
    for c in cache:
        c.finalize()
    last = mx.array(lengths)[:, None, None] - 1
    return cache, mx.take_along_axis(states, last, axis=1)


def _answer_batch(
    device_model: DeviceModel,
    prefix: list[KVCache] | None,
    suffixes: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_token_id: int,
    seeds: Sequence[int] | None,
) -> list[Answer]:
    cache, states = _read(device_model, prefix, suffixes)
    answers: list[list[int]] = [[] for _ in suffixes]
    open_rows = list(range(len(suffixes)))  # the row of `cache` → the row of `answers`
    finished = [False] * len(suffixes)
    for n_new in range(1, max_new_tokens + 1):
        logits = device_model.head(states[:, -1])  # (B, V)
        if seeds:
            next_tokens = sample(logits, [random_number(seeds[row], n_new) for row in open_rows])
        else:
            next_tokens = mx.argmax(logits, axis=-1)
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
