"""What all GPUs wait for: the steps of a forward pass, and in each the GPU that ends last."""

import numpy as np
import pandas as pd

from engine.network import Network
from engine.timeline import NETWORK_KINDS, Timeline

STEP = ["model", "layer", "kind"]


def last_of_steps(events: pd.DataFrame) -> pd.DataFrame:
    """The event that ends last in every step (a kind in a layer of a model), by its end; `seconds` is how much later that is
    than the end of the step before, so that they add up to the whole. events: as of a `Timeline`."""
    last = events.loc[events.groupby(STEP, observed=True)["end"].idxmax()].sort_values("end")
    begin = events["start"].min() if len(events) else 0.0
    return last.assign(seconds=np.diff(last["end"].to_numpy(), prepend=begin))


def waited_for(src: np.ndarray, dst: np.ndarray, size: np.ndarray, last: tuple[int, int], network: Network) -> int:
    """The GPU that all others wait for in an all-to-all that ends with a send of the pair `last`: the end whose port needs
    longer for all that goes through it at its full rate; the sender where both need as long.

    How long sends last says nothing of it: a fast port that sends to many slow ones at once is as long at work as they are.

    src, dst: int64[send]; size: float64[send] bytes
    """
    out, into = network.ports(src, dst)
    leaves, arrives = (int(port[0]) for port in network.ports(np.array(last[:1]), np.array(last[1:])))
    sent = size[out == leaves].sum() / network.capacity[leaves]
    received = size[into == arrives].sum() / network.capacity[arrives]
    return int(last[1] if received > sent else last[0])


def waits(timeline: Timeline, network: Network) -> pd.DataFrame:
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
        src, dst, size = (step[name].to_numpy() for name in ("resource", "peer", "bytes"))
        gpu[row] = waited_for(src, dst, size, (event.resource, event.peer), network)
    return last.assign(gpu=gpu)[[*STEP, "gpu", "seconds"]].reset_index(drop=True)
