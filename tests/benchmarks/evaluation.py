"""Answers in batches against mlx-lm's one by one on the packed path, on the CPU; run by hand.

    PYTHONPATH=. python tests/benchmarks/evaluation.py

Both sides answer the same prompts, one movie of each sample user with one retrieved record, from
the same 4-bit checkpoint of SmolLM2-135M in one process: first `mlx_lm.stream_generate`, one prompt
at a time, then ours, all at once. All are greedy and at most as long as the task's longest label.
Each side answers once before it is timed, which compiles what mlx-lm compiles. Packed and dense
products round differently, which may turn an answer: the share of equal ones is shown.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import on_device  # noqa: F401  # loads the BLAS before MLX, for both sides

import mlx.core as mx  # isort: skip
import mlx_lm
from user_stage import base_4bit

from lamp_eval.config import DataConfig, ProtocolConfig
from lamp_eval.data import load_corpus
from lamp_eval.prompts import make_encoder
from lamp_eval.tasks import TASKS
from on_device.generate import generate, label_log_likelihoods
from on_device.model import DeviceModel
from recipes.model_source import load_tokenizer

TASK = TASKS["movie_tagging"]
Answers = list[tuple[int, ...]]


def prompts_of(model_dir: Path, n: int) -> tuple[list[tuple[int, ...]], list[list[int]], int, int]:
    """Prompts, the labels' token ids, the limit of new tokens, and EOS."""
    data = DataConfig(source="sample", n_users=n, n_task_users=1, n_records=10, n_queries=1)
    encoder = make_encoder(load_tokenizer(model_dir), TASK, ProtocolConfig(name="oppu"))
    users = load_corpus(TASK, data).users
    prompts = [request.prompt for user in users for request in encoder.requests(user, 1)]
    labels = [encoder.answer_ids(label) for label in TASK.labels]
    return prompts, labels, encoder.max_new_tokens, encoder.eos_token_id


def timed(answer: Callable[[Sequence[Sequence[int]]], Answers],
          prompts: Sequence[Sequence[int]]) -> tuple[Answers, float]:  # fmt: skip
    """The answers, and queries per second."""
    answer([prompts[0][:8]])
    start = time.perf_counter()
    answers = answer(prompts)
    return answers, len(prompts) / (time.perf_counter() - start)


def mlx_lm_answers(base: Path, n_new: int) -> Callable[[Sequence[Sequence[int]]], Answers]:
    """What answers prompts one by one with mlx-lm's own generation on the packed checkpoint."""
    model, tokenizer = mlx_lm.load(str(base))

    def answer(prompt: Sequence[int]) -> tuple[int, ...]:
        responses = mlx_lm.stream_generate(model, tokenizer, list(prompt), n_new)
        tokens = (response.token for response in responses)
        return tuple(token for token in tokens if token not in tokenizer.eos_token_ids)

    return lambda prompts: [answer(prompt) for prompt in prompts]


def main() -> None:
    """Measures both sides and prints queries per second."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--one-by-one", type=int, default=4, help="prompts of the slow sides")
    parser.add_argument("--batched", type=int, default=32, help="prompts of ours")
    parser.add_argument("--tokens-per-pass", type=int, default=2048)
    args = parser.parse_args()
    base = base_4bit()
    prompts, labels, n_new, eos = prompts_of(base, args.batched)
    few = prompts[: args.one_by_one]
    print(f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, "
          f"at most {n_new} new ones; {len(labels)} labels; {mx.default_device()}")  # fmt: skip
    theirs, slow = timed(mlx_lm_answers(base, n_new), few)
    print(f"mlx-lm, packed, one by one: {slow:7.2f} queries/s", flush=True)
    model = DeviceModel(base, path="resident")

    def greedy(some: Sequence[Sequence[int]], tokens_per_pass: int) -> Answers:
        options = {"max_new_tokens": n_new, "eos_token_id": eos}
        answers = generate(model, some, tokens_per_pass=tokens_per_pass, **options)
        return [answer.tokens for answer in answers]

    def likeliest(some: Sequence[Sequence[int]]) -> Answers:
        found = label_log_likelihoods(model, some, labels, tokens_per_pass=args.tokens_per_pass)
        return [tuple(labels[row.index(max(row))]) for row in found]

    for name, answer, asked in (
        ("ours, resident, one by one", lambda some: greedy(some, 1), few),
        ("ours, resident, batched", lambda some: greedy(some, args.tokens_per_pass), prompts),
        ("ours, resident, labels", likeliest, prompts),
    ):
        answers, speed = timed(answer, asked)
        equal = sum(a == b for a, b in zip(answers, theirs, strict=False))
        compared = "" if answer is likeliest else f", {equal} of {len(theirs)} answers equal"
        print(f"{name + ':':27} {speed:7.2f} queries/s, {speed / slow:5.1f}×{compared}", flush=True)


if __name__ == "__main__":
    main()
