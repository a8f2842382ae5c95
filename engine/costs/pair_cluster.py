"""A cluster drawn from measured pairs of GPUs: ports to the fabric and links of nodes as they meet the pairs best."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine import catalogue
from engine.catalogue.nvidia import FABRIC_LATENCY, type_of
from engine.cluster import Cluster, Gpu, Node
from engine.costs.pair_fit import fit_bottlenecks
from engine.errors import InputError
from engine.network import Network
from engine.units import bandwidth, share

CLOSE = 0.1
"""Relative difference up to which a drawn pair meets its measurement."""
SMALL = 2.0**20
"""Bytes: start-ups show only below."""
PORTS = "ports to the fabric that no pair tells are those of the host's other GPUs, or else the catalogue's"


@dataclass(frozen=True, eq=False)
class PairTimes:
    """Pairs of GPUs, each measured alone.

    hosts, buses, devices: of every GPU, in the order of the cluster: GPUs of a host together; devices: as the driver names them
    rate, start_up: float64[gpu, gpu] bytes/s and seconds of both ways at once, symmetric, NaN where not known
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
    """cluster: drawn from pairs, or held against them; names: `host [bus]` of its GPUs; measured, drawn: float64[gpu, gpu]
    bytes/s of one pair alone, NaN where it was not measured and on the diagonal; notes: what was assumed, and what a cluster
    cannot hold."""

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
        """Whether some pairs were not measured."""
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
        cards = [_with_port(gpus[gpu], ports[own], ports[gpu]) for gpu in own]
        nodes.append(_node(host, cards, pairs.rate[np.ix_(own, own)], pairs.start_up[np.ix_(own, own)]))
    notes = _about_links(pairs, nodes)
    if not np.isfinite(ports).all():
        unmet = "some GPUs were measured with none" if np.isfinite(ports).any() else "no GPU was measured with one"
        notes.append(f"{unmet} of another host: {PORTS}")
    latency = _median(pairs.start_up[np.isfinite(across)], FABRIC_LATENCY)
    cluster = Cluster.from_dict({"name": name[:80], "nodes": nodes, "latency": latency}, "the cluster of these pairs")
    fitted = held_against(cluster, pairs.hosts, pairs.buses, pairs.rate)
    return replace(fitted, notes=(*notes, *_about(fitted, pairs.smallest)))


def held_against(cluster: Cluster, hosts: Sequence[str], buses: Sequence[str], measured: np.ndarray) -> PairCluster:
    """What a cluster has for pairs of its GPUs, beside what was measured, without notes.

    hosts, buses: of every GPU of the cluster; measured: float64[gpu, gpu] bytes/s, NaN where a pair was not measured
    """
    names = tuple(f"{host} [{bus}]" for host, bus in zip(hosts, buses, strict=True))
    return PairCluster(cluster, names, measured, _own_rates(cluster, np.isfinite(measured)), ())


def node_name(host: str) -> str:
    """What the node of a host is called."""
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


def _with_port(gpu: Gpu, of_node: np.ndarray, port: float) -> Gpu:
    """of_node: float64[gpu], fitted rates of the node's ports, NaN where no pair tells."""
    if not np.isfinite(of_node).any():
        return gpu
    rate = float(port if np.isfinite(port) else np.nanmedian(of_node))
    return gpu.model_copy(update={"send_bandwidth": rate, "receive_bandwidth": rate})


def _node(host: str, gpus: list[Gpu], rate: np.ndarray, start_up: np.ndarray) -> Node:
    """rate, start_up: float64[gpu, gpu] of the node's own pairs."""
    known = rate[np.isfinite(rate)]
    if not len(known):
        return Node(name=node_name(host), gpus=tuple(gpus))
    link = float(np.exp(np.log(known).mean()))
    return Node(name=node_name(host), gpus=tuple(gpus), link_bandwidth=link, link_latency=_median(start_up, 0.0))


def _about_links(pairs: PairTimes, nodes: list[Node]) -> list[str]:
    """What the links of nodes do not hold: one note for all nodes alike, on the one of which it is most true."""
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


def _own_rates(cluster: Cluster, shown: np.ndarray) -> np.ndarray:
    """float64[gpu, gpu] bytes/s of one send between two GPUs as drawn, NaN where not shown."""
    network = Network.of(cluster)
    fabric = np.minimum(network.send[:, None], network.receive)
    links = np.minimum(network.link[:, None], network.link)
    return np.where(shown, np.where(network.linked, links, fabric), np.nan)


def _about(fitted: PairCluster, smallest: float) -> list[str]:
    """What a reader of the cluster has to know."""
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
