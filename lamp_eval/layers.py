"""The layers of a model that quantization packs, from its checkpoint's headers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lamp_eval.config import QuantizationConfig

PROMPT_TOKENS = 64  # a short prompt, of which the output layer sees the answer alone
ANSWER_TOKENS = 8


@dataclass(frozen=True)
class Layer:
    """A quantized layer's shape; `count` layers of a model have it.

    `n_tokens` pass through it when a prompt of `PROMPT_TOKENS` does through the model.
    """

    n_out: int
    n_in: int
    group_size: int = 64
    bits: int = 4
    count: int = 1
    n_tokens: int = PROMPT_TOKENS

    def __str__(self) -> str:
        return f"{self.n_in}→{self.n_out}, {self.bits} bit g{self.group_size}"


def quantized_layers(model_dir: Path, quantization: QuantizationConfig) -> list[Layer]:
    """The layers, each shape once, in a fixed order.

    Args:
        model_dir: a transformers checkpoint, not yet quantized.
        quantization: what is going to be packed, and how.
    """
    from safetensors import safe_open

    if quantization.bits is None:
        return []
    matrices: dict[str, tuple[int, int]] = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a mapping
                shape = tensors.get_slice(name).get_shape()
                if name.endswith(".weight") and len(shape) == 2:
                    matrices[name] = shape[0], shape[1]
    untied = any("lm_head" in name for name in matrices)
    counts: Counter[tuple[int, int, int, int]] = Counter()
    for name, (n_out, n_in) in matrices.items():
        is_end = "embed_tokens" in name or "lm_head" in name
        bits = quantization.embedding_bits if is_end else quantization.bits
        if bits is None or n_in % quantization.group_size or ("embed_tokens" in name and untied):
            continue
        counts[n_out, n_in, bits, ANSWER_TOKENS if is_end else PROMPT_TOKENS] += 1
    return [
        Layer(n_out, n_in, quantization.group_size, bits, count, n_tokens)
        for (n_out, n_in, bits, n_tokens), count in sorted(counts.items())
    ]


def smollm3_layers(bits: int, group_size: int) -> list[Layer]:
    """Of SmolLM3-3B: 36 blocks and a tied embedding."""
    shapes = {(2048, 2048): 72, (512, 2048): 72, (11008, 2048): 72, (2048, 11008): 36}
    layers = [Layer(*shape, group_size, bits, count) for shape, count in shapes.items()]
    return [*layers, Layer(128256, 2048, group_size, bits, 1, ANSWER_TOKENS)]
