"""The drawing board on a page: its edits become the open cluster, the open plan can be laid over it."""

import numpy as np
import streamlit as st

from app import cached, state
from app.components.cluster_canvas import Overlay, cluster_canvas, edit_of
from app.text import plain
from engine.cluster import Cluster
from engine.errors import InputError
from engine.plan import Plan
from engine.problem import Problem
from engine.units import share

KEY = "cluster-canvas"


def board(cluster: Cluster | None) -> None:
    """The board for the open cluster, or an empty one to draw on."""
    overlay, fitting = None, _fitting(cluster)
    if fitting and st.toggle(
        "Lay the open plan over the drawing", help="experts and tokens of every GPU, the busiest port"
    ):
        overlay = overlay_of(*fitting)
    answered, complaint = state.drawn()
    cluster_canvas(cluster, answered, overlay, KEY, _take)
    if complaint:
        st.error(f"{plain(complaint)} The last valid cluster stays open.", icon=":material/error:")


def _fitting(cluster: Cluster | None) -> tuple[Plan, Problem] | None:
    """The open plan and problem, where they are for this cluster."""
    try:
        plan, problem = cached.open_plan(), cached.problem()
    except InputError:
        return None
    fits = cluster and plan and problem and plan.placement.gpus == len(cluster.gpus)
    return (plan, problem) if fits else None


def _take() -> None:
    edit = edit_of(KEY)
    if edit is None or edit.serial <= state.drawn()[0]:
        return
    complaint = None
    try:
        state.open_cluster(Cluster.from_dict(edit.cluster, "the drawing"))
    except InputError as error:
        complaint = f"{error}."
    state.answer_drawing(edit.serial, complaint)


def overlay_of(plan: Plan, problem: Problem) -> Overlay:
    """Mean over MoE layers of the tokens that every GPU's experts take, and the port that is busy longest."""
    served = np.einsum("lre,leg->g", problem.demand, plan.placement.share)
    experts = plan.placement.slots.mean(axis=0)
    part = served / served.sum() if served.sum() else served
    gpus = tuple(
        {
            "text": f"{count:.3g} experts",
            "label": f"{count:.3g} experts a layer, {share(float(tokens))} of all tokens",
            "share": float(tokens / part.max()) if part.max() else 0.0,
        }
        for count, tokens in zip(experts, part, strict=True)
    )
    return Overlay(gpus, _bottleneck(plan, problem))


def _bottleneck(plan: Plan, problem: Problem) -> dict | None:
    """The port to or from the fabric that needs longest for its bytes of one dispatch and combine."""
    network = problem.network
    traffic = problem.traffic(plan.placement).sum(axis=0)
    over_fabric = np.where(np.eye(len(traffic), dtype=bool) | network.linked, 0.0, traffic)
    out, into = over_fabric.sum(axis=1), over_fabric.sum(axis=0)
    # What goes out in the dispatch comes back in the combine.
    seconds = np.stack([(out + into) / network.send, (out + into) / network.receive])
    if not seconds.max():
        return None
    way, rank = np.unravel_index(int(seconds.argmax()), seconds.shape)
    return {"rank": int(rank), "text": "busiest sender" if way == 0 else "busiest receiver"}
