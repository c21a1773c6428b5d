"""Finished runs made up for tests and benchmarks: random answers, scored as those of a run."""

import random
from dataclasses import asdict
from pathlib import Path

from lamp_eval.arms import arm, donors
from lamp_eval.config import (
    ARMS,
    AdapterConfig,
    DataConfig,
    ModelConfig,
    ProtocolConfig,
    QuantizationConfig,
    RunConfig,
    TaskAdapterConfig,
    UserAdapterConfig,
)
from lamp_eval.data import Corpus
from lamp_eval.leaderboard import leaderboard_rows, user_rows
from lamp_eval.metrics import score_output
from lamp_eval.records import Prediction, Query, Record, User
from lamp_eval.results import RunRecord, write_run
from lamp_eval.tasks import TASKS

# How often an arm is right, before the user's own luck.
SKILL = {
    "base": 0.2, "base_retrieval": 0.3, "task": 0.5, "task_retrieval": 0.55, "user": 0.6,
    "cross_user": 0.45,
}  # fmt: skip


def make_run(
    run_dir: Path,
    *,
    task: str = "movie_tagging",
    arms: tuple[str, ...] = ARMS,
    user_ids: tuple[str, ...] = ("ann", "bob", "cem"),
    n_queries: int = 4,
    n_records: tuple[int, int] = (5, 400),
    seed: int = 0,
    blocks: int = 30,
    started_at: str = "2026-01-01T00:00:00+00:00",
    commit: str | None = "0123456789abcdef",
    dirty: bool = False,
    synthetic: bool = True,
    signal: float = 0.8,
    backend: str = "mlx",
) -> RunRecord:
    """Writes a finished run; equal arguments, equal files."""
    spec, rng = TASKS[task], random.Random(seed)
    config = RunConfig(
        name=f"{task}_per_user",
        task=task,
        setting="sample",
        arms=list(arms),
        seed=seed,
        n_resamples=99,
        data=DataConfig(source="sample", n_users=1, n_task_users=1, n_queries=1, signal=signal),
        model=ModelConfig(name="smollm2_135m"),
        protocol=ProtocolConfig(name="oppu", adapter_k=0),
        adapter=AdapterConfig(
            task=TaskAdapterConfig(projections=["q"]),
            user=UserAdapterConfig(projections=["q"], blocks=blocks, backend=backend),
        ),
        quantization=QuantizationConfig(name="8bit_g64", bits=8),
    )
    fields = Record({spec.text_field: "a text", spec.gold_field: "an answer"})
    low, high = n_records
    users = tuple(
        User(
            user_id,
            (fields,) * round(low * (high / max(low, 1)) ** rng.random()),
            tuple(Query(f"{user_id}-{i}", "?", _answer(spec, rng)) for i in range(n_queries)),
        )
        for user_id in user_ids
    )
    donor_of = donors(user_ids, seed) if len(users) > 1 else {}
    predictions, rng = {}, random.Random(f"{seed}, {blocks}")
    for name in arms:
        predictions[name] = []
        if name == "user" and backend != "mlx":
            rng = random.Random(f"{seed}, {blocks}, {backend}")
        for user in users:
            skill = SKILL[name] + rng.uniform(-0.2, 0.2)
            for query in user.queries:
                output = query.gold if rng.random() < skill else _answer(spec, rng)
                predictions[name].append(
                    Prediction(
                        name,
                        user.id,
                        query.id,
                        "0" * 16,
                        output,
                        query.gold,
                        donor_id=donor_of.get(user.id) if name == "cross_user" else None,
                        scores=score_output(spec, output, query.gold),
                    )  # fmt: skip
                )
    corpus = Corpus(users, (), "others", synthetic, 0, f"checksum of {task}", {})
    rows = leaderboard_rows(
        config, spec, corpus, {name: arm(name, config.protocol) for name in arms}, predictions,
        n_blocks=blocks, cut_rates=dict.fromkeys(arms, 0.0), run=str(run_dir), commit=commit,
    )  # fmt: skip
    record = RunRecord(
        name=config.name, started_at=started_at, seconds=61.0, config=asdict(config),
        overrides=[], versions={"python": "3.11.2", "lamp_eval": "0.1.0"}, commit=commit,
        dirty=dirty, device={"mlx": "cpu"}, model_origin="hub", model_fingerprint="f" * 64,
        data_checksum=corpus.checksum, data_files={}, synthetic=synthetic,
        task_users_origin="others", n_users=len(users), n_queries=n_queries * len(users),
        n_task_users=0, users_without_history=[], donors=donor_of, seeds={}, parity_error={},
        failed_parses={}, cut_words={}, stages=[], seconds_by_stage={}, peak_memory_bytes=1,
        leaderboard=rows,
    )  # fmt: skip
    adapter_of = {(name, user.id): None for name in arms for user in users}
    write_run(run_dir, record, predictions, user_rows(spec, corpus, predictions, adapter_of))
    return record


def _answer(spec, rng: random.Random) -> str:
    if spec.labels:
        return rng.choice(spec.labels)
    words = "an early paper on small models and the people who use them every day".split()
    return " ".join(rng.sample(words, 6))
