"""Stage 2 against other trainers and against what the machine could do; run by hand.

    PYTHONPATH=. python tests/benchmarks/user_stage.py [mlx-lm] [trainer] [depth] [losses]

All sides of a measure train the same LoRA layers of the same 4-bit checkpoint of SmolLM2-135M on
the same random examples, in float32, with AdamW, an answer of four tokens behind a prompt. Each
side runs in a process of its own; of each, only steps after the first are timed. Tokens are those
of the examples, prompt and answer; padding counts for nobody. Memory is MLX's peak above what is
there before the training, the weights above all.

- `mlx-lm`: tokens/s and memory against mlx-lm's trainer (`mx.compile` on, packed weights, one
  example at a time), as its users run it. It takes minutes for a step, so few are timed, and each
  example is an optimizer step: the update of the adapter is negligible.
- `trainer`: the torch backend against `transformers.Trainer` with peft.
- `depth`: adapters in the last half of the blocks against adapters in all of them, epoch by epoch.
- `losses`: the loss curves of both backends against plain torch, all logits, one example at a time.

The machine's rate is that of one large float32 product of the same BLAS. A step's products, forward
and by the inputs, at that rate are what it could take at best; its share of that is shown.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lamp_eval.config import QuantizationConfig, UserAdapterConfig
from lamp_eval.environment import cache_dir
from lamp_eval.records import Example
from lamp_eval.store import Store

ANSWER_TOKENS = 4  # a tag and EOS
N_BLOCKS, WIDTH, MLP, KEYS, VOCABULARY = 30, 576, 1536, 192, 49152  # of SmolLM2-135M
BLOCK_WEIGHTS = 2 * WIDTH * WIDTH + 2 * WIDTH * KEYS + 3 * WIDTH * MLP
Row = dict[str, Any]


def recipe(**changed: Any) -> UserAdapterConfig:
    """The paper's, at a learning rate that moves a small model."""
    values = {"projections": ["q_proj", "v_proj"], "blocks": N_BLOCKS, "learning_rate": 1e-3}
    return UserAdapterConfig(**(values | {"epochs": 1} | changed))


def examples(n: int, n_prompt: int, share: float = 0.0) -> list[Example]:
    """Random token ids; the first share of all prompts is the same."""
    rng, n_common = random.Random(0), round(share * n_prompt)
    common = [rng.randrange(100, 40_000) for _ in range(n_common)]
    n_own = n_prompt - n_common + ANSWER_TOKENS
    return [
        Example((*common, *(rng.randrange(100, 40_000) for _ in range(n_own))), n_prompt)
        for _ in range(n)
    ]


def base_4bit() -> Path:
    """SmolLM2-135M in 4 bits, groups of 64, built once."""
    from recipes.base import build_base
    from recipes.model_source import WHEEL, find_model

    store, key = Store(cache_dir() / "benchmarks"), {"model": "smollm2_135m", "bits": 4}
    if not store.has("bases", key):
        source = find_model(
            name="smollm2_135m",
            hub_id=None,
            path=None,
            revision=None,
            wheel=WHEEL,
            cache_dir=cache_dir() / "models",
        )
        with store.build("bases", key) as folder:
            quantization = QuantizationConfig(name="4bit_g64", bits=4, embedding_bits=4)
            build_base(
                source.path, None, quantization, dtype="float32", base_dir=folder, report=print
            )
    return store.path("bases", key)


# The sides, each in a process of its own


def ours_mlx(base: Path, job: Row) -> Row:
    """`on_device.trainer`, on the path and with the checkpointing of the job."""
    import mlx.core as mx

    from on_device.model import DeviceModel
    from on_device.trainer import train_user_adapter

    chosen = recipe(**job.get("recipe", {}))
    model = DeviceModel(base, chosen, path=job.get("path", "resident"))
    before = mx.get_active_memory()
    training = train_user_adapter(
        model,
        examples(*job["examples"]),
        chosen,
        seed=0,
        tokens_per_pass=job["tokens_per_pass"],
        report=lambda step: None,
        checkpoint=job.get("checkpoint", "none"),
    )
    return _of_rows(training.rows) | {
        "peak_bytes": max(row["peak_bytes"] for row in training.rows) - before,
        "weights_bytes": before,
        "gflops": _mlx_rate(),
    }


def ours_torch(base: Path, job: Row) -> Row:
    """`recipes.user_adapter`."""
    from recipes.user_adapter import train_user_adapter

    with tempfile.TemporaryDirectory() as folder:
        training = train_user_adapter(
            base,
            examples(*job["examples"]),
            recipe(**job.get("recipe", {})),
            seed=0,
            device="cpu",
            tokens_per_pass=job["tokens_per_pass"],
            adapter_dir=Path(folder),
            report=lambda step: None,
        )
    return _of_rows(training.rows) | {"gflops": _torch_rate()}


def both_depths(base: Path, job: Row) -> Row:
    """Trainings with adapters in all and in half of the blocks take turns, and are compared."""
    from on_device.model import DeviceModel
    from on_device.trainer import train_user_adapter

    data, ratios = examples(*job["examples"]), {"first": [], "later": []}
    recipes = [recipe(blocks=n, epochs=2, accumulation=4) for n in (N_BLOCKS, N_BLOCKS // 2)]
    models = [DeviceModel(base, chosen) for chosen in recipes]
    for n in range(1 + job["n_rounds"]):  # the first warms up
        epochs = []
        for model, chosen in zip(models, recipes, strict=True):
            training = train_user_adapter(
                model,
                data,
                chosen,
                seed=n,
                tokens_per_pass=1,
                report=lambda step: None,
                checkpoint=job["checkpoint"],
            )
            seconds = [row["seconds"] for row in training.rows]
            epochs.append((sum(seconds[:2]), sum(seconds[2:])))
        if n:
            whole = sum(epochs[0]) / 2
            ratios["first"].append(epochs[1][0] / whole)
            ratios["later"].append(epochs[1][1] / whole)
    return dict(ratios)


def _of_rows(rows: Sequence[Row]) -> Row:
    return {"seconds": [row["seconds"] for row in rows], "losses": [row["loss"] for row in rows]}


def mlx_lm(base: Path, job: Row) -> Row:
    """`mlx_lm.tuner.trainer` on the packed model, as its command line sets it up."""
    import mlx.core as mx
    from mlx.optimizers import AdamW
    from mlx_lm.tuner.callbacks import TrainingCallback
    from mlx_lm.tuner.trainer import TrainingArgs, train
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    model, _ = load_model(base)
    model.set_dtype(mx.float32)
    model.freeze()
    keys = ["self_attn.q_proj", "self_attn.v_proj"]
    lora = {"rank": 8, "scale": 2.0, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, len(model.layers), lora)
    mx.eval(model.parameters())
    before, ends, losses = mx.get_active_memory(), [time.perf_counter()], []
    mx.reset_peak_memory()

    class Reports(TrainingCallback):
        """Called after each iteration, one example."""

        def on_train_loss_report(self, train_info: Row) -> None:
            ends.append(time.perf_counter())
            losses.append(train_info["train_loss"])

    with tempfile.TemporaryDirectory() as folder:
        n, n_prompt = job["examples"][:2]
        args = TrainingArgs(
            batch_size=1,
            iters=n,
            steps_per_report=1,
            steps_per_save=10**9,
            adapter_file=f"{folder}/adapters.safetensors",
            grad_checkpoint=job.get("checkpoint", False),
        )
        optimizer = AdamW(learning_rate=1e-3, weight_decay=0.01, bias_correction=True)
        data = [(list(example.tokens), example.answer_start) for example in examples(n, n_prompt)]
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its own table
            train(model, optimizer, data, args=args, training_callback=Reports())
    return {
        "seconds": [end - start for start, end in zip(ends, ends[1:], strict=False)],
        "losses": losses,
        "peak_bytes": mx.get_peak_memory() - before,
        "weights_bytes": before,
    }


def transformers_trainer(base: Path, job: Row) -> Row:
    """`transformers.Trainer` with peft, micro-batches of one, as in the released code."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    chosen, ends = recipe(**job.get("recipe", {})), []

    class Clock(TrainerCallback):
        """Called around each optimizer step."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    rows = [
        {
            "input_ids": torch.tensor(example.tokens),
            "labels": torch.tensor(
                [-100] * example.answer_start + list(example.tokens[example.answer_start :])
            ),
        }
        for example in examples(*job["examples"])
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=_peft_model(base, chosen),
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=chosen.accumulation,
                num_train_epochs=chosen.epochs,
                learning_rate=chosen.learning_rate,
                weight_decay=chosen.weight_decay,
                max_grad_norm=chosen.clip_norm,
                lr_scheduler_type="cosine",
                report_to=[],
                disable_tqdm=True,
                save_strategy="no",
                use_cpu=True,
            ),
            train_dataset=rows,
            callbacks=[Clock()],
        )
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
    return {
        "seconds": [end - start for start, end in zip(ends[::2], ends[1::2], strict=True)],
        "losses": [],
    }


def plain_torch(base: Path, job: Row) -> Row:
    """The recipe written down: whole sequences one by one, all logits, torch's AdamW."""
    import torch

    from lamp_eval.schedule import learning_rate_factor
    from lamp_eval.training import initial_values, windows

    chosen = recipe(**job.get("recipe", {}))
    model, losses = _peft_model(base, chosen), []
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in own.items():
            name = name.removeprefix("base_model.model.").removesuffix(".default.weight")
            name = name.replace("lora_A", "lora_a").replace("lora_B", "lora_b")
            values = initial_values(name, tuple(parameter.shape[::-1]), 0)
            parameter.copy_(torch.from_numpy(values.T.copy()))
    optimizer = torch.optim.AdamW(own.values(), weight_decay=chosen.weight_decay)
    steps = windows(examples(*job["examples"]), chosen, 0)
    for step, window in enumerate(steps):
        total = torch.tensor(0.0)
        for example in window:
            tokens = torch.tensor([example.tokens])
            logits = model(input_ids=tokens).logits[0, example.answer_start - 1 : -1]
            total = total + torch.nn.functional.cross_entropy(
                logits, tokens[0, example.answer_start :], reduction="sum"
            )
        loss = total / sum(example.n_supervised_tokens for example in window)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(own.values(), chosen.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = chosen.learning_rate * learning_rate_factor(
                step, len(steps), chosen.warmup_ratio, chosen.schedule
            )
        optimizer.step()
        losses.append(loss.item())
    return {"seconds": [], "losses": losses}


def _peft_model(base: Path, chosen: UserAdapterConfig) -> Any:
    """transformers' own model of the dequantized base, with peft's LoRA."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from recipes.formats import dequantize_base

    with tempfile.TemporaryDirectory() as folder:
        dequantize_base(base, Path(folder))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lora = LoraConfig(
        r=chosen.rank, lora_alpha=chosen.alpha, target_modules=list(chosen.projections)
    )
    return get_peft_model(model, lora)


def _mlx_rate() -> float:
    """GFLOP/s of MLX's float32 product: shows which BLAS is really under it."""
    import mlx.core as mx

    a, b = mx.random.normal((512, WIDTH)), mx.random.normal((WIDTH, MLP))
    return _rate(lambda: mx.eval(a @ b))


def _torch_rate() -> float:
    import torch

    a, b = torch.randn(512, WIDTH), torch.randn(WIDTH, MLP)
    return _rate(lambda: torch.mm(a, b))


def _rate(product: Callable[[], object]) -> float:
    product()
    rates = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(50):
            product()
        rates.append(50 * 2 * 512 * WIDTH * MLP / (time.perf_counter() - start) / 1e9)
    return max(rates)


SIDES: dict[str, Callable[[Path, Row], Row]] = {
    "ours, MLX": ours_mlx,
    "ours, torch": ours_torch,
    "both depths": both_depths,
    "mlx-lm": mlx_lm,
    "transformers.Trainer": transformers_trainer,
    "plain torch": plain_torch,
}


def side(name: str, **job: Any) -> Row:
    """What a side measures, in a process of its own; `rss_bytes` is its largest size."""
    command = [sys.executable, __file__, "--side", json.dumps([name, job])]
    repository = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": repository}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"{name} failed")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def run_side(name: str, job: Row) -> None:
    """Measures a side and prints a line of JSON."""
    if name in ("ours, MLX", "both depths"):
        import on_device  # noqa: F401  # its BLAS goes in front of MLX's
    row = SIDES[name](base_4bit(), job)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps(row | {"rss_bytes": peak if sys.platform == "darwin" else peak * 1024}))


# The measures


def ideal_seconds(length: int, share: float, gflops: float) -> float:
    """One example's products at the machine's rate, its share of a window's beginning included."""
    n_tokens = length * (1 - share + share / 8) + ANSWER_TOKENS
    flops = 2 * 2 * (BLOCK_WEIGHTS * N_BLOCKS * n_tokens + VOCABULARY * WIDTH * ANSWER_TOKENS)
    return flops / gflops / 1e9


def against_mlx_lm(lengths: Sequence[int], n_theirs: int) -> None:
    """Speed and memory by length."""
    for length in lengths:
        theirs = side("mlx-lm", examples=[1 + n_theirs, length])
        seconds, theirs_mb = statistics.median(theirs["seconds"][1:]), theirs["peak_bytes"] / 1e6
        n_tokens = length + ANSWER_TOKENS
        print(
            f"{length:4} tokens  mlx-lm {n_tokens / seconds:7.2f} tokens/s, {seconds:6.1f} s an "
            f"example, {theirs_mb:.0f} MB above {theirs['weights_bytes'] / 1e6:.0f}",
            flush=True,
        )
        for title, share, options in (
            ("together, four fifths in common", 0.8, {"tokens_per_pass": 2048}),
            ("together, nothing in common", 0.0, {"tokens_per_pass": 2048}),
            ("one by one", 0.0, {"tokens_per_pass": 1}),
            ("one by one, groups of 5 recomputed", 0.0, {"tokens_per_pass": 1, "checkpoint": 5}),
            ("one by one, packed weights in memory", 0.0,
             {"tokens_per_pass": 1, "path": "dequantize"}),
        ):  # fmt: skip
            found = side("ours, MLX", examples=[24, length, share], **options)
            own, own_mb = statistics.median(found["seconds"][1:]) / 8, found["peak_bytes"] / 1e6
            ideal = ideal_seconds(length, share, found["gflops"])
            print(
                f"            {title:<38} {n_tokens / own:7.1f} tokens/s = {seconds / own:5.1f} ×, "
                f"{own_mb:.0f} MB = {own_mb / theirs_mb:.0%} above "
                f"{found['weights_bytes'] / 1e6:.0f}; {ideal / own:.0%} of "
                f"{found['gflops']:.0f} GFLOP/s",
                flush=True,
            )


def against_trainer(lengths: Sequence[int], n_rounds: int) -> None:
    """Speed of the torch backend, sides in turn."""
    for length in lengths:
        for share in (0.0, 0.8):
            pairs = []
            for _ in range(n_rounds):
                options = {"examples": [32, length, share]}
                theirs = side("transformers.Trainer", **options)
                found = side("ours, torch", tokens_per_pass=2048, **options)
                pairs.append([statistics.median(r["seconds"][1:]) / 8 for r in (theirs, found)])
            ratios = [theirs / own for theirs, own in pairs]
            own, n_tokens = statistics.median(own for _, own in pairs), length + ANSWER_TOKENS
            ideal = ideal_seconds(length, share, found["gflops"])
            print(
                f"{length:4} tokens, {share:.0%} in common: torch backend {n_tokens / own:.0f} "
                f"tokens/s = {statistics.median(ratios):.2f} × Trainer "
                f"({min(ratios):.2f}–{max(ratios):.2f}); "
                f"{ideal / own:.0%} of {found['gflops']:.0f} GFLOP/s",
                flush=True,
            )


def depth(lengths: Sequence[int], n_rounds: int) -> None:
    """The last half of the blocks against all, by epoch."""
    for length in lengths:
        for checkpoint, predicted in (("none", 0.75), (1, 2 / 3)):
            found = side(
                "both depths", examples=[8, length], checkpoint=checkpoint, n_rounds=n_rounds
            )
            first, later = (statistics.median(found[name]) for name in ("first", "later"))
            spread = f"{min(found['later']):.3f}–{max(found['later']):.3f}"
            print(
                f"{length:4} tokens, checkpoint={checkpoint}: of a step with adapters in all "
                f"blocks the first epoch's take {first:.3f} ({predicted:.3f} by operations), later "
                f"ones {later:.3f} ({spread}; 0.500)",
                flush=True,
            )


def losses(lengths: Sequence[int]) -> None:
    """Largest relative differences of a loss."""
    for length in lengths:
        changed = {"accumulation": 4, "epochs": 6, "learning_rate": 3e-3}
        options: Row = {"examples": [8, length, 0.5], "recipe": changed}
        expected = side("plain torch", **options)["losses"]
        for name in ("ours, MLX", "ours, torch"):
            found = side(name, tokens_per_pass=2048, **options)["losses"]
            worst = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
            print(
                f"{length:4} tokens, {len(found)} steps, loss {expected[0]:.2f} → "
                f"{expected[-1]:.2f}: {name} differs by at most {worst:.1e}",
                flush=True,
            )


def main() -> None:
    """Runs the chosen measures, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ("mlx-lm", "trainer", "depth", "losses")
    parser.add_argument("measures", nargs="*", metavar="measure", help=f"of {', '.join(names)}")
    parser.add_argument("--tokens", default="110,250,500", help="prompt lengths, with commas")
    parser.add_argument("--rounds", type=int, default=3, help="of sides that take turns")
    parser.add_argument("--mlx-lm-steps", type=int, default=1, help="timed, after the first")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        run_side(*json.loads(args.side))
        return
    if unknown := set(args.measures) - set(names):
        parser.error(f"no measure {', '.join(unknown)}; there are {', '.join(names)}")
    lengths, chosen = [int(n) for n in args.tokens.split(",")], args.measures or names
    base_4bit()
    print(f"float32, {os.cpu_count()} cores", flush=True)
    if "losses" in chosen:
        losses(lengths)
    if "depth" in chosen:
        depth(lengths, args.rounds)
    if "trainer" in chosen:
        against_trainer(lengths, args.rounds)
    if "mlx-lm" in chosen:
        against_mlx_lm(lengths, args.mlx_lm_steps)


if __name__ == "__main__":
    main()
