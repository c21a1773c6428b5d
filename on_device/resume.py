"""Training that was interrupted, as one file: all that decides how it goes on."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from lamp_eval.errors import UserError

Tensors = dict[str, mx.array]


@dataclass(frozen=True)
class TrainingState:
    """After `step` optimizer steps. Windows and learning rates follow from the step and the seed.

    Attributes:
        step: optimizer steps done.
        adapter: the tensors after them.
        good: the tensors before the last of them, which had a right loss and gradient.
        optimizer: AdamW's state by tensor, its moments among it.
        rows: a row of metrics per step.
        checkpoint: blocks that are recomputed at a time; None: none.
        predicted_peak_bytes: see `on_device.memory`; None where nothing was predicted.
    """

    step: int
    adapter: Tensors
    good: Tensors
    optimizer: dict[str, Any]
    rows: tuple[dict[str, float], ...]
    checkpoint: int | None = None
    predicted_peak_bytes: float | None = None

    def save(self, path: Path) -> None:
        """Writes the file at once: whoever is killed here leaves the older one."""
        tensors = {f"adapter/{name}": tensor for name, tensor in self.adapter.items()}
        tensors |= {f"good/{name}": tensor for name, tensor in self.good.items()}
        for name, value in self.optimizer.items():  # of a tensor its moments, or a number of all
            own = value if isinstance(value, dict) else {"": value}
            tensors |= {f"optimizer/{name}/{moment}": array for moment, array in own.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".partial-{os.getpid()}.safetensors")
        names = ("step", "rows", "checkpoint", "predicted_peak_bytes")
        about = {name: json.dumps(getattr(self, name)) for name in names}
        mx.save_safetensors(str(partial), tensors, about)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)


def load_state(path: Path) -> TrainingState | None:
    """What an interrupted training left; None if nothing.

    Raises:
        UserError: the file is damaged.
    """
    if not path.is_file():
        return None
    try:
        tensors, about = mx.load(str(path), format="safetensors", return_metadata=True)
        mx.eval(tensors)  # read now: the file is going to be replaced
        groups: dict[str, dict[str, Any]] = {"adapter": {}, "good": {}, "optimizer": {}}
        for path_in_file, tensor in tensors.items():
            group, name, *moment = path_in_file.split("/")
            if moment and moment[0]:
                groups[group].setdefault(name, {})[moment[0]] = tensor
            else:
                groups[group][name] = tensor
        return TrainingState(
            step=json.loads(about["step"]),
            adapter=groups["adapter"],
            good=groups["good"],
            optimizer=groups["optimizer"],
            rows=tuple(json.loads(about["rows"])),
            checkpoint=json.loads(about["checkpoint"]),
            predicted_peak_bytes=json.loads(about["predicted_peak_bytes"]),
        )
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(
            expected="the state of an interrupted training",
            found=str(error).splitlines()[0],
            where=str(path),
            fix="delete this file; the adapter is then trained from its first step",
        ) from error
