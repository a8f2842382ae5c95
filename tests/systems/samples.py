"""Problems that tests of several systems share: the shipped recordings on plain clusters, and walks made to order."""

from functools import cache
from itertools import permutations, product
from pathlib import Path

import numpy as np

from engine.cluster import Cluster, Node
from engine.costs import Datasheet
from engine.formats import read_workload
from engine.model import MoEModel
from engine.plan import Plan
from engine.problem import MEMORY_SHARE, Problem, make_problem
from engine.systems import baseline_for, usual_plan
from engine.workload import RoutingTrace, Workload
from tests.strategies import cluster_of, make_gpu, make_model

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
LAYERS = 4
EIGHT = cluster_of(*[make_gpu(send=1e9, flops=1e12, memory_bandwidth=1e11)] * 8)


@cache
def sample(name: str, tokens: int | None = None) -> RoutingTrace:
    """A shipped recording such as `alpha-code`, or the first layers of as many of its tokens, evenly spaced."""
    trace = read_workload(SAMPLES / "tiny-moe" / f"{name}.npz")
    if tokens is None:
        return trace
    part = trace.spread(tokens)
    return RoutingTrace(name, part.experts[:, :LAYERS], part.num_experts, part.sequence)


@cache
def sample_model(name: str = "alpha", layers: int = LAYERS) -> MoEModel:
    """The model of the recordings that begin with `name`, or the first layers of it."""
    model = MoEModel.from_json((SAMPLES / f"tiny-moe-{name}.json").read_text(encoding="utf-8"), name)
    return model.model_copy(update={"layers": layers})


def sample_problem(*names: str, tokens: int | None = 2000, cluster: Cluster = EIGHT) -> Problem:
    """The first of the recordings, the others to be served as well."""
    first, *others = (sample(name, tokens) for name in names)
    model = sample_model(names[0].split("-")[0], first.layers)
    return make_problem(first, cluster, model, Datasheet(), others=tuple(others))


def linear_plan(problem: Problem) -> Plan:
    """Contiguous blocks and a plain all-to-all, without a claim."""
    return usual_plan(baseline_for(problem), problem)[0]


def problem_of(workload: Workload, cluster: Cluster, **more) -> Problem:
    """A recording of a narrow model."""
    model = make_model(workload.layers, workload.num_experts, workload.k or 1)
    return make_problem(workload, cluster, model, Datasheet(), **more)


def walks(rows: np.ndarray, experts: int, name: str = "walks") -> RoutingTrace:
    """Top-1 paths int[token, layer]."""
    return RoutingTrace(name, np.asarray(rows, dtype=np.int16)[:, :, None], experts)


def chained(seed: int, tokens: int, layers: int, experts: int, strength: float, name: str = "chained") -> RoutingTrace:
    """Paths along one random permutation a layer with probability `strength`, else anywhere."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, experts, tokens)]
    for _ in range(layers - 1):
        step = rng.permutation(experts)
        rows.append(np.where(rng.random(tokens) < strength, step[rows[-1]], rng.integers(0, experts, tokens)))
    return walks(np.array(rows).T, experts, name)


def in_nodes(gpus: int, size: int, link: float | None, send: float = 1e6) -> Cluster:
    """Equal GPUs in equal nodes, whose links carry `link` bytes/s."""
    nodes = tuple(
        Node(name=f"node-{index}", gpus=(make_gpu(send=send),) * size, link_bandwidth=link)
        for index in range(gpus // size)
    )
    return Cluster(name="nodes", nodes=nodes)


def with_room_for(slots: list[int], layers: int, experts: int) -> Cluster:
    """GPUs whose memory holds just so many experts of every layer of `make_model(layers, experts)`."""
    size = make_model(layers, experts).bytes_per_expert * layers / MEMORY_SHARE
    return cluster_of(*(make_gpu(memory=(count + 0.5) * size) for count in slots))


def every_row(experts: int, gpus: int) -> list[tuple[int, ...]]:
    """All ways to put equally many experts of one layer on every GPU."""
    slots = [gpu for gpu in range(gpus) for _ in range(experts // gpus)]
    return sorted(set(permutations(slots)))


def every_placement(layers: int, experts: int, gpus: int) -> np.ndarray:
    """int64[placement, layer, expert]: all of them."""
    return np.array(list(product(every_row(experts, gpus), repeat=layers)))
