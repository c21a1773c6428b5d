"""Prompts and retrieval of the train side: each record retrieves among those before it; by hand.

    python tests/benchmarks/prompts.py --users 100 --records 1000 --model DIR [--protocol lamp_chat]

The time of the whole (`user_examples`: retrieval, tokens, cuts) and of retrieval alone, on
synthetic users with the tokenizer of a model; and, for one user in `oppu`, of rank-bm25 made anew
for each prefix, which is what the released code does.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rank_bm25 import BM25Okapi

from lamp_eval.config import DataConfig, ProtocolConfig
from lamp_eval.data import load_corpus
from lamp_eval.prompts import make_encoder
from lamp_eval.retrieval import OKAPI, RANK_BM25, History
from lamp_eval.tasks import TASKS
from recipes.model_source import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--model", type=Path, required=True, help="a folder with a tokenizer")
    parser.add_argument("--protocol", choices=["oppu", "lamp_chat"], default="oppu")
    options = parser.parse_args()
    task = TASKS["movie_tagging"]
    data = DataConfig(
        source="sample",
        n_users=options.users,
        n_task_users=1,
        n_records=options.records,
        n_queries=1,
    )
    users = load_corpus(task, data).users
    encoder = make_encoder(
        load_tokenizer(options.model), task, ProtocolConfig(name=options.protocol)
    )
    chat = options.protocol == "lamp_chat"
    k, bm25 = (4, OKAPI) if chat else (1, RANK_BM25)
    shown = "{description}" if chat else task.oppu.retrieval_history
    documents = {user.id: [shown.format(**r.fields) for r in user.history] for user in users}

    start = time.perf_counter()
    n = sum(len(encoder.user_examples(user, k)) for user in users)
    whole = time.perf_counter() - start
    print(f"{len(users)} users, {n} examples: {whole:.1f} s")

    start = time.perf_counter()
    for own in documents.values():
        history = History(own, bm25=bm25)
        for i, document in enumerate(own):
            history.retrieve(document, k, before=i)
    print(f"retrieval alone: {time.perf_counter() - start:.1f} s")
    if chat:
        return

    own = documents[users[0].id]
    start = time.perf_counter()
    history = History(own)
    ours = [history.retrieve(document, 1, before=i) for i, document in enumerate(own)]
    one = time.perf_counter() - start
    start = time.perf_counter()
    step = max(1, len(own) // 20)  # a sample of the positions
    for i in range(1, len(own), step):
        scores = BM25Okapi([d.split(" ") for d in own[:i]]).get_scores(own[i].split(" "))
        assert ours[i] == [max(range(i), key=lambda j: (scores[j], j))]
    anew = (time.perf_counter() - start) * step
    print(
        f"one user: {one:.2f} s; rank-bm25 for each prefix about {anew:.1f} s ({anew / one:.0f}×)"
    )


if __name__ == "__main__":
    main()
