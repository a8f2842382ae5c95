"""PipeMoE's grid: time, what rules lose, Table VI: `python -m tests.benchmarks.bench_pipeline_degree` (about a minute)."""

import math
import time

import numpy as np

from engine.overlap.pipeline_degree import DegreeInstance, pipeline_degree
from engine.overlap.pipemoe_printed import best_case, cases, line_of
from engine.reproduce.pipemoe import MOST_PARTS, TUTEL, WHY_DIFFERENT, runnable, table_iv, table_vi
from tests.cases.pipemoe import GPUS, walked

REAL = np.concatenate([np.arange(2, 100, 0.001), np.geomspace(100, 1e5, 20_000)])
"""Degrees among which the sub-problems are solved to global optimality."""


def grid() -> DegreeInstance:
    """All 288 layers on all numbers of GPUs in one instance."""
    each = [table_iv(gpus, only_runnable=False) for gpus in GPUS]
    names = ("alpha_comm", "beta_comm", "size_comm", "alpha_comp", "beta_comp", "size_comp")
    return DegreeInstance(
        *(np.concatenate([getattr(instance, name) for instance in each]) for name in names), MOST_PARTS
    )


def exhaustive(instance: DegreeInstance) -> None:
    """Time of all layers, and every degree walked part by part."""
    took = min(pipeline_degree(instance).runtime for _ in range(5))
    result = pipeline_degree(instance)
    every = np.array([walked(instance, parts) for parts in range(1, MOST_PARTS + 1)])
    chosen = every[result.solution - 1, np.arange(instance.layers)]
    worse = (chosen > every.min(axis=0) * (1 + 1e-12)).sum()
    print(
        f"{instance.layers} layers, degrees 1-{MOST_PARTS}: {took:.4f} s, {1e6 * took / instance.layers:.0f} µs a layer"
    )
    print(f"layers where some degree beats the chosen one, walked part by part: {worse} ({result.status})")
    gap = every.min(axis=0) / instance.limit() - 1
    print(
        f"optimum above the limit of any cut: {100 * gap.mean():.1f} % mean; degrees {np.bincount(result.solution)[1:60]}"
    )


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
    """Which degrees the rules choose, and what that loses. kept: bool[layer], those that are taken to have run."""
    seconds = instance.time_of_degree()
    least, exact = seconds.min(axis=1), pipeline_degree(instance).solution
    lines = [line_of(instance, layer) for layer in range(instance.layers)]
    start = time.perf_counter()
    solved = [cases(*line) for line in lines]
    print(f"\nSLSQP: {1e3 * (time.perf_counter() - start) / len(lines):.1f} ms a layer")

    def nearest(real: list[float]) -> np.ndarray:
        return np.floor(np.array(real) + 0.5).astype(np.int64)

    def neighbour(real: list[float]) -> np.ndarray:
        down, up = np.floor(real).astype(np.int64), np.ceil(real).astype(np.int64)
        row = np.arange(len(real))
        return np.where(seconds[row, down - 1] <= seconds[row, up - 1], down, up)

    def globally(equation_19: bool, second: str) -> list[float]:
        return [global_choice(line, equation_19, second) for line in lines]

    sweep = np.array(TUTEL)[seconds[:, np.array(TUTEL) - 1].argmin(axis=1)]
    degrees = {
        "Algorithm 1 printed, SLSQP": [
            best_case(case_degrees, whole(line, False)) for case_degrees, line in zip(solved, lines, strict=True)
        ],
        "printed, sub-problems global": nearest(globally(False, "printed r2")),
        "t1 of equation 19, SLSQP": [
            best_case(case_degrees, whole(line, True)) for case_degrees, line in zip(solved, lines, strict=True)
        ],
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
    """What the exact degree of one number of network streams costs under the other."""
    with_one_stream, with_two_streams = (
        [table_iv(gpus, only_runnable, streams) for gpus in GPUS] for streams in (1, 2)
    )
    for name, chosen, timed in (
        ("one stream, timed on two", with_one_stream, with_two_streams),
        ("two streams, timed on one", with_two_streams, with_one_stream),
    ):
        loss = []
        for of, on in zip(chosen, timed, strict=True):
            times = on.time_of_degree()
            loss.append(times[np.arange(of.layers), pipeline_degree(of).solution - 1] / times.min(axis=1) - 1)
        loss = np.concatenate(loss)
        print(f"degree of {name}: {100 * loss.mean():.1f} % mean, {100 * loss.max():.0f} % most ({len(loss)} layers)")


def main() -> None:
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


if __name__ == "__main__":
    main()
