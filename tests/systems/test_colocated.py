"""Two models on one cluster: timelines keep the rules, no placement or order gets below the bound, and their all-to-alls as one
schedule are legal together, carried out as planned, and close to the bound of all orders."""

from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compare.figures import metrics
from engine.costs import Datasheet
from engine.errors import IllegalError, InputError
from engine.goal import Goal
from engine.launch.places.fold import apart
from engine.network import Network
from engine.plan import Plan, SendOrder, Travel
from engine.problem import Problem, make_problem
from engine.result import never
from engine.simulate import bound_of_plan, simulate
from engine.simulate.colocated import colocated_bound, colocated_timeline
from engine.simulate.work import Load, Work
from engine.systems import SYSTEMS, aurora_colocated, run
from engine.systems.aurora_colocated import best_orders, joint_orders, layer_order, layer_seconds, sides_of_layers, worth_trying
from engine.systems.base import silent
from engine.systems.pieces import linear_placement, phased_order, to_placement
from engine.validate import refuse_broken
from engine.validate.refusal import check_joint_order
from engine.workload import RoutingTrace
from tests.cases import plans
from tests.cases.examples import examples
from tests.cases.launch_plans import plan_with
from tests.cases.samples import EIGHT, problem_of, sample, sample_model, sample_problem
from tests.cases.two_models import pair_of_samples, pairs, plan_of, planned_pairs
from tests.oracles.plans import check_timeline
from tests.strategies import cluster_of, make_gpu, make_model

PAIRED = [system for system in SYSTEMS.values() if Goal.TWO_MODELS in system.goals]


@settings(max_examples=examples(60), deadline=None)
@given(planned_pairs())
def test_a_timeline_of_two_models_keeps_the_rules_and_its_bound(case):
    plan, problem = case
    timeline = simulate(plan, problem)
    assert check_timeline(timeline, plan, problem) == timeline.total
    assert timeline.total >= bound_of_plan(plan, problem) * (1 - 1e-7)
    figures = metrics(plan, problem, timeline)
    assert 0 <= figures.utilisation <= 1 and figures.memory > 0


def test_asked_to_stop_no_layer_is_bounded_any_more(monkeypatch):
    problem, bounded = pair_of_samples(), []
    whole = run(SYSTEMS["aurora"], problem, {"order": "concurrent"}).result
    real = aurora_colocated._layer_bound
    monkeypatch.setattr(aurora_colocated, "_layer_bound", lambda *layer: bounded.append(1) or real(*layer))
    broken_off = run(SYSTEMS["aurora"], problem, {"order": "concurrent"}, lambda: bool(bounded)).result
    assert len(bounded) == 1 < problem.workload.layers and broken_off.bound <= whole.bound < broken_off.objective


def test_a_broken_timeline_is_noticed():
    problem = pair_of_samples()
    plan = run(SYSTEMS["linear"], problem).result.solution
    for kind, columns, factor in (("combine", ["start", "end"], 0.5), ("combine", "bytes", 0.5), ("dispatch", "end", 0.5)):
        timeline = simulate(plan, problem)
        timeline.events.loc[timeline.events["kind"] == kind, columns] *= factor
        with pytest.raises(IllegalError):
            check_timeline(timeline, plan, problem)


@settings(max_examples=examples(20, 4), deadline=None)
@given(pairs(most=3), st.sampled_from(PAIRED), st.integers(0, 3))
def test_every_system_for_two_models_gives_a_legal_plan_above_its_bound(problem, system, seed):
    options = {"seed": seed} if "seed" in system.options.model_fields else {}
    if "time_limit" in system.options.model_fields:
        options["time_limit"] = 0.2
    result = run(system, problem, options).result
    plan = result.solution
    assert check_timeline(simulate(plan, problem), plan, problem) == pytest.approx(result.objective)
    assert result.bound <= result.objective * (1 + 1e-9)


@settings(max_examples=examples(12, 4), deadline=None)
@given(st.data(), pairs(most=3))
def test_no_placement_or_order_gets_below_auroras_bound(data, problem):
    """The bound of one run holds for random placements of as many slots, in any order."""
    bound = run(SYSTEMS["aurora"], problem, {"time_limit": 0.1}).result.bound
    layers, experts, gpus = problem.workload.layers, problem.workload.num_experts, len(problem.cluster.gpus)
    slots = np.repeat(np.arange(gpus), -(-experts // gpus)).tolist()
    for _ in range(3):
        rows = np.array([[data.draw(st.permutations(slots)) for _ in range(layers)] for _ in range(2)])[..., :experts]
        both = [to_placement(row, side) for row, side in zip(rows, (problem, problem.second), strict=True)]
        for mode in ("matched", "concurrent"):
            assert simulate(plan_of(problem, *both, mode), problem).total >= bound * (1 - 1e-7)


@pytest.mark.parametrize("models", [1, 2])
@pytest.mark.parametrize(
    "travel",
    [None]
    + [Travel(unit=unit, dispatch="fp8", combine="bf16") for unit in ("copies", "gpu", "node")]
    + [Travel(combine="fp8"), Travel(dispatch="fp32"), Travel(unit="gpu"), Travel(unit="node"), Travel(replicas="fixed")]
    + [Travel(unit="gpu", replicas=rule) for rule in ("fewest", "nearest-static", "lp")],
    ids=lambda travel: travel.in_words if travel else "plain",
)
def test_no_placement_at_all_is_below_a_claim_however_tokens_travel(travel, models):
    rng = np.random.default_rng(5)
    chosen = np.argsort(rng.random((60, 1, 4)) + np.array([0, 0, 0, 0.7]), axis=2)[:, :, :3].astype(np.int16)
    trace, model = RoutingTrace("shared", chosen, 4), make_model(1, 4, 3)
    cluster = cluster_of(make_gpu(send=1e6), make_gpu(send=1e6), latency=1e-5)
    second = (RoutingTrace("other", chosen[::-1], 4), model) if models == 2 else None
    problem = make_problem(trace, cluster, model, Datasheet(), second, travel=travel)
    claim = run(SYSTEMS["aurora"], problem, {"time_limit": 0.2}).result.solution.claim
    assert (claim.scope == "placement and order") == (travel is None)
    halves = [to_placement(np.array([row]), problem) for row in sorted(set(permutations((0, 0, 1, 1))))]
    if claim.scope == "placement and order":
        every = (plans.plan_of(*placed, travel=travel) for placed in product(halves, repeat=models))
        assert min(simulate(plan, problem).total for plan in every) >= claim.bound * (1 - 1e-7)
    # The claim of a file is no better than ours: over placements it counts where rows are those of the kernels alone.
    plan = run(SYSTEMS["linear"], problem).result.solution
    lied = plan.model_copy(update={"claim": claim.model_copy(update={"bound": 1e-9, "scope": "placement and order"})})
    assert (metrics(lied, problem).bound is None) == (travel is not None)


def test_aurora_beats_what_it_is_compared_with_and_the_papers_method():
    problem = pair_of_samples(8, 16)
    outcomes = {system.name: run(system, problem) for system in PAIRED if system.name != "best"}
    objectives = {name: outcome.result.objective for name, outcome in outcomes.items()}
    assert min(objectives, key=objectives.get) == "aurora", objectives
    note = outcomes["aurora"].notes["time by the paper's method (decoupled) / time by ours"]
    assert note.value >= 1


@settings(max_examples=examples(40, 4), deadline=None)
@given(pairs(linked=False), st.integers(0, 99))
def test_the_estimate_of_the_search_is_no_faster_than_any_order(problem, seed):
    """A layer's estimate serves the first model first, so the bound of all orders is never above it."""
    rng = np.random.default_rng(seed)
    layers, experts, gpus = problem.workload.layers, problem.workload.num_experts, len(problem.cluster.gpus)
    rows = rng.integers(gpus, size=(2, layers, experts))
    both = [to_placement(row, side) for row, side in zip(rows, (problem, problem.second), strict=True)]
    plan = plan_of(problem, *both, "concurrent")
    for layer, sides in enumerate(sides_of_layers(problem)):
        seconds = layer_seconds(sides, problem)(*rows[:, layer])
        # The estimate has no start-ups, and a's gate at the end, where it need not be waited for on every GPU.
        slack = 6 * problem.network.latency + sides[0].gate.max() + sides[1].gate.max() + 1e-12
        assert bound_of_plan(plan, problem, layer, layer) <= seconds + slack


def test_unequal_experts_and_lone_systems_are_refused_and_plans_of_other_numbers_of_models():
    problem = pair_of_samples()
    fewer = RoutingTrace("small", np.zeros((10, 2, 1), dtype=np.int16), 4)
    with pytest.raises(InputError, match="choose a second model with 8 experts"):
        make_problem(problem.workload, problem.cluster, problem.model, problem.cost, second=(fewer, make_model(2, 4)))
    alone = make_problem(problem.workload, problem.cluster, problem.model, problem.cost)
    for name, given_problem, says in (("rcs", problem, "one model at a time"), ("rec", alone, "open a second recording")):
        with pytest.raises(InputError, match=says):
            run(SYSTEMS[name], given_problem)
    for order in ("shared", "two-tier"):
        with pytest.raises(InputError, match=f"cannot follow a {order} order"):
            run(SYSTEMS["aurora"], problem, {"order": order})
    pair_plan, single_plan = (run(SYSTEMS["linear"], given).result.solution for given in (problem, alone))
    for plan, given_problem, says in ((pair_plan, alone, "open the second"), (single_plan, problem, "close the second")):
        with pytest.raises(InputError, match=says):
            simulate(plan, given_problem)
    with pytest.raises(ValueError, match="both a placement and a send order"):
        Plan(**(dict(pair_plan) | {"send_order_b": None}))
    assert SendOrder(mode="concurrent") == pair_plan.send_order_b


def test_two_models_share_the_memory_or_do_not_fit_it_together():
    model = make_model(2, 8)
    cards = [make_gpu(memory=2 * 2 * 1.5 * model.bytes_per_expert / 0.9)] * 4
    trace = pair_of_samples().workload
    alone = make_problem(trace, cluster_of(*cards), model, Datasheet())
    run(SYSTEMS["linear"], alone)
    both = make_problem(trace, cluster_of(*cards), model, Datasheet(), second=(trace, model))
    for name in ("aurora", "linear"):
        with pytest.raises(InputError, match="add GPUs"):
            run(SYSTEMS[name], both)
    # Fast GPUs have room for six experts per layer, slow ones for four: both models fit together.
    cards = [
        make_gpu(send=rate * 1e9, memory=2 * room * model.bytes_per_expert * 1.01 / 0.9)
        for rate, room in ((12.5, 6), (10, 6), (6.25, 4), (5, 4))
    ]
    problem = make_problem(trace, cluster_of(*cards), model, Datasheet(), second=(trace, model))
    plan = run(SYSTEMS["aurora"], problem, {"slots": "uneven", "time_limit": 1.0}).result.solution
    held = plan.placement.slots + plan.placement_b.slots
    assert (held <= [6, 6, 4, 4]).all() and (held.sum(axis=1) == 16).all()


@pytest.mark.parametrize("first", ["alpha-code", "alpha-prose"])
def test_same_model_packing_takes_as_long_as_the_slower_model_alone_on_its_half(first):
    traces = sample(first, 2000), sample("beta-code", 2000)
    models = sample_model("alpha"), sample_model("beta")
    problem = make_problem(traces[0], EIGHT, models[0], Datasheet(), second=(traces[1], models[1]))
    plan = run(SYSTEMS["packing"], problem).result.solution
    alone, placements = [], (plan.placement, plan.placement_b)
    for turn, (trace, model, placement) in enumerate(zip(traces, models, placements, strict=True)):
        mine = list(range(turn, 8, 2))
        recorded = replace(trace, source_rank=(trace.rank_of_token(8) // 2).astype(np.int32))
        here = make_problem(recorded, EIGHT.part(mine), model, Datasheet())
        own = to_placement(np.searchsorted(mine, placement.gpu_of_expert), here)
        order = phased_order(Load(here, own), "matched", lambda: False)
        alone.append(simulate(plan_with(own, send_order=order), here).total)
    assert simulate(plan, problem).total == pytest.approx(max(alone), rel=1e-9)
    refuse_broken(plan, problem)


def test_where_tokens_start_is_said_of_both_models_and_names_gpus_that_exist():
    plan = run(SYSTEMS["packing"], pair_of_samples()).result.solution
    assert plan.token_gpus == (0, 0, 2, 2) and plan.token_gpus_b == (1, 1, 3, 3)
    for change, message in (
        ({"token_gpus_b": None}, "of both"),
        ({"token_gpus": (0, 0, 2, 4)}, "0 … 3"),
        ({"token_gpus": (0, 2)}, "each of 4 ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            Plan(**(dict(plan) | change))


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
        rng = np.random.default_rng(seed)
        compute, traffic = [], []
        for _ in range(2):
            sent = rng.random((1, 8, 8)) * 1e6 * ~np.eye(8, dtype=bool)
            short = np.full((1, 8), 1e-4)
            compute.append({"gate": short, "ffn": 0.1 * sent.sum(axis=1) / 1e9, "aggregate": short})
            traffic.append((sent, sent.transpose(0, 2, 1)))
        compute, traffic = compute, traffic
        unordered = colocated_timeline(*compute, *traffic, concurrent, concurrent, network)["end"].max()
        assert joint_seconds(compute, traffic, network) < unordered
        assert joint_seconds(compute, traffic, network) <= 1.05 * colocated_bound(*compute, *traffic, network)


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


def test_sorted_colocation_puts_the_popular_beside_the_unpopular():
    problem = pair_of_samples(8)
    plan = run(SYSTEMS["aurora-sorted"], problem).result.solution
    refuse_broken(plan, problem)
    for layer in range(problem.workload.layers):
        rank_of_gpu = [
            np.argsort(np.argsort(sign * side.workload.load[layer], kind="stable"))[np.argsort(placement.gpu_of_expert[layer])]
            for sign, side, placement in ((1, problem, plan.placement), (-1, problem.second, plan.placement_b))
        ]
        assert np.array_equal(*rank_of_gpu)


def test_decoupled_colocation_has_the_best_pairs_and_then_the_best_gpus_for_these():
    problem = pair_of_samples(4, 4)
    plan = run(SYSTEMS["aurora-decoupled"], problem).result.solution
    refuse_broken(plan, problem)
    everyone, options = np.arange(4), aurora_colocated.DecoupledOptions()
    for layer, sides in enumerate(sides_of_layers(problem)):
        slots = aurora_colocated.shared_slots((problem, problem.second), "even")
        bundles, cost, weight = aurora_colocated.matching_tables(sides, slots, options, problem.workload.layers, never)
        placements = plan.placement, plan.placement_b
        a, b = (own[np.argsort(each.gpu_of_expert[layer])] for own, each in zip(bundles, placements, strict=True))
        assert weight[a, b].max() == min(weight[everyone, list(order)].max() for order in permutations(range(4)))
        assert cost[everyone, a, b].max() == min(cost[list(order), a, b].max() for order in permutations(range(4)))


@pytest.mark.parametrize(("options", "mode"), [({}, "matched"), ({"gpus": "random", "sends": "rcs", "seed": 3}, "sequential")])
def test_packing_gives_each_model_half_of_the_gpus_to_itself(options, mode):
    problem = pair_of_samples(8)
    plan = run(SYSTEMS["packing"], problem, options).result.solution
    refuse_broken(plan, problem)
    halves = [set(np.unique(placement.gpu_of_expert)) for placement in (plan.placement, plan.placement_b)]
    assert halves == [set(plan.token_gpus), set(plan.token_gpus_b)] and not halves[0] & halves[1]
    assert (halves[0] == {0, 2, 4, 6}) == (options == {}) and plan.send_order.mode == plan.send_order_b.mode == mode
