"""A cluster drawn from measured pairs of GPUs: the ports to the fabric and links of nodes that meet the pairs best.

Between GPUs of different nodes a pair has the slower of its two ports (see `engine.network`). The fit is in the logarithms:
twice as fast and half as fast are as wrong.

The rates that ports reach with several sends are fitted to measurements in which different numbers of them met. An all-to-all
over r ranks has r - 1 sends at every port, a send to one peer while another one sends to it has one. For each number of
sends a line is fitted, start-up + seconds a byte · bytes that leave a GPU, and the slopes are compared: the time of an
all-to-all to post its sends one after another is in its start-up, and no loss of rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from engine import catalogue
from engine.catalogue.links import FABRIC_LATENCY, type_of
from engine.cluster import MOST_GPUS, Cluster, Efficiency, Gpu, Node, Point
from engine.costs.alpha_beta import fit_line
from engine.costs.measured import CollectiveTimes
from engine.errors import InputError
from engine.network import Network
from engine.schema import Amounts, Frozen, Integers
from engine.units import bandwidth, share

MAX_SWEEPS = 200

CLOSE = 0.1
"""Relative difference up to which a drawn pair meets its measurement."""
SMALL = 2.0**20
"""Bytes: start-ups show only below."""
PORTS = "ports to the fabric that no pair tells are those of the host's other GPUs, or else the catalogue's"
SENDING = ("all_to_all", "send_receive")


def fit_bottlenecks(rate: np.ndarray) -> np.ndarray:
    """float64[gpu]: rates of ports such that the slower one of each pair comes nearest to the measured rate.

    A GPU without any measured pair gets NaN. The sum of squared differences of logarithms is brought down from three starts, by
    turns exactly for each GPU alone and exactly for all in the order that they have, until nothing moves: a local minimum, and
    an exact answer (difference 0) if there is one, as the fastest rate of every GPU is one of the starts. The fastest port is
    drawn at the fastest rate that it was seen at.

    rate: float64[gpu, gpu] bytes/s, symmetric, NaN: the pair was not measured; the diagonal does not count
    """
    measured = np.isfinite(rate) & ~np.eye(len(rate), dtype=bool)
    known = measured.any(axis=1)
    fitted = np.full(len(rate), np.nan)
    if not known.any():
        return fitted
    logs = np.where(measured, np.log(np.where(measured, rate, 1.0)), np.nan)[np.ix_(known, known)]
    starts = np.nanmax(logs, axis=1), np.nanmedian(logs, axis=1), _slowest_first(logs)
    settled = [_settle(logs, start) for start in starts]
    fitted[known] = np.exp(min(settled, key=lambda ports: _misfit(logs, ports)))
    return fitted


def _slowest_first(logs: np.ndarray) -> np.ndarray:
    """float64[gpu]: each port the mean of its pairs with those that are faster, the slowest of all that are left in turn."""
    ports, left = np.nanmean(logs, axis=1), np.arange(len(logs))
    while len(left) > 1:
        pairs = logs[np.ix_(left, left)]
        count = np.isfinite(pairs).sum(axis=1)
        if not count.any():
            break
        mean = np.where(count, np.nansum(pairs, axis=1) / np.maximum(count, 1), np.inf)
        slowest = int(np.argmin(mean))
        ports[left[slowest]] = mean[slowest]
        left = np.delete(left, slowest)
    return ports


def _settle(logs: np.ndarray, ports: np.ndarray) -> np.ndarray:
    best = _misfit(logs, ports)
    for _ in range(MAX_SWEEPS):
        ports = min(ports, _all_in_order(logs, ports), key=lambda tried: _misfit(logs, tried))
        for gpu in range(len(ports)):
            peers = np.flatnonzero(np.isfinite(logs[gpu]))
            ports[gpu] = _best_port(logs[gpu, peers], ports[peers])
        before, best = best, _misfit(logs, ports)
        if before - best <= 1e-12 * max(before, 1.0):
            break
    return ports


def _all_in_order(logs: np.ndarray, ports: np.ndarray) -> np.ndarray:
    """The best ports (float64[gpu]) of those that rise in the order of these: then each pair has the port of the earlier one,
    and an isotonic regression of the means remains."""
    from scipy.optimize import isotonic_regression

    order = np.argsort(ports, kind="stable")
    later = np.triu(logs[np.ix_(order, order)], 1)
    later[np.tril_indices(len(order))] = np.nan
    count = np.isfinite(later).sum(axis=1)
    mean = np.where(count, np.nansum(later, axis=1) / np.maximum(count, 1), ports[order])
    fitted = np.empty(len(order))  # without a later pair a port is only in order
    fitted[order] = isotonic_regression(mean, weights=np.maximum(count, 1e-9)).x
    return fitted


def _best_port(wanted: np.ndarray, peers: np.ndarray) -> float:
    """The x with the least sum of (min(x, peers) - wanted)², the largest such x.

    wanted, peers: float64[peer]
    """
    order = np.argsort(peers)
    wanted, peers = wanted[order], peers[order]
    count = np.arange(len(peers), 0, -1)
    after = np.cumsum(wanted[::-1])[::-1]  # of the peers from here on, which are faster than x in this stretch
    squares = np.cumsum((wanted**2)[::-1])[::-1]
    slower = np.concatenate([[0.0], np.cumsum((peers - wanted) ** 2)[:-1]])
    below = np.concatenate([[-np.inf], peers[:-1]])
    x = np.clip(after / count, below, peers)
    cost = slower + squares - 2 * x * after + count * x**2
    ties = np.flatnonzero(cost <= cost.min() + 1e-15)
    return float(x[ties[-1]])


def _misfit(logs: np.ndarray, ports: np.ndarray) -> float:
    return float(np.nansum((np.minimum(ports[:, None], ports) - logs) ** 2))


@dataclass(frozen=True, eq=False)
class PairTimes:
    """Pairs of GPUs, each measured alone.

    hosts, buses: of every GPU, in the order of the cluster: GPUs of a host together
    devices: of every GPU, by the names of the driver
    rate: float64[gpu, gpu] bytes/s both ways at once, symmetric, NaN: not known
    start_up: float64[gpu, gpu] seconds both ways at once, symmetric, NaN: not known
    smallest: bytes of the smallest send
    """

    hosts: tuple[str, ...]
    buses: tuple[str, ...]
    devices: tuple[str, ...]
    rate: np.ndarray
    start_up: np.ndarray
    smallest: float


@dataclass(frozen=True, eq=False)
class PairCluster:
    """A cluster with the measured pairs of its GPUs.

    cluster: drawn from the pairs, or compared with them
    names: `host [bus]` of its GPUs
    measured, drawn: float64[gpu, gpu] bytes/s of one pair alone, NaN: not measured, and on the diagonal
    notes: assumptions, and findings that a cluster cannot hold
    """

    cluster: Cluster
    names: tuple[str, ...]
    measured: np.ndarray
    drawn: np.ndarray
    notes: tuple[str, ...]

    @property
    def difference(self) -> np.ndarray:
        """float64[gpu, gpu]: drawn / measured - 1."""
        return self.drawn / self.measured - 1

    @property
    def is_partial(self) -> bool:
        """True if some pairs were not measured."""
        return bool(np.isnan(self.measured[~np.eye(len(self.measured), dtype=bool)]).any())

    @property
    def mean_error(self) -> float:
        return float(np.nanmean(np.abs(self.difference)))

    def worst(self, most: int) -> list[tuple[int, int]]:
        """The pairs that the cluster meets worst, worst first."""
        first, second = np.nonzero(np.triu(np.isfinite(self.measured), 1))
        order = np.argsort(-np.abs(np.log(self.drawn[first, second] / self.measured[first, second])), kind="stable")
        return [(int(first[pair]), int(second[pair])) for pair in order[:most]]


def draw_pairs(pairs: PairTimes, name: str, default_type: str | None = None) -> PairCluster:
    """The cluster that meets the pairs best. A node's links have the geometric mean of its pairs; start-ups are medians. Raises
    InputError for GPUs of no known type.

    default_type: the catalogue's type of GPUs that it does not know by their names
    """
    gpus = [_gpu(device, host, default_type) for device, host in zip(pairs.devices, pairs.hosts, strict=True)]
    place = np.array(pairs.hosts)
    across = np.where(place[:, None] == place, np.nan, pairs.rate)
    ports = fit_bottlenecks(across)
    nodes = []
    for host in dict.fromkeys(pairs.hosts):
        own = np.flatnonzero(place == host)
        cards, pair = [gpus[gpu] for gpu in own], np.ix_(own, own)
        nodes.append(_node(host, cards, ports[own], pairs.rate[pair], pairs.start_up[pair]))
    notes = _about_links(pairs, nodes)
    if not np.isfinite(ports).all():
        unmet = "some GPUs were measured with none" if np.isfinite(ports).any() else "no GPU was measured with one"
        notes.append(f"{unmet} of another host: {PORTS}")
    latency = _median(pairs.start_up[np.isfinite(across)], FABRIC_LATENCY)
    cluster = Cluster.from_dict({"name": name[:80], "nodes": nodes, "latency": latency}, "the cluster of these pairs")
    fitted = held_against(cluster, pairs.hosts, pairs.buses, pairs.rate)
    return replace(fitted, notes=(*notes, *_about(fitted, pairs.smallest)))


def held_against(cluster: Cluster, hosts: Sequence[str], buses: Sequence[str], measured: np.ndarray) -> PairCluster:
    """The rates of a cluster for pairs of its GPUs with the measured ones, without notes.

    hosts, buses: of every GPU of the cluster
    measured: float64[gpu, gpu] bytes/s, NaN: the pair was not measured
    """
    names = tuple(f"{host} [{bus}]" for host, bus in zip(hosts, buses, strict=True))
    shown = np.isfinite(measured)
    network = Network.of(cluster)
    fabric = np.minimum(network.send[:, None], network.receive)
    links = np.minimum(network.link[:, None], network.link)
    return PairCluster(cluster, names, measured, np.where(shown, np.where(network.linked, links, fabric), np.nan), ())


def node_name(host: str) -> str:
    """Name of the node of a host."""
    return host[:60]


def _median(seconds: np.ndarray, otherwise: float) -> float:
    known = seconds[np.isfinite(seconds)]
    return float(np.median(known)) if len(known) else otherwise


def _gpu(device: str, host: str, default_type: str | None) -> Gpu:
    kind = type_of(device) or default_type
    if kind is None:
        raise InputError(
            f"'{device}' of {host} is not in the catalogue; choose the nearest type ({', '.join(catalogue.gpu_types())})"
        )
    return catalogue.gpu(kind)


def _node(host: str, gpus: list[Gpu], ports: np.ndarray, rate: np.ndarray, start_up: np.ndarray) -> Node:
    """ports: float64[gpu], fitted rates, NaN where no pair tells. rate, start_up: float64[gpu, gpu] of the node's own pairs."""
    if np.isfinite(ports).any():
        rates = np.where(np.isfinite(ports), ports, np.nanmedian(ports)).tolist()
        both = [{"send_bandwidth": port, "receive_bandwidth": port} for port in rates]
        gpus = [gpu.model_copy(update=own) for gpu, own in zip(gpus, both, strict=True)]
    links = {}
    if len(known := rate[np.isfinite(rate)]):
        links = {"link_bandwidth": float(np.exp(np.log(known).mean())), "link_latency": _median(start_up, 0.0)}
    return Node(name=node_name(host), gpus=tuple(gpus), **links)


def _about_links(pairs: PairTimes, nodes: list[Node]) -> list[str]:
    """Findings that the links of nodes do not hold: one note for all nodes alike, on the one of which it is most true."""
    unlinked: list[str] = []
    uneven: dict[str, tuple[float, float, float]] = {}
    place = np.array(pairs.hosts)
    for host, node in zip(dict.fromkeys(pairs.hosts), nodes, strict=True):
        own = np.flatnonzero(place == host)
        known = pairs.rate[np.ix_(own, own)]
        if node.link_bandwidth is None:
            unlinked += [host] * (len(own) > 1)
        elif np.nanmax(known) > (1 + CLOSE) * np.nanmin(known):
            uneven[host] = float(np.nanmin(known)), float(np.nanmax(known)), node.link_bandwidth
    notes = []
    if uneven:
        host, (low, high, link) = max(uneven.items(), key=lambda item: item[1][1] / item[1][0])
        notes.append(
            f"the pairs of {host} reach {bandwidth(low)} to {bandwidth(high)}, but a node has one number, {bandwidth(link)}: "
            f"differences between its pairs are lost{_as_in(len(uneven) - 1)}"
        )
    if unlinked:
        notes.append(
            f"the GPUs of {unlinked[0]} were not measured with one another: drawn without links of their own"
            f"{_as_in(len(unlinked) - 1)}"
        )
    return notes


def _as_in(more: int) -> str:
    return f", as in {more} more node{'s' * (more > 1)}" if more else ""


def _about(fitted: PairCluster, smallest: float) -> list[str]:
    """Notes for a reader of the cluster."""
    gpus = len(fitted.names)
    count, all_pairs = int(np.isfinite(fitted.measured).sum()) // 2, gpus * (gpus - 1) // 2
    notes = []
    off = int((np.triu(np.abs(fitted.difference)) > CLOSE).sum())
    if off:
        first, second = fitted.worst(1)[0]
        measured, drawn = (bandwidth(matrix[first, second]) for matrix in (fitted.measured, fitted.drawn))
        notes.append(
            f"a cluster has a rate for each port, not for each pair: {off} of {count} pairs are more than {share(CLOSE)} off, "
            f"the worst {fitted.names[first]} with {fitted.names[second]}, measured {measured} and drawn {drawn}"
        )
    if count < all_pairs:
        notes.append(f"{all_pairs - count} of the {all_pairs} pairs of these {gpus} GPUs were not measured")
    notes.append("a test times both ways of a pair together, so ports are drawn as fast to send as to receive")
    notes.append(
        "one pair ran at a time: what ports reach when several sends meet is measured by an all-to-all of all GPUs and added "
        "with 'efficiency --measured'"
    )
    if smallest > SMALL:
        notes.append(
            f"latencies are read off sizes of {smallest / 2**20:.0f} MiB and more, where they hardly show; measure from "
            "1 KiB up"
        )
    notes.append("only GPUs that a pair names are drawn, with the catalogue's memory and computing rates")
    return notes


@dataclass(frozen=True)
class PortFit:
    """The fitted shares and start-up.

    points: of `Efficiency`
    start_up: seconds of the fewest sends
    error: mean relative error of the lines on their own times
    """

    points: tuple[Point, ...]
    start_up: float
    error: float


def fit_ports(collectives: Sequence[CollectiveTimes], rate: float | None) -> PortFit:
    """Shares of a port's rate and a start-up that these measurements tell, with no share above 1 or above that of fewer sends.
    Measurements other than all-to-alls and sends to one peer are left out. Raises InputError if none is left, or if all for
    some number of sends are of one size.

    rate: bytes/s of the port; None: the rate that the fewest sends reach
    """
    from scipy.optimize import isotonic_regression

    sends, size, seconds = _measured(collectives)
    if not len(sends):
        raise InputError("what ports reach needs times of all-to-alls or of sends to one peer")
    met, counts = np.unique(sends, return_counts=True)
    lines = [fit_line(size[sends == number], seconds[sends == number]) for number in met]
    rising = isotonic_regression([line.beta for line in lines], weights=counts).x
    whole = rising[0] if rate is None else 1 / rate
    if not whole:
        raise InputError("times that do not grow with the bytes say nothing of ports; measure larger sizes")
    points = tuple(zip(met.tolist(), (whole / np.maximum(rising, whole)).tolist(), strict=True))
    error = float(np.average([line.error for line in lines], weights=counts))
    return PortFit(points, lines[0].alpha, error)


def _measured(collectives: Sequence[CollectiveTimes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sends that meet at a port (int64[time]), bytes that leave a GPU (float64[time]) and seconds (float64[time])."""
    rows = []
    for times in collectives:
        if times.operation in SENDING:
            met, parts = (times.ranks - 1, times.ranks) if times.operation == "all_to_all" else (1, 1)
            rows += [(met, size * met / parts, seconds) for size, seconds in times.points]
    sends, size, seconds = np.array(rows).reshape(-1, 3).T
    return sends.astype(np.int64), size, seconds


def with_fit(
    cluster: Cluster, collectives: Sequence[CollectiveTimes], ports: str | None, origin: str, relative: bool = False
) -> tuple[Cluster, PortFit]:
    """The cluster with the shares that its ports reach and the start-up of a send, as these measurements tell.

    Raises InputError as `fit_ports`, if the choice of ports is missing, and if there are no such ports.

    ports: "fabric" or "links", those that the measurements went over; None: the only ones that the cluster has. The others stay
        as they are
    relative: True if other ports were measured, slower or faster ones, so that only the shares of the rate of the fewest sends
        count, and no start-up
    """
    network = Network.of(cluster.model_copy(update={"efficiency": None}))
    linked = network.linked.sum(axis=1) > 1
    if ports is None:
        ports = "links" if linked.all() and len(cluster.nodes) == 1 else "fabric"
        if ports == "fabric" and linked.any():
            raise InputError(f"{cluster.name} has links and a fabric; say which of them was measured: fabric or links")
    if ports == "links" and not linked.any():
        raise InputError(
            f"the GPUs of {cluster.name} have no links of their own to one another; what was measured is the fabric"
        )
    rate = network.link[linked].min() if ports == "links" else min(network.send.min(), network.receive.min())
    fit = fit_ports(collectives, None if relative else float(rate))
    before = cluster.efficiency or Efficiency()
    efficiency = {"fabric": before.fabric, "links": before.links, ports: fit.points, "origin": origin[:300]}
    fitted = cluster.model_copy(update={"efficiency": Efficiency.from_dict(efficiency, "the fit")})
    if relative:
        return fitted, fit
    if ports == "fabric":
        return fitted.model_copy(update={"latency": fit.start_up}), fit
    nodes = [node.model_copy(update={"link_latency": fit.start_up} if node.link_bandwidth else {}) for node in cluster.nodes]
    return fitted.model_copy(update={"nodes": tuple(nodes)}), fit


class MeasuredPairs(Frozen):
    """Pairs that ran alone, a row each.

    hosts, buses: of every GPU, GPUs of a host together
    first, second: both GPUs of a pair by their place there
    rate: bytes/s both ways at once
    """

    hosts: tuple[str, ...] = Field(min_length=2, max_length=MOST_GPUS)
    buses: tuple[str, ...]
    first: Integers
    second: Integers
    rate: Amounts

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.buses) != len(self.hosts):
            raise ValueError("every GPU needs a host and a bus")
        if not len(self.first) == len(self.second) == len(self.rate):
            raise ValueError("every pair needs two GPUs and a rate")
        if not len(self.rate):
            raise ValueError("no pair was measured")
        if not ((self.first >= 0).all() and (self.first < self.second).all() and self.second.max() < len(self.hosts)):
            raise ValueError(f"a pair is two of the {len(self.hosts)} GPUs, the first of them first")
        if not (self.rate > 0).all():
            raise ValueError("a rate is above 0")
        return self

    @classmethod
    def of(cls, pairs: PairTimes) -> Self:
        """Their rates, without start-ups."""
        first, second = np.nonzero(np.triu(np.isfinite(pairs.rate), 1))
        return cls(hosts=pairs.hosts, buses=pairs.buses, first=first, second=second, rate=pairs.rate[first, second])

    def beside(self, cluster: Cluster) -> PairCluster | None:
        """The pairs with the cluster's rates for them; None for a cluster with other nodes than these hosts with as many GPUs
        each, in this order."""
        if [node.name for node in cluster.nodes for _ in node.gpus] != [node_name(host) for host in self.hosts]:
            return None
        measured = np.full((len(self.hosts), len(self.hosts)), np.nan)
        measured[self.first, self.second] = measured[self.second, self.first] = self.rate
        return held_against(cluster, self.hosts, self.buses, measured)
