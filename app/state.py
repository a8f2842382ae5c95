"""What a browser session has open. The only file that names session keys.

Everything but pictures of the moment is also kept in the data folder under a token in the address, so that a reload,
another tab or a restarted server finds the session as it was.
"""

import json
import secrets

import streamlit as st

from engine import store
from engine.cluster import Cluster
from engine.errors import InputError
from engine.model import MoEModel
from engine.overlap.operator_graph import OperatorGraph
from engine.training import TrainingStep
from engine.workload import Workload

_WORKLOADS, _WORKLOAD, _CLUSTER, _MODEL = "workloads", "workload", "cluster", "model"
_PLAN_JOBS, _LAUNCH_JOBS, _PLAN = "plan_jobs", "launch_jobs", "plan"
_SECOND, _OTHERS, _IN_USE, _MODEL_OF = "second", "others", "in_use", "model_of"
_STUDY_JOBS, _TAKEN = "study_jobs", "taken"
_STEP, _GRAPH, _COST = "step", "graph", "cost"
_STEPS, _SOURCES, _WANTS_TWO = "steps", "sources", "wants_two"
_NOTICE, _EDIT_ROUND, _TOKEN = "notice", "edit_round", "token"
_TABLE_BASE, _UPLOADS, _WATCHED, _SHOWN = "table_base", "uploads", "watched", "launch_shown"
_RUN_FOLDERS, _DRAWN, _TOUR = "run_folders", "drawn", "tour"
_PERSON, _SAVED, _WORKSPACE, _WHAT_IF = "person", "saved", "workspace", "what_if"
_REVIEWED, _LINK, _REFUSED, _WRITTEN = "reviewed", "link", "refused", "written"
_PARAMETER = "session"
DATASHEET = {"source": "datasheet"}


def restore() -> None:
    """Bring back the session that the address names, or begin an empty one; call once per run, before anything else."""
    if _TOKEN not in st.session_state:
        token = st.query_params.get(_PARAMETER, "")
        kept = None
        try:
            kept = store.load_session(token) if token else None
        except InputError:
            token = ""
        st.session_state[_TOKEN] = token or secrets.token_urlsafe(12)
        _fill(json.loads(kept) if kept else {})
    # Navigation drops the query, so it is written on every run.
    if st.query_params.get(_PARAMETER) != st.session_state[_TOKEN]:
        st.query_params[_PARAMETER] = st.session_state[_TOKEN]


def _fill(kept: dict) -> None:
    session = st.session_state
    session[_WORKLOADS] = kept.get(_WORKLOADS, {})
    session[_WORKLOAD] = kept.get(_WORKLOAD)
    session[_CLUSTER] = Cluster.from_dict(kept[_CLUSTER], "session") if kept.get(_CLUSTER) else None
    session[_MODEL] = MoEModel.from_dict(kept[_MODEL], "session") if kept.get(_MODEL) else None
    session[_PLAN_JOBS], session[_LAUNCH_JOBS] = kept.get(_PLAN_JOBS, []), kept.get(_LAUNCH_JOBS, [])
    session[_PLAN] = kept.get(_PLAN)
    session[_SECOND], session[_OTHERS], session[_IN_USE] = kept.get(_SECOND), kept.get(_OTHERS, []), kept.get(_IN_USE)
    session[_MODEL_OF], session[_STUDY_JOBS] = kept.get(_MODEL_OF, {}), kept.get(_STUDY_JOBS, {})
    session[_TAKEN] = kept.get(_TAKEN, {})
    session[_STEP] = TrainingStep.from_dict(kept[_STEP], "session") if kept.get(_STEP) else None
    session[_GRAPH], session[_COST] = kept.get(_GRAPH), kept.get(_COST, DATASHEET)
    session[_STEPS], session[_SOURCES] = kept.get(_STEPS, {}), kept.get(_SOURCES, {})
    session[_PERSON], session[_SAVED] = kept.get(_PERSON), kept.get(_SAVED, {})
    session[_WORKSPACE], session[_TOUR] = kept.get(_WORKSPACE), kept.get(_TOUR)
    session[_WHAT_IF] = kept.get(_WHAT_IF, {})
    session[_EDIT_ROUND] = 0


_KEPT = (
    _WORKLOADS,
    _WORKLOAD,
    _PLAN_JOBS,
    _LAUNCH_JOBS,
    _PLAN,
    _SECOND,
    _OTHERS,
    _IN_USE,
    _MODEL_OF,
    _STUDY_JOBS,
    _GRAPH,
    _COST,
    _STEPS,
    _SOURCES,
    _TAKEN,
    _PERSON,
    _SAVED,
    _WORKSPACE,
    _TOUR,
    _WHAT_IF,
)
"""Keys whose values are plain JSON and are kept with the session."""


def _keep() -> None:
    session = st.session_state
    kept = {key: session[key] for key in _KEPT}
    for key in (_CLUSTER, _MODEL, _STEP):
        kept[key] = session[key].model_dump(mode="json", exclude_none=True) if session[key] else None
    store.save_session(session[_TOKEN], json.dumps(kept))


def is_empty() -> bool:
    """Whether nothing at all is open."""
    return not workloads() and cluster() is None and model() is None


def workloads() -> dict[str, str]:
    """Name of every recording in the session, by digest."""
    return st.session_state[_WORKLOADS]


def workload_digest() -> str | None:
    """Digest of the open recording."""
    return st.session_state[_WORKLOAD]


def open_workload(workload: Workload) -> None:
    """Add a recording to the session and open it."""
    digest = store.save_workload(workload)
    st.session_state[_WORKLOADS] = {**workloads(), digest: workload.name}
    choose_workload(digest)


def choose_workload(digest: str) -> None:
    """Open a recording that the session already has."""
    st.session_state[_WORKLOAD] = digest
    _keep()


def cluster() -> Cluster | None:
    return st.session_state[_CLUSTER]


def open_cluster(cluster: Cluster | None, edited: bool = False) -> None:
    """Open a cluster, or none; `edited` when it comes from the table, which then must keep its own state."""
    st.session_state[_CLUSTER] = cluster
    st.session_state[_EDIT_ROUND] += not edited
    answer_drawing(drawn()[0], None)  # a complaint about the drawing before is over
    _keep()


def edit_round() -> int:
    """Changes whenever a cluster is opened from outside the table: the table's key."""
    return st.session_state[_EDIT_ROUND]


def model() -> MoEModel | None:
    return st.session_state[_MODEL]


def open_model(model: MoEModel) -> None:
    st.session_state[_MODEL] = model
    _keep()


def remember_model(digest: str, model: MoEModel) -> None:
    """Keep the model that a recording was made with, so that it can be opened as a second model later."""
    known = model.model_dump(mode="json", exclude_none=True)
    if st.session_state[_MODEL_OF].get(digest) != known:
        st.session_state[_MODEL_OF] = {**st.session_state[_MODEL_OF], digest: known}
        _keep()


def model_of(digest: str) -> MoEModel | None:
    """The model that a recording of the session was made with, where it is known."""
    known = st.session_state[_MODEL_OF].get(digest)
    return MoEModel.from_dict(known, "session") if known else None


def second() -> str | None:
    """Digest of the second model's recording; its model is `model_of` it."""
    return st.session_state[_SECOND]


def open_second(digest: str | None) -> None:
    """Let a second model share the cluster, or no longer (None)."""
    st.session_state[_SECOND] = digest
    _keep()


def wants_two() -> bool:
    """Whether a person is about to choose a second model."""
    return st.session_state.get(_WANTS_TWO, False)


def want_two(wanted: bool) -> None:
    st.session_state[_WANTS_TWO] = wanted


def add_recording(workload: Workload, model: MoEModel) -> str:
    """Add a recording to the session without opening it; returns its digest."""
    digest = store.save_workload(workload)
    st.session_state[_WORKLOADS] = {**workloads(), digest: workload.name}
    remember_model(digest, model)
    return digest


def others() -> list[str]:
    """Digests of the recordings that a plan must serve as well."""
    return [digest for digest in st.session_state[_OTHERS] if digest in workloads() and digest != workload_digest()]


def set_others(digests: list[str]) -> None:
    if digests != st.session_state[_OTHERS]:
        st.session_state[_OTHERS] = digests
        _keep()


def in_use() -> str | None:
    """Id of the plan that is deployed now; None: experts in contiguous blocks."""
    return st.session_state[_IN_USE]


def set_in_use(id: str | None) -> None:
    if id != st.session_state[_IN_USE]:
        st.session_state[_IN_USE] = id
        _keep()


def step() -> TrainingStep | None:
    """The training step that is to be planned; None: inference."""
    return st.session_state[_STEP]


def open_step(step: TrainingStep | None) -> None:
    """Plan for a training step of the open model, or for inference (None); the step is remembered for that model."""
    if step is not None and model() is not None:
        known = step.model_dump(mode="json", exclude_none=True)
        st.session_state[_STEPS] = {**st.session_state[_STEPS], model().digest: known}
    st.session_state[_STEP] = step
    _keep()


def step_of_model() -> TrainingStep | None:
    """The training step that was last described for the open model."""
    known = st.session_state[_STEPS].get(model().digest) if model() else None
    return TrainingStep.from_dict(known, "session") if known else None


def graph() -> OperatorGraph | None:
    """The imported operators of the training step; None: those of a transformer."""
    digest = st.session_state[_GRAPH]
    try:
        return store.load_document(OperatorGraph, digest) if digest else None
    except InputError:
        return None


def open_graph(graph: OperatorGraph | None) -> None:
    st.session_state[_GRAPH] = store.save_document(graph) if graph else None
    _keep()


def cost() -> dict:
    """The cost source, as `engine.costs.choice` writes it."""
    return st.session_state[_COST]


def open_cost(cost: dict) -> None:
    if cost != st.session_state[_COST]:
        st.session_state[_COST] = cost
        _keep()


def cost_sources() -> dict[str, dict]:
    """Cost sources read from files in this session, by name, as `engine.costs.choice` writes them."""
    return st.session_state[_SOURCES]


def add_cost_source(name: str, cost: dict) -> None:
    st.session_state[_SOURCES] = {**cost_sources(), name: cost}
    _keep()


def study_job(kind: str) -> str | None:
    """Id of the newest study of a kind (front, affinity, lina)."""
    return st.session_state[_STUDY_JOBS].get(kind)


def set_study_job(kind: str, id: str) -> None:
    st.session_state[_STUDY_JOBS] = {**st.session_state[_STUDY_JOBS], kind: id}
    _keep()


def what_if() -> dict[str, float | str]:
    """Where the sliders of the What-if page were left, by what they change."""
    return st.session_state[_WHAT_IF]


def keep_what_if(at: dict[str, float | str]) -> None:
    if (left := what_if() | at) != what_if():
        st.session_state[_WHAT_IF] = left
        _keep()


def taken() -> dict[str, str]:
    """Ids of the plans that were opened from sweeps, each with that of the job that found it, newest first."""
    return st.session_state[_TAKEN]


def take_plan(id: str, job: str) -> None:
    """Count a plan that a sweep found to the candidates of the session."""
    st.session_state[_TAKEN] = {id: job, **taken()}
    _keep()


def saved() -> dict[str, int | None]:
    """Ids of the team's plans that were opened in this session, each with its number in the team's database (None: it is
    in no workspace), newest first."""
    return st.session_state[_SAVED]


def add_saved(id: str, number: int | None) -> None:
    """Count a plan of the team to the candidates of the session."""
    if saved().get(id, -1) != number:
        st.session_state[_SAVED] = {id: number, **{one: known for one, known in saved().items() if one != id}}
        _keep()


def person() -> str | None:
    """The name that a person typed."""
    return st.session_state[_PERSON]


def set_person(name: str) -> None:
    st.session_state[_PERSON] = name
    _keep()


def workspace() -> str | None:
    """Id of the workspace that was looked at last."""
    return st.session_state[_WORKSPACE]


def choose_workspace(id: str | None) -> None:
    if id != st.session_state[_WORKSPACE]:
        st.session_state[_WORKSPACE] = id
        _keep()


def reviewed() -> tuple[int, str | None] | None:
    """The number of the saved plan that is looked at and the id of its review; None: the list alone."""
    return st.session_state.get(_REVIEWED)


def look_at(number: int | None, review: str | None = None) -> None:
    st.session_state[_REVIEWED] = None if number is None else (number, review)


def refuse(place: str, reason: str) -> None:
    """Remember why something that a person sent could not be written, to be said where they sent it."""
    st.session_state[_REFUSED] = (place, reason)


def take_refusal(place: str) -> str | None:
    """Why what was last sent from a place could not be written; None when it was."""
    if st.session_state.get(_REFUSED, ("", ""))[0] != place:
        return None
    return st.session_state.pop(_REFUSED)[1]


def written() -> int:
    """How many times this session has written to the team's database: the key of forms that begin anew after that."""
    return st.session_state.get(_WRITTEN, 0)


def count_written() -> None:
    st.session_state[_WRITTEN] = written() + 1


def asked_link() -> tuple[str, str] | None:
    """The plan and the review (or "") in the address; None: none, or they are in it because this session wrote them."""
    link = (st.query_params.get("plan", ""), st.query_params.get("review", ""))
    return link if link[0] and link != st.session_state.get(_LINK) else None


def write_link(plan: str, review: str) -> None:
    """Let the address lead to a plan and a review ("": to none)."""
    for name, value in (("plan", plan), ("review", review)):
        if value and st.query_params.get(name) != value:
            st.query_params[name] = value
        elif not value and name in st.query_params:
            del st.query_params[name]
    st.session_state[_LINK] = (plan, review)


def plan_jobs() -> list[str]:
    """Ids of the optimisation jobs of this session, newest first."""
    return st.session_state[_PLAN_JOBS]


def add_plan_job(id: str) -> None:
    st.session_state[_PLAN_JOBS] = [id, *(known for known in plan_jobs() if known != id)]
    _keep()


def launch_jobs() -> list[str]:
    """Ids of the launches of this session, newest first."""
    return st.session_state[_LAUNCH_JOBS]


def add_launch_job(id: str) -> None:
    st.session_state[_LAUNCH_JOBS] = [id, *launch_jobs()]
    _keep()


def launch_shown() -> str | None:
    """Id of the launch whose report a person chose to see; None: the newest of this session."""
    return st.session_state.get(_SHOWN)


def show_launch(id: str | None) -> None:
    st.session_state[_SHOWN] = id


def run_folder(key: str) -> str | None:
    """The run folder that was written for a launch on a cluster; key: digest of the launch and its destination."""
    return st.session_state.get(_RUN_FOLDERS, {}).get(key)


def keep_run_folder(key: str, folder: str) -> None:
    st.session_state.setdefault(_RUN_FOLDERS, {})[key] = folder


def plan_id() -> str | None:
    """Id of the open plan."""
    return st.session_state[_PLAN]


def open_plan(id: str | None) -> None:
    if id != st.session_state[_PLAN]:
        st.session_state[_PLAN] = id
        _keep()


def on_tour() -> bool:
    """Whether the guide through the sample is on."""
    return st.session_state[_TOUR] == "on"


def begin_tour() -> None:
    """Show the guide, unless this session has seen it."""
    if st.session_state[_TOUR] is None:
        st.session_state[_TOUR] = "on"
        _keep()


def end_tour() -> None:
    st.session_state[_TOUR] = "seen"
    _keep()


def drawn() -> tuple[int, str | None]:
    """The number of the last edit on the drawing board that was dealt with, and why it could not be taken, if so."""
    return st.session_state.get(_DRAWN, (0, None))


def answer_drawing(serial: int, complaint: str | None) -> None:
    """An edit on the drawing board was taken, or refused with a reason."""
    st.session_state[_DRAWN] = (serial, complaint)


def table_base() -> tuple | None:
    """What the cluster table started from, see `app.cluster.table`."""
    return st.session_state.get(_TABLE_BASE)


def keep_table_base(base: tuple) -> None:
    st.session_state[_TABLE_BASE] = base


def first_time(file_id: str) -> bool:
    """True once per uploaded file: an upload stays in its widget, but is read only once."""
    seen = st.session_state.setdefault(_UPLOADS, {})
    if file_id in seen:
        return False
    seen[file_id] = None
    return True


def complain(file_id: str, text: str) -> None:
    """Remember why an uploaded file could not be used, for as long as it is in its widget."""
    st.session_state[_UPLOADS][file_id] = text


def complaints(file_ids: list[str]) -> list[str]:
    """The complaints about these files."""
    seen = st.session_state.get(_UPLOADS, {})
    return [seen[id] for id in file_ids if seen.get(id)]


def newly_finished(job: str, finished: bool) -> bool:
    """True once for a job that was seen running before and has finished now."""
    watched = st.session_state.setdefault(_WATCHED, {})
    before, watched[job] = watched.get(job), finished
    return before is False and finished


def notice(text: str) -> None:
    """Say something after the next rerun."""
    st.session_state[_NOTICE] = text


def take_notice() -> str | None:
    return st.session_state.pop(_NOTICE, None)
