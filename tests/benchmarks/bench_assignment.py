"""Time and gap of assignments: the kernels, Aurora's whole models on up to 1024 GPUs, and two models a GPU.

`python -m tests.benchmarks.bench_assignment [kernels | whole-models | two-models …]`: all three unless some are named.
"""

import sys
import time

import numpy as np

from engine.cluster import Cluster, Node
from engine.compare.synthetic import Recipe, synthetic
from engine.costs import Datasheet
from engine.placement.assignment import AssignmentInstance, assign
from engine.placement.baselines import random_assignment, sorted_assignment
from engine.placement.colocation.heterogeneous import colocate_heterogeneous, decoupled
from engine.placement.colocation.pairs import colocate, pair_weight, random_colocation, sorted_colocation
from engine.placement.grouped_assignment import assign_groups
from engine.problem import Problem
from engine.result import Limits
from engine.simulate.colocated import ExpertSeconds, layer_weight
from engine.systems.aurora_exclusive import assign_layers, fixed_compute
from tests.oracles.placing import check_colocation, check_colocation_heterogeneous
from tests.strategies import make_gpu, make_model

SPEEDS = (1.0, 0.8, 0.5, 0.4)
EXPERT_SECONDS_PER_TOKEN, TOKENS_PER_SECOND = 2e-6, 1e6


def layer(experts: int, gpus: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens float64[gpu, expert] of skewed popularity that differs between sources, and four speeds float64[gpu]."""
    rng = np.random.default_rng(seed)
    popularity = rng.dirichlet(np.full(experts, 4.0))
    tokens = np.stack([rng.multinomial(8192, rng.dirichlet(200 * popularity)) for _ in range(gpus)]).astype(np.float64)
    return tokens, np.array(SPEEDS)[np.arange(gpus) * 4 // gpus]


def kernels() -> None:
    print(f"{'kernel':14} {'experts x GPUs':>14} {'seconds':>8} {'gap':>9} {'Thm 5.1':>8} {'random':>8}  status")
    cases = [(n, n) for n in (8, 64, 128, 512)] + [(16, 8), (64, 8), (256, 64)]
    for experts, gpus in cases:
        slots = np.full(gpus, experts // gpus)
        for seed in range(3):
            tokens, speed = layer(experts, gpus, seed)
            compute = EXPERT_SECONDS_PER_TOKEN * tokens.sum(axis=0) / speed[:, None]
            rate = TOKENS_PER_SECOND * speed
            instance = AssignmentInstance.from_tokens(tokens, compute, rate, rate)
            result = assign(instance) if experts == gpus else assign_groups(instance, slots=slots)
            by_rule = instance.cost(sorted_assignment(tokens.sum(axis=0), speed, slots)) / result.objective
            by_chance = instance.cost(random_assignment(experts, slots, seed)) / result.objective
            print(
                f"{result.provenance.optimiser:14} {f'{experts} x {gpus}':>14} {result.runtime:8.4f} {result.gap:9.2e} "
                f"{by_rule:8.3f} {by_chance:8.3f}  {result.status}",
                flush=True,
            )
    rng = np.random.default_rng(0)
    for n in (64, 512):
        unrelated = AssignmentInstance(rng.random((n, n)), rng.random((n, n)), np.zeros(n), np.zeros((n, n)))
        print(f"assign, F and N unrelated, n = {n}: {assign(unrelated).runtime:.4f} s")


LAYERS, TOKENS, GPUS_PER_NODE = 58, 8192, 8


def cluster(gpus: int, mixed: bool, link: float | None) -> Cluster:
    """Nodes of eight GPUs of one type, or of four types in turn."""
    kinds = [make_gpu(kind, 50e9 / (1 + kind), 50e9 / (1 + kind), 1e15) for kind in range(4 if mixed else 1)]
    kinds = [kind.model_copy(update={"memory": 1e12}) for kind in kinds]
    nodes = tuple(
        Node(name=f"node-{at}", gpus=(kinds[at % len(kinds)],) * GPUS_PER_NODE, link_bandwidth=link)
        for at in range(gpus // GPUS_PER_NODE)
    )
    return Cluster(name="bench", nodes=nodes)


def whole_models() -> None:
    print(
        f"{LAYERS} layers; {'experts':>8} {'GPUs':>5} {'types':>5} {'links':>5} {'skew':>5} {'seconds':>8} {'gap':>7}  note"
    )
    for experts in (256, 1024):
        model = make_model(LAYERS, experts, 8)
        for skew in (0.0, 0.8):
            trace = synthetic(model, Recipe(TOKENS, skew, 0.3))
            for gpus in (320, 1024):
                for mixed, link in ((False, 450e9), (True, 450e9), (False, None)):
                    if experts % gpus and experts > gpus:
                        continue
                    problem = Problem(trace, cluster(gpus, mixed, link), model, Datasheet())
                    problem.demand  # noqa: B018 - counted before the clock starts
                    started = time.perf_counter()
                    _, bound, notes, _ = assign_layers(problem, "even", 20.0, 0, lambda: False, lambda *_: None)
                    seconds = time.perf_counter() - started
                    # The bound counts gate and aggregation too, which no placement changes.
                    fixed = sum(step.max(axis=1).sum() for step in fixed_compute(problem).values())
                    gap = notes["placement objective"].value / (bound - fixed) - 1
                    print(
                        f"{experts:>19} {gpus:>5} {4 if mixed else 1:>5} {'yes' if link else 'no':>5} {skew:>5} "
                        f"{seconds:>8.1f} {max(gap, 0.0):>7.2%}  {notes['placement'].value}",
                        flush=True,
                    )


FOUR_SPEEDS = np.array([1.0, 0.8, 0.5, 0.4])
TIME_LIMIT = 20.0


def traffic(experts: int, seed: int) -> np.ndarray:
    """send_a, recv_a, send_b, recv_b float64[expert]: mildly uneven senders, skewed popularity; 1 on average."""
    rng = np.random.default_rng(seed)
    return np.array([experts * rng.dirichlet(np.full(experts, skew)) for skew in (8.0, 2.0, 8.0, 2.0)])


def timeline(gpus: int, seed: int, types: bool) -> tuple[np.ndarray, np.ndarray]:
    """The cost of the one-GPU timeline on four types of GPU or on all different ones, and the weight of pairs alone."""
    rng = np.random.default_rng(1000 + seed)
    speed = FOUR_SPEEDS[np.arange(gpus) * 4 // gpus] if types else np.sort(rng.uniform(0.4, 1.0, gpus))[::-1]
    four = traffic(gpus, seed)
    models = []
    for send, receive in (four[:2], four[2:]):
        gate, aggregate = rng.uniform(0.02, 0.1, 2)
        per_gpu = [load / speed[:, None] for load in (receive * rng.uniform(0.3, 1.0), send, receive)]
        models.append(ExpertSeconds(gate / speed, aggregate / speed, *per_gpu))
    return layer_weight(*models), pair_weight(*four)


def scalar(gpus: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Costs (a + b) / speed on four types of GPU: numerical three-dimensional matching."""
    of_a, of_b = traffic(gpus, seed)[[1, 3]]
    speed = FOUR_SPEEDS[np.arange(gpus) * 4 // gpus]
    return (of_a[None, :, None] + of_b) / speed[:, None, None], of_a[:, None] + of_b


def equal_gpus() -> None:
    print(f"{'colocate, experts':18} {'seconds':>8} {'gap':>6} {'sorting':>8} {'random':>7}")
    for experts in (8, 64, 256, 512, 1024):
        four = traffic(experts, 0)
        result = min((colocate(*four) for _ in range(3)), key=lambda result: result.runtime)
        by_rule = sorted_colocation(np.maximum(four[0], four[1]), np.maximum(four[2], four[3]))
        others = (check_colocation(partner, *four) for partner in (by_rule, random_colocation(experts, 0)))
        ratios = [other / result.objective for other in others]
        print(f"{experts:18} {result.runtime:8.4f} {result.gap:6.0e} {ratios[0]:8.3f} {ratios[1]:7.3f}", flush=True)


def mixed_gpus(instances: int) -> None:
    print(
        f"\n{'costs':22} {'n':>3} {'decoupled':>16} {'local search':>23} {'exact':>22}\n"
        f"{'':26} {'mean':>8} {'max':>7} {'mean':>8} {'max':>7} {'s':>6} {'proven':>7} {'mean s':>7} {'max s':>6} gap"
    )
    kinds = (
        ("timeline, 4 types", lambda n, seed: timeline(n, seed, True), (8, 16, 32, 64)),
        ("timeline, all different", lambda n, seed: timeline(n, seed, False), (8, 16, 32, 64)),
        ("(a + b) / speed", scalar, (8, 16, 32, 64)),
    )
    for name, make, sizes in kinds:
        for gpus in sizes:
            rows = []
            for seed in range(instances):
                cost, weight = make(gpus, seed)
                quick = colocate_heterogeneous(cost, Limits(exact=False))
                best = colocate_heterogeneous(cost, Limits(TIME_LIMIT))
                paper = check_colocation_heterogeneous(decoupled(cost, weight), cost)
                ratios = (paper / best.objective - 1, quick.objective / best.objective - 1)
                rows.append((*ratios, quick.runtime, best.runtime, best.gap))
            column = np.array(rows).T
            print(
                f"{name:22} {gpus:4} {column[0].mean():+8.1%} {column[0].max():+7.1%} {column[1].mean():+8.2%} "
                f"{column[1].max():+7.2%} {column[2].mean():6.2f} {np.sum(column[4] == 0):4}/{instances:<3}"
                f"{column[3].mean():7.2f} {column[3].max():6.2f} {column[4].max():.2%}",
                flush=True,
            )


def two_models() -> None:
    equal_gpus()
    mixed_gpus(5)


PARTS = {"kernels": kernels, "whole-models": whole_models, "two-models": two_models}
if __name__ == "__main__":
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()
