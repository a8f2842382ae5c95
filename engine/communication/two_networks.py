"""Phased orders on clusters whose nodes have links of their own: the links and the fabric are two networks that work at
the same time, so each gets its own exact order and the two run side by side."""

from collections.abc import Callable

import numpy as np

from engine.network import Network
from engine.plan import Schedule
from engine.result import Result

COLUMNS = "src", "dst", "bytes", "phase"
"""The columns of a schedule that have a row for every send."""

Kernel = Callable[[np.ndarray, np.ndarray, np.ndarray], Result[Schedule]]
"""Traffic, send and receive bandwidths to a phased order, such as `order` with its mode given."""


def order_on(network: Network, traffic: np.ndarray, kernel: Kernel) -> tuple[Schedule, list[Result[Schedule]]]:
    """The order of one all-to-all (float64[src, dst] bytes), and the kernel's results for the networks in use.

    Without links this is the kernel's own schedule.
    """
    results = results_on(network, traffic, kernel)
    return results[0].solution if len(results) == 1 else _side_by_side(
        *(result.solution for result in results)
    ), results


def results_on(network: Network, traffic: np.ndarray, kernel: Kernel) -> list[Result[Schedule]]:
    """The kernel's results for the networks in use: the fabric, and the links where anything is sent over them."""
    linked = network.linked & ~np.eye(network.gpus, dtype=bool)
    over_link = np.where(linked, traffic, 0.0)
    fabric = kernel(np.where(linked, 0.0, traffic), network.send, network.receive)
    if not over_link.any():
        return [fabric]
    # GPUs without links have no traffic here; the kernel still wants a positive rate for them.
    rate = np.where(network.link > 0, network.link, 1.0)
    return [fabric, kernel(over_link, rate, rate)]


def _side_by_side(first: Schedule, second: Schedule) -> Schedule:
    """Two schedules as one, cut wherever a phase of either ends; bytes divide in proportion to time."""
    if first.phases == second.phases == 1:  # nothing waits for anything: a cut would only cost a start-up
        columns = {name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in COLUMNS}
        return Schedule(duration=np.maximum(first.duration, second.duration), **columns)
    cuts = np.unique(np.concatenate([[0.0], np.cumsum(first.duration), np.cumsum(second.duration)]))
    # Ends that differ only by round-off would make empty phases.
    cuts = cuts[np.r_[True, np.diff(cuts) > 1e-12 * cuts[-1]]]
    length, middle = np.diff(cuts), (cuts[1:] + cuts[:-1]) / 2
    columns: dict[str, list[np.ndarray]] = {name: [] for name in COLUMNS}
    for schedule in (first, second):
        # The phase that each piece of time lies in; pieces of a phase stand together.
        own = np.searchsorted(np.cumsum(schedule.duration), middle)
        phase = schedule.phase
        begin, pieces = np.searchsorted(own, phase), np.bincount(own, minlength=schedule.phases + 1)[phase]
        send = np.repeat(np.arange(len(phase)), pieces)
        piece = begin[send] + np.arange(len(send)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        share = length[piece] / schedule.duration[phase[send]]
        columns["src"].append(schedule.src[send])
        columns["dst"].append(schedule.dst[send])
        columns["bytes"].append(schedule.bytes[send] * share)
        columns["phase"].append(piece)
    both = {name: np.concatenate(parts) for name, parts in columns.items()}
    order = np.argsort(both["phase"], kind="stable")
    return Schedule(duration=length, **{name: column[order] for name, column in both.items()})
