"""The report of many runs: its time and its size; by hand.

    python tests/benchmarks/report.py --runs 60 --users 100 --queries 30

The runs are made up, with six arms each, over three tasks, five seeds and four depths. Making them
takes longer than reporting on them and is not counted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from made_runs import make_run  # noqa: E402

TASKS = ("movie_tagging", "product_rating", "news_headline")
DEPTHS = (30, 20, 15, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--queries", type=int, default=30)
    parser.add_argument("--keep", type=Path, help="make the runs here and leave them")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        outputs = options.keep or Path(scratch)
        start = time.perf_counter()
        for i in range(options.runs):
            n_tasks, n_depths = len(TASKS), len(DEPTHS)
            make_run(
                outputs / TASKS[i % n_tasks] / f"{i:03d}",
                task=TASKS[i % n_tasks],
                blocks=DEPTHS[i // n_tasks % n_depths],
                seed=i // (n_tasks * n_depths),
                user_ids=tuple(f"user-{n:03d}" for n in range(options.users)),
                n_queries=options.queries,
            )
        print(f"{options.runs} runs made up: {time.perf_counter() - start:.1f} s")

        start = time.perf_counter()
        command = [sys.executable, "-m", "lamp_eval.report", str(outputs)]
        subprocess.run(command, check=True)
        seconds = time.perf_counter() - start
        files = [outputs / "report.html", *(outputs / "report").iterdir()]
        sizes = [file.stat().st_size / 1e6 for file in files]
        print(
            f"reported: {seconds:.1f} s; report.html {sizes[0]:.1f} MB, "
            f"{len(files) - 1} files of plots {sum(sizes[1:]):.1f} MB"
        )


if __name__ == "__main__":
    main()
