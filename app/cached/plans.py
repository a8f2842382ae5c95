"""The plans of the session, those that jobs have kept, and the one against which all are held."""

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

import streamlit as st

from app import state
from engine import store
from engine.cluster import Cluster
from engine.compare.baseline import baseline_of
from engine.compare.comparison import PlanRow
from engine.compare.waterfall import Waterfall
from engine.costs import choice as cost_choice
from engine.errors import InputError
from engine.jobs import kinds, runner
from engine.jobs.protocol import RESULT
from engine.jobs.scores import FrontAnswer
from engine.jobs.studies import ReplanAnswer, SweepAnswer
from engine.jobs.tasks import OptimiseAnswer, SizeAnswer
from engine.model import MoEModel
from engine.plan import Plan
from engine.problem import Problem
from engine.provenance import input_digests
from engine.result import Status
from engine.store import team
from engine.store.database import LostError, database
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
class Planned:
    """The plans of a job so far. refused: systems that cannot plan for this, by title, with the reason; waterfall: the knobs
    that it has turned so far, if it does."""

    candidates: list[Candidate]
    refused: dict[str, str]
    waterfall: Waterfall | None = None


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
        id: candidate if candidate.plan.name == names[id] else _named(names[id], candidate) for id, candidate in by_id.items()
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


@lru_cache(maxsize=512)  # every page asks for all of them many times, and Streamlit takes long to find one
def _named(name: str, candidate: Candidate) -> Candidate:
    plan = candidate.plan.model_copy(update={"name": name})
    vars(plan)["id"] = candidate.plan.id  # the name is no part of it, and it takes long to compute
    return replace(candidate, plan=plan)


@st.cache_resource(max_entries=256, show_spinner=False)
def _inputs_of(id: str, _job: runner.Job) -> dict[str, str]:
    """Names of the inputs that a job planned for, by digest."""
    arguments = _job.request.arguments
    words = {}
    with suppress(InputError, LookupError, TypeError):
        for document in (Cluster.from_dict(arguments["cluster"], "cluster"), MoEModel.from_dict(arguments["model"], "model")):
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
    """One plan of a sweep or a sizing; once found it stays in its job's result. Raises InputError if that is damaged."""
    answer = result_of(_job)
    for row in answer.candidates if isinstance(answer, SweepAnswer | ReplanAnswer | SizeAnswer) else ():
        if row.point.plan_id == id:
            return _candidate(row)
    raise InputError(f"{_job.folder / RESULT} is damaged (it has no plan {id[:8]})")


def answer_of(job: runner.Job) -> Planned:
    """The plans of a job so far. Raises InputError if its result is damaged, or of a kind that makes no plans."""
    return _planned(job.id, written, job) if (written := job.result_written) else Planned([], {})


@st.cache_resource(max_entries=64, show_spinner="Reading plans")
def _planned(id: str, written: int, _job: runner.Job) -> Planned:
    answer = result_of(_job)
    if not isinstance(answer, OptimiseAnswer | FrontAnswer | SweepAnswer | ReplanAnswer):
        raise InputError(f"{_job.folder / RESULT} is damaged (it has no plans); run the job again")
    rows = [_candidate(row) for row in answer.candidates]
    return Planned(rows, answer.refused, answer.waterfall) if isinstance(answer, OptimiseAnswer) else Planned(rows, {})


def result_of(job: runner.Job) -> kinds.Answer | None:
    """The answer of a job so far, by its kind; None while there is none. Raises InputError if it is damaged."""
    return _result(job.id, written, job) if (written := job.result_written) else None


@st.cache_resource(max_entries=16, show_spinner="Reading results")
def _result(id: str, written: int, _job: runner.Job) -> kinds.Answer | None:
    return kinds.read_answer(_job)


def _candidate(row: PlanRow) -> Candidate:
    return Candidate(row.plan, row.status, row.runtime, row.notes)


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
class Baseline:
    """The plan that every other is held against.

    chosen: True if a person said that it is deployed; else it is the usual one, see `engine.compare.baseline_of`
    is_candidate: True if it is among the plans of the session, under its id
    """

    plan: Plan
    chosen: bool
    is_candidate: bool


def baseline(problem: Problem) -> Baseline:
    """The baseline of a problem, by the name that the session knows it by. Raises InputError if nothing was chosen and experts
    do not fit the GPUs."""
    known = candidates()
    chosen = known.get(state.session.in_use or "")
    if chosen is not None and problem.in_use is not None:
        plan = baseline_of(problem, chosen.plan)
        return Baseline(plan, True, plan is chosen.plan)
    usual = _usual(tuple(input_digests(problem).items()), problem)
    if usual.id in known:
        return Baseline(known[usual.id].plan, False, True)
    # The same plan, made when another recording was open.
    alike = (candidate.plan for candidate in known.values() if _is_alike(candidate.plan, usual))
    plan = next(alike, None)
    return Baseline(plan or usual, False, plan is not None)


@st.cache_resource(max_entries=64, show_spinner=False)
def _usual(key: tuple, _problem: Problem) -> Plan:
    return baseline_of(_problem)


def _is_alike(plan: Plan, usual: Plan) -> bool:
    mine, wanted = plan.provenance, usual.provenance
    if (mine.optimiser, mine.options) != (wanted.optimiser, wanted.options) or plan.travel != usual.travel:
        return False
    return (plan.placement, plan.placement_b) == (usual.placement, usual.placement_b)
