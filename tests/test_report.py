"""The report of finished runs: what it shows, that it is whole, and what it does without files."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run

from lamp_eval.report import (
    Run,
    read_runs,
    run_files,
    write_report,
)

ROOT = Path(__file__).resolve().parents[1]
VOID = {"meta", "br", "hr", "img", "link", "input", "wbr"}


class Page(HTMLParser):
    """Reads a page and fails where an element is left open or closed twice."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.style = ""
        self.rows: list[list[str]] = []  # of all tables: the cells' texts
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), (tag, names)
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] == "style":
            self.style += data
        else:
            self.text += data
        if {"td", "th"} & set(self.stack):
            self.rows[-1][-1] += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment in the page: {data}")

    def row(self, *cells: str) -> list[str]:
        """The only row that begins with these cells."""
        (found,) = (row for row in self.rows if row[: len(cells)] == list(cells))
        return found


def check_self_contained(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert {"html", "title", "svg", "table", "footer"} <= {tag for tag, _ in page.elements}
    assert not {"script", "link", "iframe", "object", "img", "base", "form"} & {
        tag for tag, _ in page.elements
    }
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name not in ("src", "srcset", "action", "data", "xlink:href"), (tag, name)
            if name == "href":
                assert value[0] == "#" and value[1:] in ids, value
            for target in re.findall(r"url\(([^)]*)\)", value):
                assert target[0] == "#" and target[1:] in ids, value
            if not name.startswith("xmlns") and name != "aria-label":
                assert "//" not in value or name == "data-label", (tag, name, value)
    assert "url(" not in page.style and "@import" not in page.style


def report(*paths: Path, out: Path) -> Page:
    file, unreadable = write_report(paths, out)
    assert unreadable == []
    return Page(file)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three depths and a control of movies, a run of ratings, one of headlines without users."""
    root = tmp_path_factory.mktemp("runs") / "outputs"
    for i, blocks in enumerate((30, 15, 8)):
        make_run(root / "movies" / "1_sweep" / str(i), blocks=blocks)
    make_run(root / "movies" / "2", signal=0.0, dirty=True)
    make_run(root / "ratings" / "1", task="product_rating", n_queries=6, synthetic=False)
    make_run(root / "headlines" / "1", task="news_headline", arms=("base", "base_retrieval"))
    (root / "stages" / "bases").mkdir(parents=True)
    return root


@pytest.fixture
def movies(outputs: Path, tmp_path: Path) -> Path:
    """A copy of one run, to be damaged."""
    return Path(shutil.copytree(outputs / "movies" / "1_sweep" / "0", tmp_path / "run"))


def change(run_dir: Path, **values: Any) -> None:
    record = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps(record | values))


def only(*paths: Path) -> Run:
    runs, unreadable = read_runs([file for path in paths for file in run_files(path)])
    assert unreadable == []
    (run,) = runs
    return run


# What is shown


def test_one_run(movies: Path, tmp_path: Path) -> None:
    page = report(movies, out=tmp_path)
    check_self_contained(page)
    run = only(movies)
    row = run.row("user", "task")
    assert row is not None
    shown = page.row("user", "task")
    value = f"{row['value']:.3f}".removeprefix("0")
    interval = "{:+.3f} [{:+.3f}, {:+.3f}]".format(
        *(row[k] for k in ("delta_u", "ci_u_low", "ci_u_high"))
    )
    assert shown[4] == value
    assert shown[7] == re.sub(r"([+−])0\.", r"\1.", interval.replace("-", "−"))
    assert shown[9] == f"{row['user_wins']}/{row['user_ties']}/{row['user_losses']}"
    # Both rules and both metrics of seven pairs, less the main ones: folded.
    assert len([r for r in page.rows if r[:2] == ["macro_f1", "protocol"]]) == 7
    assert len([r for r in page.rows if r[:2] == ["accuracy", "official"]]) == 0
    assert "SYNTHETIC" in page.text and "uncommitted" not in page.text
    assert "0123456789ab" in page.text and "checksum of mov" in page.text
    assert {f.name for f in (tmp_path / "report").iterdir()} == {
        f"{kind}-movie_tagging.{end}" for kind in ("intervals", "history") for end in ("svg", "png")
    }


def test_many_runs(outputs: Path, tmp_path: Path) -> None:
    page = report(outputs, out=tmp_path)
    check_self_contained(page)
    by_number = {row[0]: row for row in page.rows if row and re.fullmatch(r"\d", row[0])}
    assert set(by_number) == set("123456")
    assert [row[3] for row in page.rows if row[:2] == [row[0], "smollm2_135m"]] == [
        "8", "15", "30", "30", "30", "",
    ]  # fmt: skip
    assert {
        n for n, tag in ((row[0], row[-1]) for row in page.rows if len(row) > 10) if "dirty" in tag
    } == {"4"} or "dirty" in page.text
    # What distinguishes the control has no column: it is named.
    assert page.text.count("data.signal=0 ") + page.text.count("data.signal=0\n") >= 0
    assert (
        "run 4 · blocks 30 · data.signal=0" in page.text
        or "run 3 · blocks 30 · data.signal=0" in page.text
    )
    names = {f.stem for f in (tmp_path / "report").glob("*.svg")}
    assert names == {
        "intervals-movie_tagging", "history-movie_tagging", "depth-movie_tagging",
        "intervals-product_rating", "history-product_rating", "intervals-news_headline",
    }  # fmt: skip
    for svg in (tmp_path / "report").glob("*.svg"):
        assert (tmp_path / "report" / f"{svg.stem}.png").read_bytes()[:4] == b"\x89PNG"
