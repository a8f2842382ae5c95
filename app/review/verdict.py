"""Worth it? One word on a plan, from its gain on recordings that it was not made from."""

from contextlib import suppress
from functools import partial
from typing import Any

import streamlit as st

from app import cached, failing, kept, state, studies, tables, widgets
from app.charts import review as charts
from app.review import place, thresholds
from app.review.brief import Brief
from app.tables import plain
from app.visitor import people
from engine import store, units
from engine.compare.evidence import Thresholds
from engine.compare.verdict import Judgement, Verdict
from engine.compare.wording import WORDS, break_even
from engine.errors import InputError
from engine.goal import Goal
from engine.jobs import judgements, runner
from engine.jobs.judgements import VerdictAnswer
from engine.plan import Plan
from engine.problem import Problem
from engine.store import team
from engine.store.database import database
from engine.units import signed

ICONS = {
    "do-it": ":green[:material/check_circle:]",
    "try-it": ":blue[:material/science:]",
    "not-now": ":orange[:material/do_not_disturb_on:]",
    "cannot-say": ":gray[:material/help:]",
}
EMPTY = (
    "Not judged yet. The plan's system is run again on the earlier half of its recordings and judged on the later one, where "
    "they have an order in time, and the plan itself on other open recordings of this model."
)


def show(brief: Brief, serving: cached.Serving | None) -> None:
    """The last verdict, and the choices for another. serving: the step that is the plan's goal; None: a pass"""
    place.mark("verdict")
    st.subheader("Worth it?", anchor=False)
    if brief.problem.goal is not Goal.INFERENCE:
        st.caption("Only inference plans for a single model can be judged.")
        return
    plan, problem = brief.own.plan, brief.problem
    wanted = _chosen(plan, problem, serving)
    kind = cached.kind_of_verdict(plan)
    _adopt(kind, plan)
    with st.container(horizontal=True, vertical_alignment="center"):
        runs, key = studies.is_running(kind), f"judge-{plan.id[:16]}"
        if st.button("Judge this plan", icon=":material/gavel:", disabled=runs, key=key):
            _start(kind, brief, wanted)
        thresholds.popover(partial(_decide_again, kind))
    source = problem.source_of_times(plan.travel)
    studies.watch(kind, lambda answer: _answer(answer, kind, wanted, source), EMPTY)


def last(plan: Plan) -> tuple[Verdict, float] | None:
    """The verdict on a plan that this page shows, and its time in seconds since the epoch; None if there is none yet."""
    _adopt(cached.kind_of_verdict(plan), plan)
    job = studies.newest(cached.kind_of_verdict(plan))
    judgement = None
    with suppress(InputError):  # a damaged one; the panel that shows it says so
        judgement = None if job is None else _judgement(cached.result_of(job))
    return None if judgement is None else (judgement.verdict, job.started)


def _judgement(answer: VerdictAnswer | None) -> Judgement | None:
    """The judgement; None for a job without one yet, and for older versions, which kept no evidence."""
    return None if answer is None else answer.judgement


def _chosen(plan: Plan, problem: Problem, serving: cached.Serving | None) -> dict[str, Any]:
    """The arguments of a verdict: recordings and thresholds as a person chooses, and the step that is the goal."""
    own = [problem.workload, *problem.others]
    made_from = {recording.digest for recording in (problem.workload, *problem.others)}
    others = {digest: name for digest, name in widgets.fitting_recordings(problem).items() if digest not in made_from}
    held_out = []
    if others:
        held_out = kept.multiselect(
            "Held-out recordings",
            list(others),
            list(others),
            format_func=others.get,
            key="held-out",
            placeholder="Only the later half of its own",
            help="Recordings of the same model that the plan was not made from. Every one takes a few seconds.",
        )
    digests = [*(recording.digest for recording in own), *held_out]
    step = {} if serving is None else {"serving": serving.arguments}
    return {"recordings": digests, "thresholds": state.session.thresholds.model_dump(mode="json"), **step}


def _adopt(kind: str, plan: Plan) -> None:
    """Show a verdict that somebody asked for here before to everybody, and again when the next one was stopped."""
    job = studies.newest(kind)
    if job is not None and job.state is not runner.State.CANCELLED:
        return
    for job in runner.jobs(store.data_folder(), "verdict"):
        if job.request.arguments.get("plan_id") == plan.id and job.result_written:
            state.set_study_job(kind, job.id)
            return


def _start(kind: str, brief: Brief, wanted: dict[str, Any]) -> None:
    plan, deployed = (part.plan.model_dump(mode="json", exclude_none=True) for part in (brief.own, brief.baseline))
    more = {"plan": plan, "plan_id": brief.own.plan.id, "deployed": deployed} | wanted
    with failing.saying():
        state.set_study_job(kind, widgets.start_job_on(brief.problem, "verdict", more).id)
        st.rerun()


def _decide_again(kind: str, chosen: Thresholds) -> None:
    """The verdict by other thresholds, from the stored evidence, for everybody. Raises InputError for visitors who may not
    plan."""
    job = studies.newest(kind)
    if job is None or not job.state.finished or (judgement := _judgement(cached.result_of(job))) is None:
        return
    people.allow("plan")
    before = judgement.thresholds
    judgements.decide_again(job, chosen)
    if before != chosen:
        plan, (old, new) = job.request.arguments["plan_id"], (kept.model_dump(mode="json") for kept in (before, chosen))
        team.note_thresholds(database(), plan, old, new, people.who().name or "somebody")


def _answer(answer: VerdictAnswer, kind: str, wanted: dict[str, Any], source: str) -> None:
    """Show a verdict. source: of the times, in words."""
    if (job := studies.newest(kind)) is None:
        return
    if (judgement := _judgement(answer)) is None:
        st.info("This verdict is of an older version: judge the plan again.", icon=":material/history:")
        return
    verdict = judgement.verdict
    st.title(f"{ICONS[verdict.verdict]} {WORDS[verdict.verdict].capitalize()}", anchor=False)
    first, *more = verdict.reasons
    st.markdown(f"**{plain(first)}**")
    _say_what_differs(job, judgement.thresholds, kind, wanted)
    _figures(verdict)
    with kept.expander("Reasons, and what the verdict depends on", key="review-criteria"):
        st.markdown("\n".join(f"- {plain(reason)}" for reason in more))
        widgets.caption_with_costs("Simulated; no run was measured.", source)
        _evidence(verdict, kind)


def _evidence(verdict: Verdict, kind: str) -> None:
    """The gain on each part, the criteria with their thresholds, and the plan next to others."""
    if verdict.parts:
        widgets.chart(charts.gains(verdict), f"{kind}-gains")
    tables.show(thresholds.as_text(verdict.criteria), hide_index=True, alt="What the verdict depends on")
    rows = {
        "Compared with": [row.name for row in verdict.beside],
        "Gain held out": ["unknown" if row.gain is None else signed(row.gain) for row in verdict.beside],
        "Memory of replicas": [units.size(row.replica_bytes) for row in verdict.beside],
    }
    tables.show(rows, hide_index=True, alt="The plan beside no plan and a plan without replicas")


def _say_what_differs(job: runner.Job, decided_by: Thresholds, kind: str, wanted: dict[str, Any]) -> None:
    """Name the differences between the verdict and the choices of this session: other evidence takes a job, other thresholds do
    not."""
    judged_on = {name: job.request.arguments.get(name) for name in ("recordings", "serving")}
    if judged_on != {"serving": None} | {name: value for name, value in wanted.items() if name in judged_on}:
        st.info(
            f"Judged {widgets.describe_time(job.started)} with other recordings or another step than are chosen now. Judge it "
            "again.",
            icon=":material/history:",
        )
    if decided_by == state.session.thresholds:
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        others = thresholds.differences(decided_by, state.session.thresholds)
        st.markdown(f":material/tune: Decided with other thresholds than this session's: {others}.")
        if st.button("Apply this session's", key=f"decide-{kind}"):
            with failing.saying():
                _decide_again(kind, state.session.thresholds)
                st.rerun()


def _figures(verdict: Verdict) -> None:
    with st.container(horizontal=True, gap="medium"):
        if verdict.gain_held_out is not None:
            st.metric(
                "Gain held out",
                signed(verdict.gain_held_out),
                help=f"{thresholds.spread(verdict)}, over {plain(verdict.deployed)}; without errors of the simulated times",
            )
        if verdict.parts:
            paid = verdict.break_even_steps is not None
            help = "until the time of moving experts is won back, at the plan's own pace"
            after = break_even(verdict.break_even_steps, verdict.unit) if paid else "never"
            st.metric("Pays back after", after, help=help)
        if verdict.memory_bytes:
            st.metric("Memory of replicas", units.size(verdict.memory_bytes), help="on all GPUs")
        kept = verdict.persistence
        help = "part of what a plan made for the held-out recordings would gain there that this plan keeps"
        st.metric("Persistence", "unknown" if kept is None else units.share(kept), help=help)
