"""A training step of a plan: priced, issued as tasks, run on streams, and bounded."""

from engine.simulate.training.bound import bound_of_step
from engine.simulate.training.pricing import MAX_PARTS, PricedStep, graph_of, price_step
from engine.simulate.training.program import check_step_parts
from engine.simulate.training.step import simulate_step, step_seconds
