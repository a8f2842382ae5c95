"""The all-to-alls of one model's pass, on all cores: no layer's depends on another's, only when they start does."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from engine.network import Network
from engine.plan import SendOrder
from engine.result import Stop
from engine.simulate.flows import EXACT_SENDS, Flows, all_to_all
from engine.simulate.work import Work

POLL = 0.05
"""Seconds between two questions whether to stop."""
AHEAD = 2
"""All-to-alls for each core that are simulated before they are asked for; at 1024 GPUs the flows of one take 40 MB."""


def exchanges(
    work: Work, order: SendOrder, network: Network, layers: Sequence[int], stop: Stop
) -> Iterator[tuple[Flows, Flows]]:
    """Dispatch and combine of each of these layers, in turn. Once `stop` answers True the rest is simulated in a hurry (see
    `all_to_all`), what is at work included; raises StoppedError for a sequential order of that size."""
    mirrored = order.mode == "concurrent" and network.measured is None and _is_symmetric(network)
    hurry = np.zeros(1, dtype=bool)

    def of_layer(layer: int) -> tuple[Flows, Flows]:
        there, back = work.dispatch[layer], work.combine[layer]
        schedules = (None, None) if order.mode == "concurrent" else (order.dispatch[layer], order.combine[layer])
        dispatch = all_to_all(order.mode, schedules[0], there, work.carrying(network, "dispatch", layer), hurry)
        if mirrored and np.array_equal(there.T, back):
            return dispatch, dispatch.mirrored()
        return dispatch, all_to_all(order.mode, schedules[1], back, work.carrying(network, "combine", layer), hurry)

    if network.gpus * (network.gpus - 1) <= EXACT_SENDS:  # a thread would cost more than it saves
        yield from map(of_layer, layers)
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def awaited(future: Future[tuple[Flows, Flows]]) -> tuple[Flows, Flows]:
        while True:
            hurry[:] = stop()  # also where whoever logs the sends is slower than the simulation
            if wait([future], POLL).done:
                return future.result()

    with ThreadPoolExecutor(cores) as threads:
        begun: deque[Future[tuple[Flows, Flows]]] = deque()
        for layer in layers:
            begun.append(threads.submit(of_layer, layer))
            if len(begun) > AHEAD * cores:
                yield awaited(begun.popleft())
        while begun:
            yield awaited(begun.popleft())


def _is_symmetric(network: Network) -> bool:
    """Whether an all-to-all turned round takes the same time, send by send."""
    start_up = np.where(network.linked, network.link_latency[:, None], network.latency)
    return np.array_equal(network.send, network.receive) and np.array_equal(start_up, start_up.T)
