"""Small random clusters, workloads and problems that tests of several packages draw from.

Sizes are chosen so that computation, transfers and start-up times weigh about the same: a mistake in any of them shows.
"""

from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from engine.cluster import Cluster, Efficiency, Gpu, Node
from engine.costs import AlphaBeta, CostModel, CostProfile, Datasheet, Line
from engine.errors import InputError
from engine.model import MoEModel
from engine.network import Network
from engine.plan import Placement, Travel
from engine.problem import Problem, make_problem
from engine.workload import RoutingTrace

RATES = (1e6, 8e5, 5e5, 4e5)
SPEEDS = (4e9, 2e9, 1e9)
LATENCIES = (0.0, 2e-4)

seeds = st.integers(0, 2**32 - 1)

NEEDS_ROWS = {"coactivation"}
"""Systems that refuse to plan where every copy of a token travels on its own; `tests.systems.test_coactivation` has them."""


def make_gpu(
    kind: int = 0,
    send: float = 1e6,
    receive: float | None = None,
    flops: float = 2e9,
    memory: float = 1e9,
    memory_bandwidth: float = 5e8,
) -> Gpu:
    """A slow GPU called `type-kind` with times far above round-off; it receives as fast as it sends."""
    return Gpu(
        type=f"type-{kind}",
        memory=memory,
        memory_bandwidth=memory_bandwidth,
        flops_fp32=flops / 2,
        flops_fp16=flops,
        send_bandwidth=send,
        receive_bandwidth=send if receive is None else receive,
    )


def cluster_of(*cards, **options) -> Cluster:
    """A cluster of one node."""
    return Cluster(name="test", nodes=(Node(name="node", gpus=cards),), **options)


def make_model(layers: int, experts: int, k: int = 1, **sizes) -> MoEModel:
    """A narrow model with 16-bit numbers; its one dense layer comes first."""
    sizes = {"d_model": 64, "d_ff": 96, "batch": 1} | sizes
    return MoEModel(name="narrow", layers=layers + 1, dense_layers=(0,), experts=experts, experts_per_token=k, **sizes)


@st.composite
def efficiencies(draw) -> Efficiency:
    """Shares that a port reaches with more and more sends, of the fabric and of the links."""
    kinds = []
    for _ in range(2):
        sends = sorted(draw(st.sets(st.integers(1, 8), min_size=1, max_size=3)))
        share = sorted(draw(st.sampled_from((1.0, 0.9, 0.7, 0.5, 0.2))) for _ in sends)
        kinds.append(tuple(zip(sends, share[::-1], strict=True)))
    return Efficiency(fabric=kinds[0], links=kinds[1])


@st.composite
def clusters(
    draw, least: int = 2, most: int = 5, linked: bool | None = None, symmetric: bool | None = None, contended: bool = True
) -> Cluster:
    """Equal or mixed GPUs in nodes with or without links, with or without start-up times.

    linked: True if nodes may have links; None: drawn.
    symmetric: True if all GPUs receive as fast as they send.
    contended: True if sends that meet may reach less than a port's rate.
    """
    count = draw(st.integers(least, most))
    mixed = draw(st.booleans())
    symmetric = draw(st.booleans()) if symmetric is None else symmetric
    kinds = []
    for kind in range(3 if mixed else 1):
        send = draw(st.sampled_from(RATES))
        receive = send if symmetric else draw(st.sampled_from(RATES))
        kinds.append(make_gpu(kind, send, receive, draw(st.sampled_from(SPEEDS))))
    gpus = [kinds[draw(st.integers(0, len(kinds) - 1))] for _ in range(count)]
    linked = draw(st.booleans()) if linked is None else linked
    cuts = [0, *sorted(draw(st.sets(st.integers(1, count - 1))) if count > 1 else []), count]
    nodes = tuple(
        Node(
            name=f"node-{index}",
            gpus=tuple(gpus[first:last]),
            link_bandwidth=draw(st.sampled_from((None, 3e5, 5e6))) if linked else None,
            link_latency=draw(st.sampled_from((0.0, 5e-5, 4e-4))) if linked else 0.0,
        )
        for index, (first, last) in enumerate(pairwise(cuts))
    )
    efficiency = draw(st.none() | efficiencies()) if contended else None
    return Cluster(name="drawn", nodes=nodes, latency=draw(st.sampled_from(LATENCIES)), efficiency=efficiency)


def planned_or_skipped(plan: Callable[[], Any]) -> Any:
    """The answer of `plan()`; a drawn problem that the system refuses with a reason is not a case."""
    try:
        return plan()
    except InputError:
        assume(False)


@st.composite
def traces(draw, layers: int, experts: int, ranks: int, k: int | None = None) -> RoutingTrace:
    """A skewed routing of up to 40 tokens from recorded ranks, some choices missing."""
    k = draw(st.integers(1, min(2, experts))) if k is None else k
    rng = np.random.default_rng(draw(seeds))
    tokens = draw(st.integers(1, 40))
    popularity = rng.dirichlet(np.full(experts, draw(st.sampled_from((0.3, 5.0)))), layers)
    keys = rng.gumbel(size=(tokens, layers, experts)) + np.log(popularity + 1e-9)
    chosen = np.argsort(-keys, axis=2)[:, :, :k].astype(np.int16)
    if draw(st.booleans()):
        chosen[rng.random(chosen.shape) < 0.1] = -1
    return RoutingTrace("drawn", chosen, experts, source_rank=rng.integers(0, ranks, tokens).astype(np.int32))


@st.composite
def cost_models(draw, cluster: Cluster) -> CostModel:
    """Datasheet or fitted costs; the fitted ones sometimes from ranks that shared processors."""
    if draw(st.booleans()):
        return Datasheet(launch=draw(st.sampled_from((0.0, 1e-5))))
    gemm, memory = Line(alpha=1e-5, beta=1.5e-9), Line(alpha=0, beta=3e-9)
    types = sorted({gpu.type for gpu in cluster.gpus})
    return AlphaBeta(
        CostProfile(
            name="drawn",
            origin="nowhere",
            gemm={kind: gemm.model_copy(update={"beta": gemm.beta * (1 + place)}) for place, kind in enumerate(types)},
            memory=dict.fromkeys(types, memory),
            network=draw(st.sampled_from((None, Line(alpha=1e-4, beta=1e-6)))),
            ranks=len(cluster.gpus),
            cores=draw(st.sampled_from((1, 2, len(cluster.gpus)))),
        )
    )


@st.composite
def problems(
    draw, layers: tuple[int, int] = (1, 3), experts: tuple[int, int] | None = None, travelling: bool = False, **cluster_options
) -> Problem:
    """A whole planning problem. experts: fewest and most experts, by default from 1 to twice as many as GPUs; travelling:
    tokens with up to four experts may travel in any way, not only copy by copy."""
    cluster = draw(clusters(**cluster_options))
    gpus = len(cluster.gpus)
    fewest, most = experts or (1, 2 * gpus)
    count, depth = draw(st.integers(fewest, most)), draw(st.integers(*layers))
    k = draw(st.integers(1, min(4, count))) if travelling else None
    trace = draw(traces(depth, count, gpus, k))
    travel = draw(travels) if travelling else None
    model, cost = make_model(depth, count, trace.k), draw(cost_models(cluster))
    return make_problem(trace, cluster, model, cost, travel=travel)


RULES = (None, "nearest-static", "nearest-dynamic", "fixed")
travels = st.builds(
    lambda way, dispatch, combine: Travel(unit=way[0], replicas=way[1], dispatch=dispatch, combine=combine),
    way=st.sampled_from([*product(("copies", "gpu", "node"), RULES), ("gpu", "fewest"), ("node", "fewest")]),
    dispatch=st.sampled_from((None, "fp8")),
    combine=st.sampled_from((None, "bf16", "fp32")),
)


@st.composite
def placements(draw, layers: int, experts: int, gpus: int, replicas: bool = True) -> Placement:
    """Every expert on a random GPU, some on several, some twice on the same one."""
    rng = np.random.default_rng(draw(seeds))
    rows = []
    for _ in range(layers):
        row = [[] for _ in range(gpus)]
        for expert in range(experts):
            for gpu in rng.integers(0, gpus, 1 + (rng.integers(0, 3) if replicas else 0)):
                row[gpu].append(expert)
        rows.append(row)
    return Placement(experts=experts, experts_of_gpu=rows, model_layers=tuple(range(1, layers + 1)))


@st.composite
def networks(draw, most: int = 6, **options) -> Network:
    """The network of a random cluster."""
    return Network.of(draw(clusters(1, most, **options)))


@st.composite
def traffics(draw, gpus: int) -> np.ndarray:
    """float64[src, dst] bytes with entries on the diagonal, some pairs without traffic."""
    rng = np.random.default_rng(draw(seeds))
    busy = rng.random((gpus, gpus)) < draw(st.sampled_from((0.3, 0.7, 1.0)))
    if draw(st.booleans()):
        return rng.integers(0, 5, (gpus, gpus)) * 200.0 * busy
    return rng.exponential(500.0, (gpus, gpus)) * busy
