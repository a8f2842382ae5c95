"""The report of a launch: measured times against predicted ones, or why it did not end well.

Ended launches are noted in the team's database, so that their measurements stand with the plan.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import streamlit as st

from app import cached, failing, kept, tables, timeline, widgets
from app.charts import gantt as gantt_charts
from app.charts import launch as charts
from app.charts import step as step_charts
from app.charts import theme
from app.launch import history, own, watch
from app.launch.history import Launched
from app.tables import plain, sentence
from engine import units
from engine.errors import InputError
from engine.jobs.launches import KeptScheduler, LaunchAnswer, LaunchedPlan
from engine.jobs.runner import Job, State
from engine.launch.preparation.launch import PLACES, Launch, plans_in
from engine.launch.preparation.prepare import prepare
from engine.plan import Plan
from engine.store import team
from engine.store.database import database
from engine.timeline import Timeline

NOBODY = "the command line"
"""Person of a launch that names none."""


def note(launch: Launched) -> None:
    """Note every plan of a launch that is done; a database that does not answer is reported and holds nothing up."""
    try:
        _noted(database().address, launch.job.id, launch)
    except InputError as error:
        st.caption(f"Not noted for the team: {plain(str(error))}.")


@st.cache_resource(max_entries=1024, show_spinner=False)
def _noted(address: str, id: str, _launch: Launched) -> int:
    """Number of plans of a launch that were noted; done once in the life of the server."""
    job, brief = _launch.job, _launch.brief
    runs = runs_of(job, cached.result_of(job), brief.on, brief.ranks, _launch.started)
    for run in runs:
        team.note_run(database(), **run)
    return len(runs)


def runs_of(job: Job, answer: LaunchAnswer | None, place: str, ranks: int | None, started: float) -> list[dict[str, Any]]:
    """The arguments of `note_run` for every plan of a launch. answer: of its job; started: seconds since the epoch."""
    if answer is None:
        return []
    asked = job.request.arguments
    plans = {plan.id: plan for plan in (Plan.from_dict(plan, "plan") for plan in plans_in(asked))}
    about = {"device": answer.device, "tokens": answer.tokens, "ranks": ranks}
    return [
        {
            "id": f"{job.id}-{number}",
            "plan": plans[run.plan],
            "place": place,
            "by": asked.get(history.BY) or NOBODY,
            "at": started,
            "predicted": run.predicted_seconds,
            "measured": run.measured_seconds,
            "report": about | {"passes": list(run.pass_seconds)},
        }
        for number, run in enumerate(answer.runs)
        if run.plan in plans
    ]


HERE = {"local": "this machine", "testbed": "the emulated links"}
"""Machine that a launch's predictions are for, by its place; elsewhere the machines there."""


def show(launch: Launched, past: list[Launched]) -> None:
    """The report of a launch that has ended, with a button that runs the same again."""
    brief = launch.brief
    ranks = "" if brief.ranks is None else f" · {brief.ranks} ranks"
    tokens = "" if brief.tokens is None else f" · {brief.tokens:,} tokens"
    started = f"Started {widgets.describe_time(launch.started)} on {PLACES[brief.on]}"
    ended = f"ended after {units.seconds(launch.job.elapsed)}"
    what_for = ""
    if launch.state is State.DONE:  # said before anybody compares the prediction with another one
        what_for = f"**The prediction is for {_here(launch)}, not for the drawn cluster as on other pages.** "
    with st.container(gap="xsmall"):
        with st.container(horizontal=True, vertical_alignment="center"):
            names = plain(" and ".join(launch.brief.plans))
            st.subheader(
                {State.DONE: f"Measured: {names}", State.FAILED: f"{names} failed"}.get(launch.state, f"{names}, stopped"),
                anchor=False,
            )
            here = launch.brief.on in ("local", "testbed")
            blocked = history.refusal() or (history.why_not_now(past) if here else None)
            if launch.job.request.arguments.get("own"):
                blocked = "the texts of a launch are kept nowhere: give them again in a new one"
            if st.button("Relaunch", icon=":material/replay:", disabled=bool(blocked), help=blocked or "the same once more"):
                arguments = launch.job.request.arguments
                with failing.saying(sentence):
                    if failed := prepare(Launch.from_arguments(arguments), cached.attached()).failed:
                        raise InputError(f"{failed.name}: {failed.text}")
                    history.start(arguments)
                    st.rerun()
        st.caption(f"{what_for}{started}{ranks}{tokens} · {ended}")
        if brief.smaller:
            st.warning(sentence(brief.smaller), icon=":material/compress:")
        if brief.routing:
            st.caption(plain(f"Routing {brief.routing}."))
    if launch.state is State.DONE:
        note(launch)
        with failing.saying():
            _measured(launch)
        with st.expander("What the ranks printed", icon=":material/terminal:", on_change="rerun") as logs:
            if logs.open:
                watch.ranks(launch.job)
        return
    if launch.state is State.FAILED:
        st.error(plain(launch.job.error or "it failed"), icon=":material/error:")
    else:
        st.info("Stopped before it had measured anything.", icon=":material/stop_circle:")
    watch.ranks(launch.job)


def _here(launch: Launched) -> str:
    return HERE.get(launch.brief.on, "the machines that it ran on")


def _measured(launch: Launched) -> None:
    report = cached.result_of(launch.job)
    if report is None or not report.is_of_now:
        text = "Another version of Switchyard ran this launch; its results cannot be shown here. Relaunch it."
        st.warning(text, icon=":material/history:")
        return
    runs = report.runs
    names = unlike([run.name for run in runs], [run.plan for run in runs])
    chosen = 0
    if len(runs) > 1:
        predicted = [run.predicted_seconds for run in runs]
        title, details = finding(report.preference.lines)
        if report.own is not None:
            details, title = f"{title}; {details}", own.finding(report, names)
        passes = [run.pass_seconds for run in runs]
        widgets.chart(lambda: charts.totals(names, predicted, passes, theme.plain(title)), f"totals-{launch.job.id}")
        st.caption(plain(f"{details}."))
    if report.own is not None:
        own.show_paces(report, names)
        own.say_if_same(report, names)
        own.say_what_ran(report.own)
    if len(runs) > 1:
        chosen = kept.segments(
            "Plan",
            range(len(runs)),
            default=0,
            required=True,
            format_func=lambda at: plain(names[at]),
            key=f"launch-plan-{launch.job.id}",
        )
    run, key = runs[chosen], f"{launch.job.id}-{chosen}"
    total = (run.predicted_seconds, run.measured_seconds)
    _steps_and_layers(run, total, key, report.own is not None)
    _figures(run, report)
    if run.scheduler is not None:
        _scheduler(run.scheduler)
    predicted, measured = timelines(launch, chosen)
    pair = {f"Predicted for {_here(launch)}": predicted, "Measured": measured}
    if report.own is not None:
        _gantt_of_tokens(pair, key)
    elif measured.labels is None:
        _gantt_of_layers(pair, key)
    else:
        phase, first, last = timeline.choose_part(list(pair.values()))
        parts = {name: step_charts.stretch(timeline, phase, first, last) for name, timeline in pair.items()}
        title = f"The step took {units.seconds(total[1])}, predicted were {units.seconds(total[0])}"
        timeline.draw_step(pair, parts, title, "launch-step-gantt")
    testbed = report.testbed
    place = f"{report.device}, links of {testbed.name}" if testbed else report.device
    st.caption(f"The prediction uses {plain(run.predicted['cost_source'])}. Measured on {plain(place)}.")
    if testbed:
        rates = np.array(testbed.bandwidth)
        widgets.chart(charts.links(rates, rates * testbed.scale, testbed.scale), "report-links")


def _steps_and_layers(run: LaunchedPlan, total: tuple[float, float], key: str, is_own: bool) -> None:
    """Predicted and measured times, by kind of step and by layer. total: seconds; is_own: True for a person's own model"""
    kinds, layers = run.by_kind, run.by_layer
    if is_own:
        kinds = kinds.model_copy(update={"kind": tuple(own.CALLED.get(kind, kind) for kind in kinds.kind)})
    waiting = (run.predicted_waiting_seconds, run.waiting_seconds)
    dark = st.context.theme.type == "dark"
    left, right = st.columns(2, gap="medium")
    with left:
        widgets.chart(
            lambda: charts.by_kind(kinds.kind, kinds.predicted, kinds.measured, total, waiting, dark), f"by-kind-{key}"
        )
    with right:
        widgets.chart(lambda: charts.by_layer(layers.layer, layers.predicted, layers.measured, dark), f"by-layer-{key}")


def unlike(names: list[str], ids: list[str]) -> list[str]:
    """Names that tell plans apart, also plans with the same name."""
    return [f"{name} {id[:8]}" if names.count(name) > 1 else name for name, id in zip(names, ids, strict=True)]


def finding(lines: Sequence[str]) -> tuple[str, str]:
    """The plan that the measurement prefers and if the prediction agreed; and the difference, in a sentence. lines: see
    `Preference`."""
    first, *between, ranked = lines
    title = f"{first}{',' if ranked.startswith('as predicted') else ';'} {ranked}"
    details = "; ".join(between)
    return f"{title[:1].upper()}{title[1:]}", f"{details[:1].upper()}{details[1:]}"


def timelines(launch: Launched, at: int) -> tuple[Timeline, Timeline]:
    """The predicted and the measured timeline of one of a launch's plans."""
    return cached.result_of(launch.job).runs[at].timelines()


def _figures(run: LaunchedPlan, report: LaunchAnswer) -> None:
    predicted, measured, passes = run.predicted_seconds, run.measured_seconds, run.pass_seconds
    # Launches of earlier versions do not have it.
    allowed = "" if run.allowed_difference is None else f", here {run.allowed_difference:.1g},"
    with st.container(horizontal=True, gap="medium"):
        st.metric("Measured", units.seconds(measured), help="the timed pass of median length")
        st.metric("Predicted", units.seconds(predicted), help=plain(run.predicted["cost_source"]))
        st.metric("Measured / predicted", units.ratio(measured / predicted) if predicted else "—")
        st.metric(
            f"{len(passes)} passes",
            f"{units.seconds(min(passes))} – {units.seconds(max(passes))}",
            width="content",  # squeezed, it would be written smaller
            help="fastest and slowest timed pass",
        )
        help = f"barriers; predicted were {units.seconds(run.predicted_waiting_seconds)}"
        st.metric("Waiting between steps", units.seconds(run.waiting_seconds), help=help)
        st.metric(
            "Output differs by" if report.own is None else "Logits differ by",
            tables.MISSING if run.difference is None else f"{run.difference:.1g}",
            help="largest difference from the unplanned single-process computation, relative to its largest number; "
            f"a launch that differs by more than rounding explains{allowed} fails",
        )
        st.metric(
            "Clocks agree to",
            units.seconds(report.clock_error) if report.clock_error else "same clock",
            help="by how much the clocks of two ranks may differ; ranks on one machine share its clock",
        )


def _scheduler(scheduler: KeptScheduler) -> None:
    """The work of a plan's scheduler at run time, piece by piece."""
    st.caption(f"{sentence(scheduler.text)} Times are of the slowest rank in every layer, summed over the layers.")
    columns = {"Of the scheduler": list(scheduler.piece)}
    for title, column in (("Predicted", scheduler.predicted), ("Measured", scheduler.measured)):
        columns[title] = [units.seconds(seconds) for seconds in column]
    tables.show(columns, hide_index=True, width="content", alt="Pieces of the scheduler's work")


def _gantt_of_tokens(pair: dict[str, Timeline], key: str) -> None:
    """The passes of a model that generates, one token at a time. What follows the last MoE layer counts as the next one."""
    tokens = list(dict.fromkeys(pair["Measured"].labels))
    token = tokens[0]
    if len(tokens) > 1:
        token = kept.select_slider("Pass", tokens, token, key=f"launch-token-{key}", format_func=str.capitalize)
    layers = int(pair["Measured"].events["layer"].max()) + 1
    parts = {}
    for name, whole in pair.items():
        rows = np.flatnonzero(np.array(whole.labels) == token)
        events = whole.events.iloc[rows].reset_index(drop=True)
        behind = events["layer"].where(events["layer"] >= 0, layers)
        kind = events["kind"].astype(str).replace(own.CALLED)
        parts[name] = replace(whole, events=events.assign(layer=behind, kind=kind), labels=None)
    _gantt_of_layers(parts, f"{key}-{token}")
    st.caption(f"Layer {layers} is what follows the last MoE layer: the last norm and the head.")


def _gantt_of_layers(pair: dict[str, Timeline], key: str) -> None:
    last_layer = int(pair["Measured"].events["layer"].max())
    fits = gantt_charts.layers_that_fit(list(pair.values()))
    first, last = 0, 0
    if last_layer:
        first, last = kept.slider("MoE layers", 0, last_layer, (0, min(last_layer, 1)), key=f"launch-layers-{key}")
    if last - first + 1 > fits:
        last = first + fits - 1
        st.warning(
            f"Showing layers {first} to {last}: more than {gantt_charts.MOST_BARS:,} bars would stall the browser.",
            icon=":material/warning:",
        )
    title, dark = "Predicted, its bars with a darker outline, above measured", st.context.theme.type == "dark"
    picture, steps = st.container(), [gantt_charts.longest_steps(own, first, last) for own in pair.values()]
    view = timeline.choose_view(max((end for ends in steps for _, end in ends), default=0.0), steps[-1])
    with picture:
        drawn = partial(gantt_charts.gantt, pair, first, last, title, dark=dark, view=view)
        widgets.gantt(drawn, f"gantt-{key}", f"{first}-{last}, {view}")
