"""The scorer from the command line, and the benchmark's own file formats."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lamp_eval.data.lamp import read_outputs, read_users, write_outputs
from lamp_eval.errors import InputProblems, UserError
from lamp_eval.score import main, score_files
from lamp_eval.tasks import TASKS

RATINGS, MOVIES = TASKS["product_rating"], TASKS["movie_tagging"]
GOLDS = {"0025": "5", "25": "3", "26": "1"}
PREDICTIONS = {"25": "great", "26": "1", "0025": "4 stars"}  # in another order


def _file(path: Path, by_id: dict[str, Any], task: Any = "LaMP_3") -> Path:
    golds = [{"id": query_id, "output": output} for query_id, output in by_id.items()]
    path.write_text(json.dumps({"task": task, "golds": golds}))
    return path


@pytest.fixture
def golds(tmp_path: Path) -> Path:
    return _file(tmp_path / "golds.json", GOLDS)


@pytest.fixture
def predictions(tmp_path: Path) -> Path:
    return _file(tmp_path / "predictions.json", PREDICTIONS)


def test_ratings_are_paired_by_id_and_scored_by_both_rules(golds: Path, predictions: Path) -> None:
    found = score_files(golds, predictions)
    assert list(found) == ["LaMP_3"]
    scores = found["LaMP_3"]
    assert scores["n_queries"] == 3
    # By hand: "4 stars" and "great" are no floats, hence 1 for gold 5 and an end for gold 3.
    assert scores["official"]["mae"] == pytest.approx((4 + 2 + 0) / 3)
    assert scores["protocol"]["mae"] == pytest.approx((1 + 0) / 2)
    assert list(score_files(golds, predictions, rules=["protocol"])["LaMP_3"]) == [
        "n_queries", "protocol",
    ]  # fmt: skip


def test_the_command_prints_a_table_or_json(
    golds: Path, predictions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--task", "LaMP_3", "--golds", str(golds), "--preds", str(predictions)]
    main([*arguments, "--json"])
    assert json.loads(capsys.readouterr().out) == score_files(golds, predictions)
    main([*arguments, "--rules", "official"])
    shown = capsys.readouterr().out
    assert "2.000000" in shown and "official" in shown and "protocol" not in shown


def test_the_command_needs_no_install_of_the_run(golds: Path, predictions: Path) -> None:
    command = [sys.executable, "-m", "lamp_eval.score", "--golds", golds, "--preds", golds]
    done = subprocess.run([*map(str, command), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["LaMP_3"]["official"]["mae"] == 0
    command[-1] = predictions.parent / "missing.json"
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "missing.json" in done.stderr


def test_zipped_folders_and_folders_of_all_tasks(tmp_path: Path) -> None:
    folders = {}
    for name in ("golds", "predictions"):
        folder = tmp_path / name / "inner"
        folder.mkdir(parents=True)
        _file(folder / "a.json", GOLDS if name == "golds" else PREDICTIONS)
        _file(folder / "b.json", {"1": "comedy", "2": "action"}, "LaMP_2M")
        folders[name] = tmp_path / name
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for file in folder.iterdir():
                archive.write(file, f"../../{name}/{file.name}")  # nothing is unpacked anywhere
            archive.writestr("__MACOSX/a.json", "not JSON")
            archive.writestr("README.txt", "not JSON")
    found = score_files(folders["golds"], folders["predictions"])
    assert set(found) == {"LaMP_3", "LaMP_2M"}
    assert found["LaMP_2M"]["official"]["accuracy"] == 1
    assert score_files(tmp_path / "golds.zip", tmp_path / "predictions.zip") == found
    assert list(score_files(tmp_path / "golds.zip", folders["predictions"], RATINGS)) == ["LaMP_3"]


def test_a_task_given_is_taken_whatever_id_of_its_own_a_file_has(tmp_path: Path) -> None:
    old = _file(tmp_path / "old.json", {"1": "comedy"}, "LaMP_2")
    plain = tmp_path / "plain.json"
    plain.write_text('{"1": " comedy"}')
    assert score_files(old, plain, MOVIES)["LaMP_2M"]["official"]["accuracy"] == 1
    with pytest.raises(UserError, match="found: +'LaMP_2'"):
        score_files(old, plain)
    with pytest.raises(UserError, match="a file of the task LaMP_2M"):
        score_files(_file(tmp_path / "other.json", {"1": "comedy"}, "LaMP_2N"), plain, MOVIES)


def test_what_is_written_is_read_unchanged(tmp_path: Path) -> None:
    by_id = {"0025": " 日本語\n", "25": '"quoted"'}
    write_outputs(tmp_path / "golds.json", RATINGS, by_id)
    assert read_outputs(tmp_path / "golds.json")["LaMP_3"].by_id == by_id


def test_ids_that_differ_are_listed(tmp_path: Path, golds: Path) -> None:
    other = _file(tmp_path / "other.json", {"0025": "5", "026": "1"})
    with pytest.raises(InputProblems) as caught:
        score_files(golds, other)
    message = str(caught.value)
    assert "none for 2 of 3 ids: '25', '26'" in message
    assert "none for 1 of 2 ids: '026'" in message


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        ("{", ["not JSON"]),
        ("[" * 100_000, ["not JSON"]),
        ("[]", ["a JSON list"]),
        ("null", ["a JSON NoneType"]),
        ('{"task": "LaMP_3", "golds": []}', ["no outputs"]),
        ('{"task": 3, "golds": [{"id": "1", "output": "1"}]}', ["no task"]),
        ('{"task": "LaMP_3", "golds": {"1": "1"}}', ["a JSON dict"]),
        (
            '{"task": "LaMP_3", "golds": [{"id": 25, "output": "5"}, {"id": "26", "output": 5}, 7]}',  # noqa: E501
            ["int 25", "entry 1, id '26', field 'output'", "int 5", "entry 2, field 'id'"],
        ),
        (
            '{"task": "LaMP_3", "golds": [{"id": "1", "output": "5"}, {"id": "1", "output": "5"}]}',
            ["each id once", "entry 1"],
        ),
    ],
)
def test_files_of_another_form_are_errors(
    tmp_path: Path, golds: Path, content: str, messages: list[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        score_files(golds, path)
    for message in [*messages, str(path)]:
        assert message in str(caught.value)


def test_golds_that_are_no_labels_are_named_by_id(tmp_path: Path) -> None:
    bad = _file(tmp_path / "bad.json", {"1": "5", "2": "6", "3": "five"})
    with pytest.raises(InputProblems) as caught:
        score_files(bad, bad)
    assert "id '2'" in str(caught.value) and "id '3'" in str(caught.value)
    assert "id '1'" not in str(caught.value)


def test_two_files_of_one_task_and_an_empty_archive_are_errors(tmp_path: Path, golds: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(UserError, match="at least one JSON file"):
        read_outputs(folder)
    for name in ("a.json", "b.json"):
        _file(folder / name, GOLDS)
    with pytest.raises(UserError, match=r"each task in one file[\s\S]*a\.json"):
        read_outputs(folder)
    with zipfile.ZipFile(tmp_path / "empty.zip", "w"):
        pass
    with pytest.raises(UserError, match="at least one JSON file"):
        read_outputs(tmp_path / "empty.zip")


def test_an_archive_that_would_fill_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamp_eval.data.lamp._MAX_UNPACKED_BYTES", 10 * 2**20)
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.json", " " * (11 * 2**20))
    with pytest.raises(UserError, match="at most 10 MB"):
        read_outputs(tmp_path / "bomb.zip")


def test_a_damaged_archive_is_a_mistake_wherever_it_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "golds.zip"
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(path, "w", method) as archive:
            archive.writestr("a.json", json.dumps({str(i): "5" for i in range(40)}))
        whole = path.read_bytes()
        n_refused = 0
        for position in range(len(whole)):
            for damaged in (whole[:position], _with_byte(whole, position, whole[position] ^ 0xFF)):
                path.write_bytes(damaged)
                try:
                    read_outputs(path)
                except UserError as error:
                    n_refused += 1
                    assert str(path) in str(error)
        assert n_refused > len(whole)


def _with_byte(content: bytes, position: int, value: int) -> bytes:
    return content[:position] + bytes([value]) + content[position + 1 :]


def test_an_archive_with_a_password_is_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "golds.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.json", '{"1": "5"}')
    content = bytearray(path.read_bytes())
    content[6] |= 1  # the flag in the member's own header,
    content[content.index(b"PK\x01\x02") + 8] |= 1  # and in the directory
    path.write_bytes(content)
    with pytest.raises(UserError, match="without a password"):
        read_outputs(path)


def test_users_from_questions_and_from_plain_files(tmp_path: Path) -> None:
    path = tmp_path / "users.json"
    questions = [
        {"id": "01", "user_id": "u", "profile": [{}, {}]},
        {"id": "1", "user_id": "u", "profile": [{}]},
        {"id": "2", "user_id": "v", "profile": []},
    ]
    path.write_text(json.dumps(questions))
    user_of = {"01": "u", "1": "u", "2": "v"}
    assert read_users(path) == (user_of, {"u": 2, "v": 0})
    path.write_text(json.dumps(user_of))
    assert read_users(path) == (user_of, {})
    path.write_text(json.dumps({"1": {"user_id": "u", "n_records": 7}}))
    assert read_users(path) == ({"1": "u"}, {"u": 7})
    for bad, message in (
        ("[]", "without queries"),
        ('"u"', "without queries"),
        ('[{"id": "1", "profile": []}]', "field 'user_id'"),
        ('[{"id": "1", "user_id": "u"}, {"id": "1", "user_id": "v"}]', "each id once"),
        ('{"1": {"user_id": "u", "n_records": "7"}}', "field 'n_records'"),
    ):
        path.write_text(bad)
        with pytest.raises(UserError, match=message):
            read_users(path)


def test_published_headlines(lamp_data: Path) -> None:
    """The same 1,925 predictions by the library alone; its scores per query are in test_metrics."""
    from rouge_score.rouge_scorer import RougeScorer

    golds = lamp_data / "lamp/LaMP_4/dev/dev_outputs.json"
    predictions = lamp_data / "predictions/LaMP_4_dev_preds.json"
    found = score_files(golds, predictions)["LaMP_4"]
    assert found["n_queries"] == 1925
    gold_of, output_of = (read_outputs(path)["LaMP_4"].by_id for path in (golds, predictions))
    scorer = RougeScorer(["rouge1"])
    total = sum(
        scorer.score(gold.strip(), output_of[query_id].strip())["rouge1"].fmeasure
        for query_id, gold in gold_of.items()
    )
    assert found["official"]["rouge1"] == pytest.approx(total / 1925, abs=1e-12)


def test_real_files_of_every_task_score_perfectly_against_themselves(lamp_data: Path) -> None:
    main_metric = {"LaMP_1": 1, "LaMP_2N": 1, "LaMP_4": 1, "LaMP_5": 1, "LaMP_7": 1}
    for path in sorted((lamp_data / "lamp").rglob("*_outputs.json")):
        ((lamp_id, scores),) = score_files(path, path).items()
        task = next(task for task in TASKS.values() if task.lamp_id == lamp_id)
        value = scores["official"][task.metrics[0]]
        assert value == pytest.approx(main_metric.pop(lamp_id), abs=0.02), path
    assert not main_metric
