"""Links that are followed, and a saved plan opened with its inputs in this session."""

from app import cached, state
from app.review import store
from engine.cluster import Cluster
from engine.errors import InputError
from engine.model import MoEModel
from engine.overlap.operator_graph import OperatorGraph
from engine.store import team
from engine.store.database import LostError
from engine.store.team import SavedPlan
from engine.store.team_place import Place, place_of
from engine.training import TrainingStep


def follow() -> tuple[SavedPlan, Place] | None:
    """Look at what the address names, and open it in the session where its inputs are here (the brief says where not). What a
    comment points to there is returned, to be gone to.
    Raises InputError when the address leads nowhere; while the database does not answer, it is followed again later."""
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
        state.look_at(None)
        raise
    state.write_link(plan, review)
    state.look_at(saved.number, review or None)
    state.choose_workspace(saved.workspace)
    if saved.plan not in state.saved():
        open_in_session(saved)
    return (saved, place_of(about)) if about else None


def _find(plan: str, review: str) -> SavedPlan:
    if review:
        saved = team.find_review(store.db(), review).saved
        if saved.plan == plan:
            return saved
        raise InputError("this link names a plan and the review of another one; ask for it again")
    saves = team.saves_of(store.db(), [plan])
    if not saves:
        raise InputError(f"there is no saved plan {plan[:12]!r}; the link may be of another database")
    return saves[0]


def open_in_session(saved: SavedPlan) -> str | None:
    """Make a saved plan and everything that it was made from the open ones of this session. Where a recording is missing or
    the plan breaks a rule nothing is opened, and why is returned."""
    try:
        _open_inputs(saved)
    except InputError as error:
        return str(error)
    state.add_saved(saved.plan, saved.number)
    state.open_plan(saved.plan)
    return None


def _open_inputs(saved: SavedPlan) -> None:
    problem, inputs = store.problem_of(saved), saved.inputs
    cached.check_plan(store.plan_of(saved), problem)
    model = MoEModel.from_dict(inputs["model"], "model")
    second = inputs.get("second")
    recordings = {digest: cached.recording(digest) for digest in store.recordings_of(saved)}
    for digest, recording in recordings.items():
        of_second = second is not None and digest == second["workload"]
        state.add_recording(recording, MoEModel.from_dict(second["model"], "second model") if of_second else model)
    state.choose_workload(inputs["workload"])
    state.open_cluster(Cluster.from_dict(inputs["cluster"], "cluster"))
    state.open_model(model)
    state.open_second(second["workload"] if second else None)
    state.open_step(TrainingStep.from_dict(inputs["step"], "training step") if "step" in inputs else None)
    state.open_graph(OperatorGraph.from_dict(inputs["graph"], "operator graph") if "graph" in inputs else None)
    state.open_cost(inputs["cost"])
    state.set_others([other.digest for other in problem.others])
    used = inputs.get(store.IN_USE)
    if used is not None and used != saved.plan:
        state.add_saved(used, None)
    state.set_in_use(used)
