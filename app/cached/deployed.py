"""What is deployed now: what every plan is held against."""

from dataclasses import dataclass

import streamlit as st

from app import state
from app.cached.plans import candidates
from engine.plan import Plan
from engine.problem import Problem
from engine.simulate.metrics import input_digests
from engine.systems import baseline_for, usual_plan


@dataclass(frozen=True, eq=False)
class Deployed:
    """chosen: a person said that it is; else it is what `baseline_for` says. is_candidate: it is among the plans of the
    session, under its id."""

    plan: Plan
    chosen: bool
    is_candidate: bool


def deployed(problem: Problem) -> Deployed:
    """What counts as deployed for a problem; its tokens travel as the problem's do, because how an engine sends is no part of
    what a plan could win. Raises InputError where nothing was chosen and experts do not fit the GPUs."""
    known = candidates()
    chosen = known.get(state.in_use() or "") if problem.in_use is not None else None
    if chosen is not None:
        if chosen.plan.travel == problem.travel:
            return Deployed(chosen.plan, True, True)
        return Deployed(chosen.plan.model_copy(update={"travel": problem.travel}), True, False)
    usual = _usual(tuple(input_digests(problem).items()), problem)
    if usual.id in known:
        return Deployed(known[usual.id].plan, False, True)
    # The same plan, made when another recording was open.
    alike = (candidate.plan for candidate in known.values() if _is_alike(candidate.plan, usual))
    plan = next(alike, None)
    return Deployed(plan or usual, False, plan is not None)


@st.cache_resource(max_entries=64, show_spinner=False)
def _usual(key: tuple, _problem: Problem) -> Plan:
    return usual_plan(baseline_for(_problem), _problem)[0]


def _is_alike(plan: Plan, usual: Plan) -> bool:
    mine, wanted = plan.provenance, usual.provenance
    if (mine.optimiser, mine.options) != (wanted.optimiser, wanted.options) or plan.travel != usual.travel:
        return False
    return (plan.placement, plan.placement_b) == (usual.placement, usual.placement_b)
