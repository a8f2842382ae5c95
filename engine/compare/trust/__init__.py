"""All predictions that can be held against public measurements, on settings that were fitted and on those that were not."""

from collections.abc import Callable, Iterator
from functools import lru_cache

from engine.cluster import Cluster
from engine.compare.trust.collectives import nccl, nvlink_exchanges
from engine.compare.trust.deepep import KERNELS, OTHER_COUNTS, deepep
from engine.compare.trust.prediction import Prediction, Summary, summaries
from engine.compare.trust.serving import serving, skewed_experts
from engine.compare.trust.whole_steps import engine_steps
from engine.costs import Combined, CostModel, DeepEP
from engine.plan import TravelUnit

ENGINES = "steps of engines"
SECTIONS: dict[str, Callable[[], Iterator[Prediction]]] = {
    "DeepEP's dispatch and combine": deepep,
    "NCCL's collectives": nccl,
    "TensorRT-LLM's all-to-all": nvlink_exchanges,
    "experts under power laws": skewed_experts,
    "whole steps": serving,
    ENGINES: engine_steps,
}
"""The sections, by the predicted quantity."""


def predictions() -> Iterator[Prediction]:
    """The predictions of all sections. Raises InputError when the tables of measurements are absent."""
    for section in SECTIONS.values():
        yield from section()


def exchange_error(cost: CostModel, cluster: Cluster, unit: TravelUnit) -> Summary | None:
    """The errors of a source's exchanges, dispatch and combine together, on as many nodes as the cluster has: on measured sizes
    that were not fitted, or, where so many nodes were not measured, on a number of nodes that was left out of the fit.

    cost: also one for computation and another for the network
    unit: the destination that gets a row of a token, see `Travel`
    Returns None for a source other than DeepEP's tables, for more nodes than any measured, and for a unit without measurements.
    """
    network = cost.connection if isinstance(cost, Combined) else cost
    if not isinstance(network, DeepEP) or unit not in KERNELS or network.lacks_network(cluster):
        return None
    points = {kind: _exchanges(f"{KERNELS[unit]} {kind}") for kind in ("dispatch", "combine")}
    measured, nodes = {point.nodes for point in points["dispatch"]}, len(cluster.nodes)
    if nodes > max(measured):
        return None
    if nodes not in measured:
        points = {kind: _exchanges(f"{KERNELS[unit]} {kind}, {OTHER_COUNTS}") for kind in points}
    ours = [point for of in points.values() for point in of if nodes not in measured or point.nodes == nodes]
    return next(iter(summaries(point._replace(of=f"{KERNELS[unit]} exchanges") for point in ours)), None)


@lru_cache
def _exchanges(of: str) -> tuple[Prediction, ...]:
    return tuple(point for point in deepep() if point.of == of)
