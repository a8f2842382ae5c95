"""Two models' all-to-alls as one schedule: legal together, carried out as planned, and close to the bound of all orders."""

import numpy as np
import pytest
from hypothesis import given, settings

from engine.costs import Datasheet
from engine.errors import IllegalError, InputError
from engine.launch.places.fold import apart
from engine.network import Network
from engine.plan import Plan, SendOrder
from engine.problem import Problem, make_problem
from engine.result import never
from engine.simulate import bound_of_plan, simulate
from engine.simulate.colocated import colocated_bound, colocated_timeline
from engine.simulate.work import Load, Work
from engine.systems import SYSTEMS, run
from engine.systems.aurora_colocated import best_orders, joint_orders, layer_order, worth_trying
from engine.systems.base import silent
from engine.systems.pieces import linear_placement
from engine.validate import refuse_broken
from engine.validate.refusal import check_joint_order
from engine.workload import RoutingTrace
from tests.cases.examples import examples
from tests.cases.samples import EIGHT, problem_of, sample_model, sample_problem
from tests.cases.two_models import pairs
from tests.oracles.plans import check_timeline
from tests.strategies import cluster_of, make_gpu

PAIRS = ("alpha-code", "beta-code"), ("alpha-prose", "beta-man"), ("alpha-man", "beta-prose")


def samples_together(first: str, second: str) -> Problem:
    one, other = (sample_problem(name) for name in (first, second))
    return make_problem(one.workload, EIGHT, one.model, Datasheet(), second=(other.workload, other.model))


@pytest.mark.parametrize("names", [PAIRS[0], *(pytest.param(names, marks=pytest.mark.everything) for names in PAIRS[1:])])
def test_the_default_for_two_models_comes_close_to_what_no_order_can_undercut(names):
    problem = samples_together(*names)
    outcome = run(SYSTEMS["aurora"], problem, {"time_limit": 1})
    plan = outcome.result.solution
    assert outcome.timeline.total <= 1.01 * bound_of_plan(plan, problem)
    assert check_timeline(outcome.timeline, plan, problem) == outcome.timeline.total


@settings(max_examples=examples(40, 4), deadline=None)
@given(pairs())
def test_a_joint_order_is_legal_and_takes_what_it_promises(problem):
    plan = joint_plan(problem)
    refuse_broken(plan, problem)
    assert check_timeline(simulate(plan, problem), plan, problem) >= bound_of_plan(plan, problem) * (1 - 1e-7)
    assert plan.model_validate_json(plan.model_dump_json()).id == plan.id


def joint_plan(problem: Problem) -> Plan:
    placements = [linear_placement(side) for side in (problem, problem.second)]
    return best_orders(placements, problem, "joint", never, silent).plan


def moved(plan: Plan, which: str, kind: str, column: str, value) -> Plan:
    """The plan with one column of the first layer's schedule of an order changed."""
    order = getattr(plan, which)
    first, *others = getattr(order, kind)
    first = first.model_copy(update={column: value(getattr(first, column))})
    return plan.model_copy(update={which: order.model_copy(update={kind: (first, *others)})})


def test_a_joint_order_that_is_none_is_refused():
    problem = samples_together(*PAIRS[0])
    plan = joint_plan(problem)
    for change, message in (
        # Each model's own sends stay a matching, but b's no longer wait for the phases in which a has their ports.
        (("send_order_b", "dispatch", "phase", lambda phase: phase - phase.min()), "both models together: .* no match"),
        (("send_order", "combine", "phase", np.zeros_like), "layer 0"),
        (("send_order_b", "combine", "duration", lambda duration: np.append(duration, 1.0)), "have the same phases"),
    ):
        with pytest.raises(InputError, match=message):
            refuse_broken(moved(plan, *change), problem)
    # The first model's combine never comes before its dispatch.
    ends = {"dispatch": plan.send_order.combine, "combine": plan.send_order.dispatch}
    swapped = plan.model_copy(update={"send_order": plan.send_order.model_copy(update=ends)})
    with pytest.raises(IllegalError, match="waits for a dispatch"):
        check_joint_order(swapped, problem.network, timed=False)
    alone = make_problem(problem.workload, problem.cluster, problem.model, problem.cost)
    with pytest.raises(InputError, match="one of two models"):
        run(SYSTEMS["aurora"], alone, {"order": "joint"})
    with pytest.raises(ValueError, match="both must have it"):
        Plan(**(dict(plan) | {"placement_b": None, "send_order_b": None}))


@pytest.mark.parametrize("recorded", [0, 1])
def test_other_traffic_than_planned_is_carried_too(recorded):
    """Pairs that the schedule does not know have a phase of their own; the timeline keeps all rules."""
    planned, other = samples_together(*PAIRS[recorded]), samples_together(*PAIRS[1 - recorded])
    plan = joint_plan(planned)
    few = RoutingTrace("few", np.zeros((8, planned.workload.layers, 1), dtype=np.int16), 16)
    beside_few = make_problem(other.workload, EIGHT, other.model, other.cost, second=(few, sample_model("alpha")))
    for problem in (other, beside_few):
        timeline = simulate(plan, problem)
        assert check_timeline(timeline, plan, problem) >= bound_of_plan(plan, problem) * (1 - 1e-7)


def test_random_all_to_alls_of_eight_gpus_end_close_to_their_bound():
    """The all-to-alls take most of the time here, so that their common order decides."""
    network = Network.of(EIGHT)
    concurrent = SendOrder(mode="concurrent")
    for seed in range(10):
        compute, traffic = random_pair(seed, network)
        unordered = colocated_timeline(*compute, *traffic, concurrent, concurrent, network)["end"].max()
        assert joint_seconds(compute, traffic, network) < unordered
        assert joint_seconds(compute, traffic, network) <= 1.05 * colocated_bound(*compute, *traffic, network)


def random_pair(seed: int, network: Network):
    rng = np.random.default_rng(seed)
    compute, traffic = [], []
    for _ in range(2):
        sent = rng.random((1, 8, 8)) * 1e6 * ~np.eye(8, dtype=bool)
        short = np.full((1, 8), 1e-4)
        compute.append({"gate": short, "ffn": 0.1 * sent.sum(axis=1) / 1e9, "aggregate": short})
        traffic.append((sent, sent.transpose(0, 2, 1)))
    return compute, traffic


def joint_seconds(compute, traffic, network: Network) -> float:
    works = [
        Work(compute=seconds, dispatch=there, combine=back) for seconds, (there, back) in zip(compute, traffic, strict=True)
    ]
    schedules, _ = layer_order(works, 0, network, np.zeros(network.gpus), never)
    a, b, back_a, back_b = ((schedule,) for schedule in schedules)
    orders = SendOrder(mode="joint", dispatch=a, combine=back_a), SendOrder(mode="joint", dispatch=b, combine=back_b)
    return float(colocated_timeline(*compute, *traffic, *orders, network)["end"].max())


def test_ranks_of_a_launch_carry_out_each_models_part_as_a_matched_order():
    problem = samples_together(*PAIRS[1])
    launched = apart(joint_plan(problem))
    assert launched.send_order.mode == launched.send_order_b.mode == "matched"
    refuse_broken(launched, problem)
    assert check_timeline(simulate(launched, problem), launched, problem) > 0


@pytest.mark.parametrize(("gpus", "layers", "tried"), [(64, 61, True), (64, 62, False), (128, 15, True), (129, 1, False)])
def test_the_default_leaves_a_joint_order_out_where_it_would_take_minutes(gpus, layers, tried):
    cluster = cluster_of(*[make_gpu()] * gpus)
    trace = RoutingTrace("few", np.zeros((2, layers, 1), dtype=np.int16), 4)
    problem = problem_of(trace, cluster)
    assert worth_trying(problem) is tried
    if gpus > 128:
        with pytest.raises(InputError, match="128 GPUs at most"):
            joint_orders([Load(problem, linear_placement(problem))], never)
