"""PipeMoE's whole steps: the four models of Table VII, and the layer of Figure 3 and §V-E on the lines and in a step."""

from dataclasses import replace

import numpy as np

from engine.costs import Datasheet
from engine.costs.scaled import Scaled
from engine.plan import Pipeline
from engine.problem import Problem
from engine.reproduce.exhibits import Chart, Claim, Entry, Exhibit, go_on
from engine.reproduce.exhibits import each as looked_at
from engine.reproduce.pipemoe.layers import layers_of_table_iv, table_iv
from engine.reproduce.pipemoe.testbed import (
    ALPHA_GEMM,
    BETA_GEMM,
    CHOICES,
    EXAMPLE,
    LINES,
    MODELS,
    TIMES,
    WIDTH,
    example_step,
    model_step,
    openings,
)
from engine.result import Floats, Stop
from engine.simulate.streams import ALL_REDUCE, ALL_TO_ALL, run_streams
from engine.simulate.training import price_step
from engine.simulate.training.program import program_of
from engine.systems import TRAINING, run
from engine.units import in_a_row

TABLE_VII = {
    16: ((0.335, 0.314, 0.299), (0.418, 0.383, 0.348), (0.657, 1.010, 0.580), (0.702, 1.026, 0.603)),
    32: ((0.450, 0.398, 0.370), (0.591, 0.506, 0.471), (0.679, 1.064, 0.587), (0.742, 1.083, 0.611)),
    64: ((0.623, 0.515, 0.497), (0.880, 0.831, 0.684), (0.800, 1.118, 0.665), (0.929, 1.158, 0.720)),
}
"""Seconds of a step with Tutel, FasterMoE and PipeMoE: TM-1, TM-2, RM-1, RM-2."""
SYSTEMS = ("pipemoe", "tutel", "fastermoe")
STEPS = 150
"""Steps that are simulated to choose degrees by the whole step."""
SLOW = 0.2
"""Part of the network's rates tried for Table VII."""
PEAK = 0.91 / 0.6
"""The paper's rate of a GEMM over the datasheet source's (Figure 6)."""
IN_TWO, IN_EIGHT = 0.289, 0.253
"""Seconds of the layer of §V-E in two and in eight parts."""


def in_a_step(problem: Problem, parts: int, reduced: float = 1.0) -> float:
    """Seconds of an MoE layer of a step, from its first all-to-all to its last, forward and backward, cut in so many parts.

    reduced: times the seconds of all-reduces; 0: none are on the network
    """
    plan = run(TRAINING["deepspeed"], problem).result.solution
    degrees = (parts,) * problem.workload.layers
    plan = plan.model_copy(update={"pipeline": Pipeline(forward=degrees, backward=degrees)})
    priced = price_step(problem, plan.placement)
    program = program_of(plan, problem, priced)
    tasks = program.tasks
    seconds = tasks.seconds * np.where(tasks.stream == ALL_REDUCE, reduced, 1.0)[:, None]
    start, end = run_streams(replace(tasks, seconds=seconds), plan.priority.policy)
    spans: dict[tuple[int, str], list[float]] = {}
    for task in np.flatnonzero(tasks.stream == ALL_TO_ALL):
        operator = priced.graph.operators[program.operators[task]]
        spans.setdefault((operator.layer, operator.phase), []).extend((float(start[task, 0]), float(end[task, 0])))
    return sum(max(span) - min(span) for span in spans.values()) / len(degrees)


def _figure_3(stop: Stop) -> Exhibit:
    at = np.flatnonzero((layers_of_table_iv() == EXAMPLE).all(axis=1))[0]
    seconds = on_the_lines(64, at, WIDTH)
    rows = tuple({"degree": degree, "seconds": float(seconds[degree - 1])} for degree in range(1, 17))
    chart = Chart(kind="lines", x="degree", y="seconds", x_title="parts of a layer", y_title="step of the layer, s")
    example = "the layer of §V-E on 64 GPUs"
    problem, faster = example_step(), example_step(cost=Scaled(Datasheet(), compute=PEAK))
    ratio, alone, quick = (
        in_a_step(each, 8, reduced) / in_a_step(each, 2, reduced)
        for each, reduced in looked_at(((problem, 1.0), (problem, 0.0), (faster, 1.0)), stop)
    )
    apart = run(TRAINING["pipemoe"], problem).result
    go_on(stop)
    whole = run(TRAINING["pipemoe"], problem, {"algorithm": "step"}, stop).result
    own, chosen = apart.solution.pipeline, whole.solution.pipeline
    backward = in_a_row(list(map(str, chosen.backward)))
    claims = (
        Claim(
            quantity="time in two parts as a part of that in one (drawn shorter)",
            published=(0.0, 1.0),
            spread=0.0,
            ours=float(seconds[1] / seconds[0]),
            why=f"{example}, forward and backward, on the lines of Figure 6",
        ),
        Claim(
            quantity=f"degree that PipeMoE predicts for {example}",
            published=2.0,
            ours=float(seconds.argmin() + 1),
            why=f"the exact degree on the same lines; in a step of {TIMES} such layers {max(own.forward)} forward and "
            f"{max(own.backward)} backward, and by the step with its all-reduces {backward}, which gains "
            f"{100 * (apart.objective / whole.objective - 1):.3f} %",
        ),
        Claim(
            quantity=f"seconds of {example} in two parts",
            published=IN_TWO,
            ours=float(seconds[1]),
            why="the lines have no all-reduce, no gate and no memory traffic of the dispatch; numbers of 32 bits would take "
            f"{float(on_the_lines(64, at, 4.0)[1]):.3f} s",
        ),
        Claim(
            quantity=f"seconds of {example} in eight parts",
            published=IN_EIGHT,
            ours=float(seconds[7]),
            why="on the lines eight start-ups of 0.78 ms cost what they hide; the paper names all-reduces on the same network",
        ),
        Claim(
            quantity=f"time of {example} in eight parts as a part of that in two, in a step of {TIMES}",
            published=IN_EIGHT / IN_TWO,
            ours=ratio,
            neutral=1.0,
            why=f"the paper names all-reduces on the same network; without them it is {alone:.3f} here. It is the backward "
            "pass, in which experts take twice as long and more parts hide more: with Figure 6's GEMMs it is "
            f"{quick:.3f}",
        ),
    )
    return Exhibit(claims=claims, rows=rows, chart=chart)


def on_the_lines(gpus: int, layer: int, width: float) -> Floats:
    """float64[parts - 1]: a training step of one layer of Table IV."""
    passes = (table_iv(gpus, False, width=width, experts=experts).time_of_degree()[layer] for experts in (1.0, 2.0))
    return sum(passes)


def _table_vii(stop: Stop) -> Exhibit:
    claims, rows = [], []
    for gpus, printed in TABLE_VII.items():
        for name, published in zip(("TM-1", "TM-2", "RM-1", "RM-2"), printed, strict=True):
            go_on(stop)
            problem = model_step(name, gpus)
            slow = run(TRAINING["pipemoe"], model_step(name, gpus, "fp32", SLOW)).result.objective
            seconds = {system: run(TRAINING[system], problem).result.objective for system in SYSTEMS}
            go_on(stop)
            found = run(TRAINING["pipemoe"], problem, {"algorithm": "step", "evaluations": STEPS}, stop).result
            less = 100 * (1 - found.objective / seconds["pipemoe"])
            for system, paper in zip(SYSTEMS, (published[2], *published[:2]), strict=True):
                where = {"gpus": f"{gpus} GPUs", "model": name, "system": TRAINING[system].title}
                rows.append(where | {"seconds": seconds[system], "paper": paper})
            claims.append(
                Claim(
                    quantity=f"seconds of a step of {name} on {gpus} GPUs with PipeMoE",
                    published=published[2],
                    ours=seconds["pipemoe"],
                    why="the paper has neither layers nor number format. In 32 bits on a network of a fifth, as cards "
                    f"without peer access may, our step takes {slow:.2f} s: the all-reduce is most of it. "
                    f"With degrees chosen by the whole step ours takes {less:.1f} % less",
                )
            )
            claims += [
                Claim(
                    quantity=f"speedup over {TRAINING[system].title}, {name} on {gpus} GPUs",
                    published=paper / published[2],
                    ours=seconds[system] / seconds["pipemoe"],
                    neutral=1.0,
                    why=f"{_most_of(name, gpus)}; with degrees chosen by the whole step "
                    f"{seconds[system] / found.objective:.3f}",
                )
                for system, paper in zip(SYSTEMS[1:], published[:2], strict=True)
            ]
    chart = Chart(
        kind="bars", x="model", y="seconds", series="system", facet="gpus", published="paper", x_title="", y_title="step, s"
    )
    return Exhibit(claims=tuple(claims), rows=tuple(rows), chart=chart)


def _most_of(name: str, gpus: int) -> str:
    """The most that a pipeline can gain on a layer of the model, by the paper's own lines."""
    _, width, inner, _, _, batch, length = MODELS[name[:2]]
    numbers = batch * length * CHOICES * int(name[-1]) * width
    alpha, beta = LINES[gpus]
    network, experts = 2 * (alpha + WIDTH * beta * numbers), 2 * (ALPHA_GEMM + BETA_GEMM * numbers * inner)
    most = (network + experts) / max(network, experts)
    return (
        f"by the lines of Figure 6 experts take {1e3 * experts:.2f} ms of a layer, all-to-alls {1e3 * network:.2f}: to hide "
        f"the shorter gains {most:.2f}x on a layer, less on a step. What is more does not come from the degree"
    )


ENTRIES = (
    Entry(
        "Table VII",
        "§V-D",
        "whole steps of four models",
        _table_vii,
        tuple(opening for model in MODELS for opening in openings(f"{model}-2", 64)),
    ),
    Entry("Figure 3", "§II-C", "a layer's step by its degree", _figure_3, openings("§V-E's layer", 64)),
)
