"""What a writer of recordings is, and what writers have in common."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.errors import InputError
from engine.model import MoEModel
from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix, Workload

KINDS = {RoutingTrace: "routing by token", ExpertLoad: "expert loads", TrafficMatrix: "a traffic matrix"}


@dataclass(frozen=True)
class Writer:
    """suffix: of the files; title: in a sentence, after "as"; carries: the kinds of recordings it can write

    write: writes the file and returns what it could not say, a phrase each; raises InputError where the recording does not
    fit the format. The model is None where it is not known.
    """

    name: str
    suffix: str
    title: str
    carries: tuple[type[Workload], ...]
    write: Callable[[Workload, Path, MoEModel | None], tuple[str, ...]]


def unsaid(workload: Workload, **said: str) -> tuple[str, ...]:
    """The phrases for those parts of a workload that it has. said: by the part's name what is lost with it"""
    return tuple(text for part, text in said.items() if getattr(workload, part) is not None)


def layer_numbers(workload: RoutingTrace | ExpertLoad, model: MoEModel | None) -> tuple[int, ...]:
    """The model layer of every layer; raises InputError where neither the recording nor the model says it."""
    if workload.model_layers is not None:
        return workload.model_layers
    if model is not None and workload.layers == len(model.moe_layers):
        return model.moe_layers
    if model is not None and workload.layers == model.layers:
        return tuple(range(model.layers))
    has = "" if model is None else f", and {model.name} has {len(model.moe_layers)} MoE layers, not {workload.layers}"
    raise InputError(
        f"{workload.name}: does not say which of the model's layers were recorded{has}; give the model that was recorded "
        "(--model)"
    )


def loads_of(workload: RoutingTrace | ExpertLoad, model: MoEModel | None) -> tuple[ExpertLoad, tuple[str, ...]]:
    """The loads in a recording, and what a format of loads alone does not say of it."""
    if isinstance(workload, ExpertLoad):
        return workload, ()
    loads = ExpertLoad(workload.name, workload.load, layer_numbers(workload, model))
    return loads, ("which token chose what: only counts are kept",)


def is_whole(counts: np.ndarray) -> bool:
    """Whether these numbers (float64[...]) have no fractions."""
    return bool((counts == np.rint(counts)).all())
