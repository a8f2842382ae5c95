"""What all GPUs wait for: the steps of a forward pass, and in each the GPU that ends last."""

import numpy as np
import pandas as pd

from engine.timeline import NETWORK_KINDS, Timeline

STEP = ["model", "layer", "kind"]


def last_of_steps(events: pd.DataFrame) -> pd.DataFrame:
    """The event that ends last in every step (a kind in a layer of a model), by its end; `seconds` is how much later that is
    than the end of the step before, so that they add up to the whole. events: as of a `Timeline`."""
    last = events.loc[events.groupby(STEP, observed=True)["end"].idxmax()].sort_values("end")
    begin = events["start"].min() if len(events) else 0.0
    return last.assign(seconds=np.diff(last["end"].to_numpy(), prepend=begin))


def waited_for(src: np.ndarray, dst: np.ndarray, length: np.ndarray, last: tuple[int, int]) -> int:
    """The GPU that all others wait for in an all-to-all that ends with a send of the pair `last`: the end whose sends, or
    receipts, lasted longer, all lengths added (a port that others queue for or share); the sender where both lasted alike.

    src, dst: int64[send]; length: float64[send] seconds
    """
    # A link has two directions, so what a GPU sends and what it receives count apart.
    sent, received = length[src == last[0]].sum(), length[dst == last[1]].sum()
    return int(last[1] if received > sent else last[0])


def waits(timeline: Timeline) -> pd.DataFrame:
    """One row a step of a forward pass: `model`, `layer`, `kind`, `gpu` (which all others wait for) and `seconds`, which add
    up to the timeline's total. Of a send that ends last, see `waited_for`; bundles have that GPU first."""
    events = timeline.events
    last = last_of_steps(events)
    gpu = last["resource"].to_numpy(copy=True)
    networked = events[events["kind"].isin(NETWORK_KINDS)]
    steps = dict(iter(networked.groupby(STEP, observed=True)))
    for row, event in enumerate(last.itertuples()):
        if event.peer < 0:
            continue
        step = steps[event.model, event.layer, event.kind]
        src, dst, start, end = (step[name].to_numpy() for name in ("resource", "peer", "start", "end"))
        gpu[row] = waited_for(src, dst, end - start, (event.resource, event.peer))
    return last.assign(gpu=gpu)[[*STEP, "gpu", "seconds"]].reset_index(drop=True)
