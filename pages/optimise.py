"""What should I do?"""

import pandas as pd
import streamlit as st

from app import cached, state, widgets
from app.text import plain
from engine import store, units
from engine.errors import InputError
from engine.jobs import runner
from engine.systems import SYSTEMS

DEFAULT = ("aurora", "rcs", "sjf", "linear")

widgets.header("Optimise", "What should I do? Pick systems, run them, and compare what they found with a proven bound.")
problem = widgets.needed_problem()

st.subheader("Goal: inference latency of one model", anchor=False)
wanted = []
for first in range(0, len(SYSTEMS), 2):
    for place, system in zip(st.columns(2), list(SYSTEMS.values())[first : first + 2], strict=False):
        with place:
            kind = "baseline" if system.baseline else system.paper
            if st.checkbox(
                f"**{system.title}** · {kind}", system.name in DEFAULT, key=f"use-{system.name}", help=system.summary
            ):
                wanted.append(system)

options: dict[str, dict] = {}
with st.expander("Options", icon=":material/settings:"):
    for system in wanted:
        if not system.options:
            continue
        st.markdown(f"**{system.title}**")
        with st.container(horizontal=True):
            options[system.name] = {option.name: widgets.option_input(system.name, option) for option in system.options}
st.caption(f"Costs: {problem.cost.source}. Simulated is the MoE part of every layer; attention and dense layers are the "
           "same for every plan.")  # fmt: skip

if st.button("Run", type="primary", icon=":material/play_arrow:", disabled=not wanted):
    arguments = {
        "workload": state.workload_digest(),
        "cluster": problem.cluster.model_dump(mode="json", exclude_none=True),
        "model": problem.model.model_dump(mode="json", exclude_none=True),
        "systems": [{"name": system.name, "options": options.get(system.name, {})} for system in wanted],
    }
    try:
        state.add_plan_job(runner.start("optimise", arguments, store.data_folder()).id)
    except InputError as error:
        st.error(plain(str(error)), icon=":material/error:")


@st.fragment(run_every=1)
def watch() -> None:
    """The newest jobs; once one has ended the whole page is drawn again, with its plans."""
    for job in cached.jobs(state.plan_jobs())[:3]:
        widgets.job_row(job)
        if state.newly_finished(job.id, job.state.finished):
            found = widgets.plans_of(job)
            if found and state.plan_id() not in cached.candidates():
                state.open_plan(min(found, key=lambda one: one.claim.objective).id)
            st.rerun()


watch()
widgets.other_jobs("optimise", state.plan_jobs(), state.add_plan_job)

rows = []
for id, candidate in cached.candidates().items():
    try:
        problem.check_plan(candidate.plan)
    except InputError:
        continue  # made for another cluster or model: still in the strip, but not comparable here
    figures = cached.metrics(candidate.plan, problem)
    claim = candidate.plan.claim
    # A plan made from other inputs has only the bound of its own placement here.
    own = figures.bound is not None
    rows.append({
        "id": id, "open": id == state.plan_id(), "Plan": candidate.plan.name, "Time": figures.total,
        "Gap": figures.gap if own else figures.order_gap, "Bound": figures.bound if own else figures.order_bound,
        "Scope": claim.scope if own else "order", "Balancedness": figures.balancedness,
        "Kept local": figures.kept_local, "Utilisation": figures.utilisation, "Experts": figures.memory,
        "Found in": candidate.runtime, "Status": candidate.status, "Order": candidate.plan.send_order.mode,
        "notes": candidate.notes,
    })  # fmt: skip
if not rows:
    if any(not job.state.finished for job in cached.jobs(state.plan_jobs())):
        st.stop()  # the row above says how far the job is
    st.info(
        "No plan for these inputs yet: press Run. Aurora takes a few seconds on the sample.", icon=":material/info:"
    )
    st.stop()

table = pd.DataFrame(rows).sort_values("Time", ignore_index=True)
st.subheader("Candidate plans", anchor=False)
said = "Simulated on the open workload, fastest first. Select a row to open its plan."
if len(table) > 1 and table["Time"][0] > 0:
    factor = units.ratio(table["Time"].max() / table["Time"][0])
    said = f"{plain(table['Plan'][0])} is {factor} as fast as {plain(table['Plan'].iloc[-1])}. {said}"
st.caption(said)
widgets.candidates(table)
chosen = table[table["id"] == state.plan_id()]
if len(chosen):
    widgets.plan_notes(chosen.iloc[0])
st.page_link("../pages/timeline.py", label="See why on the timeline", icon=":material/view_timeline:")
