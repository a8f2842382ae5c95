"""The Timeline page of a training step: figures, the Gantt with what stayed exposed, and what is assumed."""

import streamlit as st

from app import balance, cached, kept, verdict_line, widgets
from app.charts import step as charts
from app.optimise import step
from engine import units
from engine.plan import Plan
from engine.problem import Problem
from engine.timeline import Timeline

PHASES = {"step": "Whole step", "forward": "Forward", "backward": "Backward"}


def show(shown: dict[str, Plan], problem: Problem) -> None:
    """The plans by the names to show, the open one first."""
    timelines = {name: cached.simulate(plan, problem) for name, plan in shown.items()}
    plan = next(iter(shown.values()))
    verdict_line.show_plan(plan, problem)
    chart = st.container()
    phase, first, last = choose_part(list(timelines.values()))
    parts = {name: charts.stretch(timeline, phase, first, last) for name, timeline in timelines.items()}
    title = verdict_line.headline(plan, problem)
    bounds = (
        {name: cached.metrics(plan, problem).order_bound for name, plan in shown.items()} if phase == "step" else None
    )
    with chart:
        widgets.gantt(charts.step_gantt(timelines, parts, title, bounds), "step-gantt")
    verdict_line.say_made_for(plan, problem)
    _figures(plan, problem)
    groups = max(len(timeline.resources) for timeline in timelines.values())
    limit = ""
    if groups > charts.MOST_LANES:
        limit = f" Of up to {groups} groups of GPUs the {charts.MOST_LANES} that compute longest are drawn."
    st.caption(
        "Outlined bars are simulated. GPUs that do the same at the same time share a lane. Hatched marks above a lane: the "
        f"network is busy and the GPU computes nothing.{limit} Drag the slider below the chart to zoom."
    )
    st.caption(step.assumptions(problem))


def _figures(plan: Plan, problem: Problem) -> None:
    figures = cached.metrics(plan, problem)
    own, total = figures.decomposition["communication"], figures.total or 1.0
    with st.container(horizontal=True, gap="medium"):
        st.metric(
            "Bound for this placement",
            f"{units.seconds(figures.order_bound)} (+{units.share(figures.order_gap)})",
            help="proven: no schedule of this placement is faster, however operators are cut, ordered and overlapped; in "
            "brackets what the step takes on top",
        )
        st.metric(
            charts.EXPOSED_TITLE,
            f"{units.seconds(own)} · {units.share(own / total)}",
            help="the network is busy and nothing computes, mean over the groups of alike GPUs; and its share of the step",
        )
        st.metric("Overlap", units.share(figures.overlap), help="share of communication hidden under computation")
        st.metric(
            "GPU utilisation",
            units.share(figures.utilisation),
            help="compute time / total, mean over the groups of alike GPUs",
        )
        balance.metric(figures.balance)


def choose_part(timelines: list[Timeline]) -> tuple[charts.Phase, int, int]:
    """Phase and model layers to draw; never more than a browser can."""
    layers = charts.layers_of(timelines) or [0]
    whole = sum(len(charts.stretch(timeline).events) for timeline in timelines) <= charts.MOST_BARS
    offered = [phase for phase in PHASES if whole or phase != "step"]
    phase = (
        kept.segments(
            "Part of the step",
            offered,
            default=offered[0],
            format_func=PHASES.get,
            label_visibility="collapsed",
            key="step-phase",
        )
        or offered[0]
    )
    if phase == "step":
        return phase, layers[0], layers[-1]
    first, last = layers[0], charts.last_that_fits(timelines, phase, layers[0], layers[-1])
    fits = last
    if len(layers) > 1:
        chosen = kept.slider(
            "Model layers", layers[0], layers[-1], (first, last), key=f"step-layers-{phase}-{layers[-1]}"
        )
        if chosen != (first, last):
            first, last = chosen
            fits = charts.last_that_fits(timelines, phase, first, last)
    if fits < last:
        st.warning(
            f"Showing layers {first} to {fits}: more than {charts.MOST_BARS:,} bars would stall the browser. The "
            "Perfetto file has everything.",
            icon=":material/warning:",
        )
    elif not whole:
        st.caption(
            f"A part of the step is shown: all of it has more than {charts.MOST_BARS:,} bars. The Perfetto file has "
            "everything."
        )
    return phase, first, fits
