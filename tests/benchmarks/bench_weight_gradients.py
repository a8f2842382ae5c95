"""Gap of Lancet's greedy, and time to proof, by size: `python -m tests.benchmarks.bench_weight_gradients [instances]`."""

import sys
from collections.abc import Iterator

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


def figures_of(name: str, instances: list[WeightGradientInstance], time_limit: float = TIME_LIMIT) -> Iterator[str | float]:
    """The line of the table for some instances of one kind."""
    figures = []
    for instance in instances:
        greedy = schedule_weight_gradients(instance, algorithm="greedy")
        quick = schedule_weight_gradients(instance, Limits(exact=False))
        best = schedule_weight_gradients(instance, Limits(time_limit))
        check_weight_gradients(instance.alltoall, instance.dw, instance.allowed, best.solution)
        # Where nothing can be overlapped every answer is as good as the best.
        over = ((greedy.objective, best.objective), (quick.objective, best.objective), (best.objective, greedy.bound))
        ratios = [a / b if b else 1.0 for a, b in over]
        gap = best.bound / best.objective - 1 if best.objective else 0.0
        times = (best.runtime, greedy.runtime, quick.runtime)
        figures.append((*ratios, gap, *times, best.status == "OPTIMAL"))
    greedy, quick, flow, gap, seconds, greedy_seconds, quick_seconds, proven = np.array(figures).T
    yield name
    yield from (greedy.mean(), greedy.min(), 1e3 * greedy_seconds.mean())
    yield from (quick.mean(), quick.min(), quick_seconds.mean())
    yield from (f"{int(proven.sum())}/{len(figures)}", seconds.mean(), seconds.max(), gap.max(), flow.min())


def main(instances: int) -> None:
    formats = {"layers (a2a, dW)": "24", "greedy / best": "13.4f", "least": "7.4f", "ms": "7.1f"}
    formats |= {"search / best": "13.5f", "its least": "9.5f", "s": "6.2f", "proven": "9", "seconds": "7.2f"}
    row = columns(formats | {"longest": "7.2f", "largest gap": "11.1e", "least best / flow": "17.5f"})
    few, fewer = range(max(instances // 2, 1)), range(max(instances // 5, 1))
    for layers in (4, 12, 24):
        kinds = [backward_pass(layers, seed) for seed in range(instances)]
        row(*figures_of(f"{layers} ({layers}, {4 * layers})", kinds))
    row(*figures_of("96 (96, 384)", [backward_pass(96, seed) for seed in fewer], 30.0))
    row(*figures_of("24, sets not nested", [scattered(24, seed) for seed in few]))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
