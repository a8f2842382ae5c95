"""The systems as recipes: bounds against every placement and order, options, stops, memory, and real recordings."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from engine.cluster import Cluster, Node
from engine.communication.order import shortest_first
from engine.compare.figures import metrics
from engine.costs import Datasheet
from engine.errors import InputError
from engine.goal import Goal
from engine.plan import Placement, Schedule, SendOrder
from engine.problem import Problem
from engine.result import Result, Status, never
from engine.simulate import bound_of_plan, simulate
from engine.simulate.work import Load, work_of
from engine.systems import SYSTEMS, run
from engine.systems.aurora_exclusive import instance_of_layer
from engine.systems.pieces import least_seconds, modes_of, phased_order, slots_of_gpu, spread_evenly, to_placement
from engine.workload import RoutingTrace
from tests.cases.examples import examples
from tests.cases.launch_plans import plan_with
from tests.cases.samples import big_problem, small_problem, with_memory
from tests.oracles.placing import check_assignment
from tests.oracles.plans import check_plan
from tests.strategies import NEEDS_ROWS, make_gpu, make_model, planned_or_skipped, problems, seeds

ROUND_OFF = 1 + 1e-9
ONE_MODEL = [name for name, system in SYSTEMS.items() if Goal.INFERENCE in system.goals and name not in NEEDS_ROWS]
EVEN = ("aurora", "aurora-printed", "joint", "linear", "round-robin", "random", "rcs", "sjf", "rga")
"""Systems without replicas that take as many experts on every GPU."""
SHORT = {"time_limit": 0.1}
UNLIMITED = {"time_limit": 30.0}
"""Seconds that end no search of a small problem, so that a busy machine changes no plan."""
ROOT = Path(__file__).resolve().parents[2]
RECORDING = ROOT.parent / "shared" / "data" / "deepseek-v2-lite-routing.npz"
SAMPLE_CLUSTER = ROOT / "sample_traces" / "mixed-8.json"


def outcome_of(name: str, problem: Problem, **options):
    known = SYSTEMS[name].options.model_fields
    return run(SYSTEMS[name], problem, {key: value for key, value in (SHORT | options).items() if key in known})


def solve(name: str, problem: Problem, **options):
    return outcome_of(name, problem, **options).result


def seconds_in(mode: str, placement: Placement, problem: Problem) -> float:
    """Simulated seconds of a placement with the order of a mode."""
    order = phased_order(Load(problem, placement, problem.travel), mode, never)
    return simulate(plan_with(placement, send_order=order), problem).total


def every_placement(problem: Problem, slots: np.ndarray) -> Iterator[Placement]:
    """All placements without replicas of a problem with one layer that respect the slots."""
    gpus, experts = len(problem.cluster.gpus), problem.workload.num_experts
    for row in product(range(gpus), repeat=experts):
        if np.all(np.bincount(row, minlength=gpus) <= slots):
            yield to_placement(np.array([row]), problem)


def every_order(placement: Placement, problem: Problem) -> Iterator[SendOrder]:
    """The exact and the plain orders, shortest first, and with one expert to a GPU every sequence of every sender."""
    for mode in ("matched", "shared", "concurrent"):
        yield phased_order(Load(problem, placement, problem.travel), mode, never)
    (traffic,) = Load(problem, placement).traffic
    yield SendOrder(mode="sequential", dispatch=(shortest_first(traffic),), combine=(shortest_first(traffic.T),))
    if problem.workload.num_experts <= len(traffic):
        peers = [[peer for peer in range(len(traffic)) if peer != gpu] for gpu in range(len(traffic))]
        for sequences in product(*(permutations(row) for row in peers)):
            dispatch, combine = (in_sequence(matrix, sequences) for matrix in (traffic, traffic.T))
            yield SendOrder(mode="sequential", dispatch=(dispatch,), combine=(combine,))


def in_sequence(traffic: np.ndarray, sequences: tuple[tuple[int, ...], ...]) -> Schedule:
    """Every sender serves its peers in the given sequence."""
    pairs = [(src, dst) for src, peers in enumerate(sequences) for dst in peers if traffic[src, dst] > 0]
    src, dst = zip(*pairs, strict=True) if pairs else ((), ())
    return Schedule(src=src, dst=dst, bytes=tuple(traffic[pair] for pair in pairs), phase=(0,) * len(pairs))


def best_of_all(problem: Problem, slots: np.ndarray) -> float:
    """Seconds of the best placement with the best of all orders."""
    return min(
        simulate(plan_with(placement, send_order=order), problem).total
        for placement in every_placement(problem, slots)
        for order in every_order(placement, problem)
    )


# Bounds and objectives


@pytest.mark.parametrize("name", ONE_MODEL)
@settings(max_examples=examples(40), deadline=None)
@given(problem=problems())
def test_a_plan_is_legal_and_takes_its_objective_which_is_not_below_the_bound_and_its_claim_repeats_both(name, problem):
    result = planned_or_skipped(lambda: solve(name, problem))
    assert result.objective == simulate(result.solution, problem).total
    assert check_plan(result.solution, problem) == pytest.approx(result.objective, rel=1e-9)
    if name in EVEN:  # as many experts on every GPU
        slots, most = result.solution.placement.slots, problem.workload.num_experts / len(problem.cluster.gpus)
        assert np.all(slots.sum(axis=1) == problem.workload.num_experts) and slots.max() <= np.ceil(most)
        assert most % 1 or np.all(slots == most)
    assert 0 <= result.bound <= result.objective * ROUND_OFF
    assert result.solution.claim.bound == result.bound
    assert result.solution.claim.objective == result.objective
    assert (result.status is Status.OPTIMAL) == (result.objective <= result.bound * ROUND_OFF)
    figures = metrics(result.solution, problem, simulate(result.solution, problem))
    assert figures.bound == result.bound
    if result.solution.claim.scope == "order":
        assert result.bound == pytest.approx(min(figures.order_bound, figures.total), rel=1e-12)


TWO_GPUS = problems(layers=(1, 1), least=1, most=2, experts=(1, 4))
THREE_GPUS = problems(layers=(1, 1), least=3, most=3, experts=(2, 4))


@settings(max_examples=examples(60, 8), deadline=None)
@given(st.one_of(TWO_GPUS, TWO_GPUS, THREE_GPUS))
def test_bound_holds_against_everything_on_a_few_gpus(problem):
    slots = np.full(len(problem.cluster.gpus), -(-problem.workload.num_experts // len(problem.cluster.gpus)))
    result = solve("aurora", problem)
    best = best_of_all(problem, slots)
    assert result.bound <= best * ROUND_OFF
    if result.status is Status.OPTIMAL:
        event("claims to be optimal")
        assert result.objective <= best * ROUND_OFF


@settings(max_examples=examples(25, 4), deadline=None)
@given(problems(layers=(1, 1), least=2, most=3, experts=(2, 4)), seeds)
def test_bound_holds_against_everything_with_uneven_slots(problem, seed):
    gpus, experts = len(problem.cluster.gpus), problem.workload.num_experts
    slots = np.random.default_rng(seed).multinomial(experts + 1, np.full(gpus, 1 / gpus))
    problem = with_memory(problem, slots.tolist())
    result = solve("aurora", problem, slots="uneven")
    assert np.all(result.solution.placement.slots <= slots)
    assert result.bound <= best_of_all(problem, slots) * ROUND_OFF


@settings(max_examples=examples(50, 6), deadline=None)
@given(problems(layers=(1, 2)), seeds)
def test_bound_holds_against_random_placements_in_every_order(problem, seed):
    """The bound holds for any placement and any order that the recipe could have chosen."""
    experts, slots = problem.workload.num_experts, slots_of_gpu(problem, "even")
    bound = solve("aurora", problem).bound
    rng = np.random.default_rng(seed)
    for _ in range(6):
        rows = [rng.permutation(np.repeat(np.arange(len(slots)), slots)) for _ in range(problem.workload.layers)]
        placement = to_placement(np.array(rows)[:, :experts], problem)
        for mode in ("matched", "shared", "two-tier", "concurrent"):
            assert bound <= seconds_in(mode, placement, problem) * ROUND_OFF


@settings(max_examples=examples(30, 4), deadline=None)
@given(problems(linked=False, symmetric=True, contended=False), seeds)
def test_aurora_is_never_worse_where_its_objective_is_the_whole_truth(problem, seed):
    """Without start-up times, links, contention and shared processors, and with GPUs that send as fast as they receive, the
    objective of the placement is the time of the best order: whoever is proven optimal there cannot be beaten."""
    problem = without_latency(problem)
    together = problem.cost.together(np.ones(len(problem.cluster.gpus)))
    assume(np.all(together == 1))
    outcome = outcome_of("aurora", problem)
    layers = problem.workload.layers
    assume(f"in {layers} of {layers} layers" in outcome.notes["placement"].value)
    # Others may use replicas or other executions, which this bound does not cover.
    for name in EVEN[1:]:
        assert outcome.result.objective <= solve(name, problem, seed=seed % 2**31).objective * (1 + 2e-6)
    assert outcome.result.objective <= outcome.result.bound * (1 + 2e-6)


@settings(max_examples=examples(40, 4), deadline=None)
@given(problems(contended=False))
def test_aurora_is_never_slower_than_doing_nothing_once_starting_is_free(problem):
    """With links or different rates out and in the placement is a heuristic, but it begins at the linear one, and the best
    order reaches its objective."""
    problem = without_latency(problem)
    assume(problem.workload.num_experts % len(problem.cluster.gpus) == 0)
    assert solve("aurora", problem).objective <= solve("linear", problem).objective * (1 + 2e-6)


def without_latency(problem: Problem) -> Problem:
    """The same problem with no start-up times on the network."""
    cost, profile = problem.cost, getattr(problem.cost, "profile", None)
    if profile and profile.network:
        network_cost = profile.network.model_copy(update={"alpha": 0.0})
        cost = replace(cost, profile=profile.model_copy(update={"network": network_cost}))
    nodes = tuple(node.model_copy(update={"link_latency": 0.0}) for node in problem.cluster.nodes)
    cluster = problem.cluster.model_copy(update={"latency": 0.0, "nodes": nodes})
    return Problem(problem.workload, cluster, problem.model, cost)


@settings(max_examples=examples(50), deadline=None)
@given(problems(linked=False, symmetric=True))
def test_matched_order_on_equal_ports_meets_the_bound_of_every_order(problem):
    problem = without_latency(problem)
    assume(np.ptp(problem.network.send) == 0)
    for name in ("rga", "aurora"):
        plan = solve(name, problem, order="matched").solution
        total = simulate(plan, problem).total
        assert total == pytest.approx(bound_of_plan(plan, problem), rel=1e-9)


@settings(max_examples=examples(40, 4), deadline=None)
@given(problems())
def test_best_order_is_the_best_of_those_tried(problem):
    outcome = outcome_of("aurora", problem)
    tried = {about: note.value for about, note in outcome.notes.items() if about.endswith(" order")}
    assert outcome.result.objective == min(value for value in tried.values() if not isinstance(value, str))
    for mode in ("matched", "shared", "concurrent"):
        if (said := tried.get(f"{mode} order")) is not None:
            again = seconds_in(mode, outcome.result.solution.placement, problem)
            # A text: ruled out by its bound.
            assert again > outcome.result.objective if isinstance(said, str) else said == pytest.approx(again, rel=1e-12)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("alike", [True, False])
def test_shared_order_is_tried_wherever_it_can_win(alike, seed):
    """Also on equal GPUs, when they do not receive as fast as they send."""
    rng = np.random.default_rng(seed)
    sends = [1e6] * 3 if alike else rng.choice([1e6, 5e5, 3e5], 3)
    cards = tuple(make_gpu(0 if alike else kind, send, 8e5) for kind, send in enumerate(sends))
    cluster = Cluster(name="uneven ports", nodes=(Node(name="all", gpus=cards),))
    sources = rng.integers(0, 3, 12).astype(np.int32)
    trace = RoutingTrace("log", rng.integers(0, 3, (12, 1, 1)).astype(np.int16), 3, source_rank=sources)
    problem = Problem(trace, cluster, make_model(1, 3), Datasheet())
    result = solve("aurora", problem)
    assert result.objective <= seconds_in("shared", result.solution.placement, problem) * ROUND_OFF


@settings(max_examples=examples(50), deadline=None)
@given(problems(linked=False, symmetric=True, layers=(1, 1)), seeds)
def test_instance_of_a_layer_costs_what_the_placement_takes(problem, seed):
    network, model, gpus = problem.network, problem.model, len(problem.cluster.gpus)
    row = np.random.default_rng(seed).integers(0, gpus, problem.workload.num_experts)
    instance = instance_of_layer(problem, 0)
    compute = np.array([problem.cost.expert_ffn(gpu, problem.demand[0].sum(axis=0), model) for gpu in problem.cluster.gpus])
    wanted = check_assignment(
        row, problem.demand[0] * model.bytes_per_token, compute, network.send, network.receive, np.full(gpus, len(row))
    )
    assert instance.cost(row) == pytest.approx(wanted, rel=1e-9)


# The same inputs, the same plan; stopping


@cache
def solved_once(name: str) -> Result:
    return solve(name, small_problem(), seed=7, **UNLIMITED)


@pytest.mark.parametrize("name", ONE_MODEL)
def test_same_seed_same_plan(name):
    assert solved_once(name).solution.id == solve(name, small_problem(), seed=7, **UNLIMITED).solution.id


def test_another_seed_gives_another_random_plan():
    for name in ("rga", "rcs"):
        plans = [solve(name, small_problem(), seed=seed).solution for seed in (0, 1)]
        assert plans[0].placement != plans[1].placement or plans[0].send_order != plans[1].send_order


@pytest.mark.parametrize("name", [name for name in ONE_MODEL if SYSTEMS[name].options.model_fields])
@pytest.mark.parametrize("asked", [0, 1, 3, 20])
def test_a_stop_after_some_questions_leaves_a_legal_plan(name, asked):
    problem, count = small_problem(), itertools.count(1)
    result = run(SYSTEMS[name], problem, {}, lambda: next(count) > asked).result
    assert (result.status is Status.CANCELLED) == (next(count) > asked + 1)
    assert check_plan(result.solution, problem) == pytest.approx(result.objective, rel=1e-9)
    if name == "aurora":
        assert result.bound <= solved_once(name).objective * ROUND_OFF


def test_a_second_order_is_given_up_when_asked_to_stop_while_it_is_simulated():
    asked = []

    def report(done: float, message: str, incumbent: float | None, bound: float | None) -> None:
        asked.append(message == "simulating the two-tier order")

    outcome = run(SYSTEMS["aurora"], two_nodes(1e8), {}, lambda: any(asked), report)
    assert any(asked) and outcome.result.status is Status.CANCELLED
    assert outcome.result.solution.send_order.mode != "two-tier"
    assert "two-tier order" not in outcome.notes and "matched order" in outcome.notes


@pytest.mark.parametrize("wait", [0.0, 0.3, pytest.param(1.5, marks=pytest.mark.everything)])
@pytest.mark.clock
def test_aurora_stops_soon_in_whatever_it_does(wait):
    problem = big_problem()
    begin = time.perf_counter()
    result = run(SYSTEMS["aurora"], problem, {}, lambda: time.perf_counter() - begin > wait).result
    assert time.perf_counter() - begin < wait + 2
    assert result.status is Status.CANCELLED
    assert result.bound <= result.objective
    assert simulate(result.solution, problem).total == result.objective


@pytest.mark.parametrize("experts", [2, 4])
def test_a_stopped_bound_still_holds(experts):
    """One hot expert belongs on the fast one of two GPUs, which a stopped search does not know yet."""
    cards = (make_gpu(0, flops=1e8), make_gpu(1, flops=2e9))
    cluster = Cluster(name="two speeds", nodes=(Node(name="all", gpus=cards),))
    chosen = np.minimum(np.arange(40) // 30, experts - 1).astype(np.int16)
    trace = RoutingTrace("hot", chosen[:, None, None], experts)
    problem = Problem(trace, cluster, make_model(1, experts), Datasheet())
    best = best_of_all(problem, np.full(2, experts // 2))
    for asked in range(8):
        answers = iter([False] * asked)
        result = run(SYSTEMS["aurora"], problem, {}, lambda answers=answers: next(answers, True)).result
        assert 0 < result.bound <= best * ROUND_OFF


def two_nodes(link: float | None, gpus: int = 4) -> Problem:
    """All tokens of one GPU go to all others, evenly; fast or no links in two nodes."""
    nodes = tuple(Node(name=name, gpus=(make_gpu(),) * (gpus // 2), link_bandwidth=link) for name in ("left", "right"))
    chosen = np.tile(np.arange(gpus, dtype=np.int16), 100)[:, None, None]
    trace = RoutingTrace("from one", chosen, gpus, source_rank=np.zeros(len(chosen), dtype=np.int32))
    return Problem(trace, Cluster(name="two nodes", nodes=nodes), make_model(1, gpus), Datasheet(launch=0))


def test_gpus_with_links_send_for_the_one_that_has_much_to_send():
    outcome = outcome_of("eplb", two_nodes(1e8), order="two-tier", redundant=0)
    plan, problem = outcome.result.solution, two_nodes(1e8)
    assert plan.send_order.mode == "two-tier"
    orders = (phased_order(Load(problem, plan.placement), mode, never) for mode in ("matched", "two-tier"))
    # The bytes of GPU 0 for the other node leave by two ports, and the rest of the gap are the links.
    sent = [simulate(plan_with(plan.placement, send_order=order), problem).seconds_of_kind()["dispatch"] for order in orders]
    assert 1.8 < sent[0] / sent[1] <= 2
    assert check_plan(plan, problem) == pytest.approx(outcome.timeline.total)


@settings(max_examples=examples(60), deadline=None)
@given(problems(), seeds, st.sampled_from(("matched", "shared", "two-tier", "concurrent")))
def test_no_order_of_a_mode_beats_what_it_is_left_out_by(problem, seed, mode):
    gpus, experts = len(problem.cluster.gpus), problem.workload.num_experts
    homes = np.random.default_rng(seed).integers(0, gpus, (problem.workload.layers, experts))
    placement = to_placement(homes, problem)
    least = least_seconds([work_of(placement, problem)], problem.network, mode)
    assert least <= seconds_in(mode, placement, problem) * (1 + 1e-7)


def test_a_two_tier_plan_may_beat_the_bound_of_straight_bytes_but_none_that_is_claimed():
    for system in ("aurora", "eplb"):
        modes = ("best", "matched", "two-tier")
        problem = two_nodes(1e8)
        best, straight, relayed = (outcome_of(system, problem, order=mode).result for mode in modes)
        of_straight_bytes = bound_of_plan(straight.solution, problem, straight=True)
        assert relayed.bound <= relayed.objective < of_straight_bytes <= straight.objective * ROUND_OFF
        assert straight.bound == pytest.approx(relayed.bound)
        assert best.solution.send_order == relayed.solution.send_order and best.bound == relayed.bound


def test_the_best_order_is_two_tier_only_where_gpus_can_relay():
    for link, gpus, tried in ((1e8, 4, True), (None, 4, False), (1e8, 2, False)):
        problem = two_nodes(link, gpus)
        assert ("two-tier" in modes_of("best", problem)) == tried
    slow = replace(two_nodes(1e8), cluster=two_nodes(1e8).cluster.model_copy(update={"latency": 1.0}))
    outcome = outcome_of("aurora", slow)
    assert "not made: it takes at least" in outcome.notes["two-tier order"].value
    assert outcome.result.solution.send_order.mode == "concurrent"


def test_progress_is_reported_and_never_falls():
    for name in ("aurora", "sjf"):
        said = []
        options = {"placement": "aurora"} if name == "sjf" else {}
        run(SYSTEMS[name], small_problem(), options, report=lambda *parts, said=said: said.append(parts))
        done = [part[0] for part in said]
        assert done == sorted(done)
        assert 0 <= done[0] <= done[-1] <= 1
        assert all(part[1] for part in said)


# Memory and slots


@pytest.mark.parametrize("name", [*EVEN, "exflow", "eplb", "lina"])
def test_experts_that_do_not_fit_anywhere_say_what_would_help(name):
    says = r"add GPUs|more GPUs|take 6 devices"
    if name in EVEN:
        says = "GPU 2 · type-2 has memory for 1 per layer, all GPUs together for 5; add GPUs or memory"
    with pytest.raises(InputError, match=says) as caught:
        solve(name, with_memory(small_problem(), [2, 2, 1]))
    assert name not in EVEN or "uneven" not in str(caught.value)


def test_uneven_slots_are_offered_where_they_help():
    problem = with_memory(small_problem(), [1, 2, 4])
    with pytest.raises(InputError, match="or set slots=uneven"):
        solve("aurora", problem)
    outcome = outcome_of("aurora", problem, slots="uneven")
    assert not any("Theorem 5.1" in note for note in outcome.notes)  # its even placement does not fit
    result = outcome.result
    assert np.all(result.solution.placement.slots <= [1, 2, 4])
    assert check_plan(result.solution, problem) == pytest.approx(result.objective, rel=1e-9)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 30))
def test_spread_evenly(slots, experts):
    assume(sum(slots) >= experts)
    taken = spread_evenly(np.array(slots), experts)
    assert taken.sum() == experts
    assert np.all(taken <= slots)
    # Nobody could give an expert to someone with two fewer and room for one more.
    room = taken < slots
    assert not room.any() or taken.max() - taken[room].min() <= 1


# Real recordings


@pytest.mark.skipif(not RECORDING.exists(), reason="shared/data/deepseek-v2-lite-routing.npz is not there")
@pytest.mark.parametrize("task", ["intent", pytest.param("summary", marks=pytest.mark.everything)])
def test_deepseek_v2_lite_on_the_sample_cluster(task):
    layers = 2
    with np.load(RECORDING) as recorded:
        trace = RoutingTrace(task, recorded[task][:, :layers].astype(np.int16), 64)
    cluster = Cluster.from_json(SAMPLE_CLUSTER.read_text(encoding="utf-8"), "sample")
    model = make_model(layers, 64, 6, d_model=2048, d_ff=1408)
    problem = Problem(trace, cluster, model, Datasheet())
    result = solve("aurora", problem, time_limit=1.0)
    assert check_plan(result.solution, problem) == pytest.approx(result.objective, rel=1e-9)
    assert result.gap < 0.05
    # Others may use replicas or other executions, which this bound does not cover.
    for name in EVEN[1:]:
        other = solve(name, problem)
        assert result.bound <= other.objective
        assert result.objective < other.objective
