"""Stage 1 against a plain reference, and what `build_base` does with its adapters."""

import tiny  # isort: skip  # noqa: F401  # loads the BLAS, before MLX

import math
import random
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import load_peft_weights
from tiny import VOCABULARY, make_tiny_model
from transformers import AutoModelForCausalLM

from lamp_eval.config import QuantizationConfig, TaskAdapterConfig
from lamp_eval.environment import torch_device
from lamp_eval.errors import UserError
from lamp_eval.pipeline import _mistake
from lamp_eval.records import Example, passes
from lamp_eval.schedule import TrainingStep, n_task_steps
from on_device.model import DeviceModel
from recipes.base import build_base
from recipes.lora import loss_sum
from recipes.task_adapter import train_task_adapter

NONE = QuantizationConfig(name="none", bits=None, embedding_bits=None)
RECIPE = TaskAdapterConfig(
    rank=4,
    alpha=8,
    projections=["q_proj", "k_proj", "v_proj"],
    learning_rate=5e-3,
    batch_size=3,
    epochs=2,
    clip_norm=1.0,
)


@pytest.fixture(scope="module")
def adapter_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter")
    _train(model_dir, directory)
    return directory


def _examples(n: int, n_common: int = 0) -> list[Example]:
    rng = random.Random(n_common)
    common = rng.choices(range(2, VOCABULARY), k=n_common)
    examples = []
    for i in range(n):
        prompt = [*common, 10 + i, *rng.choices(range(2, VOCABULARY), k=rng.randint(3, 20))]
        answer = rng.choices(range(2, VOCABULARY), k=rng.randint(1, 5))
        examples.append(Example((*prompt, *answer), len(prompt)))
    return examples


def _train(
    model_dir: Path,
    adapter_dir: Path,
    recipe: TaskAdapterConfig = RECIPE,
    seed: int = 3,
    tokens_per_pass: int = 2048,
) -> list[TrainingStep]:
    adapter_dir.mkdir(exist_ok=True)
    steps: list[TrainingStep] = []
    train_task_adapter(
        model_dir,
        _examples(7, n_common=12),
        recipe,
        seed=seed,
        device="cpu",
        tokens_per_pass=tokens_per_pass,
        adapter_dir=adapter_dir,
        report=steps.append,
    )
    return steps


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(2, 30)[None]).logits[0]


def _build(model_dir: Path, adapter: Path, base_dir: Path) -> float:
    base_dir.mkdir()
    return build_base(
        model_dir, str(adapter), NONE, dtype="float32", base_dir=base_dir, report=lambda line: None
    )


@pytest.mark.parametrize("n_examples", [1, 5])
@pytest.mark.parametrize("n_common", [0, 1, 20])
@pytest.mark.parametrize("tokens_per_pass", [1, 2048])
@pytest.mark.parametrize("every_token", [False, True])  # as for text to continue in `lamp_chat`
def test_loss_and_gradients_equal_the_plain_computation(
    model_dir: Path, n_common: int, n_examples: int, tokens_per_pass: int, every_token: bool
) -> None:
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj"]),
    ).train()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in parameters.items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    batch = _examples(n_examples, n_common)
    if every_token:
        batch = [replace(example, answer_start=1) for example in batch]

    total, n_supervised = torch.tensor(0.0), 0
    for example in batch:
        tokens = torch.tensor([example.tokens])
        logits = model(input_ids=tokens).logits[0, example.answer_start - 1 : -1]
        answer = tokens[0, example.answer_start :]
        total = total + torch.nn.functional.cross_entropy(logits, answer, reduction="sum")
        n_supervised += len(answer)
    expected = total / n_supervised
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in parameters.items()}
    model.zero_grad()

    parts = passes(batch, tokens_per_pass)
    assert len(parts) == (1 if tokens_per_pass > 1 else n_examples)
    found = torch.tensor(0.0)
    for part in parts:
        mean = loss_sum(model, part, "cpu") / n_supervised
        mean.backward()
        found = found + mean.detach()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5)


def test_want_of_memory_is_a_mistake_that_says_what_to_do() -> None:
    what = "task_adapters, task adapter"
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    mistake = _mistake(caught.value, what, Path("outputs"))
    assert mistake is not None
    assert "enough memory" in str(mistake) and "executor.tokens_per_pass" in str(mistake)
    assert f"in {what}" in str(mistake)
    assert _mistake(RuntimeError("shapes differ"), what, Path("outputs")) is None


def test_passes_bound_the_tokens_and_lose_no_example() -> None:
    batch = _examples(12, n_common=8)
    parts = passes(batch, 60)
    assert sorted(e.tokens for part in parts for e in part) == sorted(e.tokens for e in batch)
    assert 1 < len(parts) < 12
    for part in parts:
        longest = max(len(example.tokens) for example in part)
        assert len(part) == 1 or 8 + len(part) * (longest - 8) <= 60


def test_passes_do_not_change_what_is_learnt(model_dir: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, dropout=0.0)
    whole = _train(model_dir, tmp_path / "whole", recipe)
    parts = _train(model_dir, tmp_path / "parts", recipe, tokens_per_pass=40)
    assert [s.loss for s in parts] == pytest.approx([s.loss for s in whole], rel=1e-4)


def test_training_reports_each_step_and_lowers_the_loss(model_dir: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, epochs=10, dropout=0.0)
    steps = _train(model_dir, tmp_path, recipe)
    assert [step.step for step in steps] == list(range(1, 10 * math.ceil(7 / 3) + 1))
    assert {step.n_steps for step in steps} == {len(steps)}
    n_tokens = sum(len(example.tokens) for example in _examples(7, n_common=12))
    assert sum(step.n_tokens for step in steps) == 10 * n_tokens

    def mean(part: list[TrainingStep]) -> float:
        return sum(step.loss for step in part) / len(part)

    assert mean(steps[-3:]) < 0.8 * mean(steps[:3])


def test_adapter_files_load_in_peft_and_change_the_logits(
    model_dir: Path, adapter_dir: Path
) -> None:
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        path.name for path in adapter_dir.iterdir()
    }
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    before = _logits(base)
    after = _logits(PeftModel.from_pretrained(base, str(adapter_dir)).eval())
    assert (after - before).abs().max() > 1e-2


def test_same_seed_gives_the_same_adapter(
    model_dir: Path, adapter_dir: Path, tmp_path: Path
) -> None:
    _train(model_dir, tmp_path / "again")
    _train(model_dir, tmp_path / "other", seed=4)
    first, again, other = (
        load_peft_weights(str(d), device="cpu")
        for d in (adapter_dir, tmp_path / "again", tmp_path / "other")
    )
    assert first.keys() == again.keys() == other.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_merged_base_equals_the_adapted_model(
    model_dir: Path, adapter_dir: Path, tmp_path: Path
) -> None:
    assert _build(model_dir, adapter_dir, tmp_path / "base") < 1e-4
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    expected = _logits(PeftModel.from_pretrained(base, str(adapter_dir)).eval())
    model = DeviceModel(tmp_path / "base")
    found = torch.tensor(np.array(model.head(model.hidden(mx.arange(2, 30)[None])))[0])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


def test_wrong_projection_is_an_error(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="c_attn") as caught:
        _train(model_dir, tmp_path, replace(RECIPE, projections=["q_proj", "c_attn"]))
    assert "v_proj" in str(caught.value)
    assert "adapter.task.projections" in str(caught.value)


def test_missing_device_is_an_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(UserError, match="cuda"):
        torch_device("cuda")
    assert torch_device("cpu") == "cpu"
    assert torch_device("auto") in ("cpu", "mps")


@pytest.mark.parametrize("shape", [{"hidden": 32}, {"n_blocks": 6}, {"n_blocks": 2}])
def test_adapter_of_another_model_is_an_error(
    model_dir: Path, tmp_path: Path, shape: dict[str, int]
) -> None:
    other = make_tiny_model(tmp_path / "other", **shape)
    _train(other, tmp_path / "adapter", replace(RECIPE, max_steps=2))
    with pytest.raises(UserError, match="task adapter"):
        _build(model_dir, tmp_path / "adapter", tmp_path / "base")


def test_untrained_adapter_is_an_error(model_dir: Path, tmp_path: Path) -> None:
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        LoraConfig(r=4, target_modules=["q_proj"]),
    )
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match="changes the logits"):
        _build(model_dir, tmp_path / "adapter", tmp_path / "base")


def test_no_adapter_at_the_path_is_an_error(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    with pytest.raises(UserError, match="adapter.task.path"):
        _build(model_dir, tmp_path / "adapter", tmp_path / "base")


@pytest.mark.parametrize(
    ("n_examples", "max_steps", "expected"),
    [(33, None, 9), (32, None, 6), (1, None, 3), (33, 4, 4), (33, 100, 9)],
)
def test_n_task_steps(n_examples: int, max_steps: int | None, expected: int) -> None:
    recipe = replace(RECIPE, batch_size=16, epochs=3, max_steps=max_steps)
    assert n_task_steps(n_examples, recipe) == expected
