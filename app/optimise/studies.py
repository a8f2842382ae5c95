"""Panels that run a study as a job and show what it has found so far."""

from collections.abc import Callable
from typing import Any

import streamlit as st

from app import cached, layer_hops, state, widgets
from app.charts import optimise as charts
from app.text import plain
from engine import units
from engine.errors import InputError
from engine.goal import Goal
from engine.jobs import runner
from engine.placement.robust import score_matrix
from engine.problem import Problem
from engine.systems import SYSTEMS
from engine.workload import RoutingTrace


def run(kind: str, problem: Problem, more: dict[str, Any]) -> None:
    """Start a study of the open problem."""
    try:
        state.set_study_job(kind, widgets.start_job_on(problem, kind, more).id)
    except InputError as error:
        st.error(plain(str(error)), icon=":material/error:")


def watch(kind: str, show: Callable[[dict[str, Any]], None], empty: str) -> None:
    """The newest study of a kind: its progress, and `show` of its result so far."""
    (job,) = cached.jobs([state.study_job(kind)] if state.study_job(kind) else []) or (None,)
    if job is None:
        st.info(empty, icon=":material/info:")
        return
    running = not job.state.finished

    @st.fragment(run_every=1 if running else None)
    def newest() -> None:
        if job.state is not runner.State.DONE:
            widgets.job_row(job)
        if result := cached.result_of(job):
            show(result)
        if running and job.state.finished:
            st.rerun()

    newest()


def front(problem: Problem) -> None:
    """Balance against affinity: a front of plans."""
    st.caption(
        "Every point is a placement that no other beats in both. With several experts a token, hops are counted "
        "between all of them; the search is a heuristic, so a better point may exist."
    )
    if not isinstance(problem.workload, RoutingTrace):
        st.info(
            "Affinity needs tokens that can be followed from layer to layer: open a routing log.",
            icon=":material/info:",
        )
        return
    _front_form(problem)
    recordings = {digest: name for digest, name in state.workloads().items() if digest != state.workload_digest()}
    beside = st.selectbox(
        "Scored on as well",
        [None, *recordings],
        format_func=lambda digest: "—" if digest is None else recordings[digest],
        width=320,
        help="The same placements on a recording that they were not made from.",
    )

    def show(result: dict[str, Any]) -> None:
        candidates = result["candidates"]
        if not candidates:
            return
        plans_of_session = cached.candidates()
        candidates = [candidate for candidate in candidates if candidate["plan_id"] in plans_of_session]
        plans = [plans_of_session[candidate["plan_id"]].plan for candidate in candidates]
        points = [
            {
                "kept_share": candidate["kept_share"],
                "balancedness": candidate["balancedness"],
                "weight": candidate["weight"],
                "seconds": candidate["metrics"]["total"],
            }
            for candidate in candidates
        ]
        elsewhere = _scores(plans, beside) if beside else None
        widgets.chart(charts.front(points, _other_plans(problem), elsewhere, recordings.get(beside, "")), "front")
        order = sorted(range(len(candidates)), key=lambda index: points[index]["kept_share"])
        names = {
            index: f"{units.share(points[index]['kept_share'])} kept, balancedness {points[index]['balancedness']:.3f}, "
            f"{units.seconds(points[index]['seconds'])}"
            for index in order
        }
        with st.container(horizontal=True, vertical_alignment="bottom"):
            chosen = st.selectbox("A point of the front", order, format_func=lambda index: names[index], width=420)
            if st.button("Open this plan", icon=":material/route:"):
                state.open_plan(plans[chosen].id)
                st.rerun()

    watch("front", show, "No front yet: press Find the front. On the sample it takes about 20 seconds.")


def _front_form(problem: Problem) -> None:
    """How the front is searched, and the button that starts it."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        points = st.number_input("Points", 2, 25, 9, width=110)
        over = st.selectbox("Over several recordings", ["worst", "mean"], width=180, disabled=not problem.others)
        moves = st.number_input(
            "Experts that may move",
            0,
            None,
            0,
            width=190,
            help="from the placement deployed now, over all layers; 0: any number",
        )
        limit = st.number_input("Seconds", 1, 3600, 20, width=110)
        if st.button("Find the front", icon=":material/play_arrow:", type="primary"):
            run("front", problem, {"points": points, "over": over, "max_moves": moves, "time_limit": limit})


def _other_plans(problem: Problem) -> dict[str, tuple[float, float]]:
    """Kept share of hops and balancedness of the session's own plans, by name."""
    plans = {
        candidate.plan.name: candidate.plan
        for candidate in cached.candidates().values()
        if candidate.plan.goal is not Goal.TWO_MODELS and candidate.plan.provenance.optimiser != "front"
    }
    fitting = {name: plan for name, plan in plans.items() if not widgets.why_not(plan, problem)}
    scores = _scores(list(fitting.values()), problem.workload.digest)
    return dict(zip(fitting, scores, strict=True))


def _scores(plans: list, digest: str) -> list[tuple[float, float]]:
    """(kept share of hops, balancedness) of plans on a recording; none where it does not fit."""
    workload = cached.recording(digest)
    fitting = (workload.layers, workload.num_experts)
    if not plans or any((plan.placement.layers, plan.placement.experts) != fitting for plan in plans):
        return []
    if not isinstance(workload, RoutingTrace):
        return []
    hops = layer_hops.transitions(digest, False)
    scores = score_matrix([plan.placement.share for plan in plans], [workload.load], [hops])
    return list(zip(scores.kept_share[:, 0].tolist(), scores.balancedness[:, 0].tolist(), strict=True))


def matrix(problem: Problem, options: dict[str, dict]) -> None:
    """A plan from every recording, scored on every recording."""
    st.caption("A plan is worth what it does on a recording that it was not made from. The diagonal is in sample.")
    names = {}
    for digest, name in state.workloads().items():
        try:
            problem.with_workload(cached.recording(digest))
        except InputError:
            continue
        names[digest] = name
    if len(names) < 2:
        st.info("Open at least two recordings of this model on the Workload page.", icon=":material/info:")
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        system = st.selectbox(
            "System",
            [system.name for system in SYSTEMS.values() if Goal.INFERENCE in system.goals],
            0,
            lambda name: SYSTEMS[name].title,
            width=240,
        )
        chosen = st.multiselect(
            "Recordings", list(names), list(names), format_func=lambda digest: names[digest], width=420
        )
        if st.button("Score", icon=":material/play_arrow:", type="primary", disabled=len(chosen) < 2):
            run("matrix", problem, {"system": system, "options": options.get(system, {}), "recordings": chosen})
    what = (
        widgets.segments(
            "Score",
            list(charts.SCORES),
            default="seconds",
            format_func=lambda score: charts.SCORES[score],
            label_visibility="collapsed",
        )
        or "seconds"
    )

    def show(result: dict[str, Any]) -> None:
        st.caption(f"Plans by {plain(result['system'])}")
        widgets.chart(charts.matrix(result["names"], result[what], what, st.context.theme.type == "dark"), "matrix")

    watch("matrix", show, "Nothing scored yet: press Score.")
