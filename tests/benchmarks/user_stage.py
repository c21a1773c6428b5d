"""Stage 2 against mlx-lm's own LoRA trainer, on the CPU; run by hand.

    python tests/benchmarks/user_stage.py --tokens 95,200

Both sides train the same LoRA layers of the same quantized checkpoint on the same examples, with
float32 scales and activations and AdamW. Tokens are those of the examples, prompt and answer, on
both sides; padding counts for nobody. Each variant runs in a process of its own, once with the
BLAS that MLX links ("reference") and once with the one that `on_device` loads before MLX ("torch"),
mlx-lm with and without `mx.compile` as well. Only steps after the first are timed.

mlx-lm takes half a minute and more for one example, so few are measured and, unless told otherwise
(--mlx-lm-accumulation), each is an optimizer step of its own: the update of the adapter is
negligible, and its three compiled graphs become one.
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
import warnings
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
ANSWER_TOKENS = 4  # a tag and EOS
RANK, SCALE, PROJECTIONS = 8, 2.0, ("q_proj", "v_proj")

# name: side, BLAS, mx.compile, whether the examples share the first four fifths of their prompt, as
# a task's instruction is shared (mlx-lm has no use for it)
VARIANTS: dict[str, tuple[str, str, bool, bool]] = {
    "ours, torch BLAS, common beginning": ("ours", "torch", False, True),
    "ours, torch BLAS": ("ours", "torch", False, False),
    "ours, reference BLAS": ("ours", "reference", False, False),
    "mlx-lm, reference BLAS, compiled": ("mlx-lm", "reference", True, False),
    "mlx-lm, reference BLAS, not compiled": ("mlx-lm", "reference", False, False),
    "mlx-lm, torch BLAS, compiled": ("mlx-lm", "torch", True, False),
    "mlx-lm, torch BLAS, not compiled": ("mlx-lm", "torch", False, False),
}


def examples(n: int, n_prompt: int, n_common: int) -> list[tuple[list[int], int]]:
    """Random token ids with the start of their answer; the first `n_common` are the same in all."""
    rng = random.Random(0)
    common = [rng.randrange(100, 40_000) for _ in range(n_common)]
    n_own = n_prompt - n_common + ANSWER_TOKENS
    return [
        (common + [rng.randrange(100, 40_000) for _ in range(n_own)], n_prompt) for _ in range(n)
    ]


Clock = tuple[float, float]  # seconds by the wall's clock and of the process on all cores


def now() -> Clock:
    """Both clocks."""
    return time.perf_counter(), time.process_time()


def ours(base: Path, n_prompt: int, n_common: int, n_steps: int, accumulation: int) -> list[Clock]:
    """The clocks at the end of each step, with `on_device.trainer`."""
    from lamp_eval.config import UserAdapterConfig
    from lamp_eval.records import Example
    from on_device.model import DeviceModel
    from on_device.trainer import train_user_adapter

    recipe = UserAdapterConfig(
        rank=RANK,
        alpha=RANK * SCALE,
        projections=list(PROJECTIONS),
        blocks="all",
        accumulation=accumulation,
        epochs=1,
    )
    data = examples(accumulation * (1 + n_steps), n_prompt, n_common)
    times: list[Clock] = []
    train_user_adapter(
        DeviceModel(base, recipe),
        [Example(tuple(tokens), start) for tokens, start in data],
        recipe,
        seed=0,
        tokens_per_pass=2048,
        report=lambda step: times.append(now()),
    )
    return times


def mlx_lm(base: Path, n_prompt: int, n_steps: int, accumulation: int) -> list[Clock]:
    """The clocks at the end of each step, with `mlx_lm.tuner.trainer` on the packed model."""
    import mlx.core as mx
    from mlx.optimizers import AdamW
    from mlx_lm.tuner.callbacks import TrainingCallback
    from mlx_lm.tuner.trainer import TrainingArgs, train
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    model, _ = load_model(base)
    model.set_dtype(mx.float32)
    model.freeze()
    keys = [f"self_attn.{name}" for name in PROJECTIONS]
    lora = {"rank": RANK, "scale": SCALE, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, len(model.layers), lora)
    mx.eval(model.parameters())
    times: list[Clock] = []

    class Times(TrainingCallback):
        """Called after each iteration, one example."""

        def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
            times.append(now())

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArgs(
            batch_size=1,
            iters=accumulation * (1 + n_steps),
            steps_per_report=1,
            steps_per_save=10**9,
            adapter_file=f"{folder}/adapters.safetensors",
            grad_accumulation_steps=accumulation,
        )
        data = examples(args.iters, n_prompt, 0)
        optimizer = AdamW(learning_rate=1e-5, weight_decay=0.01, bias_correction=True)
        train(model, optimizer, data, args=args, training_callback=Times())
    return times[accumulation - 1 :: accumulation]


def gflops_per_second() -> float:
    """Speed of MLX's float32 product: shows which BLAS is really under it."""
    import mlx.core as mx

    a, b = mx.random.normal((256, 576)), mx.random.normal((576, 1536))
    mx.eval(a @ b)
    n, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < 0.5:
        mx.eval(a @ b)
        n += 1
    return n * 2 * 256 * 576 * 1536 / elapsed / 1e9


def measure(args: argparse.Namespace) -> None:
    """One variant at one length, in this process; prints a line of JSON."""
    side, blas, _, common = VARIANTS[args.variant]
    n_prompt = int(args.tokens)
    if blas == "reference":
        import mlx.core  # noqa: F401  # before on_device, which then leaves the BLAS as it is

        warnings.filterwarnings("ignore", message="MLX uses its reference BLAS")
    import on_device  # noqa: F401

    with contextlib.redirect_stdout(io.StringIO()):  # mlx-lm prints its own table
        if side == "ours":
            accumulation = args.accumulation
            n_common = n_prompt * 4 // 5 if common else 0
            ends = ours(args.base, n_prompt, n_common, args.steps, accumulation)
        else:
            accumulation = args.mlx_lm_accumulation
            ends = mlx_lm(args.base, n_prompt, args.mlx_lm_steps, accumulation)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    steps = [
        (end[0] - start[0], end[1] - start[1]) for start, end in zip(ends, ends[1:], strict=False)
    ]
    row = {
        "n_steps": len(steps),
        "seconds_per_example": statistics.median(wall for wall, _ in steps) / accumulation,
        "cpu_seconds_per_example": statistics.median(cpu for _, cpu in steps) / accumulation,
        "gflops_per_second": gflops_per_second(),
        "peak_memory_bytes": peak if sys.platform == "darwin" else peak * 1024,
    }
    print(json.dumps(row))


def newest_base() -> Path:
    """The newest quantized base that a run has left in `outputs/`."""
    found = [
        path.parent
        for path in REPOSITORY.glob("outputs/stages/bases/*/config.json")
        if "quantization" in json.loads(path.read_text())
    ]
    if not found:
        sys.exit("no quantized base in outputs/stages/bases: run the main job first, or --base DIR")
    return max(found, key=lambda path: path.stat().st_mtime)


def main() -> None:
    """Runs all variants one after the other and prints their table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, help="MLX checkpoint; default: newest in outputs/")
    parser.add_argument("--tokens", default="95,200", help="prompt lengths, with commas")
    parser.add_argument("--steps", type=int, default=4, help="our optimizer steps timed")
    parser.add_argument("--accumulation", type=int, default=8, help="our examples per step")
    parser.add_argument("--mlx-lm-steps", type=int, default=2, help="mlx-lm's steps timed")
    parser.add_argument("--mlx-lm-accumulation", type=int, default=1, help="its examples per step")
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.base = (args.base or newest_base()).resolve()
    if args.variant:
        measure(args)
        return
    quantization = json.loads((args.base / "config.json").read_text()).get("quantization", {})
    print(f"{args.base}: {quantization.get('bits')} bits; float32; {os.cpu_count()} cores")
    passed_on = [
        f"--{name.replace('_', '-')}={getattr(args, name)}"
        for name in ("base", "steps", "accumulation", "mlx_lm_steps", "mlx_lm_accumulation")
    ]
    for length in args.tokens.split(","):
        speeds: dict[str, float] = {}
        for name, (side, _, compiled, _) in VARIANTS.items():
            if args.only not in name:
                continue
            environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
            if side == "mlx-lm" and not compiled:
                environment["MLX_DISABLE_COMPILE"] = "1"
            command = [sys.executable, __file__, *passed_on, "--tokens", length, "--variant", name]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                print(f"{length:>5} tokens  {name:<38} failed", flush=True)
                continue
            row = json.loads(done.stdout.splitlines()[-1])
            speeds[name] = (int(length) + ANSWER_TOKENS) / row["seconds_per_example"]
            print(
                f"{length:>5} tokens  {name:<38} {speeds[name]:8.2f} tokens/s"
                f"  {row['seconds_per_example']:7.2f} s an example"
                f" ({row['cpu_seconds_per_example']:.2f} s of CPU)"
                f"  {row['peak_memory_bytes'] / 1e9:5.2f} GB"
                f"  product {row['gflops_per_second']:5.0f} GFLOP/s  ({row['n_steps']} steps)",
                flush=True,
            )
        show_ratios(length, speeds)


def show_ratios(length: str, speeds: dict[str, float]) -> None:
    """Each of ours over the better of mlx-lm's two, with either BLAS."""
    for blas in ("reference", "torch"):
        theirs = [v for name, v in speeds.items() if name.startswith(f"mlx-lm, {blas}")]
        for name, speed in speeds.items():
            if theirs and name.startswith("ours"):
                print(
                    f"{length:>5} tokens  {name} : mlx-lm, {blas} BLAS = {speed / max(theirs):.1f}"
                )


if __name__ == "__main__":
    main()
