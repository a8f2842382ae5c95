"""Panels that run a study as a job and show what it has found so far."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from app import cached, state, widgets
from app.charts import optimise as charts
from app.text import plain
from engine import units
from engine.errors import InputError
from engine.goal import Goal
from engine.jobs import runner
from engine.placement.robust import score_matrix
from engine.problem import Problem
from engine.simulate.two_phase_result import TwoPhaseOptions
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
        if job.result:
            show(job.result)
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
        known = cached.candidates()
        candidates = [candidate for candidate in candidates if candidate["plan_id"] in known]
        plans = [known[candidate["plan_id"]].plan for candidate in candidates]
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
    hops = cached.transitions(digest, False)
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
            [system.name for system in SYSTEMS.values() if 1 in system.models],
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


def lina(problem: Problem) -> None:
    """Lina's two-phase scheduling, batch by batch."""
    st.caption(
        "Simulated batch by batch: what the scheduler foretells, how often it must put itself right, and what that "
        "costs. Scheduling takes what the paper measured on its testbed unless you say otherwise."
    )
    if not isinstance(problem.workload, RoutingTrace):
        st.info("Lina learns from the paths of tokens: open a routing log.", icon=":material/info:")
        return
    default = TwoPhaseOptions()
    recordings = {
        digest: name
        for digest, name in state.workloads().items()
        if digest != state.workload_digest() and isinstance(cached.recording(digest), RoutingTrace)
    }
    with st.container(horizontal=True, vertical_alignment="bottom"):
        profile = st.selectbox(
            "Learn from",
            [None, *recordings],
            width=260,
            format_func=lambda digest: "first half (serve the second)" if digest is None else recordings[digest],
        )
        lengths = st.multiselect("Path lengths", [1, 2, 3, 4, 5, 6], [1, 3, 6], width=220)
        batch = st.number_input("Recorded tokens a batch", 16, 10**6, 1024, width=190)
        copies = st.number_input("Tokens for each recorded one", 1.0, 1e6, 64.0, width=220)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        schedule = st.number_input("Scheduling, ms", 0.0, 1e4, default.schedule_seconds * 1e3, width=150)
        check = st.number_input("Check, ms", 0.0, 1e4, default.check_seconds * 1e3, width=130)
        other = st.number_input(
            "Rest of a layer, ms",
            0.0,
            1e4,
            0.0,
            width=170,
            help="attention and the like, which also hides the first phase",
        )
        host = st.number_input("Host link, GB/s", 0.1, 1e3, default.host_bandwidth / 1e9, width=150)
        packing = st.selectbox("Hosting", ["lina", "best"], width=120, help="the paper's packing, or the best there is")
        if st.button("Simulate", icon=":material/play_arrow:", type="primary", disabled=not lengths):
            options = {
                "batch_tokens": batch,
                "copies": copies,
                "schedule_seconds": schedule / 1e3,
                "check_seconds": check / 1e3,
                "other_seconds": other / 1e3,
                "host_bandwidth": host * 1e9,
                "packing": packing,
            }
            run("lina", problem, {"profile": profile, "lengths": sorted(lengths), "options": options})

    def show(result: dict[str, Any]) -> None:
        runs = result["runs"]
        if not runs:
            return
        middle = runs[len(runs) // 2]
        what = (
            widgets.segments(
                "Times",
                list(charts.TIMES),
                default="inference",
                format_func=lambda kind: charts.TIMES[kind],
                label_visibility="collapsed",
            )
            or "inference"
        )
        left, right = st.columns(2)
        with left:
            widgets.chart(charts.lina(middle["figures"], middle["options"]["path_length"], what), "lina")
        with right:
            widgets.chart(charts.accuracy(runs), "lina-accuracy")
        st.dataframe(
            pd.DataFrame(
                [
                    {
                        "Path length": run["options"]["path_length"],
                        "Right (set)": units.share(run["accuracy"]),
                        "Right (in order)": units.share(run["accuracy_in_order"]),
                        "Tuned again": units.share(run["fine_tuning_rate"]),
                        **{
                            f"{title}, {end}": f"{run['figures'][scheme][f'{key}_{what}']:.3g}×"
                            for scheme, (title, _, _) in charts.SCHEMES.items()
                            for key, end in (("median", "median"), ("tail", "95 %"))
                        },
                    }
                    for run in runs
                ]
            ),
            hide_index=True,
        )
        st.caption(
            f"Learnt from {plain(result['profile'])}, served {plain(result['served'])} in {middle['batches']} batches. "
            f"An ideal batch takes {units.seconds(middle['ideal_seconds'])}; scheduling one layer again takes "
            f"{units.seconds(middle['options']['schedule_seconds'])}, which a short layer cannot win back. "
            f"Costs: {plain(middle['cost_source'])}."
        )

    watch("lina", show, "Nothing simulated yet: press Simulate.")
    with st.expander("Most popular experts of every layer", icon=":material/leaderboard:"):
        st.caption(
            "As Lina's Table 2: who is popular changes from layer to layer, so hosting must be decided per layer."
        )
        load = problem.workload.load
        order = np.argsort(-load, axis=1, kind="stable")[:, : min(4, load.shape[1])]
        part = np.take_along_axis(load / np.maximum(load.sum(axis=1, keepdims=True), 1), order, axis=1)
        st.dataframe(
            pd.DataFrame(
                [
                    {"Layer": layer}
                    | {
                        f"{turn + 1}.": f"expert {expert} · {units.share(popularity)}"
                        for turn, (expert, popularity) in enumerate(zip(experts, parts, strict=True))
                    }
                    for layer, (experts, parts) in enumerate(zip(order.tolist(), part.tolist(), strict=True))
                ]
            ),
            hide_index=True,
        )
