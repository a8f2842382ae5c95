"""Simulated inference: sums, barriers, the check that recomputes them, and the figures read off a timeline. Sends folded into
bundles lose nothing that a figure needs, and the sends of a layer come back as they were."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import pandas as pd
import pytest
from hypothesis import strategies as st

from engine.compare.figures import metrics
from engine.compare.what_if import outlook
from engine.costs import Datasheet
from engine.errors import IllegalError
from engine.goal import Goal
from engine.network import off_diagonal
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.simulate import bound_of_plan, events, simulate, simulate_layers
from engine.simulate.events import waits
from engine.simulate.inference import bound_of_work
from engine.simulate.work import Load
from engine.store import load_timeline, save_timeline
from engine.systems import SYSTEMS, run
from engine.systems.pieces import linear_placement
from engine.timeline import COLUMNS, INFERENCE_KINDS, KINDS, NETWORK_KINDS, STREAMS, Timeline, balancedness, unions
from engine.workload import RoutingTrace
from tests.cases.examples import tried
from tests.cases.launch_plans import plan_with
from tests.cases.simulations import coherent_plans, planned
from tests.cases.two_models import pair_of_samples, plan_of, planned_pairs
from tests.oracles.plans import check_plan, check_timeline
from tests.strategies import NEEDS_ROWS, cluster_of, clusters, make_gpu, make_model, planned_or_skipped, seeds

EXACT = 1e-9
ONE_MODEL = [name for name, system in SYSTEMS.items() if Goal.INFERENCE in system.goals and name not in NEEDS_ROWS]
STEPS = ("gate", "dispatch", "ffn", "combine", "aggregate")


def timeline_of(*events: tuple) -> Timeline:
    """Two GPUs; events (gpu, stream, start, end, kind, layer, peer) of one model."""
    frame = pd.DataFrame([(*event[:-1], 0, event[-1], 1.0) for event in events], columns=list(COLUMNS))
    frame["stream"] = pd.Categorical(frame["stream"], categories=list(STREAMS))
    frame["kind"] = pd.Categorical(frame["kind"], categories=list(KINDS))
    return Timeline(frame, ("GPU 0", "GPU 1"), "measured", "by hand")


@tried(60, planned())
def test_steps_follow_one_another_and_add_up_to_what_check_plan_says_and_fit_the_metrics(case):
    plan, problem = case
    timeline = simulate(plan, problem)
    events = timeline.events
    assert check_plan(plan, problem) == pytest.approx(timeline.total, rel=EXACT)
    assert np.all(events["end"] >= events["start"])
    now, total, load = 0.0, 0.0, Load(problem, plan.placement, plan.travel)
    for layer in range(problem.workload.layers):
        for kind in STEPS:
            step = events[(events["layer"] == layer) & (events["kind"] == kind)]
            if len(step):
                assert step["start"].min() == pytest.approx(now, rel=EXACT, abs=1e-15)
                total += step["end"].max() - step["start"].min()
                now = step["end"].max()
            if kind in NETWORK_KINDS and plan.send_order.mode != "two-tier":  # which relays
                moved = np.zeros((problem.network.gpus,) * 2)
                np.add.at(moved, (step["resource"].to_numpy(int), step["peer"].to_numpy(int)), step["bytes"].to_numpy())
                wanted = off_diagonal((load.traffic if kind == "dispatch" else load.traffic_back)[layer])
                np.testing.assert_allclose(moved, wanted, rtol=EXACT)
    assert timeline.total == pytest.approx(total, rel=EXACT) == sum(timeline.seconds_of_kind().values())
    assert timeline.total >= bound_of_plan(plan, problem) * (1 - 1e-7)
    figures = metrics(plan, problem, timeline)
    assert figures.order_bound <= figures.total * (1 + 1e-7)
    for share in (figures.utilisation, figures.overlap, figures.balancedness, figures.kept_local):
        assert -EXACT <= share <= 1 + EXACT
    network = figures.seconds["dispatch"] + figures.seconds["combine"]
    assert figures.exposed_communication == pytest.approx(network, rel=1e-7, abs=1e-15)  # barriers hide nothing
    assert figures.bound is None  # the plan claims nothing
    json.dumps(figures.to_dict())
    again = Timeline.from_dict(json.loads(json.dumps(timeline.to_dict())))
    pd.testing.assert_frame_equal(again.events, events, check_dtype=len(events) > 0)
    for name in ("resources", "source", "cost_source"):
        assert getattr(again, name) == getattr(timeline, name)


@tried(30, planned(modes=("shared",), linked=False, symmetric=True, contended=False))
def test_a_shared_order_without_links_meets_the_bound_of_its_placement(case):
    plan, problem = case
    assert simulate(plan, problem).total == pytest.approx(bound_of_plan(plan, problem), rel=EXACT)


@tried(30, planned(linked=False))
def test_bound_is_the_busiest_port_beside_the_slowest_computation(case):
    plan, problem = case
    network, events = problem.network, simulate(plan, problem).events
    load = Load(problem, plan.placement, plan.travel)
    both_ways = load.traffic, load.traffic_back
    for layer, (bound, *matrices) in enumerate(zip(bound_of_work(load.work, network), *both_ways, strict=True)):
        steps = events[(events["layer"] == layer) & (events["stream"] == "compute")]
        wanted = sum(step["end"].max() - step["start"].min() for _, step in steps.groupby("kind", observed=True))
        for matrix in map(off_diagonal, matrices):
            ports = [*(matrix.sum(axis=1) / network.send), *(matrix.sum(axis=0) / network.receive)]
            wanted += max(ports) + (network.latency if matrix.any() else 0.0)
        assert bound == pytest.approx(wanted, rel=EXACT)


def test_exposed_communication_is_what_no_computation_covers():
    timeline = timeline_of(
        (0, "compute", 0.0, 2.0, "gate", 0, -1),
        (0, "network", 1.0, 4.0, "dispatch", 0, 1),
        (1, "compute", 3.0, 3.5, "ffn", 0, -1),
        (1, "network", 3.5, 5.0, "combine", 0, 0),
    )
    assert timeline.total == 5
    assert timeline.exposed_communication() == pytest.approx(2.5)  # 2 … 3 and 3.5 … 5
    assert timeline.overlap == pytest.approx(1 - 2.5 / 4)
    assert timeline.utilisation == pytest.approx((2 + 0.5) / 2 / 5)
    assert timeline.busy("network").tolist() == pytest.approx([4, 4])  # a send occupies both of its ends
    seconds = {"gate": 2, "ffn": 0.5, "dispatch": 3, "combine": 1.5}
    assert timeline.seconds_of_kind() == pytest.approx(dict.fromkeys(INFERENCE_KINDS, 0) | seconds)


def test_overlapping_events_of_a_lane_count_once_and_none_are_nothing():
    spans = (0.0, 4.0), (1.0, 2.0), (3.0, 6.0), (8.0, 10.0)
    timeline = timeline_of(*((0, "compute", *span, "ffn", 0, -1) for span in spans))
    assert timeline.busy("compute").tolist() == [8, 0]
    assert timeline.utilisation == pytest.approx(0.4)
    assert timeline.overlap == timeline.exposed_communication() == 0

    empty = timeline_of()
    assert (empty.total, empty.utilisation, empty.overlap) == (0, 0, 0)
    assert set(empty.seconds_of_kind().values()) == {0}


@tried(25, clusters(), fewest=4)
def test_a_workload_without_tokens_takes_no_time(cluster):
    trace = RoutingTrace("padding", np.full((3, 2, 1), -1, dtype=np.int16), 4)
    problem = Problem(trace, cluster, make_model(2, 4), Datasheet())
    for name in ONE_MODEL:
        result = planned_or_skipped(lambda name=name: run(SYSTEMS[name], problem)).result
        assert result.objective == check_plan(result.solution, problem) == 0


def test_balancedness_is_mean_over_largest():
    load = np.array([[1.0, 3.0], [2.0, 2.0], [0.0, 0.0], [0.0, 5.0]])
    assert balancedness(load).tolist() == pytest.approx([2 / 3, 1, 1, 0.5])


def test_traffic_is_computed_once():
    problem = problem_with(*[make_gpu()] * GPUS)
    load = Load(problem, linear_placement(problem))
    assert load.traffic is load.traffic and not load.traffic.flags.writeable


GPUS, LAYERS, EXPERTS = 4, 3, 8


def problem_with(*cards) -> Problem:
    experts = np.random.default_rng(1).integers(0, EXPERTS, (400, LAYERS, 1)).astype(np.int16)
    return Problem(RoutingTrace("even", experts, EXPERTS), cluster_of(*cards), make_model(LAYERS, EXPERTS), Datasheet())


@pytest.mark.parametrize("system", ["aurora", "rcs", "linear"])
def test_the_waits_add_up_to_the_time_step_by_step(system) -> None:
    problem = problem_with(*(make_gpu(kind, 1e6 / (kind + 1)) for kind in range(GPUS)))
    timeline = simulate(run(SYSTEMS[system], problem, {}).result.solution, problem)
    waiting = waits(timeline, problem.network)
    assert waiting["seconds"].sum() == pytest.approx(timeline.total) and (waiting["seconds"] >= 0).all()
    events = timeline.events
    assert len(waiting) == len({(itertuple.layer, itertuple.kind) for itertuple in events.itertuples()})
    for step in waiting.itertuples():
        mine = events[(events["layer"] == step.layer) & (events["kind"] == step.kind)]
        last = mine[mine["end"] == mine["end"].max()]
        assert step.gpu in {*last["resource"], *last["peer"]} - {-1}


FAST, SLOW = make_gpu(0, 1e6), make_gpu(1, 1e5)


@pytest.mark.parametrize(
    ("cards", "kinds", "slow"),
    [
        ([FAST, FAST, make_gpu(1, send=1e5, receive=1e6), FAST], ("dispatch", "combine"), {2}),
        ([FAST, FAST, make_gpu(1, send=1e6, receive=1e5), FAST], ("dispatch", "combine"), {2}),
        # A fast port that sends to several slow ones at once is at work as long as they are, but does not limit them.
        ([FAST, FAST, SLOW, SLOW], ("dispatch", "combine"), {2, 3}),
        ([FAST, make_gpu(1, flops=2e8), FAST, FAST], ("ffn",), {1}),
    ],
)
def test_the_gpus_with_the_slow_ports_or_computation_are_waited_for(cards, kinds, slow) -> None:
    problem = problem_with(*cards)
    waiting = waits(simulate(plan_with(linear_placement(problem)), problem), problem.network)
    waiting = waiting[waiting["kind"].isin(kinds)]
    assert len(waiting) == len(kinds) * LAYERS and set(waiting["gpu"]) <= slow


@contextmanager
def bundling() -> Iterator[None]:
    """However few sends there are."""
    with mock.patch.object(events, "MOST_SENDS", -1):
        yield


cases = st.one_of(planned(), coherent_plans(), planned_pairs())


def both(plan: Plan, problem: Problem) -> tuple[Timeline, Timeline]:
    """The timeline with every send, and with bundles."""
    whole = simulate(plan, problem)
    with bundling():
        return whole, simulate(plan, problem)


@tried(80, cases)
def test_no_figure_tells_bundles_from_sends_and_they_survive_json_and_the_data_folder(case):
    whole, folded = both(*case)
    save_timeline("b" * 64, folded)
    for again in (Timeline.from_dict(json.loads(json.dumps(folded.to_dict()))), load_timeline("b" * 64)):
        assert again.bundled and "bundled" not in whole.to_dict()
        if len(folded.events):
            pd.testing.assert_frame_equal(again.events, folded.events, check_dtype=False)
    assert folded.bundled and not whole.bundled and (folded.events["peer"] == -1).all()
    for stream in ("compute", "network"):
        assert folded.busy(stream).tolist() == whole.busy(stream).tolist()
    for figure in ("total", "utilisation", "overlap"):
        assert getattr(folded, figure) == getattr(whole, figure)
    for figure in ("seconds_of_kind", "exposed_communication", "decomposition", "busy_of_kind"):
        assert getattr(folded, figure)() == getattr(whole, figure)()
    counted = metrics(*case, whole)  # the count of events is of the timeline with every send alone
    assert counted.events == len(whole.events) and metrics(*case, folded) == replace(counted, events=None)
    pd.testing.assert_frame_equal(waits(folded, case[1].network), waits(whole, case[1].network), check_exact=True)
    with bundling():
        quick = outlook(*case)
    slow = outlook(*case)
    assert quick.layers.tolist() == slow.layers.tolist() and quick.parts == slow.parts
    if case[1].second is not None:
        assert check_timeline(folded, *case) == folded.total


@tried(60, cases)
def test_a_bundle_is_a_stretch_without_a_gap_and_bytes_are_kept(case):
    whole, folded = both(*case)
    keys, gpus = ["model", "layer", "kind"], len(whole.resources)
    sends = whole.events[whole.events["stream"] == "network"]
    bundles = folded.events[folded.events["stream"] == "network"]
    steps = dict(iter(bundles.groupby(keys, observed=True)))
    for key, own in sends.groupby(keys, observed=True):
        for gpu in range(gpus):
            mine = steps[key][steps[key]["resource"] == gpu].sort_values("start")
            at_gpu = own[(own["resource"] == gpu) | (own["peer"] == gpu)]
            assert mine["bytes"].sum() == pytest.approx(at_gpu.loc[at_gpu["resource"] == gpu, "bytes"].sum())
            assert (mine["start"].to_numpy()[1:] > mine["end"].to_numpy()[:-1]).all()
            inside = [((mine["start"] <= send.start) & (mine["end"] >= send.end)).sum() for send in at_gpu.itertuples()]
            assert set(inside) <= {1} and len(mine) <= len(at_gpu)
            edges = {*at_gpu["start"], *at_gpu["end"]}
            assert edges >= {*mine["start"], *mine["end"]}
        if case[0].send_order.mode == "concurrent" and case[0].placement_b is None:
            assert len(steps[key]) == steps[key]["resource"].nunique()
    assert len(steps) == sends.groupby(keys, observed=True).ngroups


@tried(60, cases, st.data())
def test_the_sends_of_chosen_layers_are_those_of_the_whole(case, data):
    plan, problem = case
    whole, folded = both(plan, problem)
    layers = problem.workload.layers
    first = data.draw(st.integers(0, layers - 1))
    last = data.draw(st.integers(first, layers - 1))
    wanted, again = whole.layers(first, last), simulate_layers(plan, problem, folded, first, last)
    assert not again.bundled and again.resources == whole.resources
    of_whole = simulate_layers(plan, problem, whole, first, last)
    pd.testing.assert_frame_equal(of_whole.events, wanted.events, check_exact=True)
    close = {"rtol": 1e-12, "atol": 1e-15, "check_dtype": len(wanted.events) > 0}
    pd.testing.assert_frame_equal(again.events, wanted.events, **close)


def test_a_gpu_that_aggregates_nothing_waits_for_the_combine_of_the_first_model():
    """Also where the second model sends nothing, so that the first one's combine ends last."""
    ranks = np.array([0, 1], np.int32)
    # [token, layer]: the first model's token crosses over; the second's stay, and the one on GPU 1 skips the first layer.
    chosen = [[1, 1], [-1, -1]], [[0, 0], [-1, 1]]
    routed = [RoutingTrace("drawn", np.array(experts, np.int16)[:, :, None], 2, source_rank=ranks) for experts in chosen]
    model = make_model(2, 2, 1)
    problem = make_problem(routed[0], cluster_of(make_gpu(), make_gpu()), model, Datasheet(), second=(routed[1], model))
    plan = plan_of(problem, *[linear_placement(side) for side in (problem, problem.second)], "concurrent")
    whole, folded = both(plan, problem)
    assert set(whole.events.loc[whole.events["stream"] == "network", "model"]) == {0}
    again = simulate_layers(plan, problem, folded, 1, 1)
    pd.testing.assert_frame_equal(again.events, whole.layers(1, 1).events, rtol=1e-12, atol=1e-15)


def test_bundles_begin_above_a_stated_number_of_pairs_and_what_is_not_the_sends_is_noticed():
    problem = pair_of_samples()
    plan = run(SYSTEMS["linear"], problem).result.solution
    whole, folded = both(plan, problem)
    pairs = int((whole.events["stream"] == "network").sum())
    for most, bundled in ((pairs, False), (pairs - 1, True)):
        with mock.patch.object(events, "MOST_SENDS", most):
            assert simulate(plan, problem).bundled is bundled
    check_timeline(folded, plan, problem)
    for changed in (["start", "end"], ["bytes"], ["end"], []):  # early, lost, short and missing
        table = folded.events.copy()
        row = table.index[(table["kind"] == "dispatch") & (table["layer"] == 1)][1]
        table.loc[row, changed] *= 0.99
        table = table if changed else table.drop(index=row)
        with pytest.raises(IllegalError, match="the bundles of dispatch are not its sends"):
            check_timeline(replace(folded, events=table), plan, problem)


@tried(100, seeds, st.integers(0, 40), st.integers(1, 5))
def test_unions_are_those_of_every_lane_on_its_own(seed, count, lanes):
    rng = np.random.default_rng(seed)
    start = rng.integers(0, rng.choice([1, 5, 30]), count).astype(float)  # many that touch or start together
    spans, lane = np.column_stack([start, start + rng.integers(0, 6, count)]), rng.integers(0, lanes, count)
    intervals, whose, place = unions(spans, lane)
    for number in range(lanes):
        merged: list[list[float]] = []
        for begin, end in sorted(spans[lane == number].tolist()):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
        assert intervals[whose == number].tolist() == merged
    assert (whose[place] == lane).all()
    assert (intervals[place, 0] <= spans[:, 0]).all() and (intervals[place, 1] >= spans[:, 1]).all()
