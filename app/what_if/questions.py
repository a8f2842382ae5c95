"""The Capacity part of the What-if page: three questions of whoever buys GPUs, and the prices that they share."""

import streamlit as st

from app import failing, kept, state, widgets
from app.what_if import prices
from app.what_if.capacity import capacity
from app.what_if.deployments import deployments
from app.what_if.sizing import sizing
from engine.goal import Goal

PARTS = {"plan": ":material/tune: This plan", "capacity": ":material/dns: Capacity"}
"""The page's two halves: the open plan in another world, and how many GPUs to have."""

QUESTIONS = {
    "deployments": (
        ":material/groups: GPUs for my users",
        "How many GPUs, of which type and under which engine, give users so many tokens/s, a first token in time, or the most "
        "for a budget. Forecast from measured engines; the open model is enough.",
    ),
    "size": (
        ":material/price_check: Machines for the recording",
        "The cheapest machines, mixed where that is cheaper, on which the open recording passes the MoE layers in time, with a "
        "plan and a proof. Those that cannot are left out by proof, the others planned for. Every expert has one copy.",
    ),
    "capacity": (
        ":material/dns: More GPUs like these",
        "The smallest cluster of equal parts on which the open recording passes the MoE layers in time. Every size gets a plan "
        "of its own: those typed, then all between the smallest that meets the target and the next one below it.",
    ),
}
"""Titles of the questions and their answers, by the kind of their jobs."""


def is_chosen() -> bool:
    """The choice between the page's two halves; True if it is this one."""
    # After a reload the newest study is the one to look at; ids of jobs sort by time.
    jobs = state.session.study_jobs
    usual = "capacity" if max(jobs, key=lambda kind: jobs[kind] or "", default="") in QUESTIONS else "plan"
    return (
        kept.segments("Part", PARTS, PARTS.get, default=usual, key="what-if-half", label_visibility="collapsed") == "capacity"
    )


def panel() -> None:
    """Choose a question, ask it, and see its answer."""
    newest = max(QUESTIONS, key=lambda kind: state.session.study_jobs.get(kind) or "")
    titles = {kind: title for kind, (title, _) in QUESTIONS.items()}
    asked = kept.segments("Question", titles, titles.get, default=newest, label_visibility="collapsed", key="what-if-question")
    st.caption(QUESTIONS[asked][1])
    with failing.saying():
        if asked == "deployments":
            if state.session.model is None:
                st.info("Open a model in the sidebar: how it is served follows from its sizes.", icon=":material/info:")
            else:
                deployments(state.session.model)
            return
        problem = widgets.problem_or_advice()
        if problem is None:
            return
        if problem.goal is Goal.TRAINING:
            st.info(
                "A training step's batch grows with its GPUs: choose inference on the Optimise page for this question.",
                icon=":material/info:",
            )
            return
        widgets.say_inference_only()
        if asked == "size":
            with kept.expander("Prices of GPU types", icon=":material/sell:", key="what-if-prices"):
                priced = prices.table()
            sizing(problem, priced)
        else:
            capacity(problem, prices.table(sorted({gpu.type for gpu in problem.cluster.gpus})))
