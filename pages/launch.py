"""Do it."""

import shlex

import streamlit as st

from app import cached, guard, state, widgets
from app.charts import gantt as gantt_charts
from app.charts import launch as charts
from app.text import plain
from engine import store, units
from engine.errors import InputError
from engine.jobs import runner
from engine.jobs.runner import State
from engine.launch.prepare import prepare
from engine.timeline import Timeline

widgets.header(
    "Launch", "Do it: the plan's MoE layers as a torch.distributed job on this machine, measured beside predicted."
)
problem = widgets.needed_problem()
plan = cached.open_plan()
if plan is None:
    st.info("Open a plan first: choose one in the row above or make one.", icon=":material/info:")
    st.page_link("../pages/optimise.py", label="Make a plan", icon=":material/play_arrow:")
    st.stop()

devices = cached.attached()
st.markdown(f":material/memory: **Attached:** {plain(devices.summary)}")
with st.container(horizontal=True):
    ranks = st.number_input("Ranks", 1, plan.placement.gpus, devices.default_ranks(plan.placement.gpus), width=140,
                            help="with fewer ranks than GPUs, neighbouring GPUs of the plan share a rank")  # fmt: skip
    tokens = st.number_input("Tokens to replay", 1, None, None, width=180, placeholder="what takes seconds",
                             help="evenly spaced over the recording")  # fmt: skip
    repeats = st.number_input("Timed passes", 1, 100, 3, width=140)
try:
    prepared = prepare([plan], problem.workload, problem.model, devices, ranks, tokens, repeats)
except InputError as error:
    st.error(plain(str(error)), icon=":material/error:")
    st.stop()

left, right = st.columns(2, gap="large")
with left:
    st.subheader("Pre-flight", anchor=False)
    for check in prepared.checks:
        colour, icon = ("green", "check_circle") if check.passed else ("red", "cancel")
        st.markdown(f":{colour}[:material/{icon}:] **{check.name}**: {plain(check.text)}")
with right:
    st.subheader("Command", anchor=False)
    st.code(
        shlex.join(prepared.command(store.data_folder() / "jobs" / "JOB" / "run")), language="bash", wrap_lines=True
    )

running = [job for job in runner.jobs(store.data_folder(), "launch") if not job.state.finished]
refused = guard.why_not(st.context, st.user)
if refused:
    st.warning(refused, icon=":material/lock:")
elif running:
    st.caption("A launch is running on these devices; one runs at a time.")
if st.button("Start", type="primary", icon=":material/rocket_launch:",
             disabled=bool(refused or running) or not prepared.ready):  # fmt: skip
    arguments = {
        "workload": state.workload_digest(),
        "model": problem.model.model_dump(mode="json", exclude_none=True),
        "plans": [plan.model_dump(mode="json", exclude_none=True)],
        "ranks": ranks, "tokens": tokens, "repeats": repeats,
    }  # fmt: skip
    state.add_launch_job(runner.start("launch", arguments, store.data_folder()).id)


@st.fragment(run_every=1)
def watch() -> None:
    """The newest launch and the end of its log; once it has ended the page is drawn again, with its measurements."""
    for job in cached.jobs(state.launch_jobs())[:1]:
        widgets.job_row(job)
        if not job.state.finished and (log := job.log_tail(8)):
            st.code(log, language=None)
        if state.newly_finished(job.id, job.state.finished):
            st.rerun()


watch()
widgets.other_jobs("launch", state.launch_jobs(), state.add_launch_job)

done = [job for job in cached.jobs(state.launch_jobs()) if job.state is State.DONE]
if not done:
    st.stop()
job = st.selectbox("Past runs", done, format_func=widgets.describe_launch) if len(done) > 1 else done[0]
report = job.result
result = report["runs"][0]
predicted, measured = result["predicted_seconds"], result["measured_seconds"]
st.subheader(f"Measured {units.seconds(measured)}, predicted {units.seconds(predicted)}", anchor=False)
with st.container(horizontal=True, gap="large"):
    st.metric("Measured / predicted", units.ratio(measured / predicted))
    st.metric("Passes", f"{units.seconds(min(result['pass_seconds']))} – {units.seconds(max(result['pass_seconds']))}",
              help="fastest and slowest timed pass; shown is the median one")  # fmt: skip
    st.metric(
        "Waiting between steps", units.seconds(result["waiting_seconds"]), help="barriers; the prediction has none"
    )
    st.metric("Output differs by", f"{result['difference']:.1g}",
              help="largest difference from the unplanned single-process output, relative to its largest number")  # fmt: skip
    st.metric("Tokens", f"{report['tokens']:,}")
kinds = result["by_kind"]
widgets.chart(charts.by_kind(kinds["kind"], kinds["predicted"], kinds["measured"], (predicted, measured)), "by-kind")
pair = {"Predicted for this machine": Timeline.from_dict(result["predicted"]),
        "Measured": Timeline.from_dict(result["measured"])}  # fmt: skip
layers = int(pair["Measured"].events["layer"].max())
fits = gantt_charts.layers_that_fit(list(pair.values()))
first, last = st.slider("MoE layers", 0, layers, (0, min(layers, 1))) if layers else (0, 0)
widgets.chart(
    gantt_charts.gantt(pair, first, min(last, first + fits - 1), "Predicted (outlined) and measured (solid)"),
    "launch-gantt",
)
costs, device = plain(result["predicted"]["cost_source"]), plain(report["device"])
st.caption(f"The prediction uses {costs}. It is for {device}, not for the drawn cluster.")
