"""The work of a run: computes what its plan is missing, and gathers the predictions."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from lamp_eval import display, environment, methods
from lamp_eval.errors import UserError
from lamp_eval.metrics import score_output
from lamp_eval.plan import Plan, Unit
from lamp_eval.records import Prediction, Request, User, like_lengths
from lamp_eval.results import StageRecord
from lamp_eval.schedule import TrainingStep
from lamp_eval.store import key_hash
from lamp_eval.training import METRICS, Training

# How torch and MLX say that a CPU or GPU has no more memory. (MLX on a Linux CPU crashes.)
NO_MEMORY = ("can't allocate memory", "out of memory", "[metal::malloc]", "Insufficient Memory")
# How MLX and safetensors say that a disk or a quota is full, or a file too large.
_NOT_WRITTEN = ("[write] Unable to write", "os error 28", "os error 122", "os error 27")

# So many passes' worth of answers are generated before they are written: no more is lost by a kill,
# and with one query a user few passes are not full.
PASSES_AT_ONCE = 8

TRAINING = "training.json"  # beside a user adapter: how its training ended


class Pipeline:
    """Carries out a plan.

    Attributes:
        stages: the plan's units in the order of their work, whether computed or reused.
        method_seconds: what the registered arms took.
    """

    def __init__(self, plan: Plan, console: Console) -> None:
        self.plan, self.console = plan, console
        self.stages: list[StageRecord] = []
        self.method_seconds = 0.0
        self._method_outputs: dict[str, dict[str, str]] = {}  # by arm and query id
        self._peak_with_child = 0  # bytes
        self._loaded: tuple[str, Any] | None = None
        self._base_hash: str | None = None  # of what is loaded, once something is trained on it

    def execute(self, progress: Progress) -> None:
        """Computes what is missing, in order; what is done is kept, answers after a few passes."""
        adapters, torch_trains = list(self.plan.user_units.values()), self._torch_trains()
        with self.plan.child:
            if self.plan.task_unit:
                self._build(
                    progress, [self.plan.task_unit], "task adapter", self._train_task_adapter
                )
            bases = list(self.plan.base_units.values())
            if bases:
                self._build(progress, bases, "merge and quantize", self._build_base)
            if adapters and torch_trains:
                self._build(progress, adapters, "user adapters", self._train_user_adapter)
        if any(not stage.reused for stage in self.stages):  # the child and ours beside it as one
            both = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
            self._peak_with_child = sum(environment.peak_memory_bytes(who) for who in both)
        if adapters and not torch_trains:
            self._build(progress, adapters, "user adapters", self._train_user_adapter)
        for name in (name for name in self.plan.arms if name not in self.plan.methods):
            self._answer(name, progress)
        self._loaded = None  # its memory is the methods' now
        for name in self.plan.methods:
            self._call_method(name, progress)

    def _call_method(self, name: str, progress: Progress) -> None:
        bar = progress.add_task(f"arm {name}", total=1, tokens=0)
        start, users = time.perf_counter(), self.plan.corpus.users
        requests = [request for user in users for request in self.plan.inputs.requests(name, user)]
        outputs = methods.answers(name, self.plan.methods[name], self.plan.task, users, requests)
        ids = [request.query_id for request in requests]
        self._method_outputs[name] = dict(zip(ids, outputs, strict=True))
        self.method_seconds += time.perf_counter() - start
        progress.advance(bar)

    def _build(self, progress: Progress, units: Sequence[Unit], title: str, work: Any) -> None:
        bar = progress.add_task(title, total=len(units), tokens=0)
        for unit in units:
            start, reused = time.perf_counter(), self.plan.done(unit)
            if not reused:
                with (
                    self._shown(progress, bar, title, unit.what),
                    self._explained(unit.stage, unit.what),
                    self.plan.store.build(unit.stage, unit.key) as folder,
                ):
                    work(unit, folder, progress, bar)
            self._record(unit, reused, time.perf_counter() - start)
            progress.advance(bar)
        self._show_end(progress, bar, title, len(units))

    def _answer(self, arm_name: str, progress: Progress) -> None:
        """An arm's answers; users whom no adapter of their own serves are answered together.

        Users with prompts of like length, that is. What is kept is each user's, as if alone.
        """
        title, users = f"arm {arm_name}", self.plan.corpus.users
        bar = progress.add_task(title, total=len(users), tokens=0)
        groups, together = [], []
        for user in users:
            unit = self.plan.prediction_units[arm_name, user.id]
            if self.plan.done(unit):
                self._record(unit, True, 0.0)
                progress.advance(bar)
            elif self.plan.adapter_owner(arm_name, user):
                groups.append([user])
            else:
                together.append(user)
        if together:
            n_new = self.plan.encoder.max_new_tokens
            requests = [self.plan.inputs.requests(arm_name, user) for user in together]
            n_tokens = [sum(len(r.prompt) + n_new for r in own) for own in requests]
            limit = PASSES_AT_ONCE * self.plan.config.executor.tokens_per_pass
            groups += [[together[i] for i in rows] for rows in like_lengths(n_tokens, 0, limit)]
        for group in groups:
            self._answer_together(arm_name, group, progress, bar)
        self._show_end(progress, bar, title, len(users))

    def _answer_together(
        self, arm_name: str, users: Sequence[User], progress: Progress, bar: Any
    ) -> None:
        """Keeps the answers to all queries of users whom the same adapter, or none, serves."""
        start = time.perf_counter()
        units = [self.plan.prediction_units[arm_name, user.id] for user in users]
        requests = [self.plan.inputs.requests(arm_name, user) for user in users]
        others = f" and {len(users) - 1} more" if len(users) > 1 else ""
        what, stage = f"{units[0].what}{others}", units[0].stage
        with (
            self._shown(progress, bar, f"arm {arm_name}", what),
            self._explained(stage, what),
        ):
            rows = iter(self._generate(arm_name, users, [r for own in requests for r in own]))
            for unit, own in zip(units, requests, strict=True):
                with self.plan.store.build(stage, unit.key) as folder:
                    text = json.dumps(list(islice(rows, len(own))))
                    (folder / "answers.json").write_text(text + "\n")
        seconds = time.perf_counter() - start
        n_tokens = [sum(len(request.prompt) for request in own) for own in requests]
        for unit, n in zip(units, n_tokens, strict=True):
            self._record(unit, False, seconds * n / sum(n_tokens))
        _count_tokens(progress, bar, sum(n_tokens))
        progress.advance(bar, len(units))

    @contextmanager
    def _shown(self, progress: Progress, bar: Any, title: str, what: str) -> Iterator[None]:
        """What is computed inside, on its bar; once done, a line where there are no bars."""
        start = time.perf_counter()
        progress.update(bar, description=f"{title} · {what}"[:40])
        yield
        if not self.console.is_terminal:  # bars show there only at the end
            seconds = display.duration(time.perf_counter() - start)
            self.console.print(f"  {title} · {what}: {seconds}")

    @contextmanager
    def _explained(self, stage: str, what: str) -> Iterator[None]:
        """A library's error inside becomes a `UserError` if it is one that a user can mend."""
        try:
            yield
        except Exception as error:
            mistake = _mistake(error, f"{stage}, {what}", self.plan.store.root / stage)
            if mistake is None:
                raise
            raise mistake from error

    def _record(self, unit: Unit, reused: bool, seconds: float) -> None:
        path = str(self.plan.store.path(unit.stage, unit.key))
        self.stages.append(
            StageRecord(stage=unit.stage, what=unit.what, path=path, reused=reused, seconds=seconds)
        )

    def _show_end(self, progress: Progress, bar: Any, title: str, n_units: int) -> None:
        all_reused = n_units and all(stage.reused for stage in self.stages[-n_units:])
        progress.update(bar, description=f"{title}{' (reused)' if all_reused else ''}")

    def _train_task_adapter(self, unit: Unit, folder: Path, progress: Progress, bar: Any) -> None:
        with _step_bar(progress, "  loading torch") as show_step:
            self.plan.child.run(
                "recipes.task_adapter:train_task_adapter",
                self.plan.model.path,
                self.plan.inputs.task_examples,
                self.plan.config.adapter.task,
                seed=self.plan.config.seed,
                device=self.plan.torch_device,
                tokens_per_pass=self.plan.config.executor.tokens_per_pass,
                adapter_dir=folder,
                report=show_step,
            )

    def _build_base(self, unit: Unit, folder: Path, progress: Progress, bar: Any) -> None:
        adapter: str | None = None
        if unit.key["adapter"] is not None:
            adapter = self.plan.config.adapter.task.path or str(
                self.plan.store.path(self.plan.task_unit.stage, self.plan.task_unit.key)  # type: ignore[union-attr]
            )
        error = self.plan.child.run(
            "recipes.base:build_base",
            self.plan.model.path,
            adapter,
            self.plan.config.quantization,
            dtype=self.plan.config.model.dtype,
            base_dir=folder,
            report=lambda line: progress.update(bar, description=f"{unit.what}: {line}"[:40]),
        )
        (folder / "parity.json").write_text(json.dumps({"parity_error": error}) + "\n")

    def _train_user_adapter(self, unit: Unit, folder: Path, progress: Progress, bar: Any) -> None:
        train = self._train_with_torch if self._torch_trains() else self._train_with_mlx
        with _step_bar(progress, "  step") as show_step:
            training = train(unit, folder, show_step)
        about = {name: value for name, value in asdict(training).items() if name != "rows"}
        rows = [json.dumps(row) + "\n" for row in training.rows]
        (folder / METRICS).write_text("".join(rows))
        (folder / TRAINING).write_text(json.dumps(about) + "\n")

    def _torch_trains(self) -> bool:
        return self.plan.recipe.backend == "torch"

    def _train_with_mlx(
        self, unit: Unit, folder: Path, show_step: Callable[[TrainingStep], None]
    ) -> Training:
        from on_device.trainer import train_user_adapter

        model, device = self._device_model(True), self.plan.config.on_device
        self._base_hash = self._base_hash or model.base_hash()
        work_dir = self.plan.store.work_path(unit.stage, unit.key)
        training: Training = train_user_adapter(
            model,
            self.plan.inputs.user_examples(self.plan.users[unit.what]),
            self.plan.recipe,
            seed=unit.key["seed"],
            tokens_per_pass=self.plan.config.executor.tokens_per_pass,
            report=show_step,
            state_path=work_dir / "state.safetensors",
            save_every=device.save_every,
            checkpoint=device.checkpoint,
            memory_budget_gb=device.memory_budget_gb,
        )
        if model.base_hash() != self._base_hash:
            raise RuntimeError(f"the base has changed while {unit.what!r} was trained")
        model.save_adapter(folder, self.plan.recipe)
        return training

    def _train_with_torch(
        self, unit: Unit, folder: Path, show_step: Callable[[TrainingStep], None]
    ) -> Training:
        base = self.plan.base_units[True]
        training: Training = self.plan.child.run(
            "recipes.user_adapter:train_user_adapter",
            self.plan.store.path(base.stage, base.key),
            self.plan.inputs.user_examples(self.plan.users[unit.what]),
            self.plan.recipe,
            seed=unit.key["seed"],
            device=self.plan.torch_device,
            tokens_per_pass=self.plan.config.executor.tokens_per_pass,
            adapter_dir=folder,
            report=show_step,
        )
        return training

    def _generate(
        self, arm_name: str, users: Sequence[User], requests: Sequence[Request]
    ) -> list[dict[str, Any]]:
        """The answers to the users' requests, in their order, as `answers.json` keeps them."""
        from on_device.generate import generate, label_log_likelihoods

        chosen, encoder, labels = self.plan.arms[arm_name], self.plan.encoder, self.plan.label_ids
        model = self._device_model(chosen.task_adapter)
        owner = self.plan.adapter_owner(arm_name, users[0])
        if owner:
            owner_unit = self.plan.user_units[owner.id]
            adapter_dir = self.plan.store.path(owner_unit.stage, owner_unit.key)
            model.load_adapter(adapter_dir, may_be_zero=self._stopped(owner_unit) is not None)
        elif chosen.task_adapter:
            model.reset_adapter(0)  # B = 0: exactly the task base
        prompts = [request.prompt for request in requests]
        tokens_per_pass = self.plan.config.executor.tokens_per_pass
        if labels is not None:
            rows = []
            for found in label_log_likelihoods(
                model, prompts, list(labels.values()), tokens_per_pass=tokens_per_pass
            ):
                by_label = dict(zip(labels, found, strict=True))
                best = max(by_label, key=by_label.__getitem__)
                rows.append({"output": best, "finished": True, "log_likelihoods": by_label})
            return rows
        seeds = [seed for user in users for seed in self.plan.sample_seeds(user) or ()]
        answers = generate(
            model,
            prompts,
            max_new_tokens=encoder.max_new_tokens,
            eos_token_id=encoder.eos_token_id,
            tokens_per_pass=tokens_per_pass,
            seeds=seeds or None,
        )
        return [
            {"output": encoder.answer_text(answer.tokens), "finished": answer.finished}
            for answer in answers
        ]

    def _device_model(self, task_adapter: bool) -> Any:
        """The base in memory, one at a time."""
        from on_device.model import DeviceModel

        unit = self.plan.base_units[task_adapter]
        name = key_hash(unit.key)
        if self._loaded is None or self._loaded[0] != name:
            self._loaded = None  # frees the other base first
            recipe = self.plan.recipe if task_adapter else None
            base_dir = self.plan.store.path(unit.stage, unit.key)
            self._loaded = name, DeviceModel(base_dir, recipe, path=self.plan.backward.path)
            self._base_hash = None
        return self._loaded[1]

    # What comes out

    def predictions(self, arm_name: str) -> list[Prediction]:
        """The scored predictions of an arm, users in the corpus's order."""
        predictions = []
        for user in self.plan.corpus.users:
            owner = self.plan.adapter_owner(arm_name, user)
            answers = self._answers(arm_name, user)
            for request, answer in zip(
                self.plan.inputs.requests(arm_name, user), answers, strict=True
            ):
                predictions.append(
                    Prediction(
                        arm=arm_name,
                        user_id=user.id,
                        query_id=request.query_id,
                        prompt_hash=request.prompt_hash,
                        output=answer["output"],
                        gold=request.gold,
                        donor_id=owner.id if owner and owner is not user else None,
                        finished=answer["finished"],
                        scores=score_output(self.plan.task, answer["output"], request.gold),
                    )
                )
        return predictions

    def _answers(self, arm_name: str, user: User) -> list[dict[str, Any]]:
        """Outputs to the user's queries, and whether each is complete."""
        if arm_name in self._method_outputs:
            outputs = self._method_outputs[arm_name]
            return [{"output": outputs[query.id], "finished": True} for query in user.queries]
        unit = self.plan.prediction_units[arm_name, user.id]
        path = self.plan.store.path(unit.stage, unit.key) / "answers.json"
        answers: list[dict[str, Any]] = json.loads(path.read_text())
        return answers

    def stopped_users(self) -> dict[str, str]:
        """By user id, why the training of their adapter ended early."""
        found = ((user_id, self._stopped(unit)) for user_id, unit in self.plan.user_units.items())
        return {user_id: reason for user_id, reason in found if reason is not None}

    def _stopped(self, unit: Unit) -> str | None:
        text = (self.plan.store.path(unit.stage, unit.key) / TRAINING).read_text()
        reason: str | None = json.loads(text)["stopped"]
        return reason

    def parity_errors(self) -> dict[str, float]:
        """Of each base: the difference of torch's and MLX's logits, relative to the largest."""
        errors = {}
        for unit in self.plan.base_units.values():
            text = (self.plan.store.path(unit.stage, unit.key) / "parity.json").read_text()
            errors[unit.what] = json.loads(text)["parity_error"]
        return errors

    def peak_memory_bytes(self) -> int:
        """The run's largest resident size, the child process included."""
        return max(environment.peak_memory_bytes(resource.RUSAGE_SELF), self._peak_with_child)


def _mistake(error: Exception, what: str, folder: Path) -> UserError | None:
    """What a library's error means, if it is one that a user can mend."""
    if any(words in str(error) for words in _NOT_WRITTEN):
        return UserError(
            expected="space for the whole file",
            found=str(error),
            where=str(folder),
            fix="free some space or set output_dir=…; the same command then continues",
        )
    if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
        return UserError(
            expected="enough memory",
            found=str(error).splitlines()[0] if str(error) else "too little",
            where=what,
            fix="free some memory or lower executor.tokens_per_pass; "
            "the same command then continues",
        )
    return None


@contextmanager
def _step_bar(progress: Progress, description: str) -> Iterator[Callable[[TrainingStep], None]]:
    """A second bar that is there while one adapter is trained; what it gives shows a step."""
    bar = progress.add_task(description, total=None, tokens=0)

    def show(step: TrainingStep) -> None:
        progress.update(bar, completed=step.step, total=step.n_steps,
                        description=f"  step, loss {step.loss:.3f}")  # fmt: skip
        _count_tokens(progress, bar, step.n_tokens)

    try:
        yield show
    finally:
        progress.remove_task(bar)


def _count_tokens(progress: Progress, bar: Any, n_tokens: int) -> None:
    before = next(task for task in progress.tasks if task.id == bar).fields["tokens"]
    progress.update(bar, tokens=before + n_tokens)
