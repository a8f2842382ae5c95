"""Plans scored on workloads they were not made from: any placements, with replicas or without."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import InputError
from engine.result import Floats


@dataclass(frozen=True)
class ScoreMatrix:
    """float64[plan, workload] each, 0 … 1, higher is better.

    balancedness: mean over layers of mean / max GPU load, as `engine.timeline.balancedness`; 1 for a layer without load.
    kept_share: share of the transitions between two experts on one GPU; 1 for a workload without transitions, and NaN if
        no transitions were given
    """

    balancedness: Floats
    kept_share: Floats


def score_matrix(shares: Sequence[Floats], loads: Sequence[Floats], transitions: Sequence[Floats] | None = None) -> ScoreMatrix:
    """Every plan on every workload.

    shares: of every plan float64[layer, expert, gpu], the share of an expert's tokens that each GPU computes; 1 in all
    loads: of every workload float64[layer, expert]
    transitions: of every workload float64[layer - 1, expert, expert], tokens from expert i of a layer to expert k of the
        next; None if only loads are known

    With replicas a token picks its replica at every layer independently of where it is, in proportion to the shares, so
    the tokens kept are the sum of transitions[l, i, k] · (share[l, i] · share[l + 1, k]). A dispatcher that prefers the
    replica at hand keeps more; without replicas the figure is exact.

    Raises InputError if the shapes do not fit each other or shares do not add up to 1.
    """
    plans = [_checked_share(share, index) for index, share in enumerate(shares)]
    loads = [np.asarray(load, dtype=np.float64) for load in loads]
    if not plans or not loads:
        raise InputError("score_matrix: wanted at least one plan and one workload")
    shape = plans[0].shape[:2]
    _check_all("shares: plan", [plan[:, :, 0] for plan in plans], shape)
    _check_all("loads: workload", loads, shape)
    balance = np.empty((len(plans), len(loads)))
    for place in np.ndindex(balance.shape):
        on_gpu = np.einsum("le,leg->lg", loads[place[1]], plans[place[0]])
        most = on_gpu.max(axis=1)
        balance[place] = np.where(most > 0, on_gpu.mean(axis=1) / np.where(most > 0, most, 1.0), 1.0).mean()
    if transitions is None:
        return ScoreMatrix(balance, np.full(balance.shape, np.nan))
    hops = [np.asarray(tokens, dtype=np.float64) for tokens in transitions]
    _check_all("transitions: workload", hops, (shape[0] - 1, shape[1], shape[1]))
    if len(hops) != len(loads):
        raise InputError(f"transitions: of {len(hops)} workloads, but loads of {len(loads)}")
    kept = [[((tokens @ plan[1:]) * plan[:-1]).sum() for tokens in hops] for plan in plans]
    total = np.array([tokens.sum() for tokens in hops])
    return ScoreMatrix(balance, np.where(total > 0, kept / np.where(total > 0, total, 1.0), 1.0))


def _checked_share(share: Floats, index: int) -> Floats:
    share = np.asarray(share, dtype=np.float64)
    if share.ndim != 3 or not share.size or not np.isfinite(share).all() or share.min() < 0:
        raise InputError(f"shares: plan {index}: wanted finite values of at least 0, [layer, expert, gpu]")
    total = share.sum(axis=2)
    if np.abs(total - 1).max() > 1e-6:
        layer, expert = np.unravel_index(np.abs(total - 1).argmax(), total.shape)
        raise InputError(
            f"shares: plan {index}, layer {layer}, expert {expert}: the shares of its GPUs add up to "
            f"{total[layer, expert]:.6g}; wanted 1"
        )
    return share


def _check_all(name: str, values: Sequence[Floats], shape: tuple[int, ...]) -> None:
    for index, value in enumerate(values):
        if value.shape != shape:
            raise InputError(f"{name} {index} has shape {value.shape}; wanted {shape} as the others have")
        if not np.isfinite(value).all() or value.min(initial=0.0) < 0:
            raise InputError(f"{name} {index}: every value must be finite and at least 0")
