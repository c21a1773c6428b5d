"""How many blocks to recompute at a time, from a prediction of the peak memory.

With groups of K of the n adapted blocks recomputed in the backward pass (paper, Figure 3)

    M(K) = M₀ + c + a·K + s·⌈n/K⌉,        without recomputation  M = M₀ + c + a·n,

where M₀ is what is there already (the base above all), s the states between two groups, a what a
block's activations take, and c the rest: the head, gradients, and what MLX allocates ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from lamp_eval.errors import UserError

# Predicted peaks were too low by up to 6 % (a model of 12 blocks on a CPU).
_MARGIN = 1.08


@dataclass(frozen=True)
class PeakLaw:
    """Bytes of one pass over a batch; see the module's formula.

    Attributes:
        active: M₀, there before the pass.
        fixed: c.
        per_block: a.
        between: s.
        n_blocks: n, those with an adapter.
    """

    active: int
    fixed: float
    per_block: float
    between: int
    n_blocks: int

    def peak(self, checkpoint: int | None) -> float:
        """The predicted peak with groups of so many blocks; None: nothing is recomputed."""
        if checkpoint is None:
            return self.active + self.fixed + self.per_block * self.n_blocks
        n_groups = math.ceil(self.n_blocks / checkpoint)
        return self.active + self.fixed + self.per_block * checkpoint + self.between * n_groups

    def best(self) -> int:
        """The group size of the smallest peak."""
        return min(range(1, self.n_blocks + 1), key=self.peak)


def measured_law(
    run: Callable[[int, int | None], object], n_blocks: int, between: int, *, recomputed: bool
) -> PeakLaw:
    """The law from passes over few blocks.

    Args:
        run: computes loss and gradients with the last so many blocks only, in groups of so many
            that are recomputed (None: none is).
        n_blocks: those with an adapter.
        between: bytes of the states between two blocks.
        recomputed: whether the law is for groups, where more is there beside a block's activations.
    """
    n = min(4, n_blocks)
    half = max(1, n // 2)
    active = mx.get_active_memory()

    def peak(n_last: int, group: int | None) -> int:
        for _ in range(2):  # the first makes what stays
            mx.reset_peak_memory()
            mx.eval(run(n_last, group))
        return int(mx.get_peak_memory() - active)

    small, large = peak(half, None), peak(n, None)
    per_block = max(0.0, (large - small) / max(1, n - half))
    fixed = small - half * per_block
    if recomputed:
        fixed = peak(n, half) - half * per_block - between * math.ceil(n / half)
    return PeakLaw(active, max(0.0, fixed), per_block, between, n_blocks)


def choose_checkpoint(whole: PeakLaw, alone: PeakLaw, budget: float) -> int | None:
    """The group size for a budget; None where nothing needs to be recomputed.

    Args:
        whole: of the largest batch, as it is computed without recomputation.
        alone: of the longest example, as examples are computed one by one with it.
        budget: bytes.

    Raises:
        UserError: no group size fits.
    """
    if _MARGIN * whole.peak(None) <= budget:
        return None
    best = alone.best()
    needed = _MARGIN * alone.peak(best)
    if needed > budget:
        raise UserError(
            expected=f"a step of stage 2 within {budget / 1e9:.3g} GB",
            found=f"about {needed / 1e9:.3g} GB with {best} blocks recomputed at a time, "
            f"{alone.active / 1e9:.3g} GB of it before the step",
            where="option on_device.memory_budget_gb",
            fix="raise it, or lower protocol.max_tokens or adapter.user.blocks",
        )
    return best
