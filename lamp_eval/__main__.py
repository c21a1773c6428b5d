"""The command line: `python -m lamp_eval experiment=movie_tagging_per_user`."""

from __future__ import annotations

import difflib
import errno
import os
import re
import signal
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from lamp_eval import display
from lamp_eval.compose import CONF_DIR
from lamp_eval.config import KernelAbConfig, RunConfig
from lamp_eval.errors import UserError, fail
from lamp_eval.published import paper_table
from lamp_eval.results import RunRecord, write_csv

_finished: list[RunRecord] = []  # the jobs of a sweep, which run one after the other
_mistakes: list[UserError] = []
console = Console(width=None if sys.stdout.isatty() else 120)


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
def _job(composed: DictConfig) -> None:
    from lamp_eval import measures
    from lamp_eval.run import report_data, run

    hydra_config = HydraConfig.get()
    run_dir = Path(hydra_config.runtime.output_dir)
    try:
        config = OmegaConf.to_object(composed)
        assert isinstance(config, RunConfig)
        if config.data.report:
            report_data(config, console)
            return
        if config.dry_run:
            from lamp_eval.dry_run import dry_run

            if config.measure:
                measures.dry_run(config, console)
            else:
                dry_run(config, console)
            return
        work = measures.run if config.measure else run
        _finished.append(work(config, run_dir, list(hydra_config.overrides.task), console))
    except UserError as error:  # kept from Hydra, which would print the overrides around it
        _mistakes.append(error)
    finally:
        # A run that did not finish leaves its stages, but none of the folders that Hydra made.
        for folder in (run_dir, run_dir.parent):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def main() -> None:
    """Runs the command line.

    Exits with 2 after a user's mistake, 130 after Ctrl-C and 143 after SIGTERM, as schedulers send.
    """
    signal.signal(signal.SIGTERM, _terminate)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors on; they are printed here
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    _quiet_libraries()
    try:
        _job()
    except KeyboardInterrupt as interrupt:
        console.print("\nstopped. What is finished is kept: the same command continues from there.")
        # Without waiting for the threads of torch and MLX.
        os._exit(143 if isinstance(interrupt, _Terminated) else 130)
    except (HydraException, OmegaConfBaseException) as error:
        fail(_composition_message(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS,
                               errno.ENOTDIR, errno.EEXIST, errno.EPERM):  # fmt: skip
            raise
        where = os.fsdecode(error.filename) if error.filename else "the output folder"
        problem = UserError(
            expected="a folder to write into, with free space",
            found=error.strerror or str(error),
            where=where,
            fix="free some space or set output_dir=…; the same command then continues",
        )
        fail(str(problem))
    if _finished and (suite := _finished[0].config["suite"]):
        _show_suite(suite)
    elif len(_finished) > 1:
        _show_sweep()
    if _mistakes:
        fail("\n".join(dict.fromkeys(str(mistake) for mistake in _mistakes)))


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a run as Ctrl-C does."""


def _terminate(number: int, frame: object) -> None:
    raise _Terminated


def _show_suite(suite: str) -> None:
    """The paper's table from the jobs of this sweep, which are also kept as a file."""
    lines = paper_table(suite, (row for record in _finished for row in record.leaderboard))
    display.show_paper_table(console, suite, lines)
    path = Path(_finished[0].config["output_dir"]) / f"{suite}.csv"
    write_csv(path, tuple(lines[0]), lines)
    console.print(f"table: {path}", style="bold", soft_wrap=True)


def _show_sweep() -> None:
    """The runs side by side; how far two backends agree, if that is what differs."""
    from lamp_eval.agreement import agreement, backend_pairs, write_agreement
    from lamp_eval.leaderboard import main_rows

    found = [agreement(pair) for pair in backend_pairs(_finished)]
    for one in found:
        display.show_agreement(console, one)
    if found:
        path = write_agreement(Path(_finished[0].leaderboard[0]["run"]).parent, found)
        console.print(f"by user: {path}", style="bold", soft_wrap=True)
        return
    rows = main_rows(row for record in _finished for row in record.leaderboard)
    shown = [row for row in rows if row["arm"] in ("user", "cross_user")] or rows
    if shown:  # measurements have no arms
        title = f"sweep: {len(_finished)} runs side by side"
        display.show_leaderboard(console, shown, title=title, with_blocks=True)


def _composition_message(error: Exception) -> str:
    """Hydra's message, with its cause and the option that was probably meant."""
    cause: BaseException = error
    while cause.__cause__ is not None and not isinstance(cause, UserError):
        cause = cause.__cause__
    if isinstance(cause, UserError):
        return str(cause)
    lines = [str(error).strip()]
    if cause is not error and str(cause).splitlines()[0] not in lines[0]:
        lines.append(str(cause).splitlines()[0])
    wrong = re.search(r"override '([\w./]+)|Could not override '([\w.]+)'", lines[0])
    if wrong:
        name = next(group for group in wrong.groups() if group)
        close = difflib.get_close_matches(name, _option_names(), n=3, cutoff=0.6)
        if close:
            lines.append(f"did you mean {' or '.join(close)}?")
    lines.append("to do: python -m lamp_eval --help lists all options")
    return "\n  ".join(lines)


def _option_names() -> list[str]:
    names: list[str] = []

    def walk(node: DictConfig, prefix: str) -> None:
        for key in map(str, node):
            names.append(f"{prefix}{key}")
            child = node._get_node(key)
            if isinstance(child, DictConfig) and not child._is_missing():
                walk(child, f"{prefix}{key}.")

    walk(OmegaConf.structured(RunConfig(kernel_ab=KernelAbConfig())), "")
    return names


def _quiet_libraries() -> None:
    import warnings

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category)


if __name__ == "__main__":
    main()
