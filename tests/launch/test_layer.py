"""The computation of layers, all ranks in one process: experts together as one by one, any placement and any travel as none
at all, and all-gathers by the hops that are simulated."""

from itertools import groupby

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.communication.travel import Stops, rows_to_all
from engine.launch.rank.communicator import Gathering
from engine.launch.rank.difference import allowed, coarsest, relative
from engine.launch.rank.forward import kind_of_layers
from engine.launch.rank.instructions import POOL_STRIDE, RankInstructions, Tokens
from engine.launch.rank.layer import Weights
from engine.launch.rank.layers import Layers
from engine.network import off_diagonal
from engine.placement.dispatch_rules import TABLED
from engine.plan import Travel
from engine.runtime.exchange.all_to_all import Exchange
from engine.runtime.exchange.hops import Legs
from engine.runtime.exchange.links import Tiers
from engine.runtime.experts import expert_ffns, ffn, has_grouped_kernel, uses_grouped_gemms
from tests.cases.examples import examples
from tests.cases.layers import CPU, launches, model_of, unplanned
from tests.launch import lockstep
from tests.oracles.dispatch import copies_of_rank
from tests.strategies import RULES


@pytest.mark.parametrize("matrices", [2, 3])
def test_every_expert_of_every_layer_has_its_own_part_of_the_pool_as_a_copy(matrices):
    weights = Weights(model_of(ffn_matrices=matrices), 2, 0, CPU, torch.float32)
    before, (inward, outward) = weights.pool.clone(), weights.experts(1, (4, 0, 2))
    assert inward.shape == (3, 16, 24 * (matrices - 1)) and outward.shape == (3, 24, 16)
    for into, out, expert in zip(inward, outward, (4, 0, 2), strict=True):
        begin = POOL_STRIDE * (5 + expert)
        window = torch.cat([into.flatten() * 16**0.5, out.flatten() * 24**0.5])
        torch.testing.assert_close(window, before[begin : begin + len(window)])
    inward.zero_()
    outward.zero_()
    assert torch.equal(weights.pool, before), "all later layers are cut from it"


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_grouped_gemms_and_one_expert_after_another_give_what_each_expert_gives(gated, dtype, off):
    model = model_of(ffn_matrices=3 if gated else 2)
    inward, outward = Weights(model, 1, 0, CPU, dtype).experts(0, range(4))
    counts = [3, 1, 40, 7]
    rows = torch.randn((sum(counts), 16), generator=torch.Generator().manual_seed(1)).to(dtype)
    parts = zip(rows.split(counts), inward, outward, strict=True)
    wanted = torch.cat([ffn(part, *matrices, gated) for part, *matrices in parts])
    alone = expert_ffns(rows, counts, inward, outward, gated)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    together = expert_ffns(rows, counts, inward, outward, gated, ends)
    for output in (alone, together):
        assert output.dtype == dtype and relative(output, wanted) <= off
    assert wanted.abs().max() > 0.1
    none = Weights(model, 1, 0, CPU, dtype).experts(0, ())
    assert expert_ffns(rows[:0], [], *none, gated).shape == (0, 16), "no rows are no work"


def test_where_grouped_gemms_are_one_kernel(monkeypatch):
    cuda, fits = torch.device("cuda", 0), (16, 24, 48)
    assert not has_grouped_kernel(CPU, torch.bfloat16, fits)
    for major, there in ((8, False), (9, True), (10, True), (12, False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, major=major: (major, 0))
        assert has_grouped_kernel(cuda, torch.bfloat16, fits) == there
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not has_grouped_kernel(cuda, torch.float32, fits) and not has_grouped_kernel(cuda, torch.bfloat16, (16, 20))
    for dtype, where, uses in (
        (torch.float32, CPU, True),
        (torch.bfloat16, CPU, True),
        (torch.bfloat16, cuda, True),
        (torch.float32, cuda, False),
    ):
        assert uses_grouped_gemms(where, dtype, fits) == uses
    assert uses_grouped_gemms(CPU, torch.float32, (20,)) and not uses_grouped_gemms(CPU, torch.bfloat16, (20,))
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    assert not has_grouped_kernel(cuda, torch.bfloat16, fits) and not uses_grouped_gemms(CPU, torch.bfloat16, fits)


# Rows of tokens that several experts share.
FORMATS = (None, "bf16", "fp16", "fp8")


@pytest.fixture
def alone(one_rank, monkeypatch) -> None:
    """A process group of this process, in which nothing is received."""
    monkeypatch.setattr(Exchange, "expect", lambda way, incoming: None)


@st.composite
def travelling(draw) -> tuple[RankInstructions, Tokens]:
    instructions, tokens = draw(launches())
    (plan,), ranks = instructions.plans, instructions.ranks
    travel = Travel(unit=draw(st.sampled_from(("copies", "gpu", "node"))), dispatch=draw(st.sampled_from(FORMATS)))
    rule = {"replicas": draw(st.sampled_from(RULES)), "ranks_per_node": draw(st.sampled_from((None, 1, 2)))}
    travel = travel.model_copy(update={"combine": draw(st.sampled_from(FORMATS))} | rule)
    node = tuple(sorted(draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks))))
    tiers = Tiers(node=node, port=(1e6,) * ranks, link=(5e6,) * ranks)
    return instructions.model_copy(update={"plans": (plan.model_copy(update={"travel": travel}),), "tiers": tiers}), tokens


def run(launch: tuple[RankInstructions, Tokens]) -> tuple[list[Layers], torch.Tensor]:
    """All ranks after a pass, and the output of all tokens."""
    (plan,), source = launch[0].plans, launch[1].source
    ranks = lockstep.ranks_of(*launch, kind_of_layers(plan), hops=plan.travel is not None and plan.travel.unit == "node")
    lockstep.run(ranks)
    output = torch.empty((len(source), ranks[0].model.d_model))
    for rank, own in enumerate(ranks):
        output[source == rank] = own.x
    return ranks, output


@pytest.mark.usefixtures("alone")
@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(travelling(), st.sampled_from((1, 2, 7)))
def test_any_travel_computes_what_one_process_computes(launch, slices):
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(Legs, "slices", lambda *_: slices)
        ranks, output = run(launch)
        wanted = ranks[0].unplanned()
    if not wanted.numel() or not wanted.abs().max():
        return
    # A last bit may be a whole step of a coarse format, and then shows in all of its token; a token, a weight or an expert that
    # is wrong shows far above that.
    assert relative(output, wanted) <= allowed(coarsest(launch[0].model, launch[0].plans[0]))
    moved = ((output - wanted).abs() / wanted.abs().max() > 1e-5).any(dim=1)
    assert moved.sum() <= 1 + 0.2 * len(moved)


@pytest.mark.usefixtures("alone")
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(travelling())
def test_any_placement_computes_what_one_process_computes_to_the_last_digits_in_the_models_own_format(launch):
    instructions, tokens = launch
    (plan,) = instructions.plans
    travel = None if plan.travel.unit == "copies" else Travel(unit=plan.travel.unit, dispatch="fp32", combine="fp32")
    plan = plan.model_copy(update={"travel": travel})
    instructions = instructions.model_copy(update={"plans": (plan,)})
    _, output = run((instructions, tokens))
    torch.testing.assert_close(output, unplanned(instructions, tokens), rtol=1e-5, atol=1e-5)


@settings(max_examples=examples(60), deadline=None)
@given(travelling())
def test_every_rank_sends_to_the_copies_that_the_rule_gives_it(launch):
    (plan,), tokens = launch[0].plans, launch[1]
    if plan.travel.replicas not in TABLED or plan.travel.unit != "copies":
        return
    ranks = lockstep.ranks_of(*launch, kind_of_layers(plan))
    tables = [copies_of_rank(plan.placement, plan.travel, rank) for rank in range(len(ranks))]
    for layer, way in enumerate(ranks[0].routes["dispatch"]):
        wanted = np.zeros((len(ranks), len(ranks)))
        for source, experts in zip(tokens.source, tokens.experts[:, layer], strict=True):
            for expert in experts[experts >= 0]:
                wanted[source, tables[source][layer][expert]] += 1
        assert np.array_equal(way.counts, wanted)


# All-gathers.
@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 6), st.data())
def test_ranks_pass_on_what_they_have_until_all_have_everything(domain, slices, data):
    ranks, stops = len(domain), Stops(np.array(domain))
    holder = np.array(data.draw(st.lists(st.integers(0, ranks - 1), max_size=40)), dtype=np.int64)
    gathering = Gathering(holder, stops, slices)
    assert sorted(gathering.row_of_item.tolist()) == list(range(len(holder)))
    item_of_row = np.argsort(gathering.row_of_item)
    has = holder[item_of_row][None, :] == np.arange(ranks)[:, None]
    moved = np.zeros((ranks, ranks))
    for _, phase in groupby(gathering.order, key=lambda piece: piece.phase):
        before = has.copy()
        for piece in phase:
            rows = slice(piece.begin, piece.end)
            assert before[piece.src, rows].all() and not has[piece.dst, rows].any()
            has[piece.dst, rows] = True
            moved[piece.src, piece.dst] += piece.end - piece.begin
    assert has.all()
    np.testing.assert_array_equal(moved, off_diagonal(rows_to_all(np.bincount(holder, minlength=ranks), stops)))


def test_slices_cross_while_others_are_collected_and_spread():
    """Two nodes of two ranks, eight items on rank 0, in two slices: of each, two rows cross by either rank."""
    order = Gathering(np.zeros(8, dtype=np.int64), Stops(np.array([0, 0, 1, 1])), 2).order
    hops = [(piece.phase, piece.src, piece.dst, piece.begin, piece.end) for piece in order]
    assert [hop for hop in hops if hop[1:3] == (0, 1)] == [(0, 0, 1, 0, 4), (1, 0, 1, 4, 8)]
    assert [hop for hop in hops if hop[1:3] == (1, 3)] == [(1, 1, 3, 2, 4), (2, 1, 3, 6, 8)]
    assert [hop for hop in hops if hop[1:3] == (3, 2)] == [(2, 3, 2, 2, 4), (3, 3, 2, 6, 8)]
