"""How long a thing takes. Every source of times is a `CostModel`; a page always says which one a number came from."""

from engine.costs.alpha_beta import AlphaBeta, CostProfile, Line, fit_line
from engine.costs.base import CostModel
from engine.costs.datasheet import Datasheet

__all__ = ["AlphaBeta", "CostModel", "CostProfile", "Datasheet", "Line", "fit_line"]
