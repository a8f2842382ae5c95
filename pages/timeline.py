"""Why is it that fast?"""

import streamlit as st

from app import cached, header, state, widgets
from app.charts import gantt as charts
from app.charts import lanes, theme
from app.charts import waits as waits_charts
from app.text import plain
from app.timeline import bounds, sends, step
from engine import units
from engine.errors import InputError
from engine.formats.perfetto import write_trace
from engine.goal import Goal

MOST_GPUS = 32
"""GPUs of a plan that have a lane; of larger clusters those are drawn that the others wait for, and the busiest."""

header.show("Timeline", "Why is it that fast? Every GPU's network lane above its compute lane, on one time axis.")
problem = widgets.needed_problem()

fitting = {
    id: candidate.plan for id, candidate in cached.candidates().items() if not widgets.why_not(candidate.plan, problem)
}
plan = fitting.get(state.plan_id() or "")
if plan is None:
    reason = widgets.why_not(cached.open_plan(), problem)
    st.info(f"{plain(reason)}. Choose a plan in the row above or make one.", icon=":material/info:")
    st.page_link("../pages/optimise.py", label="Make a plan", icon=":material/play_arrow:")
    st.stop()

baselines = widgets.usual_baselines(fitting, plan)
beside = st.multiselect(
    "Beside it",
    [id for id in fitting if id != plan.id],
    default=baselines,
    format_func=lambda id: f"{fitting[id].name} · {id[:8]}",
    placeholder="Compare with other plans",
)
shown = {
    fitting[id].name if fitting[id].name != plan.name or id == plan.id else f"{fitting[id].name} {id[:8]}": fitting[id]
    for id in (plan.id, *beside)
}
try:
    timelines = {name: cached.simulate(plan, problem) for name, plan in shown.items()}
except InputError as error:  # sizes that the chosen costs were not measured for, or tokens that the recording lacks
    widgets.cost_fault(str(error))


def download() -> None:
    st.download_button(
        "Perfetto file of the open plan",
        lambda: write_trace(timelines[plan.name]),
        "timeline.json",
        "application/json",
        icon=":material/download:",
        on_click="ignore",
    )


if problem.goal is Goal.TRAINING:
    step.show(shown, problem)
    download()
    st.stop()

figures = cached.metrics(plan, problem)
whole = figures.total or 1.0  # a recording of nothing but padding takes no time
with st.container(horizontal=True, gap="large"):
    st.metric(
        "Total, simulated", units.seconds(figures.total), help=f"{figures.how_simulated}; costs: {problem.cost.source}"
    )
    bounds.show(plan, problem, figures)
    if figures.bound is not None and plan.claim.scope != "order":
        st.metric(
            "Bound for any placement",
            units.seconds(figures.bound),
            help="proven by the optimiser, for placements with as many slots per GPU",
        )
    st.metric(
        "Exposed communication",
        units.share(figures.exposed_communication / whole),
        help="share of the time in which the network is busy and nothing computes",
    )
    st.metric("Overlap", units.share(figures.overlap), help="share of communication hidden under computation")
    st.metric(
        "GPU utilisation", units.share(figures.utilisation), help="compute time / total, mean over GPUs (Aurora §8.1)"
    )

last_layer = problem.workload.layers - 1
first, last = 0, last_layer
if last_layer > 0:
    first, last = st.slider("MoE layers", 0, last_layer, lanes.drawable(timelines, 0, 1, MOST_GPUS))
asked, (first, last) = last, lanes.drawable(timelines, first, last, MOST_GPUS)
if last < asked:
    st.warning(
        f"Showing layers {first} to {last}: more than {charts.MOST_BARS:,} bars would stall the browser. "
        "The Perfetto file has everything.",
        icon=":material/warning:",
    )
others = [timeline.total for name, timeline in timelines.items() if name != plan.name]
title = f"{theme.plain(plan.name)} takes {units.seconds(figures.total)}"
if others:
    title += f"; the plans beside it take {' and '.join(units.ratio(other / whole) for other in others)} that"
lines = {name: cached.bound(plan, problem, first, last) for name, plan in shown.items()}
parts = {name: lanes.fewer_lanes(timeline, first, last, MOST_GPUS) for name, timeline in timelines.items()}
drawn = max(count for _, count in parts.values())
if drawn < len(problem.cluster.gpus):
    title += f" ({drawn} of {len(problem.cluster.gpus)} GPUs: those that the others wait for, and the busiest)"
stretches = {name: part for name, (part, _) in parts.items()}
widgets.chart(charts.gantt(stretches, first, last, title, lines, drawn), "gantt")

longest = max(figures.seconds, key=figures.seconds.get)
share = units.share(figures.seconds[longest] / whole)
most = "" if plan.goal is Goal.TWO_MODELS else f"Most of the time goes to {charts.KIND_TITLES[longest]} ({share}). "
bar, how = "a send; hover tells its receiver", figures.how_simulated
if timelines[plan.name].bundled:
    bar = "the time in which a GPU sends or receives without a gap: there are too many sends to draw"
st.caption(
    f"{most}Outlined bars are {how}. A bar on a network lane is {bar}. The line runs through what all GPUs wait for."
)
if timelines[plan.name].bundled:
    sends.show(plan, problem)

st.subheader("The bottleneck", anchor=False)
st.caption(
    "Every step of a layer ends with its slowest GPU; this is the time of the whole open plan by the GPU that the "
    "others wait for, and by layer. Of a send that ends last it is the end that more was queued for."
)
waited = cached.waits(plan, problem)
if len(waited):
    by_gpu, by_layer = st.columns(2, gap="large")
    with by_gpu:
        widgets.chart(waits_charts.by_gpu(waited, timelines[plan.name].resources), "waits-by-gpu")
    with by_layer:
        widgets.chart(waits_charts.by_layer(waited), "waits-by-layer")
download()
