"""The sources of times. Each is a `CostModel`; a page always says which one a number came from."""

from engine.costs.alpha_beta import AlphaBeta, CostProfile, Line, fit_line
from engine.costs.base import CostModel, Datasheet
from engine.costs.choice import Combined, combine
from engine.costs.deepep import DeepEP
from engine.costs.measured import CollectiveTimes, GemmTimes, MeasuredTimes, MemoryTimes, fit_profile
from engine.costs.profiled import Profiled
from engine.costs.silicon import Silicon
