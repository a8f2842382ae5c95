"""The Optimise page: which plan should I take?"""

import streamlit as st

from app import cached, failing, header, kept, state, widgets
from app.optimise import deployed, front, goal, lina, serving_page, spare, step, table
from app.tables import plain, sentence
from engine import units
from engine.jobs import runner
from engine.systems import systems_for

VIEWS = ("Candidate plans", "Balance against affinity", "Cross-workload score", "Spare slots", "Lina at run time")
SHORT = {"Lina at run time": "Lina"}
"""Short names on a button, so that all of them take two rows of a narrow page."""
FORM = 248
"""Pixels of the form at the left of the results."""
OF_SERVING = ("Candidate plans", "Spare slots")

actions = header.show("Optimise", "What should I do? Compare plans with a proven bound.")
if state.session.cluster is None or state.session.model is None:
    widgets.needed_problem()
with st.container(horizontal=True, wrap=False, gap="medium"):
    form, results = st.container(width=FORM), st.container()
with form:
    aim = goal.choose_goal()
problem = widgets.needed_problem()
if aim == goal.SERVE:
    serving = serving_page.needed_serving(problem)

wanted, options = [], {}
with form:
    st.subheader("Systems", anchor=False)
    for system in systems_for(problem).values():
        kind = "baseline" if system.baseline else system.paper
        takes = goal.likely_time(problem, system, f"{aim}-{system.name}")
        if kept.checkbox(
            f"**{system.title}**{takes} · {kind}",
            system.preselected or spare.is_advised(system.name),
            key=f"use-{aim}-{spare.key_of(system.name)}",
            help=sentence(system.summary),
        ):
            wanted.append(system)
    with st.expander("Options", icon=":material/settings:"):
        for system in wanted:
            names = system.options.model_fields
            if not names:
                continue
            st.markdown(f"**{system.title}**")
            options[system.name] = {}
            for name in names:
                key, default = spare.default_of(system.name, name)
                options[system.name][name] = kept.option_input(f"{aim}-{key}", system.options, name, default)
    if aim in (goal.ONE, goal.SERVE):
        goal.choose_context(problem)
    if aim == goal.STEP:
        step.summary(problem)
        st.caption(step.assumptions(problem))
    else:
        goal.travel_inputs(problem)
        if aim == goal.SERVE:
            serving_page.say_how_planned(problem)
        else:
            st.caption(
                f"Costs: {plain(problem.source_of_times(problem.travel))}. {goal.remark_on_orders(problem.network)}Only the "
                "MoE part of each layer is simulated; attention and dense layers are the same for every plan."
            )

with actions:
    pressed = st.button("Run", type="primary", icon=":material/play_arrow:", disabled=not wanted)
    if pressed or (state.visit.take("run") and wanted):
        asked = {"systems": deployed.planned_first(problem, wanted, options)}
        if aim in (goal.ONE, goal.STEP) and any(system.name == "best" for system in wanted):
            asked |= {"knobs": True, **deployed.asked(problem)}
        with failing.saying():
            if aim == goal.SERVE:
                asked |= serving_page.arguments(problem)
            state.add_plan_job(widgets.start_job_on(problem, "optimise", asked).id)


def watch() -> None:
    """The running jobs and the last ended one; once one has found a plan or ended the whole page is drawn again, with its
    plans."""
    jobs = cached.jobs(state.session.plan_jobs)
    ended = [job for job in jobs if job.state.finished]
    for job in [*(job for job in jobs if not job.state.finished), *ended[:1]]:
        if job.state is runner.State.DONE:  # its plans tell the rest
            st.caption(f"done · {units.seconds(job.elapsed)} · {widgets.describe_time(job.started)}")
        else:
            widgets.job_row(job)
        with failing.saying():
            for title, reason in cached.answer_of(job).refused.items():
                st.warning(f"**{plain(title)}** cannot plan for this: {plain(reason)}", icon=":material/warning:")
    found_more = [job for job in jobs if state.visit.newly_written(job.id, job.result_written)]
    if found_more:
        st.rerun()
    for job in jobs:
        if state.visit.newly_finished(job.id, job.state.finished):
            with failing.saying():
                plans = [candidate.plan for candidate in cached.answer_of(job).candidates]
                if plans and widgets.why_not(cached.open_plan(), problem):
                    best = serving_page.fastest(plans, problem, serving) if aim == goal.SERVE else None
                    state.update(plan=best or min(plans, key=lambda plan: plan.claim.objective).id)
            st.rerun()


with results:
    running = any(not job.state.finished for job in cached.jobs(state.session.plan_jobs))
    failing.fragment(run_every=1 if running else None)(watch)()
    widgets.other_jobs("optimise", state.session.plan_jobs, state.add_plan_job)
    view = "Candidate plans"
    if aim in (goal.ONE, goal.SERVE):
        view = (
            kept.segments(
                "Show",
                VIEWS if aim == goal.ONE else OF_SERVING,
                default=view,
                format_func=lambda view: SHORT.get(view, view),
                key="optimise-view",
                label_visibility="collapsed",
            )
            or view
        )
    if view == "Balance against affinity":
        front.show(problem)
    elif view == "Cross-workload score":
        front.show_matrix(problem, options)
    elif view == "Spare slots":
        spare.panel(problem)
    elif view == "Lina at run time":
        lina.panel(problem)
    elif aim == goal.SERVE:
        serving_page.results(problem, serving)
    else:
        table.show_candidates(problem, aim)
        if aim == goal.ONE:
            deployed.show(problem)
