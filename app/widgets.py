"""Pieces that several pages share."""

import html
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any, Literal, NoReturn

import plotly.graph_objects as go
import streamlit as st

from app import cached, components, samples, state
from app.charts.theme import CONFIG, legible, without_title
from app.tables import plain, sentence
from app.visitor import people
from engine import store, units
from engine.costs import choice
from engine.errors import InputError
from engine.jobs import runner
from engine.jobs.runner import State
from engine.jobs.runtimes import seconds_left
from engine.plan import Placement, Plan
from engine.problem import Problem
from engine.store.problems import problem_arguments, save_recordings
from engine.systems import SYSTEMS, TRAINING
from engine.systems.pieces import linear_placement

STATE_COLOURS = {
    State.STARTING: "gray",
    State.WAITING: "gray",
    State.RUNNING: "blue",
    State.CANCELLING: "orange",
    State.DONE: "green",
    State.CANCELLED: "orange",
    State.FAILED: "red",
}
MIME_TYPES = {"json": "application/json", "csv": "text/csv", "html": "text/html"}


Figure = go.Figure | Callable[[], go.Figure]
"""A figure, or a function that makes it, called once for all that it depends on."""


def chart(figure: Figure, key: str, of: str = "") -> None:
    """A plotly chart with the common toolbar below its title.

    The title is also its description for screen readers and the name of the file of the toolbar's picture. Both are read letter
    by letter, although plotly knows tags.
    of: digest of all that a figure which is made once depends on, besides its key and the theme
    """
    dark = st.context.theme.type == "dark"
    title, drawn = _drawn(figure, dark) if isinstance(figure, go.Figure) else _drawn_once(key, of, dark, figure)
    picture = {"filename": re.sub(r"[^\w.%×-]+", "-", title).strip("-")[:120]}
    with st.container(gap=None, key=f"titled-{key}"):
        st.markdown(f"**{plain(title)}**")
        st.plotly_chart(drawn, key=key, config=CONFIG | {"toImageButtonOptions": picture}, alt=title)


def _drawn(figure: go.Figure, dark: bool) -> tuple[str, go.Figure]:
    """The title of a figure, and the figure as a page has it, without."""
    title = html.unescape(figure.layout.title.text)
    # plotly has looked at every value once
    return title, go.Figure(without_title(legible(figure, dark)), _validate=False)


@st.cache_resource(max_entries=16, show_spinner=False)
def _drawn_once(key: str, of: str, dark: bool, _make: Callable[[], go.Figure]) -> tuple[str, go.Figure]:
    """A page draws itself anew after every click, and one that looks for news all the time."""
    return _drawn(_make(), dark)


def caption_with_costs(text: str, source: str) -> None:
    """A caption that ends with the open source of times and how far off it is; all that is known of it stands in the tip.

    source: in all words; in the caption itself where it is another one, as of an older study
    """
    with suppress(InputError):
        cost = choice.from_dict(state.session.cost)
        if cost.source in source:
            far = choice.how_far_off(cost, training=state.session.step is not None)
            st.caption(f"{text} Costs: {plain(far)}.", help=sentence(source))
            return
    st.caption(f"{text} Costs: {plain(source)}.")


def gantt(figure: Figure, key: str, of: str = "") -> None:
    """A chart on which the bar under the pointer stands out. of: as for `chart`"""
    chart(figure, key, of)
    components.dim_others_on_hover(key)


def download(label: str, content: str | bytes | Callable[[], str | bytes], name: str, **more: Any) -> None:
    """A button that saves a file. content: or a function that makes it when the button is pressed."""
    mime = MIME_TYPES.get(name.rpartition(".")[2])
    st.download_button(label, content, name, mime, icon=":material/download:", on_click="ignore", **more)


def needed_problem() -> Problem:
    """The open inputs as a problem; if an input is missing or does not fit, say so, offer the sample, and stop."""
    problem = problem_or_advice() or st.stop()
    if reason := choice.why_not(problem.cost, problem.cluster, problem.model):
        cost_fault(reason)
    return problem


def problem_or_advice() -> Problem | None:
    """The open inputs as a problem; if an input is missing or does not fit, say so, offer the sample, and return None."""
    parts = {"workload": cached.workload(), "cluster": state.session.cluster, "model": state.session.model}
    missing = [name for name, part in parts.items() if part is None]
    step, served = state.session.step, state.serving() is not None and state.session.model is not None
    if "workload" in missing and (served or (step is not None and step.routing == "balanced")):
        missing.remove("workload")
    if missing:
        else_ = " A training or serving step with balanced routing needs no workload." if missing == ["workload"] else ""
        *first, last = (f"a {name}" for name in missing)
        needed = f"{', '.join(first)} and {last}" if first else last
        st.info(f"Open {needed} first, or start from the sample.{else_}", icon=":material/info:")
        sample_button()
        return None
    try:
        return cached.problem()
    except InputError as error:
        st.error(plain(str(error)), icon=":material/error:")
        st.caption(
            "Choose parts that fit each other in the sidebar. Without a recording of the model a serving step assumes balanced "
            "routing."
        )
        if state.session.second and st.button("Close the second model", icon=":material/close:"):
            state.change(second=None)
            st.rerun()
        if step and st.button("Assume balanced routing", icon=":material/balance:"):
            state.open_step(step.model_copy(update={"routing": "balanced"}))
            st.rerun()
        return None


def say_inference_only() -> None:
    """Say what studies without serving steps show instead."""
    if state.serving() is not None:
        st.caption(":material/info: The goal is a serving step; here the plan's MoE layers alone count, as for inference.")


def cost_fault(reason: str) -> NoReturn:
    """Say that the chosen costs cannot time the open problem, offer those that always can, and stop."""
    st.error(f"The chosen costs cannot time what is open: {plain(reason)}.", icon=":material/error:")
    st.caption("Choose another source of costs on the Cluster page, or:")
    st.button("Use the datasheet costs", icon=":material/menu_book:", on_click=state.update, kwargs={"cost": state.DATASHEET})
    st.stop()


def sample_button(type: Literal["primary", "secondary"] = "primary") -> None:
    """One click to a session with all inputs. type: of the button, secondary if the page is about something else."""
    if st.button("Open the sample", type=type, icon=":material/science:"):
        samples.open_sample()
        st.rerun()


def placement_to_show(plan: Plan | None, problem: Problem) -> tuple[Placement, str]:
    """The placement of the open plan if it fits, else the linear one; and its name. If neither fits, the page says so and
    stops."""
    if not why_not(plan, problem):
        return plan.placement, f"the open plan, {plain(plan.name)}"
    try:
        return linear_placement(problem), "a linear placement (no plan is open)"
    except InputError as error:
        st.error(plain(str(error)), icon=":material/error:")
        st.page_link("../pages/cluster.py", label="Change the cluster", icon=":material/dns:")
        st.stop()


def comparable(problem: Problem) -> Iterator[tuple[str, cached.Candidate]]:
    """The candidates that compare for the open problem, by id.

    A front has a chart of its own, of which only the open plan counts; plans with another travel have another engine's times,
    unless they were free to choose it; others do not fit.
    """
    for id, candidate in cached.candidates().items():
        if candidate.plan.provenance.optimiser == "front" and id != state.session.plan:
            continue
        travels = candidate.plan.travel == problem.travel or candidate.plan.provenance.options.get("travel") == "free"
        if travels and not why_not(candidate.plan, problem):
            yield id, candidate


def fitting_recordings(problem: Problem) -> dict[str, str]:
    """Names of the session's recordings that the problem can be posed on, the open one too, by digest."""
    names = {}
    for digest, name in state.session.workloads.items():
        try:
            problem.with_workload(cached.recording(digest))
        except InputError:
            continue
        names[digest] = name
    return names


def why_not(plan: Plan | None, problem: Problem) -> str:
    """Why a plan cannot be shown for the open problem; empty when it can."""
    if plan is None:
        return "No plan is open"
    try:
        cached.check_plan(plan, problem)
    except InputError as error:
        return str(error)
    return ""


def segments(label: str, options: Iterable, format_func: Callable[[Any], str] = str, **arguments: Any) -> Any:
    """`st.segmented_control` with a chosen segment as readable as the others.

    Streamlit writes it in the primary colour on a tint of the same. In the dark theme no colour has a contrast of 4.5 both
    there and under the white text of a button, so every segment is written in the theme's gray, which is nearly the text's.
    """

    def gray(option: Any) -> str:
        icon, text = re.fullmatch(r"(:material/\w+: )?(.*)", format_func(option), re.DOTALL).groups("")
        return f"{icon}:gray[{text}]"

    # A second press keeps the choice; without one nothing would be lit and yet something shown.
    arguments.setdefault("required", arguments.get("default") is not None)
    return st.segmented_control(label, options, format_func=gray, **arguments)


def usual_baselines(plans: dict[str, Plan], plan: Plan, deployed: str | None) -> list[str]:
    """Ids of the plans that a plan is compared with unless a person chooses others: the baseline, under that id, then the
    newest plans of the papers' baselines."""
    usual = {system.name for system in (*SYSTEMS.values(), *TRAINING.values()) if system.shown_beside}
    newest = {}
    for id, candidate in plans.items():
        if candidate.provenance.optimiser in usual and id not in (plan.id, deployed):
            newest.setdefault(candidate.provenance.optimiser, id)
    return [*([deployed] if deployed in plans and deployed != plan.id else []), *newest.values()]


def baseline_id(problem: Problem) -> str | None:
    """The id of the baseline; None if nothing was chosen and experts do not fit the GPUs."""
    try:
        return cached.baseline(problem).plan.id
    except InputError:
        return None


def start_job(kind: str, arguments: dict[str, Any], handed: bytes | None = None) -> runner.Job:
    """Start a job that plans or studies plans, or records. Raises InputError for a visitor who may only look. handed: see
    `runner.start`"""
    people.allow("plan")
    return runner.start(kind, arguments, store.data_folder(), handed=handed)


def start_job_on(problem: Problem, kind: str, more: dict[str, Any]) -> runner.Job:
    """Start a job on a problem; more: its further arguments. Raises InputError as `start_job` does."""
    people.allow("plan")
    save_recordings(problem)
    return start_job(kind, problem_arguments(problem) | more)


def other_jobs(kind: str, known: list[str], adopt: Callable[[str], None]) -> None:
    """Jobs that other sessions on this data folder have running, with a button that watches one here."""
    others = [job for job in runner.jobs(store.data_folder(), kind) if job.id not in known and not job.state.finished]
    if others:
        with st.expander(f"{len(others)} running in other sessions", icon=":material/group:"):
            for job in others:
                if st.button(f"Watch the job of {describe_time(job.started)}", key=f"adopt-{job.id}"):
                    adopt(job.id)
                    st.rerun()


def describe_time(moment: float) -> str:
    """Seconds since the epoch as a time of day on the server's clock."""
    return f"{datetime.fromtimestamp(moment):%Y-%m-%d %H:%M:%S}"


def standing_in_words(job: runner.Job, standing: State) -> str:
    """The state of a job; for a waiting one also the number of jobs before it."""
    if standing is not State.WAITING:
        return standing.value
    return f"waiting, {job.ahead} before it" if job.ahead else "waiting, next in line"


def time_left(job: runner.Job) -> str:
    """The time that a job is likely to run on, in words; empty while nothing is known."""
    left = seconds_left(job)
    if left is None:
        return ""
    return f"about {units.roughly(left)} left" if left else "longer than expected"


def job_row(job: runner.Job, grace: float = runner.GRACE) -> None:
    """One job: state, progress, a way to stop it, and why it failed. grace: seconds that it is given to stop by itself."""
    standing, progress = job.state, job.progress
    parts = [f":{STATE_COLOURS[standing]}[{standing_in_words(job, standing)}]", units.seconds(job.elapsed)]
    if progress and not standing.finished:
        parts += filter(None, [time_left(job), plain(progress.message)])
        if progress.incumbent is not None:
            parts.append(f"best so far {units.seconds(progress.incumbent)}")
    with st.container(border=True):
        left, middle, right = st.columns([12, 4, 3], vertical_alignment="center")
        with left:
            if standing.finished:
                st.markdown(" · ".join([*parts, describe_time(job.started)]))
            else:
                st.progress((progress.done or 0.0) if progress else 0.0, text=" · ".join(parts))
        with middle:
            history = [] if standing.finished else job.history
            best = [progress.incumbent for progress in history if progress.incumbent is not None]
            if best and best[-1] < best[0]:  # the course of the best result, once it has improved
                st.metric("Best so far", units.seconds(best[-1]), chart_data=best, chart_type="area", height="content")
        with right:
            if not standing.finished and st.button("Stop", key=f"stop-{job.id}", icon=":material/stop:"):
                runner.cancel(job, grace)
                st.rerun(scope="fragment")
        if standing is State.FAILED:
            st.error(plain(job.error or "it failed"), icon=":material/error:")
            st.caption("The end of its log:")
            st.code(job.log_tail() or "(empty)", language=None)
        if standing is State.CANCELLED:
            kept = "What was found until then is kept." if job.result_written else "It had found nothing yet."
            st.caption(f"Stopped. {kept}")
