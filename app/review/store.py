"""The team's database as the page sees it: readings, and every write in one place, under the writer's name and role.

Also links to saved plans, which name no session; the operator's webhook, which is told of decisions (docs/operating.md lists
the fields); and the opening of a saved plan with its inputs in this session.
"""

import json
import math
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode, urlsplit

import streamlit as st

from app import cached, state
from app.review.brief import Brief, brief_of
from app.visitor import people
from engine import store
from engine.cluster import Cluster
from engine.compare.baseline import baseline_of, travelling_like
from engine.errors import InputError
from engine.model import MoEModel
from engine.overlap.operator_graph import OperatorGraph
from engine.plan import Plan
from engine.problem import Problem
from engine.provenance import input_digests
from engine.simulate.serving import ServedStep
from engine.store import team, team_list
from engine.store.database import Database, LostError, database
from engine.store.problems import problem_arguments, problem_from, save_recordings
from engine.store.team import Review, SavedPlan, Verdict, Workspace
from engine.store.team_approval import Place, place_of
from engine.training import TrainingStep
from engine.webhook import WEBHOOK, address
from engine.workload import digest_of


def link_to(saved: SavedPlan, review: str | None, place: Place | None = None) -> str:
    """A link to a saved plan, its review (an id) and the place that a comment points to; asked for on the Review page."""
    parameters = {"plan": saved.plan} | ({"review": review} if review else {})
    parameters |= {} if place is None else {"about": str(place)}
    here = urlsplit(st.context.url or "")
    page = f"{here.scheme}://{here.netloc}{here.path}" if here.netloc else "/review"
    return f"{page}?{urlencode(parameters)}"


LONGEST = 500
"""Most characters of a text that are sent."""


def requested(review: Review) -> None:
    """Tell the webhook that a plan was put up for decision."""
    _send_news("review.requested", "A decision on a plan is requested", review, review.by)


def decided(review: Review, verdict: Verdict, reason: str, by: str) -> None:
    """Tell the webhook that somebody has decided on a plan."""
    _send_news("review.decided", f"A plan was {verdict}", review, by, verdict, reason)


def _send_news(event: str, text: str, review: Review, by: str, verdict: Verdict | None = None, reason: str = "") -> None:
    with suppress(InputError):  # the operator is told elsewhere that the setting is wrong or the database is away
        if address() is None:
            return
        saved, link = review.saved, link_to(review.saved, review.id)
        names = {workspace.id: workspace.name for workspace in team.workspaces(database())}
        WEBHOOK.send(
            {
                "event": event,
                "text": f"{text}: {link}",  # no text of a person: chat services read it as markup
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "workspace": names.get(saved.workspace, ""),
                "plan": {"id": saved.plan, "name": saved.name},
                "review": review.id,
                "question": _short(review.question),
                "by": by,
                "verdict": verdict,
                "reason": _short(reason),
                "link": link,
            }
        )


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


NAMES, IN_USE, SERVING = "names", "in_use_plan", "serving"
"""Inputs of a saved plan besides the arguments of its problem: recordings' names by digest, a plan's id, and the serving step
that was the goal, None of a pass."""


def db() -> Database:
    """The database. Raises InputError when it does not answer."""
    return database()


def add_workspace(name: str) -> Workspace:
    """Make a workspace and show it."""
    workspace = team.add_workspace(db(), name, people.writer("plan"))
    state.update(workspace=workspace.id)
    return workspace


def save(workspace: str, plan: Plan, problem: Problem, name: str, note: str, question: str) -> SavedPlan:
    """Save a plan of this session under a name, with its inputs, and put it up for decision if there is a question.

    A plan that the workspace has already stays as it was first saved, with its review.
    """
    by = people.writer("plan")
    named = Plan.from_dict(plan.model_dump(mode="json") | {"name": team.clean_name(name, "the plan")}, "plan")
    there = saved_in(workspace, plan)
    save_recordings(problem)
    saved = team.save_plan(db(), workspace, named, by, note, *_kept_with(plan, problem), summary(plan, problem), people.login())
    state.add_saved(saved.plan, saved.number)
    review = next(iter(team.reviews_of(db(), saved.number)), None)
    if review is None and question.strip():
        review = team.open_review(db(), saved.number, question, by, people.login())
        requested(review)
    state.visit.look_at(saved.number, review.id if review else None)
    if there is not None:  # somebody was faster
        state.visit.notice = f"{saved.by} has saved this plan here already, as {saved.name}; it stays as it is."
    return saved


def saved_in(workspace: str, plan: Plan) -> SavedPlan | None:
    """The plan as a workspace has it already; None if it has not."""
    return next((saved for saved in team.saves_of(db(), [plan.id]) if saved.workspace == workspace), None)


def correct(saved: SavedPlan, name: str, note: str) -> None:
    """Give a saved plan another name and note; raises InputError for everybody but the person who saved it."""
    team_list.correct_saved(db(), saved.number, name, note, people.writer("plan"), people.login())
    cached.forget_saved_plans()


def _kept_with(plan: Plan, problem: Problem) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and figures that are kept with a plan, as JSON."""
    recordings = [problem.workload, *problem.others, *([problem.second.workload] if problem.second else [])]
    inputs = problem_arguments(problem) | {NAMES: {recording.digest: recording.name for recording in recordings}}
    serving = cached.open_serving(problem)
    inputs[SERVING] = None if serving is None else serving.arguments
    candidate, used = cached.candidates().get(plan.id), cached.candidates().get(state.session.in_use or "")
    if problem.in_use is not None and used is not None:
        team.keep_plan(db(), used.plan)
        inputs[IN_USE] = used.plan.id
    figures = {"metrics": cached.metrics(plan, problem).to_dict()}
    if candidate is not None:
        figures |= {"runtime": candidate.runtime, "notes": candidate.notes}
    return _finite(inputs), _finite(figures)


def summary(plan: Plan, problem: Problem) -> team.Summary:
    """Figures of a plan of this session in the list of saved plans, against the baseline."""
    used = cached.candidates().get(state.session.in_use or "")
    here = travelling_like(plan, problem)
    now = baseline_of(here, used.plan if used else None)
    headline = cached.standing(plan, here, cached.open_serving(here), now)
    return team.Summary(
        problem.cluster.name,
        problem.workload.name,
        headline.seconds,
        headline.deployed_seconds,
        now.name,
        headline.gain,
        headline.span,
    )


def _finite(value: Any) -> Any:
    """Replace the numbers that databases refuse by None: a gap over a bound of 0 is infinite."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def ask(saved: SavedPlan, question: str) -> None:
    """Put a saved plan up for decision."""
    review = team.open_review(db(), saved.number, question, people.writer("plan"), people.login())
    requested(review)
    state.visit.look_at(saved.number, review.id)


def comment(review: Review, text: str, place: Place | None = None) -> None:
    """Comment on a review. place: the part of it that the comment points to."""
    team.add_comment(db(), review.id, text, people.writer("plan"), place)


def decide(review: Review, verdict: Verdict, reason: str) -> None:
    """Decide on a review as it was seen; raises InputError when somebody else has decided since, or when people may not approve
    their own requests."""
    by = people.writer("plan")
    team.decide(db(), review.id, verdict, reason, by, len(review.decisions), people.login())
    decided(review, verdict, reason.strip(), by)


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
    """The problem that a plan was saved for. Raises InputError when a recording is not here, or nothing was saved with it."""
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
    """The brief of a saved plan, with the headline for its goal. Raises InputError when the plan breaks a rule or its inputs
    are not here."""
    plan, problem = plan_of(saved), problem_of(saved)
    cached.check_plan(plan, problem)
    known = _brief(plan, problem, plan_in_use(saved))
    headline = cached.standing(plan, known.problem, serving_of(saved, problem), known.baseline.plan)
    return replace(known, standing=headline)


def serving_of(saved: SavedPlan, problem: Problem) -> cached.Serving | None:
    """The serving step that a plan was saved for; None of a pass. Saves of older versions do not say: then the open one."""
    if SERVING in saved.inputs:
        return cached.kept_serving(saved.inputs[SERVING], problem)
    return cached.open_serving(problem)


def served_pair(brief: Brief, serving: cached.Serving) -> list[ServedStep]:
    """The plan and its baseline in the serving step."""
    return [cached.served(scored.plan, brief.problem, serving) for scored in (brief.own, brief.baseline)]


def plan_in_use(saved: SavedPlan) -> Plan | None:
    """The plan that was deployed when this one was saved; None if it is not known."""
    try:
        return _plan_in_use(saved.inputs[IN_USE])
    except (KeyError, InputError):
        return None


@st.cache_resource(max_entries=64, show_spinner=False)
def _plan_in_use(id: str) -> Plan:
    return team.load_plan(db(), id)


def _key(problem: Problem) -> tuple[str, ...]:
    return tuple(part for role_and_digest in sorted(input_digests(problem).items()) for part in role_and_digest)


@st.cache_resource(
    max_entries=24, show_spinner="Simulating the plan and what it is held against", hash_funcs=cached.BY_NAME | {Problem: _key}
)
def _brief(plan: Plan, problem: Problem, in_use: Plan | None) -> Brief:
    return brief_of(plan, problem, cached.simulate, in_use)


def follow() -> tuple[SavedPlan, Place] | None:
    """Show the plan in the address, and open it in the session if its inputs are here (else the brief says so).

    Returns the place that a comment there points to, to be gone to. Raises InputError when the address leads nowhere; while the
    database does not answer, it is followed again later.
    """
    link = state.asked_link()
    if link is None:
        return None
    plan, review, about = link
    try:
        saved = _find(plan, review)
    except LostError:
        raise
    except InputError:
        state.write_link(plan, review)
        state.visit.look_at(None)
        raise
    state.write_link(plan, review)
    state.visit.look_at(saved.number, review or None)
    state.update(workspace=saved.workspace)
    if saved.plan not in state.session.saved:
        open_in_session(saved)
    return (saved, place_of(about)) if about else None


def _find(plan: str, review: str) -> SavedPlan:
    if review:
        saved = team.find_review(db(), review).saved
        if saved.plan == plan:
            return saved
        raise InputError("this link names a plan and the review of another one; ask for it again")
    saves = team.saves_of(db(), [plan])
    if not saves:
        raise InputError(f"there is no saved plan {plan[:12]!r}; the link may be of another database")
    return saves[0]


def open_in_session(saved: SavedPlan) -> str | None:
    """Make a saved plan and all its inputs the open ones of this session.

    If a recording is missing or the plan breaks a rule nothing is opened, and the reason is returned.
    """
    try:
        _open_inputs(saved)
    except InputError as error:
        return str(error)
    state.add_saved(saved.plan, saved.number)
    state.update(plan=saved.plan)
    return None


def _open_inputs(saved: SavedPlan) -> None:
    problem, inputs = problem_of(saved), saved.inputs
    cached.check_plan(plan_of(saved), problem)
    model = MoEModel.from_dict(inputs["model"], "model")
    second = inputs.get("second")
    recordings = {digest: cached.recording(digest) for digest in recordings_of(saved)}
    for digest, recording in recordings.items():
        of_second = second is not None and digest == second["workload"]
        state.add_recording(recording, MoEModel.from_dict(second["model"], "second model") if of_second else model)
    state.change(workload=inputs["workload"])
    state.open_cluster(Cluster.from_dict(inputs["cluster"], "cluster"))
    state.change(model=model)
    state.change(second=second["workload"] if second else None)
    state.open_step(TrainingStep.from_dict(inputs["step"], "training step") if "step" in inputs else None)
    if SERVING in inputs:
        kept = cached.kept_serving(inputs[SERVING], problem)
        state.open_serving(None if kept is None else kept.step)
    state.open_graph(OperatorGraph.from_dict(inputs["graph"], "operator graph") if "graph" in inputs else None)
    state.update(cost=inputs["cost"])
    state.update(others=[other.digest for other in problem.others])
    used = inputs.get(IN_USE)
    if used is not None and used != saved.plan:
        state.add_saved(used, None)
    state.update(in_use=used)
