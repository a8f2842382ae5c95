"""Lina's MoE layers and all-to-alls in a training step (§7.2.1): Figures 11, 12 and 13, packed as in the paper."""

from functools import cache
from itertools import product

import numpy as np

from engine.reproduce.exhibits import Chart, Claim, Exhibit
from engine.reproduce.lina.training import EXPERTS, LINK, PCIE, TASKS, packed_timeline, timeline
from engine.result import Stop
from engine.timeline import Timeline

LAYER = {"forward": {2: 1.84, 8: 1.89}, "backward": {2: 2.41, 8: 2.32}}
"""Figures 11 and 12: mean gain of an MoE layer in each pass, by experts, where the text has it."""
EXCHANGES = {4: 2.21, 8: 2.39, 16: 2.31}
"""Figure 13: mean gain of the all-to-alls of the backward pass, by experts."""
INSIDE = ("gate", "dispatch", "experts", "combine", "aggregate")


def moe_seconds(found: Timeline) -> dict[str, float]:
    """Seconds from the first start to the last end of an MoE layer's operators, summed over the layers; "exchanges": of the
    all-to-alls of the backward pass alone. Weight gradients do not count."""
    events = found.events
    times = zip(found.labels, *(events[name].tolist() for name in ("resource", "start", "end")), strict=True)
    spans: dict[tuple[str, str], list[tuple[float, float]]] = {}
    exchanged = 0.0
    for label, resource, start, end in times:
        name = label.split(" · ")[0]
        way = "backward" if name.startswith("dx.") else "forward"
        layer, _, operator = name.removeprefix("dx.").partition(".")
        if resource or not layer.isdigit() or not operator.startswith(INSIDE):
            continue
        spans.setdefault((way, layer), []).append((start, end))
        if way == "backward" and operator in ("dispatch", "combine"):
            exchanged += end - start
    seconds = {"exchanges": exchanged, "forward": 0.0, "backward": 0.0}
    for (way, _), own in spans.items():
        seconds[way] += max(end for _, end in own) - min(start for start, _ in own)
    return seconds


@cache
def gains(model: str, experts: int, link: float | None = None) -> dict[str, float]:
    """The baseline's seconds over those of Lina's, packed as in the paper, by part of a step; inf where none are left.

    link: see `testbed`
    """
    base = moe_seconds(timeline(model, experts, "deepspeed", link=link))
    lina = moe_seconds(packed_timeline(model, experts, link))
    return {part: base[part] / lina[part] if lina[part] else float("inf") for part in base}


def _mean(part: str, experts: int, link: float | None = None) -> float:
    return float(np.mean([gains(model, experts, link)[part] for model in TASKS]))


def _why(part: str, experts: int) -> str:
    """The links of a node changed, and the gain with them."""
    where = {
        16: f"Transformer-XL's groups of four GPUs exchange inside a node, over NVLink; of GPT-2 alone it is "
        f"{gains('GPT-2', 16)[part]:.2f}",
        8: "packed experts exchange inside a node, over NVLink",
    }
    return (
        f"{where.get(experts, 'a node exchanges over NVLink in any case')}; with cards on PCIe, 11 GB/s between two, it is "
        f"{_mean(part, experts, PCIE):.2f}, at Table 1's 4.4 GB/s {_mean(part, experts, LINK):.2f}"
    )


def layer_time(stop: Stop) -> Exhibit:
    """Figures 11 and 12."""
    return _exhibit(stop, LAYER, "speedup of an MoE layer")


def exchange_time(stop: Stop) -> Exhibit:
    """Figure 13."""
    return _exhibit(stop, {"exchanges": EXCHANGES}, "speedup of the all-to-alls of the backward pass")


def _exhibit(stop: Stop, published: dict[str, dict[int, float]], title: str) -> Exhibit:
    claims, rows = [], []
    for experts in EXPERTS:
        if stop():
            break
        found = {model: gains(model, experts) for model in TASKS}
        for part, model in product(published, TASKS):
            if np.isfinite(found[model][part]):
                row = {"model": model, "experts": f"{experts} experts", "pass": part, "speedup": found[model][part]}
                rows.append(row | {"published": published[part].get(experts)})
        for part, numbers in published.items():
            if experts in numbers:
                of_pass = "" if part == "exchanges" else f", {part} pass"
                claims.append(
                    Claim(
                        quantity=f"{title}{of_pass}, {experts} experts, mean of three models",
                        published=numbers[experts],
                        ours=_mean(part, experts),
                        neutral=1.0,
                        why=_why(part, experts),
                    )
                )
    chart = Chart(
        kind="bars",
        x="experts",
        y="speedup",
        series="model",
        facet="pass",
        published="published",
        x_title="experts and GPUs",
        y_title=title,
    )
    note = "Packed as in the paper. Published marks are means of the three models; with 2 experts packing leaves no all-to-all."
    return Exhibit(claims=tuple(claims), rows=tuple(rows), chart=chart, note=note)
