"""docs/tutorial.md, block by block: its code runs, and prints what the tutorial says."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
TUTORIAL = REPOSITORY / "docs" / "tutorial.md"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # a tiny one takes its place
TINY = """
    quantization.group_size=32 adapter.task.batch_size=4 adapter.task.max_steps=2
    adapter.user.epochs=1 adapter.user.accumulation=2 n_resamples=99
    """.split()
SMALL = "data.n_users=2 data.n_task_users=4 data.n_records=4 data.n_queries=2".split()


@dataclass
class Block:
    language: str
    file: str | None  # to write, if any
    text: str
    printed: str | None  # the block of text after it


def blocks() -> list[Block]:
    found: list[Block] = []
    for language, file, text in re.findall(
        r"^```(\w+)(?: (\S+))?\n(.*?)^```$", TUTORIAL.read_text("utf-8"), re.MULTILINE | re.DOTALL
    ):
        if language == "text":
            found[-1].printed = text
        else:
            found.append(Block(language, file or None, text, None))
    return found


def install(folder: Path) -> None:
    """What pip does for a package with one module, without pip: its files and their metadata."""
    project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    information = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    information.mkdir()
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (information / "METADATA").write_text(head)
    lines = []
    for group, names in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in names.items())]
    (information / "entry_points.txt").write_text("\n".join(lines) + "\n")


def launch(command: str, folder: Path, model: Path) -> str:
    program, *arguments = shlex.split(command)
    assert program == "python"
    alone = "arms=[majority_label]" in arguments  # its result does not depend on any model
    arguments += [f"model.path={model}", *TINY, *([] if alone else SMALL)]
    path = os.pathsep.join([str(REPOSITORY), str(folder / "my-arms")])
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_tutorial(tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    ran = {"python": 0, "python -m": 0, "file": 0, "printed": 0}
    for block in blocks():
        output = io.StringIO()
        if block.file:
            path = tmp_path / block.file
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.text, "utf-8")
            ran["file"] += 1
        elif block.language == "python":
            code = block.text.replace(MODEL, str(model_dir))
            with contextlib.redirect_stdout(output):
                exec(compile(code, str(TUTORIAL), "exec"), names)
            ran["python"] += 1
        else:
            assert block.language == "console"
            for command in block.text.splitlines():
                if command.startswith("pip install -e "):
                    install(tmp_path / command.split()[-1])
                else:
                    output.write(launch(command, tmp_path, model_dir))
                    ran["python -m"] += 1
        if block.printed is not None:
            assert block.printed.strip(), (
                f"the tutorial does not say what this prints:\n{block.text}"
            )
            found = "\n".join(line.rstrip() for line in output.getvalue().splitlines())
            if block.language == "python":
                assert found + "\n" == block.printed
            else:  # the table among the rest, which says how long it took
                assert block.printed in found + "\n"
            ran["printed"] += 1
        elif block.language == "python" and not block.file:
            assert output.getvalue() == ""  # nothing is printed that the tutorial does not show
    assert ran == {"python": 6, "python -m": 2, "file": 2, "printed": 6}
    stages = tmp_path / "outputs" / "stages"
    assert sorted(path.name for path in stages.iterdir()) == [
        "bases", "predictions", "task_adapters", "user_adapters"
    ]  # fmt: skip
