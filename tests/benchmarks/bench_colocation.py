"""Time, gap and baselines of colocation: `python -m tests.benchmarks.bench_colocation`."""

import sys

import numpy as np

from engine.placement.colocation.heterogeneous import colocate_heterogeneous, decoupled
from engine.placement.colocation.pairs import colocate, pair_weight, random_colocation, sorted_colocation
from engine.result import Limits
from engine.simulate.colocated import ExpertSeconds, layer_weight
from tests.oracles.placing import check_colocation, check_colocation_heterogeneous

SPEEDS = np.array([1.0, 0.8, 0.5, 0.4])
TIME_LIMIT = 20.0


def traffic(experts: int, seed: int) -> np.ndarray:
    """send_a, recv_a, send_b, recv_b float64[expert]: mildly uneven senders, skewed popularity; 1 on average."""
    rng = np.random.default_rng(seed)
    return np.array([experts * rng.dirichlet(np.full(experts, skew)) for skew in (8.0, 2.0, 8.0, 2.0)])


def timeline(gpus: int, seed: int, types: bool) -> tuple[np.ndarray, np.ndarray]:
    """The cost of the one-GPU timeline on four types of GPU or on all different ones, and the weight of pairs alone."""
    rng = np.random.default_rng(1000 + seed)
    speed = SPEEDS[np.arange(gpus) * 4 // gpus] if types else np.sort(rng.uniform(0.4, 1.0, gpus))[::-1]
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
    speed = SPEEDS[np.arange(gpus) * 4 // gpus]
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


if __name__ == "__main__":
    equal_gpus()
    mixed_gpus(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
