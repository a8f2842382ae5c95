"""Recordings cut into a half to plan on and a half to score on, and samples of a half.

Tokens of one text resemble each other, so where a recording names its sequences these stay whole.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engine.errors import InputError
from engine.workload import ExpertLoad, RoutingTrace, Workload


def halves(trace: RoutingTrace) -> tuple[RoutingTrace, RoutingTrace, str]:
    """(the half to plan on, the half to score on, "sequences" or "tokens"); tokens without any choice are left out.

    Every second sequence is held out where there are at least two, else the later tokens. Raises InputError for fewer than
    two tokens.
    """
    used = np.flatnonzero((trace.experts >= 0).any(axis=(1, 2)))
    if len(used) < 2:
        raise InputError(f"{trace.name}: {len(used)} tokens with a choice cannot be cut into two halves; record more")
    unit, held_out = "tokens", np.arange(len(used)) >= (len(used) + 1) // 2
    if trace.sequence is not None:
        number = np.unique(trace.sequence[used], return_inverse=True)[1]
        if number.max() > 0:
            unit, held_out = "sequences", number % 2 == 1
    return _cut(trace, used[~held_out], unit), _cut(trace, used[held_out], unit), unit


def by_time(recording: Workload) -> tuple[Workload, Workload] | None:
    """The earlier and the later half: of a routing log whole sequences in the order in which they were recorded, of loads the
    steps that they were kept by. None of other loads and of traffic, which have no order in time, and where a half has no
    choices."""
    match recording:
        case RoutingTrace():
            earlier, later = recording.halves()
        case ExpertLoad(by_step=steps) if steps is not None and len(steps) > 1:
            earlier, later = (
                replace(recording, load=half.sum(axis=0), by_step=half, by_source=None)
                for half in (steps[: (len(steps) + 1) // 2], steps[(len(steps) + 1) // 2 :])
            )
        case _:
            return None
    if not (earlier.load.any() and later.load.any()):
        return None
    return replace(earlier, name=f"{recording.name}, earlier half"), replace(
        later, name=f"{recording.name}, later half"
    )


def _cut(trace: RoutingTrace, tokens: NDArray[np.int64], unit: str) -> RoutingTrace:
    return replace(trace if unit == "sequences" else replace(trace, sequence=None), source_rank=None).part(tokens)


def sample(trace: RoutingTrace, tokens: int, seed: int) -> NDArray[np.int16]:
    """int16[token, layer, k]: so many tokens drawn at random, sequence by sequence where they are known."""
    rng = np.random.default_rng(seed)
    if trace.sequence is None:
        return trace.experts[rng.permutation(trace.tokens)[:tokens]]
    number = np.unique(trace.sequence, return_inverse=True)[1]
    turn = rng.permutation(number.max() + 1)
    return trace.experts[np.argsort(turn[number], kind="stable")[:tokens]]
