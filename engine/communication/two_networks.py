"""Phased orders on clusters whose nodes have links of their own: the links and the fabric are two networks that work at
the same time, so each gets its own exact order and the two run side by side."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pandas as pd

from engine.network import Network
from engine.plan import Schedule
from engine.result import Result

Kernel = Callable[[np.ndarray, np.ndarray, np.ndarray], Result[Schedule]]
"""Traffic, send and receive bandwidths to a phased order, such as `order` with its mode given."""


def order_on(network: Network, traffic: np.ndarray, kernel: Kernel) -> tuple[Schedule, list[Result[Schedule]]]:
    """The order of one all-to-all (float64[src, dst] bytes), and the kernel's results for the networks in use.

    Without links this is the kernel's own schedule.
    """
    linked = network.linked & ~np.eye(network.gpus, dtype=bool)
    over_link = np.where(linked, traffic, 0.0)
    fabric = kernel(np.where(linked, 0.0, traffic), network.send, network.receive)
    if not over_link.any():
        return fabric.solution, [fabric]
    # GPUs without links have no traffic here; the kernel still wants a positive rate for them.
    rate = np.where(network.link > 0, network.link, 1.0)
    links = kernel(over_link, rate, rate)
    return _side_by_side(fabric.solution, links.solution), [fabric, links]


def _side_by_side(first: Schedule, second: Schedule) -> Schedule:
    """Two schedules as one, cut wherever a phase of either ends; bytes divide in proportion to time."""
    if first.phases == second.phases == 1:  # nothing waits for anything: a cut would only cost a start-up
        columns = {name: getattr(first, name) + getattr(second, name) for name in ("src", "dst", "bytes", "phase")}
        return Schedule(duration=max(first.duration, second.duration), **columns)
    cuts = np.unique(np.concatenate([[0.0], np.cumsum(first.duration), np.cumsum(second.duration)]))
    # Ends that differ only by round-off would make empty phases.
    cuts = cuts[np.r_[True, np.diff(cuts) > 1e-12 * cuts[-1]]]
    parts = []
    for schedule in (first, second):
        sends = pd.DataFrame({name: getattr(schedule, name) for name in ("src", "dst", "bytes", "phase")})
        ends = np.cumsum(schedule.duration)
        for index, (begin, end) in enumerate(pairwise(cuts)):
            own = int(np.searchsorted(ends, (begin + end) / 2))
            here = sends[sends["phase"] == own]
            if len(here):
                share = (end - begin) / schedule.duration[own]
                parts.append(here.assign(bytes=here["bytes"] * share, phase=index))
    both = pd.concat(parts).sort_values("phase", kind="stable")
    return Schedule(duration=tuple(np.diff(cuts).tolist()), **{name: tuple(both[name].tolist()) for name in both})
