"""Paths through the quantized base: they agree, wrong ones are caught, and one is chosen."""

import tiny  # isort: skip  # noqa: F401  # loads the BLAS, before MLX

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load_model

from lamp_eval import doctor, environment
from lamp_eval.config import BACKWARD_PATHS, QuantizationConfig, UserAdapterConfig
from lamp_eval.errors import UserError
from lamp_eval.layers import Layer, quantized_layers, smollm3_layers
from lamp_eval.records import Example
from on_device import probe
from on_device.kernel import kernel, this_kernel
from on_device.model import DeviceModel
from on_device.trainer import train_user_adapter
from recipes.base import build_base

FOUR_BITS = QuantizationConfig(name="4bit", bits=4, group_size=32, embedding_bits=8)
RECIPE = UserAdapterConfig(
    rank=4, alpha=16, projections=["q_proj", "v_proj"], learning_rate=2e-3, epochs=2
)
ON_CPU = mx.default_device() == mx.cpu


@pytest.fixture(scope="module")
def base_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    build_base(
        model_dir, None, FOUR_BITS, dtype="float32", base_dir=directory, report=lambda line: None
    )
    return directory


def _adapter(base_dir: Path, path: str) -> tuple[DeviceModel, dict[str, np.ndarray], list[float]]:
    model, losses = DeviceModel(base_dir, RECIPE, path=path), []
    examples = [Example(tuple(range(3 + i, 20 + 2 * i)), 12) for i in range(9)]
    train_user_adapter(
        model,
        examples,
        RECIPE,
        seed=7,
        tokens_per_pass=2048,
        report=lambda step: losses.append(step.loss),
    )
    return model, {name: np.array(tensor) for name, tensor in model.adapter().items()}, losses


def test_all_paths_train_the_same_adapter(base_dir: Path) -> None:
    _, expected, losses = _adapter(base_dir, "resident")
    assert max(np.abs(t).max() for name, t in expected.items() if name.endswith("b")) > 1e-3
    for path in BACKWARD_PATHS:
        model, found, own_losses = _adapter(base_dir, path)
        np.testing.assert_allclose(own_losses, losses, rtol=1e-5, err_msg=path)
        for name, tensor in expected.items():
            np.testing.assert_allclose(found[name], tensor, atol=2e-5, err_msg=f"{path} {name}")
        # What is packed stays packed, under the adapter and in the embedding.
        packed = [m for _, m in model.model.named_modules() if hasattr(m, "bits")]
        assert len(packed) == (0 if path == "resident" else 4 * 7 + 1)
        assert isinstance(model.blocks[0].self_attn.q_proj.linear, nn.QuantizedLinear) == (
            path != "resident"
        )


@pytest.mark.parametrize("path", BACKWARD_PATHS)
def test_logits_and_their_gradient(base_dir: Path, path: str) -> None:
    """Through every block and the tied output layer, of other bits than the blocks."""
    tokens = mx.arange(3, 30)[None]

    def gradient(model: DeviceModel) -> tuple[np.ndarray, np.ndarray]:
        states = model.model.model.embed_tokens(tokens)

        def logits(states: mx.array) -> mx.array:
            return model.head(model.model.model.norm(model.run_blocks(states, 0)))

        cotangent = mx.random.normal((1, 27, tiny.VOCABULARY), key=mx.random.key(0))
        out, by_states = mx.vjp(logits, [states], [cotangent])
        return np.array(out[0]), np.array(by_states[0])

    expected = gradient(DeviceModel(base_dir, path="resident"))
    for found, right in zip(gradient(DeviceModel(base_dir, path=path)), expected, strict=True):
        np.testing.assert_allclose(found, right, atol=1e-4 * np.abs(right).max())


@pytest.mark.parametrize("n_out", [64, 512, 96, 33])
def test_the_generic_kernel_is_the_one_that_applies(
    monkeypatch: pytest.MonkeyPatch, n_out: int
) -> None:
    """MLX's kernel on matrix units takes sums over multiples of 64 only."""
    n_terms: list[int] = []
    product = mx.quantized_matmul

    def recorded(x: mx.array, *weights: Any, transpose: bool, **how: Any) -> mx.array:
        if not transpose:
            n_terms.append(x.shape[-1])
        return product(x, *weights, transpose=transpose, **how)

    monkeypatch.setattr(mx, "quantized_matmul", recorded)
    case = probe.Case(5, Layer(n_out, 128), "")
    (check,) = probe.probe(probe.make_layer("packed_generic"), "float32", [case])
    assert check.mistake == ""
    assert sum(n_terms) == n_out
    assert all(n % 64 for n in n_terms)


def test_dense_products_are_forgotten() -> None:
    """Between forward and backward pass nothing dense is kept, but for what MLX queues ahead."""
    if not hasattr(mx, "get_peak_memory"):
        pytest.skip("this MLX does not measure memory")
    shape, n_layers, dense = Layer(512, 512), 120, 4 * 512 * 512
    x = mx.ones((1, 512))

    def peak(path: str) -> int:
        layers = [
            probe.make_layer(path)(probe._random_layer(shape, "float32")) for _ in range(n_layers)
        ]
        mx.eval(x, [layer.parameters() for layer in layers])  # type: ignore[attr-defined]
        before = mx.get_active_memory()
        mx.reset_peak_memory()

        def loss(x: mx.array) -> mx.array:
            for layer in layers:
                x = mx.sin(layer(x))
            return x.sum()

        mx.eval(mx.grad(loss)(x))
        return int(mx.get_peak_memory() - before)

    assert peak("packed") < dense
    assert peak("dequantize") < n_layers / 2 * dense


# The probe


@pytest.mark.parametrize("path", BACKWARD_PATHS)
def test_every_path_is_right_in_float32(path: str) -> None:
    checks = probe.probe(probe.make_layer(path), "float32")
    assert [check.case for check in checks] == list(probe.CASES)
    assert [check for check in checks if check.mistake] == []
    assert max(check.error for check in checks) < 1e-5


@pytest.mark.skipif(not ON_CPU, reason="a mistake of MLX's CPU")
def test_sums_in_half_precision_on_the_cpu_are_caught() -> None:
    small = [c for c in probe.CASES if c.n_rows * c.layer.n_out * c.layer.n_in < 5e6]
    for dtype in ("bfloat16", "float16"):
        wrong = [c for c in probe.probe(probe.make_layer("packed"), dtype, small) if c.mistake]
        assert len(wrong) > 2
        assert "sums in the dtype" in wrong[0].mistake
        right = probe.probe(probe.make_layer("dequantize"), dtype, small)
        assert [check for check in right if check.mistake] == []


Gradient = Callable[[mx.array, mx.array], mx.array]  # from dY (M, K) and dense W (K, N)


def _layout(dy: mx.array, w: mx.array) -> mx.array:
    return dy @ w.T.reshape(w.shape)  # offsets of the transposed layout


def _no_last_rows(dy: mx.array, w: mx.array) -> mx.array:
    whole = dy.shape[0] // 32 * 32
    return mx.concatenate([dy[:whole] @ w, mx.full((dy.shape[0] - whole, w.shape[1]), 7.0)])


def _no_last_terms(dy: mx.array, w: mx.array) -> mx.array:
    whole = w.shape[0] // 16 * 16
    return dy[:, :whole] @ w[:whole]


def _no_last_columns(dy: mx.array, w: mx.array) -> mx.array:
    whole = w.shape[1] // 64 * 64
    return mx.concatenate([dy @ w[:, :whole], mx.full((len(dy), w.shape[1] - whole), 7.0)], axis=1)


def _zeros(dy: mx.array, w: mx.array) -> mx.array:
    return mx.zeros((len(dy), w.shape[1]))


def _in_bfloat16(dy: mx.array, w: mx.array) -> mx.array:
    total = mx.zeros((len(dy), w.shape[1]), mx.bfloat16)
    for k in range(0, w.shape[0], 8):
        total = total + (dy[:, k : k + 8] @ w[k : k + 8]).astype(mx.bfloat16)
    return total.astype(dy.dtype)


def _nan(dy: mx.array, w: mx.array) -> mx.array:
    return dy @ w * float("nan")


def _injected(gradient: Gradient) -> probe.MakeLayer:
    def make(layer: nn.QuantizedLinear) -> Callable[[mx.array], mx.array]:
        dense = mx.dequantize(
            layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits
        )

        @mx.custom_function
        def product(x: mx.array) -> mx.array:
            return x @ dense.T

        @product.vjp
        def _(x: mx.array, cotangent: mx.array, y: mx.array) -> mx.array:
            return gradient(cotangent, dense)

        return product

    return make


@pytest.mark.parametrize(
    ("gradient", "words", "issue"),
    [
        (_layout, "layout", "#4051"),
        (_no_last_rows, "behind the last whole tile", "#4051"),
        (_no_last_terms, "missing terms", "#2355"),
        (_no_last_columns, "columns", "#4250"),
        (_zeros, "all zeros", "#4250"),
        (_in_bfloat16, "inexact", "#4051"),
        (_nan, "not finite", "#4051"),
    ],
)
def test_the_probe_catches_known_mistakes(gradient: Gradient, words: str, issue: str) -> None:
    wrong = [c for c in probe.probe(_injected(gradient), "float32") if c.mistake]
    assert any(words in c.mistake and issue in c.case.issue for c in wrong)
    assert probe.probe(_injected(lambda dy, w: dy @ w), "float32")[0].mistake == ""


# The choice


LAYERS = [Layer(64, 64, count=3), Layer(256, 64, bits=8, n_tokens=8)]
TIMES = {"packed": 3.0, "packed_generic": 4.0, "dequantize": 1.05, "resident": 1.0}


def _found(seconds: dict[str, float], wrong: tuple[str, ...] = ()) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in BACKWARD_PATHS:
        mistake = "all zeros" if path in wrong else ""
        check = {
            "shape": "1 rows, 32→1024",
            "issue": "mlx #4250",
            "error": 1.0 if mistake else 1e-6,
        }
        found[path] = {"checks": [check | {"mistake": mistake}]}
        if not mistake:
            found[path]["seconds"] = seconds[path]
    return found


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """The examinations made, none of which is in a cache before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[tuple[Any, ...]] = []
    outcome = _found(TIMES)

    def examine(*arguments: Any) -> dict[str, Any]:
        calls.append(arguments)
        return outcome

    monkeypatch.setattr(doctor, "_measured", examine)
    return calls


def test_auto_is_the_fastest_and_stays_so(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = doctor.choose_backward("auto", LAYERS, "float32")
    # A twentieth faster is not worth the memory of dense weights.
    assert (chosen.path, chosen.requested, chosen.seconds) == ("dequantize", "auto", TIMES)
    monkeypatch.setattr(doctor, "_measured", lambda *_: _found(TIMES | {"packed": 0.1}))
    assert doctor.choose_backward("auto", LAYERS, "float32") == chosen
    assert doctor.choose_backward("packed", LAYERS, "float32").path == "packed"
    assert len(measured) == 1
    # Another dtype, or other layers, are measured for themselves; so is everything on request.
    assert doctor.choose_backward("auto", LAYERS, "bfloat16").path == "packed"
    assert doctor.choose_backward("auto", LAYERS[:1], "float32").path == "packed"
    doctor.examination(LAYERS, "float32", fresh=True)
    assert doctor.choose_backward("auto", LAYERS, "float32").path == "packed"


def test_a_wrong_path_is_never_used(measured: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = _found(TIMES, wrong=("dequantize", "resident"))
    monkeypatch.setattr(doctor, "_measured", lambda *_: found)
    chosen = doctor.choose_backward("auto", LAYERS, "float32")
    assert chosen.path == "packed"
    assert set(chosen.mistakes) == {"dequantize", "resident"}
    assert chosen.errors["resident"] == 1.0
    with pytest.raises(UserError, match=r"on_device\.backward=resident.*float32") as caught:
        doctor.choose_backward("resident", LAYERS, "float32")
    assert "all zeros (mlx #4250)" in str(caught.value)
    monkeypatch.setattr(doctor, "_measured", lambda *_: _found(TIMES, wrong=BACKWARD_PATHS))
    with pytest.raises(UserError, match="wrong"):
        doctor.choose_backward("auto", LAYERS, "float16")


def test_dense_weights_that_leave_no_memory_are_not_chosen(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_measured", lambda *_: _found(TIMES | {"dequantize": 2.0}))
    assert doctor.choose_backward("auto", LAYERS, "float32").path == "resident"
    assert doctor.choose_backward("auto", LAYERS, "float32", 1e-4).path == "dequantize"
    monkeypatch.setattr(doctor, "_memory_bytes", lambda: 100_000)
    chosen = doctor.choose_backward("auto", LAYERS, "float32")
    assert chosen.path == "dequantize"
    assert chosen.notes == ["resident: 0.0 GB of 0.0 GB, more than half"]


@pytest.mark.slow
def test_a_child_measures_the_same_checks(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    layers = quantized_layers(model_dir, FOUR_BITS)
    found = doctor.examination(layers, "float32")
    own = probe.examine(layers, "float32", report=lambda path: None)
    assert {p: found[p]["checks"] for p in found} == {p: own[p]["checks"] for p in own}


def test_a_model_that_is_not_quantized_needs_no_examination(measured: list[Any]) -> None:
    assert doctor.choose_backward("auto", [], "float32").path == "resident"
    assert measured == []


def test_layers_are_read_from_headers(model_dir: Path) -> None:
    found = quantized_layers(model_dir, FOUR_BITS)
    shapes = {(x.n_out, x.n_in, x.bits): x.count for x in found}
    assert shapes == {
        (64, 64, 4): 2 * 4, (32, 64, 4): 2 * 4, (128, 64, 4): 2 * 4, (64, 128, 4): 4,
        (tiny.VOCABULARY, 64, 8): 1,
    }  # fmt: skip
    assert [x.n_tokens for x in found if x.n_out == tiny.VOCABULARY] == [8]
    whole = QuantizationConfig(name="", bits=4, group_size=32, embedding_bits=None)
    assert len(quantized_layers(model_dir, whole)) == len(found) - 1
    assert quantized_layers(model_dir, QuantizationConfig("none", None)) == []
    # Groups of 128 do not divide 64: mlx-lm leaves such layers as they are.
    wide = QuantizationConfig(name="", bits=4, group_size=128, embedding_bits=4)
    assert [(x.n_out, x.n_in) for x in quantized_layers(model_dir, wide)] == [(64, 128)]


def test_layers_are_those_of_the_base(model_dir: Path, base_dir: Path) -> None:
    model, _ = load_model(base_dir)
    made = Counter(
        (*module.scales.shape, module.bits)
        for _, module in model.named_modules()
        if hasattr(module, "bits")
    )
    layers = quantized_layers(model_dir, FOUR_BITS)
    assert made == {(x.n_out, x.n_in // x.group_size, x.bits): x.count for x in layers}


def test_the_papers_model_has_its_size() -> None:
    n = sum(x.count * x.n_out * x.n_in for x in smollm3_layers(4, 64))
    assert n == pytest.approx(3.08e9, rel=0.01)


# The repaired kernel


PHONE = {"architecture": "applegpu_g18p", "system": "26.2", "in_wheel": True}


@pytest.mark.parametrize(
    ("version", "device", "dispatched", "words"),
    [
        ("0.29.4", PHONE, False, "no such kernel"),
        ("0.30.0", PHONE, False, "incorrect"),
        ("0.32.0", PHONE, False, "incorrect"),
        ("0.32.1", PHONE, False, "does not dispatch"),
        ("0.32.2", PHONE, False, "does not dispatch"),
        ("0.32.3", PHONE, True, "applegpu_g18p"),
        ("0.32.4", PHONE, True, "multiples of 64"),
        ("0.32.4", PHONE | {"architecture": "applegpu_g17s"}, True, "g17s"),
        ("0.32.4", PHONE | {"architecture": "applegpu_g17p"}, False, "matrix units"),
        ("0.32.4", PHONE | {"architecture": "applegpu_g16s"}, False, "matrix units"),
        ("0.32.4", PHONE | {"architecture": ""}, False, "no Apple GPU"),
        ("0.32.4", PHONE | {"system": "26.1"}, False, "26.2"),
        ("0.32.4", PHONE | {"system": ""}, False, "unknown"),
        ("0.32.4", PHONE | {"in_wheel": False}, False, "macosx_15_0"),
    ],
)
def test_who_has_the_repaired_kernel(
    version: str, device: dict[str, Any], dispatched: bool, words: str
) -> None:
    found = kernel(version, **device)
    assert found.dispatched == dispatched
    assert words in found.reason


def test_the_kernel_of_this_machine() -> None:
    found = this_kernel()
    assert found.reason
    if ON_CPU:
        assert not found.dispatched


# The command


def test_the_doctor_speaks_json(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    doctor.main(["--model", str(model_dir), "--group-size", "32", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["dtype"] == environment.mlx_dtype("bfloat16")
    assert set(found["paths"]) == set(BACKWARD_PATHS)
    assert found["auto"]["path"] in BACKWARD_PATHS
    assert all(seconds > 0 for seconds in found["auto"]["seconds"].values())
    n_checks = len(probe.CASES) + len(quantized_layers(model_dir, FOUR_BITS))
    assert len(found["paths"]["packed"]["checks"]) == n_checks
    assert set(found["versions"]) == {"python", "mlx", "mlx-lm", "torch"}


def test_the_doctor_says_what_is_wrong(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(doctor, "_measured", lambda *_: _found(TIMES, wrong=("packed",)))
    doctor.main([])
    shown = capsys.readouterr().out
    assert "packed: 1 rows, 32→1024: error 1, all zeros (mlx #4250)" in shown
    assert "auto takes dequantize" in shown
    monkeypatch.setattr(doctor, "_measured", lambda *_: _found(TIMES, wrong=BACKWARD_PATHS))
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--fresh"])
    assert ended.value.code == 1


def test_the_doctor_refuses_a_folder_without_a_model(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--model", str(tmp_path)])
    assert ended.value.code == 2
    assert "transformers checkpoint" in capsys.readouterr().err
