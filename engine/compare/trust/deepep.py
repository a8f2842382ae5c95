"""DeepEP's dispatch and combine on H100 nodes: fitted to every second number of tokens, held against the others."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from engine.catalogue import gpu, node_types
from engine.cluster import Cluster, Node
from engine.communication.travel import Stops, rows_of_tokens
from engine.compare.trust.prediction import Prediction
from engine.costs.deepep import (
    EXPERTS,
    FOLDER,
    GPUS_PER_NODE,
    LINK,
    PORT,
    Exchange,
    benchmark_experts,
    benchmark_model,
    measured_exchanges,
    reaching,
    travel_of,
)
from engine.network import Network
from engine.plan import TravelUnit
from engine.simulate.flows import all_to_all

KERNELS: dict[TravelUnit, str] = {"node": "DeepEP normal", "copies": "DeepEP low latency"}
OLD_PRICING = "every copy at full rate"
HARDWARE = "H100, H200"
"""The package has the same rows for both: one measurement."""
NODE_TYPE = "hgx-h100"
"""A fabric of the catalogue, which has its start-ups."""
OTHER_COUNTS = "from other numbers of nodes"
LEFT_OUT = 4
"""A number of nodes that others are asked about."""


def deepep() -> Iterator[Prediction]:
    """The predictions of all series that were measured; of the normal kernels also four nodes from two and eight, and those of
    a simulation that knows neither the travel of tokens nor the rates of ports. Raises InputError when the tables are
    absent."""
    series = measured_exchanges(FOLDER)
    half = tuple(
        exchange._replace(tokens=exchange.tokens[::2], size=exchange.size[::2], seconds=exchange.seconds[::2])
        for exchange in series
    )
    for exchange in series:
        name = f"{KERNELS[exchange.unit]} {exchange.kind}"
        yield from _predicted(name, exchange, half)
        if exchange.unit != "node":
            continue
        if exchange.nodes == LEFT_OUT:
            others = tuple(other for other in series if other.nodes != LEFT_OUT)
            yield from _predicted(f"{name}, {OTHER_COUNTS}", exchange, others, fitted=False)
        yield from _predicted(f"{name}, {OLD_PRICING}", exchange, None, fitted=False)


def _predicted(of: str, exchange: Exchange, series: tuple[Exchange, ...] | None, fitted: bool = True) -> Iterator[Prediction]:
    """Every point of an exchange, by the simulation on ports that reach the rates of `series`; None: their whole rate, and
    every copy of a token goes on its own. fitted: True if every second point is in the series."""
    network, unit = Network.of(_cluster(exchange.nodes)), exchange.unit if series else "copies"
    row_bytes = travel_of(unit).row_bytes(benchmark_model())[("dispatch", "combine").index(exchange.kind)]
    a_token = _rows_a_token(exchange.nodes, unit, exchange.unit) * row_bytes
    for place, (tokens, seconds) in enumerate(zip(exchange.tokens, exchange.seconds, strict=True)):
        traffic = (a_token.T if exchange.kind == "combine" else a_token) * tokens
        at_work = reaching(network, series).carrying(exchange.kind, unit, traffic) if series else network
        predicted = all_to_all("concurrent", None, traffic, at_work).seconds
        setting = f"{tokens:,.0f} tokens per GPU"
        yield Prediction(of, HARDWARE, exchange.nodes, setting, float(seconds), predicted, fitted and place % 2 == 0)


def _cluster(nodes: int) -> Cluster:
    """The machines that were measured, with the catalogue's start-ups."""
    kind = node_types()[NODE_TYPE]
    card = gpu("H100").model_copy(update={"send_bandwidth": PORT, "receive_bandwidth": PORT})
    machine = Node(name="node", gpus=(card,) * GPUS_PER_NODE, link_bandwidth=LINK, link_latency=kind.link_latency)
    machines = tuple(machine.model_copy(update={"name": f"node {place}"}) for place in range(nodes))
    return Cluster(name="DeepEP's benchmark", nodes=machines, latency=kind.fabric_latency)


@lru_cache
def _rows_a_token(nodes: int, unit: TravelUnit, routed: TravelUnit) -> np.ndarray:
    """float64[src, dst]: rows for every token that a GPU holds, in the mean. routed: the benchmark that has these tokens."""
    chosen, gpus = benchmark_experts(nodes, routed), nodes * GPUS_PER_NODE
    hosts = chosen // (EXPERTS // gpus)
    stops = Stops(np.repeat(np.arange(nodes), GPUS_PER_NODE))
    rows = rows_of_tokens(hosts, np.zeros(len(hosts)), stops, unit)
    # All GPUs are alike, so the first one's tokens cause the traffic of each one's, evenly over the pairs that stand alike:
    # a GPU and itself, GPUs of a node, those of equal places in two nodes, others.
    same_node = stops.of_gpu[:, None] == stops.of_gpu[None, :]
    equal_place = stops.entry[np.arange(stops.gpus)][:, stops.of_gpu] == np.arange(stops.gpus)
    kind = np.where(np.eye(stops.gpus, dtype=bool), 0, np.where(same_node, 1, np.where(equal_place, 2, 3)))
    rows_of_kind = np.bincount(kind.ravel(), rows.ravel(), 4) * gpus
    mean = rows_of_kind / np.maximum(np.bincount(kind.ravel(), minlength=4), 1)
    return mean[kind] / len(hosts)
