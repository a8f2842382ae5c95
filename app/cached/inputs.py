"""The open inputs: recordings, the problem that all inputs make, and the devices of this machine."""

import json
from copy import copy
from typing import Any

import streamlit as st

from app import state
from app.cached.plans import candidates
from engine import store
from engine.cluster import Cluster
from engine.compare.inspection import Inspection
from engine.compare.inspection import inspect as engine_inspect
from engine.costs import choice as cost_choice
from engine.costs.pair_cluster import MeasuredPairs, PairCluster
from engine.errors import InputError
from engine.goal import Goal
from engine.launch.places.devices import Devices
from engine.launch.places.devices import attached as engine_attached
from engine.launch.preparation.place_checks import testbed_fault as engine_testbed_fault
from engine.model import MoEModel
from engine.plan import Placement
from engine.problem import Problem, make_problem
from engine.training import balanced_load
from engine.workload import Workload, digest_of


def workload() -> Workload | None:
    """The open recording; None when there is none or the data folder has lost it."""
    digest = state.session.workload
    try:
        return recording(digest) if digest else None
    except InputError:
        return None


def recording(digest: str) -> Workload:
    """A recording of the session, under its name there: others may have saved the same contents under another name."""
    original = _workload(digest)
    name = state.session.workloads.get(digest, original.name)
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
    """The open recording's inspection, against the model that it was made with, else against the open one."""
    digest = state.session.workload
    model = state.session.model_of.get(digest) or state.session.model
    return _inspection(digest, model and model.digest, workload(), model)


@st.cache_resource(max_entries=16, show_spinner="Checking the recording")
def _inspection(digest: str, of_model: str | None, _workload: Workload, _model: MoEModel | None) -> Inspection:
    return engine_inspect(_workload, _model)


def measured_pairs() -> PairCluster | None:
    """The open cluster with the measured pairs of its hosts; None if none were measured, or the data folder has lost them."""
    digest, cluster = state.session.pairs, state.session.cluster
    if digest is None or cluster is None:
        return None
    try:
        return _measured_pairs(digest, cluster)
    except InputError:
        return None


@st.cache_resource(max_entries=16, show_spinner=False, hash_funcs={Cluster: lambda cluster: cluster.digest})
def _measured_pairs(digest: str, cluster: Cluster) -> PairCluster:
    return store.load_document(MeasuredPairs, digest).beside(cluster)


def problem() -> Problem | None:
    """The problem that the open inputs make; None while something is missing. Raises InputError when the parts do not fit."""
    first, cluster, model, step = workload(), state.session.cluster, state.session.model, state.session.step
    if model is not None and step is not None:
        first = first if step.routing == "recorded" else _fitting_or_balanced(first, model)
    elif model is not None and state.serving() is not None:
        first = _fitting_or_balanced(first, model)
    if first is None or cluster is None or model is None:
        return None
    second = None
    if (digest := state.session.second) and step is None:
        second = (recording(digest), state.session.model_of.get(digest))
    alone = second is None and step is None
    others = tuple(recording(digest) for digest in state.others()) if alone else ()
    in_use = placement_in_use() if alone else None
    names = tuple(part.name for part in (first, *others, *(second or ())))
    graph, cost = (state.graph() if step else None), state.session.cost
    travel = state.session.travel if step is None else None
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
        travel and travel.digest,
        digest_of(json.dumps(cost, sort_keys=True)),
    )
    parts = {
        "workload": first,
        "cluster": cluster,
        "model": model,
        "cost": cost_choice.from_dict(cost),
        "second": second,
        "others": others,
        "in_use": in_use,
        "step": step,
        "graph": graph,
        "travel": travel,
    }
    # By name: for every argument without one Streamlit works out the function's signature anew.
    return _problem(key=key, _parts=parts)


@st.cache_resource(max_entries=16, show_spinner=False)
def _problem(key: tuple, _parts: dict[str, Any]) -> Problem:
    return make_problem(**_parts)


def _fitting_or_balanced(recording: Workload | None, model: MoEModel) -> Workload:
    """Return the recording, or balanced loads if it does not fit: whole steps can be studied before anything was recorded."""
    return recording if recording is not None and model_fault(recording, model) is None else balanced_load(model)


def model_fault(recording: Workload, model: MoEModel) -> str | None:
    """Why a recording is not of a model; None if it may be."""
    try:
        model.check_recording(recording.layers, recording.num_experts, recording.k, recording.name)
    except InputError as error:
        return str(error)
    return None


def placement_in_use() -> Placement | None:
    """The placement of the plan that is marked as deployed, if it fits the open recording and cluster."""
    candidate = candidates().get(state.session.in_use or "")
    recording, cluster = workload(), state.session.cluster
    if candidate is None or recording is None or cluster is None or candidate.plan.goal is Goal.TWO_MODELS:
        return None
    placement = candidate.plan.placement
    fits = (recording.layers, recording.num_experts, len(cluster.gpus))
    return placement if (placement.layers, placement.experts, placement.gpus) == fits else None


@st.cache_resource(ttl=60, show_spinner="Looking for devices")
def attached() -> Devices:
    return engine_attached()


@st.cache_resource(ttl=60, show_spinner="Trying whether a testbed can be built here")
def testbed_fault() -> str | None:
    """Why no testbed can be built on this machine; None when one can."""
    return engine_testbed_fault()
