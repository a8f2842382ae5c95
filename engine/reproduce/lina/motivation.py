"""Lina's measurements of its baseline (§2.2): Table 1, Figures 2 and 4 of the time, and Figure 6 of popularity."""

from dataclasses import replace
from functools import cache

import numpy as np

from engine.costs import Datasheet
from engine.costs.scaled import Scaled
from engine.overlap.operator_graph import Operator
from engine.reproduce.exhibits import Chart, Claim, Exhibit
from engine.reproduce.lina.layers import moe_seconds
from engine.reproduce.lina.routing import BATCH, NAMES, RANKED, STAND_IN, half, recording, shuffled
from engine.reproduce.lina.training import LINK, PCIE, TABLE_1, factors_of_figure_7, paper_problem
from engine.result import Stop
from engine.simulate.training import price_step, simulate_step
from engine.systems import TRAINING, run
from engine.systems.pieces import linear_placement
from engine.timeline import Timeline
from engine.training import balanced_load

TRAINED = {
    (4, 12): (0.259, 0.367),
    (4, 24): (0.589, 0.354),
    (4, 36): (0.979, 0.382),
    (16, 12): (0.333, 0.395),
    (16, 24): (0.715, 0.376),
    (16, 36): (1.145, 0.368),
}
"""Table 1: seconds of a step's all-to-alls and their part of it, by GPUs and layers of Transformer-XL."""
SERVED = {
    (4, 12): (0.073, 0.274),
    (4, 24): (0.103, 0.262),
    (4, 36): (0.153, 0.283),
    (16, 12): (0.102, 0.325),
    (16, 24): (0.177, 0.317),
    (16, 36): (0.243, 0.274),
}
"""Table 1: the same of inference."""
OF_LAYER = 0.749
"""Figure 2: all-to-alls in the forward pass of an MoE layer."""
GROWS = {2: 0.334, 16: 0.445}
"""Figure 4: all-to-alls in a step, by experts."""
SKEW = {4: 4.02, 16: 5.56}
"""Figure 6: tokens of the most popular expert over those of the least, in a batch."""


def trained(gpus: int, layers: int, link: float | None = None, compute: float = 1.0) -> tuple[float, float]:
    """Seconds of the all-to-alls in the baseline's step, and their part of it; parameters as of `step_of`."""
    found = step_of(gpus, layers, link, compute)
    spent = exchanged(found)
    return spent, spent / found.total


@cache
def step_of(gpus: int, layers: int, link: float | None = None, compute: float = 1.0) -> Timeline:
    """The baseline's step of Table 1's models, at any number of layers. compute: so many times the datasheet's seconds"""
    problem = paper_problem(replace(TABLE_1, layers=layers), gpus, Scaled(Datasheet(), compute=1 / compute), link=link)
    return simulate_step(run(TRAINING["deepspeed"], problem).result.solution, problem)


def exchanged(found: Timeline) -> float:
    """Seconds of all-to-alls; in the baseline no computation runs meanwhile."""
    events = found.events[(found.events["resource"] == 0) & found.events["kind"].isin(("dispatch", "combine"))]
    return float((events["end"] - events["start"]).sum())


def served(gpus: int, layers: int, link: float | None = None, skew: float = 1.0) -> tuple[float, float]:
    """Seconds of the all-to-alls of a forward pass with top-1 gates, and their part of it. skew: so many times as long as
    balanced ones"""
    problem = paper_problem(replace(TABLE_1, layers=layers), gpus, link=link)
    model = problem.model.model_copy(update={"experts_per_token": 1})
    problem = replace(problem, model=model, workload=balanced_load(model))
    priced = price_step(problem, linear_placement(problem))

    def of(operator: Operator, seconds: np.ndarray) -> float:
        return float(seconds[0].max()) * (skew if operator.network else 1.0)

    pairs = [pair for pair in zip(priced.graph.operators, priced.seconds, strict=True) if pair[0].phase == "forward"]
    spent = sum(of(*pair) for pair in pairs if pair[0].network)
    return spent, spent / sum(of(*pair) for pair in pairs)


def table_1(stop: Stop) -> Exhibit:
    """Table 1."""
    claims, rows, slow = [], [], factors_of_figure_7()[0]
    for task, table in (("training", TRAINED), ("inference", SERVED)):
        for (gpus, layers), printed in table.items():
            if stop():
                return Exhibit(claims=(), rows=tuple(rows))
            changes = {"link": LINK} if gpus == 4 else {}
            of = trained if task == "training" else served
            longer = {"compute": slow} if task == "training" else {"skew": 2.0}
            tested = (
                f"computation {slow:.1f} times as long, as in Figure 7" if task == "training" else "all-to-alls twice as long"
            )
            ours, changed = of(gpus, layers), of(gpus, layers, **changes, **longer)
            cards = of(gpus, layers, link=PCIE) if changes else None
            rest, own_rest = (1e3 * spent * (1 / part - 1) / layers for spent, part in (printed, ours))
            links = " and four GPUs at 4.4 GB/s" if changes else ""
            for what, place in (("all-to-alls, s", 0), ("part of the time in all-to-alls", 1)):
                over = f"; over PCIe, 11 GB/s, {cards[place]:.3g}" if cards else ""
                why = (
                    f"with {tested}{links} {changed[place]:.3g}{over}; all but all-to-alls takes {rest:.0f} ms a layer by the "
                    f"table, here {own_rest:.1f}"
                )
                quantity = f"{what}, {task}, {gpus} GPUs, {layers} layers"
                claims.append(Claim(quantity=quantity, published=printed[place], ours=ours[place], why=why))
            rows.append(
                {"GPUs": f"{gpus} GPUs", "layers": f"{layers} layers", "task": task, "part": ours[1], "published": printed[1]}
            )
    chart = Chart(
        kind="bars",
        x="layers",
        y="part",
        series="GPUs",
        facet="task",
        published="published",
        x_title="layers",
        y_title="part of the time in all-to-alls",
    )
    return Exhibit(claims=tuple(claims), rows=tuple(rows), chart=chart, note=NOTE)


def shares(stop: Stop) -> Exhibit:
    """Figures 2 and 4."""
    claims, rows, slow = [], [], factors_of_figure_7()[0]
    for gpus in (2, 4, 8, 16):
        if stop():
            return Exhibit(claims=(), rows=tuple(rows))
        ours = trained(gpus, 12)[1]
        rows.append({"experts": f"{gpus} experts", "part": ours, "published": GROWS.get(gpus)})
        if gpus in GROWS:
            cards = [trained(gpus, 12, PCIE, factor)[1] for factor in (1.0, slow)]
            why = (
                f"with computation {slow:.1f} times as long, as in Figure 7, {trained(gpus, 12, compute=slow)[1]:.2f}; with "
                f"cards on PCIe, 11 GB/s between two, {cards[0]:.2f}, with both {cards[1]:.2f}"
            )
            quantity = f"part of a training step in all-to-alls, {gpus} experts"
            claims.append(Claim(quantity=quantity, published=GROWS[gpus], ours=ours, why=why))
    found = step_of(16, 12)
    forward = moe_seconds(found)["forward"]
    events = found.events[found.events["resource"] == 0]
    ahead = [label.partition(".")[0].isdigit() for label in np.array(found.labels)[events.index]]
    sent = events[ahead & events["kind"].isin(("dispatch", "combine")).to_numpy()]
    spent = float((sent["end"] - sent["start"]).sum())
    claims.append(
        Claim(
            quantity="part of an MoE layer's forward pass in all-to-alls, 16 experts",
            published=OF_LAYER,
            ours=spent / forward,
            why=f"with computation {slow:.1f} times as long, as in Figure 7, {spent / (spent + slow * (forward - spent)):.2f}",
        )
    )
    chart = Chart(
        kind="bars", x="experts", y="part", published="published", x_title="experts and GPUs", y_title="part of a step"
    )
    return Exhibit(claims=tuple(claims), rows=tuple(rows), chart=chart, note=NOTE)


def popularity(stop: Stop) -> Exhibit:
    """Figure 6."""
    claims, rows = [], []
    for experts, published in SKEW.items():
        if stop():
            return Exhibit(claims=(), rows=tuple(rows), note=STAND_IN)
        found = {name: _skew(name, experts) for name in NAMES}
        ranked = [_skew(name + RANKED, experts) for name in NAMES] if experts < 16 else []
        rows += [
            {"recording": name, "experts": f"{experts} experts", "most over least": value, "published": published}
            for name, value in found.items()
        ]
        way = f"put together by popularity instead {min(ranked):.1f} to {max(ranked):.1f}" if ranked else "its own 16 experts"
        claims.append(
            Claim(
                quantity=f"tokens of the most popular expert over those of the least in a batch, {experts} experts, median",
                published=published,
                ours=(min(found.values()), max(found.values())),
                neutral=1.0,
                why=f"the recordings' model has 16 experts, here {way}; an expert with few tokens makes the ratio large",
            )
        )
    chart = Chart(
        kind="bars",
        x="experts",
        y="most over least",
        series="recording",
        published="published",
        x_title="experts of a layer",
        y_title="tokens of the most popular over those of the least",
    )
    return Exhibit(claims=tuple(claims), rows=tuple(rows), chart=chart, note=STAND_IN)


def _skew(name: str, experts: int) -> float:
    """Median over served batches and layers; an expert without a token counts as one with one."""
    served = shuffled(half(recording(name, experts), 1), BATCH)
    batches = served.experts[:, :, 0].astype(np.int64).reshape(-1, BATCH, served.layers)
    counts = np.stack([(batches == expert).sum(axis=1) for expert in range(experts)])
    return float(np.median(counts.max(axis=0) / np.maximum(counts.min(axis=0), 1)))


NOTE = (
    "Transformer-XL of width 512, 15 × 512 tokens on a GPU in training and inference, as Table 1's parameters and Figure 7's "
    "all-to-all have it; DeepSpeed's step. Inference: a forward pass with top-1 gates, balanced."
)
