"""One model on its GPUs (§8.2, Figure 11a and b): Aurora's order against SJF and RCS, its GPUs against random ones."""

import numpy as np

from engine.problem import Problem
from engine.reproduce.aurora.setting import (
    DRAWS,
    EQUAL,
    MIXED,
    NOTE,
    alone,
    bar_name,
    bars,
    drawn,
    hottest,
    openings,
    span,
    spoken,
)
from engine.reproduce.aurora.tokens_follow import aurora_rows, follow, random_rows
from engine.reproduce.exhibits import Chart, Claim, Entry, Exhibit, each
from engine.result import Stop
from engine.systems import SYSTEMS, Outcome, run

SJF_AT_MOST = 1.38
RGA = (1.36, 1.81)
EXPONENTS = (0.0, 0.4, 0.8, 1.0)
RGA_EXPONENTS = (0.4, 0.6, 0.8)
DRAWN = 8
"""Layers that are drawn for an exponent."""
ORDERS = {"Aurora": ("aurora", {}), "SJF": ("sjf", {"placement": "aurora"}), "RCS": ("rcs", {"placement": "aurora"})}
_CHART = Chart(
    kind="bars",
    x="bar",
    y="seconds",
    series="system",
    facet="data set",
    x_title="model and layer",
    y_title="inference time of a layer (s)",
)


def communication(outcome: Outcome) -> float:
    """Seconds of both all-to-alls."""
    seconds = outcome.timeline.seconds_of_kind()
    return seconds["dispatch"] + seconds["combine"]


def orders(problem: Problem) -> dict[str, tuple[float, float]]:
    """Seconds of the pass and of its all-to-alls under each order, all on Aurora's placement."""
    outcomes = {name: run(SYSTEMS[system], problem, options) for name, (system, options) in ORDERS.items()}
    return {name: (outcome.result.objective, communication(outcome)) for name, outcome in outcomes.items()}


def random_gpus(problem: Problem, draws: int = DRAWS) -> tuple[float, float]:
    """Seconds under Aurora's assignment, and under a random one, the mean of several draws."""
    ours = run(SYSTEMS["aurora"], problem).result.objective
    return ours, float(np.mean([run(SYSTEMS["rga"], problem, {"seed": seed}).result.objective for seed in range(draws)]))


def _figure_11a(stop: Stop) -> Exhibit:
    rows, gains, heat = [], [], []
    for dataset, model, layer, trace in each(bars(), stop):
        seconds = orders(alone(trace, EQUAL, model))
        gains.append(seconds["SJF"][1] / seconds["Aurora"][1])
        heat.append(hottest(trace))
        for name, (whole, moving) in seconds.items():
            bar = {"data set": f"stand-ins for {dataset}", "bar": bar_name(model, layer), "system": name}
            rows.append(bar | {"seconds": whole, "communication": moving})
    tried = []
    for exponent in EXPONENTS:
        traces = [drawn(exponent, seed) for seed in range(DRAWN)]
        seconds = [orders(alone(trace, EQUAL)) for trace in each(traces, stop)]
        sjf, rcs = (max(each[name][1] / each["Aurora"][1] for each in seconds) for name in ("SJF", "RCS"))
        heat_of_these = np.mean([hottest(trace) for trace in traces])
        tried.append(f"where it takes {heat_of_these:.1f} ×, {sjf:.2f} and {rcs:.2f}")
    why = (
        f"an order saves less where one receiver dominates; in our layers the hottest expert takes {spoken(heat)} × the mean. "
        f"On drawn traffic SJF and RCS take at most, {', '.join(tried)}"
    )
    claim = Claim(
        quantity="communication time of SJF over Aurora's, highest of all layers",
        published=SJF_AT_MOST,
        ours=max(gains),
        neutral=1.0,
        why=why,
    )
    return Exhibit(claims=(claim,), rows=tuple(rows), chart=_CHART, note=NOTE)


def _figure_11b(stop: Stop) -> Exhibit:
    rows, gains, followed = [], [], []
    for dataset, model, layer, trace in each(bars(), stop):
        problem = alone(trace, MIXED, model)
        ours, theirs = random_gpus(problem)
        best = follow([trace], MIXED, aurora_rows([trace], MIXED), "best").total
        moved = [follow([trace], MIXED, random_rows([trace], seed), "matched").total for seed in range(DRAWS)]
        followed.append(float(np.mean(moved)) / best)
        printed = run(SYSTEMS["aurora-printed"], problem).result.objective
        gains.append(theirs / ours)
        bar = {"data set": f"stand-ins for {dataset}", "bar": bar_name(model, layer)}
        named = {"Aurora": ours, "RGA": theirs, "Aurora as printed": printed}
        rows += [bar | {"system": name, "seconds": seconds} for name, seconds in named.items()]
    tried = []
    for exponent in RGA_EXPONENTS:
        traces = [drawn(exponent, seed) for seed in range(DRAWN)]
        times = [random_gpus(alone(trace, MIXED)) for trace in each(traces, stop)]
        heat = np.mean([hottest(trace) for trace in traces])
        tried.append(f"where it takes {heat:.1f} × the mean {spoken([theirs / ours for ours, theirs in times])}")
    why = (
        f"random GPUs (the mean of {DRAWS} draws) cost the more, the hotter the hottest expert, and our layers differ more. "
        f"On drawn traffic, {', '.join(tried)}; on ours, where tokens go with their experts, as many as these are sent, "
        f"{spoken(followed)}"
    )
    claim = Claim(
        quantity="inference time with random GPUs (RGA) over Aurora's, lowest and highest of all layers",
        published=RGA,
        ours=span(gains),
        neutral=1.0,
        why=why,
    )
    return Exhibit(claims=(claim,), rows=tuple(rows), chart=_CHART, note=NOTE)


ENTRIES = (
    Entry(
        "Figure 11a",
        "§8.2, Q1",
        "orders of sends on equal GPUs",
        _figure_11a,
        openings(EQUAL, ("aurora",)) + openings(EQUAL, ("sjf", "rcs"), options={"placement": "aurora"}),
    ),
    Entry(
        "Figure 11b",
        "§8.2, Q1",
        "GPUs for one model's experts on mixed GPUs",
        _figure_11b,
        openings(MIXED, ("aurora", "aurora-printed", "rga")),
    ),
)
