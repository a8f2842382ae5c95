"""When sends that share ports max-min fairly have ended at the latest, compiled (numba): a bound that needs no levels."""

import numpy as np
from numba import njit

from engine.simulate.fair_share import DONE, Sends, rate_at


@njit(cache=True, nogil=True)
def latest_end(sends: Sends, capacity: np.ndarray, reached: np.ndarray, window: float) -> float:
    """Seconds at which sends that all start at 0 have ended at the latest, however wide the windows of `run`. Arguments as
    there; of the sends nothing is written.

    Max-min fairness gives a send at least the lower of the equal shares of its two ports. Here it gets just that, of ports that
    divide by all sends that have not ended here, which are at least those that have not ended there, and more sends never reach
    more together: so none ends earlier here.
    """
    source, sink = sends.source.astype(np.uint32), sends.sink.astype(np.uint32)  # no compiled look for negative indices
    size, latency = sends.size, sends.latency
    total, ports = len(size), len(capacity)
    users, active, left = np.zeros(ports, dtype=np.int64), np.arange(total).astype(np.uint32), size.copy()
    for send in range(total):
        users[source[send]] += 1
        users[sink[send]] += 1
    share = np.empty(ports)
    now, last, moving = 0.0, 0.0, total
    while moving:
        for port in range(ports):
            share[port] = rate_at(port, users[port], capacity, reached) / max(users[port], 1)
        earliest, next_arrival = np.inf, np.inf
        for place in range(moving):
            send = active[place]
            if latency[send] > now:
                next_arrival = min(next_arrival, latency[send])
            else:
                earliest = min(earliest, now + left[send] / min(share[source[send]], share[sink[send]]))
        until = min(max(earliest, now + window), next_arrival)
        still = 0
        for place in range(moving):
            send = active[place]
            active[still] = send
            still += 1
            if latency[send] > now:
                continue
            rate = min(share[source[send]], share[sink[send]])
            ends = now + left[send] / rate
            left[send] -= rate * (until - now)
            if ends <= until or left[send] <= DONE * size[send]:
                last = max(last, ends)
                users[source[send]] -= 1
                users[sink[send]] -= 1
                still -= 1
        now, moving = until, still
    return last
