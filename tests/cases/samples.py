"""Problems on the shipped recordings and plain clusters, and recordings made to order."""

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
from engine.training import usual_step
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
    """Equal GPUs in equal nodes with links of `link` bytes/s."""
    cards = (make_gpu(send=send),) * size
    nodes = [Node(name=f"node-{index}", gpus=cards, link_bandwidth=link) for index in range(gpus // size)]
    return Cluster(name="nodes", nodes=tuple(nodes))


def with_room_for(slots: list[int], layers: int, experts: int) -> Cluster:
    """GPUs with memory for just so many experts of every layer of `make_model(layers, experts)`."""
    size = make_model(layers, experts).bytes_per_expert * layers / MEMORY_SHARE
    return cluster_of(*(make_gpu(memory=(count + 0.5) * size) for count in slots))


def every_row(experts: int, gpus: int) -> list[tuple[int, ...]]:
    """All ways to put equally many experts of one layer on every GPU."""
    slots = [gpu for gpu in range(gpus) for _ in range(experts // gpus)]
    return sorted(set(permutations(slots)))


def every_placement(layers: int, experts: int, gpus: int) -> np.ndarray:
    """int64[placement, layer, expert]: all of them."""
    return np.array(list(product(every_row(experts, gpus), repeat=layers)))


def training_problem() -> Problem:
    """A small step on four GPUs, routed as recorded."""
    problem = sample_problem("alpha-code", cluster=cluster_of(*[make_gpu(send=1e9, flops=1e12, memory=1e11)] * 4))
    step = usual_step(problem.model, 4).model_copy(update={"batch": 4, "routing": "recorded"})
    return make_problem(problem.workload, problem.cluster, problem.model, problem.cost, step=step)


def mixed_problem(trace_seed: int = 0) -> Problem:
    """Skewed routing of two layers on two nodes with links and four GPUs of several rates."""
    rng = np.random.default_rng(trace_seed)
    chosen = np.minimum(rng.geometric(0.3, (200, 2, 1)) - 1, 7).astype(np.int16)
    cards = [make_gpu(kind, rate) for kind, rate in enumerate((1e6, 8e5, 5e5, 4e5))]
    nodes = tuple(Node(name=f"node-{at}", gpus=tuple(cards[at : at + 2]), link_bandwidth=3e6) for at in (0, 2))
    cluster = Cluster(name="mixed", nodes=nodes)
    return Problem(RoutingTrace("skewed", chosen, 8), cluster, make_model(2, 8), Datasheet())


def small_problem() -> Problem:
    """Six experts on three GPUs of different rates, two layers."""
    rng = np.random.default_rng(1)
    cards = tuple(make_gpu(kind, send) for kind, send in enumerate((1e6, 7.5e5, 5e5)))
    cluster = Cluster(name="small", nodes=(Node(name="all", gpus=cards),))
    trace = RoutingTrace("small", rng.integers(0, 6, (60, 2, 1)).astype(np.int16), 6)
    return Problem(trace, cluster, make_model(2, 6), Datasheet())


def big_problem() -> Problem:
    """Enough work to be stopped in the middle of: mixed GPUs with several experts each."""
    layers, gpus, experts, tokens = 6, 16, 64, 4000
    rng = np.random.default_rng(0)
    rates = rng.choice([1e6, 8e5, 5e5, 4e5], gpus)
    cards = tuple(make_gpu(kind, rate, flops=2e3 * rate) for kind, rate in enumerate(rates))
    cluster = Cluster(name="large", nodes=(Node(name="all", gpus=cards),))
    popularity = rng.dirichlet(np.full(experts, 0.5), layers)
    keys = rng.gumbel(size=(tokens, layers, experts)) + np.log(popularity + 1e-9)
    trace = RoutingTrace("large", np.argsort(-keys, axis=2)[:, :, :2].astype(np.int16), experts)
    return Problem(trace, cluster, make_model(layers, experts, 2), Datasheet())


def with_memory(problem: Problem, slots: list[int]) -> Problem:
    """The same problem with GPUs that have memory for just so many experts of every layer."""
    per_slot = problem.model.bytes_per_expert * problem.workload.layers / MEMORY_SHARE
    memory, nodes = iter((count + 0.5) * per_slot for count in slots), []
    for node in problem.cluster.nodes:
        cards = tuple(gpu.model_copy(update={"memory": next(memory)}) for gpu in node.gpus)
        nodes.append(node.model_copy(update={"gpus": cards}))
    cluster = problem.cluster.model_copy(update={"nodes": tuple(nodes)})
    return Problem(problem.workload, cluster, problem.model, problem.cost)
