"""How plans stand against what is deployed, see `engine.simulate.standing`."""

from dataclasses import replace

import streamlit as st

from app import state
from app.cached.deployed import Deployed, deployed
from app.cached.figures import key_of, metrics, migration
from app.cached.inputs import recording
from engine import store
from engine.errors import InputError
from engine.goal import Goal
from engine.plan import Plan
from engine.problem import Problem
from engine.simulate.metrics import Metrics, metrics_digests
from engine.simulate.proof import gap_over_placements
from engine.simulate.standing import Risk, Standing, bound_sentence, tokens_per_second
from engine.studies.what_if import is_quick
from engine.workload import Workload

FEW_EVENTS = 20_000
"""About a second of simulation: on so many the other recordings are scored without being asked for."""


def standing(plan: Plan, problem: Problem) -> Standing:
    """How a plan stands. Raises InputError where it or what is deployed cannot be simulated on the problem."""
    problem = _as_it_travels(plan, problem)
    now, own = deployed(problem), metrics(plan, problem)
    base = metrics(now.plan, problem)
    return Standing(
        plan=plan.name,
        deployed=now.plan.name,
        is_deployed=plan.id == now.plan.id,
        span="step" if problem.goal is Goal.TRAINING else "pass",
        seconds=own.total,
        deployed_seconds=base.total,
        tokens_per_second=tokens_per_second(problem, own.total),
        bound=own.order_bound,
        bound_covers=bound_sentence(plan, own),
        move=migration(plan, problem),
        risks=_risks(plan, now, problem),
        placement_gap=gap_over_placements(plan, own),
    )


def is_soon(plan: Plan, problem: Problem) -> bool:
    """Whether how a plan stands is known, or simulated in a few seconds."""
    problem = _as_it_travels(plan, problem)
    if is_quick(problem):
        return True
    return all(store.has_figures(Metrics, *metrics_digests(known, problem)) for known in (plan, deployed(problem).plan))


def _as_it_travels(plan: Plan, problem: Problem) -> Problem:
    """What is deployed travels like the plan."""
    return problem if plan.travel == problem.travel else replace(problem, travel=plan.travel)


def other_recordings(problem: Problem) -> list[str]:
    """Digests of the session's recordings that a plan for this problem was not made from and can be scored on."""
    if problem.goal is Goal.TWO_MODELS or (problem.goal is Goal.TRAINING and problem.step.routing == "balanced"):
        return []
    made_from = {other.digest for other in (problem.workload, *problem.others)}
    return [
        workload
        for workload in state.workloads()
        if workload not in made_from
        and store.has_workload(workload)
        and _size(recording(workload)) == _size(problem.workload)
    ]


def _size(workload: Workload) -> tuple[int, int | None]:
    """Layers and experts, the latter None of a traffic matrix."""
    return workload.layers, getattr(workload, "num_experts", None)


def _risks(plan: Plan, now: Deployed, problem: Problem) -> tuple[Risk, ...] | None:
    """On the other recordings that fit, where that is soon done."""
    others = other_recordings(problem)
    events = metrics(plan, problem).events
    if others and (events is None or 2 * len(others) * events > FEW_EVENTS):
        return None
    risks = []
    for digest in others:
        seconds = _seconds_on(digest, (plan.id, now.plan.id), key_of(problem), (plan, now.plan), problem)
        if seconds is not None:
            risks.append(Risk(state.workloads()[digest], *seconds))
    return tuple(sorted(risks, key=lambda risk: risk.gain))


@st.cache_resource(max_entries=256, show_spinner="Simulating the plan on another recording")
def _seconds_on(
    digest: str, ids: tuple[str, ...], key: tuple[str, ...], _plans: tuple[Plan, ...], _problem: Problem
) -> tuple[float, ...] | None:
    """Simulated seconds of plans on a recording; None where it is of another model."""
    try:
        there = _problem.with_workload(recording(digest))
        return tuple(metrics(plan, there).total for plan in _plans)
    except InputError:
        return None
