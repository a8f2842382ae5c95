"""The Timeline page of plans with more sends than can be drawn: bundles, and the sends of a chosen layer and GPUs."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from app.charts import gantt
from app.charts.step import longest_waits, stretch
from engine import store, units
from engine.catalogue import cluster_presets
from engine.cluster import Cluster, Node
from engine.costs import Datasheet
from engine.problem import make_problem
from engine.simulate import bound_of_plan, events, simulate, simulate_layers
from engine.systems import SYSTEMS, run
from engine.timeline import Timeline
from engine.training import balanced_load, usual_step
from engine.workload import RoutingTrace
from tests.cases.pages import button, field, press, visit
from tests.cases.sessions import ANOTHER, JOB, plan, problem_of
from tests.cases.steps import TOP_ONE_MODEL as MODEL
from tests.strategies import make_gpu, make_model

LAYERS = 40


@pytest.fixture
def app(two_plans: AppTest, monkeypatch: pytest.MonkeyPatch) -> AppTest:
    """The sample with two plans on the Timeline page, simulated with bundles."""
    st.cache_resource.clear()  # other tests have simulated the same plans
    monkeypatch.setattr(events, "MOST_SENDS", 0)
    yield visit(two_plans, "timeline")
    st.cache_resource.clear()


def drawn(app: AppTest) -> list[dict]:
    """The Gantt charts on the page."""
    specs = [json.loads(chart.proto.spec) for chart in app.get("plotly_chart")]
    return [spec for spec in specs if any(trace.get("name") == "Critical path" for trace in spec["data"])]


def bars(spec: dict) -> list[str]:
    """The tips of the bars of a chart."""
    return [text for trace in spec["data"] if trace["type"] == "bar" for text in trace["customdata"]]


def test_bundles_are_drawn_and_sends_once_a_layer_and_gpus_are_chosen(app: AppTest) -> None:
    problem, plan = problem_of(app), app.plans[0]
    (overview,) = drawn(app)
    assert " → " not in "".join(bars(overview)) and any("GPU 0 sends" in text for text in bars(overview))
    assert "without a gap" in " ".join(caption.value for caption in app.caption)
    app.toggle[0].set_value(True).run()
    assert not app.exception
    next(slider for slider in app.slider if slider.label == "MoE layer").set_value(3).run()
    field(app, "GPUs").set_value([5, 2]).run()
    assert not app.exception
    chosen = drawn(app)[-1]
    sends = [text for text in bars(chosen) if " → " in text]
    layer = simulate_layers(plan, problem, simulate(plan, problem), 3, 3).events
    wanted = layer[layer["resource"].isin([2, 5]) & (layer["peer"] >= 0)]
    assert len(sends) == len(wanted) and len(bars(chosen)) == layer["resource"].isin([2, 5]).sum()
    pairs = sorted(f"GPU {send.resource} → GPU {send.peer}" for send in wanted.itertuples())
    assert sorted(text.split("<br>")[1].split(" · ")[0] for text in sends) == pairs
    assert any("send by send, on 2 of 8 GPUs" in chart.proto.alt for chart in app.get("plotly_chart"))


@pytest.mark.parametrize(("order", "straight"), [("concurrent", True), ("two-tier", False), ("best", True)])
def test_a_placement_is_held_against_orders_with_relays(sample: AppTest, order: str, straight: bool) -> None:
    app = sample
    pairs = [Node(name=f"node {at}", gpus=(make_gpu(),) * 2, link_bandwidth=2e9) for at in range(4)]
    # With long start-ups the many steps of a two-tier order do not pay, although its bound is lower.
    app.session_state["cluster"] = Cluster(name="pairs", nodes=pairs, latency=1e-3 if order == "best" else 0.0)
    problem = problem_of(app)
    (eplb,) = plan(problem, JOB, {"name": "eplb", "options": {"order": order}})
    assert (eplb.send_order.mode != "two-tier") is straight
    app.session_state["plan_jobs"], app.session_state["plan"] = [JOB], eplb.id
    shown = {metric.label: metric.value for metric in visit(app, "timeline").metric}
    least, without = (bound_of_plan(eplb, problem, straight=only) for only in (False, True))
    assert shown["Bound for this placement"] == units.seconds(least)
    assert simulate(eplb, problem).total >= least
    assert shown.get("Bound without relays") == (units.seconds(without) if straight else None)
    assert not straight or units.seconds(least) != units.seconds(without)
    assert eplb.claim.bound == pytest.approx(least)
    (line,) = [note["text"] for note in drawn(app)[0]["layout"]["annotations"] if note["text"].startswith("bound ")]
    first, last = next(slider for slider in app.slider if slider.label == "MoE layers").value
    assert line == f"bound {units.seconds(bound_of_plan(eplb, problem, first, last))}, dashed"


@pytest.fixture(scope="module")
def large() -> tuple[Timeline, Timeline]:
    """40 layers on 48 GPUs, with bundles and with every send."""
    cluster = cluster_presets()["mixed-8"].cluster
    nodes = tuple(node.model_copy(update={"name": f"{node.name} {turn}"}) for turn, node in product(range(6), cluster.nodes))
    cluster = cluster.model_copy(update={"nodes": nodes})
    gpus = len(cluster.gpus)
    experts = np.random.default_rng(2).integers(0, gpus, (2000, LAYERS, 1)).astype(np.int16)
    problem = make_problem(RoutingTrace("log", experts, gpus), cluster, make_model(LAYERS, gpus), Datasheet())
    plan = run(SYSTEMS["linear"], problem).result.solution
    whole = simulate(plan, problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "MOST_SENDS", 0)
        return simulate(plan, problem), whole


@pytest.mark.parametrize(("first", "last"), [(0, LAYERS - 1), (7, 9), (5, 5)])
def test_never_more_bars_than_a_browser_can_draw(large, first: int, last: int) -> None:
    shown = {f"plan {number}": large[0] for number in range(3)}
    layers = gantt.drawable(shown, first, last, gantt.MOST_LANES)
    assert layers[0] == first <= layers[1] <= last
    parts, count = gantt.fewer_lanes(shown, *layers, gantt.MOST_LANES)
    figure = gantt.gantt(parts, *layers, "title", lanes=count)
    assert 0 < sum(len(trace.x) for trace in figure.data if trace.type == "bar") <= gantt.MOST_BARS
    assert figure.layout.height == gantt.HEIGHT


def test_of_chosen_gpus_every_send_is_drawn_under_their_own_names(large) -> None:
    whole = replace(large[1], events=large[1].layers(4, 4).events)
    part, count = gantt.only(whole, [3, 40])
    assert count == 2 and part.resources[:2] == (whole.resources[3], whole.resources[40])
    assert sorted(part.resources) == sorted(whole.resources)
    named = [
        [(timeline.resources[event.resource], timeline.resources[event.peer]) for event in own.itertuples()]
        for timeline, own in ((part, part.events), (whole, whole.events[whole.events["resource"].isin([3, 40])]))
    ]
    assert named[0] == named[1] and len(named[0]) > 10


@pytest.mark.parametrize("gpus", [8, 64, 320, 1024])
@pytest.mark.parametrize("models", [1, 2])
def test_the_sends_of_so_many_gpus_can_be_drawn(gpus: int, models: int) -> None:
    count = gantt.gpus_with_sends(gpus, models)
    assert count >= 1 and (count == 1 or count * models * (2 * (gpus - 1) + 3) <= gantt.MOST_BARS)
    assert (count + 1) * models * (2 * (gpus - 1) + 3) > gantt.MOST_BARS


def test_a_view_is_moved_zoomed_led_to_the_critical_path_and_kept_in_the_address(planned: AppTest) -> None:
    views(visit(planned, "timeline"), "Critical path")


def test_a_training_step_is_moved_zoomed_and_led_to_the_longest_waits(two_plans: AppTest) -> None:
    app = visit(two_plans, "timeline")
    step = usual_step(MODEL, 2)
    cluster = cluster_presets()["lancet-p3dn-2-nodes"].cluster.part([0, 8])
    problem = make_problem(balanced_load(MODEL), cluster, MODEL, Datasheet(), step=step)
    store.save_workload(problem.workload)
    (made,) = plan(problem, ANOTHER, "deepspeed")
    known = {"cluster": cluster, "model": MODEL, "step": step, "workload": None, "plan_jobs": [ANOTHER], "plan": made.id}
    for name, value in known.items():
        app.session_state[name] = value
    views(visit(app, "timeline"), "Longest wait")
    timeline = simulate(made, problem)
    begin, end = longest_waits(stretch(timeline))[0]
    waits = timeline.exposed_intervals(stretch(timeline).lanes[0])
    assert end - begin == pytest.approx((waits[:, 1] - waits[:, 0]).max())
    press(app, "Longest wait")
    low, high = seen(app)
    assert low <= begin < end <= high


def seen(app: AppTest) -> tuple[float, float]:
    """The part of the time that the address has."""
    (view,) = np.atleast_1d(app.query_params["view"])
    low, high = view.split("~")
    return float(low), float(high)


def views(app: AppTest, lead: str) -> None:
    """Press every button that moves the chart; the chart shows the address' part, and nothing of another address is lost."""

    def drawn_part() -> float:
        """The share of the time that the chart shows."""
        layout = json.loads(app.get("plotly_chart")[0].proto.spec)["layout"]
        own = next(axis for name, axis in layout.items() if name.startswith("xaxis") and "rangeslider" in axis)
        low, high = own["range"]
        return (high - low) / own["rangeslider"]["range"][1] * 1.02

    assert "view" not in app.query_params and button(app, "All").disabled and drawn_part() == pytest.approx(1.02)
    press(app, "Zoom in")
    low, high = seen(app)
    assert low > 0 and high == pytest.approx(3 * low, rel=1e-4), "the middle half"
    assert drawn_part() == pytest.approx(0.5, rel=1e-3)
    press(app, "Later")
    assert seen(app) == pytest.approx((1.5 * low, high + low / 2), rel=1e-4)
    press(app, lead)
    first = seen(app)
    press(app, lead)
    assert seen(app) != first
    press(app, "All")
    assert "view" not in app.query_params
    app.query_params["view"] = "0.1~nonsense"
    app.run()
    assert not app.exception and not app.error
