"""The systems by the names that users know, each a recipe over the kernels.

A system is a file here with a tuple `SYSTEMS`, and a line below: the command line, the pages and the studies know it from
there. The recipes are imported when one is first asked for, so that `--help` can list them at once.
"""

from importlib import import_module
from typing import Any

FILES = {
    # One a line, with the names of its systems.
    "aurora": ("aurora", "aurora-printed", "aurora-sorted", "aurora-decoupled", "rec", "packing"),
    "exflow": ("exflow",),
    "lina": ("lina",),
    "eplb": ("eplb",),
    "joint": ("joint",),
    "coactivation": ("coactivation",),
    "best_goals": ("best",),
    "baselines": ("linear", "round-robin", "random", "rcs", "sjf", "rga"),
    "training.lancet": ("lancet",),
    "training.pipemoe": ("pipemoe",),
    "training.lina": ("lina",),
    "training.baselines": ("deepspeed", "tutel", "fastermoe", "raf"),
    "training.best": ("best",),
}

__all__ = [
    "FILES",
    "SYSTEMS",
    "TRAINING",
    "Outcome",
    "System",
    "baseline_for",
    "named_for",
    "proposed_for",
    "run",
    "system_named",
    "systems_for",
    "usual_plan",
]


def __getattr__(name: str) -> Any:
    """A name of the registry, which imports every recipe, or of what systems are made of."""
    if name in __all__:
        known = vars(import_module("engine.systems.registry")) | vars(import_module("engine.systems.base"))
        return known[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
