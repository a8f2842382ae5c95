"""Kernels that overlap communication: Lina's priorities, PipeMoE's degrees and Lancet's partition.

`python -m tests.benchmarks.bench_overlap [priority | degree | partition …]`: all three unless some are named. PipeMoE's grid
takes about a minute: its time, the loss by rules, and Table VI.
"""

import math
import time

import numpy as np

from engine.launch.step.layout import kept
from engine.overlap.operator_axes import latest_last, range_problem
from engine.overlap.partition import partition
from engine.overlap.partition_axes import count_axes, partition_axes
from engine.overlap.pipeline_degree import DegreeInstance, pipeline_degree
from engine.overlap.pipemoe_printed import best_case, cases, line_of
from engine.overlap.stage_pipeline import ChainInstance, overlap_bound
from engine.reproduce.lina import BUCKET, FIGURES, MS, PRINTED, PRINTED_ALLREDUCE, lina_example
from engine.reproduce.pipemoe import MOST_PARTS, TUTEL, WHY_DIFFERENT, runnable, table_iv, table_vi
from engine.simulate.priority import schedule_network
from engine.simulate.streams import ALL_REDUCE, ALL_TO_ALL, COMPUTE, POLICIES, Tasks, run_streams
from tests.benchmarks.shared import columns, run_parts, timed
from tests.cases.pipemoe import GPUS, walked
from tests.oracles.capacity_passing import even_bounds, kept_with_passing
from tests.oracles.order_search import best_order_seconds, range_seconds

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


def priority() -> None:
    tasks = random_step(TASKS, GROUPS)
    for policy in POLICIES:
        (_, end), seconds = timed(run_streams, tasks, policy)
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
        waiting = f"{result.objective / MS:8.2f} (bound {result.bound / MS:.2f})"
        print(f"{policy:<8} {size:<6} {waiting}  {result.runtime:.4f} s")


REAL = np.concatenate([np.arange(2, 100, 0.001), np.geomspace(100, 1e5, 20_000)])
"""Degrees among which the sub-problems are solved to global optimality."""


def grid() -> DegreeInstance:
    """All 288 layers on all numbers of GPUs in one instance."""
    each = [table_iv(gpus, only_runnable=False) for gpus in GPUS]
    names = ("alpha_comm", "beta_comm", "size_comm", "alpha_comp", "beta_comp", "size_comp")
    parts = (np.concatenate([getattr(instance, name) for instance in each]) for name in names)
    return DegreeInstance(*parts, MOST_PARTS)


def exhaustive(instance: DegreeInstance) -> None:
    """Time of all layers, and every degree walked part by part."""
    took = min(pipeline_degree(instance).runtime for _ in range(5))
    result = pipeline_degree(instance)
    every = np.array([walked(instance, parts) for parts in range(1, MOST_PARTS + 1)])
    chosen = every[result.solution - 1, np.arange(instance.layers)]
    worse = (chosen > every.min(axis=0) * (1 + 1e-12)).sum()
    layers = instance.layers
    print(f"{layers} layers, degrees 1-{MOST_PARTS}: {took:.4f} s, {1e6 * took / layers:.0f} µs a layer")
    print(f"layers where some degree beats the chosen one, walked part by part: {worse} ({result.status})")
    gap, used = every.min(axis=0) / instance.limit() - 1, np.bincount(result.solution)[1:60]
    print(f"optimum above the limit of any cut: {100 * gap.mean():.1f} % mean; degrees {used}")


def global_cases(coefficients: tuple[float, float, float, float]) -> dict[str, float]:
    """The real r of each case's optimum, absent where the case is empty: r_2 as printed, `valid` where Q1 can hold."""
    alpha_a, network, alpha_e, experts = coefficients
    q1 = alpha_a + network / REAL >= alpha_e + experts / REAL
    q2 = 2 * (REAL - 1) * (alpha_a + network / REAL) < REAL * alpha_e + experts
    f3 = 2 * alpha_a + experts + 2 * network / REAL + alpha_e * REAL
    degree_of_case = {"printed r2": max(2, math.ceil((experts - network) / (alpha_a - alpha_e)))}
    degree_of_case |= {"valid r2": REAL[q1.argmax()]} if q1.any() else {}
    degree_of_case |= {"r3": REAL[np.where(~q1 & q2, f3, np.inf).argmin()]} if (~q1 & q2).any() else {}
    degree_of_case |= {"r4": REAL[(~q1 & ~q2).argmax()]} if (~q1 & ~q2).any() else {}
    return degree_of_case


def global_choice(coefficients: tuple[float, float, float, float], equation_19: bool, second: str) -> float:
    alpha_a, network, alpha_e, experts = coefficients

    def seconds(case: str, r: float) -> float:
        return 2 * alpha_a + experts + 2 * network / r + alpha_e * r if case == "r3" else 2 * r * alpha_a + 2 * network

    t, r = min((seconds(case, r), r) for case, r in global_cases(coefficients).items() if case in (second, "r3", "r4"))
    return 1 if t >= whole(coefficients, equation_19) else r


def whole(coefficients: tuple[float, float, float, float], equation_19: bool) -> float:
    """t_1, by equation 19 or as printed in line 5."""
    alpha_a, network, alpha_e, experts = coefficients
    comm, comp = alpha_a + network, alpha_e + experts
    return 2 * comm + comp if equation_19 else 2 * comp + comm


def rules(instance: DegreeInstance, kept: np.ndarray) -> None:
    """The degrees that the rules choose, and their loss. kept: bool[layer], those that are taken to have run."""
    seconds = instance.time_of_degree()
    least, exact = seconds.min(axis=1), pipeline_degree(instance).solution
    lines = [line_of(instance, layer) for layer in range(instance.layers)]
    solved, took = timed(lambda: [cases(*line) for line in lines])
    print(f"\nSLSQP: {1e3 * took / len(lines):.1f} ms a layer")

    def nearest(real: list[float]) -> np.ndarray:
        return np.floor(np.array(real) + 0.5).astype(np.int64)

    def neighbour(real: list[float]) -> np.ndarray:
        down, up = np.floor(real).astype(np.int64), np.ceil(real).astype(np.int64)
        row = np.arange(len(real))
        return np.where(seconds[row, down - 1] <= seconds[row, up - 1], down, up)

    def globally(equation_19: bool, second: str) -> list[float]:
        return [global_choice(line, equation_19, second) for line in lines]

    sweep = np.array(TUTEL)[seconds[:, np.array(TUTEL) - 1].argmin(axis=1)]

    def by_cases(equation_19: bool) -> list[int]:
        return [best_case(each, whole(line, equation_19)) for each, line in zip(solved, lines, strict=True)]

    degrees = {
        "Algorithm 1 printed, SLSQP": by_cases(False),
        "printed, sub-problems global": nearest(globally(False, "printed r2")),
        "t1 of equation 19, SLSQP": by_cases(True),
        "t1 of equation 19, global": nearest(globally(True, "printed r2")),
        "t1 and valid r2, nearest": nearest(globally(True, "valid r2")),
        "t1 and valid r2, floor or ceil": neighbour(globally(True, "valid r2")),
        "best of 1, 2, 4, 8": sweep,
        **{f"always {degree}": np.full(instance.layers, degree) for degree in TUTEL},
        "exact": exact,
    }
    print(f"{'':32} {f'{kept.sum()} layers: misses, mean, max':>34} {f'all {len(kept)}: misses, mean, max':>34}")
    for name, degree in degrees.items():
        loss = seconds[np.arange(instance.layers), np.minimum(degree, MOST_PARTS) - 1] / least - 1
        shares = [(100 * (part > 1e-12).mean(), 100 * part.mean(), 100 * part.max()) for part in (loss[kept], loss)]
        print(f"{name:32} " + " ".join(f"{miss:12.1f} % {mean:7.2f} % {most:7.1f} %" for miss, mean, most in shares))


def one_model_for_the_other(only_runnable: bool) -> None:
    """The cost of the exact degree for one number of network streams under the other."""
    with_one_stream, with_two_streams = ([table_iv(gpus, only_runnable, streams) for gpus in GPUS] for streams in (1, 2))
    for name, chosen, other in (
        ("one stream, timed on two", with_one_stream, with_two_streams),
        ("two streams, timed on one", with_two_streams, with_one_stream),
    ):
        loss = []
        for of, on in zip(chosen, other, strict=True):
            times = on.time_of_degree()
            loss.append(times[np.arange(of.layers), pipeline_degree(of).solution - 1] / times.min(axis=1) - 1)
        loss = np.concatenate(loss)
        print(f"degree of {name}: {100 * loss.mean():.1f} % mean, {100 * loss.max():.0f} % most ({len(loss)} layers)")


def degree() -> None:
    everything = grid()
    exhaustive(everything)
    rules(everything, np.tile(runnable(), len(GPUS)))
    print()
    one_model_for_the_other(only_runnable=True)
    one_model_for_the_other(only_runnable=False)
    print("\nShare of Tutel's time saved, in %: computed, and measured in the paper (Table VI)")
    print((100 * table_vi()).round(1).to_string())
    print(WHY_DIFFERENT)
    for streams, order in ((1, "interleaved"), (2, "dispatch-first")):
        print(f"\nthe same with {streams} network stream(s), {order}")
        print((100 * table_vi(streams, order)).round(1).to_string())


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
        solutions, counting = timed(count_axes, problem)
        _, ends = timed(latest_last, kinds, "batch-prioritised")
        print(
            f"{len(kinds)} operators: found in {axes.runtime:.3f} s, {solutions} counted in {counting:.3f} s, "
            f"ends of a batch-prioritised gate in {ends:.3f} s"
        )
    experts = rng.integers(0, 64, (2**20, 2))
    whole, served = timed(kept, experts, 64, 2**15)
    passed, passing = timed(kept_with_passing, experts, 64, 2**15, even_bounds(2**20, 8))
    print(
        f"\n2^20 tokens, 2 of 64 experts: served in {served:.3f} s, in 8 parts with capacity passing in {passing:.3f} s, "
        f"equal: {np.array_equal(whole, passed)}"
    )


if __name__ == "__main__":
    run_parts({"priority": priority, "degree": degree, "partition": operator_partition})
