"""Aurora's simulated setting (§8.1): clusters, models, and stand-ins for the traffic that Google gave its authors.

Eight GPUs, one expert of a model on each; two models with four MoE layers of eight experts, on two data sets. In place of a
model's traffic on a data set stands a recording of ours: alpha's for B/16 and beta's for B/32, each on the two kinds of text
that it learnt. Of a token its first choice counts, as LIMoE has one; neighbouring experts are taken for one, which leaves
eight; and every second layer is taken, which leaves four. A bar of the figures is one layer.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from engine.catalogue import cluster_presets, model_presets
from engine.compare.synthetic import Recipe
from engine.costs import CostModel, Datasheet
from engine.formats import read_workload
from engine.problem import Problem, make_problem
from engine.reproduce.exhibits import Opening
from engine.systems.options import Value
from engine.workload import RoutingTrace, Workload

SAMPLES = Path(__file__).parents[3] / "sample_traces" / "tiny-moe"
RECORDINGS = {
    ("COCO", "B/16"): "alpha-code",
    ("COCO", "B/32"): "beta-man",
    ("ImageNet", "B/16"): "alpha-prose",
    ("ImageNet", "B/32"): "beta-prose",
}
PRESETS = {"B/16": "LIMoE-B-16", "B/32": "LIMoE-B-32"}
DATASETS = ("COCO", "ImageNet")
RECORDED_LAYERS = (1, 3, 5, 7)
LAYERS = range(len(RECORDED_LAYERS))
EQUAL, MIXED = "aurora-8", "mixed-8"
DRAWS = 10
"""Draws of a random system; a bar is their mean."""

NOTE = (
    "Google's statistics of LIMoE are not public: recordings of two small models stand in, alpha's code and prose for B/16, "
    "beta's manual pages and prose for B/32, with LIMoE's widths. The paper gives no compute rates; an H100, an A100, a V100 "
    "and an RTX 2080 Ti stand for its four types."
)


def stand_in(dataset: str, *models: str) -> str:
    """Recordings that stand in for models' traffic on a data set, and for which: `alpha-code for B/16 on COCO`"""
    return f"{' and '.join(RECORDINGS[dataset, model] for model in models)} for {' and '.join(models)} on {dataset}"


@cache
def recording(dataset: str, model: str) -> RoutingTrace:
    """The stand-in for a model's traffic on a data set, all four layers. Raises InputError if the samples are not there."""
    name = RECORDINGS[dataset, model]
    trace = read_workload(SAMPLES / f"{name}.npz")
    chosen = (trace.experts[:, RECORDED_LAYERS, :1] // 2).astype(np.int16)
    return replace(trace, name=f"{stand_in(dataset, model)}, 8 experts", experts=chosen, num_experts=trace.num_experts // 2)


def layer_of(trace: RoutingTrace, layer: int) -> RoutingTrace:
    """One layer of it."""
    return replace(trace, name=f"{trace.name}, layer {layer + 1}", experts=trace.experts[:, layer : layer + 1])


@cache
def drawn(exponent: float, seed: int, layers: int = 1) -> RoutingTrace:
    """As many tokens as recorded, their experts drawn by Zipf's law with this exponent, ranked anew in every layer."""
    model = model_presets()[PRESETS["B/16"]].model.model_copy(update={"layers": layers})
    return Recipe(recording("COCO", "B/16").tokens, exponent, 0.0, seed).draw(model)


def hottest(trace: RoutingTrace) -> float:
    """Tokens of the most popular expert of a layer over the mean expert's, mean over layers."""
    return float((trace.load.max(axis=1) / trace.load.mean(axis=1)).mean())


def alone(workload: Workload, cluster: str, model: str = "B/16", cost: CostModel | None = None) -> Problem:
    """A model on its own GPUs."""
    own = model_presets()[PRESETS[model]].model.model_copy(update={"layers": workload.layers})
    return make_problem(workload, cluster_presets()[cluster].cluster, own, cost or Datasheet())


def together(first: Workload, second: Workload, cluster: str, cost: CostModel | None = None) -> Problem:
    """B/16 and B/32 on the same GPUs."""
    models = [model_presets()[name].model.model_copy(update={"layers": first.layers}) for name in PRESETS.values()]
    return make_problem(first, cluster_presets()[cluster].cluster, models[0], cost or Datasheet(), second=(second, models[1]))


def bars() -> Iterator[tuple[str, str, int, RoutingTrace]]:
    """Data set, model, layer and traffic of every bar of Figure 11a and b."""
    for dataset in DATASETS:
        for model in PRESETS:
            for layer in LAYERS:
                yield dataset, model, layer, layer_of(recording(dataset, model), layer)


def pairs() -> Iterator[tuple[str, int, RoutingTrace, RoutingTrace]]:
    """Data set, layer and the traffic of both models of every bar of Figure 11c and d."""
    for dataset in DATASETS:
        for layer in LAYERS:
            yield dataset, layer, *(layer_of(recording(dataset, model), layer) for model in PRESETS)


def bar_name(model: str, layer: int) -> str:
    """The name of a bar, as the figures have it."""
    return f"{model} layer {layer + 1}"


def openings(
    cluster: str, systems: tuple[str, ...], two: bool = False, options: dict[str, Value] | None = None
) -> tuple[Opening, ...]:
    """The four layers of each data set, of each model or of both, to be opened and planned by each of these systems."""
    served = [(dataset, models) for dataset in DATASETS for models in ([tuple(PRESETS)] if two else zip(PRESETS))]
    said = "".join(f", {name} {value}" for name, value in (options or {}).items())
    return tuple(
        Opening(
            f"{stand_in(dataset, *models)}, {cluster}: {system}{said}",
            partial(_opened, dataset, models, cluster),
            system,
            options or {},
        )
        for dataset, models in served
        for system in systems
    )


def _opened(dataset: str, models: tuple[str, ...], cluster: str) -> Problem:
    traces = [recording(dataset, model) for model in models]
    return together(*traces, cluster) if len(models) == 2 else alone(traces[0], cluster, models[0])


def span(values: list[float]) -> tuple[float, float]:
    """Lowest and highest."""
    return float(min(values)), float(max(values))


def spoken(values: list[float]) -> str:
    """`1.21 to 1.38`"""
    return "{:.2f} to {:.2f}".format(*span(values))
