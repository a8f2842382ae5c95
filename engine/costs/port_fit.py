"""What ports reach with several sends, fitted to measurements in which different numbers of them met.

An all-to-all over r ranks has r - 1 sends at every port, a send to one peer while another one sends to it has one. For each
number of sends a line is fitted, start-up + seconds a byte · bytes that leave a GPU, and the slopes are compared: what an
all-to-all takes to post its sends one after another is in its start-up, and no loss of rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.cluster import Cluster
from engine.costs.alpha_beta import fit_line
from engine.costs.measured import CollectiveTimes
from engine.efficiency import Efficiency, Point
from engine.errors import InputError
from engine.network import Network

SENDING = ("all_to_all", "send_receive")


@dataclass(frozen=True)
class PortFit:
    """points: of `Efficiency`; start_up: seconds of the fewest sends; error: mean relative error of the lines on their own
    times."""

    points: tuple[Point, ...]
    start_up: float
    error: float


def fit_ports(collectives: Sequence[CollectiveTimes], rate: float | None) -> PortFit:
    """Shares of a port's rate (bytes/s; None: of what the fewest sends reach) and a start-up that these measurements tell, with
    no share above 1 or above that of fewer sends. Others than all-to-alls and sends to one peer are
    left out. Raises InputError where nothing is left, or all of it for some number of sends is of one size."""
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
    rows = [
        (times.ranks - 1, size * (times.ranks - 1) / times.ranks, seconds)
        if times.operation == "all_to_all"
        else (1, size, seconds)
        for times in collectives
        if times.operation in SENDING
        for size, seconds in times.points
    ]
    sends, size, seconds = np.array(rows).reshape(-1, 3).T
    return sends.astype(np.int64), size, seconds


def with_fit(
    cluster: Cluster, collectives: Sequence[CollectiveTimes], ports: str | None, origin: str, relative: bool = False
) -> tuple[Cluster, PortFit]:
    """The cluster with what these measurements tell of its ports: what they reach, and the start-up of a send.

    ports: "fabric" or "links", those that the measurements went over; None: the only ones that the cluster has. What it says of
    the others stays. relative: other ports were measured, slower or faster ones, so that only the shares of what the fewest
    sends reached count, and no start-up. Raises InputError as `fit_ports`, where the choice is missing, and where there are no
    such ports.
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
    nodes = [
        node.model_copy(update={"link_latency": fit.start_up} if node.link_bandwidth else {}) for node in cluster.nodes
    ]
    return fitted.model_copy(update={"nodes": tuple(nodes)}), fit
