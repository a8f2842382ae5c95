"""Exchanges of sizes before all-to-alls of real tokens only (Lancet §6, Figure 10): their price, their place, and the cuts that
are best with them."""

from contextlib import suppress
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest

from engine.errors import InputError
from engine.overlap.partition import partition
from engine.plan import Overlap, PartitionRange, Placement
from engine.problem import Problem
from engine.simulate import simulate
from engine.simulate.training import bound_of_step, check_step_parts, price_step, step_seconds
from engine.systems.pieces import linear_placement
from engine.systems.training.lancet import forward_chain
from engine.workload import ExpertLoad
from tests.cases.training import degrees, graph_of, plan_of, problem_of
from tests.oracles.training import check_step
from tests.strategies import cluster_of, make_gpu

LATENCY, RATE = 2e-4, 1e6


def two_gpus(latency: float = LATENCY, **more) -> Problem:
    sizes = {"experts": 4, "layers": 1, "batch": 3, "capacity_factor": 1.5}
    return problem_of(cluster_of(make_gpu(), make_gpu(), latency=latency), **(sizes | more))


def irregular(problem: Problem, *ranges: PartitionRange):
    return plan_of(problem, overlap=Overlap(ranges=ranges, irregular=True))


def test_an_exchange_of_sizes_is_a_start_up_and_eight_bytes_an_expert():
    problem = two_gpus()
    priced = price_step(problem, linear_placement(problem), irregular=True)
    full = price_step(problem, linear_placement(problem))
    sent = 8 * 4
    assert priced.sizes == {name: (pytest.approx(LATENCY + sent / 2 / RATE), sent) for name in ("1.dispatch", "1.combine")}
    assert not full.sizes
    # A port that takes its time, and experts that are not spread evenly: the GPU with three of four gets and gives most.
    uneven = Placement.from_gpu_of_expert(np.array([[0, 0, 0, 1]]), 2, (1,))
    load = ExpertLoad("skewed", np.array([[3.0, 1, 1, 1]]), (1,))
    recorded = two_gpus(workload=load, routing="recorded")
    sizes = price_step(recorded, uneven, irregular=True).sizes
    assert sizes["1.dispatch"] == (pytest.approx(LATENCY + 3 * 8 / RATE), 4 * 8)
    assert sizes["1.combine"] == (pytest.approx(LATENCY + 3 * 8 / RATE), 2 * 3 * 8)


def test_every_part_waits_for_its_own_exchange_and_the_backward_pass_for_none():
    problem = two_gpus()
    plan = irregular(problem, PartitionRange(first="1.layer_norm_2", last="1.residual_2", parts=3))
    timeline = simulate(plan, problem)
    assert check_step(timeline, plan, problem, graph_of(problem)) == pytest.approx(timeline.total)
    events = timeline.events.assign(label=timeline.labels)
    sizes = events[events["kind"] == "sizes"]
    wanted = {f"sizes of 1.{kind} · part {part} of 3" for kind in ("dispatch", "combine") for part in (1, 2, 3)}
    assert set(sizes["label"]) == wanted and set(sizes["stream"]) == {"network"} and set(sizes["bytes"]) == {32.0}
    priced = price_step(problem, plan.placement, irregular=True)
    lengths = (events["end"] - events["start"]).groupby(events["label"]).max()
    for part in (1, 2, 3):
        name = f"1.dispatch · part {part} of 3"
        whole = lengths[name] + lengths[f"sizes of {name}"]
        assert whole == pytest.approx(priced.seconds[priced.index["1.dispatch"], 2].max())


def test_without_a_capacity_every_plan_has_to_say_how_much_it_sends():
    problem = two_gpus(capacity_factor=0)
    plan = plan_of(problem, pipeline=degrees(problem, 2, 2))
    timeline = simulate(plan, problem)
    assert check_step(timeline, plan, problem, graph_of(problem)) == pytest.approx(timeline.total)
    sizes = {label for label in timeline.labels if label.startswith("sizes")}
    assert sizes == {f"sizes of 1.dispatch · part {part} of 2" for part in (1, 2)}


@pytest.mark.parametrize("latency", [3e-4, 1e-3])
def test_the_stretches_are_the_best_of_all_with_the_exchanges_of_their_parts(latency):
    """Against every stretch in every number of parts, simulated; a search that does not see the exchanges cuts worse."""
    problem = two_gpus(latency)
    placement = linear_placement(problem)
    priced = price_step(problem, placement, irregular=True)
    forward = priced.graph.of_phase("forward")
    names = [operator.name for operator in forward]

    def seconds(*ranges: PartitionRange) -> float:
        plan = irregular(problem, *ranges)
        check_step_parts(plan, problem, priced.graph)
        return step_seconds(plan, problem)

    def found(prices) -> float:
        result = partition(forward_chain(problem, prices, 3))
        cut = [PartitionRange(first=names[a.first], last=names[a.last], parts=a.parts) for a in result.solution if a.parts > 1]
        assert result.objective == result.bound
        return seconds(*cut)

    exchanges = [place for place, operator in enumerate(forward) if operator.network]
    tried = [seconds()]
    for (first, last), parts in product(combinations(range(len(names)), 2), (2, 3)):
        if any(first <= place <= last for place in exchanges):
            with suppress(InputError):
                tried.append(seconds(PartitionRange(first=names[first], last=names[last], parts=parts)))
    best = found(priced)
    assert best <= min(tried) * (1 + 1e-12) and len(tried) > 100
    assert bound_of_step(problem, placement) <= min(tried)
    unseen = replace(priced, seconds=priced.seconds.copy())
    for name, sizes in priced.sizes.items():
        unseen.seconds[unseen.index[name]] -= sizes.seconds
    assert found(unseen) > best * (1 + 1e-4)
