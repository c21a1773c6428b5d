"""What the results depend on besides the configuration: packages, commit, device."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from lamp_eval.errors import UserError

PACKAGES = (
    "lamp_eval",
    "torch",
    "transformers",
    "peft",
    "mlx",
    "mlx-lm",
    "rank-bm25",
    "scikit-learn",
    "scipy",
    "numpy",
)


def cache_dir() -> Path:
    """Where converted models and tables are kept: `$XDG_CACHE_HOME/lamp_eval`."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "lamp_eval"


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of the packages; without arguments, of all that matter."""
    return {name: metadata.version(name) for name in packages or PACKAGES}


def device() -> dict[str, str]:
    """The machine, what MLX computes on, and which BLAS is under MLX on a CPU."""
    import on_device

    return {
        "machine": platform.machine(),
        "system": platform.platform(),
        "mlx": mlx_device(),
        "blas": on_device.BLAS,
    }


def mlx_device() -> str:
    """The device that MLX computes on, e.g. `cpu (x86_64)`."""
    from on_device.model import device_name

    return str(device_name())


def mlx_dtype(dtype: str) -> str:
    """What a base of this dtype computes in: float32 on a CPU, where MLX sums in the dtype."""
    return "float32" if mlx_device().startswith("cpu") else dtype


def git(*arguments: str) -> str | None:
    """Git's answer about the source tree; None where the package is not in one."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return str(done.stdout).strip()


class Provenance(NamedTuple):
    """With what a run was made, in the words of its record."""

    versions: dict[str, str]
    commit: str | None
    dirty: bool | None
    device: dict[str, str]


def provenance() -> Provenance:
    """Of this process, now."""
    status = git("status", "--porcelain")
    return Provenance(
        versions={"python": platform.python_version()} | versions(),
        commit=git("rev-parse", "HEAD"),
        dirty=None if status is None else bool(status),
        device=device(),
    )


def torch_device(name: str) -> str:
    """The device that torch computes on: `auto` takes CUDA, then MPS, then the CPU.

    Raises:
        UserError: the device is not there.
    """
    import torch

    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return next((device for device, there in available.items() if there), "cpu")
    if not available.get(name, True):
        raise UserError(
            expected=f"a {name} device",
            found="none that torch can use",
            where="option executor.torch_device",
            fix="choose executor.torch_device=auto",
        )
    return name


def peak_memory_bytes(who: int) -> int:
    """The largest resident size so far of `RUSAGE_SELF`, or of the largest ended child."""
    peak = resource.getrusage(who).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB on Linux
