"""The open session of a browser tab. Nothing else names keys of `st.session_state`, except a widget its own.

`session.x` reads a field that is kept: it is stored in the data folder under a token in the address (`address`), so that a
reload, another tab or a restarted server finds the session as it was. `change` and `update` write such fields, as do the
functions here, which concern more than one field or a document in the data folder. `visit.x` is a field that ends with the
tab; it is read and assigned.
"""

from typing import Any

from pydantic import ValidationError

from app.state.address import (
    asked_link,
    begin_anew,
    change,
    go_on_with,
    keep_older,
    open_newer,
    peek,
    restore,
    store_again,
    update,
    was_overtaken,
    write_link,
)
from app.state.fields import TYPED, ReviewVisit, session, visit
from app.state.stored import DATASHEET, MOST_CHOICES, RemovedPlan, Session
from engine import store
from engine.cluster import Cluster
from engine.costs.pair_cluster import MeasuredPairs
from engine.errors import InputError
from engine.model import MoEModel
from engine.overlap.operator_graph import OperatorGraph
from engine.plan import Plan
from engine.serving.step import ServingStep
from engine.training import TrainingStep
from engine.workload import Workload

MOST_EARLIER = 8
"""Studies that the session knows besides the newest of each kind: as many as may still run or wait."""


def is_empty() -> bool:
    """True if neither a recording nor a cluster nor a model is open."""
    return not session.workloads and session.cluster is None and session.model is None


def open_workload(workload: Workload) -> None:
    """Add a recording to the session and open it."""
    digest = store.save_workload(workload)
    change(workloads={**session.workloads, digest: workload.name}, workload=digest)


def remove_workload(digest: str) -> None:
    """Take a recording out of the session; if it was open, the one added last is open now."""
    left = {other: name for other, name in session.workloads.items() if other != digest}
    change(
        workloads=left,
        workload=next(reversed(left), None) if digest == session.workload else session.workload,
        model_of={other: model for other, model in session.model_of.items() if other != digest},
        second=None if digest == session.second else session.second,
        others=[other for other in session.others if other != digest],
    )


def add_recording(workload: Workload, model: MoEModel) -> str:
    """Add a recording and the model it was made with to the session without opening them; return the recording's digest."""
    digest = store.save_workload(workload)
    change(workloads={**session.workloads, digest: workload.name}, model_of={**session.model_of, digest: model})
    return digest


def open_cluster(cluster: Cluster | None, edited: bool = False) -> None:
    """Open a cluster, or none; `edited` when it comes from the table, which then must keep its own state."""
    if not edited:
        visit.edit_round += 1
    visit.drawn = (visit.drawn[0], None)  # a complaint about the drawing before is over
    change(cluster=cluster)


def open_pairs(pairs: MeasuredPairs) -> None:
    """Keep measured pairs of GPUs, to be shown with the clusters of their hosts."""
    change(pairs=store.save_document(pairs))


def remember_model(digest: str, model: MoEModel) -> None:
    """Keep the model that a recording was made with, so that it can be opened as a second model later."""
    if session.model_of.get(digest) != model:
        change(model_of={**session.model_of, digest: model})


def others() -> list[str]:
    """Digests of the recordings that a plan must serve as well."""
    return [digest for digest in session.others if digest in session.workloads and digest != session.workload]


def open_step(step: TrainingStep | None) -> None:
    """Plan for a training step of the open model, or for inference (None); the step is remembered for that model."""
    if step is None or session.model is None:
        change(step=step)
    else:
        change(step=step, steps={**session.steps, session.model.digest: step})


def step_of_model() -> TrainingStep | None:
    """The training step that was last described for the open model."""
    return session.steps.get(session.model.digest) if session.model else None


def serving() -> ServingStep | None:
    """The step of a serving engine in which plans for inference are judged; None: in the MoE layers alone."""
    return None if session.step or session.second else session.serving


def open_serving(serving: ServingStep | None) -> None:
    """Judge plans in a serving step of the open model, or no longer (None); the step is remembered for that model."""
    if serving is None or session.model is None:
        change(serving=serving)
    else:
        change(serving=serving, servings={**session.servings, session.model.digest: serving})


def serving_of_model() -> ServingStep | None:
    """The serving step that was last described for the open model."""
    return session.servings.get(session.model.digest) if session.model else None


def remember_config(model: MoEModel, config: str) -> None:
    """Keep the source of a model's `config.json`."""
    if session.configs.get(model.digest) != config:
        change(configs={**session.configs, model.digest: config})


def graph() -> OperatorGraph | None:
    """The imported operators of the training step; None: those of a transformer."""
    try:
        return store.load_document(OperatorGraph, session.graph) if session.graph else None
    except InputError:
        return None


def open_graph(graph: OperatorGraph | None) -> None:
    change(graph=store.save_document(graph) if graph else None)


def add_cost_source(name: str, cost: dict) -> None:
    """Add a cost source that was read from a file, as `engine.costs.choice` writes it."""
    change(sources={**session.sources, name: cost})


def forget_choices(*keys: str) -> None:
    """Let widgets show their defaults again."""
    kept = {key: chosen for key, chosen in session.choices.items() if key not in keys}
    visit.draw_anew(keys)
    if kept != session.choices:
        change(choices=kept)


def keep_choice(key: str, value: Any) -> None:
    """Keep the value that a person chose, of the newest MOST_CHOICES widgets.

    value: a `stored.Choice`, or a tuple of such. A value that a session cannot keep, as a text of a thousand lines, is dropped.
    """
    value = list(value) if isinstance(value, tuple) else value
    try:
        Session.model_validate({"choices": {key: value}})
    except ValidationError:
        return
    kept = session.choices
    if key not in kept or kept[key] != value:
        others = {other: chosen for other, chosen in kept.items() if other != key}
        change(choices=dict([*others.items(), (key, value)][-MOST_CHOICES:]))


def add_plan_job(id: str) -> None:
    """Count an optimisation job as the newest."""
    change(plan_jobs=[id, *(known for known in session.plan_jobs if known != id)])


def study_jobs() -> list[str]:
    """Ids of the newest study of every kind, and of those that were started shortly before."""
    return [*session.study_jobs.values(), *session.earlier_studies]


def set_study_job(kind: str, id: str) -> None:
    """Count a study as the newest of its kind; the one before it may still run."""
    newest, earlier = session.study_jobs, session.earlier_studies
    if newest.get(kind) not in (id, None):
        earlier = [newest[kind], *(known for known in earlier if known not in (id, newest[kind]))][:MOST_EARLIER]
    change(study_jobs={**newest, kind: id}, earlier_studies=earlier)


def add_launch_job(id: str) -> None:
    """Count a launch as the newest."""
    change(launch_jobs=[id, *session.launch_jobs])


def name_plan(id: str, name: str) -> None:
    """Give a plan a name; an empty one gives it back the name that describes it."""
    others = {plan: known for plan, known in session.plan_names.items() if plan != id}
    name = " ".join(name.split())[:120]
    change(plan_names={**others, id: name} if name else others)


def remove_plan(id: str, name: str) -> None:
    """Take a plan, called `name`, from the list; the open one is closed."""
    removed = RemovedPlan(name=name, job=max(session.plan_jobs, default=""))
    change(removed_plans={**_removed_but(id), id: removed}, plan=None if session.plan == id else session.plan)


def restore_plan(id: str) -> None:
    """Bring a removed plan back to the list."""
    change(removed_plans=_removed_but(id))


def _removed_but(id: str) -> dict[str, RemovedPlan]:
    return {plan: removed for plan, removed in session.removed_plans.items() if plan != id}


def take_plan(id: str, job: str) -> None:
    """Count a plan that the study `job` found to the candidates of the session."""
    change(taken={id: job, **session.taken}, removed_plans=_removed_but(id))


def add_saved(id: str, number: int | None) -> None:
    """Count a plan of the team, with its number in the team's database, to the candidates of the session."""
    if session.saved.get(id, -1) != number:
        others = {plan: known for plan, known in session.saved.items() if plan != id}
        change(saved={id: number, **others}, removed_plans=_removed_but(id))


def add_imported(plan: Plan) -> None:
    """Keep a plan that came in a file, and count it to the candidates of the session."""
    known = {plan.id: store.save_document(plan), **session.imported}
    change(imported=known, removed_plans=_removed_but(plan.id))


def person() -> str | None:
    """The name that a person typed, in this session or, as their browser recalls it, in another."""
    return session.person or visit.recalled_person


def begin_tour() -> None:
    """Show the guide through the sample, unless this session has seen it."""
    if session.tour is None:
        change(tour="on")
