"""The systems by the names that users know, each a recipe over the kernels."""

from engine.systems import aurora, baselines, eplb
from engine.systems.base import Option, Outcome, System, run

SYSTEMS: dict[str, System] = {system.name: system for system in (*aurora.SYSTEMS, *eplb.SYSTEMS, *baselines.SYSTEMS)}

__all__ = ["SYSTEMS", "Option", "Outcome", "System", "run"]
