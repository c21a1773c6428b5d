"""Stage 2 by torch: the adapter that MLX trains, to float tolerance, on the same 4-bit values."""

import tiny  # isort: skip  # noqa: F401  # loads the BLAS, before MLX

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from tiny import VOCABULARY

from lamp_eval.config import QuantizationConfig, UserAdapterConfig
from lamp_eval.errors import UserError
from lamp_eval.records import Example
from lamp_eval.schedule import TrainingStep, n_user_steps
from lamp_eval.training import Training, initial_values
from on_device.model import WEIGHTS, DeviceModel
from on_device.trainer import train_user_adapter as train_with_mlx
from recipes import user_adapter
from recipes.base import build_base
from recipes.user_adapter import train_user_adapter

FOUR_BITS = QuantizationConfig(name="4bit", bits=4, group_size=32, embedding_bits=8)
RECIPE = UserAdapterConfig(
    rank=4, alpha=16, projections=["q_proj", "v_proj"], blocks=4, learning_rate=2e-3, epochs=2
)  # fmt: skip
SEED = 7


@pytest.fixture(scope="module")
def base_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    build_base(
        model_dir, None, FOUR_BITS, dtype="bfloat16", base_dir=directory, report=lambda line: None
    )
    return directory


def _examples(n: int, n_common: int = 0, seed: int = 0) -> list[Example]:
    rng = random.Random(seed)
    common = rng.choices(range(2, VOCABULARY), k=n_common)
    examples = []
    for _ in range(n):
        own = rng.choices(range(2, VOCABULARY), k=rng.randint(6, 20))
        examples.append(Example((*common, *own), n_common + len(own) - rng.randint(1, 4)))
    return examples


def _train(
    base_dir: Path,
    adapter_dir: Path,
    examples: Sequence[Example],
    recipe: UserAdapterConfig,
    steps: list[TrainingStep] | None = None,
) -> tuple[Training, list[TrainingStep], dict[str, np.ndarray]]:
    steps = [] if steps is None else steps
    adapter_dir.mkdir()
    training = train_user_adapter(
        base_dir,
        examples,
        recipe,
        seed=SEED,
        device="cpu",
        tokens_per_pass=2048,
        adapter_dir=adapter_dir,
        report=steps.append,
    )
    tensors = mx.load(str(adapter_dir / WEIGHTS))
    return training, steps, {name: np.array(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("changed", "n_common"),
    [
        ({}, 15),
        ({"accumulation": 1, "weight_decay": 0.3}, 0),
        ({"accumulation": 3, "clip_norm": 0.05, "schedule": "linear"}, 0),
        ({"blocks": 2, "accumulation": 3, "projections": ["q_proj", "down_proj"]}, 15),
    ],
)
def test_torch_and_mlx_train_the_same_adapter(
    base_dir: Path, tmp_path: Path, changed: dict, n_common: int
) -> None:
    recipe, examples = replace(RECIPE, **changed), _examples(7, n_common)
    device = DeviceModel(base_dir, recipe)
    expected = train_with_mlx(
        device, examples, recipe, seed=SEED, tokens_per_pass=2048, report=lambda step: None
    )
    training, steps, found = _train(base_dir, tmp_path / "torch", examples, recipe)
    assert training.stopped is None and len(steps) == n_user_steps(7, recipe)
    for column in ("step", "loss", "learning_rate", "gradient_norm", "tokens"):
        own, theirs = ([row[column] for row in t.rows] for t in (training, expected))
        np.testing.assert_allclose(own, theirs, rtol=2e-4, err_msg=column)
    wanted = {name: np.array(tensor) for name, tensor in device.adapter().items()}
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        np.testing.assert_allclose(tensor, wanted[name], rtol=1e-3, atol=2e-5, err_msg=name)
    assert max(np.abs(t).max() for name, t in found.items() if name.endswith("b")) > 1e-3
    device.load_adapter(tmp_path / "torch")  # which checks names, shapes, scale and logits


def test_a_user_gets_the_same_bits_whoever_came_before(base_dir: Path, tmp_path: Path) -> None:
    alone = _train(base_dir, tmp_path / "alone", _examples(5), RECIPE)
    _train(base_dir, tmp_path / "other", _examples(9, seed=1), RECIPE)
    again = _train(base_dir, tmp_path / "again", _examples(5), RECIPE)
    for name, tensor in alone[2].items():
        np.testing.assert_array_equal(tensor, again[2][name])
    files = sorted(path.name for path in (tmp_path / "alone").iterdir())
    assert files == ["adapter_config.json", "adapters.safetensors"]


def test_trouble_ends_the_training_with_the_adapter_of_the_step_before(
    base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(RECIPE, accumulation=1, epochs=1)
    real = user_adapter.trouble
    monkeypatch.setattr(
        user_adapter, "trouble", lambda *a: "made up" if len(a[2]) == 4 else real(*a)
    )
    after: list[dict[str, np.ndarray]] = []

    class Steps(list):
        def append(self, step: TrainingStep) -> None:
            base = user_adapter._loaded(base_dir, 4, 16, ("q_proj", "v_proj"), 4, "cpu")
            after.append({n: p.detach().numpy().T.copy() for n, p in base.adapter.items()})

    stopped, _, found = _train(base_dir, tmp_path / "stopped", _examples(7), recipe, Steps())
    assert stopped.stopped == "step 5 of 7: made up"
    assert len(after) == len(stopped.rows) == 4
    for name, tensor in found.items():  # the fourth step led to the trouble
        np.testing.assert_array_equal(tensor, after[2][name])
    assert any((after[2][name] != after[3][name]).any() for name in found)


def test_mistakes(base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"adapter\.user\.projections"):
        _train(base_dir, tmp_path / "a", _examples(3), replace(RECIPE, projections=["w_pack"]))
    with pytest.raises(UserError, match="example 1"):
        bad = [Example((5, 6, 7), 2), Example((5, 6, 7), 3)]
        _train(base_dir, tmp_path / "b", bad, RECIPE)

    def other_rope(directory: Path):
        model, config = real(directory)
        return model, config | {"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}

    real = user_adapter.dequantized
    monkeypatch.setattr(user_adapter, "dequantized", other_rope)
    user_adapter._loaded.cache_clear()
    with pytest.raises(UserError, match="logits .* off"):
        _train(base_dir, tmp_path / "c", _examples(3), RECIPE)


def test_initial_values_depend_on_name_and_seed_alone() -> None:
    name = "model.layers.3.self_attn.q_proj.lora_a"
    a = initial_values(name, (64, 4), 1)
    assert a.dtype == np.float32 and np.abs(a).max() <= 64**-0.5 < 1.1 * np.abs(a).max()
    np.testing.assert_array_equal(a, initial_values(name, (64, 4), 1))
    assert (a != initial_values(name, (64, 4), 2)).all()
    assert (a != initial_values(name.replace("q_", "v_"), (64, 4), 1)).all()
    assert not initial_values(name.replace("_a", "_b"), (4, 64), 1).any()
