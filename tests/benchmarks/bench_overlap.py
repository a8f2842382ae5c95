"""Kernels that overlap communication: schedules of streams, pipeline degrees, and Lancet's partition.

`python -m tests.benchmarks.bench_overlap [priority | degree | partition …]`: all three unless some are named.
"""

import numpy as np

from engine.overlap.operator_axes import latest_last
from engine.overlap.partition import partition
from engine.overlap.pipeline_degree import pipeline_degree
from engine.overlap.pipemoe_printed import pipemoe_printed
from engine.overlap.stage_pipeline import ChainInstance, overlap_bound
from engine.reproduce.pipemoe.layers import table_iv
from engine.simulate.streams import ALL_REDUCE, ALL_TO_ALL, COMPUTE, POLICIES, Tasks, run_streams
from tests.benchmarks.shared import columns, run_parts, timed
from tests.cases.pipemoe import GPUS
from tests.oracles.order_search import best_order_seconds, range_seconds

TASKS, GROUPS = 10_000, 4


def random_step(tasks: int, groups: int) -> Tasks:
    """Half computations, a quarter all-to-alls, a quarter all-reduces, each waiting for up to two of the 30 before it."""
    rng = np.random.default_rng(0)
    stream = rng.choice([COMPUTE, COMPUTE, ALL_TO_ALL, ALL_REDUCE], tasks)
    seconds = rng.random((tasks, groups))
    seconds[stream != COMPUTE] = seconds[stream != COMPUTE, :1]
    after = np.repeat(np.arange(tasks), 2)
    edges = np.stack([after - rng.integers(1, 30, 2 * tasks), after], axis=1)
    holds = (stream == COMPUTE) & (rng.random(tasks) < 0.2)
    return Tasks(stream, seconds, edges[edges[:, 0] >= 0], np.zeros(tasks), np.full(tasks, -1), holds)


def priority() -> None:
    tasks = random_step(TASKS, GROUPS)
    for policy in POLICIES:
        (_, end), seconds = timed(run_streams, tasks, policy)
        print(f"{TASKS} tasks x {GROUPS} groups, {policy:<8} {seconds:6.3f} s, makespan {end.max():.1f} s", flush=True)


def degree() -> None:
    """PipeMoE's grid: the exact degrees, and those of the printed rule."""
    row = columns({"GPUs": "4", "rule": "8", "ms a layer": "10.4f", "time over exact": "15.3%", "cut": "6.1%"})
    for gpus in GPUS:
        instance = table_iv(gpus, only_runnable=False)
        for name, rule in (("exact", pipeline_degree), ("printed", pipemoe_printed)):
            result = rule(instance)
            share = (result.solution > 1).mean()
            row(gpus, name, 1e3 * result.runtime / instance.layers, result.objective / result.bound - 1, share)


ATTENTION = ("layer_norm", "qkv", "attention", "projection", "residual", "layer_norm")
MOE = ("gate", "dispatch", "experts", "combine", "aggregate", "residual")
TWO_LAYERS = (*ATTENTION, "dense_ffn", "residual", *ATTENTION, *MOE)
MOST_PARTS_OF_CHAIN, CHAIN_OVERHEAD = 8, 0.04


def chain(ops: int, gate: str, seed: int) -> ChainInstance:
    """The first `ops` operators of a deep model."""
    rng = np.random.default_rng(seed)
    kinds = (TWO_LAYERS * (ops // len(TWO_LAYERS) + 1))[:ops]
    network = np.array([kind in ("dispatch", "combine") for kind in kinds])
    whole = np.where(network, rng.uniform(2, 4, ops), rng.uniform(0.1, 1.0, ops)) * 1e-3
    parts = np.arange(1, MOST_PARTS_OF_CHAIN + 1)
    times = whole[:, None] * (1 / parts + CHAIN_OVERHEAD * (parts > 1))
    return ChainInstance(network, times, latest_last(kinds, gate))


def operator_partition() -> None:
    formats = {"gate": "18", "ops": "6", "max range": "9", "seconds": "8.4f", "cut ranges": "10"}
    formats |= {"of sequential": "13.4f", "gap": "7.4f", "overlap bound": "13.4f", "status": "9"}
    row = columns(formats)
    for gate in ("switch", "batch-prioritised"):
        for ops in (66, 276, 1104, 4416):
            instance = chain(ops, gate, 0)
            between = instance.sequential / ops * len(TWO_LAYERS)
            # The last row is the paper's: about 5 groups between two MoE layers, and ranges of about one MoE layer.
            for group, max_range in ((None, None), (None, 40), (between / 10, 12)):
                result = partition(instance, max_range=max_range, group_seconds=group)
                cut = sum(part_range.parts > 1 for part_range in result.solution)
                part, bound = (each / instance.sequential for each in (result.objective, overlap_bound(instance)))
                ranges = "grouped" if group else max_range or "none"
                row(gate, ops, ranges, result.runtime, cut, part, result.gap, bound, result.status)
    print("\nstage-major order over the best one, stages of random lengths")
    rng = np.random.default_rng(0)
    for stages, parts in ((3, 3), (5, 2), (5, 3), (9, 2), (9, 3), (15, 2), (15, 3), (21, 2)):
        ratios, spent = [], 0.0
        for seconds in rng.random((10, stages)):
            cut = ChainInstance(np.arange(stages) % 2 == 1, np.repeat(seconds[:, None], parts, axis=1))
            best, took = timed(best_order_seconds, seconds.tolist(), parts)
            ratios.append(range_seconds(cut, 0, stages - 1, parts) / best)
            spent += took / 10
        print(f"{stages:3} stages, {parts} parts: mean {np.mean(ratios):.4f}, largest {max(ratios):.4f}, {spent:.4f} s")


if __name__ == "__main__":
    run_parts({"priority": priority, "degree": degree, "partition": operator_partition})
