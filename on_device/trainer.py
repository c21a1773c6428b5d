"""Stage 2: one LoRA adapter on one user's history, loss on the answer and EOS only."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import AdamW, clip_grad_norm
from mlx.utils import tree_flatten, tree_map

from lamp_eval.config import UserAdapterConfig
from lamp_eval.records import Example, n_common_tokens, passes
from lamp_eval.schedule import TrainingStep, learning_rate_factor
from lamp_eval.training import Training, check_examples, trouble, windows
from on_device.kept_states import StatesOnDisk, n_bytes
from on_device.memory import PeakLaw, choose_checkpoint, measured_law
from on_device.model import DeviceModel
from on_device.resume import TrainingState, load_state

# States below the first adapted block do not change; up to this size they are kept in memory.
KEPT_STATES_BYTES = 512 * 2**20
# Long products are faster than short ones: worth a tenth more tokens, as padding. Beyond this many
# tokens they gain nothing, but the memory grows: larger passes are for a common beginning that
# saves at least a fifth of the tokens (measured: user_stage.py mlx-lm).
MAX_PADDED, ENOUGH_TOKENS, MIN_SAVED = 1.1, 512, 0.2

Gradients = dict[str, mx.array]  # by the tensor's name in the model


def train_user_adapter(
    device_model: DeviceModel,
    examples: Sequence[Example],
    recipe: UserAdapterConfig,
    *,
    seed: int,
    tokens_per_pass: int,
    report: Callable[[TrainingStep], None],
    state_path: Path | None = None,
    save_every: int = 25,
    checkpoint: int | str = "none",
    memory_budget_gb: float | None = None,
) -> Training:
    """Trains the model's adapter from fresh values; the result stays set on the model.

    Each step takes a window of `accumulation` examples, sums the gradients of the summed token
    losses, divides by the number of supervised tokens in the window, clips the global norm and
    applies AdamW with bias correction (paper, Table 1). Examples are computed one by one, or
    together where that is faster; the gradients are the same.

    A loss that is not finite, or that explodes, ends the training; the adapter is then the one
    before the last step. Interrupted and called again, it goes on from the state that it saved,
    and ends with the same bits as if nothing had happened.

    Args:
        device_model: a model with an adapter of this recipe.
        examples: the user's examples, oldest first; not empty.
        recipe: optimizer and schedule.
        seed: the user's own; of the adapter's initial values and the order of examples.
        tokens_per_pass: bounds the memory; longer windows are computed in parts.
        report: called after each optimizer step.
        state_path: where the state is kept, of this very training alone; None: nowhere.
        save_every: optimizer steps between two saves; an interruption by an exception saves too.
        checkpoint: so many blocks at a time are computed again in the backward pass, examples one
            by one; `none`; or `auto`: none, or what fits best where the budget asks for it.
        memory_budget_gb: of MLX's peak memory, the base included; without it `auto` is `none`.
            With it, the states in front of the adapted blocks are kept on disk.

    Raises:
        UserError: an example without an answer, a damaged state, or a budget that is too small.
    """
    check_examples(examples)
    state = load_state(state_path) if state_path else None
    device_model.reset_adapter(seed)
    optimizer = new_optimizer(recipe)
    adapter = device_model.adapter()
    optimizer.init(adapter)
    steps = windows(examples, recipe, seed)
    if state is None:
        group, predicted = (checkpoint if isinstance(checkpoint, int) else None), None
        if checkpoint == "auto" and memory_budget_gb is not None:
            group, predicted = _for_budget(
                device_model, steps, tokens_per_pass, 1e9 * memory_budget_gb
            )
        start_optimizer = _copy(optimizer.state)
        state = TrainingState(0, adapter, adapter, start_optimizer, (), group, predicted)
    optimizer.state = _copy(state.optimizer)
    device_model.set_adapter(state.adapter)
    max_tokens = 0 if state.checkpoint else tokens_per_pass
    frozen = _FrozenStates(
        device_model,
        examples,
        max_tokens,
        epochs=recipe.epochs,
        max_bytes=KEPT_STATES_BYTES if memory_budget_gb is None else 0,
        path=state_path.with_name("states.bin") if state_path else None,
    )
    gradients_of = _gradients_of(device_model, frozen, max_tokens, state.checkpoint)
    mx.reset_peak_memory()
    try:
        for step, window in enumerate(steps[state.step :], start=state.step):
            start = time.perf_counter()
            mean_loss, gradients = gradients_of(window)
            gradients, norm = clip_grad_norm(gradients, recipe.clip_norm)
            stopped = trouble(mean_loss, norm.item(), state.rows, device_model.n_tokens)
            if stopped:
                stopped = f"step {step + 1} of {len(steps)}: {stopped}"
                device_model.set_adapter(state.good)
                return Training(state.rows, stopped, state.checkpoint, state.predicted_peak_bytes)
            rate = recipe.learning_rate * learning_rate_factor(
                step, len(steps), recipe.warmup_ratio, recipe.schedule
            )
            adapter = updated_adapter(optimizer, rate, gradients, state.adapter)
            device_model.set_adapter(adapter)
            n_tokens = sum(len(example.tokens) for example in window)
            row = {
                "step": step + 1,
                "loss": mean_loss,
                "learning_rate": rate,
                "gradient_norm": norm.item(),
                "tokens": n_tokens,
                "seconds": time.perf_counter() - start,
                "peak_bytes": mx.get_peak_memory(),
            }
            state = replace(
                state,
                step=step + 1,
                adapter=adapter,
                good=state.adapter,
                optimizer=_copy(optimizer.state),
                rows=(*state.rows, row),
            )
            if state_path and state.step % save_every == 0 and state.step < len(steps):
                state.save(state_path)
            report(TrainingStep(step + 1, len(steps), mean_loss, n_tokens))
    except BaseException:  # Ctrl-C above all: what is done is kept
        if state_path and state.step:
            state.save(state_path)
        raise
    return Training(state.rows, None, state.checkpoint, state.predicted_peak_bytes)


def new_optimizer(recipe: UserAdapterConfig) -> AdamW:
    """The recipe's AdamW, not yet initialized."""
    return AdamW(
        learning_rate=recipe.learning_rate,
        betas=[0.9, 0.999],
        eps=1e-8,
        weight_decay=recipe.weight_decay,
        bias_correction=True,
    )


def updated_adapter(
    optimizer: AdamW, rate: float, gradients: Gradients, adapter: Gradients
) -> Gradients:
    """The adapter after a step at this learning rate, computed; the optimizer's state moves on."""
    optimizer.learning_rate = rate
    updated: Gradients = optimizer.apply_gradients(gradients, adapter)
    mx.eval(updated, optimizer.state)
    return updated


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's state, which it changes in place; the arrays themselves never change."""
    copied: dict[str, Any] = tree_map(lambda array: array, state)
    return copied


def _gradients_of(
    device_model: DeviceModel, frozen: _FrozenStates, max_tokens: int, checkpoint: int | None
) -> Callable[[Sequence[Example]], tuple[float, Gradients]]:
    """A function of a window: its mean loss per answer token, and the gradients of that."""
    graph_of = loss_and_gradients(device_model, checkpoint)

    def gradients_of(window: Sequence[Example]) -> tuple[float, Gradients]:
        total, gradients = mx.array(0.0), None
        for batch in _batches(window, max_tokens):
            loss, own = graph_of(batch, *frozen.of(batch))
            total = total + loss
            gradients = own if gradients is None else tree_map(mx.add, gradients, own)
            mx.eval(total, gradients)
        n_supervised = sum(example.n_supervised_tokens for example in window)
        return total.item() / n_supervised, mean_gradients(gradients, n_supervised)

    return gradients_of


def mean_gradients(gradients: Any, n_supervised: int) -> Gradients:
    """A tree of summed gradients, by tensor and per answer token."""
    return {name: g / n_supervised for name, g in tree_flatten(gradients)}


def loss_and_gradients(
    device_model: DeviceModel, checkpoint: int | None
) -> Callable[[Batch, mx.array | None, mx.array], tuple[mx.array, Any]]:
    """A function of a batch and its frozen states: summed loss and gradients, not yet computed."""
    first = device_model.first_adapted_block

    def loss_sum(batch: Batch, prefix: mx.array | None, states: mx.array) -> mx.array:
        return _loss_sum(device_model, batch, prefix, states, first, checkpoint)

    # Differentiates by the adapter's tensors alone: all else is frozen.
    graph_of: Callable[[Batch, mx.array | None, mx.array], tuple[mx.array, Any]]
    graph_of = nn.value_and_grad(device_model.model, loss_sum)
    return graph_of


def _loss_sum(
    device_model: DeviceModel,
    batch: Batch,
    prefix: mx.array | None,
    states: mx.array,
    first: int,
    checkpoint: int | None,
) -> mx.array:
    """The summed loss of the answers, from the states in front of the block `first`."""
    caches = None
    if prefix is not None:
        caches = [SharedPrefix() for _ in device_model.blocks[first:]]
        device_model.run_blocks(prefix, first, caches)
    states = device_model.run_blocks(
        states, first, caches[:-1] if caches else None, last=-1, checkpoint=checkpoint
    )
    # The rest only where an answer token is predicted. (B, S, D) → (B, A, D) → (B, A, V)
    states = device_model.run_last_block(states, batch.positions, caches[-1] if caches else None)
    logits = device_model.head(device_model.model.model.norm(states)).astype(mx.float32)
    losses = nn.losses.cross_entropy(logits, batch.targets, reduction="none")
    return (losses * batch.weights).sum()


def _for_budget(
    device_model: DeviceModel,
    steps: Sequence[Sequence[Example]],
    tokens_per_pass: int,
    budget: float,
) -> tuple[int | None, float]:
    """The group size for a budget, and the predicted peak."""
    batches = (batch for window in steps for batch in _batches(window, tokens_per_pass))
    largest = max(batches, key=lambda batch: batch.n_tokens)
    whole = _law(device_model, largest, recomputed=False)
    longest = max((x for window in steps for x in window), key=lambda x: len(x.tokens))
    alone = _law(device_model, Batch([longest], 0), recomputed=True)
    group = choose_checkpoint(whole, alone, budget)
    return group, (whole if group is None else alone).peak(group)


def _law(device_model: DeviceModel, batch: Batch, *, recomputed: bool) -> PeakLaw:
    embed = device_model.model.model.embed_tokens
    prefix = embed(mx.array(batch.prefix)[None]) if batch.prefix else None
    states = embed(batch.tokens)
    mx.eval(states, [] if prefix is None else prefix)
    n_blocks = len(device_model.blocks)

    def run(n_last: int, group: int | None) -> object:
        def loss_sum() -> mx.array:
            return _loss_sum(device_model, batch, prefix, states, n_blocks - n_last, group)

        return nn.value_and_grad(device_model.model, loss_sum)()

    n_adapted = n_blocks - device_model.first_adapted_block
    return measured_law(run, n_adapted, states.nbytes, recomputed=recomputed)


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


class Batch:
    """Examples computed together: their common beginning once, the rest padded on the right.

    Attributes:
        examples: in the order of the rows.
        prefix: token ids (P,) of the common beginning; empty if it is not shared.
        tokens: (B, S) the rest without the last token, which is predicted but never read.
        n_tokens: computed ones, padding included.
        positions: (B, A) where in S each answer token is predicted.
        targets, weights: (B, A) the answer tokens; 1 for them, 0 for padding.
    """

    def __init__(self, examples: Sequence[Example], n_common: int) -> None:
        rest = [example.tokens[n_common:-1] for example in examples]
        answers = [example.tokens[example.answer_start :] for example in examples]
        starts = [example.answer_start - 1 - n_common for example in examples]
        n_answer = max(map(len, answers))
        self.examples = examples
        self.prefix = examples[0].tokens[:n_common]
        self.tokens = _padded(rest)
        self.targets = _padded(answers)
        self.weights = _padded([[1.0] * len(answer) for answer in answers])
        last = self.tokens.shape[1] - 1
        self.positions = mx.minimum(mx.array(starts)[:, None] + mx.arange(n_answer), last)
        self.n_tokens = len(self.prefix) + self.tokens.size


def _batches(window: Sequence[Example], max_tokens: int) -> list[Batch]:
    """The window in batches where a shared beginning pays for it, or padding costs little.

    The rest is computed one by one, and where blocks are recomputed (`max_tokens` is 0 then) all of
    it: the recomputed prefix would not pass its gradient on.
    """
    batches = []
    for group in passes(window, max_tokens):
        if _computed_share(group) <= 1 - MIN_SAVED:
            batches.append(Batch(group, _n_common(group)))
            continue
        for part in passes(group, min(max_tokens, ENOUGH_TOKENS)):
            if len(part) > 1 and _computed_share(part) <= MAX_PADDED:
                batches.append(Batch(part, _n_common(part)))
            else:
                batches += [Batch([example], 0) for example in part]
    return batches


def _computed_share(group: Sequence[Example]) -> float:
    """Tokens computed together, padding included, of those computed one by one."""
    n_common, longest = _n_common(group), max(len(example.tokens) for example in group)
    n_together = n_common + len(group) * (longest - n_common)
    return n_together / sum(len(example.tokens) for example in group)


def _n_common(group: Sequence[Example]) -> int:
    return n_common_tokens([example.tokens[: example.answer_start] for example in group])


def _padded(rows: Sequence[Sequence[float]]) -> mx.array:
    length = max(map(len, rows))
    return mx.array([[*row, *[0] * (length - len(row))] for row in rows])


class _FrozenStates:
    """States in front of the first adapted block: of the prefix (1, P, D) and the rest (B, S, D).

    They depend on the tokens alone. Over several epochs each example's are computed once, in the
    same batches whenever a training is started or resumed, and kept: in memory if there is room,
    else on disk. In front of all blocks are embeddings, which are not worth it.

    Args:
        device_model: the model.
        examples: all that will be asked for.
        max_tokens: as for `_batches`.
        epochs: how often each is asked for.
        max_bytes: of the states in memory.
        path: where the others may be kept; None: nowhere.
    """

    def __init__(
        self,
        device_model: DeviceModel,
        examples: Sequence[Example],
        max_tokens: int,
        *,
        epochs: int,
        max_bytes: int,
        path: Path | None,
    ) -> None:
        self._model, self._max_tokens = device_model, max_tokens
        self._examples = list(dict.fromkeys(examples))
        self._max_bytes, self._path = max_bytes, path
        self._wanted = epochs > 1 and device_model.first_adapted_block > 0
        self._kept: dict[Example, mx.array] | StatesOnDisk | None = None

    def of(self, batch: Batch) -> tuple[mx.array | None, mx.array]:
        """The states of the prefix (None without one) and of the rest."""
        if self._wanted and self._kept is None:
            self._keep()
        if self._kept is None:
            return frozen_states(self._model, batch)
        own, n_common = [self._kept[example] for example in batch.examples], len(batch.prefix)
        rest = [states[n_common:] for states in own]
        length = max(map(len, rest))
        padded = [mx.pad(states, ((0, length - len(states)), (0, 0))) for states in rest]
        return (own[0][None, :n_common] if n_common else None), mx.stack(padded)

    def _keep(self) -> None:
        embed = self._model.model.model.embed_tokens
        width, dtype = (row := embed(mx.array([0]))).shape[-1], row.dtype
        needed = n_bytes(self._examples, width, dtype)
        if needed <= self._max_bytes:
            self._kept = dict(self._all())
        elif self._path and needed < shutil.disk_usage(_existing(self._path)).free / 2:
            self._kept = StatesOnDisk(self._path, self._examples, width, dtype, self._all)
        else:
            self._wanted = False

    def _all(self) -> Iterator[tuple[Example, mx.array]]:
        for batch in _batches(self._examples, self._max_tokens):
            prefix, rest = frozen_states(self._model, batch)
            for example, states in zip(batch.examples, rest, strict=True):
                own = states[: len(example.tokens) - 1 - len(batch.prefix)]
                whole = own if prefix is None else mx.concatenate([prefix[0], own])
                mx.eval(whole)
                yield example, whole


def frozen_states(device_model: DeviceModel, batch: Batch) -> tuple[mx.array | None, mx.array]:
    """States in front of the first adapted block, computed: of the prefix and of the rest."""
    embed, n_frozen = device_model.model.model.embed_tokens, device_model.first_adapted_block
    prefix, caches = None, None
    if batch.prefix:
        caches = [SharedPrefix() for _ in range(n_frozen)]
        prefix = embed(mx.array(batch.prefix)[None])
        prefix = device_model.run_blocks(prefix, 0, caches, last=n_frozen)
    states = device_model.run_blocks(embed(batch.tokens), 0, caches, last=n_frozen)
    mx.eval(states, [] if prefix is None else prefix)
    return prefix, states


def _existing(path: Path) -> Path:
    """The path, or its nearest folder that is there."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
