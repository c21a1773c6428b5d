"""Downloads the benchmark's files: `python -m lamp_eval.download lamp --task T --split S …`."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import requests
from filelock import FileLock, Timeout
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from lamp_eval.errors import UserError, fail, raise_if_any
from lamp_eval.tasks import LAMP_TASKS, Task

BASE_URL = "https://ciir.cs.umass.edu/downloads/LaMP"
DOWNLOAD_PAGE = "https://lamp-benchmark.github.io/download"

# Folders on the server, as DOWNLOAD_PAGE links them (its source: download.html, commit 3323337, in
# github.com/LaMP-Benchmark/lamp-benchmark.github.io). There LaMP-2 was still news; movie tagging
# came later as LaMP_2/new (scripts/download.sh of github.com/linfeng-du/PURPLE). The split by time
# has the same folders under time/ (download_data.py of github.com/FadyRezkGhattas/LaMP, which
# follows the page's links); time/LaMP_2/new is known from users' scripts only.
FOLDERS = {
    "LaMP_1": "LaMP_1",
    "LaMP_2M": "LaMP_2/new",
    "LaMP_2N": "LaMP_2",
    "LaMP_3": "LaMP_3",
    "LaMP_4": "LaMP_4",
    "LaMP_5": "LaMP_5",
    "LaMP_7": "LaMP_7",
}
SPLITS = ("train", "dev", "test")
KINDS = ("user", "time")
SUMS = "SHA256SUMS"

WAITS_SECONDS: tuple[float, ...] = (1, 2, 4, 8)  # one before each further try
TIMEOUTS_SECONDS = (10.0, 60.0)  # to connect; without a byte
CHUNK_BYTES = 2**16
# Ranges and lengths of a compressed body would not be those of the file.
PLAIN = {"Accept-Encoding": "identity"}


@dataclass(frozen=True)
class RemoteFile:
    """Where a file is, its path under `DIR`, and the first and last byte of its JSON."""

    url: str
    name: str
    brackets: tuple[bytes, bytes]


class Unreachable(UserError):
    """No try brought a whole answer: other files of this server would fare no better."""


class _Again(Exception):
    """This try failed, and another may succeed."""


def files_of(task: Task, split: str, kind: str, base_url: str = BASE_URL) -> list[RemoteFile]:
    """The files of one split of a task: questions and outputs, of `test` the questions alone.

    Args:
        task: the task.
        split: one of `SPLITS`.
        kind: one of `KINDS`: a user is in one split only, or a split is a time.
        base_url: the folder on the server that holds `LaMP_1` and so on.
    """
    under = "time/" if kind == "time" else ""
    brackets = {"questions": (b"[", b"]"), "outputs": (b"{", b"}")}
    return [
        RemoteFile(
            url=f"{base_url.rstrip('/')}/{under}{FOLDERS[task.lamp_id]}/{split}/{file_name}",
            name=f"{under}{task.lamp_id}/{split}/{file_name}",
            brackets=brackets[content],
        )
        for content in (["questions"] if split == "test" else ["questions", "outputs"])
        for file_name in [f"{split}_{content}.json"]
    ]


def download(
    files: Sequence[RemoteFile],
    directory: Path,
    console: Console,
    sums: Mapping[str, str] | None = None,
) -> None:
    """Downloads what is not there yet, and verifies what is.

    Proxies are those of the environment: HTTP_PROXY, HTTPS_PROXY, NO_PROXY.

    Args:
        files: what is wanted.
        directory: the folder in which each file has its name.
        console: shows progress.
        sums: SHA-256 by name. A file without one here is verified against `SHA256SUMS` of
            `directory`, where the sums of all files are recorded.

    Raises:
        UserError: with the problems of all files.
    """
    problems: list[UserError] = []
    with requests.Session() as session:
        for file in files:
            try:
                fetch(file, directory, session, console, (sums or {}).get(file.name))
            except UserError as error:
                problems.append(error)
                if isinstance(error, Unreachable):
                    break
    raise_if_any(problems)


def fetch(
    file: RemoteFile,
    directory: Path,
    session: requests.Session,
    console: Console,
    sha256: str | None = None,
) -> None:
    """Downloads one file, or verifies the one that is there.

    It grows as `….part`, which a later call continues if the server still has the same version, and
    gets its name when it has been checked. A second process waits, and verifies.

    Raises:
        UserError: the server has no such file or another one, or it cannot be written.
        Unreachable: the connection failed in each try.
    """
    path = directory / file.name
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path, console):
            recorded = read_sums(directory / SUMS).get(file.name)
            digest, how = _digest_if_good(file, path, session, recorded, sha256), "there, verified"
            if digest is None:
                if path.exists():
                    console.print(f"{path} differs from its checksum: downloading it again")
                speed = _complete(file, part, session, console)
                how = f"downloaded, {decimal(round(speed))}/s"
                digest = _checked(file, part, sha256)
                if recorded not in (None, digest):
                    console.print(f"{path}: another version than the one downloaded before")
                os.replace(part, path)
                _version_path(part).unlink(missing_ok=True)
            if digest != recorded:
                _record(directory, file.name, digest, console)
            console.print(f"{path}: {decimal(path.stat().st_size)}, {how}, sha256 {digest}")
    except KeyboardInterrupt:
        size, version = _started(part, file.url)
        if size:
            again = "continues it" if version else "starts it again: the server names no version"
            console.print(f"{part} holds {decimal(size)}; the same command {again}")
        raise
    except OSError as error:
        raise UserError(
            expected="a folder with space in which files can be written",
            found=error.strerror or str(error),
            where=str(error.filename or path),
            fix="make space or check permissions, and give the same command: it continues",
        ) from error


def _digest_if_good(
    file: RemoteFile,
    path: Path,
    session: requests.Session,
    recorded: str | None,
    sha256: str | None,
) -> str | None:
    """The sum of the file that is there; None if there is none, or a damaged one."""
    if not path.exists():
        return None
    digest = _sha256(path)
    if digest == (sha256 or recorded):
        return digest
    if recorded is not None:
        return None
    # Not from here: kept if it can be the server's file, and never overwritten.
    if sha256 is None and _looks_right(file, path):
        try:
            answer = session.head(
                file.url, headers=PLAIN, allow_redirects=True, timeout=TIMEOUTS_SECONDS
            )
        except requests.RequestException as error:
            raise _unreachable(file, _reason(error)) from error
        if answer.ok and answer.headers.get("Content-Length") == str(path.stat().st_size):
            return digest
    raise UserError(
        expected=f"no file, one downloaded by this command, or the same as {file.url}",
        found=f"a file of {path.stat().st_size} bytes with sha256 {digest}",
        where=str(path),
        fix="move it away, or choose another --dir",
    )


def _complete(file: RemoteFile, part: Path, session: requests.Session, console: Console) -> float:
    """Makes the part whole, in several tries; returns bytes per second."""
    if not console.is_terminal:
        console.print(f"downloading {file.url}")
    n_bytes, start = 0, time.perf_counter()
    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bars:
        bar = bars.add_task(file.name, total=None)
        for wait_seconds in (*WAITS_SECONDS, None):
            try:
                for n_received in _receive(file, part, session, bars, bar):
                    n_bytes += n_received
                return n_bytes / (time.perf_counter() - start)
            except (
                _Again,
                requests.ConnectionError,
                requests.Timeout,
                requests.exceptions.ChunkedEncodingError,
            ) as error:
                reason = _reason(error)
            except requests.RequestException as error:
                raise _unreachable(file, _reason(error)) from error
            if wait_seconds is not None:
                console.print(f"{file.name}: {reason}; again in {wait_seconds} s")
                time.sleep(wait_seconds)
    raise _unreachable(file, f"{reason}; {len(WAITS_SECONDS) + 1} tries")


def _receive(
    file: RemoteFile, part: Path, session: requests.Session, bars: Progress, bar: TaskID
) -> Iterator[int]:
    """One request, for what the part lacks; yields the number of bytes whenever some came."""
    offset, version = _started(part, file.url)
    if not version:
        offset = 0
    wanted = {"Range": f"bytes={offset}-", "If-Range": version} if offset else {}
    with session.get(
        file.url, headers=PLAIN | wanted, stream=True, timeout=TIMEOUTS_SECONDS
    ) as answer:
        status = answer.status_code
        if offset and status in (206, 416):
            first_byte, total = _content_range(answer)
            if status == 416 and total == offset:
                return  # it was whole
            # Some servers take no notice of If-Range.
            if status == 416 or first_byte != offset or _version(answer) not in ("", version):
                _discard(part)
                raise _Again("the file on the server has changed")
        elif status == 200:
            offset, total = 0, _content_length(answer)
        elif status >= 500 or status in (408, 429):
            raise _Again(f"status {status} {answer.reason}")
        else:
            raise _refused(file, status, answer.reason)
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise _no_data(file, f"compressed data ({answer.headers['Content-Encoding']})")
        _check_space(part, total)
        bars.reset(bar, completed=offset, total=total)
        chunks = answer.iter_content(CHUNK_BYTES)
        beginning = next(chunks, b"")
        if offset == 0:
            # Before anything is overwritten: login pages come with status 200, too.
            if beginning.lstrip()[:1] != file.brackets[0]:
                html = re.match(rb"\s*<(!doctype|html|head)", beginning, re.IGNORECASE)
                raise _no_data(file, f"{'a web page: ' if html else ''}{beginning[:60]!r}")
            _discard(part)
            _version_path(part).write_text(f"{file.url}\n{_version(answer)}\n", encoding="utf-8")
        with part.open("ab") as grown:
            for chunk in chain([beginning], chunks):
                grown.write(chunk)
                bars.advance(bar, len(chunk))
                yield len(chunk)
    if total is not None and part.stat().st_size != total:
        size = part.stat().st_size
        if size > total:
            _discard(part)
        raise _Again(f"{size} bytes instead of {total}")


def _checked(file: RemoteFile, part: Path, sha256: str | None) -> str:
    """The sum of a whole part; one that is not the file wanted is removed.

    Raises:
        UserError: it is no JSON of the right kind, or has another sum than `sha256`.
    """
    digest = _sha256(part)
    if not _looks_right(file, part):
        with part.open("rb") as written:
            written.seek(-min(part.stat().st_size, 40), os.SEEK_END)
            end = written.read()
        _discard(part)
        raise UserError(
            expected=f"JSON that ends with {file.brackets[1].decode()}",
            found=f"an end of {end!r}",
            where=file.url,
            fix=f"try later; compare with {DOWNLOAD_PAGE}, or use a mirror with --base-url",
        )
    if sha256 not in (None, digest):
        _discard(part)
        raise UserError(
            expected=f"sha256 {sha256}",
            found=f"sha256 {digest}",
            where=file.url,
            fix="the server has another version: check --sha256, or leave it out to take this one",
        )
    return digest


def _looks_right(file: RemoteFile, path: Path) -> bool:
    """Whether the first and the last byte that is no space are those of the right JSON."""
    with path.open("rb") as content:
        beginning = content.read(CHUNK_BYTES)
        content.seek(-min(path.stat().st_size, CHUNK_BYTES), os.SEEK_END)
        end = content.read()
    return (beginning.lstrip()[:1], end.rstrip()[-1:]) == file.brackets


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


# A part, and beside it which version of which file it is.


def _version_path(part: Path) -> Path:
    return part.with_name(f"{part.name}.version")


def _started(part: Path, url: str) -> tuple[int, str]:
    """Size and version of a part of this very file; 0 if there is none, "" if it has no version."""
    try:
        source, version = _version_path(part).read_text(encoding="utf-8").split("\n")[:2]
        return (part.stat().st_size, version) if source == url else (0, "")
    except (OSError, ValueError):
        return 0, ""


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _version_path(part).unlink(missing_ok=True)


def _version(answer: requests.Response) -> str:
    """What If-Range takes: a strong ETag or the date of the last change (RFC 9110, 13.1.5)."""
    etag = answer.headers.get("ETag", "")
    return etag if etag.startswith('"') else answer.headers.get("Last-Modified", "")


def _content_range(answer: requests.Response) -> tuple[int | None, int | None]:
    """First byte and size of the whole file."""
    found = re.fullmatch(
        r"bytes (?:(\d+)-\d+|\*)/(?:(\d+)|\*)", answer.headers.get("Content-Range", "")
    )
    first_byte, total = found.groups() if found else (None, None)
    return (int(first_byte) if first_byte else None), (int(total) if total else None)


def _content_length(answer: requests.Response) -> int | None:
    length = answer.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else None


def _check_space(part: Path, total: int | None) -> None:
    there = part.stat().st_size if part.exists() else 0  # is kept or makes place
    free = shutil.disk_usage(part.parent).free
    if total is not None and total - there > free:
        raise UserError(
            expected=f"{decimal(total - there)} of free space",
            found=decimal(free),
            where=str(part.parent),
            fix="make space, or choose another --dir",
        )


@contextmanager
def _locked(path: Path, console: Console) -> Iterator[None]:
    """One process at a time works on the file, and others wait."""
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        console.print(f"{path}: waiting for another process that works on it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def read_sums(path: Path) -> dict[str, str]:
    """Reads SHA-256 sums by file name, in the format of `sha256sum`; none if there is no such file.

    Raises:
        UserError: a line has another form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _no_sums(path, str(error)) from error
    sums = {}
    for number, line in enumerate(lines, start=1):
        found = re.fullmatch(r"([0-9A-Fa-f]{64}) [ *](?:\./)?(.+)", line)
        if found:
            sums[found[2]] = found[1].lower()
        elif line.strip():
            raise _no_sums(path, f"line {number}: {line!r:.80}")
    return sums


def _record(directory: Path, name: str, digest: str, console: Console) -> None:
    path = directory / SUMS
    with _locked(path, console):
        sums = read_sums(path) | {name: digest}
        written = path.with_name(f"{SUMS}.part")
        written.write_text(
            "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)), encoding="utf-8"
        )
        os.replace(written, path)


def sums_for(given: str, files: Sequence[RemoteFile]) -> dict[str, str]:
    """What `--sha256` says: the sum of the only file, or a table of sums.

    Raises:
        UserError: it is neither, or lacks a file.
    """
    names = [file.name for file in files]
    if re.fullmatch(r"[0-9A-Fa-f]{64}", given):
        sums = {name: given.lower() for name in names[:1]}
    elif not Path(given).is_file():
        raise UserError(
            expected="64 hexadecimal digits, or a file with a table of sums",
            found="neither",
            where=f"--sha256 {given}",
            fix="check the path, or the sum",
        )
    else:
        sums = read_sums(Path(given))
    missing = [name for name in names if name not in sums]
    if missing:
        raise UserError(
            expected="a sum for each file: a table as sha256sum writes it, or for one file the sum",
            found=f"none for {', '.join(missing)}",
            where=f"--sha256 {given}",
            fix=f"add them, with these names, or leave --sha256 out: sums are written to {SUMS}",
        )
    return sums


# What a person reads when it does not work.


def _reason(error: BaseException) -> str:
    """What an error goes back to: those of requests enclose it several times."""
    if not isinstance(error, requests.RequestException):
        return str(error)
    root: BaseException = error
    while root.__context__ is not None:
        root = root.__context__
    name, text = type(root).__name__, str(root)
    return text if text.startswith(name) else f"{name}: {text}"


def _unreachable(file: RemoteFile, reason: str) -> Unreachable:
    return Unreachable(
        expected="an answer with the whole file",
        found=reason,
        where=file.url,
        fix="check the network, HTTP(S)_PROXY and --base-url, and give the same command again",
    )


def _refused(file: RemoteFile, status: int, reason: str) -> UserError:
    fixes = {
        404: f"the file may have moved, or a mirror lacks it: look at {DOWNLOAD_PAGE}, and give "
        "the folder that holds LaMP_1 and the others with --base-url",
        407: "the proxy wants a name and a password: HTTPS_PROXY=http://NAME:PASSWORD@HOST:PORT",
    }
    return UserError(
        expected="status 200 or 206",
        found=f"status {status} {reason}",
        where=file.url,
        fix=fixes.get(status, "open it in a browser; check HTTP(S)_PROXY, or give --base-url"),
    )


def _no_data(file: RemoteFile, found: str) -> UserError:
    return UserError(
        expected=f"JSON that begins with {file.brackets[0].decode()}",
        found=found,
        where=file.url,
        fix="open it in a browser: a proxy may want a login, or the file has moved "
        f"(see {DOWNLOAD_PAGE}; --base-url takes a mirror)",
    )


def _no_sums(path: Path, found: str) -> UserError:
    return UserError(
        expected="lines of a sha256, two spaces and a file name, as sha256sum writes them",
        found=found,
        where=str(path),
        fix="correct the line, or remove the file: it is written anew",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; exits with 2 after a user's mistake, with 130 after Ctrl-C."""
    by_name = {task.lamp_id: task for task in LAMP_TASKS.values()} | LAMP_TASKS
    parser = argparse.ArgumentParser(
        prog="python -m lamp_eval.download",
        description="Downloads the files of the LaMP benchmark, continues what was interrupted, "
        "and verifies what is there. Proxies: HTTP_PROXY, HTTPS_PROXY, NO_PROXY.",
    )
    parser.add_argument("source", choices=["lamp"], help="the benchmark")
    parser.add_argument(
        "--task",
        nargs="+",
        action="extend",
        required=True,
        choices=["all", *by_name],
        metavar="TASK",
        help=f"all, or some of {', '.join(by_name)}",
    )
    parser.add_argument(
        "--split",
        nargs="+",
        action="extend",
        required=True,
        choices=["all", *SPLITS],
        metavar="SPLIT",
        help=f"all, or some of {', '.join(SPLITS)}; test has no outputs: the benchmark keeps them",
    )
    parser.add_argument(
        "--kind", choices=KINDS, default="user", help="users split by user (default) or by time"
    )
    parser.add_argument(
        "--dir", type=Path, required=True, help="where DIR/[time/]LaMP_3/dev/… is written"
    )
    parser.add_argument(
        "--sha256",
        metavar="SUM",
        help=f"a table of sums as sha256sum writes it, such as another DIR/{SUMS}, or the sum of "
        f"the only file; by default files are verified against DIR/{SUMS}",
    )
    parser.add_argument("--base-url", metavar="URL", default=BASE_URL, help="a mirror")
    options = parser.parse_args(arguments)
    tasks = (
        LAMP_TASKS.values() if "all" in options.task else [by_name[name] for name in options.task]
    )
    splits = SPLITS if "all" in options.split else options.split
    files = [
        file
        for task in dict.fromkeys(tasks)
        for split in dict.fromkeys(splits)
        for file in files_of(task, split, options.kind, options.base_url)
    ]
    console = Console(soft_wrap=True, markup=False, emoji=False, highlight=False)
    try:
        sums = None if options.sha256 is None else sums_for(options.sha256, files)
        download(files, options.dir, console, sums)
    except UserError as error:
        fail(error)
    except KeyboardInterrupt:
        print("lamp_eval: stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
