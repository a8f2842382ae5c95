"""Rows of the all-to-alls of a training step, the experts of its tokens, its size, and the smallest it can be made."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.launch.rank.instructions import Tokens
from engine.launch.step import sizes
from engine.launch.step.layout import Choice, Layout, Rows, Slices, Value, choices, kept
from engine.launch.step.sizes import check_step_plan, shrunk, step_bytes, step_flops, step_problem
from engine.model import MoEModel
from engine.plan import Overlap, PartitionRange, Pipeline, Placement, Plan, Priority
from engine.simulate.training import price_step
from engine.simulate.training.program import program_of
from engine.systems.pieces import linear_placement
from engine.systems.training.lina import packed_placement
from engine.training import TrainingStep
from tests.cases.examples import examples
from tests.cases.launch_plans import plan_with
from tests.cases.refusals import refusal
from tests.oracles.capacity_passing import kept_with_passing

CPU = torch.device("cpu")
MODEL = MoEModel(name="tiny", layers=2, experts=6, experts_per_token=2, d_model=8, d_ff=8)


@st.composite
def exchanges(draw):
    """All ranks' layouts of one exchange, with some tokens dropped and some without a choice."""
    ranks, width, k = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 2))
    sequences, length = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    experts = rng.integers(-1, width, (ranks, sequences * length, k))
    capacity = draw(st.integers(1, 5)) if draw(st.booleans()) else None
    limit = sequences * length * k if capacity is None else capacity
    mask = np.stack([kept(expert, width, limit) & (expert >= 0) for expert in experts])
    home = rng.integers(0, ranks, width)
    hosted = [np.flatnonzero(home == rank).tolist() for rank in range(ranks)]
    choice, filled = Choice(experts, mask, capacity), draw(st.booleans())
    group = list(range(ranks))
    return choice, hosted, [Layout(choice, group, hosted, rank, filled, sequences, CPU) for rank in group], filled


@settings(max_examples=examples(150), deadline=None)
@given(exchanges(), st.sampled_from(("batch", "capacity")), st.integers(1, 5))
def test_every_kept_copy_arrives_at_its_expert_once_and_comes_back(case, along, count):
    choice, hosted, layouts, filled = case
    count = min(count, layouts[0].sequences) if along == "batch" else count
    ranks, k = len(layouts), choice.experts.shape[2]
    every = [layout.parts(along, count) for layout in layouts]
    arrived: list[list[tuple[int, int, int]]] = []
    rows_of_part = np.zeros((count, ranks), dtype=int)
    for part in range(count):
        # Rows are told by their source, token and choice; -1: empty.
        sent = []
        for rank, (layout, own) in enumerate(zip(layouts, every, strict=True)):
            copies = own.home.part(layout.copy_of_row, part)
            tokens = own.token_of_row[part] + own.tokens[part][0]
            empty = set(own.padding[part].tolist())
            labels = [(rank, *(divmod(int(copy), k), (-1, -1))[row in empty]) for row, copy in enumerate(copies)]
            assert all(token == label[1] for token, label in zip(tokens, labels, strict=True) if label[1] >= 0)
            assert sum(own.sent[part]) == len(labels)
            rows_of_part[part, rank] = len(labels)
            ends = np.cumsum([0, *own.sent[part]])
            sent.append([labels[a:b] for a, b in pairwise(ends)])
        back = [[None] * ranks for _ in range(ranks)]
        for rank, own in enumerate(every):
            transit = [row for source in range(ranks) for row in sent[source][rank]]
            assert [len(sent[source][rank]) for source in range(ranks)] == own.received[part]
            there = [transit[row] for row in own.to_host[part]]
            begin = 0
            for expert, rows in zip(hosted[rank], own.rows[part].counts, strict=True):
                mine = there[begin : begin + rows]
                arrived += [(*label, expert) for label in mine if label[1] >= 0]
                assert all(choice.experts[label] == expert for label in mine if label[1] >= 0)
                assert [label[0] for label in mine] == sorted(label[0] for label in mine)
                begin += rows
            assert begin == len(there) and own.rows[part].ends.tolist() == np.cumsum(own.rows[part].counts).tolist()
            returned = [there[row] for row in own.to_transit[part]]
            assert returned == transit
            ends = np.cumsum([0, *own.received[part]])
            for source in range(ranks):
                back[source][rank] = returned[ends[source] : ends[source + 1]]
        for rank, own in enumerate(every):
            home = [row for host in range(ranks) for row in back[rank][host]]
            if along == "batch" or count == 1:
                first, last = own.tokens[part]
                for token in range(first, last):
                    for place in range(k):
                        if choice.kept[rank, token, place]:
                            assert own.kept[part][token - first, place]
                            row = int(own.row_of_copy[part][token - first, place])
                            assert home[row] == (rank, token, place)
                assert {label[1] for label in home if label[1] >= 0} <= set(range(first, last))
    wanted = [(*copy, int(choice.experts[copy])) for copy in map(tuple, np.argwhere(choice.kept).tolist())]
    assert sorted(arrived) == sorted(wanted)
    full = filled and choice.capacity is not None
    sizes = choice.capacity * len(layouts[0].real.T) if full else choice.kept.sum((1, 2))
    assert (rows_of_part.sum(axis=0) == sizes).all()


@settings(max_examples=examples(60), deadline=None)
@given(exchanges(), st.integers(2, 5))
def test_parts_are_of_equal_size_as_far_as_tokens_allow(case, count):
    _, _, layouts, _ = case
    layout = layouts[0]
    sizes = np.diff(layout._bounds("capacity", count), axis=0)
    assert (np.ptp(sizes, axis=0) <= 1).all()
    if count <= layout.sequences:
        bounds = layout._bounds("batch", count)
        assert (np.diff(bounds, axis=0) >= 0).all() and (bounds[-1] == layout.slots).all() and not bounds[0].any()
        split = layout.token_bounds(count)
        tokens = np.stack([layout._counts(slice(a, b)) for a, b in pairwise(split)])
        assert (np.diff(bounds, axis=0) >= tokens).all()


def test_empty_rows_are_shared_by_the_parts_of_a_batch():
    """Balanced routing that fills two thirds of the buffers: all parts send as much, and none has all the empty rows."""
    (choice, _) = choices(MODEL, step_of(capacity_factor=1.5, sequence_length=24), 2, None)
    layout = Layout(choice, [0, 1], [[0, 1, 2], [3, 4, 5]], 0, True, 3, CPU)
    assert (layout.real == 24).all() and (layout.slots == 36).all()
    assert (np.diff(layout._bounds("batch", 3), axis=0) == 12).all()
    assert layout.parts("batch", 3).sent == [[36, 36]] * 3
    assert [len(empty) for empty in layout.parts("batch", 3).padding] == [24, 24, 24]


def test_whole_and_cut_reading_agree():
    """A value that was made in one cut, read in others."""
    whole = torch.arange(12.0).view(6, 2)
    scattered = Rows([torch.tensor([4, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([5, 1, 2, 3])])
    cuts = [Slices((0, 6)), Slices((0, 2, 2, 6)), scattered]
    for cut in cuts:
        for read in cuts:
            value = Value()
            for part in range(cut.count):
                value.put(cut, part, lambda cut=cut, part=part: cut.part(whole, part).clone())
            for part in range(read.count):
                assert torch.equal(value.get(read, part), read.part(whole, part))
            assert torch.equal(value.whole(), whole)
    room = Value()
    for part in range(3):
        room.room(cuts[1], part, cuts[1].part(whole, part), 2).copy_(cuts[1].part(whole, part))
    assert torch.equal(room.get(cuts[1], 2), whole[2:]) and torch.equal(room.whole(), whole)
    room.clear()
    assert not room.has(cuts[1], 0)


def step_of(**more) -> TrainingStep:
    return TrainingStep(**({"batch": 3, "sequence_length": 4, "heads": 1, "dense_d_ff": 8, "gate": "top-k"} | more))


def test_balanced_routing_gives_every_expert_as_much():
    choices_of_layer = choices(MODEL, step_of(capacity_factor=1.0), 4, None)
    assert len(choices_of_layer) == 2
    for choice in choices_of_layer:
        counts = [np.bincount(experts.ravel(), minlength=6) for experts in choice.experts]
        assert np.ptp(counts) == 0 and choice.kept.all() and choice.capacity == 4
        assert (choice.experts[:, :, 0] != choice.experts[:, :, 1]).all()


@pytest.mark.parametrize("gate", ["top-k", "batch-prioritised"])
def test_recorded_routing_is_replayed_in_order_and_dropped_as_the_gate_serves(gate):
    rng = np.random.default_rng(1)
    experts = rng.integers(0, 6, (40, 2, 2)).astype(np.int16)
    source = np.repeat([0, 1, 0, 3], 10).astype(np.int32)  # rank 2 has none
    step = step_of(routing="recorded", gate=gate)
    choices_of_layer = choices(MODEL, step, 4, Tokens(experts, source))
    balanced = choices(MODEL, step_of(), 4, None)
    for layer, choice in enumerate(choices_of_layer):
        own = experts[source == 0][:, layer]
        assert (choice.experts[0] == own[np.arange(12) * 20 // 12]).all()
        assert (choice.experts[1] == experts[10:20, layer][np.arange(12) * 10 // 12]).all()
        assert (choice.experts[2] == balanced[layer].experts[2]).all()
        service = "token" if gate == "top-k" else "choice"
        assert (choice.kept[1] == kept(choice.experts[1], 6, 4, service)).all() and not choice.kept[1].all()
    if gate == "top-k":
        for sequences in (1, 2, 3):
            bounds = np.array([part * 3 // sequences * 4 for part in range(sequences + 1)])
            passed = kept_with_passing(choices_of_layer[0].experts[0], 6, 4, bounds)
            assert (passed == choices_of_layer[0].kept[0]).all()
    # Without a capacity nothing is dropped.
    one_expert = Tokens(np.zeros((5, 2, 2), dtype=np.int16), np.zeros(5, dtype=np.int32))
    first, _ = choices(MODEL, step.model_copy(update={"capacity_factor": 0.0}), 1, one_expert)
    assert first.kept.all() and first.capacity is None


# Sizes.
SIZED = MoEModel(name="tiny", layers=4, dense_layers=(0, 2), experts=8, experts_per_token=1, d_model=64, d_ff=96)
SIZED_STEP = TrainingStep(batch=16, sequence_length=128, heads=4, dense_d_ff=64, vocabulary=500)


def plan_of(placement: Placement | None = None, **parts) -> Plan:
    placement = placement or linear_placement(step_problem(SIZED, SIZED_STEP, 4))
    return plan_with(placement, priority=Priority(policy="fair", bucket=1e6), **parts)


def cut(parts: int, last: str = "3.qkv") -> Overlap:
    return Overlap(ranges=(PartitionRange(first="1.dispatch", last=last, parts=parts),))


def test_flops_are_those_of_the_products():
    """By hand: every product of the forward pass, and twice as much backward."""
    width, experts = SIZED.d_model, 2 * 3 * SIZED.d_model * SIZED.d_ff  # of a token, in two layers
    linear = SIZED.layers * 4 * width**2 + 2 * 3 * width * SIZED_STEP.dense_d_ff + width * SIZED_STEP.vocabulary
    linear += 2 * SIZED.experts * width + experts + SIZED.layers * 2 * SIZED_STEP.sequence_length * width
    each = 3 * 2 * SIZED_STEP.tokens
    assert shrunk(SIZED_STEP, SIZED, [plan_of()], 1e30) is SIZED_STEP, "a step that fits stays as it is"
    assert step_flops(SIZED, SIZED_STEP, plan_of()) == pytest.approx(each * linear)
    wide = SIZED_STEP.model_copy(update={"capacity_factor": 2.0})
    assert step_flops(SIZED, wide, plan_of()) == pytest.approx(each * (linear + experts))
    assert step_flops(SIZED, wide, plan_of(overlap=Overlap(irregular=True))) == pytest.approx(each * linear)


@settings(max_examples=examples(25), deadline=None)
@given(
    st.floats(6, 12),
    st.integers(2, 8),
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from((0.0, 1.0, 1.25)),
    st.sampled_from(("3.qkv", "1.combine")),
)
def test_a_shrunk_step_fits_the_budget_or_is_as_small_as_the_plans_allow(digits, parts, forward, backward, factor, last):
    step, budget = SIZED_STEP.model_copy(update={"capacity_factor": factor}), 10.0**digits
    piped = plan_of(pipeline=Pipeline(forward=(1, forward), backward=(backward, 2)))
    plans = [plan_of(overlap=cut(parts, last)), piped]
    small = shrunk(step, SIZED, plans, budget)
    assert 1 <= small.batch <= step.batch and 1 <= small.sequence_length <= step.sequence_length
    work = max(step_flops(SIZED, small, plan) for plan in plans)
    sequences = parts if last == "3.qkv" else 1
    rows = max(forward, backward, 2, parts if last == "1.combine" else 1)
    assert small.batch >= sequences and small.tokens * (factor or 1) / SIZED.experts >= rows
    for plan in plans:
        own = step_problem(SIZED, small, 4)
        program_of(plan, own, price_step(own, plan.placement))
    if work > budget:  # nothing smaller would do
        assert small.batch == sequences
        assert (small.tokens - small.batch) * (factor or 1) / SIZED.experts < rows or small.sequence_length == 1
    elif small != step:  # and nothing much larger fits
        longer = small.model_copy(update={"sequence_length": small.sequence_length + 1})
        larger = small.model_copy(update={"batch": small.batch + sequences})
        grown = larger if small.sequence_length == step.sequence_length else longer
        assert max(step_flops(SIZED, grown, plan) for plan in plans) > budget or grown.batch > step.batch
    assert shrunk(small, SIZED, plans, max(budget, work)) == small


def test_bytes_grow_with_what_a_rank_holds():
    problem = step_problem(SIZED, SIZED_STEP, 4)
    plain, packed = plan_of(), plan_of(packed_placement(problem, 4))
    held = 2 * 2 * 3 * SIZED.d_model * SIZED.d_ff  # two more experts in each of two layers
    more = step_bytes(problem, packed) - step_bytes(problem, plain)
    assert (more >= held * 12).all()  # bf16: weight, gradient, and momentum and weight in 32 bits
    assert (sizes.gradient_bytes(problem, packed) - sizes.gradient_bytes(problem, plain) == held * 2).all()
    numbers = held + SIZED.layers * 4 * 64**2 + 2 * 3 * 64 * 64 + 2 * 64 * 8 + 500 * 64
    assert sizes.gradient_bytes(problem, plain) == pytest.approx(np.full(4, numbers * 2))
    longer = step_problem(SIZED, SIZED_STEP.model_copy(update={"batch": 32}), 4)
    assert (step_bytes(longer, plain) > 1.5 * step_bytes(problem, plain)).all()
    assert sizes.reference_bytes(SIZED, SIZED_STEP, 4) > 4 * sizes.reference_bytes(SIZED, SIZED_STEP, 1) / 1.5


def test_what_no_rank_can_execute_is_refused_with_a_reason():
    problem = step_problem(SIZED, SIZED_STEP, 4)
    packed = packed_placement(problem, 4)
    assert [check_step_plan(plan, SIZED, SIZED_STEP) for plan in (plan_of(packed), plan_of())] == [2, 1]
    rows = tuple((row[0], row[1], row[3], row[2]) for row in packed.experts_of_gpu)
    crossed = packed.model_copy(update={"experts_of_gpu": rows})
    doubled = tuple((*row[:3], (*row[3], 0)) for row in linear_placement(problem).experts_of_gpu)
    for placement in (crossed, packed.model_copy(update={"experts_of_gpu": doubled})):
        assert "holds experts several times" in refusal(check_step_plan, plan_of(placement), SIZED, SIZED_STEP)
    for plan, model, step, part in (
        (plan_of(), SIZED, SIZED_STEP.model_copy(update={"heads": 5}), "5 heads"),
        (plan_of(), SIZED, None, "describe the step"),
        (plan_of(), SIZED.model_copy(update={"dtype": "fp16"}), SIZED_STEP, "fp32 or bf16, not in fp16"),
        (plan_of().model_copy(update={"priority": None}), SIZED, SIZED_STEP, "for inference"),
        (plan_of(), SIZED.model_copy(update={"experts": 4}), SIZED_STEP, "8 experts in 2 layers"),
    ):
        assert part in refusal(check_step_plan, plan, model, step)
