"""The steps of two backward paths, interleaved and timed (paper, Section 5.3)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
from mlx.optimizers import clip_grad_norm
from mlx.utils import tree_flatten, tree_unflatten

from lamp_eval.config import KernelAbConfig, UserAdapterConfig
from lamp_eval.errors import UserError
from lamp_eval.kernel_ab import FUSED, PHASES, Measured, Timing, trajectory_lengths
from lamp_eval.records import Example
from lamp_eval.schedule import TrainingStep, learning_rate_factor
from lamp_eval.training import Training
from on_device.model import DeviceModel
from on_device.trainer import (
    Batch,
    frozen_states,
    loss_and_gradients,
    mean_gradients,
    new_optimizer,
    train_user_adapter,
    updated_adapter,
)

N_ANSWER_TOKENS = 4  # an answer and its EOS; the repaired kernel starts at four rows


@dataclass(frozen=True)
class PhasedStep:
    """One optimizer step: its loss in nats per answer token, and the seconds of each phase."""

    loss: float
    seconds: dict[str, float]


class PhasedTraining:
    """The trainer's steps, each of one example, with an evaluation at the end of every phase.

    Args:
        model: a model with an adapter of this recipe.
        recipe: optimizer and schedule.
        n_steps: of the whole training, for the learning rates.
        seed: of the adapter's initial values.
        checkpoint: blocks that are recomputed at a time; None: none.
    """

    def __init__(
        self,
        model: DeviceModel,
        recipe: UserAdapterConfig,
        *,
        n_steps: int,
        seed: int,
        checkpoint: int | None,
    ) -> None:
        self._model, self._recipe, self._n_steps, self._step = model, recipe, n_steps, 0
        self._graph_of = loss_and_gradients(model, checkpoint)
        self._optimizer = new_optimizer(recipe)
        model.reset_adapter(seed)
        self.adapter = model.adapter()
        self._optimizer.init(self.adapter)
        mx.eval(self.adapter, self._optimizer.state)

    def step(self, example: Example) -> PhasedStep:
        """Takes the next step; `self.adapter` moves on."""
        rate = self._recipe.learning_rate * learning_rate_factor(
            self._step, self._n_steps, self._recipe.warmup_ratio, self._recipe.schedule
        )
        self._model.set_adapter(self.adapter)
        clock = _Clock()
        batch = Batch([example], 0)
        mx.eval(batch.tokens, batch.targets, batch.weights, batch.positions)
        clock.lap("batch")
        states = frozen_states(self._model, batch)  # of blocks in front of the first adapted one
        clock.lap("forward")
        loss, gradients = self._graph_of(batch, *states)
        clock.lap("graph")
        mx.eval(loss)
        clock.lap("forward")
        mx.eval(gradients)  # what the forward pass left is all that remains to be computed
        clock.lap("backward")
        mean = mean_gradients(gradients, example.n_supervised_tokens)
        clipped, norm = clip_grad_norm(mean, self._recipe.clip_norm)
        self.adapter = updated_adapter(self._optimizer, rate, clipped, self.adapter)
        clock.lap("optimizer")
        mean_loss = loss.item() / example.n_supervised_tokens
        norm.item()
        clock.lap("readback")
        self._step += 1
        return PhasedStep(mean_loss, clock.seconds)


class _Clock:
    """Wall-clock time since the last lap, summed by phase."""

    def __init__(self) -> None:
        mx.synchronize()
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        mx.synchronize()
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


def measure_kernel_ab(
    base_dir: Path,
    recipe: UserAdapterConfig,
    config: KernelAbConfig,
    *,
    checkpoint: int | None,
    seed: int,
    report: Callable[[tuple[str, int]], None],
) -> Measured:
    """Times the steps of both paths in turn, then trains with each on the same records.

    A round holds a step in phases with each path and a fused one with each, the two of a kind next
    to each other so that they see the same thermal state; the paths' order alternates from round to
    round. Each round has random tokens of its own, the same for both paths. A step of each path in
    front of a length's rounds is not counted.

    Args:
        base_dir: an MLX checkpoint.
        recipe: of the user adapter; an optimizer step takes one example here, as in the paper.
        config: paths, lengths, rounds.
        checkpoint: blocks that are recomputed at a time; None: none.
        seed: of the adapter's initial values and of the tokens.
        report: called with what has been done, and how many tokens that took.

    Raises:
        UserError: a loss that is not finite.
    """
    recipe = replace(recipe, accumulation=1)
    models = load_models(base_dir, recipe, config.paths)
    n_steps = len(config.lengths) * (1 + config.rounds)
    phased = {
        path: PhasedTraining(model, recipe, n_steps=n_steps, seed=seed, checkpoint=checkpoint)
        for path, model in models.items()
    }

    def train(path: str, examples: Sequence[Example], epochs: int) -> Training:
        def show(step: TrainingStep) -> None:
            report((path, step.n_tokens))

        return train_user_adapter(
            models[path],
            examples,
            replace(recipe, epochs=epochs),
            seed=seed,
            tokens_per_pass=max(config.lengths),
            report=show,
            checkpoint=checkpoint or "none",
        )

    timings: list[Timing] = []
    order = 0
    n_vocabulary = models[config.paths[0]].n_tokens
    for length in config.lengths:
        for round in range(-1, config.rounds):  # the one in front warms up
            example = random_example(length, n_vocabulary, f"{seed}, {length}, {round}")
            paths = config.paths if round % 2 == 0 else config.paths[::-1]
            for path in paths:
                taken = phased[path].step(example).seconds
                report((f"{length} tokens, {path}", length))
                if round >= 0:
                    timings += [
                        Timing(order, length, round, path, phase, taken[phase]) for phase in PHASES
                    ]
                    order += 1
            for path in paths if round >= 0 else ():
                training = train(path, [example], 1)
                if training.stopped:
                    raise _not_finite(path, training.stopped)
                seconds = training.rows[0]["seconds"]
                timings.append(Timing(order, length, round, path, FUSED, seconds))
                order += 1

    records = [
        random_example(length, n_vocabulary, f"{seed}, record {i}")
        for i, length in enumerate(trajectory_lengths(config))
    ]
    trained = {path: train(path, records, recipe.epochs) for path in config.paths}
    return Measured(
        tuple(timings),
        {path: tuple(row["loss"] for row in own.rows) for path, own in trained.items()},
        {path: own.stopped for path, own in trained.items() if own.stopped},
    )


def random_example(length: int, n_vocabulary: int, seed: str) -> Example:
    """Random token ids, the last few of them the answer."""
    tokens = random.Random(seed).choices(range(n_vocabulary), k=length)
    return Example(tuple(tokens), length - N_ANSWER_TOKENS)


def load_models(
    base_dir: Path, recipe: UserAdapterConfig, paths: Sequence[str]
) -> dict[str, DeviceModel]:
    """A model for each path, which share every array of one name, shape and dtype.

    Between paths over packed weights those are all of them: the base is in memory once.
    """
    models: dict[str, DeviceModel] = {}
    shared: dict[str, mx.array] = {}
    for path in paths:
        models[path] = DeviceModel(base_dir, recipe, path=path)
        own = dict(tree_flatten(models[path].model.parameters()))
        same = {
            name: shared[name]
            for name, array in own.items()
            if name in shared
            and (array.shape, array.dtype) == (shared[name].shape, shared[name].dtype)
        }
        models[path].model.update(tree_unflatten(list(same.items())))
        shared = own | shared
    return models


def _not_finite(path: str, reason: str) -> UserError:
    return UserError(
        expected="a finite loss and gradient",
        found=reason,
        where=f"a step with {path}",
        fix="choose another path in kernel_ab.paths, or lower adapter.user.learning_rate",
    )
