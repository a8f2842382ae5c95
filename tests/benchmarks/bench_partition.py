"""Time and gain of Lancet's operator partition: `python -m tests.benchmarks.bench_partition`.

A chain is a GPT-2 whose every other layer has experts: 23 operators in two layers, the all-to-alls as long as the
operators of a layer together. Cutting costs every part 4 % of the whole operator.
"""

import time

import numpy as np

from engine.launch.step.layout import kept
from engine.overlap.operator_axes import latest_last, range_problem
from engine.overlap.partition import partition
from engine.overlap.partition_axes import count_axes, partition_axes
from engine.overlap.stage_pipeline import ChainInstance, overlap_bound, range_seconds
from tests.oracles.capacity_passing import even_bounds, kept_with_passing
from tests.oracles.order_search import best_order_seconds

ATTENTION = ("layer_norm", "qkv", "attention", "projection", "residual", "layer_norm")
MOE = ("gate", "dispatch", "experts", "combine", "aggregate", "residual")
TWO_LAYERS = (*ATTENTION, "dense_ffn", "residual", *ATTENTION, *MOE)
PARTS, OVERHEAD = 8, 0.04


def chain(ops: int, gate: str, seed: int) -> ChainInstance:
    """The first `ops` operators of a deep model."""
    rng = np.random.default_rng(seed)
    kinds = (TWO_LAYERS * (ops // len(TWO_LAYERS) + 1))[:ops]
    network = np.array([kind in ("dispatch", "combine") for kind in kinds])
    whole = np.where(network, rng.uniform(2, 4, ops), rng.uniform(0.1, 1.0, ops)) * 1e-3
    times = whole[:, None] * (1 / np.arange(1, PARTS + 1) + OVERHEAD * (np.arange(PARTS) > 0))
    return ChainInstance(network, times, latest_last(kinds, gate))


def main() -> None:
    print(
        f"{'gate':18} {'ops':>6} {'max range':>9} {'seconds':>8} {'cut ranges':>10} {'of sequential':>13} "
        f"{'gap':>7} {'overlap bound':>13}  status"
    )
    for gate in ("switch", "batch-prioritised"):
        for ops in (66, 276, 1104, 4416):
            instance = chain(ops, gate, 0)
            between = instance.sequential / ops * len(TWO_LAYERS)
            # The last row is the paper's: about 5 groups between two MoE layers, and ranges of about one MoE layer.
            for group, max_range in ((None, None), (None, 40), (between / 10, 12)):
                result = partition(instance, max_range=max_range, group_seconds=group)
                cut = sum(part_range.parts > 1 for part_range in result.solution)
                print(
                    f"{gate:18} {ops:6} {'grouped' if group else max_range or 'none':>9} {result.runtime:8.4f} {cut:10} "
                    f"{result.objective / instance.sequential:13.4f} {result.gap:7.4f} "
                    f"{overlap_bound(instance) / instance.sequential:13.4f}  {result.status}",
                    flush=True,
                )
    print("\nstage-major order over the best one, stages of random lengths")
    rng = np.random.default_rng(0)
    for stages, parts in ((3, 3), (5, 2), (5, 3), (9, 2), (9, 3), (15, 2), (15, 3), (21, 2)):
        ratios, start, count = [], time.perf_counter(), 100 if stages < 9 else 10
        for _ in range(count):
            seconds = rng.random(stages)
            cut = ChainInstance(np.arange(stages) % 2 == 1, np.repeat(seconds[:, None], parts, axis=1))
            ratios.append(range_seconds(cut, 0, stages - 1, parts) / best_order_seconds(seconds.tolist(), parts))
        spent = (time.perf_counter() - start) / count
        print(f"{stages:3} stages, {parts} parts: mean {np.mean(ratios):.4f}, largest {max(ratios):.4f}, {spent:.4f} s")
    print("\naxes of a whole forward pass, and every start's latest end")
    for layers in (12, 48):
        kinds = TWO_LAYERS * (layers // 2)
        problem = range_problem(kinds)
        axes = partition_axes(problem)
        start = time.perf_counter()
        solutions = count_axes(problem)
        counted = time.perf_counter()
        latest_last(kinds, "batch-prioritised")
        print(
            f"{len(kinds)} operators: found in {axes.runtime:.3f} s, {solutions} counted in {counted - start:.3f} s, "
            f"ends of a batch-prioritised gate in {time.perf_counter() - counted:.3f} s"
        )
    experts = rng.integers(0, 64, (2**20, 2))
    start = time.perf_counter()
    whole = kept(experts, 64, 2**15)
    served = time.perf_counter()
    passed = kept_with_passing(experts, 64, 2**15, even_bounds(2**20, 8))
    print(
        f"\n2^20 tokens, 2 of 64 experts: served in {served - start:.3f} s, in 8 parts with capacity passing in "
        f"{time.perf_counter() - served:.3f} s, equal: {np.array_equal(whole, passed)}"
    )


if __name__ == "__main__":
    main()
