"""Sends folded into bundles lose nothing that a figure needs, and the sends of a layer come back as they were."""

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
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.simulate import events, simulate, simulate_layers
from engine.simulate.events import waits
from engine.store import load_timeline, save_timeline
from engine.systems import SYSTEMS, run
from engine.systems.pieces import linear_placement
from engine.timeline import Timeline, unions
from engine.workload import RoutingTrace
from tests.cases.examples import tried
from tests.cases.simulations import coherent_plans, planned
from tests.cases.two_models import pair_of_samples, plan_of, planned_pairs
from tests.oracles.plans import check_timeline
from tests.strategies import cluster_of, make_gpu, make_model, seeds


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
