"""The figures, charts and words of a brief, each held against a count of its own."""

from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from app.charts import review as charts
from app.charts.gantt import fewer_lanes
from app.review import compare, plan_list
from app.review import store as review_store
from app.review.brief import brief_of, risk_in_words, with_risks, words
from engine.costs import Datasheet
from engine.plan import OrderMode, Overlap, PartitionRange, Pipeline, Placement, Plan, Priority, Schedule, SendOrder
from engine.problem import Problem, make_problem
from engine.result import Provenance
from engine.simulate import simulate
from engine.systems import SYSTEMS, run
from engine.workload import RoutingTrace
from tests.app.test_launch_page import problem_of
from tests.app.test_pages import visit

pytestmark = pytest.mark.slow


@pytest.fixture
def app(ana: AppTest) -> AppTest:
    """Ana's session, with two plans."""
    return visit(ana, "optimise")


@pytest.fixture
def problem(app: AppTest) -> Problem:
    return problem_of(app)


def test_the_worst_recording_is_the_one_with_the_least_gain(app: AppTest, problem: Problem) -> None:
    trace = problem.workload
    others = [RoutingTrace(name, (trace.experts + shift) % 16, 16) for name, shift in (("by 3", 3), ("by 8", 8))]
    small = RoutingTrace("of another size", trace.experts[:, :2] % 4, 4)
    ours, linear = app.plans[1], app.plans[0]
    brief = with_risks(brief_of(ours, problem), [*others, small])
    gains = {
        other.name: simulate(linear, problem.with_workload(other)).total
        / simulate(ours, problem.with_workload(other)).total
        for other in others
    }
    assert [(risk.recording, risk.gain) for risk in brief.risks] == [
        (name, pytest.approx(gains[name])) for name in sorted(gains, key=gains.get)
    ]
    assert list(brief.refused) == ["of another size"] and brief.worst.recording in risk_in_words(brief)


def test_the_load_of_every_gpu_is_counted_token_by_token(app: AppTest, problem: Problem) -> None:
    plan = app.plans[0]
    figure = charts.placement(plan, problem)
    counted = np.zeros((8, 8))
    for layer in range(8):
        for expert in problem.workload.experts[:, layer, 0]:
            counted[layer, int(plan.placement.gpu_of_expert[layer, expert])] += 1
    assert np.allclose(np.array(figure.data[0].z), counted / counted.mean(axis=1, keepdims=True))
    layer, gpu = np.unravel_index((counted / counted.mean(axis=1, keepdims=True)).argmax(), counted.shape)
    assert figure.layout.title.text.startswith(f"GPU {gpu} serves") and f"in layer {layer}:" in figure.layout.title.text


def test_of_many_gpus_those_are_drawn_that_the_others_wait_for(app: AppTest, problem: Problem) -> None:
    node = problem.cluster.nodes[0]
    many = problem.cluster.model_copy(
        update={"nodes": tuple(node.model_copy(update={"name": f"node {number}"}) for number in range(20))}
    )
    problem = make_problem(problem.workload, many, problem.model, Datasheet())
    whole = run(SYSTEMS["linear"], problem, {}).timeline
    other = run(SYSTEMS["random"], problem, {}).timeline
    parts, kept = fewer_lanes({"a": whole, "b": other}, 2, 3, charts.MOST_GPUS)
    part, beside = parts.values()
    assert part.resources == beside.resources, "lane by lane the same GPUs"
    assert kept >= charts.MOST_GPUS and len(part.resources) == 40 and sorted(part.resources) == sorted(whole.resources)
    lanes = [whole.resources.index(name) for name in part.resources]
    was = whole.events.loc[part.events.index]
    assert [lanes[lane] for lane in part.events["resource"]] == was["resource"].tolist()
    sends = part.events["peer"] >= 0
    assert [lanes[lane] for lane in part.events["peer"][sends]] == was["peer"][sends].tolist()
    for drawn, all_of_it in ((part, whole), (beside, other)):
        for layer in (2, 3):
            for kind in ("dispatch", "ffn", "combine"):
                ends = [
                    events[(events["layer"] == layer) & (events["kind"] == kind)]["end"].max()
                    for events in (drawn.events, all_of_it.events)
                ]
                assert ends[0] == ends[1]
    figure = charts.timelines({"a": whole, "b": whole}, (2, 3))
    assert "16 of 40 GPUs" in figure.layout.title.text and figure.layout.height < 1200
    small = simulate(app.plans[0], problem_of(app))
    assert fewer_lanes({"small": small}, 0, 1, charts.MOST_GPUS) == ({"small": small}, 8)


def test_the_difference_of_two_placements() -> None:
    ours = Placement(experts=2, experts_of_gpu=(((0,), (1,)), ((0,), (1,))), model_layers=(0, 1))
    theirs = Placement(experts=2, experts_of_gpu=(((1,), (0,)), ((0, 1), (1,))), model_layers=(0, 1))
    swapped = charts.difference(ours, theirs, ("a", "<b>"), 0)
    assert np.array_equal(swapped.data[0].z, [[-1, 1], [1, -1]])
    assert swapped.layout.title.text == "In layer 0, 2 expert copies sit on other GPUs in &lt;b&gt;"
    assert np.array_equal(charts.difference(ours, theirs, ("a", "b"), 1).data[0].z, [[0, 0], [0.5, -0.5]])
    assert np.array_equal(charts.difference(ours, theirs, ("a", "b")).data[0].z, [[-0.5, 0.5], [0.75, -0.75]])
    assert "place every expert alike" in charts.difference(ours, ours, ("a", "b")).layout.title.text


def test_times_beside_each_other_name_the_faster_one() -> None:
    fast, slow = (SimpleNamespace(total=total) for total in (1e-3, 1.6e-3))
    assert charts.against({"a": fast, "b": slow}) == "a takes 1 ms; b takes 1.6× as long"
    assert charts.against({"b": slow, "a": fast}) == "a takes 1 ms, 1.6× as fast as b"
    assert charts.against({"a": fast, "b": fast}) == "a takes 1 ms; b takes as long"
    assert plan_list.gain_in_list(0.737) == "0.737× as fast" and plan_list.gain_in_list(1.38) == "1.38×"
    assert compare._points(0.0164, 0.0156) == "+0.0 points"


def test_every_part_of_a_plan_has_its_sentence() -> None:
    twice = Placement(experts=2, experts_of_gpu=(((0, 1), (1,)),), model_layers=(0,))
    base = Plan(
        name="x", placement=twice, send_order=SendOrder(mode="concurrent"), provenance=Provenance(optimiser="x")
    )
    assert "1 of 2 with replicas (up to 2 copies); each GPU holds 1 to 2 experts per layer" in words(base, None)[0]
    assert "a plain all-to-all" in words(base, None)[1]
    phased = Schedule(src=(0,), dst=(1,), bytes=(1.0,), phase=(0,), duration=(1.0,))
    for mode in set(get_args(OrderMode)) - {"concurrent"}:
        order = SendOrder(mode=mode, dispatch=(phased,), combine=(phased,))
        assert words(base.model_copy(update={"send_order": order}), None)[1].startswith(
            "Sends the bytes of every dispatch"
        )
    step = base.model_copy(
        update={
            "priority": Priority(policy="priority", micro_op=3e7),
            "pipeline": Pipeline(forward=(2,), backward=(4,)),
            "overlap": Overlap(
                ranges=(PartitionRange(first="a", last="b", parts=4),), under={"dw": "a2a"}, irregular=True
            ),
        }
    )
    text = " ".join(words(step, None))
    for part in (
        "2 parts forward and 4 backward",
        "1 stretch of",
        "1 weight-gradient operator under",
        "only real tokens",
        "pieces of at most 30 MB and wait for all-to-alls",
    ):
        assert part in text
    assert "plain all-to-all" not in text


def test_numbers_that_databases_refuse_are_left_out() -> None:
    kept = review_store._finite({"a": [float("inf"), 1.5, {"b": float("nan")}], "c": (1, "x")})
    assert kept == {"a": [None, 1.5, {"b": None}], "c": [1, "x"]}
