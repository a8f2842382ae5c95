"""The systems by the names that users know, each a recipe over the kernels.

A system is a file here with a tuple `SYSTEMS`, and a line below: the command line, the pages and the studies know it from
there. The first that can plan for what is open is the one that is proposed.
"""

from importlib import import_module

from engine.problem import Problem
from engine.systems.base import Outcome, System, run


def _systems_of(*files: str) -> dict[str, System]:
    """The systems of files of this folder, in their order, by name."""
    return {system.name: system for file in files for system in import_module(f"{__name__}.{file}").SYSTEMS}


SYSTEMS: dict[str, System] = _systems_of(
    # One file a line.
    "aurora",
    "exflow",
    "lina",
    "eplb",
    "joint",
    "baselines",
)
"""For inference, of one model or two."""

TRAINING: dict[str, System] = _systems_of(
    # One file a line.
    "training.lancet",
    "training.pipemoe",
    "training.lina",
    "training.baselines",
)
"""For a training step."""


def systems_for(problem: Problem) -> dict[str, System]:
    """Those that can plan for what is open."""
    if problem.step is not None:
        return TRAINING
    models = 1 if problem.second is None else 2
    return {name: system for name, system in SYSTEMS.items() if models in system.models}


def proposed_for(problem: Problem) -> System:
    """The one that is proposed until a person chooses."""
    return next(iter(systems_for(problem).values()))


__all__ = ["SYSTEMS", "TRAINING", "Outcome", "System", "proposed_for", "run", "systems_for"]
