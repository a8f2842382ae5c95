"""The front of plans between balance and affinity, and the cross-workload score; both searched as jobs."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import streamlit as st

from app import cached, kept, layer_hops, state, studies, widgets
from app.charts import optimise as charts
from app.tables import plain
from engine import units
from engine.goal import Goal
from engine.jobs.scores import FrontAnswer, MatrixAnswer
from engine.placement.joint.instance import JointInstance
from engine.placement.joint.rows import RowsInstance
from engine.placement.robust import score_matrix
from engine.plan import Travel
from engine.problem import Problem
from engine.systems import SYSTEMS
from engine.systems.joint import instance_of
from engine.workload import RoutingTrace


def show(problem: Problem) -> None:
    """Show the front of plans between balance and affinity."""
    st.caption(
        "Every point is a placement that no other beats in both. With several experts per token, hops are counted between all "
        "of them; where tokens share rows, rows count in place of hops. The search is a heuristic, so a better point may exist."
    )
    if not isinstance(problem.workload, RoutingTrace):
        st.info("Affinity needs tokens that can be followed from layer to layer: open a routing log.", icon=":material/info:")
        return
    _front_form(problem)
    recordings = {digest: name for digest, name in state.session.workloads.items() if digest != state.session.workload}
    beside = kept.selectbox(
        "Scored on as well",
        [None, *recordings],
        format_func=lambda digest: "—" if digest is None else recordings[digest],
        width=320,
        key="front-beside",
        help="The same placements on a recording that they were not made from.",
    )

    show_result = partial(_show_front, problem, beside, recordings.get(beside, ""))
    studies.watch("front", show_result, "No front yet: press Find the front. On the sample it takes about 20 seconds.")


def _show_front(problem: Problem, beside: str | None, where: str, answer: FrontAnswer) -> None:
    """Draw the front so far, and its plans on another recording.

    beside: digest of that recording
    where: its name
    """
    candidates = answer.candidates
    if not candidates:
        return
    plans_of_session = cached.candidates()
    candidates = [candidate for candidate in candidates if candidate.plan_id in plans_of_session]
    plans = [plans_of_session[candidate.plan_id].plan for candidate in candidates]
    # A front of an older version has no rows.
    by_rows = bool(candidates) and candidates[0].rows is not None
    across = charts.ROWS if by_rows else charts.HOPS
    points = [
        {
            across.key: getattr(candidate, across.key),
            "balancedness": candidate.balancedness,
            "weight": candidate.weight,
            "seconds": candidate.plan.claim.objective,
            "overload": candidate.metrics and candidate.metrics.balance.factors,  # older versions kept none
        }
        for candidate in candidates
    ]
    # The plans of a front keep their way of travelling when another is chosen on the page.
    score = partial(_row_scores, replace(problem, travel=plans[0].travel)) if by_rows else _scores
    elsewhere = score(plans, beside) if beside else None
    others = _other_plans(problem, score, by_rows)
    widgets.chart(charts.front(points, others, elsewhere, where, across), "front")
    order = sorted(range(len(candidates)), key=lambda index: across.better * points[index][across.key])
    names = {
        index: f"{across.written(points[index][across.key])} {across.noun}, balancedness {points[index]['balancedness']:.3f}, "
        f"{units.seconds(points[index]['seconds'])}"
        for index in order
    }
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = st.selectbox("A point of the front", order, format_func=lambda index: names[index], width=420)
        if st.button("Open this plan", icon=":material/route:"):
            state.update(plan=plans[chosen].id)
            st.rerun()


def _front_form(problem: Problem) -> None:
    """Inputs of the search, and the button that starts it."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        points = kept.number_input("Points on the front", 2, 25, 9, width=110, key="front-points")
        over = kept.selectbox(
            "Over several recordings", ["worst", "mean"], width=180, disabled=not problem.others, key="front-over"
        )
        help = "from the placement deployed now, over all layers; 0: any number"
        moves = kept.number_input("Experts that may move", 0, None, 0, width=190, key="front-moves", help=help)
        limit = kept.number_input("Time limit, s", 1, 3600, 20, width=110, key="front-limit")
        if st.button("Find the front", icon=":material/play_arrow:", type="primary"):
            studies.start("front", problem, {"points": points, "over": over, "max_moves": moves, "time_limit": limit})


def _other_plans(problem: Problem, score: Callable[..., list], single: bool) -> dict[str, tuple[float, float]]:
    """`score` of the session's own plans, by name; single: only of those with one copy of every expert."""
    plans = {
        candidate.plan.name: candidate.plan
        for candidate in cached.candidates().values()
        if candidate.plan.goal is not Goal.TWO_MODELS and candidate.plan.provenance.optimiser != "front"
    }
    fitting = {
        name: plan
        for name, plan in plans.items()
        if not widgets.why_not(plan, problem) and (plan.placement.single or not single)
    }
    scores = score(list(fitting.values()), problem.workload.digest)
    return dict(zip(fitting, scores, strict=True)) if scores else {}


def _row_scores(problem: Problem, plans: list, digest: str) -> list[tuple[float, float]]:
    """(rows per token, balancedness) of plans with one copy of every expert on a recording; empty if it does not fit."""
    workload = cached.recording(digest)
    fitting = (workload.layers, workload.num_experts, len(problem.cluster.gpus))
    if not plans or any(plan.placement.share.shape != fitting for plan in plans):
        return []
    instance = _rows_on(digest, problem.cluster.digest, problem.travel, problem)
    if not isinstance(instance, RowsInstance):
        return []
    places = [plan.placement.gpu_of_expert for plan in plans]
    return [(float(instance.rows_a_token(place)[0]), float(instance.figures(place).balancedness[0])) for place in places]


@st.cache_resource(max_entries=8, show_spinner="Counting rows")
def _rows_on(digest: str, cluster: str, travel: Travel | None, _problem: Problem) -> JointInstance:
    return instance_of(_problem.with_workload(cached.recording(digest)))


def _scores(plans: list, digest: str) -> list[tuple[float, float]]:
    """(kept share of hops, balancedness) of plans on a recording; empty if it does not fit."""
    workload = cached.recording(digest)
    fitting = (workload.layers, workload.num_experts)
    if not plans or any((plan.placement.layers, plan.placement.experts) != fitting for plan in plans):
        return []
    if not isinstance(workload, RoutingTrace):
        return []
    hops = layer_hops.transitions(digest, False)
    scores = score_matrix([plan.placement.share for plan in plans], [workload.load], [hops])
    return list(zip(scores.kept_share[:, 0].tolist(), scores.balancedness[:, 0].tolist(), strict=True))


def show_matrix(problem: Problem, options: dict[str, dict]) -> None:
    """Show the cross-workload score: a plan from every recording, scored on every recording."""
    st.caption(
        "One plan per recording, scored on every recording. Look off the diagonal: there a plan meets traffic that it was not "
        "made from."
    )
    names = widgets.fitting_recordings(problem)
    if len(names) < 2:
        st.info("Open at least two recordings of this model on the Workload page.", icon=":material/info:")
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        system = kept.selectbox(
            "System",
            [system.name for system in SYSTEMS.values() if Goal.INFERENCE in system.goals],
            0,
            lambda name: SYSTEMS[name].title,
            width=240,
            key="matrix-system",
        )
        chosen = kept.multiselect(
            "Recordings", list(names), list(names), format_func=lambda digest: names[digest], width=420, key="matrix-recordings"
        )
        if st.button(
            "Score", icon=":material/play_arrow:", type="primary", disabled=len(chosen) < 2 or studies.is_running("matrix")
        ):
            studies.start("matrix", problem, {"system": system, "options": options.get(system, {}), "recordings": chosen})
    score = kept.segments(
        "Score", charts.SCORES, charts.SCORES.get, default="seconds", key="matrix-score", label_visibility="collapsed"
    )

    def show_scores(answer: MatrixAnswer) -> None:
        st.caption(f"Plans by {plain(answer.system)}")
        dark = st.context.theme.type == "dark"
        widgets.chart(charts.matrix(answer.names, getattr(answer, score), score, dark, answer.overload), "matrix")

    studies.watch("matrix", show_scores, "Nothing scored yet: press Score.")
