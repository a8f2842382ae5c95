"""The lower half of the What-if page: studies that run as jobs and whose charts fill in as points arrive."""

import re
from collections.abc import Callable
from typing import Any

import pandas as pd
import streamlit as st

from app import cached, state, studies, widgets
from app.charts import what_if_studies as charts
from app.text import plain
from app.what_if_live import MOST_NOISE, linear_plan, others_of, outlook_of, plan_to_study, sliders_of, system_for
from app.what_if_synthetic import panel as synthetic_panel
from engine import units
from engine.errors import InputError
from engine.jobs import runner
from engine.jobs.tasks import problem_arguments
from engine.problem import Problem
from engine.studies.capacity import MOST_GPUS, CapacityPoint, grown, parts_of, smallest
from engine.studies.curve import CurvePoint
from engine.studies.imprecision import LEVELS, MOST_SEEDS, PAPER_LOSS, ImprecisionPoint, check_levels, systems_of
from engine.studies.noise import NOISES
from engine.studies.sensitivity import SensitivityPoint
from engine.systems import SYSTEMS, systems_for
from engine.workload import TrafficMatrix

KINDS = {
    "curve": ":material/show_chart: Sweep",
    "sensitivity": ":material/tornado: Sensitivity",
    "imprecision": ":material/blur_on: Imprecise traffic",
    "capacity": ":material/dns: How many GPUs",
    "synthetic": ":material/casino: Synthetic workload",
}
NOISE_LEVELS = tuple(one / 100 for one in range(0, MOST_NOISE + 1, 15))


def panel(problem: Problem) -> None:
    """Choose a study of inference."""
    # After a reload the newest study is the one to look at; ids of jobs sort by time.
    newest = max(KINDS, key=lambda kind: state.study_job(kind) or "")
    kind = st.segmented_control(
        "Study", list(KINDS), default=newest, format_func=KINDS.get, key="what-if-study", label_visibility="collapsed",
    ) or newest  # fmt: skip
    {
        "curve": curve,
        "sensitivity": sensitivity,
        "imprecision": imprecision,
        "capacity": capacity,
        "synthetic": synthetic_panel,
    }[kind](problem)


def curve(problem: Problem) -> None:
    """One slider over its whole range."""
    st.caption(
        "One slider over its whole range: the plan and a baseline as they are, and what a plan made for every value takes."
    )
    try:
        plan, _ = plan_to_study(problem)
        linear = linear_plan(problem)
    except InputError as error:
        st.error(plain(str(error)), icon=":material/error:")
        return
    sliders = {one.field: one for one in sliders_of(problem)}
    with st.container(horizontal=True, vertical_alignment="bottom"):
        field = st.selectbox("Change", [*sliders, "noise"], width=220, key="what-if-field",
                             format_func=lambda one: sliders[one].label if one in sliders else "Imprecise traffic")  # fmt: skip
        beside = st.selectbox("Beside it", others := others_of(problem, plan, linear), width=260, key="what-if-curve-beside",
                              format_func=lambda id: others[id].name, disabled=not others)  # fmt: skip
        name, options = system_for(problem, plan)
        anew = st.checkbox(
            f"Plan anew at every value, by {plain(systems_for(problem)[name].title)}", True, key="what-if-anew"
        )
        plans = [plan, *([others[beside]] if beside else [])]
        if st.button("Run the sweep", icon=":material/play_arrow:", type="primary", disabled=_running("curve")):
            values = sliders[field].values if field in sliders else NOISE_LEVELS
            studies.run("curve", problem, {
                "plans": [one.model_dump(mode="json", exclude_none=True) for one in plans], "field": field,
                "values": list(values), "system": name if anew else None, "options": options,
            })  # fmt: skip

    def show(result: dict[str, Any], complete: bool) -> None:
        points = [CurvePoint.from_dict(one) for one in result["points"]]
        if points:
            widgets.chart(charts.curve(points, result["field"], result["series"], complete), "what-if-curve")
            st.caption(f"{_how(result)} Costs: {plain(result['cost_source'])}.")
            _download(points, "curve")

    _watch(
        "curve",
        problem,
        {},
        show,
        "Nothing swept yet. On the sample it takes half a minute, without new plans seconds.",
    )


def _how(result: dict[str, Any]) -> str:
    """How a study came to its times."""
    if result["simulated"]:
        return "Simulated."
    return "Not simulated: every all-to-all at the time of its busiest port."


def sensitivity(problem: Problem) -> None:
    """What the plan's time hangs on, as a tornado."""
    st.caption("What the plan's time hangs on: one thing at a time a share less and more, the plan as it is.")
    try:
        plan, _ = plan_to_study(problem)
    except InputError as error:
        st.error(plain(str(error)), icon=":material/error:")
        return
    if plan is None:
        st.caption("Open a plan first.")
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        percent = st.number_input("By, %", 1, 90, 25, width=110, key="what-if-share")
        wanted = {"plan": plan.model_dump(mode="json", exclude_none=True)}
        if st.button("Run the sensitivity study", icon=":material/play_arrow:", type="primary",
                     disabled=_running("sensitivity")):  # fmt: skip
            studies.run("sensitivity", problem, wanted | {"share": percent / 100})

    def show(result: dict[str, Any], complete: bool) -> None:
        points = [SensitivityPoint.from_dict(one) for one in result["points"]]
        if points:
            widgets.chart(charts.tornado(points, result["total"], result["share"], complete), "what-if-tornado")
            st.caption(f"{plain(result['plan'])}. {_how(result)} Costs: {plain(result['cost_source'])}.")
            _download(points, "sensitivity")

    _watch("sensitivity", problem, wanted, show, "Nothing run yet. On the sample it takes a few seconds.")


def imprecision(problem: Problem) -> None:
    """Aurora's Q4."""
    st.caption("Aurora's Q4 (§8.2): plans are made on traffic of which a share is noise and timed on the traffic as recorded. "
               "Noise is what other layers of this recording do, or the layer's own traffic with its experts shuffled. The "
               "paper plans on one layer and times on the mixture; here what is timed stays the same.")  # fmt: skip
    several = problem.workload.layers > 1
    with st.container(horizontal=True, vertical_alignment="bottom"):
        text = st.text_input("Noise, %", ", ".join(f"{100 * one:g}" for one in LEVELS), width=230, key="what-if-levels")
        seeds = st.number_input("Draws at each", 1, MOST_SEEDS, 3, width=130, key="what-if-seeds")
        noise = st.selectbox("Noise is", list(NOISES)[0 if several else 1 :], format_func=NOISES.get, width=330,
                             key="what-if-noise-kind")  # fmt: skip
        limit = st.number_input("Seconds a plan", 0.1, 600.0, 5.0, width=140, key="what-if-limit",
                                help="time limit of Aurora's placement")  # fmt: skip
        try:
            levels = levels_of(text)
        except InputError as error:
            levels, complaint = None, str(error)
        if st.button("Run the imprecision study", icon=":material/play_arrow:", type="primary",
                     disabled=levels is None or _running("imprecision")):  # fmt: skip
            studies.run("imprecision", problem, {"levels": levels, "seeds": seeds, "noise": noise,
                                                 "options": {"aurora": {"time_limit": limit}}})  # fmt: skip
    if levels is None:
        st.error(plain(complaint), icon=":material/error:")

    def show(result: dict[str, Any], complete: bool) -> None:
        points = [ImprecisionPoint.from_dict(one) for one in result["points"]]
        if not points:
            return
        titles = {name: SYSTEMS[name].title for name in systems_of(problem)}
        left, right = st.columns(2, gap="medium")
        with left:
            widgets.chart(charts.imprecise_times(points, titles, complete), "what-if-imprecise")
        with right:
            widgets.chart(charts.speed_ups(points, titles), "what-if-speed-ups")
        st.caption(f"Simulated. Noise: {plain(NOISES[result['noise']])}. Bands go from the least to the most of "
                   f"{result['seeds']} draws, lines through the median. The paper's plans lost up to {units.share(PAPER_LOSS)} "
                   f"at 75 % on its traces and GPUs. Costs: {plain(result['cost_source'])}.")  # fmt: skip
        _download(points, "imprecision")

    _watch("imprecision", problem, {}, show, "Nothing run yet. On the sample it takes about a minute.")


def levels_of(text: str) -> list[float]:
    """Shares from percentages that a person typed, apart by commas or spaces. Raises InputError for anything else."""
    try:
        found = [float(part) / 100 for part in re.split(r"[,;\s%]+", text.strip()) if part]
    except ValueError:
        raise InputError(f"noise: '{text[:40]}' is no list of percentages; write for example 0, 25, 50, 75") from None
    return check_levels(found, 1)


def capacity(problem: Problem) -> None:
    """How many GPUs for a target time."""
    st.caption("The smallest cluster of equal parts whose plan meets a target time. Every size is planned for from scratch, "
               "from one part on; none is skipped, since time need not fall with every GPU.")  # fmt: skip
    if isinstance(problem.workload, TrafficMatrix):
        st.info(
            "A traffic matrix is between a fixed number of GPUs: open a routing log or expert loads.",
            icon=":material/info:",
        )
        return
    try:
        plan, _ = plan_to_study(problem)
        now = outlook_of(plan, problem).total
    except InputError as error:
        st.error(plain(str(error)), icon=":material/error:")
        return
    parts, systems = parts_of(problem.cluster), systems_for(problem)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        target = st.number_input("Target, ms", 0.0, None, float(f"{0.8e3 * now:.3g}"), format="%g", width=130,
                                 key=f"what-if-target-{plan.id[:8]}",
                                 help=f"of all MoE layers; the plan shown above takes {units.seconds(now)}")  # fmt: skip
        part = st.selectbox("Made of", list(parts), len(parts) - 1, width=300, key="what-if-part")
        own = sum(len(node.gpus) for node in parts[part])
        most = st.number_input(
            "GPUs at most", own, max(MOST_GPUS, own), max(32, own), width=130, key=f"what-if-most-{own}"
        )
        system = st.selectbox("Planned by", list(systems), list(systems).index("aurora"), lambda one: systems[one].title,
                              width=210, key="what-if-system")  # fmt: skip
        limit = st.number_input("Seconds a plan", 0.1, 600.0, 5.0, width=140, key="what-if-capacity-limit")
        if st.button(
            "Find the number of GPUs",
            icon=":material/play_arrow:",
            type="primary",
            disabled=not target or _running("capacity"),
        ):
            takes = {option.name for option in systems[system].options}
            studies.run("capacity", problem, {
                "part": [node.model_dump(mode="json") for node in parts[part]], "title": part, "target": target / 1e3,
                "most_gpus": most, "system": system, "options": {"time_limit": limit} if "time_limit" in takes else {},
            })  # fmt: skip

    def show(result: dict[str, Any], complete: bool) -> None:
        points = [CapacityPoint.from_dict(one) for one in result["points"]]
        if not points:
            return
        target = result["target"]
        widgets.chart(charts.capacity(points, target, complete), "what-if-capacity")
        st.caption(honestly(points, target, result, complete))
        st.dataframe(as_text(points, target), hide_index=True)
        found = smallest(points, target)
        with st.container(horizontal=True, vertical_alignment="center"):
            if found and st.button(
                f"Open the cluster of {found.gpus} GPUs", icon=":material/dns:", key="what-if-grown"
            ):
                nodes = parts.get(result["title"])
                if nodes is not None:
                    state.open_cluster(grown(problem.cluster, nodes, found.parts))
                    st.rerun(scope="app")
            _download(points, "capacity")

    _watch(
        "capacity",
        problem,
        {},
        show,
        "Nothing run yet. A plan for every size takes up to the seconds that it is given.",
    )


def honestly(points: list[CapacityPoint], target: float, result: dict[str, Any], complete: bool) -> str:
    """What the search has shown and what it has not."""
    found, parts = smallest(points, target), [f"Planned by {plain(SYSTEMS[result['system']].title)}, simulated."]
    smaller = [one for one in points if found is not None and one.gpus < found.gpus]
    if found is not None and smaller:
        open_ = [one.gpus for one in smaller if not one.cannot_meet(target)]
        parts.append(
            "No smaller size can, as long as GPUs hold as many experts each and none twice: its bound lies above the target "
            "or its experts do not fit."
            if not open_
            else f"All smaller sizes miss it, but only by the plans found: at {', '.join(map(str, open_))} GPUs the bound "
            "leaves room for a better one."
        )
    again = [one.gpus for one in points if found is not None and one.gpus > found.gpus and not one.meets(target)]
    if again:
        parts.append(f"More is not always enough: with {', '.join(map(str, again))} GPUs the target is missed again.")
    elif found is not None and complete:
        parts.append("The sizes after it that were tried meet it too; larger ones were not tried.")
    if found is None and complete:
        parts.append("Replicas of experts, another model parallelism or other GPUs were not tried.")
    parts.append(f"The same tokens on every size. Costs: {plain(result['cost_source'])}.")
    return " ".join(parts)


def as_text(points: list[CapacityPoint], target: float) -> pd.DataFrame:
    """The sizes tried, as text with units."""
    factor, unit = units.scale_of(max([target, *(one.total or 0.0 for one in points)]), units.TIME)

    def state_of(one: CapacityPoint) -> str:
        if one.total is None:
            return one.refused
        if one.meets(target):
            return "meets the target"
        return "cannot: its bound is above the target" if one.cannot_meet(target) else "misses the target"

    return pd.DataFrame({
        "GPUs": [str(one.gpus) for one in points],
        f"Time, {unit}": ["—" if one.total is None else units.digits(one.total / factor) for one in points],
        f"Bound, {unit}": ["—" if one.bound is None else units.digits(one.bound / factor) for one in points],
        "": [state_of(one) for one in points],
    })  # fmt: skip


def _running(kind: str) -> bool:
    job = _newest(kind)
    return job is not None and not job.state.finished


def _newest(kind: str) -> runner.Job | None:
    id = state.study_job(kind)
    return next(iter(cached.jobs([id] if id else [])), None)


def _watch(
    kind: str, problem: Problem, wanted: dict[str, Any], show: Callable[[dict[str, Any], bool], None], empty: str
) -> None:
    """The newest study of a kind, if it is about what is open now; wanted: further arguments that it must have had."""
    job = _newest(kind)
    if job is not None:
        about = problem_arguments(problem) | wanted
        if {name: job.request.arguments.get(name) for name in about} != about:
            st.info("The last study was about another plan, recording, cluster, model or cost source: run it again for what is "
                    "open.", icon=":material/info:")  # fmt: skip
            return
    studies.watch(kind, lambda result: show(result, job.state.finished), empty)


def _download(points: list, name: str) -> None:
    st.download_button("Points as CSV", lambda: pd.DataFrame([one.to_dict() for one in points]).to_csv(index=False),
                       f"{name}.csv", "text/csv", icon=":material/download:", key=f"what-if-csv-{name}")  # fmt: skip
