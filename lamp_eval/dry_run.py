"""What a run would take, without loading a model: tokens, time, energy and disk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from lamp_eval import display, environment, estimate
from lamp_eval.config import QuantizationConfig, RunConfig, n_adapted_blocks
from lamp_eval.data import load_corpus
from lamp_eval.inputs import Inputs
from lamp_eval.prompts import make_encoder
from lamp_eval.records import Example
from lamp_eval.tasks import TASKS

# SmolLM3-3B on an iPhone 17 Pro, plugged in (the paper's Sections 6.1 and 6.4): of one adapter.
PHONE_SECONDS_PER_TOKEN, PHONE_SECONDS, PHONE_JOULES_PER_TOKEN = 0.0112, 13.0, 0.04


@dataclass(frozen=True)
class Cost:
    """What one stage takes.

    Attributes:
        stage: its name.
        count: what there is to do.
        n_tokens: of all passes; without generated ones.
        seconds: on this machine, right within about a factor of 2.
        phone_seconds: on the paper's phone; None where it does not run there.
        phone_joules: likewise, net of idling.
    """

    stage: str
    count: str
    n_tokens: int
    seconds: float
    phone_seconds: float | None = None
    phone_joules: float | None = None


def dry_run(config: RunConfig, console: Console) -> list[Cost]:
    """Shows what a run would take; loads its data and tokenizer, and nothing is written.

    Args:
        config: a checked configuration.
        console: where to show it.

    Returns:
        The stages' costs, none of which is known to exist already.

    Raises:
        UserError: a mistake in the data.
    """
    from recipes.model_source import find_tokenizer, load_tokenizer, rough_tokenizer

    task = TASKS[config.task]
    corpus = load_corpus(task, config.data)
    model = config.model
    folder, reason = find_tokenizer(
        name=model.name,
        hub_id=model.hub_id,
        path=model.path,
        revision=model.revision,
        cache_dir=environment.cache_dir() / "models",
    )
    tokenizer = rough_tokenizer() if folder is None else load_tokenizer(folder)
    encoder = make_encoder(tokenizer, task, config.protocol, config.seed, None, corpus.profiles)
    inputs = Inputs(config, corpus, encoder)
    shape = json.loads((folder / "config.json").read_text()) if folder else None
    costs = _costs(config, inputs, estimate.flops_per_second() / model.n_parameters)

    say = console.print
    say(f"[bold]{config.name}[/] · setting {config.setting} · {', '.join(config.arms)} · dry run")
    kind = "SYNTHETIC users" if corpus.synthetic else "users"
    say(f"  {len(corpus.users)} {kind}; task adapter: {len(corpus.task_users)} "
        f"({corpus.task_users_origin})")  # fmt: skip
    for note in corpus.notes:
        say(f"  {note}", style="yellow", markup=False)
    if folder is None:
        say(f"  tokens are estimated from words, within about a fifth: no tokenizer ({reason})",
            style="yellow", markup=False)  # fmt: skip
    say(_table(costs))
    for line in _disk_lines(config, inputs, shape):
        say(f"  {line}")
    return costs


def _costs(config: RunConfig, inputs: Inputs, flops: float) -> list[Cost]:
    """The stages' costs; `flops`: float operations per second and parameter."""
    costs = []
    stage1, stage2 = config.adapter.task, config.adapter.user
    if inputs.needs_training:
        examples = inputs.task_examples
        n_epochs: float = stage1.epochs
        if stage1.max_steps is not None and examples:
            n_epochs = min(n_epochs, stage1.max_steps * stage1.batch_size / len(examples))
        work = estimate.TASK_ADAPTER * estimate.n_task_tokens(examples, stage1)
        costs.append(
            Cost("task adapter", f"{len(examples):,} examples × {n_epochs:.3g} epochs",
                 round(n_epochs * _n_tokens(examples)), work / flops)
        )  # fmt: skip
    if inputs.needs_user_adapters:
        n_tokens, work, n_examples = 0, 0.0, 0
        for user in inputs.with_history:
            examples = inputs.user_examples(user)
            n_tokens += stage2.epochs * _n_tokens(examples)
            work += estimate.USER_ADAPTER * estimate.n_user_tokens(examples, stage2)
            n_examples += len(examples)
        n_users = len(inputs.with_history)
        costs.append(
            Cost(
                "user adapters",
                f"{n_users:,} users, {n_examples:,} examples × {stage2.epochs} epochs",
                n_tokens,
                work / flops,
                PHONE_SECONDS_PER_TOKEN * n_tokens + PHONE_SECONDS * n_users,
                PHONE_JOULES_PER_TOKEN * n_tokens,
            )
        )
    for name, arm in inputs.arms.items():
        if arm.method:
            continue
        n_tokens, work, n_queries = 0, 0.0, 0
        for user in inputs.corpus.users:
            prompts = [request.prompt for request in inputs.requests(name, user)]
            n_queries += len(prompts)
            n_tokens += sum(map(len, prompts))
            n_new = inputs.encoder.max_new_tokens
            work += estimate.ANSWERS * estimate.n_answer_tokens(prompts, n_new)
        costs.append(Cost(f"arm {name}", f"{n_queries:,} queries", n_tokens, work / flops))
    return costs


def _n_tokens(examples: list[Example]) -> int:
    return sum(len(example.tokens) for example in examples)


def _table(costs: list[Cost]) -> Table:
    table = Table(title="what it would take", title_justify="left", title_style="bold")
    for name in ("stage", "what", "tokens", "this machine", "a 3B model on an iPhone 17 Pro"):
        table.add_column(name, justify="left" if name in ("stage", "what") else "right")
    for cost in costs:
        phone = ""
        if cost.phone_seconds is not None and cost.phone_joules is not None:
            phone = f"{display.duration(cost.phone_seconds)}, {cost.phone_joules / 1e3:,.0f} kJ"
        here = display.duration(cost.seconds)
        table.add_row(cost.stage, cost.count, f"{cost.n_tokens:,}", here, phone)
    table.add_section()
    n_tokens = sum(cost.n_tokens for cost in costs)
    here = display.duration(sum(cost.seconds for cost in costs))
    table.add_row("all", "", f"{n_tokens:,}", here, "")
    return table


# Disk


def _disk_lines(config: RunConfig, inputs: Inputs, shape: dict[str, Any] | None) -> list[str]:
    n, model = config.model.n_parameters, config.model
    item = 4 if model.dtype == "float32" else 2
    n_bases = len({a.task_adapter for a in inputs.arms.values() if not a.method})
    base = n * _bytes_per_weight(config.quantization, item)
    making = 2 * item * n
    lines = [
        f"disk: {n_bases} × {base / 1e9:.2f} GB for the bases, {making / 1e9:.1f} GB more while "
        "they are made, and the model itself"
    ]
    if inputs.needs_user_adapters and shape is not None:
        size = 4 * _adapter_size(config, shape)
        n_users = len(inputs.with_history)
        total = n_users * size / 1e9
        lines.append(f"{n_users:,} user adapters of {size / 1e6:.1f} MB: {total:.2f} GB")
    return lines


def _bytes_per_weight(quantization: QuantizationConfig, item: int) -> float:
    """Packed bits, and a scale and a bias for each group; the embedding counted like the rest."""
    if quantization.bits is None:
        return item
    return quantization.bits / 8 + 2 * item / quantization.group_size


def _adapter_size(config: RunConfig, shape: dict[str, Any]) -> int:
    """Weights of a user adapter."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    head = shape.get("head_dim") or hidden // heads
    values = head * shape.get("num_key_value_heads", heads)
    inner = shape["intermediate_size"]
    sides = {
        "q_proj": (hidden, head * heads), "k_proj": (hidden, values), "v_proj": (hidden, values),
        "o_proj": (head * heads, hidden), "gate_proj": (hidden, inner), "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }  # fmt: skip
    user = config.adapter.user
    n_blocks = n_adapted_blocks(user.blocks, shape["num_hidden_layers"])
    return n_blocks * user.rank * sum(sum(sides.get(name, (0, 0))) for name in user.projections)
