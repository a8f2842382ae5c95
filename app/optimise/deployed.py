"""The deployed plan: chosen by name, among the session's plans or from an engine's plan file; and its figures today."""

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from app import cached, kept, opening, state, tables, widgets
from app.tables import plain
from engine import units
from engine.compare.figures import Metrics, cross_node_share, speedup
from engine.compare.what_if import is_quick
from engine.errors import InputError
from engine.formats.placements import open_plan_file
from engine.goal import Goal
from engine.plan import Plan
from engine.problem import Problem
from engine.result import NOT_BOUNDED, not_bounded
from engine.systems import System, baseline_for

LINEAR = "linear (contiguous blocks)"
ROUND_ROBIN = "round-robin (as vLLM)"


def choose(problem: Problem) -> bool:
    """The choice of the deployed plan. True if another one was chosen just now."""
    plans = {id: candidate.plan for id, candidate in cached.candidates().items() if candidate.plan.goal is Goal.INFERENCE}
    dealt = _round_robin(problem)
    names = {None: LINEAR} | ({dealt.id: ROUND_ROBIN} if dealt else {})
    names |= {id: plan.name for id, plan in plans.items() if id not in names}
    now = state.session.in_use if state.session.in_use in names else None
    help = "What runs today: gains and what a move costs are counted from here."
    chosen = st.selectbox("Deployed now", list(names), list(names).index(now), format_func=names.__getitem__, help=help)
    if dealt is not None and chosen == dealt.id and chosen not in plans:
        state.add_imported(dealt)
    if chosen == now:
        return False
    state.update(in_use=chosen)
    return True


def planned_first(problem: Problem, chosen: Sequence[System], options: Mapping[str, dict]) -> list[dict]:
    """The systems of a run with their options, baselines first.

    The deployed one comes before all others, and is planned too if the session has no such plan yet, so that every plan can be
    compared with it.
    """
    systems = sorted(chosen, key=lambda system: not system.baseline)
    run = [{"name": system.name, "options": options.get(system.name, {})} for system in systems]
    usual = baseline_for(problem)
    needed = {"name": usual.name, "options": usual.settings({}).model_dump()}
    mine = [
        choice for choice in run if usual.name == choice["name"] and usual.settings(choice["options"]) == usual.settings({})
    ]
    if not mine and _is_planned(problem):
        return run
    return [*(mine or [needed]), *(choice for choice in run if choice not in mine)]


def _is_planned(problem: Problem) -> bool:
    try:
        now = cached.baseline(problem)
    except InputError:  # experts do not fit: planning for it would say so once more
        return True
    return now.chosen or now.is_candidate


def asked(problem: Problem) -> dict[str, Any]:
    """The deployed plan for a job, if a person has chosen one."""
    if problem.in_use is None:
        return {}
    return {"deployed": cached.baseline(problem).plan.model_dump(mode="json", exclude_none=True)}


def receive() -> None:
    """A drop zone for the file of the deployed plan."""
    opening.show(
        "deployed-file",
        "Or its plan file",
        "What your engine runs: SGLang's map (JSON or .pt), TensorRT-LLM's YAML, vLLM's log or vLLM-Ascend's map, a "
        "permutation for Megatron-Core, ExFlow's table, a table of slots, or a plan of the studio.",
    )


def _round_robin(problem: Problem) -> Plan | None:
    """vLLM's other default layout for the open problem; None if it does not fit."""
    try:
        layout = open_plan_file("round-robin").deployed(problem.model, len(problem.cluster.gpus))
    except InputError:
        return None
    return opening.plan_of(layout, ROUND_ROBIN)


def show(problem: Problem) -> None:
    """Today's figures of the deployed plan; the reason if it does not fit the open problem."""
    chosen = cached.candidates().get(state.session.in_use or "")
    if chosen is not None and problem.in_use is None:
        st.warning(
            f"{plain(chosen.plan.name)} is not for what is open ({plain(widgets.why_not(chosen.plan, problem))}), so "
            "contiguous blocks count as deployed.",
            icon=":material/warning:",
        )
    try:
        plan = cached.baseline(problem).plan
        even, away = cached.balance(plan, problem), _away(plan, problem)
        figures = cached.metrics(plan, problem) if _worth_simulating(problem) else None
    except InputError as error:
        st.warning(f"What is deployed cannot be scored here: {plain(str(error))}.", icon=":material/warning:")
        return
    name = LINEAR if chosen is None or problem.in_use is None else plan.name
    st.markdown(f"**Deployed today: {plain(name)}**")
    with st.container(horizontal=True, gap="medium"):
        if figures is not None:
            st.metric("Time, simulated", units.seconds(figures.total), help=f"of a pass; {figures.how_simulated}")
        st.metric("Balancedness", f"{even.balancedness:.3f}", help="mean / largest load of the GPUs; 1 is even")
        tables.metric(even)
        help = "of the token copies that are dispatched, counted one by one: those that go to another node"
        st.metric("Cross-node share", "one node" if away is None else units.share(away), help=help)
        if figures is not None:
            _ceiling(figures, problem)


def _worth_simulating(problem: Problem) -> bool:
    """True if the simulation is quick, or once it was asked for."""
    return is_quick(problem) or kept.toggle(
        "Simulate what is deployed too, which takes a while", key="deployed-simulated", help="for its time and its ceiling"
    )


@st.cache_resource(max_entries=64, show_spinner=False, hash_funcs=cached.BY_CONTENT)
def _away(plan: Plan, problem: Problem) -> float | None:
    return cross_node_share(plan, problem)


def _ceiling(figures: Metrics, problem: Problem) -> None:
    """The most that there is to win, as far as it is proven."""
    label, bound = "Ceiling by order alone", figures.order_bound
    covers = "with this placement no order of sends takes less than {}. A better placement may: run Aurora to see how much."
    everywhere = _bound_of_placements(problem)
    if everywhere is None and figures.unbounded:
        st.metric(label, NOT_BOUNDED, help=not_bounded(figures.unbounded))
        return
    if everywhere is not None:
        label, bound = "Ceiling without replicas", everywhere
        covers = (
            "without replicas and with as many slots per GPU no placement takes less than {}, as a plan's optimiser claims "
            "(not rechecked here)."
        )
    most = units.ratio(max(speedup(figures.total, bound), 1.0))
    st.metric(label, most, help=f"At most {most} as fast as today: {covers.format(units.seconds(bound))}")


def _bound_of_placements(problem: Problem) -> float | None:
    """The best bound over all placements that a plan of the session has proven for these very inputs."""
    proven = []
    for _, candidate in widgets.comparable(problem):
        if candidate.plan.claim is None or candidate.plan.claim.scope != "placement and order":
            continue
        figures = cached.metrics(candidate.plan, problem)
        if figures.bound is not None:
            proven.append(figures.bound)
    return max(proven, default=None)
