"""What plans are made from: recordings, cluster, model, a second model, training step and costs of the session."""

import streamlit as st

from app.state import moment
from app.state.address import change
from engine import store
from engine.cluster import Cluster
from engine.errors import InputError
from engine.model import MoEModel
from engine.overlap.operator_graph import OperatorGraph
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


def graph() -> OperatorGraph | None:
    """The imported operators of the training step; None: those of a transformer."""
    digest = st.session_state.graph
    try:
        return store.load_document(OperatorGraph, digest) if digest else None
    except InputError:
        return None


def open_graph(graph: OperatorGraph | None) -> None:
    change(graph=store.save_document(graph) if graph else None)


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
