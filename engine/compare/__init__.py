"""Comparison of plans: one baseline, one standing, one verdict (the gain on recordings that a plan was not made from, its
price, and one word on both), and studies that make many plans and score each.

A module is imported when one of its names is first asked for: `inspect` reads a recording without any planner.
"""

from importlib import import_module
from typing import Any

MODULES = {
    "baseline": ("baseline_of", "plan_of_placement", "running"),
    "evidence": ("Criterion", "Decision", "Evidence", "Move", "Thresholds", "Word", "decide"),
    "held_out": ("HeldOut", "roles_of"),
    "verdict": ("Beside", "Judgement", "Verdict", "evidence_of", "verdict_from", "verdict_of"),
    "wording": ("WORDS", "break_even"),
}
"""The names that this room offers, by module."""


def __getattr__(name: str) -> Any:
    """A name of the room, from its module."""
    for module, names in MODULES.items():
        if name in names:
            return getattr(import_module(f"engine.compare.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
