"""What should I do?"""

import streamlit as st

from app import cached, header, state, widgets
from app.optimise import goal, lina, step, studies
from app.optimise import table as plan_table
from app.text import plain
from engine import units
from engine.errors import InputError
from engine.systems import proposed_for, systems_for

VIEWS = {
    "Candidate plans": ":material/table_rows:",
    "Balance against affinity": ":material/scatter_plot:",
    "Plan on A, score on B": ":material/grid_on:",
    "Lina at run time": ":material/schedule:",
}

header.show("Optimise", "What should I do? Pick systems, run them, and compare what they found with a proven bound.")
if state.cluster() is None or state.model() is None:
    widgets.needed_problem()
aim = goal.choose()
problem = widgets.needed_problem()
if aim == goal.ONE:
    goal.choose_context(problem)
if aim == goal.STEP:
    step.summary(problem)

st.subheader("Systems", anchor=False)
wanted = []
fitting = list(systems_for(problem).values())
for first in range(0, len(fitting), 3):
    for place, system in zip(st.columns(3), fitting[first : first + 3], strict=False):
        with place:
            kind = "baseline" if system.baseline else system.paper
            if st.checkbox(
                f"**{system.title}** · {kind}", system.preselected, key=f"use-{aim}-{system.name}", help=system.summary
            ):
                wanted.append(system)

options: dict[str, dict] = {}
with st.expander("Options", icon=":material/settings:"):
    for system in wanted:
        names = system.options.model_fields
        if not names:
            continue
        st.markdown(f"**{system.title}**")
        with st.container(horizontal=True):
            options[system.name] = {
                name: widgets.option_input(f"{aim}-{system.name}", system.options, name) for name in names
            }
if aim == goal.STEP:
    st.caption(step.assumptions(problem))
else:
    st.caption(
        f"Costs: {plain(problem.cost.source)}. Simulated is the MoE part of every layer; attention and dense layers "
        "are the same for every plan."
    )

if st.button("Run", type="primary", icon=":material/play_arrow:", disabled=not wanted):
    chosen = [{"name": system.name, "options": options.get(system.name, {})} for system in wanted]
    try:
        state.add_plan_job(widgets.start_job_on(problem, "optimise", {"systems": chosen}).id)
    except InputError as error:
        st.error(plain(str(error)), icon=":material/error:")


@st.fragment(run_every=1)
def watch() -> None:
    """What runs and what ended last; once one has ended the whole page is drawn again, with its plans."""
    jobs = cached.jobs(state.plan_jobs())
    ended = [job for job in jobs if job.state.finished]
    for job in [*(job for job in jobs if not job.state.finished), *ended[:1]]:
        widgets.job_row(job)
        for title, reason in cached.answer_of(job).refused.items():
            st.warning(f"**{plain(title)}** cannot plan for this: {plain(reason)}", icon=":material/warning:")
    for job in jobs:
        if state.newly_finished(job.id, job.state.finished):
            plans = [candidate.plan for candidate in cached.answer_of(job).candidates]
            if plans and widgets.why_not(cached.open_plan(), problem):
                state.open_plan(min(plans, key=lambda plan: plan.claim.objective).id)
            st.rerun()


watch()
widgets.other_jobs("optimise", state.plan_jobs(), state.add_plan_job)

view = "Candidate plans"
if aim == goal.ONE:
    view = (
        widgets.segments(
            "Show",
            list(VIEWS),
            default=view,
            format_func=lambda view: f"{VIEWS[view]} {view}",
            label_visibility="collapsed",
        )
        or view
    )
if view == "Balance against affinity":
    studies.front(problem)
    st.stop()
if view == "Plan on A, score on B":
    studies.matrix(problem, options)
    st.stop()
if view == "Lina at run time":
    lina.panel(problem)
    st.stop()

table = plan_table.rows(problem)
if table.empty:
    if any(not job.state.finished for job in cached.jobs(state.plan_jobs())):
        st.stop()  # the row above says how far the job is
    st.info(
        f"No plan for these inputs yet: press Run. {proposed_for(problem).title} takes a few seconds on the sample.",
        icon=":material/info:",
    )
    st.stop()

st.subheader("Candidate plans", anchor=False)
on = "Simulated" if aim == goal.STEP else "Simulated on the open workload"
caption = f"{on}, fastest first. Select a row to open its plan."
if len(table) > 1 and table["Time"][0] > 0:
    factor = units.ratio(table["Time"].max() / table["Time"][0])
    caption = f"{plain(table['Plan'][0])} is {factor} as fast as {plain(table['Plan'].iloc[-1])}. {caption}"
st.caption(caption)
plan_table.show(table)
if aim == goal.STEP:
    st.caption(
        "Exposed communication: the network is busy and nothing computes. Memory: weights, gradients and momentum on "
        "the fullest GPU, without activations."
    )
    plan_table.decomposition(table, problem)
opened = table[table["id"] == state.plan_id()]
if len(opened):
    plan_table.notes(opened.iloc[0])
st.page_link("../pages/timeline.py", label="See why on the timeline", icon=":material/view_timeline:")
