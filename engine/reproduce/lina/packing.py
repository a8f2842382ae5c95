"""Lina's packing coordinator over a training run (§4.2, §6.1), simulated on the paper's three models."""

import numpy as np

from engine.problem import Problem
from engine.reproduce.exhibits import Chart, Claim, Exhibit, Opening
from engine.reproduce.lina.training import PACKED, TASKS, factors_of_figure_7, packed, paper_problem
from engine.result import Stop
from engine.simulate.training import simulate_step
from engine.systems.pieces import linear_placement
from engine.systems.training.coordinator import Look, coordinate
from engine.systems.training.lina import LinaOptions, scheduled
from engine.units import seconds as in_seconds
from engine.units import share

STEPS = 30
"""Steps of a run that are shown."""
RUN = {"packing": "coordinator"}


def looks_of(problem: Problem, micro_op_mb: float = 30.0) -> list[Look]:
    """The looks of the coordinator. Everything fits the paper's GPUs here."""
    options = LinaOptions(micro_op_mb=micro_op_mb)
    return list(coordinate(problem, linear_placement(problem), lambda placement: scheduled(problem, placement, options)))


def steps_of(looks: list[Look]) -> list[tuple[int, float, int]]:
    """(step, seconds with what is waited for before it, experts on a GPU) of the first `STEPS` steps, counted from 1."""
    taken = []
    for number in range(1, STEPS + 1):
        now = next((look for look in looks if number <= look.step or not look.packs), looks[-1])
        waited = next((look.exchange for look in looks if look.packs and look.step == number - 1), 0.0)
        taken.append((number, now.seconds + waited, now.experts))
    return taken


def pays_after(looks: list[Look]) -> int | None:
    """Steps after the first look until the run is ahead, and stays ahead, of one that never packs; None: not within `STEPS`."""
    ahead = np.cumsum([looks[0].seconds - took for _, took, _ in steps_of(looks)])
    behind = np.flatnonzero(ahead < -1e-12)
    last = int(behind[-1]) + 2 if len(behind) else looks[0].step
    return last - looks[0].step if last <= STEPS else None


def coordinator(stop: Stop) -> Exhibit:
    """The exhibit of the coordinator."""
    claims, rows = [], []
    for model, published in PACKED.items():
        if stop():
            break
        problem = paper_problem(model)
        looks = looks_of(problem)
        rows += [
            {"model": model, "step": step, "seconds": took, "experts on a GPU": experts}
            for step, took, experts in steps_of(looks)
        ]
        claims.append(
            Claim(
                quantity=f"experts on a GPU at which the coordinator stops, {model}, 16 experts",
                published=float(published),
                ours=float(looks[-1].experts),
                why=_why(problem, looks, published),
            )
        )
    chart = Chart(kind="steps", x="step", y="seconds", series="model", x_title="step of the run", y_title="step, s")
    note = (
        "A step is simulated anew for every packing; its micro-ops stand for the measured ones. After steps 10 and 14 the next "
        "step waits for the exchange of weights and momentum. New process groups are not priced."
    )
    return Exhibit(claims=tuple(claims), rows=tuple(rows), chart=chart, note=note)


def _why(problem: Problem, looks: list[Look], published: int) -> str:
    """The course of the run, and the published packing."""
    course = [
        f"{look.experts} on a GPU fill {share(min(1.0, look.ffn / look.alltoall))}"
        for look in looks
        if look.alltoall > look.ffn
    ]
    cost = sum(look.exchange for look in looks)
    after = pays_after(looks)
    paid = "made up for in the same steps" if after == 0 else f"made up for {after} steps after step {looks[0].step}"
    if after is None:
        paid = f"not made up for within {STEPS} steps"
    told = f"{', '.join(course)} of an all-to-all; the exchanges take {in_seconds(cost)}, {paid}"
    if published == looks[-1].experts:
        return told
    slow, two = factors_of_figure_7()[0], simulate_step(packed(problem, published), problem).total
    filled = next(look for look in looks if look.experts == published)
    part = share(min(1.0, slow * filled.ffn / filled.alltoall))
    return (
        f"{told}; with {published} the step takes {two / looks[-1].seconds:.2f} times as long as there; with computation "
        f"{slow:.1f} times as long, as in Figure 7, {published} fill {part}, and by Table 3 0.79 to 0.85: below 1 too, so "
        "that the paper's rule would go on"
    )


OPENINGS = tuple(
    Opening(f"{model}, packed by the coordinator", lambda model=model: paper_problem(model), "lina", RUN) for model in TASKS
)
