"""What a plan takes, whatever it is for: the door to inference of one model, of two that share the GPUs, and training."""

from dataclasses import replace

from engine.goal import Goal
from engine.plan import Plan
from engine.problem import Problem
from engine.result import Advance, Stop, never, unwatched
from engine.simulate.colocated import bound_of_colocated, sends_of_colocated, simulate_colocated
from engine.simulate.inference import bound_of_inference, sends_of_inference, simulate_inference
from engine.simulate.training import bound_of_step, simulate_step
from engine.timeline import Timeline


def simulate(plan: Plan, problem: Problem, stop: Stop = never, advance: Advance = unwatched) -> Timeline:
    """The predicted timeline of a plan. Once `stop` answers True the rest of a large one is simulated in a hurry, less
    exactly, as the timeline then says. Raises InputError when the plan does not fit the problem."""
    problem.check_plan(plan)
    problem = problem.as_planned(plan)
    match problem.goal:
        case Goal.INFERENCE:
            return simulate_inference(plan, problem, stop, advance)
        case Goal.TWO_MODELS:
            return simulate_colocated(plan, problem, stop, advance)
        case Goal.TRAINING:
            return simulate_step(plan, problem)


def simulate_layers(plan: Plan, problem: Problem, timeline: Timeline, first: int, last: int) -> Timeline:
    """MoE layers first … last, both included, of a plan's simulated timeline with every send, at their times in the whole.
    Layers whose sends are bundled are simulated again; the network is idle between two layers, so this gives the same."""
    if not timeline.bundled:
        return timeline.layers(first, last)
    sends_of = sends_of_colocated if plan.goal is Goal.TWO_MODELS else sends_of_inference
    events = sends_of(plan, problem.as_planned(plan), timeline.layers(0, first - 1), first, last)
    return replace(timeline, events=events, bundled=False)


def bound_of_plan(
    plan: Plan, problem: Problem, first: int = 0, last: int | None = None, straight: bool = False
) -> float:
    """Seconds below which no send order can bring the placement (and execution) of a plan, in layers first … last. Of a
    training step: the whole step, and any schedule. straight: of one model, see `bound_of_inference`."""
    if problem.goal is Goal.TRAINING:
        return bound_of_step(problem, plan.placement)
    last = problem.workload.layers - 1 if last is None else last
    if plan.goal is Goal.TWO_MODELS:
        return bound_of_colocated(plan, problem.as_planned(plan), first, last)
    return bound_of_inference(plan, problem, first, last, straight)


__all__ = ["bound_of_plan", "simulate", "simulate_layers"]
