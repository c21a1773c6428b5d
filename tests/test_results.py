"""The files of a run, and the leaderboard rebuilt from them."""

from __future__ import annotations

import csv
import json
import os

import pytest
from pydantic import ValidationError

from lamp_eval.records import Prediction
from lamp_eval.results import (
    LEADERBOARD_COLUMNS,
    RunRecord,
    StageRecord,
    find_runs,
    rebuild_leaderboard,
    write_run,
)


def row(**values):
    return dict.fromkeys(LEADERBOARD_COLUMNS) | {"task": "movie_tagging", "arm": "user"} | values


def record(rows, **values) -> RunRecord:
    defaults = dict(
        name="movies", started_at="2026-01-01T00:00:00+00:00", seconds=1.5, config={"seed": 0},
        overrides=["seed=0"], versions={"python": "3.11"}, commit=None, dirty=None,
        device={"cpu": "x"}, model_origin="hub", model_fingerprint="f", data_checksum="c",
        data_files={}, synthetic=True, task_users_origin="others", n_users=1, n_queries=1,
        n_task_users=1, users_without_history=[], donors={}, seeds={"u": 1}, parity_error={},
        failed_parses={}, cut_words={}, seconds_by_stage={}, peak_memory_bytes=1,
        stages=[StageRecord(stage="bases", what="base", path="p", reused=False, seconds=1)],
        leaderboard=rows,
    )  # fmt: skip
    return RunRecord(**{**defaults, **values})


PREDICTION = Prediction(
    arm="user", user_id="../u", query_id="0025", prompt_hash="ab", output='caf\u00e9\n"x", y',
    gold="comedy", donor_id="v", finished=False, scores={"accuracy": 0.0, "parsed": None},
)  # fmt: skip


def write(run_dir, rows, **values):
    write_run(run_dir, record(rows, **values), {"user": [PREDICTION]}, [{"user_id": "u", "n": 1}])


def read_csv(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def everything(root):
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def test_files_of_a_run(tmp_path):
    run_dir = tmp_path / "movies" / "2026"
    write(run_dir, [row(delta=0.1 + 0.2, p=1e-20)])
    assert everything(run_dir) == [
        "leaderboard.csv", "predictions/user.jsonl", "run.json", "users.csv",
    ]  # fmt: skip
    (line,) = (run_dir / "predictions" / "user.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {
        "query_id": "0025", "user_id": "../u", "donor_id": "v", "prompt_hash": "ab",
        "output": 'caf\u00e9\n"x", y', "gold": "comedy", "finished": False,
        "scores": {"accuracy": 0.0, "parsed": None},
    }  # fmt: skip
    (found,) = read_csv(run_dir / "leaderboard.csv")
    assert tuple(found) == LEADERBOARD_COLUMNS
    assert float(found["delta"]) == 0.1 + 0.2  # full precision
    assert float(found["p"]) == 1e-20
    assert found["ci_low"] == ""  # absent is empty, never 0
    write(run_dir, [{"task": "movie_tagging"}])
    assert read_csv(run_dir / "leaderboard.csv")[0]["ci_low"] == ""
    write(run_dir, [row(delta=0.1 + 0.2, p=1e-20)])
    assert read_csv(run_dir / "users.csv") == [{"user_id": "u", "n": "1"}]
    reread = RunRecord.model_validate_json((run_dir / "run.json").read_bytes())
    assert reread == record([row(delta=0.1 + 0.2, p=1e-20)])


def test_a_run_record_takes_nothing_unknown():
    with pytest.raises(ValidationError):
        record([], colour="blue")


def test_leaderboard_is_a_pure_function_of_the_runs(tmp_path):
    write(tmp_path / "movies" / "b", [row(arm="user", value=0.5), row(arm="task", value=0.25)])
    write(tmp_path / "movies" / "a", [row(arm="base", value=1 / 3)])
    write(tmp_path / "ratings" / "z_sweep" / "0", [row(arm="cross_user", task="product_rating")])
    path, unreadable = rebuild_leaderboard(tmp_path)
    first = path.read_bytes()
    assert unreadable == []
    assert path == tmp_path / "leaderboard.csv"
    assert [r["arm"] for r in read_csv(path)] == ["base", "user", "task", "cross_user"]
    assert float(read_csv(path)[0]["value"]) == 1 / 3

    # Neither what stood there before nor a second time changes anything.
    assert rebuild_leaderboard(tmp_path)[0].read_bytes() == first
    path.write_text("edited by hand")
    assert rebuild_leaderboard(tmp_path)[0].read_bytes() == first
    path.unlink()
    assert rebuild_leaderboard(tmp_path)[0].read_bytes() == first
    assert not [name for name in everything(tmp_path) if ".partial" in name]

    # Written again in another order, elsewhere: the same.
    other = tmp_path / "elsewhere_root"
    for name in ("ratings/z_sweep/0", "movies/a", "movies/b"):
        (other / name).mkdir(parents=True)
        (other / name / "run.json").write_bytes((tmp_path / name / "run.json").read_bytes())
    assert rebuild_leaderboard(other)[0].read_bytes() == first


def test_runs_deleted_by_hand_are_gone_from_the_leaderboard(tmp_path):
    write(tmp_path / "movies" / "a", [row(arm="base")])
    write(tmp_path / "movies" / "b", [row(arm="user")])
    assert len(read_csv(rebuild_leaderboard(tmp_path)[0])) == 2
    (tmp_path / "movies" / "a" / "run.json").unlink()
    assert [r["arm"] for r in read_csv(rebuild_leaderboard(tmp_path)[0])] == ["user"]


def test_stages_and_unfinished_runs_are_no_runs(tmp_path):
    write(tmp_path / "movies" / "a", [row()])
    write(tmp_path / "stages" / "bases", [row()])
    (tmp_path / "movies" / "unfinished" / "predictions").mkdir(parents=True)
    (tmp_path / "movies" / "run.json").write_text("not at this depth")
    assert find_runs(tmp_path) == [tmp_path / "movies" / "a" / "run.json"]


@pytest.mark.parametrize(
    "content",
    [b"", b'{"schema_version": 2, "na', b"[]", b"{}", b"\xff\xfe", b'{"leaderboard": "x"}'],
)
def test_unreadable_runs_are_named_and_left_out(tmp_path, content):
    write(tmp_path / "movies" / "good", [row(arm="user")])
    bad = tmp_path / "movies" / "bad" / "run.json"
    bad.parent.mkdir()
    bad.write_bytes(content)
    path, unreadable = rebuild_leaderboard(tmp_path)
    assert [r["arm"] for r in read_csv(path)] == ["user"]
    assert len(unreadable) == 1
    assert unreadable[0].startswith(f"{bad}: ")
    assert "\n" not in unreadable[0]
    assert bad.read_bytes() == content  # nothing is repaired or deleted


def test_a_run_that_cannot_be_opened_is_named(tmp_path):
    write(tmp_path / "movies" / "good", [row()])
    (tmp_path / "movies" / "bad" / "run.json").mkdir(parents=True)
    path, unreadable = rebuild_leaderboard(tmp_path)
    assert len(read_csv(path)) == 1
    assert "bad" in unreadable[0]


def test_a_run_with_columns_of_another_version_is_named_and_left_out(tmp_path):
    write(tmp_path / "movies" / "good", [row()])
    other = tmp_path / "movies" / "other"
    other.mkdir()
    text = record([row() | {"column_of_tomorrow": 1}]).model_dump_json()
    (other / "run.json").write_text(text)
    path, unreadable = rebuild_leaderboard(tmp_path)
    assert len(read_csv(path)) == 1
    assert len(unreadable) == 1
    assert str(other) in unreadable[0]


def test_a_run_record_of_an_older_version_is_named_and_left_out(tmp_path):
    write(tmp_path / "movies" / "good", [row()])
    older = tmp_path / "movies" / "older" / "run.json"
    older.parent.mkdir()
    text = record([row()]).model_dump_json()
    older.write_text(text.replace('"schema_version":2', '"schema_version":1'))
    path, unreadable = rebuild_leaderboard(tmp_path)
    assert len(read_csv(path)) == 1
    assert unreadable == [
        f"{older}: not a run record of this version: schema_version Input should be 2"
    ]


def test_no_runs_at_all_make_an_empty_leaderboard(tmp_path):
    path, unreadable = rebuild_leaderboard(tmp_path)
    assert path.read_text().strip() == ",".join(LEADERBOARD_COLUMNS)
    assert unreadable == []
    write(tmp_path / "movies" / "a", [])
    path, unreadable = rebuild_leaderboard(tmp_path)
    assert read_csv(path) == []
    assert unreadable == []


def test_a_run_cut_short_is_not_a_finished_one(tmp_path):
    run_dir = tmp_path / "movies" / "a"
    with pytest.raises(ValueError):  # a column that is in no other row
        write_run(run_dir, record([row()]), {}, [{"user_id": "u"}, {"user_id": "v", "x": 1}])
    assert find_runs(tmp_path) == []


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_others_may_read_the_results(tmp_path):
    write(tmp_path / "movies" / "a", [row()])
    path, _ = rebuild_leaderboard(tmp_path)
    for file in (path, tmp_path / "movies" / "a" / "users.csv"):
        assert file.stat().st_mode & 0o044 == 0o044
