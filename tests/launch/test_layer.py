"""The arithmetic of a layer: experts together as one by one, and any placement as no placement at all."""

import pytest
import torch
from hypothesis import given, settings

from engine.launch.rank.difference import relative
from engine.launch.rank.instructions import POOL_STRIDE
from engine.launch.rank.layer import Weights, expert_ffns, ffn, has_grouped_kernel, uses_grouped_gemms
from tests.cases.examples import examples
from tests.cases.layers import CPU, launches, model_of, unplanned
from tests.launch import lockstep


@pytest.mark.parametrize("matrices", [2, 3])
def test_weights_of_several_experts_are_those_of_each(matrices):
    model = model_of(ffn_matrices=matrices)
    weights = Weights(model, 2, 0, CPU, torch.float32)
    inward, outward = weights.experts(1, (4, 0, 2))
    assert inward.shape == (3, 16, 24 * (matrices - 1)) and outward.shape == (3, 24, 16)
    for place, expert in enumerate((4, 0, 2)):
        into, out = weights.expert(1, expert)
        assert torch.equal(inward[place], into) and torch.equal(outward[place], out)
        begin = POOL_STRIDE * (5 + expert)
        window = torch.cat([into.flatten() * 16**0.5, out.flatten() * 24**0.5])
        torch.testing.assert_close(window, weights.pool[begin : begin + len(window)])
    # They are copies: all later layers are cut from the pool.
    before = weights.pool.clone()
    inward.zero_()
    outward.zero_()
    assert torch.equal(weights.pool, before)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_grouped_gemms_and_one_expert_after_another_give_what_each_expert_gives(gated, dtype, off):
    model = model_of(ffn_matrices=3 if gated else 2)
    inward, outward = Weights(model, 1, 0, CPU, dtype).experts(0, range(4))
    counts = [3, 1, 40, 7]
    rows = torch.randn((sum(counts), 16), generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = torch.cat(
        [ffn(part, *matrices, gated) for part, *matrices in zip(rows.split(counts), inward, outward, strict=True)]
    )
    alone = expert_ffns(rows, counts, inward, outward, gated)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    together = expert_ffns(rows, counts, inward, outward, gated, ends)
    for output in (alone, together):
        assert output.dtype == dtype and relative(output, wanted) <= off
    assert wanted.abs().max() > 0.1


def test_no_rows_are_no_work():
    inward, outward = Weights(model_of(), 1, 0, CPU, torch.float32).experts(0, ())
    assert expert_ffns(torch.empty(0, 16), [], inward, outward, True).shape == (0, 16)


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


@settings(max_examples=examples(60), deadline=None)
@given(launches())
def test_any_placement_computes_what_one_process_computes(launch):
    instructions, tokens = launch
    wanted, ranks = unplanned(instructions, tokens), lockstep.ranks_of(*launch)
    lockstep.run(ranks)
    for rank, context in enumerate(ranks):
        torch.testing.assert_close(context.x, wanted[tokens.source == rank], rtol=1e-5, atol=1e-5)
