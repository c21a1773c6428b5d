"""The device side against plain references: conversion, training, generation."""

import tiny  # isort: skip  # noqa: F401  # loads the BLAS, before MLX

import importlib
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx_lm.utils import load_model
from peft import LoraConfig, get_peft_model
from tiny import N_BLOCKS, VOCABULARY, make_tiny_model
from transformers import AutoModelForCausalLM

import recipes.base
from lamp_eval.config import QuantizationConfig, UserAdapterConfig
from lamp_eval.errors import UserError
from lamp_eval.records import Example
from lamp_eval.schedule import TrainingStep, learning_rate_factor, n_user_steps
from lamp_eval.training import Training
from on_device import trainer
from on_device.generate import Answer, generate, label_log_likelihoods
from on_device.memory import PeakLaw
from on_device.model import CACHE_BYTES, WEIGHTS, DeviceModel
from on_device.resume import load_state
from on_device.sampling import random_number, sample
from on_device.trainer import train_user_adapter
from recipes.base import build_base

NONE = QuantizationConfig(name="none", bits=None, embedding_bits=None)
RECIPE = UserAdapterConfig(
    rank=4, alpha=16, projections=["q_proj", "v_proj"], learning_rate=2e-3, epochs=2
)
SEED = 7
NO_EOS = VOCABULARY  # no token has this id


@pytest.fixture(scope="module")
def base_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    _convert(model_dir, NONE, directory)
    return directory


@pytest.fixture(scope="module")
def device_model(base_dir: Path) -> DeviceModel:
    return DeviceModel(base_dir, RECIPE)


def _convert(model_dir: Path, quantization: QuantizationConfig, base_dir: Path, **options) -> float:
    base_dir.mkdir(exist_ok=True)
    given = {"dtype": "float32", "adapter": None} | options
    return build_base(
        model_dir,
        given["adapter"],
        quantization,
        dtype=given["dtype"],
        base_dir=base_dir,
        report=lambda line: None,
    )


def _tokens(n: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(2, VOCABULARY), k=n)


def _examples(n: int, *, n_common: int = 0, seed: int = 0) -> list[Example]:
    """Examples of different lengths with answers of 2 to 5 tokens."""
    rng = random.Random(seed)
    common = _tokens(n_common, seed + 1000)
    examples = []
    for i in range(n):
        # The first token after the common beginning differs, so that it is no longer than that.
        prompt = [*common, 10 + i, *_tokens(rng.randint(5, 20), seed + i)]
        answer = _tokens(rng.randint(2, 5), seed + 500 + i)
        examples.append(Example((*prompt, *answer), len(prompt)))
    return examples


def _train(
    model: DeviceModel,
    examples: list[Example],
    recipe: UserAdapterConfig = RECIPE,
    seed: int = SEED,
    **options: Any,
) -> tuple[list[TrainingStep], dict[str, np.ndarray]]:
    steps: list[TrainingStep] = []
    train_user_adapter(
        model, examples, recipe, seed=seed, tokens_per_pass=2048, report=steps.append, **options
    )
    return steps, {name: np.array(tensor) for name, tensor in model.adapter().items()}


def _reference(
    model_dir: Path,
    initial: dict[str, np.ndarray],
    examples: list[Example],
    recipe: UserAdapterConfig,
) -> tuple[list[float], dict[str, np.ndarray]]:
    """The recipe in plain torch: PEFT, whole sequences one by one, all logits, torch's AdamW."""
    n_blocks = N_BLOCKS if recipe.blocks == "all" else recipe.blocks
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        LoraConfig(
            r=recipe.rank,
            lora_alpha=recipe.alpha,
            lora_dropout=0.0,
            target_modules=list(recipe.projections),
            layers_to_transform=list(range(N_BLOCKS - n_blocks, N_BLOCKS)),
        ),
    )
    ours = {}  # by MLX's name, whose matrices are the transposed ones
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            name = name.removeprefix("base_model.model.").removesuffix(".default.weight")
            ours[name.replace("lora_A", "lora_a").replace("lora_B", "lora_b")] = parameter
    assert ours.keys() == initial.keys()
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(torch.tensor(initial[name].T))
    optimizer = torch.optim.AdamW(
        ours.values(), betas=(0.9, 0.999), eps=1e-8, weight_decay=recipe.weight_decay
    )
    n_steps = recipe.epochs * math.ceil(len(examples) / recipe.accumulation)
    n_warmup = math.ceil(recipe.warmup_ratio * n_steps)
    rng, losses = random.Random(SEED), []
    for _ in range(recipe.epochs):
        order = rng.sample(range(len(examples)), len(examples))
        while order:
            window = [examples[i] for i in order[: recipe.accumulation]]
            order = order[recipe.accumulation :]
            total, n_supervised = torch.tensor(0.0), 0
            for example in window:
                tokens = torch.tensor([example.tokens])
                logits = model(input_ids=tokens).logits[0, :-1]
                labels = tokens[0, 1:].clone()
                labels[: example.answer_start - 1] = -100
                total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
                n_supervised += int((labels != -100).sum())
            loss = total / n_supervised
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(ours.values(), recipe.clip_norm)
            step = len(losses)
            if step < n_warmup:
                factor = step / n_warmup
            else:
                factor = (1 + math.cos(math.pi * (step - n_warmup) / (n_steps - n_warmup))) / 2
            optimizer.param_groups[0]["lr"] = recipe.learning_rate * factor
            optimizer.step()
            losses.append(loss.item())
    return losses, {name: parameter.detach().numpy().T for name, parameter in ours.items()}


def _assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-4, err_msg=name)


def _assert_identical(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name].tobytes() != expected[name].tobytes()] == []


def _logits(model: DeviceModel, tokens: list[int]) -> np.ndarray:
    return np.array(model.head(model.hidden(mx.array(tokens)[None])))[0]


# Conversion


def test_mlx_logits_equal_torch_logits(model_dir: Path, base_dir: Path) -> None:
    tokens = _tokens(60, 1)
    with torch.inference_mode():
        torch_model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        expected = torch_model(torch.tensor([tokens])).logits[0].numpy()
    model, _ = load_model(base_dir)
    np.testing.assert_allclose(
        np.array(model(mx.array(tokens)[None]))[0], expected, atol=1e-4 * np.abs(expected).max()
    )
    np.testing.assert_allclose(
        _logits(DeviceModel(base_dir), tokens), expected, atol=1e-4 * np.abs(expected).max()
    )


def test_base_folder_holds_a_checkpoint_and_nothing_else(base_dir: Path) -> None:
    names = {path.name for path in base_dir.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert "merged" not in names


def test_lost_rope_theta_is_an_error(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _convert(model_dir, NONE, tmp_path / "kept") < 1e-4
    monkeypatch.setattr(recipes.base, "_restore_rope_theta", lambda path: None)
    with pytest.raises(UserError, match="rope_theta"):
        _convert(model_dir, NONE, tmp_path / "lost")


@pytest.mark.parametrize("embedding_bits", [4, 8, None])
def test_quantization_has_the_given_groups_and_bits(
    model_dir: Path, tmp_path: Path, embedding_bits: int | None
) -> None:
    quantization = QuantizationConfig("4bit", 4, 32, embedding_bits)
    _convert(model_dir, quantization, tmp_path / "base", dtype="bfloat16")
    model, config = load_model(tmp_path / "base")
    down = model.layers[0].mlp.down_proj  # 128 → 64
    assert (down.bits, down.group_size) == (4, 32)
    assert down.scales.shape == (64, 128 // 32)
    assert down.weight.shape == (64, 128 * 4 // 32)
    assert down.scales.dtype == mx.bfloat16
    embedding = model.model.embed_tokens
    if embedding_bits is None:
        assert not hasattr(embedding, "scales")
        assert embedding.weight.shape == (VOCABULARY, 64)
    else:
        assert embedding.bits == embedding_bits
        assert embedding.scales.shape == (VOCABULARY, 64 // 32)
        assert embedding.weight.shape == (VOCABULARY, 64 * embedding_bits // 32)


def test_dense_model_computes_the_quantized_values(model_dir: Path, tmp_path: Path) -> None:
    _convert(model_dir, QuantizationConfig("4bit", 4, 32, 8), tmp_path / "base")
    packed, _ = load_model(tmp_path / "base")
    tokens = _tokens(40, 2)
    expected = np.array(packed(mx.array(tokens)[None]))[0]
    found = _logits(DeviceModel(tmp_path / "base", RECIPE), tokens)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


# Training


@pytest.mark.parametrize("n_common", [0, 15])
@pytest.mark.parametrize("accumulation", [1, 3, 8])
def test_training_equals_the_plain_reference(
    device_model: DeviceModel, model_dir: Path, accumulation: int, n_common: int
) -> None:
    recipe = replace(RECIPE, accumulation=accumulation)
    examples = _examples(7, n_common=n_common)  # 7 = 3 + 3 + 1, and less than 8
    device_model.reset_adapter(SEED)
    initial = {name: np.array(tensor) for name, tensor in device_model.adapter().items()}
    steps, found = _train(device_model, examples, recipe)
    losses, expected = _reference(model_dir, initial, examples, recipe)
    assert len(steps) == len(losses) == n_user_steps(7, recipe) == 2 * math.ceil(7 / accumulation)
    assert [step.step for step in steps] == list(range(1, len(losses) + 1))
    assert sum(step.n_tokens for step in steps) == 2 * sum(len(e.tokens) for e in examples)
    np.testing.assert_allclose([step.loss for step in steps], losses, rtol=1e-4)
    _assert_close(found, expected)
    if len(steps) > 2:  # the first step has learning rate 0, as in transformers
        assert max(np.abs(t).max() for name, t in found.items() if name.endswith("b")) > 1e-3


def test_text_to_continue_equals_the_plain_reference(
    device_model: DeviceModel, model_dir: Path
) -> None:
    """As tweets in `lamp_chat`: every token but the first carries loss."""
    recipe = replace(RECIPE, accumulation=3)
    examples = [replace(example, answer_start=1) for example in _examples(5, n_common=4)]
    device_model.reset_adapter(SEED)
    initial = {name: np.array(tensor) for name, tensor in device_model.adapter().items()}
    steps, found = _train(device_model, examples, recipe)
    losses, expected = _reference(model_dir, initial, examples, recipe)
    np.testing.assert_allclose([step.loss for step in steps], losses, rtol=1e-4)
    _assert_close(found, expected)


def test_prompt_tokens_carry_no_loss(device_model: DeviceModel) -> None:
    """With the answer at the very end, what the prompt predicts of itself does not matter."""
    tokens = _tokens(20, 3)
    steps, _ = _train(device_model, [Example(tuple(tokens), 17)], replace(RECIPE, epochs=1))
    device_model.reset_adapter(SEED)
    logits = _logits(device_model, tokens).astype(np.float64)
    log_sum = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
    losses = [log_sum[i - 1] - logits[i - 1, tokens[i]] for i in (17, 18, 19)]
    assert steps[0].loss == pytest.approx(np.mean(losses), rel=1e-5)


def test_shared_prefix_equals_one_by_one(
    device_model: DeviceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = _examples(8, n_common=25)
    n_batches = []
    batches = trainer._batches

    def counted(*args, **kwargs):
        made = batches(*args, **kwargs)
        n_batches.append(len(made))
        return made

    monkeypatch.setattr(trainer, "_batches", counted)
    together = _train(device_model, examples)
    assert set(n_batches) == {1}
    n_batches.clear()
    monkeypatch.setattr(trainer, "n_common_tokens", lambda prompts: 0)
    one_by_one = _train(device_model, examples)
    assert set(n_batches) == {8}
    np.testing.assert_allclose(
        [step.loss for step in together[0]], [step.loss for step in one_by_one[0]], rtol=1e-4
    )
    _assert_close(together[1], one_by_one[1])


@pytest.mark.parametrize(
    ("n_common", "expected"),
    [(0, [4, 4]), (10, [5, 3]), (100, [8])],  # rows of each batch; 8 * 110 tokens
)
def test_large_passes_are_for_a_common_beginning(n_common: int, expected: list[int]) -> None:
    common, rng = _tokens(n_common, 1), random.Random(2)
    window = [
        Example((*common, *(rng.randrange(100) for _ in range(110 - n_common))), 106)
        for _ in range(8)
    ]
    batches = trainer._batches(window, 2048)
    assert [len(batch.examples) for batch in batches] == expected
    assert all(len(batch.prefix) >= n_common for batch in batches)
    assert [e for batch in batches for e in batch.examples] == window
    assert [len(batch.examples) for batch in trainer._batches(window, 0)] == [1] * 8


@pytest.mark.parametrize("n_common", [0, 25])
def test_two_blocks_touch_the_last_two_only(base_dir: Path, model_dir: Path, n_common: int) -> None:
    recipe = replace(RECIPE, blocks=2, accumulation=3)
    model = DeviceModel(base_dir, recipe)
    initial = {name: np.array(tensor) for name, tensor in model.adapter().items()}
    blocks = {name.split(".")[2] for name in initial}
    assert blocks == {"2", "3"}
    assert len(initial) == 2 * 2 * 2  # blocks × projections × (A, B)
    model.reset_adapter(SEED)
    initial = {name: np.array(tensor) for name, tensor in model.adapter().items()}
    examples = _examples(7, n_common=n_common)
    steps, found = _train(model, examples, recipe)
    losses, expected = _reference(model_dir, initial, examples, recipe)
    np.testing.assert_allclose([step.loss for step in steps], losses, rtol=1e-4)
    _assert_close(found, expected)


@pytest.mark.parametrize("checkpoint", [1, 2, 3, 9])
@pytest.mark.parametrize("blocks", ["all", 2])
@pytest.mark.parametrize("n_common", [0, 25])
def test_recomputing_blocks_changes_nothing(
    base_dir: Path, blocks: object, n_common: int, checkpoint: int
) -> None:
    recipe = replace(RECIPE, blocks=blocks, accumulation=3)
    examples = _examples(7, n_common=n_common)
    kept = _train(DeviceModel(base_dir, recipe), examples, recipe)
    recomputed = _train(DeviceModel(base_dir, recipe), examples, recipe, checkpoint=checkpoint)
    np.testing.assert_allclose(
        [step.loss for step in kept[0]], [step.loss for step in recomputed[0]], rtol=1e-4
    )
    _assert_close(kept[1], recomputed[1])


# Memory


@pytest.fixture(scope="module")
def deep_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of 12 blocks, large enough that activations outweigh all else."""
    root = tmp_path_factory.mktemp("deep")
    make_tiny_model(root / "model", hidden=256, n_blocks=12)
    _convert(root / "model", NONE, root / "base")
    return root / "base"


def test_the_last_block_computes_answer_positions_only(base_dir: Path) -> None:
    """By its memory: all queries' scores alone would take 64 MB a head."""
    model, n_tokens = DeviceModel(base_dir), 4000
    states = mx.random.normal((1, n_tokens, 64), key=mx.random.key(0))
    positions = mx.array([[1500, 1501, 1502]])
    whole = model.run_blocks(states, N_BLOCKS - 1)[:, 1500:1503]
    mx.eval(whole)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    some = model.run_last_block(states, positions)
    mx.eval(some)
    assert mx.get_peak_memory() - before < 8e6
    np.testing.assert_allclose(np.array(some), np.array(whole), atol=1e-5)


# States in front of the adapted blocks

HALF = replace(RECIPE, blocks=2, accumulation=3, epochs=3)


def _n_frozen_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by the tokens of each pass through the frozen blocks."""
    computed: list[int] = []
    real = DeviceModel.run_blocks

    def counted(self: DeviceModel, states: mx.array, first: int, *args: Any, **kw: Any) -> mx.array:
        if first == 0 and kw.get("last") == N_BLOCKS - 2:
            computed.append(states.shape[0] * states.shape[1])
        return real(self, states, first, *args, **kw)

    monkeypatch.setattr(DeviceModel, "run_blocks", counted)
    return computed


@pytest.mark.parametrize("n_common", [0, 25])
def test_frozen_blocks_run_once_per_example(
    base_dir: Path, tmp_path: Path, n_common: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = _examples(7, n_common=n_common)
    model, computed = DeviceModel(base_dir, HALF), _n_frozen_tokens(monkeypatch)
    kept = _train(model, examples, HALF)
    n_tokens = sum(len(example.tokens) for example in examples)
    assert 0 < sum(computed) <= 1.1 * n_tokens
    assert not n_common or sum(computed) < 0.7 * n_tokens  # the common beginning only once
    computed.clear()
    monkeypatch.setattr(trainer, "KEPT_STATES_BYTES", 0)
    state = tmp_path / "work" / "state"
    on_disk = _train(model, examples, HALF, state_path=state)
    assert 0 < sum(computed) <= 1.1 * n_tokens
    assert (state.parent / "states.bin").stat().st_size == (n_tokens - 7) * 64 * 4
    assert on_disk[0] == kept[0]
    _assert_identical(on_disk[1], kept[1])
    computed.clear()
    each_time = _train(model, examples, HALF)  # with nowhere to keep them
    assert len(computed) >= 9  # windows
    np.testing.assert_allclose(
        [step.loss for step in each_time[0]], [step.loss for step in kept[0]], rtol=1e-5
    )
    _assert_close(each_time[1], kept[1])


def test_no_states_are_kept_that_nobody_asks_for_again(
    base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "KEPT_STATES_BYTES", 0)
    for recipe in (replace(HALF, epochs=1), replace(HALF, blocks="all")):
        path = tmp_path / str(recipe.epochs) / "state"
        _train(DeviceModel(base_dir, recipe), _examples(7), recipe, state_path=path, save_every=99)
        assert not path.parent.exists()


@pytest.mark.parametrize("on_disk", [False, True])
def test_kept_states_are_the_same_bits_after_an_interruption(
    base_dir: Path, tmp_path: Path, on_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_disk:
        monkeypatch.setattr(trainer, "KEPT_STATES_BYTES", 0)
    model, path = DeviceModel(base_dir, HALF), tmp_path / "state"
    _, expected = _training(model, HALF, state_path=tmp_path / "whole" / "state")

    def killed(step: TrainingStep) -> None:
        if step.step == 5:  # in the second epoch
            raise Killed

    with pytest.raises(Killed):
        _training(model, HALF, killed, state_path=path)
    computed = _n_frozen_tokens(monkeypatch)
    with pytest.raises(Killed):
        _training(model, HALF, lambda step: killed(replace(step, step=5)), state_path=path)
    assert bool(computed) != on_disk  # read from the file, or computed once more
    if on_disk:  # cut short, it is not taken for whole
        os.truncate(tmp_path / "states.bin", 1000)
    _, found = _training(model, HALF, state_path=path)
    assert computed
    _assert_identical(found, expected)


LONG = [Example(tuple(_tokens(128, i)), 124) for i in range(8)]  # four of them fill a pass
DEEP = replace(RECIPE, epochs=1, accumulation=4)


def _peak(model: DeviceModel, **options: Any) -> tuple[Training, float]:
    training = train_user_adapter(
        model, LONG, DEEP, seed=1, tokens_per_pass=2048, report=lambda step: None, **options
    )
    return training, training.rows[-1]["peak_bytes"]


@pytest.mark.slow
def test_recomputing_blocks_takes_the_memory_that_was_predicted(deep_dir: Path) -> None:
    model = DeviceModel(deep_dir, DEEP)
    whole, alone = (trainer.Batch(LONG[:n], 0) for n in (4, 1))
    kept = trainer._law(model, whole, recomputed=False)
    assert kept.peak(None) == pytest.approx(_peak(model)[1], rel=0.1)
    law, peaks = trainer._law(model, alone, recomputed=True), {}
    for group in (1, 2, 3, 6, 12):
        peaks[group] = _peak(model, checkpoint=group)[1]
        assert law.peak(group) == pytest.approx(peaks[group], rel=0.1)
    assert peaks[1] < peaks[3] < peaks[12] < kept.peak(None)
    assert law.best() in (1, 2)


def test_a_budget_decides_what_is_recomputed(deep_dir: Path) -> None:
    model = DeviceModel(deep_dir, DEEP)
    free, peak = _peak(model, checkpoint="auto")
    assert (free.checkpoint, free.predicted_peak_bytes) == (None, None)
    enough, _ = _peak(model, checkpoint="auto", memory_budget_gb=1.3 * peak / 1e9)
    assert enough.checkpoint is None
    assert enough.predicted_peak_bytes == pytest.approx(peak, rel=0.1)
    little, own_peak = _peak(model, checkpoint="auto", memory_budget_gb=0.4 * peak / 1e9)
    assert little.checkpoint in (1, 2)
    assert own_peak < 0.4 * peak
    assert little.predicted_peak_bytes == pytest.approx(own_peak, rel=0.1)
    with pytest.raises(UserError, match=r"(?s)memory_budget_gb.*before the step"):
        _peak(model, checkpoint="auto", memory_budget_gb=0.1 * peak / 1e9)


def test_the_group_of_the_smallest_peak() -> None:
    """As in the paper's Figure 3: 36 blocks, a·K + s·36/K is smallest at K = √(36 s / a)."""
    law = PeakLaw(active=0, fixed=3.61e9, per_block=282e6, between=8_100_000, n_blocks=36)
    assert law.best() == 1
    assert replace(law, between=282_000_000).best() == 6
    assert law.peak(36) == pytest.approx(3.61e9 + 36 * 282e6 + 8.1e6)
    assert law.peak(None) == 3.61e9 + 36 * 282e6


def test_a_resumed_training_recomputes_as_before(deep_dir: Path, tmp_path: Path) -> None:
    """Also where a prediction would come out otherwise now."""
    model = DeviceModel(deep_dir, DEEP)
    _, peak = _peak(model)
    options = {"checkpoint": "auto", "memory_budget_gb": 0.4 * peak / 1e9}

    def killed(step: TrainingStep) -> None:
        raise Killed

    path = tmp_path / "state"
    with pytest.raises(Killed):
        train_user_adapter(
            model,
            LONG,
            DEEP,
            seed=1,
            tokens_per_pass=2048,
            report=killed,
            state_path=path,
            **options,
        )
    state = load_state(path)
    assert state is not None and state.checkpoint is not None
    options["memory_budget_gb"] = 10 * peak / 1e9
    training, _ = _peak(model, state_path=path, **options)
    assert training.checkpoint == state.checkpoint


def test_same_seed_gives_the_same_bits_whoever_was_trained_before(base_dir: Path) -> None:
    examples = _examples(7)
    fresh = _train(DeviceModel(base_dir, RECIPE), examples)
    used = DeviceModel(base_dir, RECIPE)
    _train(used, _examples(9, n_common=12, seed=50), seed=1)
    after_another = _train(used, examples)
    again = _train(used, examples)
    assert fresh[0] == after_another[0] == again[0]
    _assert_identical(after_another[1], fresh[1])
    _assert_identical(again[1], fresh[1])
    other_seed = _train(used, examples, seed=SEED + 1)
    assert any(not np.array_equal(other_seed[1][name], fresh[1][name]) for name in fresh[1])


def test_training_leaves_the_base_alone(base_dir: Path) -> None:
    model = DeviceModel(base_dir, RECIPE)

    before = model.base_hash()
    _train(model, _examples(7), replace(RECIPE, learning_rate=0.1))
    assert model.base_hash() == before == DeviceModel(base_dir, RECIPE).base_hash()
    weight = model.model.model.norm.weight
    model.model.model.norm.weight = weight + mx.arange(64) * 1e-6
    assert model.base_hash() != before
    model.model.model.norm.weight = weight
    model.reset_adapter(0)
    tokens = _tokens(30, 4)
    np.testing.assert_array_equal(_logits(model, tokens), _logits(DeviceModel(base_dir), tokens))


def _training(
    model: DeviceModel,
    recipe: UserAdapterConfig = RECIPE,
    report: Callable[[TrainingStep], None] = lambda step: None,
    **options: Any,
) -> tuple[Training, dict[str, np.ndarray]]:
    training = train_user_adapter(
        model, _examples(7), recipe, seed=SEED, tokens_per_pass=2048, report=report, **options
    )
    return training, {name: np.array(tensor) for name, tensor in model.adapter().items()}


def test_a_loss_that_is_not_finite_ends_the_training(base_dir: Path) -> None:
    model = DeviceModel(base_dir, RECIPE)
    name = "model.norm.weight"
    model.model.load_weights([(name, mx.full((64,), float("nan")))], strict=False)
    training, adapter = _training(model)
    assert training == Training((), "step 1 of 2: the loss is nan")
    model.reset_adapter(SEED)
    _assert_identical(adapter, {n: np.array(t) for n, t in model.adapter().items()})


@pytest.fixture
def exploding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses grow a hundredfold once the adapter has become large."""
    real = trainer._gradients_of

    def gradients_of(model: DeviceModel, *others: Any) -> Any:
        own = real(model, *others)

        def exploded(window: Any) -> Any:
            loss, gradients = own(window)
            b = [tensor for name, tensor in model.adapter().items() if name.endswith("b")]
            return loss * (100 if sum(mx.abs(t).sum().item() for t in b) > 10.5 else 1), gradients

        return exploded

    monkeypatch.setattr(trainer, "_gradients_of", gradients_of)


EXPLODING = replace(RECIPE, accumulation=1, epochs=4)


@pytest.mark.usefixtures("exploding")
def test_a_loss_that_explodes_ends_the_training_at_the_adapter_before(base_dir: Path) -> None:
    model = DeviceModel(base_dir, RECIPE)
    adapters: list[dict[str, np.ndarray]] = []

    def keep(step: TrainingStep) -> None:
        adapters.append({name: np.array(tensor) for name, tensor in model.adapter().items()})

    training, found = _training(model, EXPLODING, keep)
    assert training.stopped is not None
    n_done = len(training.rows)
    assert f"step {n_done + 1} of 28: the loss went from 6" in training.stopped
    assert 5 < n_done < 25
    _assert_identical(found, adapters[-2])
    # The next user is not touched by it.
    _assert_identical(_training(model)[1], _training(DeviceModel(base_dir, RECIPE))[1])


def test_a_row_for_each_step(device_model: DeviceModel) -> None:
    recipe = replace(RECIPE, accumulation=2, epochs=3)
    steps: list[TrainingStep] = []
    training, _ = _training(device_model, recipe, steps.append)
    assert training.stopped is None
    assert [row["step"] for row in training.rows] == list(range(1, 13))
    assert [row["loss"] for row in training.rows] == [step.loss for step in steps]
    assert [row["tokens"] for row in training.rows] == [step.n_tokens for step in steps]
    rates = [2e-3 * learning_rate_factor(i, 12, 0.03, "cosine") for i in range(12)]
    assert [row["learning_rate"] for row in training.rows] == rates
    assert all(row["gradient_norm"] > 0 and row["seconds"] > 0 for row in training.rows)
    assert training.rows[-1]["peak_bytes"] > 1000


def test_an_example_without_an_answer_is_an_error(device_model: DeviceModel) -> None:
    examples = [Example((3, 4, 5), 2), Example((3, 4, 5), 3), Example((3, 4), 0)]
    with pytest.raises(UserError, match="example 1") as caught:
        _train(device_model, examples)
    assert "example 2" in str(caught.value)
    assert "example 0" not in str(caught.value)


class Killed(BaseException):
    """Stands for whatever ends a process."""


@pytest.mark.parametrize("save_every", [1, 3, 100])
def test_interrupted_training_goes_on_bit_by_bit(
    base_dir: Path, tmp_path: Path, save_every: int
) -> None:
    recipe = replace(RECIPE, accumulation=2, epochs=2)  # 8 steps
    whole, expected = _training(DeviceModel(base_dir, recipe), recipe)
    path, model = tmp_path / "work" / "state.safetensors", DeviceModel(base_dir, recipe)
    for at in range(1, 8):
        path.unlink(missing_ok=True)
        done: list[int] = []

        def report(step: TrainingStep, at: int = at, done: list[int] = done) -> None:
            done.append(step.step)
            if step.step == at:
                raise Killed

        options = {"state_path": path, "save_every": save_every}
        with pytest.raises(Killed):
            _training(model, recipe, report, **options)
        _training(model)  # another user meanwhile
        done.clear()
        training, found = _training(model, recipe, lambda s, d=done: d.append(s.step), **options)
        assert done == list(range(at + 1, 9))
        _assert_identical(found, expected)
        own = [{**row, "seconds": 0, "peak_bytes": 0} for row in training.rows]
        assert own == [{**row, "seconds": 0, "peak_bytes": 0} for row in whole.rows]
        assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(("save_every", "saved"), [(3, 3), (4, 4), (6, 0)])
def test_killed_training_goes_on_from_what_was_saved(
    base_dir: Path, tmp_path: Path, save_every: int, saved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(RECIPE, accumulation=2, epochs=2)
    _, expected = _training(DeviceModel(base_dir, recipe), recipe)
    options: dict[str, Any] = {"state_path": tmp_path / "state", "save_every": save_every}
    model = DeviceModel(base_dir, recipe)

    def killed(step: TrainingStep) -> None:
        if step.step == 5:
            # Nothing can be saved any more, as by SIGKILL.
            monkeypatch.setattr(trainer.TrainingState, "save", lambda *_: None)
            raise Killed

    with pytest.raises(Killed):
        _training(model, recipe, killed, **options)
    monkeypatch.undo()
    done: list[int] = []
    _, found = _training(model, recipe, lambda step: done.append(step.step), **options)
    assert done == list(range(saved + 1, 9))
    _assert_identical(found, expected)


@pytest.mark.usefixtures("exploding")
def test_an_explosion_after_a_resume_keeps_the_same_adapter(base_dir: Path, tmp_path: Path) -> None:
    model = DeviceModel(base_dir, EXPLODING)
    whole, expected = _training(model, EXPLODING)

    def killed(step: TrainingStep) -> None:
        if step.step == len(whole.rows):  # right before the step that explodes
            raise Killed

    with pytest.raises(Killed):
        _training(model, EXPLODING, killed, state_path=tmp_path / "state")
    training, found = _training(model, EXPLODING, state_path=tmp_path / "state")
    assert training.stopped == whole.stopped is not None
    _assert_identical(found, expected)


def test_a_damaged_state_is_an_error(device_model: DeviceModel, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    path.write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ")
    with pytest.raises(UserError, match="delete this file"):
        _training(device_model, state_path=path)


@pytest.mark.slow
def test_sigkill_at_any_moment_changes_no_bit(base_dir: Path, tmp_path: Path) -> None:
    """A process is killed at random moments, until one of its successors reaches the end."""
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
from pathlib import Path
import test_on_device as t

recipe = t.replace(t.RECIPE, accumulation=1, epochs=200)
model = t.DeviceModel(Path({str(base_dir)!r}), recipe)
work = Path(sys.argv[1])
print("begins", flush=True)
training, _ = t._training(model, recipe, state_path=work / "state", save_every=2)
model.save_adapter(work, recipe)
print(len(training.rows), flush=True)
"""
    )

    def started(work: Path) -> subprocess.Popen[str]:
        work.mkdir(exist_ok=True)
        return subprocess.Popen(
            [sys.executable, str(script), str(work)], stdout=subprocess.PIPE, text=True
        )

    whole = started(tmp_path / "whole")
    assert whole.communicate(timeout=300)[0].split() == ["begins", "1400"]
    rng, work, n_killed, steps = random.Random(0), tmp_path / "killed", 0, [0]
    while True:
        process = started(work)
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        try:
            out, _ = process.communicate(timeout=rng.uniform(0.0, 0.8) if n_killed < 25 else 300)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            n_killed += 1
            state = load_state(work / "state")
            steps.append(state.step if state else 0)
            continue
        assert process.returncode == 0
        assert out == "1400\n"
        break
    assert n_killed >= 20
    assert steps == sorted(steps)
    assert len(set(steps)) > 5  # the kills met training, not only its beginning
    assert (work / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()


@pytest.mark.slow
def test_memory_does_not_grow_over_a_hundred_users(base_dir: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, blocks=2, accumulation=2)
    model = DeviceModel(base_dir, recipe)
    active = []
    for user in range(100):
        examples = _examples(4, n_common=8, seed=user)
        _train(model, examples, recipe, seed=user)
        model.save_adapter(tmp_path, recipe)
        model.load_adapter(tmp_path)
        generate(
            model,
            [example.tokens[: example.answer_start] for example in examples],
            max_new_tokens=2,
            eos_token_id=NO_EOS,
            tokens_per_pass=200,
        )
        active.append(mx.get_active_memory())
    assert max(active[1:]) <= active[0] + 10_000
    assert mx.set_cache_limit(CACHE_BYTES) == CACHE_BYTES  # what it was before


# The adapter


def test_b_zero_is_the_base_and_a_trained_adapter_is_not(
    device_model: DeviceModel, base_dir: Path
) -> None:
    tokens = _tokens(30, 5)
    base = _logits(DeviceModel(base_dir), tokens)
    device_model.reset_adapter(3)
    np.testing.assert_array_equal(_logits(device_model, tokens), base)
    _train(device_model, _examples(7), replace(RECIPE, accumulation=1))
    assert np.abs(_logits(device_model, tokens) - base).max() > 1e-2


@pytest.mark.parametrize(("rank", "alpha"), [(4, 16), (8, 8)])
def test_scale_is_alpha_over_rank(base_dir: Path, rank: int, alpha: float) -> None:
    model = DeviceModel(base_dir, replace(RECIPE, rank=rank, alpha=alpha))
    layer = model.blocks[1].self_attn.q_proj
    x = mx.random.normal((5, 64), key=mx.random.key(0))
    before = layer(x)
    name = "model.layers.1.self_attn.q_proj.lora_b"
    b = mx.random.normal((rank, 64), key=mx.random.key(1))
    model.set_adapter(model.adapter() | {name: b})
    expected = alpha / rank * (x @ layer.lora_a @ b)
    np.testing.assert_allclose(np.array(layer(x) - before), np.array(expected), atol=1e-4)


def test_saved_adapter_comes_back_bit_by_bit(
    device_model: DeviceModel, base_dir: Path, tmp_path: Path
) -> None:
    _, trained = _train(device_model, _examples(7))
    device_model.save_adapter(tmp_path, RECIPE)
    tokens = _tokens(30, 6)
    expected = _logits(device_model, tokens)
    other = DeviceModel(base_dir, RECIPE)
    other.load_adapter(tmp_path)
    _assert_identical({name: np.array(t) for name, t in other.adapter().items()}, trained)
    np.testing.assert_array_equal(_logits(other, tokens), expected)


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape", "zero"])
def test_an_adapter_that_does_not_fit_is_refused(
    device_model: DeviceModel, tmp_path: Path, damage: str
) -> None:
    _, trained = _train(device_model, _examples(7))
    device_model.save_adapter(tmp_path, RECIPE)
    tensors = mx.load(str(tmp_path / WEIGHTS))
    name = "model.layers.2.self_attn.v_proj.lora_b"
    if damage == "missing":
        del tensors[name]
    elif damage == "unknown":
        tensors["model.layers.9.self_attn.v_proj.lora_b"] = tensors[name]
    elif damage == "shape":
        tensors[name] = tensors[name][:2]
    else:
        tensors = {n: mx.zeros_like(t) if n.endswith("b") else t for n, t in tensors.items()}
    mx.save_safetensors(str(tmp_path / WEIGHTS), tensors)
    with pytest.raises(UserError, match="moves the model" if damage == "zero" else "layers"):
        device_model.load_adapter(tmp_path)
    _assert_identical({n: np.array(t) for n, t in device_model.adapter().items()}, trained)


@pytest.mark.parametrize("wrong", [{"projections": ["q_proj", "c_attn"]}, {"blocks": N_BLOCKS + 1}])
def test_a_recipe_that_does_not_fit_is_refused(base_dir: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(UserError):
        DeviceModel(base_dir, replace(RECIPE, **wrong))


# Generation


@pytest.fixture(scope="module")
def answering(base_dir: Path) -> DeviceModel:
    """A model with an adapter that has an effect."""
    model = DeviceModel(base_dir, RECIPE)
    _train(model, _examples(7), replace(RECIPE, accumulation=1))
    return model


def _naive(
    model: DeviceModel, prompt: list[int], max_new_tokens: int, eos: int, seed: int | None = None
) -> Answer:
    tokens: list[int] = []
    for step in range(1, max_new_tokens + 1):
        logits = model.model(mx.array([*prompt, *tokens])[None])[:, -1]
        if seed is None:
            token = int(mx.argmax(logits).item())
        else:
            token = int(sample(logits, [random_number(seed, step)]).item())
        if token == eos:
            return Answer(tuple(tokens), True)
        tokens.append(token)
    return Answer(tuple(tokens), False)


def _prompts(n_common: int) -> list[list[int]]:
    common = _tokens(n_common, 99)
    lengths = [5, 21, 1, 13, 13, 30, 2]
    return [[*common, 20 + i, *_tokens(n - 1, i)] for i, n in enumerate(lengths)]


@pytest.mark.parametrize("tokens_per_pass", [1, 30, 60, 1000])  # 7, 4, 3 and 1 batches
@pytest.mark.parametrize("n_common", [0, 1, 18])
def test_generation_equals_the_naive_loop(
    answering: DeviceModel, n_common: int, tokens_per_pass: int
) -> None:
    prompts = _prompts(n_common)
    whole = [_naive(answering, prompt, 6, NO_EOS) for prompt in prompts]
    assert len({answer.tokens for answer in whole}) > 1
    # An EOS that one prompt meets at its third new token, others earlier, later or never.
    for eos in (NO_EOS, whole[1].tokens[2], whole[5].tokens[0]):
        expected = [_naive(answering, prompt, 6, eos) for prompt in prompts]
        found = generate(
            answering,
            prompts,
            max_new_tokens=6,
            eos_token_id=eos,
            tokens_per_pass=tokens_per_pass,
        )
        assert found == expected
        assert all(eos not in answer.tokens for answer in found)


@pytest.mark.parametrize("tokens_per_pass", [1, 30, 1000])
@pytest.mark.parametrize("n_common", [0, 18])
def test_sampling_equals_the_naive_loop(
    answering: DeviceModel, n_common: int, tokens_per_pass: int
) -> None:
    """So an answer depends on nothing beside its prompt: not on the others, nor on their order."""
    prompts, seeds = _prompts(n_common), [100 + i for i in range(7)]
    pairs = list(zip(prompts, seeds, strict=True))
    whole = [_naive(answering, prompt, 6, NO_EOS, seed) for prompt, seed in pairs]
    assert whole != [_naive(answering, prompt, 6, NO_EOS) for prompt in prompts]
    assert whole != [_naive(answering, prompt, 6, NO_EOS, seed + 1) for prompt, seed in pairs]
    for eos in (NO_EOS, whole[1].tokens[2], whole[5].tokens[0]):  # some rows end before others
        expected = [_naive(answering, prompt, 6, eos, seed) for prompt, seed in pairs]
        options = {"max_new_tokens": 6, "eos_token_id": eos, "tokens_per_pass": tokens_per_pass}
        found = generate(answering, prompts, **options, seeds=seeds)
        assert found == expected
        assert generate(answering, prompts[::-1], **options, seeds=seeds[::-1]) == found[::-1]


def test_equal_prompts_with_seeds_of_their_own_are_drawn_apart(answering: DeviceModel) -> None:
    prompt, options = _tokens(12, 8), {"max_new_tokens": 20, "eos_token_id": NO_EOS}
    options |= {"tokens_per_pass": 1000}
    one, same, other = generate(answering, [prompt] * 3, **options, seeds=[5, 5, 6])
    assert one == same != other


def test_generation_bounds_the_tokens_computed_together(
    answering: DeviceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("on_device.generate")
    batches: list[list[int]] = []

    def answer_batch(model: Any, prefix: Any, suffixes: Any, *others: Any) -> Any:
        batches.append([len(suffix) for suffix in suffixes])
        return compute(model, prefix, suffixes, *others)

    compute = module._answer_batch
    monkeypatch.setattr(module, "_answer_batch", answer_batch)
    for n_common in (0, 18):
        generate(
            answering, _prompts(n_common), max_new_tokens=1, eos_token_id=NO_EOS, tokens_per_pass=30
        )
        assert batches == [[1, 2, 5], [13, 13], [21], [30]]  # 15, 26, 21 and 30 with the padding
        batches.clear()


@pytest.mark.parametrize("n_common", [0, 1, 18])
@pytest.mark.parametrize("lengths", [[2, 2, 2], [5, 1, 3, 2], [1]])
@pytest.mark.parametrize("tokens_per_pass", [1, 80, 2048])
def test_likelihoods_of_labels_are_those_of_whole_sequences(
    answering: DeviceModel, n_common: int, lengths: list[int], tokens_per_pass: int
) -> None:
    prompts = _prompts(n_common)
    labels = [_tokens(n, 40 + i) for i, n in enumerate(lengths)]
    found = label_log_likelihoods(answering, prompts, labels, tokens_per_pass=tokens_per_pass)
    expected = []
    for prompt in prompts:
        row = []
        for label in labels:
            logits = _logits(answering, [*prompt, *label]).astype(np.float64)
            logits = logits[len(prompt) - 1 : -1]
            log_sums = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
            row.append(np.mean([logits[i, t] for i, t in enumerate(label)] - log_sums))
        expected.append(row)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert len({round(x, 3) for row in found for x in row}) > 3


def test_labels_bound_the_tokens_computed_together(
    answering: DeviceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("on_device.generate")
    compute, read = module._mean_log_likelihoods, module._read
    passes: list[list[int]] = []
    n_tokens: list[int] = []
    n_read: list[int] = []

    def counted(model: Any, first: Any, cache: Any, rows: Any, labels: Any) -> Any:
        passes.append([len(label) for label in labels])
        n_tokens.append(len(rows) * (cache[0].size() + max(map(len, labels))))
        return compute(model, first, cache, rows, labels)

    def counted_read(model: Any, prefix: Any, suffixes: Any) -> Any:
        n_read.append(len(suffixes))
        return read(model, prefix, suffixes)

    monkeypatch.setattr(module, "_mean_log_likelihoods", counted)
    monkeypatch.setattr(module, "_read", counted_read)
    labels = [_tokens(n, 40 + i) for i, n in enumerate([5, 1, 3, 2])]
    label_log_likelihoods(answering, _prompts(18), labels, tokens_per_pass=100)
    assert n_read == [5, 2]  # 13 and 30 tokens each, behind a beginning of 18
    assert max(n_tokens) <= 100
    # At 36 tokens of prompt and label two fit into a pass, at 53 one; the shortest labels first.
    assert [len(own) for own in passes] == [2] * 10 + [1] * 8
    assert [n for own in passes[:10] for n in own] == sorted([1, 2, 3, 5] * 5)


def test_generation_of_equal_prompts_and_of_one_prompt(answering: DeviceModel) -> None:
    prompt = _tokens(12, 8)
    expected = _naive(answering, prompt, 4, NO_EOS)
    for n in (1, 3):
        found = generate(
            answering, [prompt] * n, max_new_tokens=4, eos_token_id=NO_EOS, tokens_per_pass=2
        )
        assert found == [expected] * n


def test_the_limit_counts_eos(answering: DeviceModel) -> None:
    prompt = _tokens(12, 8)
    tokens = _naive(answering, prompt, 8, NO_EOS).tokens
    n = next(i for i in range(1, 8) if tokens[i] not in tokens[:i])

    def answer(limit: int) -> Answer:
        return generate(
            answering, [prompt], max_new_tokens=limit, eos_token_id=tokens[n], tokens_per_pass=1
        )[0]

    assert answer(n + 1) == Answer(tokens[:n], True)
    assert answer(n) == Answer(tokens[:n], False)


def test_generation_uses_the_adapter(answering: DeviceModel, base_dir: Path) -> None:
    prompts = _prompts(10)
    options = {"max_new_tokens": 6, "eos_token_id": NO_EOS, "tokens_per_pass": 40}
    base = generate(DeviceModel(base_dir), prompts, **options)
    assert generate(answering, prompts, **options) != base
    assert generate(DeviceModel(base_dir, RECIPE), prompts, **options) == base
