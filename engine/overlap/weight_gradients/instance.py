"""The problem of hiding all-to-alls behind weight gradients, and the worth of an answer."""

import math
from dataclasses import dataclass

import numpy as np

from engine.errors import InputError
from engine.result import Bools, Floats, Ints

NOWHERE = -1
"""The all-to-all of a weight gradient that runs under none."""


@dataclass(frozen=True)
class WeightGradientInstance:
    """All-to-alls of a backward pass, and weight-gradient computations (dW) that may run under some of them.

    alltoall: float64[m] seconds of each, at least 0; may be empty
    dw: float64[w] seconds of each, at least 0; may be empty
    allowed: bool[w, m], True for a dW and an all-to-all independent of each other (`partition_axes.overlappable`)

    Raises InputError for a wrong shape or value.
    """

    alltoall: Floats
    dw: Floats
    allowed: Bools

    def __post_init__(self) -> None:
        for name in ("alltoall", "dw"):
            seconds = np.asarray(getattr(self, name), dtype=np.float64)
            with np.errstate(over="ignore"):
                usable = seconds.ndim == 1 and np.isfinite(seconds.sum()) and seconds.min(initial=0) >= 0
            if not usable:
                raise InputError(f"{name}: wanted one duration of at least 0 for each, in seconds, with a finite sum")
            object.__setattr__(self, name, seconds)
        allowed, wanted = np.asarray(self.allowed), (len(self.dw), len(self.alltoall))
        if allowed.shape != wanted:
            raise InputError(
                f"allowed: shape {allowed.shape}; wanted {wanted}: a row for each dW, a column for each all-to-all"
            )
        if not np.isin(allowed, (0, 1)).all():
            raise InputError("allowed: every value must be 0 or 1")
        object.__setattr__(self, "allowed", allowed.astype(bool))

    def relative(self) -> "tuple[WeightGradientInstance, float]":
        """The same problem without durations that cannot count, the longest all-to-all lasting 1; and seconds of that 1.

        The part of an all-to-all beyond all the dW that may run under it is never hidden, and the part of a dW beyond the
        longest all-to-all it may run under hides nothing. So every assignment keeps its (relative) worth, the optimum is
        at least 1, and bounds that let a dW run under several all-to-alls get lower.
        """
        alltoall = np.minimum(self.alltoall, self.dw @ self.allowed)
        most = np.where(self.allowed, alltoall, 0.0).max(axis=1, initial=0)
        longest = float(alltoall.max(initial=0)) or 1.0
        return WeightGradientInstance(alltoall / longest, np.minimum(self.dw, most) / longest, self.allowed), longest


def overlap(instance: WeightGradientInstance, alltoall_of_dw: Ints) -> float:
    """Seconds of all-to-all hidden by weight gradients (Lancet section 4.2); alltoall_of_dw: int64[w], -1 for none."""
    under = [[] for _ in instance.alltoall]
    for alltoall, seconds in zip(alltoall_of_dw.tolist(), instance.dw.tolist(), strict=True):
        if alltoall != NOWHERE:
            under[alltoall].append(seconds)
    return math.fsum(min(t, math.fsum(dw_seconds)) for t, dw_seconds in zip(instance.alltoall.tolist(), under, strict=True))


def without_idle(instance: WeightGradientInstance, alltoall_of_dw: Ints) -> Ints:
    """The answer int64[w] without the dW that hide nothing: each that stays hides some time that the others leave.

    Of those under one all-to-all the longest that is not needed goes first.
    """
    kept = alltoall_of_dw.copy()
    for alltoall, t in enumerate(instance.alltoall.tolist()):
        under = np.flatnonzero(kept == alltoall)
        for dw in under[np.argsort(-instance.dw[under], kind="stable")]:
            others = instance.dw[(kept == alltoall) & (np.arange(len(kept)) != dw)]
            if math.fsum(others.tolist()) >= t or instance.dw[dw] == 0:
                kept[dw] = NOWHERE
    return kept
