"""The baseline: the plan that counts as running now, against which every other plan is held.

Page, command, brief and verdict all take it from here.
"""

from dataclasses import replace

from engine.plan import Placement, Plan, SendOrder, Travel
from engine.problem import Problem
from engine.result import Provenance
from engine.systems import baseline_for, usual_plan

IN_USE = "Placement in use"
"""Name of a baseline of which only the placement is known."""


def baseline_of(problem: Problem, chosen: Plan | None = None) -> Plan:
    """Return the plan that counts as running now on a problem.

    Its tokens travel as the problem's do: how an engine sends is no part of a plan's gain. Two models and a training step have
    no placement in use, so the usual plan is their baseline, whatever was chosen.

    problem: cluster, model, recordings, and the placement in use if a person has named one
    chosen: the plan with that placement; None: only the placement is known, and all GPUs send at once

    Without a placement in use: the plan of `engine.systems.baseline_for` with the usual options. Raises InputError if experts
    do not fit the GPUs.
    """
    if problem.in_use is None:
        return usual_plan(baseline_for(problem), problem)[0]
    if chosen is None:
        return plan_of_placement(problem.in_use, IN_USE, travel=problem.travel, origin="in use")
    return chosen if chosen.travel == problem.travel else chosen.model_copy(update={"travel": problem.travel, "claim": None})


def travelling_like(plan: Plan, problem: Problem) -> Problem:
    """Return the problem on which a plan and its baseline are compared: all tokens travel as the plan's do."""
    return problem if plan.travel == problem.travel else replace(problem, travel=plan.travel)


def plan_of_placement(
    placement: Placement, name: str, execution: str = "vanilla", travel: Travel | None = None, origin: str = "file"
) -> Plan:
    """Return a bare placement as a plan in which all GPUs send at once, as serving engines do.

    name: of the plan, cut to 120 characters
    execution, travel: see `Plan`
    origin: stands for the optimiser in the plan's provenance
    """
    send_order = SendOrder(mode="concurrent")
    provenance = Provenance(optimiser=origin)
    return Plan(
        name=name[:120], placement=placement, send_order=send_order, execution=execution, travel=travel, provenance=provenance
    )


def running(placement: Placement, plan: Plan, name: str = "deployed") -> Plan:
    """Return a bare placement as the baseline of a plan, from which it differs in nothing that engines settle elsewhere.

    Its tokens travel like the plan's. Without replicas they are also carried or returned like the plan's (`Plan.execution`).
    """
    return plan_of_placement(placement, name, plan.execution if placement.single else "vanilla", plan.travel)
