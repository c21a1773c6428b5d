"""How a frozen quantized layer is multiplied, and how the gradient passes through it.

The gradient by a layer's input is dX = dY · W, a product over the layer's *outputs*, for which
packed weights, grouped along the inputs, need a kernel of their own (paper, Section 5.3).

- `packed`: MLX's kernels. Where its repaired kernel for dX is dispatched, that one.
- `packed_generic`: the same forward; the sum of dX is split in two parts, neither of which has a
  multiple of 64 terms, so that the kernel on matrix units does not apply.
- `dequantize`: the weights are dequantized for each product and then forgotten.
- `resident`: the weights are dequantized once and stay in memory.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.utils import dequantize_model

# Terms of the first part of dX: enough for a product, no multiple of 64, and as the whole is one
# where the repaired kernel applies, the rest is none either.
_SPLIT = 32

Quantized = nn.QuantizedLinear | nn.QuantizedEmbedding


def use_path(model: nn.Module, path: str) -> nn.Module:
    """Sets how the quantized layers of a model are multiplied; other layers stay as they are.

    Args:
        model: as loaded, before an adapter is attached.
        path: one of `BACKWARD_PATHS`.
    """
    if path == "packed":
        return model
    if path == "resident":
        return dequantize_model(model)
    product = {"packed_generic": _generic_product, "dequantize": _dense_product}[path]
    layers = [
        (name, _with_product(layer, product))
        for name, layer in model.named_modules()
        if isinstance(layer, Quantized)
    ]
    model.update_modules(tree_unflatten(layers))
    return model


Product = Callable[[Quantized, mx.array], mx.array]


class ProductLinear(nn.QuantizedLinear):
    """A quantized linear layer whose products are those of a path."""

    def __call__(self, x: mx.array) -> mx.array:
        """(…, out) of (…, in)."""
        y = self.product(self, x)
        return y + self["bias"] if "bias" in self else y


class ProductEmbedding(nn.QuantizedEmbedding):
    """A quantized embedding whose products, as the output layer, are those of a path."""

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits (…, V) of states (…, D)."""
        return self.product(self, x)


def _with_product(layer: Quantized, product: Product) -> Quantized:
    n_out, n_packed = layer.weight.shape
    n_in = n_packed * 32 // layer.bits
    how = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    new: Quantized
    if isinstance(layer, nn.QuantizedLinear):
        new = ProductLinear(n_in, n_out, bias="bias" in layer, **how)
    else:
        new = ProductEmbedding(n_out, n_in, **how)
    new.update(layer.parameters())
    new.product = product
    new.freeze()
    return new


def _generic_product(layer: Quantized, x: mx.array) -> mx.array:
    weights = (layer["weight"], layer["scales"], layer["biases"])
    how = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}

    @mx.custom_function
    def product(x: mx.array) -> mx.array:
        return mx.quantized_matmul(x, *weights, transpose=True, **how)

    @product.vjp
    def _(x: mx.array, cotangent: mx.array, y: mx.array) -> mx.array:
        if cotangent.shape[-1] % 64:
            return mx.quantized_matmul(cotangent, *weights, transpose=False, **how)
        parts = [
            mx.quantized_matmul(
                cotangent[..., part], *(array[part] for array in weights), transpose=False, **how
            )
            for part in (slice(_SPLIT), slice(_SPLIT, None))
        ]
        return parts[0] + parts[1]

    return product(x)


def _dense_product(layer: Quantized, x: mx.array) -> mx.array:
    def dense() -> mx.array:  # (out, in)
        return mx.dequantize(
            layer["weight"], layer["scales"], layer["biases"],
            layer.group_size, layer.bits, layer.mode,
        )  # fmt: skip

    # Differentiated by itself, the product would keep the dense weights for the backward pass.
    @mx.custom_function
    def product(x: mx.array) -> mx.array:
        return x @ dense().T

    @product.vjp
    def _(x: mx.array, cotangent: mx.array, y: mx.array) -> mx.array:
        return cotangent @ dense()

    return product(x)
