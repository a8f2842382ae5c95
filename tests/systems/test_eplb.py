"""Replication as a recipe: slots that fit the memory, balancedness that can be counted again, and robust plans."""

import re
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.cluster import Cluster, Node
from engine.compare.figures import metrics
from engine.costs import Datasheet
from engine.errors import InputError
from engine.placement.replication.eplb import eplb as printed
from engine.plan import Placement, redundant_experts
from engine.problem import Problem, make_problem
from engine.systems import SYSTEMS, run
from engine.systems.base import Outcome
from engine.systems.eplb import slots_per_gpu, speed_of_gpu
from engine.units import digits
from tests.cases.examples import examples
from tests.cases.samples import chained, problem_of, sample, sample_model, sample_problem, with_room_for
from tests.oracles.placing import check_replication
from tests.oracles.plans import check_plan
from tests.strategies import cluster_of, make_gpu, problems

SHORT = 0.3
MIXED = cluster_of(*(make_gpu(kind, 1e9, flops=1e12 / 2**kind, memory_bandwidth=1e11) for kind in (0, 1, 2, 3) * 2))


def eplb(problem: Problem, **options) -> Outcome:
    return run(SYSTEMS["eplb"], problem, {"time_limit": SHORT} | options)


def balancedness_of(placement: Placement, problem: Problem) -> np.ndarray:
    """The validator's balancedness float64[recording, layer], at the speed of every GPU."""
    slots = placement.slots[0]
    assert np.all(placement.slots == slots)
    rows = np.array([[expert for gpu in row for expert in gpu] for row in placement.experts_of_gpu])
    loads = np.array([other.load for other in (problem.workload, *problem.others)])
    return check_replication(rows, loads, len(slots), slots, speed=speed_of_gpu(problem))


def said(outcome: Outcome) -> str:
    return outcome.notes["balancedness"].value


# Balancedness


@pytest.mark.parametrize("slots", ["even", "uneven"])
@pytest.mark.parametrize("cluster", ["equal", "mixed"])
def test_the_note_has_the_validators_balancedness(slots, cluster):
    problem = sample_problem("alpha-code", "alpha-man", tokens=1000)
    if cluster == "mixed":
        problem = make_problem(problem.workload, MIXED, problem.model, Datasheet(), others=problem.others)
    outcome = eplb(problem, slots=slots)
    plan = outcome.result.solution
    worst = balancedness_of(plan.placement, problem).min()
    assert said(outcome).startswith(f"{digits(worst)} in the worst layer of the worst recording; at most ")
    most = float(re.search(r"at most ([\d.]+) is possible \(proven\)", said(outcome))[1])
    assert worst <= most * 1.005 and most <= 1
    assert outcome.notes["replicas"].value.startswith("8 spare slots per layer, ")
    assert (plan.placement.slots == 3).all() == (slots == "even" or cluster == "equal")
    assert plan.placement.slots.sum(axis=1).tolist() == [24] * 4
    assert check_plan(plan, problem) == pytest.approx(outcome.result.objective, rel=1e-9)
    assert ("EPLB's own layout" in outcome.notes) == (cluster == "equal")
    if cluster == "equal":
        own = eplb(problem, algorithm="eplb").result.solution.placement
        usual = digits(balancedness_of(own, problem).min())
        assert outcome.notes["EPLB's own layout"].value.startswith(f"balancedness {usual} in ")


def test_a_proven_balance_is_said_to_be_optimal_and_another_how_far_it_can_be():
    problem = problem_of(chained(0, 400, 2, 4, 0.5), cluster_of(*[make_gpu()] * 4))
    optimal = "1 in the worst layer; at most 1 is possible (proven), so this is optimal"
    assert said(eplb(problem, redundant=3)) == optimal
    outcome = eplb(sampled := sample_problem("alpha-code", tokens=1000), redundant=1, algorithm="eplb")
    worst = balancedness_of(outcome.result.solution.placement, sampled).min()
    most, gap = re.search(r"at most ([\d.]+) is .* a heuristic within ([\d.]+ %) of the best", said(outcome)).groups()
    assert float(gap.split()[0]) == pytest.approx(100 * (float(most) / worst - 1), abs=1)


def test_faster_gpus_get_more_slots_where_they_may():
    problem = make_problem(sample("alpha-code", 1000), MIXED, sample_model(), Datasheet())
    placement = eplb(problem, slots="uneven", redundant=2).result.solution.placement
    assert placement.slots.sum(axis=1).tolist() == [32] * 4
    speed, slots = speed_of_gpu(problem), placement.slots[0]
    assert np.all(np.diff(slots[np.argsort(speed)]) >= 0) and slots.max() > slots.min()
    even = eplb(problem, redundant=2).result.solution.placement
    assert balancedness_of(placement, problem).min() > balancedness_of(even, problem).min()


@settings(max_examples=examples(30, 4), deadline=None)
@given(problems(), st.integers(0, 3), st.sampled_from(("even", "uneven")), st.sampled_from(("best", "eplb")))
def test_any_plan_is_legal_and_takes_what_the_validator_says(problem, redundant, slots, algorithm):
    counts = slots_per_gpu(problem, redundant, slots)
    assume(algorithm == "best" or np.ptp(counts) == 0)
    outcome = eplb(problem, redundant=redundant, slots=slots, algorithm=algorithm, time_limit=0.1)
    plan = outcome.result.solution
    assert check_plan(plan, problem) == pytest.approx(outcome.result.objective, rel=1e-9)
    assert np.all(plan.placement.slots == counts) and counts.max() <= problem.workload.num_experts
    assert outcome.result.bound <= outcome.result.objective and plan.claim.scope == "order"
    if algorithm == "best":
        assert said(outcome).startswith(f"{digits(balancedness_of(plan.placement, problem).min())} in the worst layer")


# EPLB itself


@pytest.mark.parametrize("redundant", [0, 1, 3])
def test_eplb_to_the_letter(redundant):
    problem = sample_problem("alpha-code", "alpha-man", tokens=1000)
    outcome = eplb(problem, algorithm="eplb", redundant=redundant)
    mean = np.mean([other.load for other in (problem.workload, *problem.others)], axis=0)
    rows = printed(mean, 16 + 8 * redundant, 8)
    slots = np.full(8, 2 + redundant)
    assert outcome.result.solution.placement == Placement.from_slots(rows, slots, 16, problem.model.moe_layers)
    assert "EPLB's own layout" not in outcome.notes


def test_eplb_to_the_letter_needs_equal_slots():
    problem = make_problem(sample("alpha-code", 500), MIXED, sample_model(), Datasheet())
    with pytest.raises(InputError, match="EPLB knows only GPUs of equal slots and speed; use 'best'"):
        eplb(problem, algorithm="eplb", slots="uneven", redundant=3)
    assert eplb(problem, algorithm="eplb").result.solution.placement.slots.max() == 3


# Several recordings


def test_a_robust_plan_serves_its_worst_recording_better_than_eplb_on_the_mean():
    problem = sample_problem("alpha-code", "alpha-prose", "alpha-man", tokens=None)
    outcomes = (eplb(problem, algorithm=algorithm) for algorithm in ("best", "eplb"))
    robust, usual = (balancedness_of(outcome.result.solution.placement, problem) for outcome in outcomes)
    assert robust.shape == usual.shape == (3, 8)
    assert robust.min() > usual.min() + 0.1 and robust.mean(axis=1).min() > usual.mean(axis=1).min() + 0.05
    alone = sample_problem("alpha-code", tokens=None)
    mine = eplb(alone).result.solution.placement
    assert balancedness_of(mine, problem).min() < robust.min() < balancedness_of(mine, alone).min()


# Memory


def test_the_memory_of_a_plan_counts_its_replicas():
    problem = sample_problem("alpha-code", tokens=500)
    layer = problem.workload.layers * problem.model.bytes_per_expert
    for spare in (0, 2):
        outcome = eplb(problem, redundant=spare)
        assert metrics(outcome.result.solution, problem, outcome.timeline).memory == (2 + spare) * layer
        said = f"{8 * spare} spare slots per layer, {8 * spare * layer / 1e9:.3g} GB of memory in all"
        assert outcome.notes["replicas"].value == said


@pytest.mark.parametrize(
    ("room", "slots", "redundant", "most"),
    [([3, 4, 5], "even", 2, 1), ([2, 4, 5], "even", 1, 0), ([3, 4, 6], "uneven", 3, 2), ([1, 2, 3], "uneven", 1, 0)],
)
def test_too_many_spare_slots_say_how_many_would_fit(room, slots, redundant, most):
    problem = problem_of(chained(0, 60, 2, 6, 0.5), with_room_for(room, 2, 6))
    for too_many in (redundant, most + 1):
        with pytest.raises(InputError, match=f"choose redundant={most}$"):
            eplb(problem, slots=slots, redundant=too_many)
    placement = eplb(problem, slots=slots, redundant=most).result.solution.placement
    assert np.all(placement.slots <= room) and placement.slots.sum(axis=1).max() == 6 + 3 * most


def test_uneven_slots_are_advised_only_where_they_help():
    trace = chained(0, 60, 2, 6, 0.5)
    tight = problem_of(trace, with_room_for([1, 2, 4], 2, 6))
    with pytest.raises(InputError, match="GPU 0 · type-0, which has memory for 1; use slots=uneven, more GPUs"):
        eplb(tight, redundant=0)
    assert np.all(eplb(tight, redundant=0, slots="uneven").result.solution.placement.slots <= [1, 2, 4])
    for slots in ("even", "uneven"):
        with pytest.raises(InputError, match="GPUs or memory") as caught:
            eplb(problem_of(trace, with_room_for([1, 2, 2], 2, 6)), redundant=0, slots=slots)
        assert "uneven" not in str(caught.value)


@pytest.mark.parametrize("slots", ["even", "uneven"])
@pytest.mark.parametrize("redundant", [4, 5, 64])
def test_no_gpu_gets_more_slots_than_there_are_experts(slots, redundant):
    problem = problem_of(chained(0, 60, 2, 6, 0.5), cluster_of(*[make_gpu()] * 3))
    outcome = eplb(problem, slots=slots, redundant=redundant)
    placement = outcome.result.solution.placement
    assert placement.slots.tolist() == [[6] * 3] * 2
    assert balancedness_of(placement, problem).min() == pytest.approx(1)
    assert outcome.notes["replicas"].value.startswith("12 spare slots per layer")


# Spare slots in all


@pytest.mark.parametrize(
    ("experts", "spare", "slots", "nearest"),
    [
        (6, 0, [2, 1, 2, 1], [2]),
        (6, 1, [2, 2, 2, 1], [2]),
        (6, 2, [2, 2, 2, 2], [2]),
        (6, 5, [3, 3, 3, 2], [2, 6]),
        (8, 1, [3, 2, 2, 2], [0, 4]),
        (8, 3, [3, 3, 3, 2], [0, 4]),
        (8, 4096, [8, 8, 8, 8], [24]),
    ],
)
def test_slots_in_all_differ_by_one_and_nodes_get_them_in_turn(experts, spare, slots, nearest):
    nodes = (Node(name="a", gpus=(make_gpu(),) * 2), Node(name="b", gpus=(make_gpu(),) * 2))
    cluster = Cluster(name="two", nodes=nodes)
    problem = problem_of(chained(0, 60, 2, experts, 0.5), cluster)
    assert slots_per_gpu(problem, spare, "even", "in all").tolist() == slots
    assert redundant_experts(experts, min(spare, 3 * experts), 4) == nearest
    outcome = eplb(problem, redundant=spare, spare="in all")
    assert np.all(outcome.result.solution.placement.slots == slots)
    assert ("engines" in outcome.notes) == (len(set(slots)) > 1)
    if len(set(slots)) > 1:
        said = " or ".join(map(str, nearest))
        assert f"need as many slots on every GPU: {said} spare ones in all, not {spare}" == outcome.notes["engines"].value
        with pytest.raises(InputError, match=f"choose redundant={said} in all, or algorithm=best"):
            eplb(problem, redundant=spare, spare="in all", algorithm="eplb")


@pytest.mark.parametrize("spare", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_no_layout_of_slots_in_all_beats_what_is_proven(spare, seed):
    """Every expert in every slot of three GPUs, also twice on one."""
    problem = problem_of(chained(seed, 80, 1, 4, 0.3), cluster_of(*[make_gpu()] * 3))
    outcome = eplb(problem, redundant=spare, spare="in all", time_limit=2.0)
    reached = balancedness_of(outcome.result.solution.placement, problem).min()
    counts, load = outcome.result.solution.placement.slots[0], problem.workload.load[None]
    assert counts.sum() == 4 + spare and np.ptp(counts) <= 1
    contents = [combinations_with_replacement(range(4), count) for count in counts.tolist()]
    rows = [[expert for gpu in gpus for expert in gpu] for gpus in product(*contents)]
    placed = [np.array([row]) for row in rows if len(set(row)) == 4]
    best = max(float(check_replication(row, load, 3, counts).min()) for row in placed)
    most = float(re.search(r"at most ([\d.]+) is possible", said(outcome))[1])
    assert reached <= best * (1 + 1e-9) and best <= most * 1.005
    if "so this is optimal" in said(outcome):
        assert reached == pytest.approx(best)


@pytest.mark.parametrize(
    ("room", "slots", "spare", "most"), [([2, 3, 4], "even", 3, 2), ([3, 3, 3], "even", 4, 3), ([1, 2, 6], "uneven", 4, 3)]
)
def test_too_many_slots_in_all_say_how_many_would_fit(room, slots, spare, most):
    problem = problem_of(chained(0, 60, 2, 6, 0.5), with_room_for(room, 2, 6))
    with pytest.raises(InputError, match=f"{6 + spare} slots per layer .*; choose redundant={most}$"):
        eplb(problem, slots=slots, redundant=spare, spare="in all")
    placement = eplb(problem, slots=slots, redundant=most, spare="in all").result.solution.placement
    assert np.all(placement.slots <= room) and placement.slots.sum(axis=1).max() == 6 + most


def test_a_small_gpu_beside_a_huge_one():
    """Memory that a GPU cannot fill with different experts is no room for replicas."""
    problem = problem_of(chained(0, 60, 2, 6, 0.5), with_room_for([100, 1], 2, 6))
    assert eplb(problem, slots="uneven", redundant=0).result.solution.placement.slots.tolist()[0] in ([5, 1], [6, 0])
    with pytest.raises(InputError, match="room for 7; choose redundant=0"):
        eplb(problem, slots="uneven", redundant=1)
