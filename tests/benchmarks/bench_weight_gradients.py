"""Gap of Lancet's greedy, and time to proof, by size: `python -m tests.benchmarks.bench_weight_gradients [instances]`."""

import sys

import numpy as np

from engine.overlap.weight_gradients import WeightGradientInstance, schedule_weight_gradients
from engine.result import Limits
from tests.benchmarks.shared import columns
from tests.oracles.overlapping import check_weight_gradients

TIME_LIMIT = 10.0


def backward_pass(layers: int, seed: int, ratio: float | None = None) -> WeightGradientInstance:
    """A backward pass of `layers` Transformer blocks, every other one with experts: as many all-to-alls as blocks.

    From the last block to the first, in each the two feed-forward matrices, the output projection and the one for query,
    key and value: dW of 4 : 4 : 1 : 3 parameters, times as on one A100 at 45 % of its peak for 24 sequences of 512 tokens
    and d_model 768, with 10 % noise. An expert block has one all-to-all before the experts' dW and one after them. A dW may
    run under every all-to-all after it, under none before. ratio: of all all-to-alls to all dW, between 0.6 and 1.3 if not
    given; single all-to-alls vary by 30 %, as skewed routing makes them.
    """
    rng = np.random.default_rng(seed)
    parameters, release, alltoalls = [], [], 0
    for block in reversed(range(layers)):
        with_experts = block % 2 == 1
        alltoalls += with_experts
        parameters += [4, 4]
        release += [alltoalls] * 2
        alltoalls += with_experts
        parameters += [1, 3]
        release += [alltoalls] * 2
    dw = 2 * 24 * 512 * 768**2 * np.array(parameters) / (0.45 * 312e12) * rng.lognormal(0, 0.1, len(parameters))
    alltoall = rng.uniform(0.7, 1.3, alltoalls)
    alltoall *= (rng.uniform(0.6, 1.3) if ratio is None else ratio) * dw.sum() / alltoall.sum()
    return WeightGradientInstance(alltoall, dw, np.arange(alltoalls) >= np.array(release)[:, None])


def scattered(layers: int, seed: int) -> WeightGradientInstance:
    """Durations of a backward pass, but no nested sets: every dW may run under a third of the all-to-alls."""
    nested = backward_pass(layers, seed)
    allowed = np.random.default_rng(seed).random(nested.allowed.shape) < 1 / 3
    return WeightGradientInstance(nested.alltoall, nested.dw, allowed)


def main(instances: int = 20) -> None:
    formats = {"layers (a2a, dW)": "24", "greedy / best": "13.4f", "its ms": "7.1f", "search / best": "13.5f", "its s": "6.2f"}
    row = columns(formats | {"proven": "6.0%", "seconds": "7.2f", "gap": "8.1e", "best / flow": "11.5f"}, "means")
    cases = {f"{layers} ({layers}, {4 * layers})": (backward_pass, layers, instances) for layers in (4, 12, 24)}
    cases["96 (96, 384)"] = backward_pass, 96, instances // 5
    cases["24, sets not nested"] = scattered, 24, instances // 2
    for name, (make, layers, count) in cases.items():
        figures = []
        for instance in (make(layers, seed) for seed in range(max(count, 1))):
            greedy = schedule_weight_gradients(instance, algorithm="greedy")
            quick = schedule_weight_gradients(instance, Limits(exact=False))
            best = schedule_weight_gradients(instance, Limits(TIME_LIMIT if layers < 96 else 3 * TIME_LIMIT))
            check_weight_gradients(instance.alltoall, instance.dw, instance.allowed, best.solution)
            of_greedy = greedy.objective / best.objective, 1e3 * greedy.runtime
            of_search = quick.objective / best.objective, quick.runtime
            proven = best.status == "OPTIMAL", best.runtime, best.bound / best.objective - 1
            figures.append((*of_greedy, *of_search, *proven, best.objective / greedy.bound))
        row(name, *np.mean(figures, axis=0))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
