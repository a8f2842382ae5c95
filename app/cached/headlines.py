"""The headline of a plan for the goal that is open, from the one home in `engine.compare.standing`: its figures in a
pass or a step, and its gain on everything that is held out."""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import streamlit as st

from app import state
from app.cached.figures import key_of, metrics, migration
from app.cached.inputs import recording
from app.cached.plans import baseline, jobs, result_of
from app.cached.steps import Serving, open_serving, served
from engine import store
from engine.compare.baseline import travelling_like
from engine.compare.evidence import Evidence
from engine.compare.figures import Metrics
from engine.compare.held_out import of_phase, other_phase, phase_of, split_by_origin, step_digest
from engine.compare.judge import Judge
from engine.compare.standing import Risk, Standing, gain_held_out, standing_of
from engine.compare.what_if import SECONDS_PER_SEND, is_quick, least
from engine.errors import InputError
from engine.goal import Goal
from engine.jobs import runner
from engine.jobs.judgements import VerdictAnswer
from engine.plan import Plan
from engine.problem import Problem
from engine.provenance import metrics_digests
from engine.serving.figures import ServingFigures
from engine.store.problems import problem_arguments
from engine.workload import Workload

SOON = 2.0
"""Seconds of simulation, as estimated, up to which other recordings are scored unasked."""
LOOK = 5
"""Seconds between two looks for the verdicts of other sessions."""


def figures_for(plan: Plan, problem: Problem, serving: Serving | None) -> Metrics | ServingFigures:
    """The figures of a plan in the step, else in the pass or training step. Raises InputError if it cannot be simulated."""
    return metrics(plan, problem) if serving is None else served(plan, problem, serving).figures


def seconds_for(plan: Plan, problem: Problem, serving: Serving | None) -> float:
    """Seconds of the same."""
    figures = figures_for(plan, problem, serving)
    return figures.seconds if isinstance(figures, ServingFigures) else figures.total


def open_standing(plan: Plan, problem: Problem) -> Standing:
    """The headline for what is open. Raises InputError if the plan or its baseline cannot be simulated on the problem."""
    problem = travelling_like(plan, problem)
    return standing(plan, problem, open_serving(problem), baseline(problem).plan)


def standing(plan: Plan, problem: Problem, serving: Serving | None, now: Plan) -> Standing:
    """The headline of a plan against the deployed one.

    serving: the step that is the goal; None: the pass or training step

    Raises InputError as `open_standing`.
    """
    own, base = (figures_for(each, problem, serving) for each in (plan, now))
    move = migration(plan, now, problem, tuple(seconds_for(each, problem, serving) for each in (now, plan)))
    return standing_of(plan, own, now, base, problem, move, *held_out(plan, now, problem, serving))


def is_soon(plan: Plan, problem: Problem) -> bool:
    """True if a plan's headline is known, or simulated in a few seconds."""
    problem = travelling_like(plan, problem)
    if is_quick(problem):
        return True
    if open_serving(problem) is not None:
        return False
    return all(store.has_figures(Metrics, *metrics_digests(known, problem)) for known in (plan, baseline(problem).plan))


def gains_held_out(plans: Sequence[Plan], now: Plan, problem: Problem, serving: Serving | None) -> list[float]:
    """The gains of plans on all that is held out for each; nan where nothing is, and where scoring all plans takes long."""
    scored = (held_out(plan, now, problem, serving, SOON / len(plans))[0] for plan in plans)
    return [gain_held_out(risks) if risks else math.nan for risks in scored]


def held_out(
    plan: Plan, now: Plan, problem: Problem, serving: Serving | None, soon: float = SOON
) -> tuple[tuple[Risk, ...] | None, str]:
    """All that is held out for a plan, and the phase of it if that is not the step's: as it was judged last; if it was not yet,
    the recordings of this session that it was not made from, None if scoring these takes longer than `soon` seconds."""
    if plan.id == now.id:
        return (), ""
    evidence = evidence_of(plan, now, problem, serving)
    if evidence is not None and evidence.parts:
        return evidence.risks, evidence.other_phase
    others = unseen(plan, problem, serving)
    sends = problem.workload.layers * len(problem.cluster.gpus) ** 2
    if 2 * len(others) * sends * SECONDS_PER_SEND.get(problem.goal, 0.0) > soon:
        return None, ""
    risks = {other.digest: _risk(other, plan, now, problem, serving) for other in others}
    scored = [other for other in others if risks[other.digest] is not None]
    phases = (phase_of(other) for other in scored)
    return tuple(risks[other.digest] for other in scored), other_phase(phases, serving and serving.step.phase)


def unseen(plan: Plan, problem: Problem, serving: Serving | None) -> list[Workload]:
    """The session's recordings that a plan was not made from and can be scored on, of the step's phase if there are any."""
    if problem.goal is Goal.TWO_MODELS or (problem.goal is Goal.TRAINING and problem.step.routing == "balanced"):
        return []
    fitting = [recording(digest) for digest in state.session.workloads if store.has_workload(digest)]
    fitting = [other for other in fitting if _size(other) == _size(problem.workload)]
    if problem.goal is Goal.TRAINING:
        return [other for other in fitting if other.digest != problem.workload.digest]
    judge = Judge(problem, serving and serving.timed)
    return of_phase(split_by_origin(plan, fitting, judge, _digest_at_step)[1], judge.phase, lambda other: other)


def _digest_at_step(recording: Workload, judge: Judge) -> str:
    key = (recording.digest, judge.serving.step.digest, judge.problem.model.digest, str(len(judge.problem.cluster.gpus)))
    return _kept_digest(key, recording, judge)


@st.cache_resource(max_entries=512, show_spinner=False)
def _kept_digest(key: tuple[str, ...], _recording: Workload, _judge: Judge) -> str:
    return step_digest(_recording, _judge)


def _size(workload: Workload) -> tuple[int, int | None]:
    """Layers and experts, the latter None of a traffic matrix."""
    return workload.layers, getattr(workload, "num_experts", None)


def _risk(other: Workload, plan: Plan, now: Plan, problem: Problem, serving: Serving | None) -> Risk | None:
    """None if the recording is of another model."""
    step = () if serving is None else (serving.step.digest, serving.beside.sizes.digest, serving.source.source)
    seconds = _seconds_on(other.digest, (plan.id, now.id, *step), key_of(problem), (plan, now), problem, other, serving)
    return None if seconds is None else Risk(other.name, *seconds)


@st.cache_resource(max_entries=512, show_spinner="Simulating the plan on another recording")
def _seconds_on(
    digest: str,
    ids: tuple[str, ...],
    key: tuple[str, ...],
    _plans: tuple[Plan, ...],
    _problem: Problem,
    _other: Workload,
    _serving: Serving | None,
) -> tuple[float, ...] | None:
    """Seconds of plans on a recording as a verdict times them (`Judge.seconds`); None if it is of another model."""
    try:
        there = _problem.with_workload(_other)
        if _serving is None and not is_quick(there):
            return tuple(least(plan, there).total for plan in _plans)
        return tuple(seconds_for(plan, there, _serving) for plan in _plans)
    except InputError:
        return None


def evidence_of(plan: Plan, now: Plan, problem: Problem, serving: Serving | None) -> Evidence | None:
    """The evidence by which a plan was judged last against the same plan, in the same step, on the same cluster, by the same
    costs; None if it was not."""
    if problem.goal is not Goal.INFERENCE:
        return None
    own = state.session.study_jobs.get(kind_of_verdict(plan))
    ids = [*([own] if own else []), *_verdicts(str(store.data_folder())).get(plan.id, ())]
    wanted = problem_arguments(problem) | {"serving": None if serving is None else serving.arguments}
    for job in jobs(list(dict.fromkeys(ids))):
        with suppress(InputError):  # a damaged one; the panel that shows it says so
            if job.result_written and _is_about(job.request.arguments, wanted, now):
                answer = result_of(job)
                if isinstance(answer, VerdictAnswer) and answer.evidence is not None:
                    return answer.evidence
    return None


def kind_of_verdict(plan: Plan) -> str:
    """The session's name for the job that judges a plan."""
    return f"verdict-{plan.id[:16]}"


@st.cache_resource(ttl=LOOK, show_spinner=False)
def _verdicts(folder: str) -> dict[str, list[str]]:
    """Ids of the jobs that judged, newest first, by plan."""
    found: dict[str, list[str]] = {}
    for job in runner.jobs(store.data_folder(), "verdict"):
        found.setdefault(job.request.arguments.get("plan_id", ""), []).append(job.id)
    return found


def _is_about(asked: dict[str, Any], wanted: dict[str, Any], now: Plan) -> bool:
    roles = ("cluster", "model", "cost", "travel", "serving")
    if any(asked.get(role) != wanted.get(role) for role in roles):
        return False
    deployed = asked.get("deployed") or {}
    return deployed.get("placement") == now.placement.model_dump(mode="json", exclude_none=True)
