"""Comparing prediction files and score files from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from lamp_eval.compare import main, pairs_of_files, pairs_of_scores, report
from lamp_eval.data.lamp import write_outputs
from lamp_eval.errors import InputProblems, UserError
from lamp_eval.tasks import TASKS

MOVIES, RATINGS = TASKS["movie_tagging"], TASKS["product_rating"]


def _outputs(path: Path, *outputs: str, task: Any = MOVIES) -> Path:
    write_outputs(path, task, {f"q{i}": output for i, output in enumerate(outputs)})
    return path


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    outputs = {
        "golds": ["comedy", "action", "comedy", "fantasy"],
        "task": ["comedy", "comedy", "action", "fantasy"],
        "user": ["comedy", "action", "comedy", " fantasy"],
        "cross": ["comedy", "action", "action", "romance"],
    }
    found = {name: _outputs(tmp_path / f"{name}.json", *rows) for name, rows in outputs.items()}
    found["users"] = tmp_path / "users.json"
    owners = [("a", 10), ("a", 10), ("b", 25), ("b", 25)]
    rows = {f"q{i}": {"user_id": u, "n_records": n} for i, (u, n) in enumerate(owners)}
    found["users"].write_text(json.dumps(rows))
    return found


def test_by_hand(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    given = {"golds": "golds", "a": "user", "b": "task", "users": "users"}
    arguments = [f"--{name}={files[file]}" for name, file in given.items()]
    main([*arguments, "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["task"], row["metric"], row["arm"], row["reference"]) == (
        "LaMP_2M", "accuracy", "user", "task",
    )  # fmt: skip
    assert (row["n_users"], row["n_queries"], row["value"], row["reference_value"]) == (
        2,
        4,
        1,
        0.5,
    )
    assert (row["delta"], row["delta_u"]) == (0.5, 0.5)
    assert (row["query_wins"], row["query_ties"], row["query_losses"]) == (2, 2, 0)
    assert row["agreement"] == 0.5  # " fantasy" and "fantasy" are the same answer
    assert row["p_holm"] == row["p"]
    assert {name: found["n_users"] for name, found in row["by_history"].items()} == {
        "<25": 1, "25–49": 1,
    }  # fmt: skip
    main(arguments)
    shown = capsys.readouterr().out
    assert "+0.500000" in shown and "50.000%" in shown and "25–49 records" in shown
    assert "Holm" not in shown  # of one comparison


def test_the_personal_part_is_reported_on_the_same_queries(files: dict[str, Path]) -> None:
    user_of = {"q0": "a", "q1": "a", "q2": "b", "q3": "b"}
    paired = pairs_of_files(
        files["golds"], [files["user"]], files["task"], cross_user=files["cross"], user_of=user_of
    )
    rows = report(paired)
    deltas = {(row["arm"], row["reference"]): row["delta"] for row in rows}
    assert deltas == {("user", "task"): 0.5, ("cross", "task"): 0.0, ("user", "cross"): 0.5}
    smallest = min(row["p"] for row in rows)
    assert min(row["p_holm"] for row in rows) == min(1, 3 * smallest)


def test_without_users_every_query_is_its_own(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    main([f"--golds={files['golds']}", f"--a={files['user']}", f"--b={files['task']}"])
    assert "every query counts as a user of its own" in capsys.readouterr().out
    (row,) = report(pairs_of_files(files["golds"], [files["user"]], files["task"]))
    assert row["n_users"] == 4


def test_every_metric_with_a_score_per_query(tmp_path: Path) -> None:
    golds = _outputs(tmp_path / "golds.json", "5", "1", "3", task=RATINGS)
    arm = _outputs(tmp_path / "arm.json", "5", "great", "3", task=RATINGS)
    reference = _outputs(tmp_path / "reference.json", "4", "1", "great", task=RATINGS)
    official = report(pairs_of_files(golds, [arm], reference))
    assert [row["metric"] for row in official] == ["mae", "accuracy"]
    assert official[0]["delta"] == pytest.approx((0 - 1 + 4 - 0 + 0 - 2) / 3)
    assert official[0]["improves"] is False
    protocol = report(pairs_of_files(golds, [arm], reference, rules="protocol"))
    assert (protocol[0]["n_queries"], protocol[0]["n_left_out"]) == (1, 2)  # no rating in "great"
    assert protocol[0]["delta"] == -1


def test_files_of_one_name_are_told_apart(files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = _outputs(tmp_path / "other" / "task.json", *["comedy"] * 4)
    (pair,) = pairs_of_files(files["golds"], [other], files["task"])
    assert (pair.arm, pair.reference) == (str(other), str(files["task"]))


def test_a_query_without_a_user_is_an_error(files: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="none for 1: 'q3'"):
        pairs_of_files(
            files["golds"], [files["user"]], files["task"],
            user_of={"q0": "a", "q1": "a", "q2": "b"},
        )  # fmt: skip


def _scores(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_score_files_and_their_direction(tmp_path: Path) -> None:
    rows = [
        {"user_id": "a", "score": 1.0, "reference_score": 3.0},
        {"user_id": "b", "oppu_score": 2, "task_score": 2.5, "diff": 0.5},
    ]
    path = _scores(tmp_path / "errors.jsonl", *rows)
    (row,) = report([pairs_of_scores(path, higher_is_better=False)])
    assert (row["delta"], row["improves"], row["query_wins"]) == (-1.25, True, 2)
    with pytest.raises(UserError, match=r"line 2, field 'diff'[\s\S]*--lower-is-better"):
        pairs_of_scores(path)


@pytest.mark.parametrize(
    "line",
    ["{", "7", "{}", '{"user_id": 1, "score": 1, "reference_score": 1}',
     '{"user_id": "a", "score": NaN, "reference_score": 1}',
     '{"user_id": "a", "score": true, "reference_score": 1}',
     '{"user_id": "a", "score": 1, "reference_score": 1' + "0" * 400 + "}",
     '{"user_id": "", "score": 1, "reference_score": 1}'],
)  # fmt: skip
def test_bad_lines_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "scores.jsonl"
    good = '{"user_id": "a", "score": 1, "reference_score": 1}'
    path.write_text(f"{good}\n{line}\n{good}\n{line}\n")
    with pytest.raises(InputProblems) as caught:
        pairs_of_scores(path)
    assert "line 2" in str(caught.value) and "line 4" in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [[], ["--golds=g", "--a=a"], ["--pairs=p", "--golds=g"], ["--golds=g", "--a=a", "--b=b"],
     ["--pairs=p"], ["--pairs=p", "--users=u"]],
)  # fmt: skip
def test_mistakes_end_with_2(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_published_movie_tagging_comparisons(
    lamp_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("score_movie_tagging_r5q4t", "score_movie_tagging_r5q4tshuf")
    main([*(f"--pairs={lamp_data}/table8/{name}.pairs.jsonl" for name in names), "--json"])
    user, cross = json.loads(capsys.readouterr().out)
    found = {k: round(user[k], 6) for k in ("value", "reference_value", "delta", "delta_u")}
    assert found == {
        "value": 0.487583, "reference_value": 0.360993, "delta": 0.12659, "delta_u": 0.029848,
    }  # fmt: skip
    assert [round(user[f"normal_ci{u}_{end}"], 6) for u in ("", "_u") for end in ("low", "high")] \
        == [0.113705, 0.139475, 0.012387, 0.047309]  # fmt: skip
    assert (round(cross["delta"], 6), round(cross["delta_u"], 6)) == (0.011508, 0.009844)
    assert (cross["query_wins"], cross["query_losses"]) == (74, 36)
    assert user["p_holm"] == pytest.approx(2 * user["p"])


def test_published_phone_and_server_predictions_agree_as_stated(
    lamp_data: Path, tmp_path: Path
) -> None:
    folder = lamp_data / "table8"
    phone, server = (
        folder / f"preds_movie_tagging_{name}.json" for name in ("phone_device", "r5q4t")
    )
    # Agreement needs no golds that are right: any label will do.
    ids = json.loads(server.read_text())
    golds = tmp_path / "golds.json"
    write_outputs(golds, MOVIES, dict.fromkeys(ids, MOVIES.labels[0]))
    (pair,) = pairs_of_files(golds, [phone], server, task=MOVIES)
    assert pair.agreement == pytest.approx(1 - 258 / 3302, abs=1e-12)
