"""The team's database as the page sees it: what is read, and every write in one place, under the writer's name and role."""

import json
import math
from typing import Any

import streamlit as st

from app import cached, state
from app.review import announce
from app.review.brief import Brief, brief_of
from app.review.brief import with_risks as with_risks_of
from app.visitor import people
from engine import store
from engine.errors import InputError
from engine.plan import Plan
from engine.problem import Problem
from engine.simulate.metrics import input_digests
from engine.store import team, team_corrections
from engine.store.database import Database, database
from engine.store.problems import problem_arguments, problem_from, save_recordings
from engine.store.team import Review, SavedPlan, Verdict, Workspace
from engine.store.team_place import Place
from engine.workload import digest_of

NAMES, IN_USE = "names", "in_use_plan"
"""What the inputs of a saved plan have beside the arguments of its problem: recordings' names by digest, and a plan's id."""


def db() -> Database:
    """The database. Raises InputError when it does not answer."""
    return database()


def add_workspace(name: str) -> Workspace:
    """Make a workspace and look at it."""
    workspace = team.add_workspace(db(), name, people.writer("plan"))
    state.choose_workspace(workspace.id)
    return workspace


def save(workspace: str, plan: Plan, problem: Problem, name: str, note: str, question: str) -> SavedPlan:
    """Save a plan of this session under a name with what it was made from, and put it up for decision unless there is no
    question. A plan that the workspace has already stays as it was first saved, with its review."""
    by = people.writer("plan")
    named = Plan.from_dict(plan.model_dump(mode="json") | {"name": team.clean_name(name, "the plan")}, "plan")
    there = saved_in(workspace, plan)
    save_recordings(problem)
    saved = team.save_plan(
        db(), workspace, named, by, note, *_kept_with(plan, problem), summary(plan, problem), people.login()
    )
    state.add_saved(saved.plan, saved.number)
    review = next(iter(team.reviews_of(db(), saved.number)), None)
    if review is None and question.strip():
        review = team.open_review(db(), saved.number, question, by, people.login())
        announce.requested(review)
    state.look_at(saved.number, review.id if review else None)
    if there is not None:  # somebody was faster
        state.notice(f"{saved.by} has saved this plan here already, as {saved.name}; it stays as it is.")
    return saved


def saved_in(workspace: str, plan: Plan) -> SavedPlan | None:
    """A plan as a workspace has it already; None where it has not."""
    return next((saved for saved in team.saves_of(db(), [plan.id]) if saved.workspace == workspace), None)


def correct(saved: SavedPlan, name: str, note: str) -> None:
    """Give a saved plan another name and note; raises InputError for anybody but who saved it."""
    team_corrections.correct_saved(db(), saved.number, name, note, people.writer("plan"), people.login())
    cached.forget_saved_plans()


def _kept_with(plan: Plan, problem: Problem) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and figures that are kept with a plan, as JSON."""
    inputs = problem_arguments(problem) | {NAMES: _names(problem)}
    candidate, used = cached.candidates().get(plan.id), cached.candidates().get(state.in_use() or "")
    if problem.in_use is not None and used is not None:
        team.keep_plan(db(), used.plan)
        inputs[IN_USE] = used.plan.id
    figures = {"metrics": cached.metrics(plan, problem).to_dict()}
    if candidate is not None:
        figures |= {"runtime": candidate.runtime, "notes": candidate.notes}
    return _finite(inputs), _finite(figures)


def summary(plan: Plan, problem: Problem) -> team.Summary:
    """What the list of saved plans says of a plan of this session: against what is deployed now."""
    used = cached.candidates().get(state.in_use() or "")
    in_brief = brief_of(plan, problem, cached.simulate, used.plan if used else None)
    return team.Summary(
        problem.cluster.name,
        problem.workload.name,
        in_brief.own.figures.total,
        in_brief.baseline.figures.total,
        in_brief.baseline.plan.name,
    )


def _names(problem: Problem) -> dict[str, str]:
    recordings = [problem.workload, *problem.others, *([problem.second.workload] if problem.second else [])]
    return {recording.digest: recording.name for recording in recordings}


def _finite(value: Any) -> Any:
    """JSON without the numbers that databases refuse: a gap over a bound of 0 is infinite."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def ask(saved: SavedPlan, question: str) -> None:
    """Put a saved plan up for decision."""
    review = team.open_review(db(), saved.number, question, people.writer("plan"), people.login())
    announce.requested(review)
    state.look_at(saved.number, review.id)


def comment(review: Review, text: str, place: Place | None = None) -> None:
    """Say something about a review, and of what in it."""
    team.add_comment(db(), review.id, text, people.writer("plan"), place)


def decide(review: Review, verdict: Verdict, reason: str) -> None:
    """Decide on a review as it was seen; raises InputError when somebody else has decided since, and where people may not
    approve what they asked for."""
    by = people.writer("plan")
    team.decide(db(), review.id, verdict, reason, by, len(review.decisions), people.login())
    announce.decided(review, verdict, reason.strip(), by)


def plan_of(saved: SavedPlan) -> Plan:
    """A saved plan under the name that it was saved with."""
    return _plan(saved.plan, saved.name)


@st.cache_resource(max_entries=64, show_spinner="Reading the plan")
def _plan(id: str, name: str) -> Plan:
    return team.load_plan(db(), id).model_copy(update={"name": name})


def recordings_of(saved: SavedPlan) -> list[str]:
    """Digests of the recordings that a saved plan was made from, its own first."""
    inputs = saved.inputs
    digests = [inputs.get("workload"), (inputs.get("second") or {}).get("workload"), *inputs.get("others", [])]
    return list(dict.fromkeys(digest for digest in digests if digest))


def problem_of(saved: SavedPlan) -> Problem:
    """What a plan was saved for. Raises InputError when a recording is not here, or nothing was saved with it."""
    if "workload" not in saved.inputs:
        raise InputError("nothing was saved with this plan that it could be simulated with")
    names = saved.inputs.get(NAMES, {})
    if missing := [digest for digest in recordings_of(saved) if not store.has_workload(digest)]:
        called = " and ".join(names.get(digest, digest[:12]) for digest in missing)
        raise InputError(
            f"this studio's data folder does not have the recording {called}; upload it on the Workload page, "
            "where it is known by its content"
        )
    return _problem(digest_of(json.dumps(saved.inputs, sort_keys=True)), saved.inputs)


@st.cache_resource(max_entries=16, show_spinner="Opening the inputs")
def _problem(key: str, _inputs: dict[str, Any]) -> Problem:
    return problem_from(_inputs, cached.recording)


def brief(saved: SavedPlan) -> Brief:
    """The brief of a saved plan, without risks. Raises InputError when the plan breaks a rule or its inputs are not here."""
    plan, problem = plan_of(saved), problem_of(saved)
    cached.check_plan(plan, problem)
    used = plan_in_use(saved)
    return _brief(plan.name, plan.id, _key(problem), used and (used.name, used.id), plan, problem, used)


def plan_in_use(saved: SavedPlan) -> Plan | None:
    """The plan that was deployed when this one was saved; None where it is not known."""
    try:
        return _plan_in_use(saved.inputs[IN_USE])
    except (KeyError, InputError):
        return None


@st.cache_resource(max_entries=64, show_spinner=False)
def _plan_in_use(id: str) -> Plan:
    return team.load_plan(db(), id)


def _key(problem: Problem) -> tuple[str, ...]:
    return tuple(part for role_and_digest in sorted(input_digests(problem).items()) for part in role_and_digest)


@st.cache_resource(max_entries=24, show_spinner="Simulating the plan and what it is held against")
def _brief(
    name: str,
    id: str,
    key: tuple[str, ...],
    in_use: tuple[str, str] | None,
    _plan: Plan,
    _problem: Problem,
    _in_use: Plan | None,
) -> Brief:
    return brief_of(_plan, _problem, cached.simulate, _in_use)


def with_risks(brief: Brief, others: list[str]) -> Brief:
    """The brief with what the plan is worth on these recordings."""
    plan = brief.own.plan
    return _with_risks(plan.name, plan.id, _key(brief.problem), brief.baseline.plan.name, tuple(others), brief)


@st.cache_resource(max_entries=24, show_spinner="Simulating the plan on the other recordings")
def _with_risks(
    name: str, id: str, key: tuple[str, ...], baseline: str, others: tuple[str, ...], _brief: Brief
) -> Brief:
    return with_risks_of(_brief, [cached.recording(other) for other in others], cached.simulate)
