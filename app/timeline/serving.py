"""The Timeline page under the goal of serving: the figures of the whole step and its timeline."""

import streamlit as st

from app import kept, state, widgets
from app.charts import gantt as charts
from app.charts import lanes, theme
from app.serving import page, table
from app.serving.figures import check_cluster, served, serving_of
from app.text import plain
from engine import units
from engine.errors import InputError
from engine.formats.perfetto import write_trace
from engine.plan import Plan
from engine.problem import Problem
from engine.simulate.serving import ServedStep

MOST_GPUS = 8
"""GPUs with a lane."""


def show(shown: dict[str, Plan], problem: Problem) -> bool:
    """The plans by the names to show, the open one first; False where they cannot be served and it says why."""
    try:
        check_cluster(problem)
        serving = serving_of(problem)
        comparison = table.compare(problem, serving)
        steps = {name: served(plan, problem, serving) for name, plan in shown.items()}
    except InputError as error:
        st.info(f"No serving step: {plain(str(error))}. Shown are the MoE layers as inference.", icon=":material/info:")
        return False
    name, plan = next(iter(shown.items()))
    figures = steps[name].figures
    row = table.Row(plan, figures)
    table.verdict(row, comparison, problem)
    _gantt(steps)
    table.memory(row)
    page.say_sources(serving, figures)
    return True


def _gantt(steps: dict[str, ServedStep]) -> None:
    """The simulated layers of the step; with two batches all that takes turns with them too."""
    timelines = {name: step.timeline for name, step in steps.items()}
    name, step = next(iter(steps.items()))
    last_layer = int(max(timeline.events["layer"].max() for timeline in timelines.values()))
    first, last = 0, last_layer
    chart = st.container()
    if last_layer > 0:
        begin, end = state.first_layers(last_layer)
        usual = lanes.drawable(timelines, begin, end, MOST_GPUS)
        first, last = kept.slider("MoE layers of the step", 0, last_layer, usual, key=f"served-layers-{begin}")
    first, last = lanes.drawable(timelines, first, last, MOST_GPUS)
    stretches, drawn = lanes.fewer_lanes(timelines, first, last, MOST_GPUS)
    share = units.share(step.timeline.total / step.figures.seconds)
    layers = "MoE layers, attention included," if step.figures.step.overlap == "two-batch" else "MoE layers"
    title = f"{theme.plain(name)}: {layers} are {share} of the step"
    if drawn < len(step.timeline.resources):
        title += f" ({drawn} of {len(step.timeline.resources)} GPUs)"
    with chart:
        widgets.gantt(
            charts.gantt(stretches, first, last, title, None, drawn, ", second batch", st.context.theme.type == "dark"),
            "served-gantt",
        )
    what = "MoE layers; attention and dense layers stand between them, the same for every plan"
    if step.figures.step.overlap == "two-batch":
        what = "two batches that take turns, attention among them; embedding, head and dense layers stand outside"
    which = ""
    if drawn < len(step.timeline.resources):
        which = " Drawn are the GPUs that the others wait for, and the busiest."
    st.caption(f"Outlined bars are simulated at the tokens of the step: {what}.{which}")
    st.download_button(
        "Download Perfetto trace of the served step",
        lambda: write_trace(step.timeline),
        "served-step.json",
        "application/json",
        icon=":material/download:",
        on_click="ignore",
    )
