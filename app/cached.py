"""Engine calls whose answers are kept between runs, keyed by content digests; the data itself is passed unhashed.

Nothing here changes the session or the data folder.
"""

import json
import math
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import streamlit as st

from app import simulations, state
from engine import store
from engine.costs import choice as cost_choice
from engine.errors import InputError
from engine.goal import Goal
from engine.jobs import runner
from engine.launch.places.devices import Devices
from engine.launch.places.devices import attached as engine_attached
from engine.launch.preparation.launch import Launch
from engine.launch.preparation.place_checks import testbed_fault as engine_testbed_fault
from engine.model import MoEModel
from engine.plan import Placement, Plan, SendOrder
from engine.problem import Problem, make_problem
from engine.result import Provenance, Status
from engine.simulate import bound_of_plan as engine_bound
from engine.simulate import simulate_layers
from engine.simulate.metrics import SCORED_ON, Metrics, input_digests, simulation_digest
from engine.simulate.metrics import metrics as engine_metrics
from engine.simulate.migration import Migration
from engine.simulate.migration import migration as engine_migration
from engine.simulate.waits import waits as engine_waits
from engine.store import team
from engine.store.database import database
from engine.studies.inspection import Inspection
from engine.studies.inspection import inspect as engine_inspect
from engine.systems.pieces import linear_placement
from engine.timeline import Timeline
from engine.training import TrainingStep, balanced_load
from engine.validate import refuse_broken, refuse_broken_launch
from engine.workload import Workload, digest_of


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan of the session and how it came about."""

    plan: Plan
    status: str
    runtime: float
    notes: dict[str, dict]


def workload() -> Workload | None:
    """The open recording; None when there is none or the data folder has lost it."""
    digest = state.workload_digest()
    try:
        return recording(digest) if digest else None
    except InputError:
        return None


def recording(digest: str) -> Workload:
    """A recording of the session, under the name that it has there: others may have saved the same contents before."""
    original = _workload(digest)
    name = state.workloads().get(digest, original.name)
    return original if name == original.name else _renamed(digest, name, original)


@st.cache_resource(max_entries=16, show_spinner=False)
def _renamed(digest: str, name: str, _original: Workload) -> Workload:
    renamed = copy(_original)  # shares the arrays
    object.__setattr__(renamed, "name", name)
    return renamed


@st.cache_resource(max_entries=16, show_spinner="Reading the recording")
def _workload(digest: str) -> Workload:
    return store.load_workload(digest)


def inspection() -> Inspection:
    return _inspection(state.workload_digest(), workload())


@st.cache_resource(max_entries=16, show_spinner="Checking the recording")
def _inspection(digest: str, _workload: Workload) -> Inspection:
    return engine_inspect(_workload)


def demand(ranks: int) -> np.ndarray:
    """float64[layer, rank, expert] of the open recording."""
    return _demand(state.workload_digest(), ranks, workload())


@st.cache_resource(max_entries=16, show_spinner="Counting tokens")
def _demand(digest: str, ranks: int, _workload: Workload) -> np.ndarray:
    return _workload.demand(ranks)


def problem() -> Problem | None:
    """What is open, as a problem; None while something is missing. Raises InputError when the parts do not fit."""
    first, cluster, model, step = workload(), state.cluster(), state.model(), state.step()
    if step is not None and model is not None:
        first = _recording_of_step(first, model, step)
    if first is None or cluster is None or model is None:
        return None
    second = None
    if (digest := state.second()) and step is None:
        second = (recording(digest), state.model_of(digest))
    alone = second is None and step is None
    others = tuple(recording(digest) for digest in state.others()) if alone else ()
    in_use = placement_in_use() if alone else None
    names = tuple(part.name for part in (first, *others, *(second or ())))
    graph, cost = (state.graph() if step else None), state.cost()
    key = (
        names,
        first.digest,
        cluster.digest,
        model.digest,
        second and (second[0].digest, second[1].digest),
        tuple(other.digest for other in others),
        in_use and in_use.digest,
        step and step.digest,
        graph and graph.digest,
        digest_of(json.dumps(cost, sort_keys=True)),
    )
    return _problem(key, first, cluster, model, cost_choice.from_dict(cost), second, others, in_use, step, graph)


@st.cache_resource(max_entries=16, show_spinner=False)
def _problem(key: tuple, _workload, _cluster, _model, _cost, _second, _others, _in_use, _step, _graph) -> Problem:
    return make_problem(_workload, _cluster, _model, _cost, _second, _others, _in_use, _step, _graph)


def _recording_of_step(recording: Workload | None, model: MoEModel, step: TrainingStep) -> Workload | None:
    """A step that is routed evenly needs no recording: without a fitting one it gets the loads it assumes."""
    if step.routing == "recorded":
        return recording
    try:
        if recording is not None:
            model.check_recording(recording.layers, recording.num_experts, recording.k, recording.name)
            return recording
    except InputError:
        pass
    return balanced_load(model)


def placement_in_use() -> Placement | None:
    """The placement of the plan that is marked as deployed, where it fits the open recording and cluster."""
    candidate = candidates().get(state.in_use() or "")
    recording, cluster = workload(), state.cluster()
    if candidate is None or recording is None or cluster is None or candidate.plan.goal is Goal.TWO_MODELS:
        return None
    placement = candidate.plan.placement
    fits = (recording.layers, recording.num_experts, len(cluster.gpus))
    return placement if (placement.layers, placement.experts, placement.gpus) == fits else None


def simulate(plan: Plan, problem: Problem) -> Timeline:
    return _simulate(plan.id, _key(problem), plan, problem)


@st.cache_resource(max_entries=64, show_spinner="Simulating")
def _simulate(id: str, key: tuple[str, ...], _plan: Plan, _problem: Problem) -> Timeline:
    return store.load_timeline(simulation_digest(_plan, _problem)) or simulations.timeline(_plan, _problem)


def sends_of_layer(plan: Plan, problem: Problem, layer: int) -> Timeline:
    """One MoE layer of the simulated timeline, with every send."""
    return _sends_of_layer(plan.id, _key(problem), layer, plan, problem)


@st.cache_resource(max_entries=4, show_spinner="Simulating")
def _sends_of_layer(id: str, key: tuple[str, ...], layer: int, _plan: Plan, _problem: Problem) -> Timeline:
    return simulate_layers(_plan, _problem, simulate(_plan, _problem), layer, layer)


def check_plan(plan: Plan, problem: Problem) -> None:
    """Raise InputError, one line, when a plan breaks a rule or does not fit the problem."""
    if fault := _fault_of_plan(plan.name, plan.id, _key(problem), plan, problem):
        raise InputError(fault)


@st.cache_resource(max_entries=256, show_spinner="Checking the plan")
def _fault_of_plan(name: str, id: str, key: tuple[str, ...], _plan: Plan, _problem: Problem) -> str:
    try:
        refuse_broken(_plan, _problem)
    except InputError as error:
        return str(error)
    return ""


def check_launch(launch: Launch) -> None:
    """Raise InputError, one line, when a plan of a launch breaks a rule."""
    plans = tuple(part for plan in launch.plans for part in (plan.name, plan.id))
    second = launch.second or ()
    inputs = (launch.workload, launch.model, launch.cluster, *second, launch.step)
    key = tuple("" if document is None else document.digest for document in inputs)
    if fault := _fault_of_launch(plans, key, launch):
        raise InputError(fault)


@st.cache_resource(max_entries=64, show_spinner="Checking the plans")
def _fault_of_launch(plans: tuple[str, ...], key: tuple[str, ...], _launch: Launch) -> str:
    try:
        refuse_broken_launch(
            _launch.plans, _launch.workload, _launch.model, _launch.cluster, _launch.second, _launch.step
        )
    except InputError as error:
        return str(error)
    return ""


def waits(plan: Plan, problem: Problem) -> pd.DataFrame:
    """What all GPUs wait for in an inference plan, step by step."""
    return _waits(plan.id, _key(problem), simulate(plan, problem))


@st.cache_resource(max_entries=64, show_spinner=False)
def _waits(id: str, key: tuple[str, ...], _timeline: Timeline) -> pd.DataFrame:
    return engine_waits(_timeline)


def metrics(plan: Plan, problem: Problem) -> Metrics:
    return _metrics(plan.id, _key(problem), plan, problem)


@st.cache_resource(max_entries=256, show_spinner="Simulating")
def _metrics(id: str, key: tuple[str, ...], _plan: Plan, _problem: Problem) -> Metrics:
    return engine_metrics(_plan, _problem, simulate(_plan, _problem))


def bound(plan: Plan, problem: Problem, first: int, last: int, straight: bool = False) -> float:
    """Seconds below which no send order brings the plan's placement in these MoE layers; straight: no order without relays,
    unless the plan's own has some."""
    return _bound(plan.id, _key(problem), first, last, straight, plan, problem)


@st.cache_resource(max_entries=256, show_spinner=False)
def _bound(
    id: str, key: tuple[str, ...], first: int, last: int, straight: bool, _plan: Plan, _problem: Problem
) -> float:
    return engine_bound(_plan, _problem, first, last, straight)


def migration(plan: Plan, problem: Problem) -> Migration | None:
    """What a move from the placement in use to a plan costs; None for two models, whose placement in use is unknown."""
    if plan.goal is Goal.TWO_MODELS:
        return None
    now = problem.in_use or linear_placement(problem)
    return _migration(plan.id, now.digest, _key(problem), plan, now, problem)


@st.cache_resource(max_entries=256, show_spinner="Counting moves")
def _migration(id: str, now: str, key: tuple[str, ...], _plan: Plan, _now: Placement, _problem: Problem) -> Migration:
    order = SendOrder(mode="concurrent")
    deployed = Plan(name="in use", placement=_now, send_order=order, provenance=Provenance(optimiser=""))
    seconds = (simulate(plan, _problem).total for plan in (deployed, _plan))
    return engine_migration(_now, _plan.placement, _problem, *seconds)


def _key(problem: Problem) -> tuple[str, ...]:
    digests = input_digests(problem)
    return tuple(digests.get(role, "") for role in SCORED_ON)


def candidates() -> dict[str, Candidate]:
    """Every plan that the session's jobs have found so far, by id, newest job first; then those of a front, and of sweeps
    and of the team's plans those that were opened."""
    by_id: dict[str, Candidate] = {}
    front = state.study_job("front")
    for job in jobs([*state.plan_jobs(), *([front] if front else [])]):
        for candidate in answer_of(job).candidates:
            by_id.setdefault(candidate.plan.id, candidate)
    for id, name in state.taken().items():
        for job in jobs([name]):
            by_id.setdefault(id, _taken(id, job.folder / "result.json"))
    for id, number in state.saved().items():
        try:
            by_id.setdefault(id, _saved(database().address, id, number))
        except InputError:  # the team's database does not answer, or is another one now
            continue
    return by_id


@st.cache_resource(max_entries=256, show_spinner="Reading a saved plan")
def _saved(address: str, id: str, number: int | None) -> Candidate:
    """A plan of the team, which never changes; number: of the time that it was saved, None: it is in no workspace."""
    plan, figures = team.load_plan(database(), id), {}
    if number is not None:
        saved = team.find_saved(database(), number)
        if saved.plan != id:
            raise InputError("another database has another plan under this number")
        plan, figures = plan.model_copy(update={"name": saved.name}), saved.figures
    status = plan.claim.status.value if plan.claim else Status.FEASIBLE.value
    return Candidate(plan, status, figures.get("runtime") or math.nan, figures.get("notes") or {})


@st.cache_resource(max_entries=64, show_spinner=False)
def _taken(id: str, path: Path) -> Candidate:
    """One plan of a sweep, which once found stays in its job's result."""
    return next(
        _candidate(candidate)
        for candidate in json.loads(path.read_bytes())["candidates"]
        if candidate["point"]["plan_id"] == id
    )


@dataclass(frozen=True, eq=False)
class Answer:
    """What a job that plans has kept so far. refused: systems that cannot plan for this, by title, with the reason."""

    candidates: list[Candidate]
    refused: dict[str, str]


def answer_of(job: runner.Job) -> Answer:
    """What a job that plans has kept so far."""
    return _answer(job.id, written, job) if (written := job.result_written) else Answer([], {})


@st.cache_resource(max_entries=64, show_spinner="Reading plans")
def _answer(id: str, written: int, _job: runner.Job) -> Answer:
    result = _job.result
    return Answer([_candidate(candidate) for candidate in result["candidates"]], result.get("refused", {}))


def result_of(job: runner.Job) -> dict | None:
    """What a study has kept so far; None while it is nothing. Not to be changed: other runs and sessions share it."""
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
    candidate = candidates().get(state.plan_id() or "")
    return candidate.plan if candidate else None


@st.cache_resource(ttl=60, show_spinner="Looking for devices")
def attached() -> Devices:
    return engine_attached()


@st.cache_resource(ttl=60, show_spinner="Trying whether a testbed can be built here")
def testbed_fault() -> str | None:
    """Why no testbed can be built on this machine; None when one can."""
    return engine_testbed_fault()


@st.cache_resource(max_entries=8, show_spinner="Reading the measurements")
def launch_result(id: str, _path: Path) -> dict:
    """The result of a launch that is done, which is in its job's `_path`."""
    return json.loads(_path.read_bytes())
