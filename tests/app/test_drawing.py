"""The drawing board's Python: edits that are taken, refused or out of date, and the drawing of a plan."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from app import state
from app.cluster import board
from app.components.cluster_canvas import Edit
from engine import store
from engine.catalogue import cluster_presets, gpu_types
from engine.cluster import Cluster, Node
from engine.costs import Datasheet
from engine.plan import Placement
from engine.problem import Problem, make_problem
from engine.workload import RoutingTrace
from tests.cases.pages import said, visit
from tests.cases.plans import plan_of
from tests.cases.sessions import TOKEN, open_plan
from tests.strategies import make_model

LAYERS, EXPERTS, GPUS = 3, 6, 5


@pytest.fixture
def session(empty_session: None):
    """An empty session, and a way to let the board send an edit: send(serial, cluster)."""

    def send(serial: int, cluster: dict | None) -> None:
        st.session_state[board.KEY] = {"edit": {"serial": serial, "cluster": cluster}}
        board._take()

    return send


def drawn(name: str = "mixed-8") -> dict:
    return cluster_presets()[name].cluster.model_dump(mode="json")


def test_an_edit_becomes_the_open_cluster_and_a_new_table_but_not_one_that_was_answered_already(session) -> None:
    before = state.visit.edit_round
    session(4, drawn())
    assert state.visit.edit_round == before + 1
    for serial in (4, 3):
        session(serial, drawn("exflow-4-nodes"))
        assert state.session.cluster == cluster_presets()["mixed-8"].cluster
        assert state.visit.drawn == (4, None)
    session(7, None)
    assert board.edit_of(board.KEY) == Edit(7, None) and state.session.cluster is None, "an emptied board closes it"
    assert json.loads(store.load_session(TOKEN))["cluster"] is None


@pytest.mark.parametrize(
    "fault, reason",
    [
        (lambda drawing: drawing["nodes"][0]["gpus"][0].update(memory=-1.0), "memory"),
        (lambda drawing: drawing["nodes"][0]["gpus"][0].update(send_bandwidth=None), "send_bandwidth"),
        (lambda drawing: drawing["nodes"][1].update(name=drawing["nodes"][0]["name"]), "two nodes are called"),
        (lambda drawing: drawing["nodes"][0].update(colour="red"), "colour"),
        (lambda drawing: drawing.update(nodes=[]), "nodes"),
        (lambda drawing: drawing.update(nodes="<b>x</b>"), "nodes"),
    ],
)
def test_a_drawing_that_cannot_be_is_refused_with_its_reason_and_the_last_one_stays(session, fault, reason) -> None:
    session(1, drawn("exflow-4-nodes"))
    wrong = drawn()
    fault(wrong)
    session(2, wrong)
    assert state.session.cluster == cluster_presets()["exflow-4-nodes"].cluster
    serial, complaint = state.visit.drawn
    assert serial == 2 and complaint.startswith("the drawing: ") and reason in complaint
    state.open_cluster(cluster_presets()["mixed-8"].cluster)
    assert state.visit.drawn == (2, None)


def mixed_cluster(link: float | None) -> Cluster:
    """Five GPUs of three types on two nodes, ports of different speeds each way."""
    ports = ((5e9, 4e9), (3e9, 6e9), (2e9, 2e9), (1.5e9, 3e9), (2e9, 1e9))
    kinds = ("H100", "H100", "A100-40", "V100-16", "V100-16")
    gpus = tuple(gpu_types()[kind].gpu(*speeds) for kind, speeds in zip(kinds, ports, strict=True))
    nodes = (Node(name="a", gpus=gpus[:3], link_bandwidth=link), Node(name="b", gpus=gpus[3:]))
    return Cluster(name="mixed", nodes=nodes)


def random_placement(random: np.random.Generator, spare: int) -> Placement:
    """Every expert on some GPU, `spare` more copies anywhere, and one GPU that is left out of layer 0."""
    rows = []
    for layer in range(LAYERS):
        row: list[list[int]] = [[] for _ in range(GPUS)]
        for expert in [*range(EXPERTS), *random.integers(0, EXPERTS, spare).tolist()]:
            row[int(random.integers(1 if layer == 0 else 0, GPUS))].append(expert)
        rows.append(tuple(tuple(experts) for experts in row))
    return Placement(experts=EXPERTS, experts_of_gpu=tuple(rows), model_layers=(0, 2, 4))


def random_trace(random: np.random.Generator, k: int) -> RoutingTrace:
    experts = np.argsort(random.random((40, LAYERS, EXPERTS)), axis=2)[:, :, :k].astype(np.int16)
    source = random.integers(0, GPUS, 40).astype(np.int16)
    return RoutingTrace("random", experts, EXPERTS, source_rank=source)


def counted(trace: RoutingTrace, placement: Placement, layers: range) -> tuple[np.ndarray, np.ndarray]:
    """Token by token: float[gpu] tokens served, float[src, dst] token copies sent."""
    sent = np.zeros((GPUS, GPUS))
    for token, source in enumerate(trace.source_rank):
        for layer in layers:
            for expert in trace.experts[token, layer]:
                homes = [gpu for gpu, slots in enumerate(placement.experts_of_gpu[layer]) for slot in slots if slot == expert]
                for gpu in homes:
                    sent[source, gpu] += 1 / len(homes)
    return sent.sum(axis=0), sent


def slowest_port(sent: np.ndarray, cluster: Cluster) -> tuple[float, set[tuple[int, bool, bool]]]:
    """Seconds of the port that needs longest for the bytes and their way back, and all (rank, fabric, sends) so slow."""
    node = cluster.node_of_gpu
    link = [cluster.nodes[rank].link_bandwidth for rank in node]
    seconds: dict[tuple[int, bool, bool], float] = defaultdict(float)
    for src, dst in permutations(range(GPUS), 2):
        fabric = bool(node[src] != node[dst] or link[src] is None)
        for here, there in ((src, dst), (dst, src)):
            out = cluster.gpus[here].send_bandwidth if fabric else link[here]
            into = cluster.gpus[there].receive_bandwidth if fabric else link[there]
            seconds[here, fabric, True] += sent[src, dst] / out
            seconds[there, fabric, False] += sent[src, dst] / into
    longest = max(seconds.values())
    return longest, {key for key, value in seconds.items() if value > longest * (1 - 1e-9)}


@pytest.mark.parametrize("link", [None, 1e9, 5e10])
@pytest.mark.parametrize("layer", [None, 0, 2])
@pytest.mark.parametrize("two", [False, True])
def test_an_overlay_is_what_counting_token_by_token_says(link: float | None, layer: int | None, two: bool) -> None:
    random = np.random.default_rng(5)
    cluster = mixed_cluster(link)
    model = make_model(LAYERS, EXPERTS, k=2)
    first, other = random_trace(random, 2), random_trace(random, 2)
    problem = make_problem(first, cluster, model, Datasheet(), (other, model) if two else None)
    placements = [random_placement(random, 3), *([random_placement(random, 1)] if two else [])]
    overlay = board.overlay_of(plan_of(*placements), problem, layer)

    layers = range(LAYERS) if layer is None else range(layer, layer + 1)
    counts = [counted(trace, placement, layers) for trace, placement in zip((first, other), placements, strict=False)]
    served, sent = sum(tokens for tokens, _ in counts), sum(bytes for _, bytes in counts) * model.bytes_per_token
    assert [gpu.share for gpu in overlay.gpus] == pytest.approx(served / served.max())
    longest, slowest = slowest_port(sent, cluster)
    bottleneck = overlay.bottleneck
    assert bottleneck.seconds == pytest.approx(longest)
    assert (bottleneck.rank, bottleneck.fabric, bottleneck.sends) in slowest
    assert f"GPU {bottleneck.rank}'s port" in bottleneck.text


def small_problem(**changes) -> Problem:
    random = np.random.default_rng(1)
    model = make_model(LAYERS, EXPERTS, k=1)
    return make_problem(replace(random_trace(random, 1), **changes), mixed_cluster(None), model, Datasheet())


def test_experts_are_named_layer_by_layer() -> None:
    rows = (((0, 1), (2,), (3,), (4,), (5,)), ((5,), (4,), (3, 3), (2,), (1, 0)), ((), (0,), (1,), (2, 3), (4, 5)))
    plan = plan_of(Placement(experts=EXPERTS, experts_of_gpu=rows, model_layers=(0, 2, 4)))
    overlay = board.overlay_of(plan, small_problem())
    assert overlay.gpus[0].layers == ("layer 0: 0 1", "layer 2: 5", "layer 4: none")
    assert [gpu.text for gpu in overlay.gpus] == [*("1 expert", "1 expert", "1.33 experts", "1.33 experts", "1.67 experts")]
    of_layer = board.overlay_of(plan, small_problem(), 1)
    assert [gpu.text for gpu in of_layer.gpus] == ["E 5", "E 4", "E 3 3", "E 2", "E 0 1"]


def test_without_tokens_nothing_is_busy() -> None:
    nothing = np.full((4, LAYERS, 1), -1, dtype=np.int16)
    plan = plan_of(random_placement(np.random.default_rng(2), 0))
    overlay = board.overlay_of(plan, small_problem(experts=nothing, source_rank=None))
    assert overlay.bottleneck is None
    assert {gpu.share for gpu in overlay.gpus} == {0.0}


def laid_over(app: AppTest) -> list:
    """The toggle that lays the open plan over the drawing, where there is one."""
    return [toggle for toggle in app.toggle if toggle.label.startswith("Overlay the open plan")]


def test_the_open_plan_is_offered_for_its_own_cluster_only(sample: AppTest) -> None:
    app = visit(sample, "cluster")
    assert not laid_over(app)
    open_plan(app, "linear", {})
    visit(app, "cluster")
    laid_over(app)[0].set_value(True).run()
    assert not app.exception, app.exception
    assert "port to the fabric is busy longest" in said(app.caption)
    app.select_slider[0].set_value(2).run()
    assert "of this layer" in said(app.caption)
    next(button for button in app.button if button.key == "strip-cluster-exflow-4-nodes").click().run()
    assert not laid_over(app)
    assert "cannot be laid over this drawing: the plan" in said(app.caption)
