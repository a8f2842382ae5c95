"""The systems by the names that users know, each a recipe over the kernels."""

from engine.problem import Problem
from engine.systems import aurora, baselines, eplb, exflow, joint, lina, training
from engine.systems.base import Option, Outcome, System, run

SYSTEMS: dict[str, System] = {
    system.name: system for module in (aurora, exflow, lina, eplb, joint, baselines) for system in module.SYSTEMS
}
"""For inference, of one model or two."""

TRAINING: dict[str, System] = {system.name: system for system in training.SYSTEMS}
"""For a training step."""


def systems_for(problem: Problem) -> dict[str, System]:
    """Those that can plan for what is open."""
    if problem.step is not None:
        return TRAINING
    models = 1 if problem.second is None else 2
    return {name: system for name, system in SYSTEMS.items() if models in system.models}


__all__ = ["SYSTEMS", "TRAINING", "Option", "Outcome", "System", "run", "systems_for"]
