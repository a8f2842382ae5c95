"""The predicted timeline of a plan: the door to inference of one model, of two that share the GPUs, and training."""

from dataclasses import replace

from engine.goal import Goal
from engine.plan import Plan
from engine.problem import Problem
from engine.result import Advance, Stop, Unbounded, never, unwatched
from engine.simulate.colocated import bound_of_colocated, sends_of_colocated, simulate_colocated
from engine.simulate.inference import bound_of_inference, sends_of_inference, simulate_inference, simulate_reaction
from engine.simulate.training import bound_of_step, simulate_step
from engine.simulate.work import Load, loads_of
from engine.timeline import Timeline


def simulate(
    plan: Plan, problem: Problem, stop: Stop = never, advance: Advance = unwatched, loads: tuple[Load, ...] | None = None
) -> Timeline:
    """The predicted timeline of a plan. Raises InputError when the plan does not fit the problem.

    stop: once it answers True the rest of a large plan is simulated in a hurry, less exactly, as the timeline then says
    loads: the plan's (see `loads_of`), for a caller that holds them
    """
    problem.check_plan(plan)
    if problem.goal is Goal.TRAINING:
        return simulate_step(plan, problem)
    if reacts(plan):
        return simulate_reaction(plan, problem, stop, advance)
    run = simulate_colocated if problem.goal is Goal.TWO_MODELS else simulate_inference
    return run(plan, loads or loads_of(plan, problem), stop, advance)


def reacts(plan: Plan) -> bool:
    """True if the plan's time is that of a scheduler which hosts experts anew, batch by batch."""
    return plan.reaction is not None and plan.reaction.batch is not None


def simulate_layers(plan: Plan, problem: Problem, timeline: Timeline, first: int, last: int) -> Timeline:
    """MoE layers first … last, both included, of a plan's simulated timeline with every send, at their times in the whole.
    Layers with bundled sends are simulated again; the network is idle between two layers, so this gives the same."""
    if not timeline.bundled or reacts(plan):
        return timeline.layers(first, last)
    sends_of = sends_of_colocated if plan.goal is Goal.TWO_MODELS else sends_of_inference
    events = sends_of(plan, loads_of(plan, problem), timeline.layers(0, first - 1), first, last)
    return replace(timeline, events=events, bundled=False)


def unbounded(plan: Plan, problem: Problem) -> Unbounded | None:
    """The reason for which no bound tells how much a plan could gain by another order of sends; None: `bound_of_plan` does.

    An exchange of a measured table takes the table's seconds. A bound from the same table is met as soon as all is sent at
    once, so that a gap of 0 proves nothing. Steps of training take no exchanges from such tables.
    """
    if problem.goal is Goal.TRAINING:
        return None
    if reacts(plan):
        return "every batch has a placement of its own"
    return problem.network.unbounded


def claimable_bound(plan: Plan, problem: Problem, loads: tuple[Load, ...] | None = None) -> float:
    """`bound_of_plan` as a plan may claim it: 0 seconds, which is always true, where it says nothing of orders."""
    return 0.0 if unbounded(plan, problem) else bound_of_plan(plan, problem, loads=loads)


def bound_of_plan(
    plan: Plan,
    problem: Problem,
    first: int = 0,
    last: int | None = None,
    straight: bool = False,
    loads: tuple[Load, ...] | None = None,
) -> float:
    """Seconds below which no send order can bring the placement (and execution) of a plan, in layers first … last. Of a
    training step: the whole step, and any schedule.

    straight: of one model, see `bound_of_inference`
    loads: the plan's, see `simulate`
    """
    if problem.goal is Goal.TRAINING:
        return bound_of_step(problem, plan.placement, plan.offload)
    if reacts(plan):
        return 0.0  # another batch, another placement: nothing is proven
    last = problem.workload.layers - 1 if last is None else last
    loads = loads or loads_of(plan, problem)
    if plan.goal is Goal.TWO_MODELS:
        return bound_of_colocated(loads, first, last)
    return bound_of_inference(plan, loads, first, last, straight)
