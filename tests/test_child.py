"""Work in a child process: what comes back, and what happens when it does not."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lamp_eval.child import Child
from lamp_eval.errors import InputProblems, UserError

PROBLEM = {"expected": "one", "found": "two", "where": "there", "fix": "count again"}


# What the child runs; it imports this module by its name.


def double(number: int, *, report: Callable[[str], None]) -> tuple[int, int]:
    report("half way")
    report("nearly")
    return 2 * number, os.getpid()


def fail(kind: str, *, report: Callable[[str], None]) -> None:
    if kind == "user":
        raise UserError(**PROBLEM)
    if kind == "several":
        raise InputProblems([UserError(**PROBLEM), UserError(**PROBLEM | {"found": "three"})])
    if kind == "disk":
        raise OSError(28, "No space left on device", "/full/file")
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ZeroDivisionError("a bug")


def sleep(path: str, *, report: Callable[[str], None]) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(60)


@pytest.fixture(scope="module")
def child() -> Child:
    with Child() as child:
        yield child


def test_results_and_reports_come_back_from_one_process(child: Child) -> None:
    lines: list[str] = []
    result, pid = child.run("test_child:double", 21, report=lines.append)
    assert result == 42
    assert lines == ["half way", "nearly"]
    assert pid != os.getpid()
    assert child.run("test_child:double", 1, report=lines.append) == (2, pid)


@pytest.mark.parametrize("kind", ["user", "several"])
def test_a_mistake_keeps_its_words(child: Child, kind: str) -> None:
    with pytest.raises(UserError) as here:
        fail(kind, report=print)
    with pytest.raises(UserError) as there:
        child.run("test_child:fail", kind, report=print)
    assert type(there.value) is type(here.value)
    assert str(there.value) == str(here.value)
    again = pickle.loads(pickle.dumps(there.value))
    assert str(again) == str(here.value)


def test_other_errors_keep_their_type_and_the_traceback(child: Child) -> None:
    with pytest.raises(OSError, match="No space left") as full:
        child.run("test_child:fail", "disk", report=print)
    assert (full.value.errno, full.value.filename) == (28, "/full/file")
    with pytest.raises(ZeroDivisionError, match="a bug") as bug:
        child.run("test_child:fail", "bug", report=print)
    assert "in fail" in bug.value.__notes__[0]
    assert child.run("test_child:double", 2, report=print)[0] == 4  # and it goes on


def test_a_killed_child_is_a_clear_mistake() -> None:
    with Child() as child, pytest.raises(UserError, match="memory") as caught:
        child.run("test_child:fail", "killed", report=print)
    assert "test_child.fail" in str(caught.value)


def test_leaving_the_block_ends_the_child(tmp_path: Path) -> None:
    """As with Ctrl-C in the parent while the child works."""
    path = tmp_path / "pid"
    script = (
        "import signal, sys\n"
        "from lamp_eval.child import Child\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "if __name__ == '__main__':\n"
        "    with Child() as child:\n"
        f"        child.run('test_child:sleep', {str(path)!r}, report=print)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # to all, as a terminal does
    _, stderr = process.communicate(timeout=30)
    assert stderr.count("KeyboardInterrupt") == 1, stderr  # the parent's alone
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)
