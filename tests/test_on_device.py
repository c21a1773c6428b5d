"""The device side against plain references: conversion, training, generation."""

import tiny  # isort: skip  # noqa: F401  # loads the BLAS, before MLX

import hashlib
import importlib
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from peft import LoraConfig, get_peft_model
from tiny import N_BLOCKS, VOCABULARY
from transformers import AutoModelForCausalLM

import recipes.base
from lamp_eval.config import QuantizationConfig, UserAdapterConfig
from lamp_eval.errors import UserError
from lamp_eval.records import Example
from lamp_eval.schedule import TrainingStep, n_user_steps
from on_device import trainer
from on_device.generate import Answer, generate
from on_device.model import WEIGHTS, DeviceModel
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
) -> tuple[list[TrainingStep], dict[str, np.ndarray]]:
    steps: list[TrainingStep] = []
    train_user_adapter(
        model, examples, recipe, seed=seed, tokens_per_pass=2048, report=steps.append
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


@pytest.mark.parametrize("blocks", ["all", 2])
@pytest.mark.parametrize("n_common", [0, 25])
def test_checkpointing_changes_nothing(base_dir: Path, blocks: object, n_common: int) -> None:
    recipe = replace(RECIPE, blocks=blocks, accumulation=3)
    examples = _examples(7, n_common=n_common)
    kept = _train(DeviceModel(base_dir, recipe), examples, recipe)
    recomputed = _train(DeviceModel(base_dir, recipe), examples, replace(recipe, checkpoint=True))
    np.testing.assert_allclose(
        [step.loss for step in kept[0]], [step.loss for step in recomputed[0]], rtol=1e-4
    )
    _assert_close(kept[1], recomputed[1])


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

    def base_hash() -> str:
        digest = hashlib.sha256()
        for name, tensor in sorted(tree_flatten(model.model.parameters())):
            if "lora" not in name:
                digest.update(name.encode() + np.array(tensor).tobytes())
        return digest.hexdigest()

    before = base_hash()
    _train(model, _examples(7), replace(RECIPE, learning_rate=0.1))
    assert base_hash() == before
    model.reset_adapter(0)
    tokens = _tokens(30, 4)
    np.testing.assert_array_equal(_logits(model, tokens), _logits(DeviceModel(base_dir), tokens))


def test_a_loss_that_is_not_finite_is_an_error(base_dir: Path) -> None:
    model = DeviceModel(base_dir, RECIPE)
    name = "model.norm.weight"
    model.model.load_weights([(name, mx.full((64,), float("nan")))], strict=False)
    with pytest.raises(UserError, match="learning_rate"):
        _train(model, _examples(3))


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
    with pytest.raises(UserError, match="zero" if damage == "zero" else "layers"):
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


def _naive(model: DeviceModel, prompt: list[int], max_new_tokens: int, eos: int) -> Answer:
    tokens: list[int] = []
    for _ in range(max_new_tokens):
        logits = model.model(mx.array([*prompt, *tokens])[None])[0, -1]
        token = int(mx.argmax(logits).item())
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
