"""Stage 1: one LoRA adapter over many users (transformers + peft), loss on the answer only."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from lamp_eval.config import TaskAdapterConfig
from lamp_eval.errors import UserError
from lamp_eval.records import Example, passes
from lamp_eval.schedule import TrainingStep, learning_rate_factor, n_task_steps
from recipes.lora import dtype_on, loss_sum, with_lora


def train_task_adapter(
    model_dir: Path,
    examples: Sequence[Example],
    recipe: TaskAdapterConfig,
    *,
    seed: int,
    device: str,
    tokens_per_pass: int,
    adapter_dir: Path,
    report: Callable[[TrainingStep], None],
) -> None:
    """Trains the task adapter and writes it in PEFT's format.

    A batch is computed in passes of at most `tokens_per_pass` tokens, or one example where that
    alone is longer; the gradient is that of the mean over all answer tokens of the batch.

    Args:
        model_dir: a transformers checkpoint.
        examples: token ids with their answer spans; not empty.
        recipe: rank, projections, optimizer and schedule.
        seed: of the adapter's initial values, the order of examples and dropout.
        device: `cuda`, `mps` or `cpu`; bfloat16 on CUDA, float32 elsewhere.
        tokens_per_pass: bounds the memory, at about 1 MB per token in float32 for 135M parameters.
        adapter_dir: an existing, empty directory.
        report: called after each optimizer step.

    Raises:
        UserError: the loss is not finite, or a projection does not exist.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype_on(device)).to(device)
    model = with_lora(
        model,
        LoraConfig(
            r=recipe.rank,
            lora_alpha=recipe.alpha,
            lora_dropout=recipe.dropout,
            target_modules=list(recipe.projections),
            task_type="CAUSAL_LM",
        ),
        option="adapter.task",
    )
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    n_steps = n_task_steps(len(examples), recipe)
    for step, batch in enumerate(_batches(examples, recipe.batch_size, n_steps, seed)):
        factor = learning_rate_factor(step, n_steps, recipe.warmup_ratio, recipe.schedule)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * factor
        n_supervised, loss = sum(example.n_supervised_tokens for example in batch), 0.0
        for part in passes(batch, tokens_per_pass):
            mean = loss_sum(model, part, device) / n_supervised
            mean.backward()
            loss += mean.item()
        if not math.isfinite(loss):
            raise UserError(
                expected="a finite loss",
                found=f"{loss} at step {step + 1} of {n_steps}",
                where="stage 1, the task adapter",
                fix="lower adapter.task.learning_rate",
            )
        torch.nn.utils.clip_grad_norm_(parameters, recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        report(TrainingStep(step + 1, n_steps, loss, sum(len(e.tokens) for e in batch)))
    model.save_pretrained(adapter_dir)


def _batches(
    examples: Sequence[Example], batch_size: int, n_steps: int, seed: int
) -> list[list[Example]]:
    """The batches of all steps; every epoch in an order of its own."""
    rng = random.Random(seed)
    batches: list[list[Example]] = []
    while len(batches) < n_steps:
        order = rng.sample(range(len(examples)), len(examples))
        batches += [
            [examples[i] for i in order[start : start + batch_size]]
            for start in range(0, len(order), batch_size)
        ]
    return batches[:n_steps]
