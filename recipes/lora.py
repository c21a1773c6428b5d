"""LoRA with transformers + peft, for both stages: attached, and its loss on the answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from lamp_eval.errors import UserError
from lamp_eval.records import Example, n_common_tokens

IGNORED = -100  # the label of tokens without loss


def dtype_on(device: str) -> torch.dtype:
    """What a frozen base computes in: bfloat16 on CUDA, float32 elsewhere."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def with_lora(model: torch.nn.Module, config: LoraConfig, *, option: str) -> PeftModel:
    """The model with a fresh adapter.

    Raises:
        UserError: `option`, e.g. `adapter.task`, names projections that the model has not.
    """
    names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    missing = sorted(set(config.target_modules) - names)
    if missing:
        raise UserError(
            expected="projections of the model: "
            + ", ".join(sorted(name for name in names if name.endswith("_proj"))),
            found=", ".join(missing),
            where=f"option {option}.projections",
            fix="name projections that the model has",
        )
    return get_peft_model(model, config)


def loss_sum(model: torch.nn.Module, batch: Sequence[Example], device: str) -> torch.Tensor:
    """Summed cross-entropy over the answer tokens of a batch.

    The prompts' common beginning, most of a short prompt, is computed once and its keys and values
    are shared by all rows; gradients flow through it from every row. The rest is padded on the
    left, so all answers end in the last column and the head, a fifth of a small model's work, is
    computed for the last `n_kept` columns only.
    """
    n_common = n_common_tokens([example.tokens[: example.answer_start] for example in batch])
    length = max(len(example.tokens) for example in batch) - n_common
    n_kept = max(example.n_supervised_tokens for example in batch) + 1
    tokens = torch.zeros((len(batch), length), dtype=torch.long)  # (B, T)
    mask = torch.zeros((len(batch), n_common + length), dtype=torch.long)
    mask[:, :n_common] = 1
    labels = torch.full((len(batch), n_kept - 1), IGNORED)  # (B, K − 1)
    for row, example in enumerate(batch):
        own = example.tokens[n_common:]
        tokens[row, length - len(own) :] = torch.tensor(own)
        mask[row, n_common + length - len(own) :] = 1
        labels[row, n_kept - 1 - example.n_supervised_tokens :] = torch.tensor(
            example.tokens[example.answer_start :]
        )
    shared = None
    if n_common:
        prefix = torch.tensor([batch[0].tokens[:n_common]]).to(device)
        shared = model(input_ids=prefix, use_cache=True, logits_to_keep=1).past_key_values
        shared.batch_repeat_interleave(len(batch))
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, n_common:]
    logits = model(
        input_ids=tokens.to(device),
        attention_mask=mask.to(device),
        position_ids=positions.to(device),
        past_key_values=shared,
        logits_to_keep=n_kept,
        use_cache=shared is not None,
    ).logits[:, :-1]  # (B, K − 1, V)
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1),
        labels.to(device).flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )
