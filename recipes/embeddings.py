"""Vectors of texts by a sentence-embedding model on disk (transformers), for dense retrieval."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from lamp_eval.errors import UserError

BATCH_SIZE = 32
_POOLING_FILE = "1_Pooling/config.json"  # as sentence-transformers writes it


def embed_texts(
    model_dir: Path,
    texts: Sequence[str],
    *,
    device: str,
    report: Callable[[int], None] = lambda done: None,
) -> np.ndarray:
    """The vectors of texts, of unit length: their products are cosine similarities.

    A text longer than the model takes is cut at its end. Tokens are averaged, or the first one is
    taken if the model's `1_Pooling/config.json` says so.

    Args:
        model_dir: a transformers encoder with its tokenizer; sentence-transformers' folders are.
        texts: any number.
        device: `cpu`, `cuda` or `mps`.
        report: called with the number of texts done after each batch.

    Returns:
        float32, (n_texts, dimension).

    Raises:
        UserError: the folder holds no such model.
    """
    first_token = _takes_first_token(model_dir)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        model = AutoModel.from_pretrained(model_dir, use_safetensors=True, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise _no_model(model_dir, str(error).splitlines()[0]) from error
    if tokenizer.pad_token is None:
        raise _no_model(model_dir, "a tokenizer without a padding token")
    model.to(device).eval()
    max_tokens = min(tokenizer.model_max_length, _max_positions(model.config))
    vectors: dict[int, np.ndarray] = {}
    # Those of like length together, so that little is padded.
    order = sorted(range(len(texts)), key=lambda i: (len(texts[i]), i))
    for start in range(0, len(order), BATCH_SIZE):
        rows = order[start : start + BATCH_SIZE]
        batch = tokenizer(
            [texts[i] for i in rows],
            padding=True,
            truncation=True,
            max_length=max_tokens,
            return_tensors="pt",
        ).to(device)
        with torch.inference_mode():
            states = model(**batch).last_hidden_state  # (B, T, D)
        mask = batch["attention_mask"][:, :, None].to(states.dtype)  # (B, T, 1)
        pooled = states[:, 0] if first_token else (states * mask).sum(1) / mask.sum(1).clamp(min=1)
        unit = torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()
        vectors.update(zip(rows, unit, strict=True))
        report(start + len(rows))
    return np.stack([vectors[i] for i in range(len(texts))]).astype(np.float32)


def _takes_first_token(model_dir: Path) -> bool:
    path = model_dir / _POOLING_FILE
    if not path.is_file():
        return False
    pooling: dict[str, Any] = json.loads(path.read_text())
    modes = {
        name for name, on in pooling.items() if name.startswith("pooling_mode_") and on is True
    }
    known = {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    if len(modes) != 1 or not modes <= set(known):
        raise UserError(
            expected=f"one of {', '.join(known)}",
            found=", ".join(sorted(modes)) or "none",
            where=str(path),
            fix="choose a model that averages its tokens or takes the first",
        )
    return known[modes.pop()]


def _max_positions(config: Any) -> int:
    """RoBERTa's positions start after its padding token's id."""
    positions = int(getattr(config, "max_position_embeddings", 512))
    offset = (config.pad_token_id or 0) + 1 if "roberta" in config.model_type else 0
    return positions - offset


def _no_model(model_dir: Path, found: str) -> UserError:
    return UserError(
        expected="a sentence-embedding model: config.json, tokenizer and model.safetensors",
        found=found,
        where=f"{model_dir}, option protocol.embedding_model",
        fix="give the directory of such a model",
    )
