"""Which models a recording may come from, by what it shows of one: MoE layers, experts and experts per token."""

from collections.abc import Mapping

from engine.model import MoEModel
from engine.workload import TrafficMatrix, Workload

USE = {"name", "batch", "sequence_length"}
"""What of a model is its name, or how it is run: models that differ in these alone are one."""


def models_that_fit(workload: Workload, models: Mapping[str, MoEModel]) -> list[tuple[str, ...]]:
    """Names of the models that a recording may come from, those of identical sizes together, in the order of `models`; none
    for a traffic matrix, which fits them all. A recording that does not tell experts per token fits any number of them."""
    if isinstance(workload, TrafficMatrix):
        return []
    same: dict[str, list[str]] = {}
    for name, model in models.items():
        shown = (workload.layers, workload.num_experts, workload.k)
        if shown == (len(model.moe_layers), model.experts, workload.k and model.experts_per_token):
            same.setdefault(model.model_dump_json(exclude=USE), []).append(name)
    return [tuple(names) for names in same.values()]
