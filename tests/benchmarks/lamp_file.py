"""Reads a file of the size of LaMP-3's official training file; by hand, not in CI.

    python tests/benchmarks/lamp_file.py [--users 20000] [--records 190]

It writes synthetic questions to a temporary folder (2.6 GB, and as much for the table), reads them
in a process of its own, and prints the time and the largest resident size; then both again from the
table. Measure: less than 1.5 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

READ = """
import resource, sys, time
from lamp_eval.config import DataConfig
from lamp_eval.data import load_corpus
from lamp_eval.tasks import TASKS
start = time.perf_counter()
data = DataConfig(source="lamp", dir=sys.argv[1], split="train")
corpus = load_corpus(TASKS["product_rating"], data)
loaded = time.perf_counter() - start
to_load = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
assert len(corpus.users) == int(sys.argv[2])
start = time.perf_counter()
n_records = sum(len(user.history) for user in corpus.users)
everyone = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
anonymous = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
print(f"loaded in {loaded:.1f} s with at most {to_load:.2f} GB; all {n_records} records in "
      f"{everyone:.1f} s, {peak:.2f} GB with the pages of the file, now "
      f"{int(anonymous.split()[1]) / 2**20:.2f} GB without")
"""


QUESTION = (
    "What is the score of the following review on a scale of 1 to 5? just answer with 1, 2, 3, 4, "
    "or 5 without further explanation. review: works "
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--users", type=int, default=20_000)
    parser.add_argument("--records", type=int, default=190)
    args = parser.parse_args()
    rng = random.Random(0)
    words = ["battery", "colour", "again", "été", "\n", "works", "really", "cable"]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folder = root / "LaMP_3" / "train"
        folder.mkdir(parents=True)
        text = " ".join(rng.choices(words, k=20_000))
        with (folder / "train_questions.json").open("w") as file:
            for user in range(args.users):
                profile = []
                for record in range(rng.randint(args.records // 2, args.records * 3 // 2)):
                    start = rng.randrange(len(text) - 1400)
                    own = text[start : start + rng.randint(300, 1100)]
                    profile.append({"id": f"{user}{record}", "text": own, "score": "4"})
                entry = {"id": str(user), "input": QUESTION + str(user), "profile": profile}
                file.write(("[" if user == 0 else ", ") + json.dumps(entry))
            file.write("]")
        golds = [{"id": str(user), "output": str(user % 5 + 1)} for user in range(args.users)]
        outputs = {"task": "LaMP_3", "golds": golds}
        (folder / "train_outputs.json").write_text(json.dumps(outputs))
        print(f"questions: {(folder / 'train_questions.json').stat().st_size / 1e9:.2f} GB")
        for what in ("first", "again"):
            start = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", READ, name, str(args.users)],
                env={**os.environ, "XDG_CACHE_HOME": str(root / "cache")},
                check=True,
                capture_output=True,
                text=True,
            )
            print(f"{what} ({time.perf_counter() - start:.1f} s): {done.stdout.strip()}")


if __name__ == "__main__":
    main()
