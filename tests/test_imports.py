"""Which module may import which: heavy libraries late, stages apart, the command line on top."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("lamp_eval", "recipes", "on_device")
HEAVY = ("torch", "mlx", "mlx_lm", "transformers", "peft", "matplotlib")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for name in PACKAGES for path in (ROOT / name).rglob("*.py")}


def imports(module: str) -> set[str]:
    """Everything a module imports anywhere in its text, as full dotted names."""
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    names = set()
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


def importers(target: str, among) -> list[str]:
    return sorted(
        module
        for module in among
        if any(name == target or name.startswith(f"{target}.") for name in imports(module))
    )


def of(package: str) -> list[str]:
    return [m for m in FILES if m == package or m.startswith(f"{package}.")]


def test_the_packages_are_there():
    assert len(of("lamp_eval")) > 15
    assert len(of("recipes")) > 2
    assert len(of("on_device")) > 2
    assert "lamp_eval.run" in FILES
    # The search itself works: it sees plain, from- and late imports.
    assert "lamp_eval.errors.UserError" in imports("lamp_eval.config")
    assert "lamp_eval.tasks.TASKS" in imports("lamp_eval.config")  # inside a function
    assert "numpy" in imports("lamp_eval.retrieval")


def test_recipes_and_on_device_do_not_know_each_other():
    assert importers("on_device", of("recipes")) == []
    assert importers("recipes", of("on_device")) == []


def test_only_the_command_line_imports_run():
    assert importers("lamp_eval.run", FILES) == ["lamp_eval.__main__"]
    assert importers("lamp_eval.__main__", FILES) == []


@pytest.mark.parametrize("module", ["lamp_eval.plan", "lamp_eval.pipeline", "lamp_eval.results"])
def test_stages_do_not_reach_back_into_the_pipeline(module):
    assert importers(module, of("recipes") + of("on_device")) == []


def test_values_depend_on_nothing_above_them():
    for package, forbidden in {
        "lamp_eval.tasks": ("lamp_eval.data", "lamp_eval.config", "lamp_eval.prompts"),
        "lamp_eval.data": ("lamp_eval.prompts", "lamp_eval.plan", "lamp_eval.results"),
    }.items():
        for target in forbidden:
            assert importers(target, of(package)) == []


def test_importing_the_evaluator_loads_no_heavy_library():
    modules = [m for m in of("lamp_eval") if m not in ("lamp_eval.__main__", "lamp_eval.run")]
    assert "lamp_eval.pipeline" in modules
    code = (
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
