"""The stages of a two-tier order as a pipeline of steps, in which ports and links work side by side.

Stage s balances over the links of its senders in step s, crosses the fabric in step s + 1 and is spread over the links of its
receivers in step s + 2. Traffic inside a domain goes over links that would idle, as early as it can. A link counts at the rate
that it reaches with sends to all other GPUs of its domain, a port at the rate of as many sends as cross it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.communication.relays import Domains, Relays, counted
from engine.network import Network, off_diagonal
from engine.plan import Schedule
from engine.plan.plan import replay

if TYPE_CHECKING:
    import pandas as pd

BALANCE, CROSS, SPREAD = 0, 1, 2
"""The step of a stage's hops, counted from its first one."""


@dataclass(frozen=True, eq=False)
class Steps:
    """A two-tier order on its network.

    stage, pair: int64[send]
    part: float64[send], the part of a pair of domains' bytes that goes in a stage
    ports: float64[2, step, domain] seconds that the ports of a domain need to send and to receive, without latency
    links: float64[step, domain] seconds that the busiest link of a domain needs, without latency
    local: float64[step, domain], the part of a domain's own traffic that goes in a step
    """

    network: Network
    domains: Domains
    relays: Relays
    traffic: np.ndarray
    stage: np.ndarray
    pair: np.ndarray
    part: np.ndarray
    ports: np.ndarray
    links: np.ndarray
    local: np.ndarray

    @classmethod
    def of(cls, schedule: Schedule, traffic: np.ndarray, network: Network) -> "Steps":
        """The steps of a schedule between domains, each named by its first GPU. traffic: float64[src, dst] bytes, diagonal
        ignored, which may be other traffic than the schedule was made for (see `replay`)."""
        traffic = off_diagonal(traffic)
        domains = Domains.of(network)
        relays = Relays.of(traffic, domains)
        between = domains.between(traffic)
        named = np.zeros_like(traffic)
        named[np.ix_(domains.first, domains.first)] = between
        src, dst, size, phase = replay(schedule, named)
        source, target = domains.of_gpu[src], domains.of_gpu[dst]
        number = np.zeros(between.shape, dtype=np.int64)
        number[relays.source, relays.target] = np.arange(len(relays.source))
        pair, stage = number[source, target], np.unique(phase, return_inverse=True)[1]
        part = size / between[source, target]
        crosses = relays.across > 0
        crossing = np.array([crosses.sum(axis=axis).max(axis=1, initial=1) for axis in (2, 1)])[:, pair]
        # Every port of a domain has its share, so all need as long, and the sends of all its pairs in a stage meet.
        stages, count = int(stage.max(initial=-1)) + 1, len(domains.first)
        ports = np.zeros((2, stages + SPREAD if stages else 1, count))
        for way, (domain, rate) in enumerate(((source, domains.send), (target, domains.receive))):
            moved, sends = (
                np.bincount(stage * count + domain, column, stages * count).reshape(stages, count)
                for column in (size, crossing[way])
            )
            ports[way, CROSS : CROSS + stages] = moved / (rate * network.reached(False, sends.astype(np.int64)))
        # Local traffic fills the time in which links would idle, from the first step on; a rest makes the last step longer.
        relayed = _relay_seconds(network, domains, relays, stage, pair, part)
        within = np.where(domains.of_gpu[:, None] == domains.of_gpu, traffic, 0.0)
        busiest = np.maximum(within.sum(axis=0), within.sum(axis=1))
        seconds = np.divide(busiest, _link_rate(network), out=np.zeros_like(busiest), where=network.link > 0)
        needed = np.zeros(count)
        np.maximum.at(needed, domains.of_gpu, seconds)
        idle = np.maximum(relayed.max(axis=1, initial=0.0), ports.max(axis=(0, 2), initial=0.0))[:, None] - relayed
        idle[-1] += (needed - idle.sum(axis=0)).max(initial=0.0)
        done = np.minimum(np.cumsum(idle, axis=0), needed)
        done[-1] = needed
        filled = np.diff(done, axis=0, prepend=0.0)
        local = np.divide(filled, needed, out=np.zeros_like(filled), where=needed > 0)
        return cls(network, domains, relays, traffic, stage, pair, part, ports, relayed + filled, local)

    @property
    def seconds(self) -> np.ndarray:
        """float64[step] seconds of its busiest port or link, latency left out."""
        return np.maximum(self.ports.max(axis=0), self.links).max(axis=1, initial=0.0)

    def sends(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step, src, dst (int64[send] each) and bytes (float64[send]) of all that goes over a port or a link in a step."""
        ends = self.domains.members[self.relays.source], self.domains.members[self.relays.target]
        columns = [self._local()]
        for offset, matrix, src, dst in (
            (BALANCE, self.relays.balance, ends[0], ends[0]),
            (CROSS, self.relays.rails, ends[0], ends[1]),
            (SPREAD, self.relays.spread, ends[1], ends[1]),
        ):
            size = matrix[self.pair] * self.part[:, None, None]
            send, i, j = np.nonzero(size)
            pair = self.pair[send]
            columns.append((self.stage[send] + offset, src[pair, i], dst[pair, j], size[send, i, j]))
        step, src, dst, size = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.argsort(step, kind="stable")
        return step[order], src[order], dst[order], size[order]

    def hops(self) -> "pd.DataFrame":
        """The rows of `sends` split by owner: columns step, src, dst, bytes, and origin and target, the GPUs that the bytes
        come from and are for."""
        import pandas as pd

        relays, local = self.relays, self._local()
        rows = [(*local, *local[1:3])]
        source, target = self.domains.members[relays.source], self.domains.members[relays.target]
        # The places of origin, port out, port in and target: of the many paths only those in use
        pair, i, a = np.nonzero(relays.before)
        path, b = np.nonzero(relays.across[pair, a])
        pair, i, a = pair[path], i[path], a[path]
        path, j = np.nonzero(relays.traffic[pair, i])
        pair, i, a, b = pair[path], i[path], a[path], b[path]
        size = relays.traffic[pair, i, j] * relays.before[pair, i, a] * relays.across[pair, a, b]
        way = (source[pair, i], source[pair, a], target[pair, b], target[pair, j])
        # Each path once for every send of its pair
        by_pair, sends_of_pair = np.argsort(self.pair, kind="stable"), np.bincount(self.pair, minlength=len(source))
        path = np.repeat(np.arange(len(pair)), sends_of_pair[pair])
        send = by_pair[(np.cumsum(sends_of_pair) - sends_of_pair)[pair[path]] + counted(sends_of_pair[pair])]
        moved = size[path] * self.part[send]
        for offset in (BALANCE, CROSS, SPREAD):
            here, there = way[offset][path], way[offset + 1][path]
            hop = here != there
            row = (self.stage[send] + offset, here, there, moved, way[0][path], way[3][path])
            rows.append(tuple(column[hop] for column in row))
        names = ("step", "src", "dst", "bytes", "origin", "target")
        return pd.DataFrame({name: np.concatenate(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)})

    def _local(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The columns of `sends` for the traffic inside domains."""
        of_gpu = self.domains.of_gpu
        src, dst = np.nonzero(np.where(of_gpu[:, None] == of_gpu, self.traffic, 0.0))
        size = self.local[:, of_gpu[src]] * self.traffic[src, dst]
        step, send = np.nonzero(size)
        return step, src[send], dst[send], size[step, send]


def _link_rate(network: Network) -> np.ndarray:
    """float64[gpu] bytes/s of a link that serves all other GPUs of its domain."""
    return network.link * network.reached(True, network.linked.sum(axis=1) - 1)


def _relay_seconds(
    network: Network, domains: Domains, relays: Relays, stage: np.ndarray, pair: np.ndarray, part: np.ndarray
) -> np.ndarray:
    """float64[step, domain]: seconds of the busiest link, of balancing and spreading."""
    stages, gpus = int(stage.max(initial=-1)) + 1, network.gpus
    steps = stages + SPREAD if stages else 1
    busiest = np.zeros((steps, gpus + 1))
    balance, spread = relays.balance, relays.spread
    for axis in (2, 1):
        moved = np.zeros(steps * (gpus + 1))
        for offset, matrix, domain in ((BALANCE, balance, relays.source), (SPREAD, spread, relays.target)):
            size = matrix.sum(axis=axis)[pair] * part[:, None]
            where = (stage[:, None] + offset) * (gpus + 1) + domains.members[domain[pair]]
            moved += np.bincount(where.ravel(), size.ravel(), len(moved))
        np.maximum(busiest, moved.reshape(steps, gpus + 1), out=busiest)
    link = np.append(_link_rate(network), 0.0)
    seconds = np.divide(busiest, link, out=np.zeros_like(busiest), where=link > 0)
    return seconds[:, domains.members].max(axis=2, initial=0.0)
