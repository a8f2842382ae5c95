"""Time and gap of the assignment kernels: `python -m tests.benchmarks.bench_assignment`."""

import numpy as np

from engine.placement.assignment import AssignmentInstance, assign
from engine.placement.baselines import random_assignment, sorted_assignment
from engine.placement.grouped_assignment import assign_groups

SPEEDS = (1.0, 0.8, 0.5, 0.4)
EXPERT_SECONDS_PER_TOKEN, TOKENS_PER_SECOND = 2e-6, 1e6


def layer(experts: int, gpus: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens float64[gpu, expert] of skewed popularity that differs between sources, and four speeds float64[gpu]."""
    rng = np.random.default_rng(seed)
    popularity = rng.dirichlet(np.full(experts, 4.0))
    tokens = np.stack([rng.multinomial(8192, rng.dirichlet(200 * popularity)) for _ in range(gpus)]).astype(np.float64)
    return tokens, np.array(SPEEDS)[np.arange(gpus) * 4 // gpus]


def main() -> None:
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


if __name__ == "__main__":
    main()
