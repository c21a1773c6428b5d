"""Stage 2: one LoRA adapter on one user's history, loss on the answer and EOS only."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import AdamW, clip_grad_norm
from mlx.utils import tree_map

from lamp_eval.config import UserAdapterConfig
from lamp_eval.errors import UserError
from lamp_eval.records import Example, n_common_tokens, passes
from lamp_eval.schedule import TrainingStep, learning_rate_factor, n_user_steps
from on_device.model import DeviceModel

# States below the first adapted block do not change; up to this size they are kept across epochs.
KEPT_STATES_BYTES = 512 * 2**20
# Long products are faster than short ones: worth a tenth more tokens, as padding.
MAX_PADDED = 1.1


def train_user_adapter(
    device_model: DeviceModel,
    examples: Sequence[Example],
    recipe: UserAdapterConfig,
    *,
    seed: int,
    tokens_per_pass: int,
    report: Callable[[TrainingStep], None],
) -> None:
    """Trains the model's adapter from fresh values; the result stays set on the model.

    Each step takes a window of `accumulation` examples, sums the gradients of the summed token
    losses, divides by the number of supervised tokens in the window, clips the global norm and
    applies AdamW with bias correction (paper, Table 1). Examples are computed one by one, or
    together where that is faster; the gradients are the same.

    Args:
        device_model: a model with an adapter of this recipe.
        examples: the user's examples, oldest first; not empty.
        recipe: optimizer and schedule.
        seed: the user's own; of the adapter's initial values and the order of examples.
        tokens_per_pass: bounds the memory; longer windows are computed in parts.
        report: called after each optimizer step.

    Raises:
        UserError: the loss is not finite.
    """
    device_model.reset_adapter(seed)
    model = device_model.model
    optimizer = AdamW(
        learning_rate=recipe.learning_rate,
        betas=[0.9, 0.999],
        eps=1e-8,
        weight_decay=recipe.weight_decay,
        bias_correction=True,
    )
    frozen = _FrozenStates(device_model)
    first = device_model.first_adapted_block

    def loss_sum(batch: _Batch, prefix: mx.array | None, states: mx.array) -> mx.array:
        caches = None
        if prefix is not None:
            caches = [SharedPrefix() for _ in device_model.blocks[first:]]
            device_model.run_blocks(prefix, first, caches, checkpoint=recipe.checkpoint)
        states = device_model.run_blocks(states, first, caches, checkpoint=recipe.checkpoint)
        # The head only where an answer token is predicted. (B, S, D) → (B, A, D) → (B, A, V)
        states = mx.take_along_axis(states, batch.positions[..., None], axis=1)
        logits = device_model.head(model.model.norm(states)).astype(mx.float32)
        losses = nn.losses.cross_entropy(logits, batch.targets, reduction="none")
        return (losses * batch.weights).sum()

    # Differentiates by the adapter's tensors alone: all else is frozen.
    loss_and_gradients = nn.value_and_grad(model, loss_sum)
    rng = random.Random(seed)
    n_steps, step = n_user_steps(len(examples), recipe), 0
    for _ in range(recipe.epochs):
        order = rng.sample(range(len(examples)), len(examples))
        for start in range(0, len(order), recipe.accumulation):
            window = [examples[i] for i in order[start : start + recipe.accumulation]]
            total, gradients = mx.array(0.0), None
            for batch in _batches(window, 0 if recipe.checkpoint else tokens_per_pass):
                loss, own = loss_and_gradients(batch, *frozen.of(batch))
                total = total + loss
                gradients = own if gradients is None else tree_map(mx.add, gradients, own)
                mx.eval(total, gradients)
            n_supervised = sum(example.n_supervised_tokens for example in window)
            mean_loss = total.item() / n_supervised
            if not math.isfinite(mean_loss):
                raise UserError(
                    expected="a finite loss",
                    found=f"{mean_loss} at step {step + 1} of {n_steps}",
                    where="stage 2, a user adapter",
                    fix="lower adapter.user.learning_rate",
                )
            gradients = tree_map(lambda g, n=n_supervised: g / n, gradients)
            gradients, _ = clip_grad_norm(gradients, recipe.clip_norm)
            optimizer.learning_rate = recipe.learning_rate * learning_rate_factor(
                step, n_steps, recipe.warmup_ratio, recipe.schedule
            )
            optimizer.update(model, gradients)
            mx.eval(device_model.adapter(), optimizer.state)
            step += 1
            n_tokens = sum(len(example.tokens) for example in window)
            report(TrainingStep(step, n_steps, mean_loss, n_tokens))


class SharedPrefix:
    """Keys and values of a common beginning, in the shape of mlx-lm's cache of one block.

    The first call stores what it is given (1, H, P, D); the second puts it in front of every row
    of a batch. Both are parts of one graph, so gradients flow back into the prefix.
    """

    def __init__(self) -> None:
        self.offset = 0
        self._stored: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values (B, H, P + S, D) to attend to."""
        if self._stored is None:
            self._stored, self.offset = (keys, values), keys.shape[2]
            return keys, values
        both = zip(self._stored, (keys, values), strict=True)
        joined = [
            mx.concatenate([mx.broadcast_to(old, (len(new), *old.shape[1:])), new], axis=2)
            for old, new in both
        ]
        return joined[0], joined[1]


class _Batch:
    """Examples computed together: their common beginning once, the rest padded on the right.

    Attributes:
        prefix: token ids (P,) of the common beginning; empty if it is not shared.
        tokens: (B, S) the rest without the last token, which is predicted but never read.
        positions: (B, A) where in S each answer token is predicted.
        targets, weights: (B, A) the answer tokens; 1 for them, 0 for padding.
    """

    def __init__(self, examples: Sequence[Example], n_common: int) -> None:
        rest = [example.tokens[n_common:-1] for example in examples]
        answers = [example.tokens[example.answer_start :] for example in examples]
        starts = [example.answer_start - 1 - n_common for example in examples]
        n_answer = max(map(len, answers))
        self.prefix = examples[0].tokens[:n_common]
        self.tokens = _padded(rest)
        self.targets = _padded(answers)
        self.weights = _padded([[1.0] * len(answer) for answer in answers])
        last = self.tokens.shape[1] - 1
        self.positions = mx.minimum(mx.array(starts)[:, None] + mx.arange(n_answer), last)
        self.key = (self.prefix, tuple(rest))


def _batches(window: Sequence[Example], max_tokens: int) -> list[_Batch]:
    """The window in batches where padding costs little, or a shared beginning pays for it.

    The rest is computed one by one, and with checkpointing (`max_tokens` is 0 then) all of it: the
    recomputed prefix would not pass its gradient on.
    """
    batches = []
    for group in passes(window, max_tokens):
        n_common = n_common_tokens([example.tokens[: example.answer_start] for example in group])
        n_shared = n_common + len(group) * (len(group[-1].tokens) - n_common)
        n_alone = sum(len(example.tokens) for example in group)
        if len(group) > 1 and n_shared <= MAX_PADDED * n_alone:
            batches.append(_Batch(group, n_common))
        else:
            batches += [_Batch([example], 0) for example in group]
    return batches


def _padded(rows: Sequence[Sequence[float]]) -> mx.array:
    length = max(map(len, rows))
    return mx.array([[*row, *[0] * (length - len(row))] for row in rows])


class _FrozenStates:
    """States in front of the first adapted block: of the prefix (1, P, D) and the rest (B, S, D).

    They depend on the tokens alone, so a batch that returns in a later epoch finds them kept.
    """

    def __init__(self, device_model: DeviceModel) -> None:
        self._model = device_model
        self._kept: dict[object, tuple[mx.array | None, mx.array]] = {}
        self._n_bytes = 0

    def of(self, batch: _Batch) -> tuple[mx.array | None, mx.array]:
        """The states of the prefix (None without one) and of the rest."""
        if batch.key in self._kept:
            return self._kept[batch.key]
        embed, n_frozen = self._model.model.model.embed_tokens, self._model.first_adapted_block
        prefix, caches = None, None
        if batch.prefix:
            caches = [SharedPrefix() for _ in range(n_frozen)]
            prefix = embed(mx.array(batch.prefix)[None])
            prefix = self._model.run_blocks(prefix, 0, caches, last=n_frozen)
        states = self._model.run_blocks(embed(batch.tokens), 0, caches, last=n_frozen)
        mx.eval(states, [] if prefix is None else prefix)
        self._n_bytes += states.nbytes
        if n_frozen and self._n_bytes <= KEPT_STATES_BYTES:
            self._kept[batch.key] = prefix, states
        return prefix, states
