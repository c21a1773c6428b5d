"""What the results depend on besides the configuration: packages, commit, device."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

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


def peak_memory_bytes() -> int:
    """The process's largest resident size so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB on Linux


def flops_per_second() -> float:
    """Speed of a float32 matrix product in torch, measured for a moment."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = torch.rand(256, 1024, device=device), torch.rand(1024, 1024, device=device)
    (a @ b).sum().item()
    n, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < 0.1:
        (a @ b).sum().item()
        n += 1
    return float(n) * 2 * 256 * 1024 * 1024 / elapsed
