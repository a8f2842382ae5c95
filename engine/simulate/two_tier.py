"""A two-tier order as it runs: relays over the links of nodes beside the ports between them, step by step."""

import numpy as np

from engine.communication.steps import Steps
from engine.network import Network
from engine.plan import Schedule


def relayed_sends(schedule: Schedule, traffic: np.ndarray, network: Network) -> tuple[np.ndarray, ...]:
    """The columns of `Flows`: src, dst (int64[send]), bytes, start and end (float64[send], seconds).

    A step begins when the one before has ended everywhere. In it the sends of a node over its links go at the constant rates
    that its busiest link allows, those between two nodes at the rate of the slower one, and each kind has its own start-up.
    What one GPU sends another over links is a single send, from the first step that has some of it to the end of the last
    one: in nodes of eight a stage has several times as many relays as sends over ports. traffic: float64[src, dst] bytes,
    diagonal ignored.
    """
    steps = Steps.of(schedule, traffic, network)
    step, src, dst, size = steps.sends()
    domain = steps.domains.of_gpu
    over_links = domain[src] == domain[dst]
    over_ports = np.maximum(steps.ports[0, step, domain[src]], steps.ports[1, step, domain[dst]])
    took = network.start_up(src, dst) + np.where(over_links, steps.links[step, domain[src]], over_ports)
    length = np.zeros(len(steps.links))
    np.maximum.at(length, step, took)
    start = (np.cumsum(length) - length)[step]
    end = start + took

    pair, send = np.unique(src[over_links] * network.gpus + dst[over_links], return_inverse=True)
    first, last = np.full(len(pair), np.inf), np.zeros(len(pair))
    np.minimum.at(first, send, start[over_links])
    np.maximum.at(last, send, end[over_links])
    whole = (pair // network.gpus, pair % network.gpus, np.bincount(send, size[over_links], len(pair)), first, last)
    columns = (src, dst, size, start, end)
    return tuple(np.append(column[~over_links], part) for column, part in zip(columns, whole, strict=True))
