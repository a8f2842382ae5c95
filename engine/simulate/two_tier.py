"""A two-tier order as it runs: relays over the links of nodes beside the ports between them, step by step."""

import numpy as np

from engine.communication.steps import Steps
from engine.network import Network
from engine.plan import Schedule


def relayed_sends(schedule: Schedule, traffic: np.ndarray, network: Network) -> tuple[np.ndarray, ...]:
    """The columns of `Flows`: src, dst (int64[send]), bytes, start and end (float64[send], seconds).

    A step begins when the one before has ended everywhere. In it the sends of a node over its links go at the constant rates
    that its busiest link allows, those between two nodes at the rate of the slower one, and each kind has its own start-up.
    traffic: float64[src, dst] bytes, diagonal ignored.
    """
    steps = Steps.of(schedule, traffic, network)
    step, src, dst, size = steps.sends()
    domain = steps.domains.of_gpu
    over_ports = np.maximum(steps.ports[0, step, domain[src]], steps.ports[1, step, domain[dst]])
    seconds = np.where(domain[src] == domain[dst], steps.links[step, domain[src]], over_ports)
    took = network.start_up(src, dst) + seconds
    length = np.zeros(len(steps.links))
    np.maximum.at(length, step, took)
    start = (np.cumsum(length) - length)[step]
    return src, dst, size, start, start + took
