"""A child process for torch's work, so that MLX computes in a process where torch never did.

On Linux both use one OpenMP runtime. Once torch has computed, the runtime counts more threads than
cores and lets none of them spin between two products: MLX then takes twice as long (measured: 3.1
instead of 1.7 s for a window of the sample's user stage). The child also gives its memory back.
"""

from __future__ import annotations

import importlib
import multiprocessing
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from lamp_eval.errors import UserError


class Child:
    """A spawned process that runs functions one after the other; it starts on the first.

    Use as a context manager: leaving the block ends the process, whatever it is doing.
    """

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def run(self, function: str, *args: Any, report: Callable[[Any], None], **kwargs: Any) -> Any:
        """Calls a function in the child, which imports its module, and waits for the result.

        Args:
            function: `module:name`; it takes `report`, and all it takes and gives can be pickled.
            args: its positional arguments.
            report: called here with what the function passes to its own `report`.
            kwargs: its keyword arguments.

        Raises:
            UserError: raised by the function, or the process was killed.
            Exception: any other that the function raises, with the child's traceback as a note.
        """
        if self._process is None:
            self._start()
        assert self._process is not None and self._pipe is not None
        try:
            self._pipe.send((function, args, kwargs))
            kind, value = self._pipe.recv()
            while kind == "report":
                report(value)
                kind, value = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join()
            code = self._process.exitcode
            raise UserError(
                expected="a child process that finishes its work",
                found="it was killed, most often for want of memory"
                if code == -signal.SIGKILL
                else f"it ended with exit code {code}",
                where=function.replace(":", "."),
                fix="free some memory or lower executor.tokens_per_pass; "
                "the same command then continues",
            ) from None
        except BaseException:  # Ctrl-C: nothing is written any more when the folder is removed
            self._end(busy=True)
            raise
        if kind == "error":
            raise value
        return value

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        # Ctrl-C reaches every process of a terminal; the child leaves it to its parent.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._process.start()
        finally:
            signal.signal(signal.SIGINT, handler)
        theirs.close()

    def _end(self, *, busy: bool = False) -> None:
        if self._process is None or self._pipe is None:
            return
        self._pipe.close()  # which ends it if it waits for work
        if busy:
            self._process.terminate()
        self._process.join(timeout=10)
        self._process.kill()  # if it computes something long
        self._process.join()
        self._process = self._pipe = None


def _serve(pipe: Connection) -> None:
    """The child: calls what comes through the pipe until it is closed."""
    import on_device  # noqa: F401  # loads the BLAS before a recipe loads MLX

    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category)

    # An orderly end, so that the semaphores of progress bars are given back.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())

    def report(value: Any) -> None:
        pipe.send(("report", value))

    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            module, name = function.split(":")
            called = getattr(importlib.import_module(module), name)
            pipe.send(("result", called(*args, report=report, **kwargs)))
        except BrokenPipeError:  # the parent is gone
            return
        except Exception as error:
            error.add_note("in the child process:\n" + traceback.format_exc())
            pipe.send(("error", error))
