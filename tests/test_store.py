"""Stage outputs: what exists is whole, and a key is its content."""

from __future__ import annotations

import json

import pytest

from lamp_eval.store import KEY_FILE, Store, key_hash

KEY = {"stage": 1, "user": "../../u", "recipe": {"rank": 8, "lr": 1e-5}, "none": None}


def fill(store: Store, key=KEY, text: str = "weights"):
    with store.build("adapters", key) as folder:
        (folder / "file.txt").write_text(text)
    return store.path("adapters", key)


def everything(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_hash_is_of_the_content_alone():
    assert key_hash(KEY) == key_hash(json.loads(json.dumps(dict(reversed(KEY.items())))))
    assert len(key_hash(KEY)) == 20
    assert set(key_hash(KEY)) <= set("0123456789abcdef")
    # A literal: outputs of earlier versions must be found again.
    assert key_hash({"a": 1}) == "f9d86028c6e0d64e2251"


@pytest.mark.parametrize(
    "other",
    [
        {**KEY, "user": "../../v"},
        {**KEY, "recipe": {"rank": 8, "lr": 2e-5}},
        {**KEY, "none": False},
        {**KEY, "stage": "1"},
        {**KEY, "more": None},
    ],
)
def test_any_difference_changes_the_hash(other):
    assert key_hash(other) != key_hash(KEY)


def test_built_output_is_found(tmp_path):
    store = Store(tmp_path / "stages")
    assert not store.has("adapters", KEY)
    assert not (tmp_path / "stages").exists()  # asking writes nothing
    path = fill(store)
    assert store.has("adapters", KEY)
    assert not store.has("bases", KEY)
    assert not store.has("adapters", {**KEY, "stage": 2})
    assert everything(path) == ["file.txt", KEY_FILE]
    assert json.loads((path / KEY_FILE).read_text()) == KEY
    assert Store(tmp_path / "stages").has("adapters", KEY)  # in a later process too


def test_no_value_of_a_key_becomes_a_path(tmp_path):
    path = fill(Store(tmp_path / "stages"))
    assert path.parent == tmp_path / "stages" / "adapters"
    assert everything(tmp_path)[:2] == ["stages", "stages/adapters"]
    assert len(everything(tmp_path)) == 5


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_block_that_fails_leaves_nothing(tmp_path, error):
    store = Store(tmp_path)
    with pytest.raises(error), store.build("adapters", KEY) as folder:
        (folder / "file.txt").write_text("half")
        raise error
    assert not store.has("adapters", KEY)
    assert everything(tmp_path) == ["adapters"]
    fill(store)
    assert store.has("adapters", KEY)


def test_nothing_is_visible_before_the_end(tmp_path):
    store = Store(tmp_path)
    with store.build("adapters", KEY) as folder:
        (folder / "file.txt").write_text("whole")
        assert folder != store.path("adapters", KEY)
        assert folder.parent == store.path("adapters", KEY).parent  # one file system: a rename
        assert not store.path("adapters", KEY).exists()
    assert not folder.exists()


def test_a_folder_left_by_a_killed_process_counts_for_nothing(tmp_path):
    store = Store(tmp_path)
    left = tmp_path / "adapters" / ".partial-killed"
    left.mkdir(parents=True)
    (left / "file.txt").write_text("half")
    assert not store.has("adapters", KEY)
    path = fill(store)
    assert (path / "file.txt").read_text() == "weights"


def test_the_first_of_two_processes_wins(tmp_path):
    store = Store(tmp_path)
    with store.build("adapters", KEY) as folder:
        (folder / "file.txt").write_text("second")
        fill(Store(tmp_path), text="first")
    assert (store.path("adapters", KEY) / "file.txt").read_text() == "first"
    assert len(everything(tmp_path)) == 4  # the stage, the folder, two files: no leftovers


def test_an_incomplete_folder_under_the_final_name_is_not_taken_for_whole(tmp_path):
    store = Store(tmp_path)
    final = store.path("adapters", KEY)
    final.mkdir(parents=True)
    (final / "file.txt").write_text("half")
    assert not store.has("adapters", KEY)
    with pytest.raises(OSError):
        fill(store)
    assert not store.has("adapters", KEY)


def test_keys_are_plain_json():
    with pytest.raises(TypeError):
        key_hash({"path": object()})
