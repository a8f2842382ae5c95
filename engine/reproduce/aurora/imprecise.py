"""Traffic other than planned for (§8.2, Figure 14): plans made on the first layer's traffic serve that of more layers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from engine.problem import Problem
from engine.reproduce.aurora.setting import (
    DATASETS,
    DRAWS,
    LAYERS,
    MIXED,
    NOTE,
    PRESETS,
    alone,
    drawn,
    hottest,
    layer_of,
    openings,
    recording,
    stand_in,
    together,
)
from engine.reproduce.aurora.tokens_follow import TOKEN, Rows, aurora_rows, follow, random_rows
from engine.reproduce.exhibits import Chart, Claim, Entry, Exhibit, each
from engine.result import Floats, Stop
from engine.simulate import simulate
from engine.systems import SYSTEMS, run
from engine.workload import RoutingTrace, TrafficMatrix

PRECISE, IMPRECISE = {1: 1.90, 2: 2.0}, {1: 1.60, 2: 1.80}
MOST_LOST = 0.158
EXPONENT = 0.6
DRAWN = 4
BASELINES = {1: ("rga", {}), 2: ("rec", {"gpus": "random"})}
NAMES = {1: "RGA, one model", 2: "RGA + REC, two models"}
_CHART = Chart(
    kind="lines",
    x="imprecision",
    y="speedup",
    series="traffic",
    facet="baseline",
    x_title="part of the traffic that is other layers'",
    y_title="speedup over random GPUs",
)


def level_of(layers: int) -> float:
    """The part of the traffic that is not the first layer's."""
    return 1 - 1 / layers


def gains(models: Sequence[RoutingTrace]) -> list[float]:
    """Speed over the baseline of random GPUs, on the traffic of the first layer, of the first two, and so on.

    models: one or two, with all their layers
    """
    planned = _problem(models, 1)
    system, options = BASELINES[len(models)]
    ours = run(SYSTEMS["aurora"], planned).result.solution
    theirs = [run(SYSTEMS[system], planned, {**options, "seed": seed}).result.solution for seed in range(DRAWS)]
    found = []
    for layers in range(1, models[0].layers + 1):
        served = _problem(models, layers)
        found.append(float(np.mean([simulate(plan, served).total for plan in theirs]) / simulate(ours, served).total))
    return found


def gains_of_followed(models: Sequence[RoutingTrace]) -> list[float]:
    """The same where tokens go with their experts."""
    planned = [layer_of(trace, 0) for trace in models]

    def seconds(rows: Rows, order: str, layers: int) -> float:
        served = [[layer_of(trace, layer) for layer in range(layers)] for trace in models]
        return follow(planned, MIXED, rows, order, served).total

    best, random = aurora_rows(planned, MIXED), [random_rows(planned, seed) for seed in range(DRAWS)]
    return [
        float(np.mean([seconds(rows, "matched", layers) for rows in random])) / seconds(best, "best", layers)
        for layers in range(1, models[0].layers + 1)
    ]


def _problem(models: Sequence[RoutingTrace], layers: int) -> Problem:
    """The mean traffic of the first so many layers, on the mixed GPUs."""
    workloads = []
    for trace in models:
        demand = trace.demand(trace.num_experts)[:layers].mean(axis=0, keepdims=True)
        workloads.append(TrafficMatrix(f"{trace.name}, layers 1 to {layers}", demand * TOKEN, TOKEN))
    return alone(workloads[0], MIXED) if len(models) == 1 else together(*workloads, MIXED)


def agreeing(trace: RoutingTrace, others: int | None = None) -> RoutingTrace:
    """The same recording with experts renamed, so that layers rank them by popularity as the first does.

    others: so many layers after the first; None: all
    """
    order = np.argsort(-trace.load, axis=1, kind="stable")
    name = np.tile(np.arange(trace.num_experts), (trace.layers, 1))
    agreed = slice(None if others is None else others + 1)
    np.put_along_axis(name[agreed], order[agreed], np.broadcast_to(order[0], order[agreed].shape), axis=1)
    renamed = name[np.arange(trace.layers)[:, None], trace.experts].astype(np.int16)
    return replace(trace, experts=renamed)


def _served(count: int) -> dict[str, tuple[RoutingTrace, ...]]:
    if count == 1:
        return {stand_in(dataset, model): (recording(dataset, model),) for dataset in DATASETS for model in PRESETS}
    return {f"both stand-ins for {dataset}": tuple(recording(dataset, model) for model in PRESETS) for dataset in DATASETS}


def _drawn(count: int) -> list[tuple[RoutingTrace, ...]]:
    return [tuple(drawn(EXPONENT, 10 * seed + model, len(LAYERS)) for model in range(count)) for seed in range(DRAWN)]


def _mean(find: Callable[[Sequence[RoutingTrace]], list[float]], cases: Iterable[Sequence[RoutingTrace]], stop: Stop) -> Floats:
    """float64[layers]: the mean of the cases."""
    return np.mean([find(models) for models in each(cases, stop)], axis=0)


def _figure_14(stop: Stop) -> Exhibit:
    rows, claims, lost, lost_agreed = [], [], [], []
    for count, name in NAMES.items():
        of_bar = {served: gains(models) for served, models in each(_served(count).items(), stop)}
        rows += [
            {"baseline": name, "traffic": served, "imprecision": level_of(place + 1), "speedup": gain}
            for served, own in of_bar.items()
            for place, gain in enumerate(own)
        ]
        mean = np.mean(list(of_bar.values()), axis=0)
        recorded, skewed = list(_served(count).values()), _drawn(count)
        heat = np.mean([hottest(trace) for models in skewed for trace in models])
        agreed = [tuple(map(agreeing, models)) for models in recorded]
        of_agreed = [gains(models) for models in each(agreed, stop)]
        ways = {
            "all layers' popular experts the same": np.mean(of_agreed, axis=0),
            "tokens that go with their experts": _mean(gains_of_followed, recorded, stop),
            "both": _mean(gains_of_followed, agreed, stop),
            f"tokens with theirs, drawn, hottest {heat:.1f} × the mean": _mean(gains_of_followed, skewed, stop),
        }
        for others in range(1, len(LAYERS)):
            alike = [tuple(agreeing(trace, others) for trace in models) for models in skewed]
            ways[f"and {others} of 3 other layers' popular experts the first's"] = _mean(gains_of_followed, alike, stop)
        tried = "; ".join(f"{way} {ends[0]:.2f} and {ends[-1]:.2f}" for way, ends in ways.items())
        lost += [1 - own[-1] / own[0] for own in of_bar.values()]
        lost_agreed += [1 - own[-1] / own[0] for own in of_agreed]
        claims += [
            Claim(
                quantity=f"speedup over {name}, {100 * level_of(place + 1):.0f} % of the traffic imprecise",
                published=published[count],
                ours=float(mean[place]),
                neutral=1.0,
                why=f"our layers have little in common and our GPUs equal tokens; that changed, at 0 % and at 75 %: {tried}",
            )
            for place, published in ((0, PRECISE), (len(mean) - 1, IMPRECISE))
        ]
    claims.append(
        Claim(
            quantity="part of the speedup that is lost at 75 %, the most",
            published=MOST_LOST,
            ours=float(max(lost)),
            neutral=0.0,
            why=f"our layers have little in common and lose {100 * min(lost):.1f} to {100 * max(lost):.1f} %; where all "
            f"layers' popular experts are the same they lose at most {100 * max(lost_agreed):.1f} %",
        )
    )
    return Exhibit(claims=tuple(claims), rows=tuple(rows), chart=_CHART, note=NOTE)


ENTRIES = (
    Entry(
        "Figure 14",
        "§8.2, Q4",
        "speedup on traffic other than planned for",
        _figure_14,
        openings(MIXED, ("aurora", "rga"))
        + openings(MIXED, ("aurora",), True)
        + openings(MIXED, ("rec",), True, BASELINES[2][1]),
    ),
)
