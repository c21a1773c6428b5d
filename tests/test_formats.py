"""Adapters between mlx-lm's format and PEFT's: no value is lost, and the logits are the same."""

import tiny  # isort: skip  # noqa: F401  # loads the BLAS, before MLX

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import N_BLOCKS, VOCABULARY
from transformers import AutoModelForCausalLM, AutoTokenizer

from lamp_eval.config import QuantizationConfig, UserAdapterConfig
from lamp_eval.errors import UserError
from lamp_eval.records import Example
from on_device.model import CONFIG, WEIGHTS, DeviceModel
from on_device.trainer import train_user_adapter
from recipes.base import build_base
from recipes.formats import PEFT_WEIGHTS, dequantize_base, main, to_mlx, to_peft

RECIPE = UserAdapterConfig(
    rank=4, alpha=6, projections=["q_proj", "v_proj", "down_proj"], learning_rate=2e-3,
    accumulation=2,
)  # fmt: skip
FOUR_BITS = QuantizationConfig(name="4bit", bits=4, group_size=32, embedding_bits=8)
TOKENS = random.Random(0).choices(range(2, VOCABULARY), k=40)
TOLERANCE = 1e-5  # of the largest logit, float32 on both sides


@pytest.fixture(scope="module")
def base_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    build_base(
        model_dir, None, FOUR_BITS, dtype="bfloat16", base_dir=directory, report=lambda line: None
    )
    return directory


@pytest.fixture(scope="module")
def dense_dir(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dense") / "model"
    dequantize_base(base_dir, directory)
    return directory


def _trained(base_dir: Path, adapter_dir: Path, **changed: Any) -> tuple[DeviceModel, np.ndarray]:
    recipe = replace(RECIPE, **changed)
    model = DeviceModel(base_dir, recipe, path="packed")
    examples = [Example(tuple(TOKENS[i : i + 12]), 9) for i in range(8)]
    train_user_adapter(
        model, examples, recipe, seed=1, tokens_per_pass=2048, report=lambda step: None
    )
    adapter_dir.mkdir()
    model.save_adapter(adapter_dir, recipe)
    return model, np.array(model.head(model.hidden(mx.array(TOKENS)[None])))[0]


def _torch_logits(model: torch.nn.Module) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0].numpy()


def _assert_same_logits(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(found - expected).max() < TOLERANCE * np.abs(expected).max()


def test_the_dequantized_base_is_the_quantized_one(base_dir: Path, dense_dir: Path) -> None:
    dense = AutoModelForCausalLM.from_pretrained(dense_dir)
    assert {p.dtype for p in dense.parameters()} == {torch.float32}
    packed = DeviceModel(base_dir, path="packed")
    expected = np.array(packed.head(packed.hidden(mx.array(TOKENS)[None])))[0]
    _assert_same_logits(_torch_logits(dense), expected)
    text = "a film about the sea"
    ids = AutoTokenizer.from_pretrained(base_dir).encode(text)
    assert AutoTokenizer.from_pretrained(dense_dir).encode(text) == ids


@pytest.mark.parametrize("blocks", ["all", 2])
def test_an_adapter_of_the_device_serves_on_the_server(
    base_dir: Path, dense_dir: Path, tmp_path: Path, blocks: Any
) -> None:
    _, expected = _trained(base_dir, tmp_path / "mlx", blocks=blocks)
    to_peft(tmp_path / "mlx", tmp_path / "peft", base=str(dense_dir))
    dense = AutoModelForCausalLM.from_pretrained(dense_dir)
    without = _torch_logits(dense)
    model = PeftModel.from_pretrained(dense, tmp_path / "peft")
    _assert_same_logits(_torch_logits(model), expected)
    assert np.abs(without - expected).max() > 100 * TOLERANCE * np.abs(expected).max()
    config = json.loads((tmp_path / "peft" / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 6)
    assert config["base_model_name_or_path"] == str(dense_dir)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_adapter_of_the_server_serves_on_the_device(
    base_dir: Path, dense_dir: Path, tmp_path: Path, use_rslora: bool
) -> None:
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(dense_dir),
        LoraConfig(
            r=4,
            lora_alpha=6,
            target_modules=["q_proj", "v_proj", "down_proj"],
            layers_to_transform=[2, 3],
            use_rslora=use_rslora,
            init_lora_weights=False,  # B is random, too
            task_type="CAUSAL_LM",
        ),
    )
    model.save_pretrained(tmp_path / "peft")
    expected = _torch_logits(model.eval())
    to_mlx(tmp_path / "peft", tmp_path / "mlx", n_blocks=N_BLOCKS)
    recipe = replace(RECIPE, blocks=2, alpha=12 if use_rslora else 6)  # 6 / √4 = 12 / 4
    device = DeviceModel(base_dir, recipe, path="packed")
    device.load_adapter(tmp_path / "mlx")
    _assert_same_logits(np.array(device.head(device.hidden(mx.array(TOKENS)[None])))[0], expected)


def test_there_and_back_not_a_bit_changes(base_dir: Path, tmp_path: Path) -> None:
    _trained(base_dir, tmp_path / "mlx", blocks=3)
    to_peft(tmp_path / "mlx", tmp_path / "peft")
    to_mlx(tmp_path / "peft", tmp_path / "back", n_blocks=N_BLOCKS)
    first, back = (mx.load(str(tmp_path / name / WEIGHTS)) for name in ("mlx", "back"))
    assert first.keys() == back.keys()
    for name, tensor in first.items():
        assert tensor.dtype == back[name].dtype
        np.testing.assert_array_equal(np.array(tensor), np.array(back[name]))
    configs = [json.loads((tmp_path / name / CONFIG).read_text()) for name in ("mlx", "back")]
    assert configs[0] == configs[1]
    to_peft(tmp_path / "back", tmp_path / "again")
    files = [(tmp_path / name / PEFT_WEIGHTS).read_bytes() for name in ("peft", "again")]
    assert files[0] == files[1]


def test_another_scale_is_refused(base_dir: Path, tmp_path: Path) -> None:
    _trained(base_dir, tmp_path / "mlx")
    with pytest.raises(UserError, match="scale 2"):
        DeviceModel(base_dir, replace(RECIPE, alpha=8)).load_adapter(tmp_path / "mlx")


@pytest.fixture
def peft_dir(base_dir: Path, tmp_path: Path) -> Path:
    _trained(base_dir, tmp_path / "mlx", blocks=2)
    to_peft(tmp_path / "mlx", tmp_path / "peft")
    return tmp_path / "peft"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"peft_type": "IA3"}, "LORA"),
        ({"r": 8}, "rank 8"),
        ({"use_dora": True, "bias": "all"}, "use_dora.*bias"),
    ],
)
def test_what_the_other_format_has_not_is_refused(
    peft_dir: Path, tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    config = json.loads((peft_dir / CONFIG).read_text())
    (peft_dir / CONFIG).write_text(json.dumps(config | changed))
    with pytest.raises(UserError) as caught:
        to_mlx(peft_dir, tmp_path / "out", n_blocks=N_BLOCKS)
    assert re.search(words, str(caught.value).replace("\n", " "))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("n_blocks", [N_BLOCKS + 1, 3])
def test_blocks_that_are_not_the_last_are_refused(
    peft_dir: Path, tmp_path: Path, n_blocks: int
) -> None:
    with pytest.raises(UserError, match=r"blocks \[2, 3\]"):
        to_mlx(peft_dir, tmp_path / "out", n_blocks=n_blocks)


@pytest.mark.parametrize("damage", ["one side", "unknown", "missing", "garbage"])
def test_damaged_tensors_are_refused(peft_dir: Path, tmp_path: Path, damage: str) -> None:
    path = peft_dir / PEFT_WEIGHTS
    tensors = mx.load(str(path))
    mx.eval(tensors)
    name = next(name for name in tensors if "lora_A" in name)
    if damage == "one side":
        del tensors[name]
    elif damage == "unknown":
        tensors["base_model.model.lm_head.weight"] = tensors[name]
    mx.save_safetensors(str(path), tensors)
    if damage == "missing":
        path.unlink()
    elif damage == "garbage":
        path.write_bytes(b"no tensors")
    with pytest.raises(UserError):
        to_mlx(peft_dir, tmp_path / "out", n_blocks=N_BLOCKS)


def test_the_commands(
    base_dir: Path, model_dir: Path, peft_dir: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    for command in (
        ["to-mlx", "--adapter", str(peft_dir), "--base", str(model_dir), "--out", str(out / "a")],
        ["to-peft", "--adapter", str(out / "a"), "--out", str(out / "b")],
        ["dequantize", "--base", str(base_dir), "--out", str(out / "c")],
    ):
        main(command)
        assert capsys.readouterr().out.strip() == command[-1]
    assert (out / "b" / PEFT_WEIGHTS).read_bytes() == (peft_dir / PEFT_WEIGHTS).read_bytes()
    for command in (
        ["to-mlx", "--adapter", str(peft_dir), "--base", str(tmp_path), "--out", str(out / "d")],
        ["to-peft", "--adapter", str(peft_dir), "--out", str(out / "d")],
        ["dequantize", "--base", str(tmp_path), "--out", str(out / "d")],
    ):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 2
        assert "to do:" in capsys.readouterr().err
