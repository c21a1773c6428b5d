"""A fast BLAS under MLX on Linux.

MLX's Linux wheel links the reference BLAS: 3–6 GFLOP/s in float32 on a core that can do 100.
`sgemm_` and its kin are undefined symbols of `libmlx.so`, so a library loaded before it with
RTLD_GLOBAL takes over. torch is a dependency anyway and its `libtorch_cpu.so` carries a fast one.
(Checked with LD_DEBUG=bindings: beside BLAS and LAPACK only instantiations of the C++ standard
library bind to it, all of the same ABI.)
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import sys
import warnings
from pathlib import Path

# How often an idle OpenMP thread looks for new work before it sleeps. By default it spins 300,000
# times, which keeps the cores from whatever else computes on them. Measured on 2 cores, user stage:
# 570 instead of 602 tokens/s alone; beside two busy processes 125 instead of fewer than 1.
_SPIN_COUNT = "10000"


def preload() -> str:
    """Loads torch's BLAS ahead of MLX on Linux; returns what MLX multiplies with.

    Its threads then spin less between two products, unless `GOMP_SPINCOUNT` or `OMP_WAIT_POLICY`
    is set. Without the BLAS everything still works, slower: that is said in a warning.
    """
    if platform.system() != "Linux":
        return "system"
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    spec = importlib.util.find_spec("torch")
    library = Path(spec.origin or "").parent / "lib" / "libtorch_cpu.so" if spec else None
    if "mlx.core" in sys.modules:
        reason = "mlx was imported before on_device"
    elif library is None or not library.exists():
        reason = "torch's library was not found"
    else:
        try:
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            return "torch"
        except OSError as error:
            reason = str(error)
    warnings.warn(
        f"MLX uses its reference BLAS and will be about 20 times slower on the CPU: {reason}",
        stacklevel=2,
    )
    return "reference"
