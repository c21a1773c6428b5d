"""The report of finished runs: what it shows, that it is whole, and what it does without files."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from made_runs import make_run

from lamp_eval import plots
from lamp_eval.report import _numbers, _parts, draw_plots, main, write_report
from lamp_eval.runs import Run, number, plain, read_runs, run_files, sweeps

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
    assert {"html", "title", "table", "footer"} <= {tag for tag, _ in page.elements}
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
    make_run(root / "movies" / "2", signal=0.0, dirty=True, commit="a" * 40)
    make_run(root / "ratings" / "1", task="product_rating", n_queries=6, synthetic=False)
    make_run(
        root / "headlines" / "1",
        task="news_headline",
        arms=("base", "base_retrieval"),
        commit="b" * 40,
    )
    (root / "stages" / "bases").mkdir(parents=True)
    return root


@pytest.fixture
def movies(outputs: Path, tmp_path: Path) -> Path:
    """A copy of one run, to be damaged."""
    return Path(shutil.copytree(outputs / "movies" / "1_sweep" / "0", tmp_path / "run"))


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the text: drawing takes most of a report's time."""
    monkeypatch.setattr("lamp_eval.report.draw_plots", lambda runs: [])


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
    assert [tag for tag, _ in page.elements].count("svg") == 2
    row = only(movies).row("user", "task")
    assert row is not None
    shown = page.row("user", "task")
    interval = "{delta_u:+.3f} [{ci_u_low:+.3f}, {ci_u_high:+.3f}]".format(**row)
    assert shown[4] == f"{row['value']:.3f}".removeprefix("0")
    assert shown[7] == re.sub(r"([+−])0\.", r"\1.", interval.replace("-", "−"))
    assert shown[9] == f"{row['user_wins']}/{row['user_ties']}/{row['user_losses']}"
    # Of the eight pairs macro-F1 by both rules and accuracy by the protocol's: folded.
    folded = [tuple(r[:2]) for r in page.rows if r[1] in ("official", "protocol")]
    assert {pair: folded.count(pair) for pair in folded} == {
        ("accuracy", "protocol"): 8, ("macro_f1", "official"): 8, ("macro_f1", "protocol"): 8,
    }  # fmt: skip
    assert "SYNTHETIC" in page.text and "dirty" not in page.text
    assert "0123456789ab" in page.text and "checksum of mov" in page.text
    assert {f.name for f in (tmp_path / "report").iterdir()} == {
        f"{kind}-movie_tagging.{end}" for kind in ("intervals", "history") for end in ("svg", "png")
    }


def test_many_runs(outputs: Path, tmp_path: Path) -> None:
    page = report(outputs, out=tmp_path)
    check_self_contained(page)
    summary = [row for row in page.rows if len(row) > 10 and row[1] == "smollm2_135m"]
    assert [row[0] for row in summary] == list("123456")
    assert [row[3] for row in summary] == ["8", "15", "30", "30", "30", ""]
    # What distinguishes the control has no column of its own.
    others = [row[7] for row in summary if len(row) == 15]
    assert sorted(others) == ["data.signal=0", *["data.signal=0.8"] * 3]
    (control,) = (row for row in summary if row[7] == "data.signal=0")
    assert control[-1] == "SYNTHETIC, dirty"
    assert summary[4][-1] == ""  # ratings of real users
    commits = ["0123456789ab", f"{'a' * 12} + uncommitted changes", "b" * 12]
    assert ", ".join(commits) in page.text
    assert f"run {control[0]} · blocks 30 · data.signal=0" in page.text
    assert {f.stem for f in (tmp_path / "report").glob("*.svg")} == {
        "intervals-movie_tagging", "history-movie_tagging", "depth-movie_tagging",
        "intervals-product_rating", "history-product_rating", "intervals-news_headline",
    }  # fmt: skip
    for svg in (tmp_path / "report").glob("*.svg"):
        assert svg.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.usefixtures("no_plots")
def test_p_is_corrected_for_the_runs_it_is_chosen_from(outputs: Path, tmp_path: Path) -> None:
    page = report(outputs / "movies", out=tmp_path)
    runs, _ = read_runs(run_files(outputs / "movies"))
    smallest = min((run.row("user", "task") or {})["p"] for run in runs)
    shown = [row[11] for row in page.rows if row[0] in "1234" and len(row) == 15]
    assert len(shown) == 4
    p, holm_p = f"{smallest:.3f}"[1:], f"{min(1, 4 * smallest):.3f}".removeprefix("0")
    assert f"{p} ({holm_p})" in shown


@pytest.mark.parametrize("name", ["movies/2", "ratings/1"])
def test_gains_of_users_are_those_of_the_leaderboard(outputs: Path, name: str) -> None:
    run = only(outputs / name)
    row = run.row("user", "task")
    assert row is not None
    assert fmean(user.gain for user in run.gains) == pytest.approx(row["delta_u"], abs=1e-12)
    worst, best = run.examples[0].user.gain, run.examples[-1].user.gain
    assert worst > best if name == "ratings/1" else worst < best  # an error: less is better
    assert [e.rank.split()[0] for e in run.examples] == ["worst", "worst", "best"]
    assert len({example.user.user_id for example in run.examples}) == 3


@pytest.mark.usefixtures("no_plots")
def test_examples_are_the_answers_of_the_files(outputs: Path, tmp_path: Path) -> None:
    run_dir = outputs / "movies" / "2"
    page = report(run_dir, out=tmp_path)
    example = only(run_dir).examples[0]
    assert len(example.queries) == 3
    for query in example.queries:
        cells = page.row(query.query_id, query.gold)[2:]
        assert len(cells) == 6
        for arm, cell in zip(("base", "user"), (cells[0], cells[4]), strict=True):
            lines = (run_dir / f"predictions/{arm}.jsonl").read_text().splitlines()
            (row,) = (r for r in map(json.loads, lines) if r["query_id"] == query.query_id)
            correct = f"{row['scores']['official']['correct']:.0f}"
            assert cell.startswith(row["output"])
            assert f"official\N{NO-BREAK SPACE}{correct}" in cell


def test_examples_are_the_queries_on_which_the_adapter_made_most_difference(
    outputs: Path,
) -> None:
    run = only(outputs / "ratings" / "1")
    errors: dict[str, dict[str, float]] = {}
    for arm in ("task", "user"):
        lines = (run.folder / f"predictions/{arm}.jsonl").read_text().splitlines()
        rows = map(json.loads, lines)
        errors[arm] = {r["query_id"]: r["scores"]["official"]["absolute_error"] for r in rows}
    changes = {id: abs(error - errors["task"][id]) for id, error in errors["user"].items()}
    for example in run.examples:
        own = [n for id, n in changes.items() if id.startswith(f"{example.user.user_id}-")]
        assert [changes[q.query_id] for q in example.queries] == sorted(own, reverse=True)[:3]
    assert len(set(changes.values())) > 2


@pytest.mark.usefixtures("no_plots")
def test_long_answers_are_folded(movies: Path, tmp_path: Path) -> None:
    long = "word " * 100
    change_outputs(movies, "user", long)
    page = report(movies, out=tmp_path)
    folded = [row for row in page.rows if len(row) == 8 and long in row[6]]
    assert folded and all(f"{long[:160]}…" in row[6] for row in folded)


def test_runs_of_a_sweep_are_found_by_what_they_share(outputs: Path) -> None:
    runs, _ = read_runs(run_files(outputs))
    (group,) = sweeps([run for run in runs if run.task.name == "movie_tagging"])
    assert list(group) == [8, 15, 30]
    assert {run.folder.parent.name for run in group.values()} == {"1_sweep"}  # not the control


# Text of others


EVIL = '<script>alert("1")</script>'


def change_outputs(run_dir: Path, arm: str, output: str) -> None:
    path = run_dir / f"predictions/{arm}.jsonl"
    rows = [json.loads(line) | {"output": output} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_untrusted_text_is_only_text(tmp_path: Path) -> None:
    run_dir = tmp_path / "<b>&amp;"
    attribute = '" onmouseover="alert(1)'
    make_run(run_dir, user_ids=(EVIL, "../../etc/passwd", "]]><svg onload=1>"))
    change_outputs(run_dir, "user", f"</td></table>{EVIL}{attribute}<!-- ]]>")
    change(run_dir, name=EVIL, commit=f"<i>{attribute}", versions={EVIL: attribute},
           device={"x": EVIL}, model_origin=EVIL, data_checksum=attribute)  # fmt: skip
    record = json.loads((run_dir / "run.json").read_text())
    for row in record["leaderboard"]:
        row |= {"model": EVIL, "quantization": attribute}
        if row["arm"] == "base":
            row["arm"] = f"../{EVIL}"
    record["config"]["data"] |= {EVIL: "$\\frac{x}$\n\x00\x1b<g>"}
    (run_dir / "run.json").write_text(json.dumps(record))
    make_run(tmp_path / "other")
    page = report(run_dir, tmp_path / "other", out=tmp_path / "out")
    check_self_contained(page)
    assert {tag for tag, _ in page.elements} & {"b", "i", "script"} == set()
    assert f"</td></table>{EVIL}{attribute}<!-- ]]>" in page.text
    for text in (f"“{EVIL}”", "../../etc/passwd", "<b>&amp;", f"../{EVIL}", f"<i>{attribute}"[:12]):
        assert text.strip("“”") in page.text
    names = {f.name for f in tmp_path.rglob("*")} - {f.name for f in run_dir.rglob("*")}
    assert names == {"<b>&amp;", "other", "out", "report.html", "report"} | {
        f"{kind}-movie_tagging.{end}" for kind in ("intervals", "history") for end in ("svg", "png")
    }


def test_labels_of_figures_are_shown_literally(movies: Path, tmp_path: Path) -> None:
    """What would be mathtext, or no XML, is only text."""
    config = json.loads((movies / "run.json").read_text())["config"]
    change(movies, config=config | {"data": config["data"] | {"signal": "$\\nope{$\x1b"}})
    make_run(tmp_path / "other")
    page = report(movies, tmp_path / "other", out=tmp_path / "out")
    assert any("$\\nope{$\N{REPLACEMENT CHARACTER}" in text for text in page.text.split(" · "))


@pytest.mark.usefixtures("no_plots")
def test_half_a_surrogate_pair_is_no_traceback(movies: Path, tmp_path: Path) -> None:
    change_outputs(movies, "user", "\ud800")  # JSON may hold it, UTF-8 may not
    odd = movies.rename(tmp_path / os.fsdecode(b"caf\xe9"))  # nor may a file's name
    page = report(odd, out=tmp_path)
    assert "no answers of arm user: predictions/user.jsonl" in page.text
    assert str(tmp_path / "caf?") in page.text


# What is missing or wrong


@pytest.mark.usefixtures("no_plots")
def test_an_unreadable_run_is_named_and_the_others_are_shown(
    outputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(outputs / "movies", tmp_path / "movies"))
    (copy / "2" / "run.json").write_text('{"schema_version": 2')
    record = json.loads((copy / "1_sweep" / "0" / "run.json").read_text())
    for row in record["leaderboard"]:
        row["task"] = "task_of_tomorrow"
    (copy / "1_sweep" / "0" / "run.json").write_text(json.dumps(record))
    main([str(copy)])
    shown = capsys.readouterr()
    page = Page(copy / "report.html")
    for name in (copy / "2" / "run.json", copy / "1_sweep" / "0" / "run.json"):
        assert str(name) in shown.err and str(name) in page.text
    assert "task_of_tomorrow" in page.text
    assert [row[0] for row in page.rows if len(row) > 10 and row[1] == "smollm2_135m"] == ["1", "2"]


@pytest.mark.parametrize("broken", ["nothing", "no folder", "damaged", "no place"])
def test_mistakes_end_with_2(
    broken: str, movies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(movies)]
    if broken == "nothing":
        (movies / "run.json").unlink()
    elif broken == "no folder":
        arguments = [str(tmp_path / "nowhere")]
    elif broken == "damaged":
        (movies / "run.json").write_text("[]")
    else:
        arguments += ["--out", str(movies / "run.json")]
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "to do:" in error and str(arguments[-1]) in error
    assert not (movies / "report.html").exists()


@pytest.mark.usefixtures("no_plots")
def test_missing_and_damaged_predictions(movies: Path, tmp_path: Path) -> None:
    (movies / "predictions" / "task.jsonl").unlink()
    (movies / "predictions" / "base.jsonl").write_text('{"user_id": "ann"}\n')
    page = report(movies, out=tmp_path)
    assert (
        "no answers of arm task: predictions/task.jsonl cannot be read: No such file" in page.text
    )
    assert "no answers of arm base: predictions/base.jsonl cannot be read: line 1: " in page.text
    examples = [row for row in page.rows if row[:2] == ["query", "gold"]]
    assert {tuple(row[2:]) for row in examples} == {
        ("base_retrieval", "task_retrieval", "user", "cross_user")
    }
    shutil.rmtree(movies / "predictions")
    assert report(movies, out=tmp_path).text.count("None of this user’s answers") == 3


@pytest.mark.parametrize(
    "content",
    [None, "", "user_id,arm\nann,user\n", "user_id,arm,n_records,n_queries,official_accuracy\n"
     "ann,user,many,1,0.5\n", "\x00\xff", "user_id,arm,official_accuracy,n_records\nann,user\n"],
)  # fmt: skip
@pytest.mark.usefixtures("no_plots")
def test_damaged_results_by_user(movies: Path, tmp_path: Path, content: str | None) -> None:
    path = movies / "users.csv"
    path.unlink() if content is None else path.write_bytes(content.encode("latin-1"))
    page = report(movies, out=tmp_path)
    assert "users.csv" in page.text and page.row("user", "task")
    assert only(movies).gains == only(movies).examples == ()
    assert "no results by user" in page.text or "none is singled out" in page.text


def test_values_that_are_absent_are_empty(movies: Path, tmp_path: Path) -> None:
    record = json.loads((movies / "run.json").read_text())
    names = ("value", "reference_value", "delta", "ci_low", "ci_high", "delta_u", "ci_u_low",
             "ci_u_high", "p", "mde", "user_wins", "failed_parse_rate")  # fmt: skip
    for row in record["leaderboard"]:
        if row["arm"] == "user":
            row |= dict.fromkeys(names)
        if row["arm"] == "cross_user":
            row |= {"value": "high", "delta": float("nan"), "p": True, "ci_low": [], "blocks": {}}
    (movies / "run.json").write_text(json.dumps(record))
    lines = (movies / "users.csv").read_text().splitlines(keepends=True)
    cells = [line.split(",") for line in lines]
    column = cells[0].index("official_accuracy")
    for row in cells[1:]:
        row[column] = ""  # no query with a score
    (movies / "users.csv").write_text("".join(",".join(row) for row in cells))
    page = report(movies, out=tmp_path)
    assert page.row("user", "task")[4:] == [""] * 8
    assert page.row("cross_user", "task")[4] == page.row("cross_user", "task")[6] == ""
    assert "No user has a score in both arms" in page.text


def test_one_user_has_no_interval(tmp_path: Path) -> None:
    make_run(tmp_path / "run", user_ids=("ann",), arms=("base", "task", "user"))
    page = report(tmp_path / "run", out=tmp_path)
    assert re.fullmatch(r"[+−]\.\d{3}|[+−]1\.000", page.row("user", "task")[7])
    assert page.row("user", "task")[8] == ""
    assert "worst 1 of 1" in page.text and "best" not in page.text.split("Examples")[1]


def test_without_comparisons_there_is_nothing_to_draw(tmp_path: Path) -> None:
    make_run(tmp_path / "run", arms=("base",))
    assert "nothing to draw for movie_tagging" in report(tmp_path / "run", out=tmp_path).text
    change(tmp_path / "run", leaderboard=[])
    assert "This run has no results." in report(tmp_path / "run", out=tmp_path).text


@pytest.mark.parametrize(
    ("lengths", "ticks"),
    [((0, 40, 300), "0 1 3 10 30 100 300"), ((5, 400), "10 30 100 300"), ((40, 90), "45 60 75 90"),
     ((24, 24), "24")],
)  # fmt: skip
def test_histories_that_span_a_decade_are_on_a_log_axis(
    lengths: tuple[int, ...], ticks: str
) -> None:
    points = [plots.UserPoint(n, gain / 10, 3) for gain, n in enumerate(lengths)]
    look: dict[str, Any] = {"metric": "mae", "higher_is_better": False}
    svg = plots.gain_by_history({"run 1": points}, **look).svg
    assert re.findall(r">(\d+)</text>", svg) == ticks.split()
    assert "better ↓" in svg


# Files


def test_runs_are_found_from_every_level_and_once(outputs: Path) -> None:
    sweep = outputs / "movies" / "1_sweep"
    assert run_files(sweep / "0") == run_files(sweep / "0" / "run.json") == [sweep / "0/run.json"]
    assert len(run_files(sweep)) == 3
    assert len(run_files(outputs / "movies")) == 4
    assert len(run_files(outputs)) == 6
    (outputs / "stages" / "run.json").write_text("{}")
    assert len(run_files(outputs)) == 6


def test_equal_runs_give_equal_bytes(outputs: Path, tmp_path: Path) -> None:
    paths = [outputs / "movies", outputs / "headlines", outputs / "movies" / "2"]  # that one twice
    write_report(paths, tmp_path / "here")
    command = [sys.executable, "-m", "lamp_eval.report", *map(str, paths[::-1])]
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--out", str(tmp_path / "there")], env=environment, check=True)
    first, second = (
        {str(f.relative_to(root)): f.read_bytes() for f in root.rglob("*") if f.is_file()}
        for root in (tmp_path / "here", tmp_path / "there")
    )
    assert len(first) == 9
    assert first == second


def test_only_own_old_plots_are_removed(movies: Path, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    folder.mkdir()
    for name in ("depth-movie_tagging-3.svg", "depth-of_mine.svg", "notes.txt"):
        (folder / name).write_text("old")
    report(movies, out=tmp_path)
    assert not (folder / "depth-movie_tagging-3.svg").exists()
    assert (folder / "notes.txt").exists() and (folder / "depth-of_mine.svg").exists()
    assert not list(tmp_path.rglob(".partial*"))


# Figures


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize(
    "looks",
    [list(plots._ARM_LINES.values()), list(plots._GAIN_LINES.values()),
     [plots._DELTA, plots._DELTA_U]],
)  # fmt: skip
def test_series_differ_without_colour(looks: list[dict[str, Any]]) -> None:
    assert len({look["marker"] for look in looks}) == len(looks)
    lines = [look["linestyle"] for look in looks if "linestyle" in look]
    assert len(set(lines)) == len(lines)
    by_luminance = sorted(luminance(look["color"]) for look in looks)
    for dark, light in zip(by_luminance, by_luminance[1:], strict=False):
        assert (light + 0.05) / (dark + 0.05) > 1.8


def test_no_figure_grows_with_the_number_of_runs(outputs: Path) -> None:
    (run,) = read_runs([outputs / "movies" / "2" / "run.json"])[0]
    runs = [replace(run, number=i, label=f"run {i}") for i in range(1, 14)]
    drawn = {plot.name: plot.drawing.svg for plot in draw_plots(runs)}
    assert set(drawn) == {
        f"{kind}-movie_tagging{part}" for kind in ("intervals", "history") for part in ("", "-2")
    }  # fmt: skip
    for kind in ("intervals", "history"):
        labels = [
            re.findall(r">(run \d+)</text>", svg) for name, svg in drawn.items() if kind in name
        ]
        assert max(map(len, labels)) <= 12
        assert sum(labels, []) == [f"run {i}" for i in range(1, 14)]


@pytest.mark.parametrize(("n", "sizes"), [(0, []), (1, [1]), (12, [12]), (13, [7, 6]),
                                          (25, [9, 9, 7])])  # fmt: skip
def test_parts(n: int, sizes: list[int]) -> None:
    assert [len(part) for part in _parts(range(n), 12)] == sizes
    assert sum((list(part) for part in _parts(range(n), 12, step=3)), []) == list(range(n))
    assert all(len(part) % 3 == 0 for part in _parts(range(n), 12, step=3)[:-1])


def test_values_as_text() -> None:
    assert [number(v) for v in (1, 0.5, True, "1", None, float("nan"), 10**400)] == [
        1, 0.5, None, None, None, None, None,
    ]  # fmt: skip
    assert [plain(v) for v in (3, 0.8, None, float("inf"), "oppu")] == ["3", "0.8", "", "", "oppu"]
    runs = [Run(i, "", "", Path(), None, None, ()) for i in (7, 1, 2, 3, 9, 10)]  # type: ignore[arg-type]
    assert _numbers(runs) == "1–3, 7, 9, 10"
