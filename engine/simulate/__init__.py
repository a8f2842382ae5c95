"""What a plan takes, whatever it is for: the door to inference of one model, of two that share the GPUs, and training."""

from engine.plan import Plan
from engine.problem import Problem
from engine.simulate.colocated import bound_of_colocated, simulate_colocated
from engine.simulate.inference import bound_of_inference, simulate_inference
from engine.simulate.training import bound_of_step, simulate_step
from engine.timeline import Timeline


def simulate(plan: Plan, problem: Problem) -> Timeline:
    """The predicted timeline of a plan. Raises InputError when the plan does not fit the problem."""
    if problem.step is not None:
        return simulate_step(plan, problem)
    problem.check_plan(plan)
    if plan.placement_b is not None:
        return simulate_colocated(plan, problem)
    return simulate_inference(plan, problem)


def bound_of_plan(plan: Plan, problem: Problem, first: int = 0, last: int | None = None) -> float:
    """Seconds below which no send order can bring the placement (and execution) of a plan, in layers first … last. Of a
    training step: the whole step, and any schedule."""
    if problem.step is not None:
        return bound_of_step(problem, plan.placement)
    last = problem.workload.layers - 1 if last is None else last
    if plan.placement_b is not None:
        return bound_of_colocated(plan, problem, first, last)
    return bound_of_inference(plan, problem, first, last)


__all__ = ["bound_of_plan", "simulate"]
