"""Lina's packing coordinator: its looks by hand and from drawn times, what an exchange moves, and plans with it and with
experts in the host's memory."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.plan import Offload, expert_groups
from engine.reproduce.lina.training import paper_problem
from engine.simulate import simulate
from engine.simulate.training.step import step_state_bytes
from engine.systems import TRAINING, run
from engine.systems.pieces import linear_placement
from engine.systems.training import coordinator
from engine.systems.training.best import waterfall
from engine.systems.training.lina import LinaOptions, scheduled
from tests.cases.examples import tried
from tests.cases.training import problem_of
from tests.strategies import cluster_of, make_gpu


@pytest.fixture(scope="module")
def paper():
    """GPT-2 with 16 experts, as in the paper."""
    return paper_problem("GPT-2")


@tried(20, ratios=st.lists(st.floats(0.1, 2), min_size=4, max_size=4), fits=st.integers(1, 8))
def test_it_doubles_while_measured_experts_are_the_shorter_ones(ratios, fits):
    """Eight GPUs; micro-ops that a launch might have measured; only so many experts fit."""
    problem = problem_of(cluster_of(*[make_gpu()] * 8), experts=8)

    def measured(plan, problem):
        timeline = simulate(plan, problem)
        ffn, alltoall = coordinator.micro_ops(timeline)
        wanted = ratios[int(np.log2(plan.placement.slots.max()))]
        factor = wanted * (alltoall or 1.0) / ffn
        events = timeline.events
        longer = events["end"].where(events["kind"] != "ffn", events["start"] + (events["end"] - events["start"]) * factor)
        return replace(timeline, events=events.assign(end=longer))

    def draft_of(placement):
        return scheduled(problem, placement, LinaOptions()) if placement.slots.max() <= fits else None

    looks = list(coordinator.coordinate(problem, linear_placement(problem), draft_of, measured))
    # All experts on every GPU leave no all-to-all to be longer than.
    expected = [1]
    while expected[-1] < 8 and ratios[len(expected) - 1] < 1 - 1e-9 and 2 * expected[-1] <= fits:
        expected.append(2 * expected[-1])
    assert [look.experts for look in looks] == expected
    assert [look.step for look in looks] == [10, 14, 18, 22][: len(expected)]
    assert [look.packs for look in looks] == [True] * (len(expected) - 1) + [False]


def test_an_exchange_brings_every_expert_that_a_gpu_lacks(paper):
    placement, model = linear_placement(paper), paper.model
    for experts in (2, 4, 8, 16):
        wider = coordinator.grown(placement)
        assert (wider.slots == experts).all() and expert_groups(wider) == experts
        for old, new in zip(placement.experts_of_gpu, wider.experts_of_gpu, strict=True):
            assert all(set(before) < set(after) for before, after in zip(old, new, strict=True))
        seconds, moved = coordinator.exchange(paper, placement, wider)
        # Half of what a GPU then has comes, weight and momentum, through a port that four GPUs share while groups are larger
        # than a node.
        assert moved == model.layers * experts / 2 * model.bytes_per_expert * 2
        assert seconds == pytest.approx(moved / (12.5e9 / 4 if 16 // experts >= 4 else 300e9), rel=0.02)
        placement = wider
    assert coordinator.grown(placement) is None


def test_micro_ops_are_counted_again(paper):
    plan = run(TRAINING["lina"], paper, {"packing": "off"}).result.solution
    timeline = simulate(plan, paper)
    parts = plan.pipeline.forward[0]
    spent = {"experts": [], "dispatch": []}
    for label, row in zip(timeline.labels, timeline.events.itertuples(), strict=True):
        for kind in spent:
            if label[0].isdigit() and kind in label and row.resource == 0:
                spent[kind].append(row.end - row.start)
    assert len(spent["dispatch"]) == 12 * parts and len(spent["experts"]) == 2 * 12 * parts
    expected = sum(spent["experts"]) / (12 * parts), float(np.mean(spent["dispatch"]))
    assert coordinator.micro_ops(timeline) == pytest.approx(expected)


def test_the_plan_of_the_coordinator_tells_its_steps(paper):
    outcome = run(TRAINING["lina"], paper, {"packing": "coordinator"})
    assert (outcome.result.solution.placement.slots == 4).all()
    told = [outcome.notes[f"step {step}"].value for step in (10, 14, 18)]
    assert ["doubled by an exchange" in note for note in told] == [True, True, False] and "stays" in told[2]
    assert outcome.result.objective < run(TRAINING["lina"], paper, {"packing": "off"}).result.objective


def test_what_does_not_fit_goes_to_the_host_and_no_more(paper):
    """A GPU with room for the states of three experts: four fit with the host's help."""
    two, four = (scheduled(paper, coordinator_placement(paper, count), LinaOptions()).placement for count in (2, 4))
    room = (step_state_bytes(paper, two).max() + step_state_bytes(paper, four).max()) / 2
    nodes = tuple(
        node.model_copy(update={"gpus": tuple(gpu.model_copy(update={"memory": room / 0.9}) for gpu in node.gpus)})
        for node in paper.cluster.nodes
    )
    tight = replace(paper, cluster=paper.cluster.model_copy(update={"nodes": nodes}))
    without, helped = (run(TRAINING["lina"], tight, {"offload": offload}) for offload in ("off", "full"))
    assert (without.result.solution.placement.slots == 2).all() and without.result.solution.offload is None
    plan = helped.result.solution
    assert (plan.placement.slots == 4).all() and helped.result.objective < without.result.objective
    fewer = plan.offload.experts - 1
    assert step_state_bytes(tight, plan.placement, plan.offload).max() <= room
    assert step_state_bytes(tight, plan.placement, Offload(experts=fewer) if fewer else None).max() > room
    assert "experts in the host's memory" in helped.notes
    stopped = run(TRAINING["lina"], tight, {"packing": "coordinator"})
    assert (stopped.result.solution.placement.slots == 2).all() and "more do not fit" in stopped.notes["step 14"].value
    assert (
        run(TRAINING["lina"], tight, {"packing": "coordinator", "offload": "full"}).result.solution.placement.slots == 4
    ).all()


def coordinator_placement(problem, experts: int):
    placement = linear_placement(problem)
    while placement.slots.max() < experts:
        placement = coordinator.grown(placement)
    return placement


def test_packed_experts_all_lie_on_the_host_if_wanted(paper):
    plan = run(TRAINING["lina"], paper, {"packing": "lina", "offload": "packed"}).result.solution
    assert plan.offload.experts == plan.placement.slots.max() - 1
    assert run(TRAINING["lina"], paper, {"packing": "off", "offload": "packed"}).result.solution.offload is None


def test_the_waterfall_has_a_bar_for_experts_on_the_host_and_ends_at_the_plans_time(paper):
    outcome = run(TRAINING["lina"], paper, {"packing": "lina", "offload": "packed"})
    _, rows = waterfall(paper, outcome.result.solution)
    assert "experts in the host's memory" in [row.knob for row in rows]
    assert rows[-1].after == outcome.result.objective
