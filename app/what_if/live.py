"""The upper half of the What-if page: sliders, and the times of the open plan and a baseline under them; and the contention
study, which finds the contention from which ordering sends pays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import streamlit as st

from app import cached, failing, kept, simulations, state, studies, verdict_line, widgets
from app.charts import what_if as charts
from app.optimise import serving_page
from app.optimise.table import scope_of
from app.tables import plain
from engine import units
from engine.compare.sensitivity import USUAL_VALUES, system_for
from engine.compare.what_if import NO_CHANGE, Change, Outlook, is_quick
from engine.errors import InputError
from engine.goal import Goal
from engine.jobs import runner
from engine.jobs.studies import ContentionAnswer
from engine.plan import Plan
from engine.problem import Problem
from engine.provenance import input_digests
from engine.store.problems import problem_arguments
from engine.systems import systems_for
from engine.workload import RoutingTrace

REPLAN = "replan"
FORM = 180
"""Pixels of the sliders at the left of the charts."""


@dataclass(frozen=True)
class Slider:
    """A factor that can be changed. usual: the value without effect; said: a value in words."""

    field: str
    label: str
    values: tuple[float, ...]
    help: str
    usual: float = 1.0
    said: Callable[[float], str] = units.ratio


NETWORK = Slider(
    "network", "Network bandwidth", USUAL_VALUES["network"], "Scales every GPU's fabric port and the links inside nodes."
)
COMPUTE = Slider("compute", "Computation speed", USUAL_VALUES["compute"], "every computation takes its time divided by this")
LATENCY = Slider("latency", "Latency", USUAL_VALUES["latency"], "what a send takes to start")
CONTENTION = Slider(
    "contention",
    "Contention",
    USUAL_VALUES["contention"],
    "how much longer a byte takes for every further send that meets at a port; at 0 % ports reach what they do now",
    0.0,
    lambda share: f"{100 * share:g} %",
)
TOKENS = Slider(
    "tokens", "Tokens", USUAL_VALUES["tokens"], "tokens for each recorded one: a smaller or larger batch with the same routing"
)
BATCH = Slider("tokens", "Batch", (0.25, 0.5, 1.0, 2.0, 4.0, 8.0), "sequences on every GPU")
WIDTH = Slider(
    "width", "Model width", USUAL_VALUES["width"], "d_model and d_ff: bytes of a token, and with both the work of an expert"
)
AS_NOW = "as the model"
DTYPES = (AS_NOW, "fp8", "bf16", "fp32")
MOST_NOISE = 75


def panel(problem: Problem) -> None:
    """Sliders left, charts right; moving one simulates again at once."""
    try:
        plan, is_open = plan_to_study(problem)
    except InputError as error:
        st.error(plain(str(error)), icon=":material/error:")
        return
    if plan is None:
        st.caption("Once a plan is open, sliders here show what its step takes on a faster network, with another batch …")
        st.page_link("../pages/optimise.py", label="Make a plan", icon=":material/play_arrow:")
        return
    if problem.goal is Goal.TWO_MODELS and not is_quick(problem):
        text = "Two models on so many GPUs are too much to simulate while a slider moves; the studies below do it as jobs."
        st.info(text, icon=":material/info:")
        return
    verdict_line.show_plan_if_soon(plan, problem)
    others = others_of(problem, plan)

    @failing.fragment
    def live() -> None:
        with st.container(horizontal=True, wrap=False, gap="small"):
            left, right = st.container(width=FORM), st.container()
        with left:
            change = choose(problem)
            names = {id: other.name for id, other in others.items()}
            beside = None
            if others:
                beside = others[kept.selectbox("Compare with", names, format_func=names.get, key="what-if-beside")]
            replanned = _replan(problem, plan, change)
        with right:
            _show(problem, {"open": plan, "beside": beside, "replanned": replanned}, change, is_open)

    live()
    verdict_line.say_made_for(plan, problem)


def plan_to_study(problem: Problem) -> tuple[Plan | None, bool]:
    """The open plan if it fits, otherwise the baseline (None for a training step); and True if it is open.

    Raises InputError when no baseline was chosen and experts do not fit the GPUs.
    """
    plan = cached.open_plan()
    if not widgets.why_not(plan, problem):
        return plan, True
    return (None if problem.goal is Goal.TRAINING else cached.baseline(problem).plan), False


def others_of(problem: Problem, plan: Plan) -> dict[str, Plan]:
    """Plans that a plan can be compared with, by id: the baseline, then the session's other plans that fit, the usual baselines
    first."""
    try:
        now = cached.baseline(problem).plan
        deployed = {now.id: now}
    except InputError:  # contiguous blocks do not fit the GPUs
        deployed = {}
    fitting = {
        id: candidate.plan for id, candidate in cached.candidates().items() if not widgets.why_not(candidate.plan, problem)
    } | deployed
    usual = widgets.usual_baselines(fitting, plan, next(iter(deployed), None))
    return {id: fitting[id] for id in [*usual, *fitting] if id != plan.id}


def sliders_of(problem: Problem, serving: cached.Serving | None) -> list[Slider]:
    """The factors of the open problem that can be changed. serving: the whole step that is timed, if one is"""
    sliders = [NETWORK, COMPUTE]
    if problem.network.latency > 0 or problem.network.link_latency.any():
        sliders.append(LATENCY)
    if problem.network.gpus > 2:
        sliders.append(CONTENTION)
    if problem.goal is Goal.TRAINING:
        return sliders + ([BATCH] if problem.graph is None else [])
    if serving is not None:
        return [*sliders, BATCH]
    return [*sliders, TOKENS, WIDTH]


def forecast_serving(problem: Problem) -> cached.Serving | None:
    """The step that is the goal, where it can be forecast while a slider moves; else None, and the MoE layers are."""
    return cached.open_serving(problem) if problem.goal is Goal.INFERENCE and is_quick(problem) else None


def choose(problem: Problem) -> Change:
    """The sliders, and the change that they make."""
    serving = forecast_serving(problem)
    sliders = sliders_of(problem, serving)
    at = {
        slider.field: kept.select_slider(
            slider.label, slider.values, slider.usual, slider.said, key=_key(slider.field), help=slider.help
        )
        for slider in sliders
    }
    factors = dict(at)
    if problem.goal is not Goal.TRAINING and serving is None:
        at["dtype"] = kept.selectbox(
            "Number format",
            DTYPES,
            DTYPES.index(AS_NOW),
            lambda dtype: f"{dtype} ({problem.model.dtype})" if dtype == AS_NOW else dtype,
            key=_key("dtype"),
            help="what experts compute with and tokens are sent as",
        )
        factors["dtype"] = None if at["dtype"] in (AS_NOW, problem.model.dtype) else at["dtype"]
    if problem.goal is not Goal.TRAINING:
        help = (
            "share of every layer's tokens that go where other layers send theirs, as in Aurora's Q4: the plan knows "
            "nothing of it (one layer: experts shuffled)"
        )
        at["noise"] = kept.slider("Traffic noise", 0, MOST_NOISE, 0, step=5, format="%d %%", key=_key("noise"), help=help)
        factors["noise"] = at["noise"] / 100
    change = Change(**factors)
    st.button("Reset all sliders", disabled=change.is_none, on_click=_reset, args=(sliders,), width="stretch")
    return change


def _key(field: str) -> str:
    return f"what-if-{field}"


def _reset(sliders: list[Slider]) -> None:
    state.forget_choices(*(_key(field) for field in (*(slider.field for slider in sliders), "dtype", "noise")))


def _replan(problem: Problem, plan: Plan, change: Change) -> Plan | None:
    """Run the plan's system for the changed problem, as a job; return the plan that it found for exactly this change, if it
    has."""
    name, options = system_for(problem, plan)
    system = systems_for(problem)[name]
    job = studies.newest(REPLAN)
    more = {"change": change.model_dump(mode="json"), "system": name, "options": options, "parent": plan.id}
    running = job is not None and not job.state.finished
    disabled = change.is_none or running
    help = f"Runs {plain(system.title)} for what is changed and shows its plan beside the open one."
    st.button("Replan for this change", disabled=disabled, width="stretch", help=help, on_click=_start, args=(problem, more))
    if job is None or job.request.arguments != problem_arguments(problem) | more:
        return None
    if job.state is not runner.State.DONE:
        running = not job.state.finished

        @failing.fragment(run_every=1 if running else None)
        def newest() -> None:
            widgets.job_row(job)
            if running and job.state.finished:
                st.rerun()

        newest()
        return None
    found: list[cached.Candidate] = []
    with failing.saying():
        found = cached.answer_of(job).candidates
    if not found:
        return None
    again = found[0].plan
    if st.button("Open the new plan", icon=":material/open_in_new:", width="stretch", disabled=again.id == state.session.plan):
        state.take_plan(again.id, job.id)
        state.update(plan=again.id)
        st.rerun()
    return again


def _start(problem: Problem, more: dict[str, Any]) -> None:
    try:
        state.set_study_job(REPLAN, widgets.start_job_on(problem, REPLAN, more).id)
    except InputError as error:
        state.visit.notice = str(error)


def _show(problem: Problem, plans: dict[str, Plan | None], change: Change, is_open: bool) -> None:
    """The charts of the plans now and after the change; if the change cannot be, the reason, and the plans now."""
    after: dict[str, Outlook] = {}
    try:
        if not change.is_none:
            after = outlooks_of(problem, [plan for plan in plans.values() if plan is not None], change)
    except InputError as error:
        st.error(f"This change cannot be: {plain(str(error))}", icon=":material/error:")
    shown = [plan for plan in (plans["open"], plans["beside"]) if plan is not None]
    try:
        now = outlooks_of(problem, shown)
        cases = [charts.Case(plan.name, now[plan.id], after.get(plan.id)) for plan in shown]
    except InputError as error:
        widgets.cost_fault(str(error))
    again = plans["replanned"]
    if again is not None and again.id in after:
        cases.append(charts.Case("Replanned", None, after[again.id]))
    scope = scope_of(shown[:1], None, problem)
    widgets.chart(charts.totals(cases, change.in_words, st.context.theme.type == "dark", scope), "what-if-totals")
    serving = forecast_serving(problem)
    overlaps = problem.goal is not Goal.INFERENCE or (serving is not None and serving.step.overlap == "two-batch")
    by_gpu = len(cases[0].shown.resources) > 1  # GPUs of a step that do the same are one
    places = st.columns(2, gap="medium") if by_gpu else [None, st.container()]
    if by_gpu:
        with places[0]:
            widgets.chart(charts.per_gpu(cases[0], overlaps), "what-if-gpus")
    with places[1]:
        if problem.goal is Goal.TRAINING:
            widgets.chart(charts.per_kind(cases[0]), "what-if-kinds")
        else:
            widgets.chart(charts.per_layer(cases), "what-if-layers")
    widgets.caption_with_costs(_said(problem, is_open, change), problem.cost_source)


def _said(problem: Problem, is_open: bool, change: Change) -> str:
    parts = [] if is_open else ["No plan is open: this is what is deployed."]
    if (serving := forecast_serving(problem)) is not None:
        parts.append(
            f"The whole step is simulated: {serving_page.step_in_words(serving.step)}. Placement and order of sends stay."
        )
        parts.append("Attention and other operators follow the computation speed.")
    elif is_quick(problem):
        parts.append("Simulated: placement and order of sends stay as they are, only what the sliders set changes.")
    else:
        if cached.open_serving(problem) is not None:
            parts.append("The plan's MoE layers alone, as for inference; the studies below time the whole serving step.")
        parts.append(
            "Too large to simulate every send while a slider moves: each all-to-all takes what its busiest port needs at the "
            "least, which no order without relays beats. Orders differ here by contention alone; the Timeline simulates them."
        )
    if problem.graph is not None:
        parts.append("Operators imported with measured times keep them.")
    if problem.goal is Goal.TRAINING and len(problem.cluster.gpus) > 1:
        parts.append("GPUs that do the same at the same time count as one.")
    if problem.goal is Goal.TRAINING:
        parts.append("Width and numbers of a training step are set on the Optimise page.")
    if (
        change.tokens != 1
        and isinstance(problem.workload, RoutingTrace)
        and serving is None
        and problem.goal is not Goal.TRAINING
    ):
        parts.append(f"{problem.workload.tokens * change.tokens:,.0f} tokens per pass.")
    if change.contention:
        parts.append(f"Every further send at a port makes bytes there take {units.share(change.contention)} longer.")
    return " ".join(parts)


def outlooks_of(problem: Problem, plans: Sequence[Plan], change: Change = NO_CHANGE) -> dict[str, Outlook]:
    """Outlooks of plans after a change, by plan id. Raises InputError when the change cannot be or a plan does not fit."""
    key, serving = tuple(input_digests(problem).values()), forecast_serving(problem)
    if serving is not None:
        key += (serving.step.digest, serving.beside.sizes.digest, serving.source.source)
    kept = {plan.id: _kept(plan.id, key, change.digest) for plan in plans}
    missing = [plan for plan in plans if kept[plan.id].outlook is None]
    if missing:
        for plan, outlook in zip(
            missing, simulations.outlooks(problem, missing, change, serving and serving.timed), strict=True
        ):
            kept[plan.id].outlook = outlook
    return {id: place.outlook for id, place in kept.items()}


@dataclass
class _Kept:
    """Holder of an outlook: several are simulated at once, and a cached function gives one."""

    outlook: Outlook | None = None


@st.cache_resource(max_entries=256, show_spinner=False)
def _kept(id: str, key: tuple[str, ...], change: str) -> _Kept:
    return _Kept()


def timed_step(problem: Problem) -> dict[str, Any]:
    """The argument of a study that times the serving step that is the goal as a whole; nothing without one."""
    serving = cached.open_serving(problem)
    return {} if serving is None else {"serving": serving.arguments}


def run_button(label: str, kind: str, ready: bool = True) -> bool:
    """The button that starts a study, unless one of its kind runs."""
    return st.button(label, icon=":material/play_arrow:", type="primary", disabled=not ready or studies.is_running(kind))


def contention(problem: Problem) -> None:
    """A plan's placement with all sends at once and with its sends in order, over the range of the slider. Raises InputError as
    `plan_to_study`."""
    st.caption(
        "At what contention ordering starts to pay: the plan's placement with all sends at once, and with orders in which few "
        "or none meet at a port."
    )
    plan, _ = plan_to_study(problem)
    step = timed_step(problem)
    wanted = {"plan": plan.model_dump(mode="json", exclude_none=True)}
    if run_button("Run the contention study", "contention"):
        studies.start_and_rerun("contention", problem, wanted | step)

    def show(answer: ContentionAnswer, complete: bool) -> None:
        points = answer.points
        if points:
            widgets.chart(charts.contention(points, answer.pays_from, complete, answer.phase), "what-if-pays")
            now = "As things are" if problem.network.contended else "With ports that keep their full rate, as now,"
            how = "The whole step is simulated, attention and all. " if answer.phase is not None else ""
            widgets.caption_with_costs(
                f"{plain(answer.plan)}. {how}{now} orders of this placement can save {units.at_most(answer.most_saved)} "
                "of all at once (bound).",
                answer.cost_source,
            )
            studies.download(points, "contention")

    wanted |= {"serving": step.get("serving")}
    studies.watch_for_problem("contention", problem, wanted, show, "Nothing run yet. On the sample it takes a few seconds.")
