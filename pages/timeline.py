"""The Timeline page: why is it that fast?"""

import streamlit as st

from app import cached, header, kept, state, tables, timeline, verdict_line, widgets
from app.charts import gantt
from app.review import place
from app.tables import plain
from engine import units
from engine.errors import InputError
from engine.formats.perfetto import write_trace
from engine.goal import Goal
from engine.workload import digest_of

GPUS = "GPUs"
"""A lane for every GPU, unless there are more than a person can read."""

actions = header.show("Timeline", "Where does the time go? Each GPU's network above its compute.")
problem = widgets.needed_problem()

fitting = {id: candidate.plan for id, candidate in cached.candidates().items() if not widgets.why_not(candidate.plan, problem)}
plan = fitting.get(state.session.plan or "")
if plan is None:
    reason = widgets.why_not(cached.open_plan(), problem)
    st.info(f"{plain(reason)}. Choose a plan in the sidebar or make one.", icon=":material/info:")
    st.page_link("../pages/optimise.py", label="Make a plan", icon=":material/play_arrow:")
    st.stop()

deployed = widgets.baseline_id(problem)


def name_of(id: str) -> str:
    """The name of a plan on this page, which marks the deployed one."""
    return f"{fitting[id].name} (deployed now)" if id == deployed else fitting[id].name


with actions, st.popover("Compare", icon=":material/compare_arrows:"):
    beside = kept.multiselect(
        "Compare with",
        [id for id in fitting if id != plan.id],
        default=widgets.usual_baselines(fitting, plan, deployed),
        format_func=name_of,
        key="timeline-beside",
        placeholder="Other plans",
    )

shown = {name_of(id): fitting[id] for id in (plan.id, *beside)}
try:
    timelines = {name: cached.simulate(plan, problem) for name, plan in shown.items()}
except InputError as error:  # sizes that the chosen costs were not measured for, or tokens that the recording lacks
    widgets.cost_fault(str(error))


def download() -> None:
    widgets.download("Download Perfetto trace", lambda: write_trace(timelines[name_of(plan.id)]), "timeline.json")


if problem.goal is Goal.TRAINING:
    timeline.show_step(shown, problem)
    download()
    st.stop()
if state.serving() is not None and timeline.show_serving(shown, problem):
    st.stop()

figures = cached.metrics(plan, problem)
whole = figures.total or 1.0  # a recording of nothing but padding takes no time
verdict_line.show_plan(plan, problem)
place.mark_layer()
chart = st.container()
drawn_by = GPUS
if len(problem.cluster.gpus) > gantt.MOST_LANES:
    folds = gantt.folds(problem.cluster)
    drawn_by = kept.segments(
        "One lane per", [*folds, GPUS], lambda name: name.removesuffix("s"), default=next(iter(folds)), key="timeline-lanes"
    ) or next(iter(folds))
drawable = timelines
if drawn_by != GPUS:
    drawable = {name: gantt.fold(timeline, *folds[drawn_by]) for name, timeline in timelines.items()}
last_layer = problem.workload.layers - 1
first, last = 0, last_layer
if last_layer > 0:
    first, last = kept.slider(
        "MoE layers",
        0,
        last_layer,
        gantt.drawable(drawable, *state.visit.first_layers(last_layer), gantt.MOST_LANES),
        key="timeline-layers",
    )
asked, (first, last) = last, gantt.drawable(drawable, first, last, gantt.MOST_LANES)
if last < asked:
    st.warning(
        f"Showing layers {first} to {last}: more than {gantt.MOST_BARS:,} bars would stall the browser. "
        "The Perfetto file has everything.",
        icon=":material/warning:",
    )
title = verdict_line.headline(plan, problem)
bounds = {name: cached.bound(plan, problem, first, last) for name, plan in shown.items()}
lines = {name: bound for name, bound in bounds.items() if bound is not None}
stretches, drawn = gantt.fewer_lanes(drawable, first, last, gantt.MOST_LANES)
whole_of = len(drawable[name_of(plan.id)].resources)
if drawn < whole_of:
    noun = drawn_by if drawn_by == GPUS else drawn_by.lower()
    title += f" ({drawn} of {whole_of} {noun})"
dark, plans = st.context.theme.type == "dark", [f"{name} {plan.id}" for name, plan in shown.items()]
with chart:
    picture = st.container()
    gone = {name: gantt.longest_steps(stretch, first, last) for name, stretch in stretches.items()}
    longest = max((end for steps in gone.values() for _, end in steps), default=0.0)
    view = timeline.choose_view(longest, gone[name_of(plan.id)])
    of = digest_of(title, *plans, *cached.key_of(problem), drawn_by, f"{first}-{last}", f"{view}")
    with picture:
        widgets.gantt(lambda: gantt.gantt(stretches, first, last, title, lines, drawn, dark=dark, view=view), "gantt", of)
verdict_line.say_made_for(plan, problem)
with st.container(horizontal=True, gap="medium"):
    timeline.show_bounds(plan, problem, figures)
    help = "share of the time in which the network is busy and nothing computes"
    st.metric("Exposed communication", units.share(figures.exposed_communication / whole), help=help)
    st.metric("Overlap", units.share(figures.overlap), help="share of communication hidden under computation")
    st.metric("GPU utilisation", units.share(figures.utilisation), help="compute time / total, mean over GPUs (Aurora §8.1)")
    tables.metric(figures.balance)

bundled = timelines[name_of(plan.id)].bundled
timeline.show_legend(plan, figures, bundled, folded=drawn_by != GPUS, chosen=drawn < whole_of)
if bundled:
    timeline.show_sends(plan, problem)

with kept.expander("The bottleneck: which GPU and layer the others wait for", key="timeline-bottleneck"):
    timeline.show_bottleneck(plan, problem, timelines[name_of(plan.id)].resources)
if plan.goal is Goal.TWO_MODELS:
    timeline.show_colocation(plan, problem)
download()
