"""What plans are made from: recordings, cluster, model, a second model, training step and costs of the session.

What a person chose on the pages' widgets, by the keys of these: kept with the session.
"""

from typing import Any

import streamlit as st
from pydantic import ValidationError

from app.state import moment
from app.state.address import change
from app.state.moment import draw_anew
from app.state.session import MOST_CHOICES, Session
from engine import store
from engine.cluster import Cluster
from engine.costs.pair_cluster import MeasuredPairs
from engine.errors import InputError
from engine.model import MoEModel
from engine.overlap.operator_graph import OperatorGraph
from engine.plan import Travel
from engine.serving.step import ServingStep
from engine.training import TrainingStep
from engine.workload import Workload


def is_empty() -> bool:
    """Whether nothing at all is open."""
    return not workloads() and cluster() is None and model() is None


def workloads() -> dict[str, str]:
    """Name of every recording in the session, by digest."""
    return st.session_state.workloads


def workload_digest() -> str | None:
    """Digest of the open recording."""
    return st.session_state.workload


def open_workload(workload: Workload) -> None:
    """Add a recording to the session and open it."""
    digest = store.save_workload(workload)
    change(workloads={**workloads(), digest: workload.name}, workload=digest)


def choose_workload(digest: str) -> None:
    """Open a recording that the session already has."""
    change(workload=digest)


def remove_workload(digest: str) -> None:
    """Take a recording out of the session; where it was open, the one added last is open now."""
    left = {other: name for other, name in workloads().items() if other != digest}
    change(
        workloads=left,
        workload=next(reversed(left), None) if digest == workload_digest() else workload_digest(),
        model_of={other: model for other, model in st.session_state.model_of.items() if other != digest},
        second=None if digest == second() else second(),
        others=[other for other in st.session_state.others if other != digest],
    )


def add_recording(workload: Workload, model: MoEModel) -> str:
    """Add a recording to the session without opening it, with the model that it was made with; returns its digest."""
    digest = store.save_workload(workload)
    change(workloads={**workloads(), digest: workload.name}, model_of={**st.session_state.model_of, digest: model})
    return digest


def cluster() -> Cluster | None:
    return st.session_state.cluster


def open_cluster(cluster: Cluster | None, edited: bool = False) -> None:
    """Open a cluster, or none; `edited` when it comes from the table, which then must keep its own state."""
    if not edited:
        moment.begin_table()
    moment.answer_drawing(moment.drawn()[0], None)  # a complaint about the drawing before is over
    change(cluster=cluster)


def pairs_digest() -> str | None:
    """Digest of the pairs of GPUs that were measured last."""
    return st.session_state.pairs


def open_pairs(pairs: MeasuredPairs) -> None:
    """Keep pairs, to be shown beside the clusters of their hosts."""
    change(pairs=store.save_document(pairs))


def model() -> MoEModel | None:
    return st.session_state.model


def open_model(model: MoEModel) -> None:
    change(model=model)


def model_of(digest: str) -> MoEModel | None:
    """The model that a recording of the session was made with, where it is known."""
    return st.session_state.model_of.get(digest)


def remember_model(digest: str, model: MoEModel) -> None:
    """Keep the model that a recording was made with, so that it can be opened as a second model later."""
    if model_of(digest) != model:
        change(model_of={**st.session_state.model_of, digest: model})


def second() -> str | None:
    """Digest of the second model's recording; its model is `model_of` it."""
    return st.session_state.second


def open_second(digest: str | None) -> None:
    """Let a second model share the cluster, or no longer (None)."""
    change(second=digest)


def others() -> list[str]:
    """Digests of the recordings that a plan must serve as well."""
    return [digest for digest in st.session_state.others if digest in workloads() and digest != workload_digest()]


def set_others(digests: list[str]) -> None:
    if digests != st.session_state.others:
        change(others=digests)


def step() -> TrainingStep | None:
    """The training step that is to be planned; None: inference."""
    return st.session_state.step


def open_step(step: TrainingStep | None) -> None:
    """Plan for a training step of the open model, or for inference (None); the step is remembered for that model."""
    if step is None or model() is None:
        change(step=step)
    else:
        change(step=step, steps={**st.session_state.steps, model().digest: step})


def step_of_model() -> TrainingStep | None:
    """The training step that was last described for the open model."""
    return st.session_state.steps.get(model().digest) if model() else None


def serving() -> ServingStep | None:
    """The step of a serving engine that plans for inference are held against; None: the MoE layers alone are."""
    return None if step() or second() else st.session_state.serving


def open_serving(serving: ServingStep | None) -> None:
    """Look at plans in a serving step of the open model, or no longer (None); the step is remembered for that model."""
    if serving is None or model() is None:
        change(serving=serving)
    else:
        change(serving=serving, servings={**st.session_state.servings, model().digest: serving})


def serving_of_model() -> ServingStep | None:
    """The serving step that was last described for the open model."""
    return st.session_state.servings.get(model().digest) if model() else None


def config_of(model: MoEModel) -> str | None:
    """Where the `config.json` of a model is, see `app.state.session.Config`; None where none came with it."""
    return st.session_state.configs.get(model.digest)


def remember_config(model: MoEModel, config: str) -> None:
    """Keep where the `config.json` of a model is."""
    if config_of(model) != config:
        change(configs={**st.session_state.configs, model.digest: config})


def graph() -> OperatorGraph | None:
    """The imported operators of the training step; None: those of a transformer."""
    digest = st.session_state.graph
    try:
        return store.load_document(OperatorGraph, digest) if digest else None
    except InputError:
        return None


def open_graph(graph: OperatorGraph | None) -> None:
    change(graph=store.save_document(graph) if graph else None)


def travel() -> Travel | None:
    """How tokens are to travel under new plans; None: one row per token copy."""
    return st.session_state.travel


def set_travel(travel: Travel | None) -> None:
    if travel != st.session_state.travel:
        change(travel=travel)


def cost() -> dict:
    """The cost source, as `engine.costs.choice` writes it."""
    return st.session_state.cost


def open_cost(cost: dict) -> None:
    if cost != st.session_state.cost:
        change(cost=cost)


def cost_sources() -> dict[str, dict]:
    """Cost sources read from files in this session, by name, as `engine.costs.choice` writes them."""
    return st.session_state.sources


def add_cost_source(name: str, cost: dict) -> None:
    change(sources={**cost_sources(), name: cost})


def choice(key: str, default: Any = None) -> Any:
    """What a person last chose on a widget; `default` where they never did."""
    return st.session_state.choices.get(key, default)


def forget_choices(*keys: str) -> None:
    """Let widgets show their defaults again."""
    kept = {key: chosen for key, chosen in st.session_state.choices.items() if key not in keys}
    draw_anew(keys)
    if kept != st.session_state.choices:
        change(choices=kept)


def keep_choice(key: str, value: Any) -> None:
    """Keep what a person chose, of the newest MOST_CHOICES widgets. value: of `session.Choice`, or a tuple of such; what a
    session cannot keep, as a text of a thousand lines, it does not."""
    value = list(value) if isinstance(value, tuple) else value
    try:
        Session.model_validate({"choices": {key: value}})
    except ValidationError:
        return
    kept = st.session_state.choices
    if key not in kept or kept[key] != value:
        others = {other: chosen for other, chosen in kept.items() if other != key}
        change(choices=dict([*others.items(), (key, value)][-MOST_CHOICES:]))
