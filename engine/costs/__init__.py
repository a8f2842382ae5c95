"""The sources of times. Each is a `CostModel`; a page always says which one a number came from."""

from typing import TYPE_CHECKING, Any

from engine.costs.alpha_beta import AlphaBeta, CostProfile, Line, fit_line
from engine.costs.base import CostModel, Datasheet
from engine.costs.choice import Combined, combine
from engine.costs.measured import CollectiveTimes, GemmTimes, MeasuredTimes, MemoryTimes, fit_profile
from engine.costs.profiled import Profiled

if TYPE_CHECKING:
    from engine.costs.deepep import DeepEP
    from engine.costs.silicon import Silicon

__all__ = [
    "AlphaBeta",
    "CollectiveTimes",
    "Combined",
    "CostModel",
    "CostProfile",
    "Datasheet",
    "DeepEP",
    "GemmTimes",
    "Line",
    "MeasuredTimes",
    "MemoryTimes",
    "Profiled",
    "Silicon",
    "combine",
    "fit_line",
    "fit_profile",
]


def __getattr__(name: str) -> Any:
    """The sources with tables that pandas reads, imported when one is asked for."""
    if name == "DeepEP":
        from engine.costs.deepep import DeepEP

        return DeepEP
    if name == "Silicon":
        from engine.costs.silicon import Silicon

        return Silicon
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
