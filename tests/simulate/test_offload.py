"""Experts in the host's memory during a training step: copies, room, seconds and bytes, against rules and by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.errors import IllegalError, InputError
from engine.formats.placements.training_step import write_step
from engine.launch.step.sizes import check_step_plan
from engine.plan import Offload, Plan, Priority, expert_groups
from engine.simulate import bound_of_plan, simulate
from engine.simulate.training import offload as copying
from engine.simulate.training import pricing
from engine.simulate.training.step import bytes_per_parameter, step_state_bytes
from engine.systems.pieces import linear_placement
from engine.systems.training.lina import packed_placement
from tests.cases.examples import tried
from tests.cases.launch_plans import plan_with
from tests.cases.training import degrees, graph_of, plan_of, problem_of
from tests.oracles.training import check_step
from tests.strategies import cluster_of, make_gpu


def on_host(problem, experts: int, count: int, **parts) -> Plan:
    """A plan with so many experts on a GPU, of which `count` lie on the host."""
    return plan_of(problem, placement=packed_placement(problem, experts), offload=Offload(experts=count), **parts)


@pytest.fixture
def host(monkeypatch):
    """Sets the rates of a link to the host and of its memory."""

    def rates(link: float, update: float = 1e30) -> None:
        monkeypatch.setattr(copying, "HOST_BANDWIDTH", link)
        monkeypatch.setattr(copying, "HOST_UPDATE", update)

    return rates


@tried(
    25,
    layers=st.integers(1, 5),
    experts=st.sampled_from((1, 2, 4)),
    count=st.integers(1, 4),
    policy=st.sampled_from(("fair", "priority", "fifo", "fixed")),
    parts=st.integers(1, 3),
    link=st.sampled_from((1e6, 1e8, 25e9)),
)
def test_every_step_obeys_the_rules_and_its_bound(layers, experts, count, policy, parts, link):
    problem = problem_of(layers=layers)
    plan = on_host(problem, experts, count, priority=Priority(policy=policy, bucket=4e3), pipeline=degrees(problem, parts, 1))
    if policy == "fixed" and experts > 1:
        with pytest.raises(InputError, match="may wait for room"):
            simulate(plan, problem)
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(copying, "HOST_BANDWIDTH", link)
        timeline = simulate(plan, problem)
    assert check_step(timeline, plan, problem, graph_of(problem, expert_groups(plan.placement))) == timeline.total
    assert bound_of_plan(plan, problem) <= timeline.total * (1 + 1e-12)


def test_the_check_finds_experts_that_are_not_there():
    problem = problem_of(layers=3)
    plan = on_host(problem, 2, 1)
    timeline = simulate(plan, problem)
    late = [label == "1.experts in, forward" for label in timeline.labels]
    moved = timeline.events.assign(end=np.where(late, timeline.total, timeline.events["end"]))
    with pytest.raises(IllegalError, match="layer 1 run before"):
        check_step(replace(timeline, events=moved), plan, problem, graph_of(problem, 2))
    with pytest.raises(IllegalError, match="copied that the plan leaves"):
        check_step(timeline, plan.with_parts(offload=None), problem, graph_of(problem, 2))


def test_copies_by_hand(host):
    """Five layers: all come in forward; backward the last two are still there. A slow link is the step."""
    host(1e6, 2e6)
    problem = problem_of(layers=5)
    timeline = simulate(on_host(problem, 2, 1), problem)
    size, first = problem.model.bytes_per_expert, timeline.events["resource"] == 0
    spent = {label: row.end - row.start for label, row in zip(timeline.labels, timeline.events.itertuples(), strict=True)}
    came = [label for label in spent if "experts in" in label]
    assert sorted(came) == sorted(
        [f"{n}.experts in, forward" for n in range(1, 6)] + [f"{n}.experts in, dx" for n in range(1, 4)]
    )
    assert [spent[label] for label in came] == pytest.approx([size / 1e6 + copying.HOST_START_UP] * 8)
    numbers = size / problem.model.bytes_per_number
    assert spent["4.experts updated by the host"] == pytest.approx(20 * numbers / 2e6)
    assert (timeline.events[first & (timeline.events["kind"] == "host_copy")]["stream"] == "host").all()
    assert timeline.total > 8 * size / 1e6
    assert sum(timeline.decomposition().values()) == pytest.approx(timeline.total)


def test_a_fast_host_costs_nothing_and_the_gpu_updates_less(host):
    host(1e30)
    problem = problem_of(layers=3)
    there = plan_of(problem, placement=packed_placement(problem, 2))
    plans = {count: there.with_parts(offload=Offload(experts=count) if count else None) for count in range(3)}
    seconds = {count: simulate(plan, problem).total for count, plan in plans.items()}
    assert seconds[2] < seconds[1] < seconds[0]
    # What is saved is the update: of one expert a layer, and of the other.
    update = {count: priced_update(problem, plan) for count, plan in plans.items()}
    copies = 4 * copying.HOST_START_UP  # at most: in before the first layer and backward, out of the last, and what waits
    assert seconds[0] - seconds[1] == pytest.approx(update[0] - update[1], abs=copies)
    assert update[0] - update[1] == pytest.approx(update[1] - update[2], rel=1e-6)


def priced_update(problem, plan) -> float:
    return pricing.price_step(problem, plan.placement, offload=plan.offload).whole("update")


def test_memory_by_hand_with_and_without():
    problem = problem_of(layers=5, experts=8)
    per_expert = problem.model.bytes_per_expert / problem.model.bytes_per_number
    placement, number, whole = linear_placement(problem), problem.model.bytes_per_number, bytes_per_parameter(problem.model)
    all_there, left = (step_state_bytes(problem, placement, offload) for offload in (None, Offload(experts=1)))
    # Five of ten experts go, and two pass through with their gradients.
    assert all_there - left == pytest.approx(np.full(4, 5 * per_expert * whole - 2 * per_expert * 2 * number))
    assert (
        step_state_bytes(problem, placement, Offload(experts=9)) == step_state_bytes(problem, placement, Offload(experts=2))
    ).all()
    one = problem_of(layers=1, experts=8)
    assert problem.held_bytes(placement, offload=Offload(experts=2)).tolist() == [4 * problem.model.bytes_per_expert] * 4
    assert one.held_bytes(linear_placement(one), offload=Offload(experts=2)).tolist() == [2 * one.model.bytes_per_expert] * 4


def test_a_plan_that_does_not_fit_fits_with_the_hosts_help():
    small = cluster_of(*(make_gpu(memory=6.5 * 3 * 64 * 96 * 2) for _ in range(4)), latency=1e-4)
    problem = problem_of(small, layers=4, experts=8)
    placement = linear_placement(problem_of(layers=4, experts=8))
    with pytest.raises(InputError, match="add GPUs"):
        simulate(plan_of(problem, placement=placement), problem)
    plan = plan_of(problem, placement=placement, offload=Offload(experts=2))
    assert simulate(plan, problem).total > 0
    assert Plan.from_json(plan.to_json(), "plan") == plan and plan.id != plan.with_parts(offload=None).id


def test_who_cannot_carry_it_says_so():
    problem = problem_of(layers=2)
    plan = plan_of(problem, offload=Offload(experts=1))
    with pytest.raises(InputError, match="simulated and not launched"):
        check_step_plan(plan, problem.model, problem.step)
    with pytest.raises(InputError, match="imported operator graph"):
        simulate(plan, replace(problem, graph=graph_of(problem)))
    with pytest.raises(ValueError, match="offload are parts of a training step"):
        plan_with(linear_placement(problem), offload=Offload(experts=1))
    notes = write_step("deepspeed", plan, problem.model, problem.step, "file").notes
    assert any("in the host's memory" in note for note in notes)
