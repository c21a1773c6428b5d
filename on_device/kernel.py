"""Whether this MLX dispatches its repaired backward kernel on matrix units (`affine_qmm_n_nax`)."""

from __future__ import annotations

import mmap
import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
from packaging.version import Version

KERNEL = b"affine_qmm_n_nax"


class Kernel(NamedTuple):
    """Whether the repaired kernel can be dispatched, and why (not)."""

    dispatched: bool
    reason: str


def this_kernel() -> Kernel:
    """Of the MLX that is installed, on this device."""
    architecture = str(mx.device_info().get("architecture", "")) if mx.metal.is_available() else ""
    library = Path(mx.__file__).parent / "lib" / "mlx.metallib"
    return kernel(
        metadata.version("mlx"),
        architecture=os.environ.get("MLX_METAL_GPU_ARCH", architecture),
        system=platform.mac_ver()[0],
        in_wheel=_holds(library, KERNEL),
    )


def kernel(version: str, *, architecture: str, system: str, in_wheel: bool) -> Kernel:
    """Of a release of MLX on a device; read from the published releases, November 2026.

    Args:
        version: of MLX.
        architecture: of the GPU, `applegpu_g17s`; "": no Apple GPU.
        system: macOS's version, or iOS's.
        in_wheel: whether the wheel's metal library holds the kernel.
    """
    if not architecture.startswith("applegpu_"):
        return Kernel(False, "no Apple GPU: the kernel is one of Metal's")
    released = Version(version)
    if released <= Version("0.29.4"):
        return Kernel(False, f"mlx {version} has no such kernel (0.32.3 and later dispatch it)")
    if released < Version("0.32.1"):
        return Kernel(False, f"mlx {version} holds an incorrect one that it never dispatches "
                      "(0.32.3 and later dispatch a repaired one, mlx #4051, #4392)")  # fmt: skip
    if released < Version("0.32.3"):
        return Kernel(False, f"mlx {version} has repaired it and does not dispatch it "
                      "(switched off by #4202, on again by #4392 in 0.32.3)")  # fmt: skip
    found = re.fullmatch(r"applegpu_g(\d+)(\w*)", architecture)
    needed = 18 if found and found[2] == "p" else 17
    if not found or int(found[1]) < needed:
        return Kernel(False, f"{architecture} has no matrix units (M5, A19 and later have)")
    if not system or Version(system) < Version("26.2"):
        return Kernel(False, f"system {system or 'unknown'}: the kernel needs 26.2 or later")
    if not in_wheel:
        return Kernel(False, "this wheel's mlx.metallib does not hold the kernel: "
                      "install the wheel for macOS 26 or later, not macosx_15_0")  # fmt: skip
    return Kernel(True, f"mlx {version} on {architecture}: affine weights, float16 or bfloat16, "
                  "4 rows or more, outputs and inputs in multiples of 64")  # fmt: skip


def _holds(file: Path, name: bytes) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return text.find(name) >= 0


def limits() -> Mapping[str, int]:
    """Bytes of memory that MLX may use here, by name; empty where MLX does not say."""
    info = mx.device_info()
    names = ("memory_size", "max_recommended_working_set_size", "max_buffer_length")
    found = {name: int(info[name]) for name in names if name in info}
    return found | ({"memory_limit": mx.get_memory_limit()} if mx.get_memory_limit() else {})
