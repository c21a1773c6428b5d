"""The CPU's own exponential, SiLU and attention against MLX's and float64."""

import tiny  # isort: skip  # noqa: F401  # loads the BLAS, before MLX

import os
import platform
import subprocess
import sys
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import activations, base

from on_device import cpu


def test_exponential_is_as_exact_as_the_one_of_mlx() -> None:
    x = np.concatenate([np.linspace(-64, 64, 200_001), np.linspace(-1, 1, 200_001)])
    x = x.astype(np.float32)
    expected = np.exp(x.astype(np.float64))

    def error(found: mx.array) -> float:
        return float(np.abs(np.array(found, dtype=np.float64) / expected - 1).max())

    assert error(cpu.exp(mx.array(x))) <= 1.1 * error(mx.exp(mx.array(x)))


def test_exponential_at_the_ends() -> None:
    found = np.array(cpu.exp(mx.array([0.0, -1e9, -float("inf"), 1e9])))
    assert found[0] == 1
    assert (found[1:3] < 2e-28).all()
    assert (found[1:3] > 1e-29).all()  # a product with it is no denormal
    assert 6e27 < found[3] < float("inf")


def test_swiglu_and_its_gradients() -> None:
    gate, x = (mx.random.normal((3, 50), key=mx.random.key(i)) * 5 for i in range(2))

    def sums(function):
        return mx.value_and_grad(lambda g, x: (function(g, x) * x).sum(), argnums=(0, 1))(gate, x)

    (ours, our_gradients), (theirs, their_gradients) = sums(cpu.swiglu), sums(activations.swiglu)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    for our, their in zip(our_gradients, their_gradients, strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-4, atol=1e-5)


MASKS = {
    "none": None,
    "causal": "causal",
    "behind a prefix": base.create_causal_mask(6, 5),
    "padded rows": base.create_causal_mask(6, 5, left_padding=mx.array([0, 3])),
    "added": mx.where(base.create_causal_mask(6, 5), 0.0, -1e9),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("n_keys", [1, 2, 4])
def test_attention_and_its_gradients(mask: str, n_keys: int) -> None:
    n_new = 1 if mask == "none" else 6  # a token that is generated sees all
    shapes = (2, 4, n_new, 8), (2, n_keys, 11, 8), (2, n_keys, 11, 8)
    inputs = [mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate(shapes)]
    weights = mx.random.normal(shapes[0], key=mx.random.key(9))

    def results(function):
        def total(*inputs):
            out = function(*inputs, cache=None, scale=0.3, mask=MASKS[mask])
            return (out * weights).sum(), out

        return mx.value_and_grad(total, argnums=(0, 1, 2))(*inputs)

    (_, ours), our_gradients = results(cpu.attention)
    (_, theirs), their_gradients = results(base.scaled_dot_product_attention)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    for our, their in zip(our_gradients, their_gradients, strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n_before", [0, 5])
def test_a_long_causal_attention_is_computed_in_parts(n_before: int) -> None:
    n_new = 2 * cpu._QUERIES + 3
    shapes = (1, 4, n_new, 8), (1, 2, n_before + n_new, 8), (1, 2, n_before + n_new, 8)
    inputs = [mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate(shapes)]
    weights = mx.random.normal(shapes[0], key=mx.random.key(9))

    def results(function):
        def total(*inputs):
            return (function(*inputs, cache=None, scale=0.3, mask="causal") * weights).sum()

        return mx.value_and_grad(total, argnums=(0, 1, 2))(*inputs)

    (ours, our_gradients), (theirs, their_gradients) = (
        results(cpu.attention),
        results(base.scaled_dot_product_attention),
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    for our, their in zip(our_gradients, their_gradients, strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-4, atol=1e-4)


def _kept(layer, x: mx.array) -> float:
    """Bytes that one more of these layers keeps for the gradient."""

    def peak(n_layers: int) -> int:
        def total(x):
            for _ in range(n_layers):
                x = layer(x)
            return x.sum()

        mx.reset_peak_memory()
        mx.eval(mx.grad(total)(x))
        return mx.get_peak_memory()

    return (peak(20) - peak(10)) / 10


def test_swiglu_keeps_its_arguments_alone() -> None:
    x = mx.random.normal((512, 1024), key=mx.random.key(0))
    mx.eval(x)
    assert _kept(lambda x: cpu.swiglu(x, x), x) < 1.2 * x.nbytes


def test_causal_attention_keeps_the_weights_that_are_not_zero() -> None:
    x = mx.random.normal((1, 4, 4 * cpu._QUERIES, 8), key=mx.random.key(0))
    mx.eval(x)
    weights = 4 * x.shape[2] ** 2 * x.itemsize
    kept = _kept(lambda x: cpu.attention(x, x, x, None, 0.3, "causal"), x)
    assert kept < 10 / 16 * weights + 8 * x.nbytes  # 1 + 2 + 3 + 4 of 16 parts


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_other_precisions_are_computed_as_mlx_does(dtype: mx.Dtype) -> None:
    q, k, v = (mx.random.normal((1, 2, 5, 8), key=mx.random.key(i)).astype(dtype) for i in range(3))
    for ours, theirs in (
        (cpu.swiglu(q, k), activations.swiglu(q, k)),
        (
            cpu.attention(q, k, v, None, 0.3, "causal"),
            base.scaled_dot_product_attention(q, k, v, None, 0.3, "causal"),
        ),
    ):
        assert ours.dtype == dtype
        assert mx.array_equal(ours, theirs)


def test_only_what_a_module_has_is_replaced() -> None:
    module = ModuleType("architecture")
    module.swiglu = activations.swiglu
    cpu.speed_up(module)
    assert module.swiglu is cpu.swiglu
    assert not hasattr(module, "scaled_dot_product_attention")


@pytest.mark.skipif(platform.system() != "Linux", reason="the BLAS is loaded on Linux only")
@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, 10_000), ({"GOMP_SPINCOUNT": "77"}, 77), ({"OMP_WAIT_POLICY": "passive"}, 0)],
)
def test_threads_spin_little_unless_the_user_says_otherwise(
    given: dict[str, str], spins: int
) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", "import on_device"],
        env=kept | given | {"OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr
