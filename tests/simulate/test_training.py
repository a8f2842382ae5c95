"""Simulated training steps: legal schedules, closed forms, bounds, and changes without effect."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import strategies as st

from engine.cluster import Cluster, Node
from engine.compare.figures import metrics
from engine.costs import Datasheet
from engine.costs.choice import Combined
from engine.costs.measured import CollectiveTimes, MeasuredTimes
from engine.costs.profiled import Profiled
from engine.errors import IllegalError, InputError
from engine.overlap.operator_axes import latest_last
from engine.overlap.partition import partition
from engine.overlap.pipeline_degree import pipeline_seconds
from engine.overlap.stage_pipeline import ChainInstance
from engine.plan import Overlap, PartitionRange, Placement, Priority, expert_groups
from engine.problem import Problem
from engine.simulate import bound_of_plan, simulate
from engine.simulate.training import check_step_parts, price_step, step_seconds
from engine.simulate.training.bound import _forward
from engine.simulate.training.pricing import route, route_parts
from engine.simulate.training.step import step_state_bytes
from engine.systems.pieces import linear_placement
from engine.timeline import Timeline
from engine.workload import ExpertLoad, RoutingTrace
from tests import everything
from tests.cases.examples import tried
from tests.cases.training import degrees, graph_of, plan_of, problem_of
from tests.oracles.capacity_passing import even_bounds, kept_with_passing, sent
from tests.oracles.training import check_step, fastest_step
from tests.strategies import cluster_of, clusters, make_gpu

POLICIES = ("fair", "priority", "fifo", "fixed")


def events_of(timeline: Timeline, named: str) -> pd.DataFrame:
    """The events with labels in which a pattern is found."""
    return timeline.events[[bool(re.search(named, label)) for label in timeline.labels]]


@st.composite
def planned(draw):
    """A small step on a drawn cluster with drawn parts of a plan."""
    cluster = draw(clusters(2, 4))
    gpus = len(cluster.gpus)
    problem = problem_of(
        cluster,
        experts=gpus * draw(st.integers(1, 2)),
        k=draw(st.integers(1, 2)),
        gate=draw(st.sampled_from(("switch", "batch-prioritised"))),
        capacity_factor=draw(st.sampled_from((0, 1, 1.5))),
        tied_embeddings=draw(st.booleans()),
    )
    size = draw(st.sampled_from((1e3, 2e4, 1e7)))
    priority = Priority(policy=draw(st.sampled_from(POLICIES)), **{draw(st.sampled_from(("bucket", "micro_op"))): size})
    parts = {}
    if draw(st.booleans()):
        order = draw(st.sampled_from(("dispatch-first", "interleaved")))
        parts["pipeline"] = degrees(problem, draw(st.integers(1, 4)), draw(st.integers(1, 4)), order)
    else:
        forward = graph_of(problem).of_phase("forward")
        names = [operator.name for operator in forward]
        latest = latest_last([operator.kind for operator in forward], problem.step.gate)
        first = draw(st.sampled_from(np.flatnonzero(latest > np.arange(len(names))).tolist()))
        last = draw(st.integers(first + 1, int(latest[first])))
        cut = PartitionRange(first=names[first], last=names[last], parts=draw(st.integers(2, 4)))
        under = {"dw.2.experts_down": "dx.1.combine", "dw.head": "dx.2.combine", "dw.2.qkv": "dx.1.dispatch"}
        chosen = draw(st.sets(st.sampled_from(sorted(under))))
        parts["overlap"] = Overlap(ranges=(cut,), under={name: under[name] for name in chosen}, irregular=draw(st.booleans()))
    return plan_of(problem, priority, **parts), problem


@tried(50, planned())
def test_every_simulated_step_is_legal_and_above_its_bound(case):
    plan, problem = case
    timeline = simulate(plan, problem)
    assert check_step(timeline, plan, problem, graph_of(problem)) == pytest.approx(timeline.total)
    assert timeline.total >= bound_of_plan(plan, problem) * (1 - 1e-9)
    assert sum(timeline.decomposition().values()) == pytest.approx(timeline.total)
    figures = metrics(plan, problem, timeline)
    assert figures.exposed_communication <= figures.total
    for resource in range(len(timeline.resources)):
        exposed = timeline.exposed_intervals(resource)
        assert (exposed[:, 1] > exposed[:, 0]).all() and (exposed[1:, 0] >= exposed[:-1, 1]).all()


@pytest.mark.parametrize("order", ["dispatch-first", "interleaved"])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_a_pipelined_layer_takes_what_the_recurrences_say(parts, order):
    problem = problem_of(capacity_factor=1)
    plan = plan_of(problem, pipeline=degrees(problem, parts, 1, order))
    timeline = simulate(plan, problem)
    priced = price_step(problem, plan.placement)

    def part(*names):
        return sum(priced.seconds[priced.index[name], :, 0] for name in names)

    steps = part("1.dispatch"), part("1.experts_up", "1.experts_down"), part("1.combine")
    expected = pipeline_seconds(*steps, order=order)[parts - 1]
    own = events_of(timeline, r"^1\.(dispatch|combine)\b")
    assert own["end"].max() - own["start"].min() == pytest.approx(expected)


def test_without_any_overlap_everything_adds_up():
    """One GPU type, nothing cut, gradients reduced only at the end: the sum of all operators."""
    problem = problem_of()
    plan = plan_of(problem, Priority(policy="fair", bucket=1e12))
    timeline, priced = simulate(plan, problem), price_step(problem, linear_placement(problem))
    network = [operator.kind == "gradient" for operator in priced.graph.operators]
    rest = priced.seconds[~np.array(network), 0, 0].sum()
    gradients = sum(operator.sent for operator in priced.graph.operators if operator.kind == "gradient")
    assert timeline.total == pytest.approx(rest + float(problem.cost.all_reduce(problem.cluster, np.float64(gradients))))


def test_a_weight_gradient_under_an_all_to_all_shortens_the_step_by_what_it_hides():
    problem = problem_of()
    priced = price_step(problem, linear_placement(problem))
    plain, moved = (
        simulate(plan_of(problem, Priority(policy="fair", bucket=1e12), overlap=Overlap(under=under)), problem).total
        for under in ({}, {"dw.2.experts_down": "dx.1.combine"})
    )
    hidden = min(priced.whole("dw.2.experts_down"), priced.whole("dx.1.combine"))
    assert plain - moved == pytest.approx(hidden)


def test_alike_gpus_share_a_lane_and_slow_ones_have_their_own():
    cards = [make_gpu(0), make_gpu(1, flops=1e9), make_gpu(0), make_gpu(0)]
    problem = problem_of(cluster_of(*cards))
    timeline = simulate(plan_of(problem), problem)
    assert timeline.resources == ("GPU 0 · type-0 and 2 like it", "GPU 1 · type-1")


def test_only_real_tokens_are_cheaper_than_full_buffers():
    problem = problem_of(capacity_factor=1.5)
    plans = [plan_of(problem, overlap=Overlap(irregular=irregular)) for irregular in (False, True)]
    assert simulate(plans[1], problem).total < simulate(plans[0], problem).total
    full, sent = (route(problem, linear_placement(problem), irregular).traffic.sum() for irregular in (False, True))
    assert full == pytest.approx(1.5 * sent)


def test_recorded_routing_keeps_the_shares_of_the_recording_and_drops_above_the_capacity():
    rng = np.random.default_rng(0)
    experts = np.where(rng.random((400, 2, 1)) < 0.7, 0, rng.integers(0, 4, (400, 2, 1))).astype(np.int16)
    trace = RoutingTrace("skewed", experts, 4, sequence=np.arange(400) // 10)
    free = problem_of(workload=trace, routing="recorded", capacity_factor=0)
    placement = linear_placement(free)
    routing = route(free, placement, irregular=True)
    assert not routing.even
    shares = free.demand / free.demand.sum(axis=2, keepdims=True) * free.step.tokens
    assert routing.rows[:, :, 0] == pytest.approx(shares.sum(axis=1))
    capped = problem_of(workload=trace, routing="recorded", capacity_factor=1)
    assert route(capped, placement, irregular=True).rows.max() == pytest.approx(4 * capped.step.capacity(capped.model))
    assert simulate(plan_of(free), free).total > simulate(plan_of(capped), capped).total
    timeline = simulate(plan_of(free), free)
    assert len(timeline.resources) == 4  # every GPU has other loads
    assert check_step(timeline, plan_of(free), free, graph_of(free)) == pytest.approx(timeline.total)


PACKED, SPREAD = ((0, 1), (2, 3)) * 2, ((0, 1), (1, 2), (2, 3), (3, 0))
"""Four experts on four GPUs: two groups that hold each once, and no groups."""


def placed(*rows: tuple) -> Placement:
    return Placement(experts=4, experts_of_gpu=rows, model_layers=tuple(range(1, len(rows) + 1)))


def test_packed_experts_stay_in_their_group_and_reduce_their_gradients():
    problem = problem_of()
    packed = placed(PACKED, PACKED)
    assert expert_groups(packed) == 2 and expert_groups(linear_placement(problem)) == 1
    routing = route(problem, packed, irregular=True)
    assert routing.even and not routing.traffic[:, :2, 2:].any() and not routing.traffic[:, 2:, :2].any()
    plan = plan_of(problem, placement=packed)
    timeline = simulate(plan, problem)
    assert sum("all_reduce" in label and "experts" in label for label in timeline.labels) > 0
    assert check_step(timeline, plan, problem, graph_of(problem, 2)) == pytest.approx(timeline.total)
    assert timeline.total >= bound_of_plan(plan, problem)


@pytest.mark.parametrize(
    ("ranges", "under", "reason"),
    [
        ([], {"dw.nothing": "dx.1.combine"}, "dw.nothing"),
        ([], {"dw.2.qkv": "2.combine.x"}, "no all-to-all"),
        ([], {"dw.1.qkv": "dx.1.combine"}, "needs the other"),
        ([("1.qkv", "nothing", 2)], {}, "nothing"),
        ([("1.combine", "1.qkv", 2)], {}, "comes first"),
        ([("head", "loss", 2)], {}, "cannot be cut together"),
        ([("1.qkv", "1.attention", 9)], {}, "only 8 sequences"),
        ([("1.qkv", "1.combine", 2), ("1.dispatch", "2.qkv", 2)], {}, "twice"),
        ([("1.qkv", "1.combine", 99)], {}, "99 parts"),
    ],
)
def test_a_plan_that_does_not_fit_the_step_is_refused(ranges, under, reason):
    problem = problem_of()
    cuts = tuple(PartitionRange(first=first, last=last, parts=parts) for first, last, parts in ranges)
    with pytest.raises(InputError, match=reason):
        simulate(plan_of(problem, overlap=Overlap(ranges=cuts, under=under)), problem)


def test_plans_for_training_and_for_inference_are_told_apart():
    problem, plan = problem_of(), plan_of(problem_of())
    for other, of in ((plan, replace(problem, step=None)), (plan.model_copy(update={"priority": None}), problem)):
        with pytest.raises(InputError, match="change the goal"):
            simulate(other, of)


def test_the_check_sees_broken_timelines():
    problem = problem_of()
    plan = plan_of(problem)
    timeline, graph = simulate(plan, problem), graph_of(problem)
    place = timeline.labels.index("1.experts_up")
    moved = timeline.events.copy()
    moved.loc[place, ["start", "end"]] -= 0.5 * (moved.loc[place, "end"] - moved.loc[place, "start"])
    with pytest.raises(IllegalError):
        check_step(replace(timeline, events=moved), plan, problem, graph)
    labels = timeline.labels[:place] + timeline.labels[place + 1 :]
    lost = replace(timeline, events=timeline.events.drop(index=place).reset_index(drop=True), labels=labels)
    with pytest.raises(IllegalError, match=r"experts_up never runs"):
        check_step(lost, plan, problem, graph)


def recorded_problem(**step) -> Problem:
    rng = np.random.default_rng(1)
    experts = rng.choice(4, size=(640, 2, 1), p=(0.55, 0.25, 0.15, 0.05)).astype(np.int16)
    trace = RoutingTrace("skewed", experts, 4, sequence=np.arange(640) // 16)
    return problem_of(workload=trace, routing="recorded", **step)


def test_a_cut_step_of_a_recording_is_simulated_part_by_part():
    problem = recorded_problem(capacity_factor=1)
    cut = PartitionRange(first="1.dispatch", last="1.aggregate", parts=4)
    plan = plan_of(problem, overlap=Overlap(ranges=(cut,), irregular=True))
    timeline = simulate(plan, problem)
    assert check_step(timeline, plan, problem, graph_of(problem)) == pytest.approx(timeline.total)
    exact = price_step(problem, plan.placement, irregular=True, as_recorded=(4,))
    own = events_of(timeline, r"^1\.dispatch · part").drop_duplicates("start").sort_values("start")
    lengths = (own["end"] - own["start"]).to_numpy()
    sizes = exact.sizes["1.dispatch"].seconds
    assert lengths == pytest.approx(exact.uneven["1.dispatch", 4].max(axis=1) - sizes)
    assert np.ptp(lengths) > 0.05 * lengths.max()


@tried(10, clusters(2, 3), st.sampled_from((20, 4000)), st.sampled_from(("fair", "priority")), fewest=1)
def test_no_schedule_of_a_small_step_is_below_its_bound(cluster, vocabulary, policy):
    """Brute force; where the network is never shared, the bound is also close."""
    problem = problem_of(cluster, experts=len(cluster.gpus), layers=1, batch=3, vocabulary=vocabulary)
    priority = Priority(policy=policy, bucket=1e12)

    def time(cut, degree, under):
        ranges = tuple(PartitionRange(first=first, last=last, parts=parts) for first, last, parts in cut)
        overlap = Overlap(ranges=ranges, under=under)
        plan = plan_of(problem, priority, overlap=overlap, pipeline=degrees(problem, 1, degree))
        if not under:  # those are allowed by the oracle's own rule
            check_step_parts(plan, problem, graph_of(problem))
        return step_seconds(plan, problem)

    parts = (2, 3) if everything.WANTED else (2,)
    least, bound = fastest_step(problem, graph_of(problem), time, parts), bound_of_plan(plan_of(problem), problem)
    assert bound <= least * (1 + 1e-9)
    assert bound >= 0.75 * least


@pytest.mark.parametrize("seed", range(5))
def test_the_forward_chain_is_bounded_by_what_one_group_needs(seed):
    """With one group of GPUs the dynamic programme for stretches is exact, and so is the bound."""
    rng = np.random.default_rng(seed)
    times = rng.random((9, 1)) / np.arange(1, 6) ** rng.uniform(0.3, 1, (9, 1))
    network, latest = rng.random(9) < 0.4, np.maximum.accumulate(np.minimum(np.arange(9) + rng.integers(-1, 6, 9), 8))
    instance = ChainInstance(network=network, times=times, latest_last=latest)
    ends = _forward(times[:, :, None], network, latest, np.zeros(9, dtype=bool))
    assert ends == pytest.approx(partition(instance).objective)
    slower = np.stack([times, times * rng.uniform(0.5, 1, (9, 1))], axis=2)
    slower[network] = times[network][:, :, None]
    both = _forward(slower, network, latest, np.zeros(9, dtype=bool))
    assert both.max() == pytest.approx(ends[0]) and both[1] <= both[0] + 1e-12


def test_the_bound_holds_where_one_gpu_is_slow_before_the_loss_and_another_after_it():
    """Backward passes start as soon as a GPU's own loss is there: the two slowest do not add up."""
    multiplies = make_gpu(0, send=1e12, flops=1e9, memory_bandwidth=5e10)
    copies = make_gpu(1, send=1e12, flops=1e12, memory_bandwidth=4.3e7)
    problem = problem_of(cluster_of(multiplies, copies), 2, layers=1, vocabulary=6000, batch=64)
    plan = plan_of(problem, Priority(policy="fair", bucket=1e5))
    total = simulate(plan, problem).total
    assert 0.9 * total < bound_of_plan(plan, problem) <= total


def test_the_bound_holds_for_full_buffers_of_a_recording():
    """Real tokens go as single sends and full buffers as one collective, which is timed by another formula."""
    rng = np.random.default_rng(0)
    trace = RoutingTrace("even", rng.integers(0, 4, (4000, 2, 1)).astype(np.int16), 4, sequence=np.arange(4000) // 10)
    card = make_gpu(send=1e9)
    nodes = tuple(Node(name=name, gpus=(card, card), link_bandwidth=3e5) for name in ("a", "b"))
    cluster = Cluster(name="linked", nodes=nodes, latency=5e-2)
    problem = problem_of(cluster, workload=trace, routing="recorded", capacity_factor=1)
    for irregular in (False, True):
        plan = plan_of(problem, Priority(policy="fair", bucket=1e9), overlap=Overlap(irregular=irregular))
        assert bound_of_plan(plan, problem) <= simulate(plan, problem).total * (1 + 1e-9)


def test_the_bound_holds_for_all_reduces_of_a_size_that_was_measured_to_be_good():
    points = ((1e3, 1e-1), (1.1e4, 1.01e-1), (1e6, 1e3))
    times = CollectiveTimes(operation="all_reduce", ranks=4, points=points)
    exchanged = CollectiveTimes(operation="all_to_all", ranks=4, points=((1e3, 1e-4), (1e6, 1e-3)))
    measured = Profiled(MeasuredTimes(name="m", origin="test", collectives=(times, exchanged)))
    problem = replace(problem_of(vocabulary=2000), cost=Combined(Datasheet(), measured))
    plan = plan_of(problem, Priority(policy="priority", micro_op=1.1e4))
    timeline = simulate(plan, problem)
    assert bound_of_plan(plan, problem) <= timeline.total * (1 + 1e-9)


def test_a_measured_all_reduce_takes_as_long_as_measured_fused_or_cut():
    problem = problem_of()
    graph = graph_of(problem)
    seconds = {operator.name: 0.25 if operator.kind == "gradient" else 0.0 for operator in graph.operators}
    timed = tuple(operator.model_copy(update={"seconds": seconds[operator.name]}) for operator in graph.operators)
    problem = replace(problem, graph=graph.model_copy(update={"operators": timed}))
    gradients = len(graph.of_phase("all_reduce"))
    for priority in (Priority(policy="fifo", bucket=4e3), Priority(policy="fifo", micro_op=1e3)):
        plan = plan_of(problem, priority)
        assert simulate(plan, problem).total == pytest.approx(0.25 * gradients)
        assert bound_of_plan(plan, problem) == pytest.approx(0.25 * gradients)


def test_gradients_of_packed_experts_are_summed_only_over_those_who_hold_them():
    """Two groups of two GPUs: an all-reduce of half of all experts, over two GPUs."""
    problem = problem_of(layers=1)
    timeline = simulate(plan_of(problem, Priority(policy="fifo", bucket=1e12), placed(PACKED)), problem)
    (event,) = events_of(timeline, r"all_reduce\.1\.experts").itertuples()
    assert event.bytes == 2 * problem.model.bytes_per_expert
    pair = problem.cluster.part([0, 2])
    assert event.end - event.start == pytest.approx(float(problem.cost.all_reduce(pair, np.float64(event.bytes))))


def test_replicas_whose_gradients_nobody_sums_up_are_refused():
    problem = problem_of(layers=1)
    assert expert_groups(placed(SPREAD)) == 1
    with pytest.raises(InputError, match="not in groups"):
        simulate(plan_of(problem, placement=placed(SPREAD)), problem)
    with pytest.raises(InputError, match="operator graph"):
        simulate(plan_of(problem, placement=placed(PACKED)), replace(problem, graph=graph_of(problem)))


def test_combines_bring_back_what_dispatches_sent():
    """All tokens of all GPUs go to one expert, with a port in ten times as slow as its port out."""
    cards = [make_gpu(0, send=1e6, receive=1e5), *(make_gpu(1, send=1e6, receive=1e6) for _ in range(3))]
    load = ExpertLoad("one", np.array([[1.0, 0, 0, 0]]), (1,))
    problem = problem_of(cluster_of(*cards), layers=1, workload=load, routing="recorded", capacity_factor=0)
    priced = price_step(problem, linear_placement(problem))
    sent = 3 * problem.step.tokens * problem.model.bytes_per_token
    for name, rate in (("1.dispatch", 1e5), ("1.combine", 1e6), ("dx.1.combine", 1e5), ("dx.1.dispatch", 1e6)):
        sizes = priced.sizes[name].seconds if name == "1.dispatch" else 0.0  # one number each for the full port out
        assert sizes == pytest.approx(3 * 8 / 1e5 if sizes else 0.0)
        assert priced.whole(name) - sizes == pytest.approx(sent / rate), name


def test_memory_counts_every_matrix_once():
    problem = problem_of(layers=1, experts=8)
    width, step = 64, problem.step
    per_layer = 4 * width * width
    dense = 2 * per_layer + 3 * width * step.dense_d_ff + width * 8 + step.vocabulary * width
    experts = 2 * 3 * width * 96
    held = step_state_bytes(problem, linear_placement(problem))
    assert held == pytest.approx(12 * (dense + experts))  # 16-bit weight and gradient, 32-bit momentum and copy
    (update,) = graph_of(problem).of_phase("update")
    assert update.moved == 20 * (dense + experts)


def test_no_all_reduce_starts_when_an_all_to_all_is_imminent():
    """While the aggregation's gradient is computed, which an all-to-all waits for (Lina §6.1)."""
    problem = problem_of(k=2, gate="top-k", batch=64)
    timeline = simulate(plan_of(problem, Priority(policy="priority", micro_op=1e2)), problem)
    starts = timeline.events.loc[timeline.events["kind"] == "all_reduce", "start"].to_numpy()
    (event,) = events_of(timeline, r"^dx\.1\.aggregate$").itertuples()
    assert (starts < event.start).any() and not ((starts >= event.start) & (starts < event.end)).any()


@pytest.mark.parametrize("capacity_factor", [0, 1, 1.5])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_parts_send_what_capacity_passing_token_by_token_sends(parts, capacity_factor):
    """As many tokens recorded as the step has, so that nothing is scaled: the counts are those of the kernel."""
    gpus, tokens = 4, 128  # as many on each GPU as 8 sequences of 16
    rng = np.random.default_rng(2)
    experts = rng.choice(4, size=(gpus * tokens, 2, 1), p=(0.6, 0.2, 0.15, 0.05)).astype(np.int16)
    rank = np.repeat(np.arange(gpus), tokens).astype(np.int32)
    trace = RoutingTrace("skewed", experts, 4, source_rank=rank)
    problem = problem_of(workload=trace, routing="recorded", capacity_factor=capacity_factor)
    cut = route_parts(problem, linear_placement(problem), parts)
    whole = route(problem, linear_placement(problem), irregular=True)
    assert sum(part.traffic for part in cut) == pytest.approx(whole.traffic)
    assert np.nansum([part.rows for part in cut], axis=0) == pytest.approx(np.nan_to_num(whole.rows))
    with pytest.raises(InputError, match="routing log"):
        route_parts(problem_of(), linear_placement(problem), parts)
    capacity, bounds = int(min(problem.step.capacity(problem.model), tokens)), even_bounds(tokens, parts)
    for layer, own in itertools.product(range(2), range(gpus)):
        mine = experts[rank == own, layer]
        wanted = sent(mine, kept_with_passing(mine, 4, capacity, bounds), 4, bounds)
        rows_sent = [part.traffic[layer, own] / problem.model.bytes_per_token for part in cut]
        assert np.array(rows_sent) == pytest.approx(wanted)
