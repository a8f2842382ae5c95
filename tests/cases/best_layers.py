"""One layer for the search of `best`: drawn at random, and its placements."""

import itertools
from collections.abc import Iterator

import numpy as np

from engine.cluster import Cluster, Node
from engine.costs import Datasheet
from engine.placement.best import Task
from engine.plan import Placement, Plan, SendOrder, Travel
from engine.problem import Problem, make_problem
from engine.result import Provenance
from engine.systems.best_layers import LayersOf
from engine.workload import RoutingTrace
from tests.strategies import make_gpu, make_model, problems

GO_ON = np.zeros(1, dtype=bool)
"""The flag of a search that nobody ends."""
ONE_LAYER = problems(layers=(1, 1), travelling=True, contended=False)
COPIES, GPU, NODE = (Travel(unit=unit) for unit in ("copies", "gpu", "node"))
FEWEST = [Travel(unit=unit, replicas="fewest") for unit in ("gpu", "node")]


def plan_of(held: list, problem: Problem) -> Plan:
    """held: [layer][gpu], the experts there"""
    experts = problem.workload.num_experts
    placement = Placement(experts=experts, experts_of_gpu=held, model_layers=problem.model.moe_layers)
    order, origin = SendOrder(mode="concurrent"), Provenance(optimiser="test")
    return Plan(name="test", placement=placement, send_order=order, travel=problem.travel, provenance=origin)


def held_at_random(problem: Problem, spare: int, seed: int) -> list:
    """One layer with so many further copies, none twice on a GPU."""
    rng, experts, gpus = np.random.default_rng(seed), problem.workload.num_experts, len(problem.cluster.gpus)
    held = np.zeros((gpus, experts), dtype=bool)
    held[rng.integers(0, gpus, experts), np.arange(experts)] = True
    free = np.argwhere(~held)
    held[tuple(free[rng.permutation(len(free))[:spare]].T)] = True
    return [np.flatnonzero(row).tolist() for row in held]


def layer_of(problem: Problem, held: list, spare: int) -> tuple[LayersOf, Task]:
    """The first layer of a problem with any number of slots on a GPU, from a placement."""
    experts, gpus = problem.workload.num_experts, len(problem.cluster.gpus)
    layers = LayersOf(problem, problem.network, 1.0, np.full(gpus, experts), experts + spare)
    return layers, layers.task(0, plan_of([held], problem).placement)


def drawn(
    seed: int, travel: Travel, kinds: int = 3, gpus: int = 3, experts: int = 4, tokens: int = 30, links: bool = False
) -> Problem:
    """Skewed top-2 routing of one layer on GPUs of several rates."""
    rng = np.random.default_rng(seed)
    cards = [make_gpu(kind, send=(1e6, 8e5, 5e5)[kind], flops=(4e9, 1e9, 2e9)[kind]) for kind in rng.integers(0, kinds, gpus)]
    sizes = (2, gpus - 2) if links else (gpus,)
    parts = np.split(np.arange(gpus), np.cumsum(sizes)[:-1])
    nodes = tuple(
        Node(name=f"node-{at}", gpus=tuple(cards[gpu] for gpu in part), link_bandwidth=3e6 if links else None)
        for at, part in enumerate(parts)
    )
    keys = rng.gumbel(size=(tokens, 1, experts)) + np.log(rng.dirichlet(np.full(experts, 1.0)) + 1e-9)
    chosen = np.argsort(-keys, axis=2)[:, :, :2].astype(np.int16)
    trace = RoutingTrace("drawn", chosen, experts, source_rank=rng.integers(0, gpus, tokens).astype(np.int32))
    return make_problem(trace, Cluster(name="drawn", nodes=nodes), make_model(1, experts, 2), Datasheet(), travel=travel)


def every_held(experts: int, room: np.ndarray, slots: int) -> Iterator[list]:
    """All placements of one layer with so many copies at most."""
    gpus = range(len(room))
    homes = [subset for size in gpus for subset in itertools.combinations(gpus, size + 1) if size <= slots - experts]
    for row in itertools.product(homes, repeat=experts):
        held = [[expert for expert in range(experts) if gpu in row[expert]] for gpu in gpus]
        if sum(map(len, row)) <= slots and all(len(here) <= most for here, most in zip(held, room, strict=True)):
            yield held
