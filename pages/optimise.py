"""The Optimise page: which plan should I take?"""

import streamlit as st

from app import cached, failing, header, kept, state, widgets
from app.optimise import answer, deployed, front, goal, lina, serving_page, spare, step, table
from app.review import verdict
from app.tables import plain, sentence
from engine import units
from engine.jobs import runner
from engine.systems import systems_for

VIEWS = ("Candidate plans", "Balance against affinity", "Cross-workload score", "Spare slots", "Lina at run time")
SHORT = {"Lina at run time": "Lina"}
"""Short names on a button, so that all of them take two rows of a narrow page."""
OF_SERVING = ("Candidate plans", "Spare slots")

header.show("Optimise", "What should I do? Compare plans with a proven bound.")
if state.session.cluster is None or state.session.model is None:
    widgets.needed_problem()
aim = goal.choose_goal()
problem = widgets.needed_problem()
if aim == goal.SERVE:
    serving = serving_page.needed_serving(problem)
if aim == goal.STEP:
    step.summary(problem)

wanted, options = [], {}
with st.container(horizontal=True, vertical_alignment="top", wrap=False, gap="small", key="choices-and-run"):
    choices = kept.expander("Systems, travel, number formats, deployed", key="optimise-choices", icon=":material/tune:")
    run = st.container(width="content")
with choices:
    left, middle, right = st.columns(3, gap="medium")
with left:
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
with middle:
    for system in wanted:
        if system.options.model_fields:
            st.markdown(f"**{system.title}**")
            options[system.name] = spare.option_inputs(aim, system, problem)
with right:
    if aim in (goal.ONE, goal.SERVE):
        goal.choose_context(problem)
    if aim == goal.STEP:
        widgets.caption_with_costs(step.assumptions(problem), problem.cost_source)
    else:
        goal.travel_inputs(problem)
        if aim == goal.SERVE:
            serving_page.say_how_planned(problem)
        else:
            widgets.caption_with_costs(
                f"{goal.remark_on_orders(problem.network)}Only the MoE part of each layer is simulated; attention and dense "
                "layers are the same for every plan.",
                problem.source_of_times(problem.travel),
            )
st.caption(goal.chosen_in_words(problem, wanted))

VIEW = "optimise-view"
SOON, SOON_FOR = 0.3, 10
"""Seconds between two looks at a job without an answer, and for how long it is looked at so often: the first plans of a small
problem take less than a second."""
with run:
    pressed = st.button("Plan it", type="primary", icon=":material/play_arrow:", disabled=not wanted)
    if pressed or (state.visit.take("run") and wanted):
        asked = {"systems": deployed.planned_first(problem, wanted, options)}
        if aim in (goal.ONE, goal.STEP) and any(system.name == "best" for system in wanted):
            asked |= {"knobs": True, **deployed.asked(problem)}
        with failing.saying():
            if aim == goal.SERVE:
                asked |= serving_page.arguments(problem)
            answer.wait_for(widgets.start_job_on(problem, "optimise", asked).id)
            state.forget_choices(VIEW)  # whichever study was looked at: the plans are the news


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
    ended_now = [job for job in jobs if state.visit.newly_finished(job.id, job.state.finished)]
    if answer.is_awaited(ended[0].id if ended else None):
        with failing.saying():
            answer.take(fastest(ended[0], of=1))
        st.rerun()
    if found_more and cached.open_plan() is None:
        with failing.saying():
            answer.take_first(fastest(found_more[0], of=2))
    if found_more or ended_now or (asks and running[0].elapsed >= SOON_FOR):  # the last: from now on less often
        st.rerun()


def fastest(job: runner.Job, of: int) -> str | None:
    """The id of a job's fastest plan so far, once it has so many: the first is what is deployed."""
    plans = [candidate.plan for candidate in cached.answer_of(job).candidates]
    if len(plans) < of:
        return None
    best = serving_page.fastest(plans, problem, serving) if aim == goal.SERVE else None
    return best or min(plans, key=lambda plan: plan.claim.objective).id


running = [job for job in cached.jobs(state.session.plan_jobs) if not job.state.finished]
asks = running and cached.open_plan() is None and running[0].elapsed < SOON_FOR
failing.fragment(run_every=SOON if asks else 1 if running else None)(watch)()
widgets.other_jobs("optimise", state.session.plan_jobs, answer.wait_for)
view = "Candidate plans"
if aim in (goal.ONE, goal.SERVE):
    view = (
        kept.segments(
            "Show",
            VIEWS if aim == goal.ONE else OF_SERVING,
            default=view,
            format_func=lambda view: SHORT.get(view, view),
            key=VIEW,
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
    serving_page.results(problem, serving, verdict.last)
else:
    table.show_candidates(problem, aim, verdict.last)
