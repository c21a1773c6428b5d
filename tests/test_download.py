"""Downloads from a server on this machine that misbehaves the way a test says."""

import hashlib
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from rich.console import Console

from lamp_eval import download as module
from lamp_eval.download import CHUNK_BYTES, FOLDERS, SUMS, download, files_of, main, read_sums
from lamp_eval.tasks import LAMP_TASKS, TASKS

RATINGS = TASKS["product_rating"]
QUESTIONS = json.dumps([{"id": "0025", "input": "x" * (4 * CHUNK_BYTES), "profile": []}]).encode()
OTHER_QUESTIONS = QUESTIONS.replace(b"x", b"y")
OUTPUTS = b'{"task": "LaMP_3", "golds": [{"id": "0025", "output": "5"}]}\n'
NAME, OUTPUTS_NAME = "LaMP_3/dev/dev_questions.json", "LaMP_3/dev/dev_outputs.json"


class Site(ThreadingHTTPServer):
    """Two files. `faults` are for the next GETs of the questions, one each."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {f"/LaMP/{NAME}": QUESTIONS, f"/LaMP/{OUTPUTS_NAME}": OUTPUTS}
        self.etag: str | None = '"1"'
        self.faults: list[str] = []
        self.seen: list[tuple[str, str, str | None]] = []  # method, path, Range
        self.go_on = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/LaMP"

    def asked(self, name: str = NAME) -> list[str | None]:
        """The `Range` of each GET of a file."""
        return [r for method, path, r in self.seen if method == "GET" and path.endswith(name)]

    def handle_error(self, *_: Any) -> None:
        pass  # a client that hangs up is what several tests are about


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Site

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        site, path, span = self.server, urlsplit(self.path).path, self.headers["Range"]
        site.seen.append((self.command, self.path, span))
        fault = ""
        if self.command == "GET" and path.endswith(NAME) and site.faults:
            fault = site.faults.pop(0)
        body = site.files.get(path)
        if body is None or fault.isdecimal():
            return self._send(int(fault or 404), b"<html>no</html>")
        if fault == "page":
            return self._send(200, b"<!DOCTYPE html><html><title>Log in</title></html>")
        if fault == "empty":
            return self._send(200, b"")
        same = self.headers["If-Range"] == site.etag or fault == "no If-Range"
        offset = 0
        if span and same and fault != "no Range":
            offset = int(span.removeprefix("bytes=").removesuffix("-"))
        size = len(body)
        if offset >= size:
            return self._send(416, b"", ("Content-Range", f"bytes */{size}"))
        status, end = (206, size) if offset else (200, size)
        if status == 206 and fault == "from elsewhere":
            offset += 1
        if status == 206 and fault == "piece":
            end -= 100
        headers = [("Content-Range", f"bytes {offset}-{end - 1}/{size}")] if status == 206 else []
        headers += [("ETag", site.etag)] if site.etag else []
        if fault == "gzip" or self.headers["Accept-Encoding"] != "identity":
            headers.append(("Content-Encoding", "gzip"))
        rest = body[offset:end] + (b"]]]" if fault == "too much" else b"")
        self._send(status, rest, *headers, fault=fault)

    def _send(self, status: int, body: bytes, *headers: tuple[str, str], fault: str = "") -> None:
        self.send_response(status)
        length = len(body) + {"longer": 7, "shorter": -7}.get(fault, 0)
        for name, value in (("Content-Length", str(length)), *headers):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        half = len(body) // 2 if fault in ("cut", "stall") else len(body)
        self.wfile.write(body[:half])
        if fault == "stall":
            self.server.go_on.wait(10)
            self.wfile.write(body[half:])
        self.close_connection = fault in ("cut", "longer", "shorter")


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.go_on.set()
        server.shutdown()


@pytest.fixture(autouse=True)
def _quick_and_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITS_SECONDS", (0, 0, 0))
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def _arguments(site: Site, directory: Path, *more: str) -> list[str]:
    wanted = [] if "--task" in more else ["--task", "LaMP_3", "--split", "dev"]
    return ["lamp", *wanted, "--dir", str(directory), "--base-url", site.url, *more]


def _fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


def _process(site: Site, directory: Path, **options: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "lamp_eval.download", *_arguments(site, directory)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def _there(directory: Path) -> dict[str, bytes]:
    """What the folder holds, locks aside."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and not path.name.endswith(".lock")
    }


def _holds(directory: Path, questions: bytes = QUESTIONS) -> bool:
    """Whether all is there, recorded, and nothing else."""
    contents = {NAME: questions, OUTPUTS_NAME: OUTPUTS}
    there = _there(directory)
    sums = there.pop(SUMS).decode()
    assert sums == "".join(
        f"{hashlib.sha256(contents[name]).hexdigest()}  {name}\n" for name in sorted(contents)
    )
    return there == contents


def test_urls_are_those_of_the_server() -> None:
    assert set(FOLDERS) == {task.lamp_id for task in LAMP_TASKS.values()}
    server = "https://ciir.cs.umass.edu/downloads/LaMP"
    movies, news = TASKS["movie_tagging"], TASKS["news_categorize"]
    assert [(file.url, file.name) for file in files_of(movies, "train", "time")] == [
        (f"{server}/time/LaMP_2/new/train/train_questions.json",
         "time/LaMP_2M/train/train_questions.json"),
        (f"{server}/time/LaMP_2/new/train/train_outputs.json",
         "time/LaMP_2M/train/train_outputs.json"),
    ]  # fmt: skip
    # The outputs of the test split are not published.
    assert [(file.url, file.name) for file in files_of(news, "test", "user")] == [
        (f"{server}/LaMP_2/test/test_questions.json", "LaMP_2N/test/test_questions.json")
    ]
    assert files_of(RATINGS, "dev", "user", "http://mirror/x/")[0].url == f"http://mirror/x/{NAME}"


def test_files_are_downloaded_once_and_verified_later(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(_arguments(site, tmp_path))
    assert _holds(tmp_path)
    shown = capsys.readouterr().out
    assert hashlib.sha256(QUESTIONS).hexdigest() in shown and "downloaded, " in shown
    assert f"downloading {site.url}/{NAME}\n" in shown  # no terminal: plain lines
    n_requests = len(site.seen)
    main(_arguments(site, tmp_path))
    assert len(site.seen) == n_requests
    assert capsys.readouterr().out.count("there, verified") == 2


def test_several_tasks_and_splits(site: Site, tmp_path: Path) -> None:
    def wanted(*options: str) -> list[str]:
        site.seen.clear()
        with pytest.raises(SystemExit):  # the server has none of them
            main(_arguments(site, tmp_path, *options))
        return [path.removeprefix("/LaMP/").rpartition("/")[0] for _, path, _ in site.seen]

    found = wanted("--task", "all", "--split", "all", "--kind", "time")
    assert len(found) == 7 * 5 and len(set(found)) == 7 * 3
    names = ["--task", "product_rating", "LaMP_3", "--task", "LaMP_2N", "--split", "test", "test"]
    assert wanted(*names) == ["LaMP_3/test", "LaMP_2/test"]


def test_a_cut_connection_is_continued(site: Site, tmp_path: Path) -> None:
    site.faults = ["cut", "500", "cut"]
    main(_arguments(site, tmp_path))
    assert _holds(tmp_path)
    offsets = [int(span[6:-1]) if span else 0 for span in site.asked()]
    assert offsets[0] == 0 < offsets[1] == offsets[2] < offsets[3]


@pytest.mark.parametrize("etag", ['"1"', None, 'W/"1"'])
def test_all_is_sent_again_if_the_server_cannot_continue(
    site: Site, tmp_path: Path, etag: str | None
) -> None:
    site.etag = etag
    site.faults = ["cut", "no Range"]
    main(_arguments(site, tmp_path))
    assert _holds(tmp_path)
    assert (site.asked()[1] is not None) == (etag == '"1"')  # a weak one promises no equal bytes


@pytest.mark.parametrize("fault", ["from elsewhere", "piece", "too much"])
def test_ranges_that_are_not_those_asked_for(site: Site, tmp_path: Path, fault: str) -> None:
    site.faults = ["cut", fault]
    main(_arguments(site, tmp_path))
    assert _holds(tmp_path)
    assert site.asked()[2:] == ([f"bytes={len(QUESTIONS) - 100}-"] if fault == "piece" else [None])


@pytest.mark.parametrize("fault", ["", "no If-Range"])
def test_a_file_that_changes_between_tries_is_not_mixed(
    site: Site, tmp_path: Path, fault: str
) -> None:
    site.faults = ["cut", "500"]
    part = tmp_path / f"{NAME}.part"

    class Watch(list[Any]):
        def append(self, request: Any) -> None:
            super().append(request)
            if len(self) == 2:  # the first part is there
                assert part.stat().st_size > 0
                site.files[f"/LaMP/{NAME}"] = OTHER_QUESTIONS
                site.etag = '"2"'
                site.faults.append(fault)

    site.seen = Watch()
    main(_arguments(site, tmp_path))
    assert _holds(tmp_path, OTHER_QUESTIONS)


def test_a_length_that_is_wrong_is_found(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.faults = ["shorter"]
    message = _fails(_arguments(site, tmp_path), capsys)
    assert "JSON that ends with ]" in message and f"{site.url}/{NAME}" in message
    assert _there(tmp_path).keys() == {OUTPUTS_NAME, SUMS}
    site.etag = None  # nothing can be continued
    site.faults = ["longer"] * 4
    message = _fails(_arguments(site, tmp_path), capsys)
    assert "7 more expected" in message and "4 tries" in message
    site.faults = ["longer"]
    site.etag = '"1"'
    main(_arguments(site, tmp_path))  # the next answer says that there is no more
    assert _holds(tmp_path)


def test_a_server_in_trouble_is_asked_again_but_not_for_ever(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.faults = ["503"] * 4
    message = _fails(_arguments(site, tmp_path), capsys)
    assert "status 503 Service Unavailable; 4 tries" in message
    assert "HTTP(S)_PROXY" in message and f"{site.url}/{NAME}" in message
    assert len(site.seen) == 4  # nor for its other files
    site.faults = ["500", "429"]
    main(_arguments(site, tmp_path))
    assert _holds(tmp_path)


def test_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Site() as gone:
        pass
    assert "Connection refused" in _fails(_arguments(gone, tmp_path), capsys)
    gone.url = "LaMP"
    assert "No scheme supplied" in _fails(_arguments(gone, tmp_path), capsys)


def test_a_missing_file_is_named_and_the_others_come(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.faults = ["404"]
    message = _fails(_arguments(site, tmp_path), capsys)
    assert "status 404 Not Found" in message and f"{site.url}/{NAME}" in message
    assert "lamp-benchmark.github.io/download" in message
    assert len(site.seen) == 2  # once is enough
    assert (tmp_path / OUTPUTS_NAME).read_bytes() == OUTPUTS
    site.faults = ["403"]
    assert "status 403 Forbidden" in _fails(_arguments(site, tmp_path), capsys)


@pytest.mark.parametrize(
    ("fault", "found"), [("page", "a web page"), ("empty", "b''"), ("gzip", "compressed")]
)
def test_what_is_no_data_neither_becomes_data_nor_destroys_it(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, found: str
) -> None:
    site.faults = [fault]
    assert found in _fails(_arguments(site, tmp_path), capsys)
    assert _there(tmp_path).keys() == {OUTPUTS_NAME, SUMS}
    site.faults = ["cut", fault]
    assert found in _fails(_arguments(site, tmp_path), capsys)
    size = (tmp_path / f"{NAME}.part").stat().st_size
    assert size > 0
    site.seen.clear()
    main(_arguments(site, tmp_path))
    assert site.asked() == [f"bytes={size}-"]
    assert _holds(tmp_path)


def test_proxies_come_from_the_environment(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, own_url = site.url.removesuffix("/LaMP"), site.url
    site.url = "http://lamp.invalid/LaMP"
    monkeypatch.setenv("HTTP_PROXY", address)
    main(_arguments(site, tmp_path / "through"))
    assert _holds(tmp_path / "through")
    assert site.seen[0][1] == f"http://lamp.invalid/LaMP/{NAME}"
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    site.url = own_url
    main(_arguments(site, tmp_path / "past"))
    assert _holds(tmp_path / "past")


def test_too_little_space_is_found_before(
    site: Site,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=2**16))
    message = _fails(_arguments(site, tmp_path), capsys)
    assert "expected: 262.2 kB of free space" in message and "found:    65.5 kB" in message
    assert not (tmp_path / f"{NAME}.part").exists()
    assert (tmp_path / OUTPUTS_NAME).exists()


def test_a_disk_that_fills_up_meanwhile(site: Site, tmp_path: Path) -> None:
    """With a limit on the size of files: the system refuses to write, as on a full disk."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * CHUNK_BYTES, 2 * CHUNK_BYTES))

    process = _process(site, tmp_path, preexec_fn=limit)
    _, message = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "File too large" in message and "make space" in message
    assert "Traceback" not in message
    assert (tmp_path / f"{NAME}.part").stat().st_size == 2 * CHUNK_BYTES
    main(_arguments(site, tmp_path))
    assert site.asked()[-1] == f"bytes={2 * CHUNK_BYTES}-"
    assert _holds(tmp_path)


def test_a_folder_that_is_none(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "LaMP_3").write_text("")
    message = _fails(_arguments(site, tmp_path), capsys)
    assert "Not a directory" in message or "File exists" in message


def test_ctrl_c_leaves_a_part_for_the_next_time(site: Site, tmp_path: Path) -> None:
    site.faults = ["stall"]
    # A shell may have started the tests with SIGINT ignored.
    process = _process(
        site, tmp_path, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    )
    part = tmp_path / f"{NAME}.part"
    _until(lambda: part.exists() and part.stat().st_size >= CHUNK_BYTES)
    process.send_signal(signal.SIGINT)
    shown, message = process.communicate(timeout=30)
    assert process.returncode == 130
    assert f"{part} holds " in shown and "the same command continues it" in shown
    assert message == "lamp_eval: stopped\n"
    assert not (tmp_path / NAME).exists()
    main(_arguments(site, tmp_path))
    assert site.asked()[-1] not in (None, "bytes=0-")
    assert _holds(tmp_path)


def test_a_process_that_died_before_the_last_step(site: Site, tmp_path: Path) -> None:
    site.faults = ["cut", "404"]
    with pytest.raises(SystemExit):
        main(_arguments(site, tmp_path))
    (tmp_path / f"{NAME}.part").write_bytes(QUESTIONS)
    site.seen.clear()
    main(_arguments(site, tmp_path))
    assert site.asked() == [f"bytes={len(QUESTIONS)}-"]  # and no more
    assert _holds(tmp_path)


def test_a_part_of_another_mirror_is_not_continued(site: Site, tmp_path: Path) -> None:
    site.faults = ["cut", "404"]
    with pytest.raises(SystemExit):
        main(_arguments(site, tmp_path))
    version = tmp_path / f"{NAME}.part.version"
    version.write_text(version.read_text().replace(site.url, "http://other/LaMP"))
    site.seen.clear()
    main(_arguments(site, tmp_path))
    assert site.asked() == [None]
    assert _holds(tmp_path)


def test_two_processes_share_the_work(site: Site, tmp_path: Path) -> None:
    site.faults = ["stall"]
    first = _process(site, tmp_path)
    _until(lambda: len(site.seen) == 1)
    second = _process(site, tmp_path)
    assert second.stdout is not None
    assert "waiting for another process" in second.stdout.readline()
    site.go_on.set()
    for process in (first, second):
        _, message = process.communicate(timeout=30)
        assert process.returncode == 0, message
    assert _holds(tmp_path)
    assert site.asked() == [None]


def test_a_damaged_file_is_downloaded_again(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(_arguments(site, tmp_path))
    (tmp_path / NAME).write_bytes(QUESTIONS.replace(b"xx", b"x ", 1))
    main(_arguments(site, tmp_path))
    assert "differs from its checksum" in capsys.readouterr().out
    assert _holds(tmp_path)
    assert len(site.asked()) == 2 and len(site.asked(OUTPUTS_NAME)) == 1
    # If the server's file is another one by now, this is said.
    (tmp_path / NAME).unlink()
    site.files[f"/LaMP/{NAME}"] = OTHER_QUESTIONS
    main(_arguments(site, tmp_path))
    assert "another version than the one downloaded before" in capsys.readouterr().out
    assert _holds(tmp_path, OTHER_QUESTIONS)


def test_a_file_from_elsewhere_is_taken_if_it_can_be_the_same_and_never_overwritten(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(QUESTIONS)
    main(_arguments(site, tmp_path))
    assert site.asked() == []  # its size is asked for alone
    assert _holds(tmp_path)
    (tmp_path / SUMS).unlink()
    for other in (QUESTIONS[:-1], b"[]", QUESTIONS[:-1] + b" "):
        path.write_bytes(other)
        message = _fails(_arguments(site, tmp_path), capsys)
        assert "move it away" in message and f"{len(other)} bytes" in message
        assert path.read_bytes() == other


def test_sums_that_are_given_are_checked(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(_arguments(site, tmp_path / "first"))
    table = str(tmp_path / "first" / SUMS)
    main(_arguments(site, tmp_path / "second", "--sha256", table))
    assert _holds(tmp_path / "second")
    site.files[f"/LaMP/{NAME}"] = OTHER_QUESTIONS
    message = _fails(_arguments(site, tmp_path / "third", "--sha256", table), capsys)
    assert f"expected: sha256 {hashlib.sha256(QUESTIONS).hexdigest()}" in message
    assert _there(tmp_path / "third").keys() == {OUTPUTS_NAME, SUMS}

    test = "/LaMP/LaMP_3/test/test_questions.json"
    site.files[test] = QUESTIONS
    one = ["--task", "LaMP_3", "--split", "test", "--sha256"]
    main(_arguments(site, tmp_path / "one", *one, hashlib.sha256(QUESTIONS).hexdigest().upper()))
    assert read_sums(tmp_path / "one" / SUMS).keys() == {test.removeprefix("/LaMP/")}
    message = _fails(_arguments(site, tmp_path / "one", *one, table), capsys)
    assert f"none for {test.removeprefix('/LaMP/')}" in message
    message = _fails(_arguments(site, tmp_path / "two", "--sha256", "0" * 64), capsys)
    assert f"none for {OUTPUTS_NAME}" in message
    assert "found:    neither" in _fails(_arguments(site, tmp_path, "--sha256", "abc"), capsys)
    (tmp_path / "bad").write_text("abc  file\n")
    message = _fails(_arguments(site, tmp_path, "--sha256", str(tmp_path / "bad")), capsys)
    assert "line 1: 'abc  file'" in message


def test_sums_recorded_at_the_same_time_are_all_there(tmp_path: Path) -> None:
    names = {f"file {number:02d}": f"{number:064x}" for number in range(16)}
    with ThreadPoolExecutor(16) as pool:
        for name, digest in names.items():
            pool.submit(module._record, tmp_path, name, digest, Console(quiet=True))
    assert read_sums(tmp_path / SUMS) == names


def test_a_terminal_sees_size_and_speed(site: Site, tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    download(files_of(RATINGS, "dev", "user", site.url), tmp_path, console)
    assert "262.2/262.2 kB" in screen.getvalue() and "B/s" in screen.getvalue()


def test_the_command_line(site: Site, tmp_path: Path) -> None:
    site.faults = ["404"]
    process = _process(site, tmp_path)
    _, message = process.communicate(timeout=30)
    assert process.returncode == 2
    assert message.startswith(f"lamp_eval: error: in {site.url}/{NAME}\n")
    assert "Traceback" not in message
    command = [sys.executable, "-m", "lamp_eval.download", "lamp", "--task", "LaMP_2"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 2
    assert "invalid choice: 'LaMP_2'" in done.stderr and "LaMP_2M" in done.stderr
