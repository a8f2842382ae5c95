"""A plan for many GPUs on fewer ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.launch.places.fold import fold_plan, fold_trace, rank_of_gpu
from engine.plan import Claim, Placement, Plan, Schedule, SendOrder
from engine.result import Status
from engine.runtime.exchange.links import Links
from engine.systems import SYSTEMS, run
from engine.validate.refusal import Ports, Sends, check_bytes, check_durations, check_listing, check_matching
from engine.workload import RoutingTrace
from tests.cases.examples import examples
from tests.cases.launch_plans import MODES, plan_with
from tests.cases.two_models import pair_of_samples


@st.composite
def plans(draw, gpus: int | None = None) -> Plan:
    gpus = draw(st.integers(1, 9)) if gpus is None else gpus
    experts, layers = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    homes = st.lists(st.sets(st.integers(0, gpus - 1), min_size=1, max_size=3), min_size=experts, max_size=experts)
    rows = []
    for _ in range(layers):
        of_expert = draw(homes)
        rows.append(tuple(tuple(e for e in range(experts) if gpu in of_expert[e]) for gpu in range(gpus)))
    mode = draw(st.sampled_from(MODES))
    pairs = st.tuples(st.integers(0, gpus - 1), st.integers(0, gpus - 1)).filter(lambda pair: pair[0] != pair[1])

    def schedule() -> Schedule:
        sends = draw(st.lists(st.tuples(pairs, st.floats(1, 1e6)), max_size=12)) if gpus > 1 else []
        return Schedule(
            src=tuple(src for (src, _), _ in sends),
            dst=tuple(dst for (_, dst), _ in sends),
            bytes=tuple(size for _, size in sends),
            phase=tuple(index // 3 for index in range(len(sends))),
            duration=(1.0,) * -(-len(sends) // 3),
        )

    scheduled = range(0 if mode == "concurrent" else layers)
    ways = {way: tuple(schedule() for _ in scheduled) for way in ("dispatch", "combine")}
    return plan_with(
        Placement(experts=experts, experts_of_gpu=tuple(rows), model_layers=tuple(range(layers))),
        send_order=SendOrder(mode=mode, **ways),
        claim=Claim(status=Status.FEASIBLE, objective=1, bound=0.5, scope="order"),
    )


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 64).flatmap(lambda gpus: st.tuples(st.just(gpus), st.integers(1, gpus))))
def test_ranks_are_blocks_of_neighbours_of_nearly_equal_size(sizes):
    gpus, ranks = sizes
    rank = rank_of_gpu(gpus, ranks)
    assert (np.diff(rank) >= 0).all() and set(rank.tolist()) == set(range(ranks))
    held = np.bincount(rank)
    assert held.max() - held.min() <= 1


@settings(max_examples=examples(100), deadline=None)
@given(plans(), st.data())
def test_a_rank_has_the_experts_and_the_sends_of_its_gpus_and_nothing_goes_to_itself(plan, data):
    gpus = plan.placement.gpus
    ranks = data.draw(st.integers(1, gpus))
    rank = rank_of_gpu(gpus, ranks)
    folded = fold_plan(plan, ranks)
    # `model_copy` checks nothing, so the rules of a plan are checked here.
    assert Plan.from_dict(folded.model_dump(), "folded plan") == folded
    if ranks < gpus:
        assert folded.claim is None and folded.parent == plan.id != folded.id and folded.provenance == plan.provenance
    assert folded.placement.gpus == ranks and folded.placement.experts == plan.placement.experts
    for before, after in zip(plan.placement.experts_of_gpu, folded.placement.experts_of_gpu, strict=True):
        for folded_rank in range(ranks):
            assert len(set(after[folded_rank])) == len(after[folded_rank])
            gpus_of_rank = np.flatnonzero(rank == folded_rank)
            assert set(after[folded_rank]) == {expert for gpu in gpus_of_rank for expert in before[gpu]}
    assert folded.send_order.mode == plan.send_order.mode
    for way in ("dispatch", "combine"):
        for before, after in zip(getattr(plan.send_order, way), getattr(folded.send_order, way), strict=True):
            assert all(src != dst for src, dst in zip(after.src, after.dst, strict=True))
            sends = zip(before.src, before.dst, before.bytes, before.phase, strict=True)
            kept = [(rank[s], rank[d], size, phase) for s, d, size, phase in sends if rank[s] != rank[d]]
            if plan.send_order.mode == "sequential":  # the order itself is kept
                assert list(zip(after.src, after.dst, after.bytes, after.phase, strict=True)) == kept
                np.testing.assert_array_equal(after.duration, before.duration)
            else:
                traffic = np.zeros((ranks, ranks))
                for src, dst, size, _ in kept:
                    traffic[src, dst] += size
                check_bytes(Sends.of(after), traffic)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("system", ["aurora", "rec"])
def test_a_matched_order_is_one_of_the_ranks_again_and_as_short_as_their_bytes_allow(system, ranks):
    """Two GPUs of a rank that each have one peer in a phase give the rank two."""
    problem = pair_of_samples(8, 16)
    options = {"order": "matched"} if system == "aurora" else {}
    plan = run(SYSTEMS[system], problem, options).result.solution
    folded = fold_plan(plan, ranks)
    for order in (folded.send_order, folded.send_order_b):
        for schedule in (*order.dispatch, *order.combine):
            sends = Sends.of(schedule)
            ports = Ports(sends.src, sends.dst + ranks, np.full(2 * ranks, 12.5e9))
            check_matching(sends, ports)
            check_listing(sends)
            moved = np.bincount(sends.src, sends.bytes, ranks), np.bincount(sends.dst, sends.bytes, ranks)
            pace = (sends.bytes / sends.duration[sends.phase]).max()
            assert schedule.makespan == pytest.approx(max(side.max() for side in moved) / pace)


def test_a_matched_order_for_emulated_links_goes_by_their_rates():
    problem = pair_of_samples(8, 16)
    plan = run(SYSTEMS["aurora"], problem, {"order": "matched"}).result.solution
    rates = np.array([4e9, 1e9, 2e9, 1e9])
    folded = fold_plan(plan, 4, Links(rates).network)
    for schedule in folded.send_order.dispatch:
        sends = Sends.of(schedule)
        check_durations(sends, "matched", Ports(sends.src, sends.dst + 4, np.tile(rates, 2)))
        seconds = sends.bytes / np.minimum(rates[sends.src], rates[sends.dst])
        assert schedule.makespan == pytest.approx(max(np.bincount(ends, seconds, 4).max() for ends in (sends.src, sends.dst)))


@settings(max_examples=examples(40))
@given(st.integers(1, 9).flatmap(lambda gpus: st.tuples(plans(gpus), plans(gpus), st.integers(1, gpus))))
def test_a_second_model_is_folded_as_if_it_were_alone(case):
    plan, other, ranks = case
    both = plan.model_copy(update={"placement_b": other.placement, "send_order_b": other.send_order})
    folded, alone = fold_plan(both, ranks), fold_plan(other, ranks)
    assert (folded.placement_b, folded.send_order_b) == (alone.placement, alone.send_order)
    first = fold_plan(plan, ranks)
    assert (folded.placement, folded.send_order) == (first.placement, first.send_order)
    assert Plan.from_dict(folded.model_dump(), "folded plan") == folded


@settings(max_examples=examples(100), deadline=None)
@given(plans())
def test_what_was_known_of_the_plan_is_not_taken_over(plan):
    """The studio simulates a plan, which computes its shares, before it launches the plan on fewer ranks."""
    known = plan.placement.share.shape, plan.placement.slots.shape, plan.id
    folded = fold_plan(plan, 1)
    fresh = Plan.from_dict(folded.model_dump(), "folded plan")
    np.testing.assert_array_equal(folded.placement.share, fresh.placement.share)
    np.testing.assert_array_equal(folded.placement.slots, fresh.placement.slots)
    assert folded.id == fresh.id
    assert known == (plan.placement.share.shape, plan.placement.slots.shape, plan.id)
    assert fold_plan(plan, plan.placement.gpus) is plan, "as many ranks as GPUs change nothing"


@pytest.mark.parametrize("columns", ["nothing", "sequence", "source_rank"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_token_starts_on_the_rank_of_its_gpu(columns, ranks):
    sequence = np.repeat(np.arange(20, dtype=np.int32), 3)
    experts = np.zeros((60, 2, 1), dtype=np.int16)
    known = {"sequence": sequence, "source_rank": (sequence * 5 % 8).astype(np.int32)}
    trace = RoutingTrace("trace", experts, 4, **{name: column for name, column in known.items() if name == columns})
    folded = fold_trace(trace, 8, ranks)
    np.testing.assert_array_equal(folded.source_rank, rank_of_gpu(8, ranks)[trace.rank_of_token(8)])
    np.testing.assert_array_equal(folded.experts, trace.experts)
    assert folded.rank_of_token(ranks).max() < ranks
    # The same copies leave the same GPUs, only that GPUs of one rank count together.
    blocks = np.stack([trace.demand(8)[:, rank_of_gpu(8, ranks) == rank].sum(axis=1) for rank in range(ranks)], axis=1)
    np.testing.assert_array_equal(folded.demand(ranks), blocks)


def test_a_launch_replays_tokens_where_the_plan_has_them_start():
    trace = RoutingTrace("four", np.zeros((8, 1, 1), dtype=np.int16), 4)
    assert fold_trace(trace, 4, 4, (1, 1, 3, 3)).source_rank.tolist() == [1, 1, 3, 3] * 2
    assert fold_trace(trace, 4, 2, (1, 1, 3, 3)).source_rank.tolist() == [0, 0, 1, 1] * 2
