"""The systems by the names that users know, each a recipe over the kernels."""

from engine.systems import aurora, baselines, eplb, exflow, joint, lina
from engine.systems.base import Option, Outcome, System, run

SYSTEMS: dict[str, System] = {
    system.name: system for module in (aurora, exflow, lina, eplb, joint, baselines) for system in module.SYSTEMS
}

__all__ = ["SYSTEMS", "Option", "Outcome", "System", "run"]
