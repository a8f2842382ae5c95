"""Time and gap of assignments: the kernels, and two models a GPU; `bench_scale` has Aurora's whole models.

`python -m tests.benchmarks.bench_assignment [kernels | two-models …]`: both unless one is named.
"""

import numpy as np

from engine.placement.assignment import AssignmentInstance, assign
from engine.placement.baselines import sorted_assignment
from engine.placement.colocation.heterogeneous import colocate_heterogeneous, decoupled
from engine.placement.colocation.pairs import colocate, pair_weight, sorted_colocation
from engine.placement.grouped_assignment import assign_groups
from engine.result import Limits
from engine.simulate.colocated import ExpertSeconds, layer_weight
from tests.benchmarks.shared import columns, run_parts
from tests.oracles.placing import check_colocation, check_colocation_heterogeneous

EXPERT_SECONDS_PER_TOKEN, TOKENS_PER_SECOND = 2e-6, 1e6


def four_speeds(gpus: int) -> np.ndarray:
    """float64[gpu]: four types, as many GPUs of each."""
    return np.array([1.0, 0.8, 0.5, 0.4])[np.arange(gpus) * 4 // gpus]


def kernels() -> None:
    formats = {"kernel": "14", "experts x GPUs": "14", "seconds": "8.4f", "gap": "9.2e", "Thm 5.1": "8.3f"}
    row = columns(formats | {"status": "9"})
    cases = [(n, n) for n in (8, 64, 128, 512)] + [(16, 8), (64, 8), (256, 64)]
    for experts, gpus in cases:
        slots = np.full(gpus, experts // gpus)
        for seed in range(3):
            rng = np.random.default_rng(seed)
            popularity = rng.dirichlet(np.full(experts, 4.0))
            tokens = np.stack([rng.multinomial(8192, rng.dirichlet(200 * popularity)) for _ in range(gpus)]).astype(np.float64)
            speed = four_speeds(gpus)
            compute = EXPERT_SECONDS_PER_TOKEN * tokens.sum(axis=0) / speed[:, None]
            rate = TOKENS_PER_SECOND * speed
            instance = AssignmentInstance.from_tokens(tokens, compute, rate, rate)
            result = assign(instance) if experts == gpus else assign_groups(instance, slots=slots)
            by_rule = instance.cost(sorted_assignment(tokens.sum(axis=0), speed, slots)) / result.objective
            row(result.provenance.optimiser, f"{experts} x {gpus}", result.runtime, result.gap, by_rule, result.status)


TIME_LIMIT, INSTANCES = 20.0, 5


def traffic(experts: int, seed: int) -> np.ndarray:
    """send_a, recv_a, send_b, recv_b float64[expert]: mildly uneven senders, skewed popularity; 1 on average."""
    rng = np.random.default_rng(seed)
    return np.array([experts * rng.dirichlet(np.full(experts, skew)) for skew in (8.0, 2.0, 8.0, 2.0)])


def timeline(gpus: int, seed: int, types: bool) -> tuple[np.ndarray, np.ndarray]:
    """The cost of the one-GPU timeline on four types of GPU or on all different ones, and the weight of pairs alone."""
    rng = np.random.default_rng(1000 + seed)
    speed = four_speeds(gpus) if types else np.sort(rng.uniform(0.4, 1.0, gpus))[::-1]
    four = traffic(gpus, seed)
    models = []
    for send, receive in (four[:2], four[2:]):
        gate, aggregate = rng.uniform(0.02, 0.1, 2)
        per_gpu = [load / speed[:, None] for load in (receive * rng.uniform(0.3, 1.0), send, receive)]
        models.append(ExpertSeconds(gate / speed, aggregate / speed, *per_gpu))
    return layer_weight(*models), pair_weight(*four)


def two_models() -> None:
    """Pairs of experts on equal GPUs against the sorting rule; then on GPUs of several types, where the paper's
    rule decouples pairs and GPUs."""
    row = columns({"colocate, experts": "18", "seconds": "8.4f", "gap": "6.0e", "sorting": "8.3f"})
    for experts in (8, 64, 256, 512, 1024):
        four = traffic(experts, 0)
        result = min((colocate(*four) for _ in range(3)), key=lambda result: result.runtime)
        by_rule = sorted_colocation(np.maximum(four[0], four[1]), np.maximum(four[2], four[3]))
        row(experts, result.runtime, result.gap, check_colocation(by_rule, *four) / result.objective)
    formats = {"costs": "22", "n": "3", "decoupled": "+9.1%", "local search": "+12.2%", "its s": "6.2f", "proven": "6"}
    row = columns(formats | {"s": "6.2f", "gap": "6.2%"}, f"two models a GPU of several types, mean of {INSTANCES}")
    for name, types in (("timeline, 4 types", True), ("timeline, all different", False)):
        for gpus in (8, 16, 32, 64):
            rows = []
            for seed in range(INSTANCES):
                cost, weight = timeline(gpus, seed, types)
                quick = colocate_heterogeneous(cost, Limits(exact=False))
                best = colocate_heterogeneous(cost, Limits(TIME_LIMIT))
                paper = check_colocation_heterogeneous(decoupled(cost, weight), cost)
                ratios = (paper / best.objective - 1, quick.objective / best.objective - 1)
                rows.append((*ratios, quick.runtime, best.runtime, best.gap))
            mean = np.mean(rows, axis=0)
            row(name, gpus, *mean[:3], f"{sum(gap == 0 for *_, gap in rows)}/{INSTANCES}", *mean[3:])


if __name__ == "__main__":
    run_parts({"kernels": kernels, "two-models": two_models})
