"""Streams of a training step, Lina's example and micro-ops: `python -m tests.benchmarks.bench_priority`."""

import time

import numpy as np

from engine.reproduce.lina import BUCKET, FIGURES, MS, PRINTED, PRINTED_ALLREDUCE, lina_example
from engine.simulate.priority import schedule_network
from engine.simulate.streams import ALL_REDUCE, ALL_TO_ALL, COMPUTE, POLICIES, Tasks, run_streams

TASKS, GROUPS = 10_000, 4
LAYERS, PERIOD = 24, 30 * MS
OVERHEAD = 0.764 * MS / 5
"""Lina, section 4.2: 764 us for the five micro-ops of Figure 8a."""


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


def main() -> None:
    tasks = random_step(TASKS, GROUPS)
    for policy in POLICIES:
        started = time.perf_counter()
        _, end = run_streams(tasks, policy)
        seconds = time.perf_counter() - started
        print(f"{TASKS} tasks x {GROUPS} groups, {policy:<8} {seconds:6.3f} s, makespan {end.max():.1f} s", flush=True)

    print("\nLina, Figures 7 and 8, ms: the layer's gradients complete (paper), last all-reduce ends (paper)")
    for figure in FIGURES:
        gradients, allreduce = (each / MS for each in lina_example(figure).milestones())
        printed = PRINTED[figure] / MS, PRINTED_ALLREDUCE[figure] / MS
        print(f"{figure}  {gradients:5.2f} ({printed[0]:.1f})  {allreduce:5.2f} ({printed[1]:.1f})")
    for label, micro_op in (("the 1.3 ms of the figure", 1.3 * MS), ("a fifth of the bucket", BUCKET / 5)):
        gradients, allreduce = (each / MS for each in lina_example("8a", micro_op).milestones())
        print(f"8a with micro-ops of {label}: {gradients:.2f}, {allreduce:.2f}")

    rng = np.random.default_rng(1)
    alltoall = np.array([[layer * PERIOD + at * MS, 7.6 * MS] for layer in range(LAYERS) for at in (5.7, 14.9)])
    allreduce = np.array([[layer * PERIOD + 4.1 * MS, BUCKET] for layer in range(LAYERS)])
    allreduce[:, 0] += rng.uniform(-2, 2, LAYERS) * MS
    print(f"\n{LAYERS} layers, overhead {OVERHEAD / MS:.3f} ms per micro-op: total waiting of all-to-alls, ms")
    for policy, micro_op in (("fair", None), ("fifo", None), ("priority", None), ("priority", 1.6 * MS)):
        result = schedule_network(alltoall, allreduce, micro_op, OVERHEAD, policy)
        size = "uncut" if micro_op is None else f"{micro_op / MS:.1f} ms"
        print(
            f"{policy:<8} {size:<6} {result.objective / MS:8.2f} (bound {result.bound / MS:.2f})  {result.runtime:.4f} s"
        )


if __name__ == "__main__":
    main()
