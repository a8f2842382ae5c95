"""The plans of the session and what jobs have kept.

What is deployed now: what every plan is held against.
"""

import math
from contextlib import suppress
from dataclasses import dataclass, replace

import streamlit as st

from app import state
from engine import store
from engine.cluster import Cluster
from engine.costs import choice as cost_choice
from engine.errors import InputError
from engine.jobs import runner
from engine.jobs.protocol import RESULT
from engine.model import MoEModel
from engine.plan import Plan
from engine.problem import Problem
from engine.provenance import input_digests
from engine.result import Status
from engine.store import team
from engine.store.database import LostError, database
from engine.systems import baseline_for, usual_plan
from engine.systems.plan_names import names_of
from engine.training import TrainingStep

ROLES = {"workload": "recording", "cluster": "cluster", "model": "model"}
"""Inputs of a plan that have names, and the nouns for them."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan of the session and its origin."""

    plan: Plan
    status: str
    runtime: float
    notes: dict[str, dict]


@dataclass(frozen=True, eq=False)
class Answer:
    """Results so far of a job that plans. refused: systems that cannot plan for this, by title, with the reason."""

    candidates: list[Candidate]
    refused: dict[str, str]


def candidates() -> dict[str, Candidate]:
    """Every plan that the session's jobs have found so far, by id, newest job first; then the opened ones of a front, of sweeps
    and of the team, and those that came in files. Removed plans are left out, and names tell the rest apart."""
    by_id: dict[str, Candidate] = {}
    front, removed, described = state.session.study_jobs.get("front"), state.session.removed_plans, {}
    for job in jobs([*state.session.plan_jobs, *([front] if front else [])]):
        with suppress(InputError):  # a damaged result; the panel of the job says so
            for candidate in answer_of(job).candidates:
                id = candidate.plan.id
                if id in removed and job.id <= removed[id].job:
                    continue
                # A plan that several jobs found has the claim of the one that proved most: it is for the same inputs.
                if id not in by_id or _bound_of(candidate) > _bound_of(by_id[id]):
                    by_id[id] = candidate
            described |= _inputs_of(job.id, job)
    for id, candidate in _further().items():
        if id not in removed:
            by_id.setdefault(id, candidate)
    plans = {id: candidate.plan for id, candidate in by_id.items()}
    inputs = described | state.session.workloads
    inputs.pop(state.session.workload, None)  # a plan is for the open recording unless its name says otherwise
    names = names_of(plans, state.session.plan_names, inputs)
    return {
        id: candidate if candidate.plan.name == names[id] else _named(id, names[id], candidate.runtime, candidate)
        for id, candidate in by_id.items()
    }


def _bound_of(candidate: Candidate) -> float:
    """Seconds, as its optimiser claims them."""
    claim = candidate.plan.claim
    return -math.inf if claim is None else claim.bound


def made_for(plan: Plan, problem: Problem) -> dict[str, str]:
    """Names of the recording, cluster and model that a plan was made for, by role, where they are not the open ones."""
    open_now, inputs = input_digests(problem), plan.provenance.inputs
    others = {role: inputs[role] for role in ROLES if inputs.get(role) not in (None, open_now.get(role))}
    described: dict[str, str] = {}
    for job in jobs(state.session.plan_jobs) if others else []:
        described |= _inputs_of(job.id, job)
    described |= state.session.workloads
    return {role: described.get(digest, f"another {ROLES[role]}") for role, digest in others.items()}


def _further() -> dict[str, Candidate]:
    """Plans that no job of the session was asked for."""
    by_id: dict[str, Candidate] = {}
    for id, name in state.session.taken.items():
        for job in jobs([name]):
            with suppress(InputError):
                by_id.setdefault(id, _taken(id, job))
    for id, number in state.session.saved.items():
        try:
            by_id.setdefault(id, _saved(database().address, id, number))
        except LostError:  # each further question would wait as long for an answer
            break
        except InputError:  # it is another database now
            continue
    for id, digest in state.session.imported.items():
        try:
            by_id.setdefault(id, _imported(digest))
        except InputError:  # the data folder has lost it
            continue
    return by_id


@st.cache_resource(max_entries=512, show_spinner=False)
def _named(id: str, name: str, runtime: float, _candidate: Candidate) -> Candidate:
    plan = _candidate.plan.model_copy(update={"name": name})
    vars(plan)["id"] = id  # the name is no part of it, and it takes long to compute
    return replace(_candidate, plan=plan)


@st.cache_resource(max_entries=256, show_spinner=False)
def _inputs_of(id: str, _job: runner.Job) -> dict[str, str]:
    """Names of the inputs that a job planned for, by digest."""
    arguments = _job.request.arguments
    words = {}
    with suppress(InputError, LookupError, TypeError):
        for document in (
            Cluster.from_dict(arguments["cluster"], "cluster"),
            MoEModel.from_dict(arguments["model"], "model"),
        ):
            words[document.digest] = document.name
        if "step" in arguments:
            step = TrainingStep.from_dict(arguments["step"], "training step")
            words[step.digest] = f"{step.batch:,} × {step.sequence_length:,} tokens"
        words[cost_choice.from_dict(arguments["cost"]).digest] = cost_choice.short(arguments["cost"])
    return words


@st.cache_resource(max_entries=64, show_spinner="Reading a plan")
def _imported(digest: str) -> Candidate:
    return Candidate(store.load_document(Plan, digest), Status.FEASIBLE.value, math.nan, {})


@st.cache_resource(max_entries=256, show_spinner="Reading a saved plan")
def _saved(address: str, id: str, number: int | None) -> Candidate:
    """A plan of the team, of which only the name can change. number: of the save; None: it is in no workspace."""
    plan, figures = team.load_plan(database(), id), {}
    if number is not None:
        saved = team.find_saved(database(), number)
        if saved.plan != id:
            raise InputError("another database has another plan under this number")
        plan, figures = plan.model_copy(update={"name": saved.name}), saved.figures
    status = plan.claim.status.value if plan.claim else Status.FEASIBLE.value
    return Candidate(plan, status, figures.get("runtime") or math.nan, figures.get("notes") or {})


def forget_saved_plans() -> None:
    """Read the names of the team's plans again, after one was renamed."""
    _saved.clear()


@st.cache_resource(max_entries=64, show_spinner=False)
def _taken(id: str, _job: runner.Job) -> Candidate:
    """One plan of a sweep; once found it stays in its job's result. Raises InputError if that is damaged."""
    try:
        candidates = (_job.result or {}).get("candidates", [])
        return _candidate(next(candidate for candidate in candidates if candidate["point"]["plan_id"] == id))
    except (StopIteration, LookupError, TypeError, AttributeError):
        raise InputError(f"{_job.folder / RESULT} is damaged (it has no plan {id[:8]})") from None


def answer_of(job: runner.Job) -> Answer:
    """Results so far of a job that plans. Raises InputError if they are damaged."""
    return _answer(job.id, written, job) if (written := job.result_written) else Answer([], {})


@st.cache_resource(max_entries=64, show_spinner="Reading plans")
def _answer(id: str, written: int, _job: runner.Job) -> Answer:
    try:
        result = _job.result or {}
        return Answer([_candidate(candidate) for candidate in result["candidates"]], dict(result.get("refused", {})))
    except InputError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError):
        raise InputError(f"{_job.folder / RESULT} is damaged (its plans cannot be read); run the job again") from None


def result_of(job: runner.Job) -> dict | None:
    """Result of a job so far; None while it has none. Raises InputError if it is damaged. Do not change it: other runs and
    sessions share it."""
    return _result(job.id, written, job) if (written := job.result_written) else None


@st.cache_resource(max_entries=16, show_spinner="Reading results")
def _result(id: str, written: int, _job: runner.Job) -> dict:
    return _job.result


def _candidate(data: dict) -> Candidate:
    return Candidate(Plan.from_dict(data["plan"], "plan"), data["status"], data["runtime"], data["notes"])


@st.cache_resource(show_spinner=False)
def resume_jobs() -> None:
    """Once a server: start the jobs again that waited when the machine went down."""
    runner.resume(store.data_folder())


def jobs(ids: list[str]) -> list[runner.Job]:
    """The jobs of these ids that still exist."""
    existing = []
    for id in ids:
        try:
            existing.append(runner.find(id, store.data_folder()))
        except InputError:
            continue
    return existing


def open_plan() -> Plan | None:
    """The open plan; None when none is open or its job is gone."""
    candidate = candidates().get(state.session.plan or "")
    return candidate.plan if candidate else None


@dataclass(frozen=True, eq=False)
class Deployed:
    """chosen: a person said that it is; else it is what `baseline_for` says. is_candidate: it is among the plans of the
    session, under its id."""

    plan: Plan
    chosen: bool
    is_candidate: bool


def deployed(problem: Problem) -> Deployed:
    """What counts as deployed for a problem; its tokens travel as the problem's do, because how an engine sends is no part of
    what a plan could win. Raises InputError where nothing was chosen and experts do not fit the GPUs."""
    known = candidates()
    chosen = known.get(state.session.in_use or "") if problem.in_use is not None else None
    if chosen is not None:
        if chosen.plan.travel == problem.travel:
            return Deployed(chosen.plan, True, True)
        return Deployed(chosen.plan.model_copy(update={"travel": problem.travel}), True, False)
    usual = _usual(tuple(input_digests(problem).items()), problem)
    if usual.id in known:
        return Deployed(known[usual.id].plan, False, True)
    # The same plan, made when another recording was open.
    alike = (candidate.plan for candidate in known.values() if _is_alike(candidate.plan, usual))
    plan = next(alike, None)
    return Deployed(plan or usual, False, plan is not None)


@st.cache_resource(max_entries=64, show_spinner=False)
def _usual(key: tuple, _problem: Problem) -> Plan:
    return usual_plan(baseline_for(_problem), _problem)[0]


def _is_alike(plan: Plan, usual: Plan) -> bool:
    mine, wanted = plan.provenance, usual.provenance
    if (mine.optimiser, mine.options) != (wanted.optimiser, wanted.options) or plan.travel != usual.travel:
        return False
    return (plan.placement, plan.placement_b) == (usual.placement, usual.placement_b)
