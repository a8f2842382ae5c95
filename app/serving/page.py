"""The Optimise page under the goal of serving."""

import contextlib

import streamlit as st

from app import state
from app.serving import form, model, table
from app.serving.figures import Serving, check_cluster, served, serving_of
from app.text import plain
from engine.errors import InputError
from engine.plan import Plan
from engine.problem import Problem
from engine.serving.figures import ServingFigures


def needed_serving(problem: Problem) -> Serving:
    """The open step, ready to be served; where it cannot be, says so, offers what can be, and stops."""
    try:
        check_cluster(problem)
    except InputError as error:
        form.offer_clusters(str(error))
        st.stop()
    try:
        serving = serving_of(problem)
    except InputError as error:
        st.error(plain(str(error)), icon=":material/error:")
        st.caption("A whole step cannot be timed for this model; the other goals plan its MoE layers as ever.")
        st.stop()
    model.say(state.model(), serving.beside)
    return serving


def say_how_planned(problem: Problem) -> None:
    """What systems plan for under this goal."""
    st.caption(
        f"Systems plan the experts for {plain(problem.workload.name)}, as for inference; every plan is then looked at in the "
        "whole step, with that routing at the tokens of the step."
    )


def say_sources(serving: Serving, figures: ServingFigures) -> None:
    """Where every time of the step comes from."""
    operators, moe_layers = map(plain, figures.sources)
    note = f" ({plain(serving.notes[0])})" if serving.notes else ""
    sizes = f"; sizes: {plain(serving.beside.origin)}" if serving.beside.config else ""
    st.caption(f"Attention, norms, dense layers and head: {operators}{note}{sizes}. MoE layers: {moe_layers}.")


def fastest(plans: list[Plan], problem: Problem, serving: Serving) -> str | None:
    """Id of the plan with the shortest step; None where none of them can be served."""
    seconds = {}
    for plan in plans:
        with contextlib.suppress(InputError):
            seconds[plan.id] = served(plan, problem, serving).figures.seconds
    return min(seconds, key=seconds.get) if seconds else None


def results(problem: Problem, serving: Serving) -> None:
    """The open plan big, where its time goes, and all plans beside each other; without a plan, what is deployed."""
    try:
        comparison = table.compare(problem, serving)
    except InputError as error:
        st.error(plain(str(error)), icon=":material/error:")
        st.stop()
    if not comparison.rows:
        st.caption("No plan for these inputs yet: this is what is deployed. Press Run for better ones.")
    if model.routing_is_assumed():
        st.caption(
            ":material/balance: Balanced routing is assumed, under which placements hardly differ. Open a recording of this "
            "model to see what a plan wins."
        )
    table.parts(comparison)
    st.markdown(f"**{plain(comparison.shown.plan.name)}**")
    table.verdict(comparison.shown, comparison, problem, narrow=True)
    table.memory(comparison.shown)
    say_sources(serving, comparison.shown.figures)
    if comparison.rows:
        st.subheader("Candidate plans", anchor=False)
        st.caption(
            "Whole steps of plans whose tokens travel as chosen above, what is deployed on top, then fastest first. Select "
            "a row to open its plan."
        )
        table.show(comparison)
        if state.plan_id() in [row.plan.id for row in comparison.rows]:
            st.page_link("../pages/timeline.py", label="See why on the timeline", icon=":material/view_timeline:")
