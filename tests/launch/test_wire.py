"""Rows on the wire: as long as the plan says, and what comes out is what went in, rounded."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.launch.rank.wire import Wire, wires_of
from engine.plan import Travel
from tests.cases.examples import examples
from tests.strategies import make_model

pytestmark = pytest.mark.slow

FORMATS = ("fp32", "bf16", "fp16", "fp8")
RELATIVE = {"fp32": 0.0, "bf16": 2**-8, "fp16": 2**-11, "fp8": 2**-4}
"""Half a step between neighbours, relative to a number."""


def numbers(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """float32[row, width] of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, width), generator=generator) * 10.0 ** torch.randint(
        -3, 3, (rows, 1), generator=generator
    )


@settings(max_examples=examples(80), deadline=None)
@given(
    st.sampled_from(("copies", "gpu", "node")),
    st.sampled_from((None, *FORMATS)),
    st.sampled_from((None, *FORMATS)),
    st.sampled_from(("fp32", "bf16")),
    st.integers(1, 400),
    st.integers(1, 5),
)
def test_rows_are_as_long_as_the_plan_says(unit, there, back, dtype, width, k):
    travel = Travel(unit=unit, dispatch=there, combine=back)
    model = make_model(1, 8, k, d_model=width, dtype=dtype)
    wires = wires_of(travel, model)
    assert tuple(wire.bytes for wire in wires) == travel.row_bytes(model)
    weights = torch.rand((3, k))
    for wire in wires:
        rows = wire.pack(numbers(3, width), weights if wire.weights else None)
        assert rows.shape == (3, wire.bytes) and rows.dtype == torch.uint8
    if unit != "copies":
        assert torch.equal(wires[0].gate_weights(wires[0].pack(numbers(3, width), weights)), weights)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("width", [1, 127, 128, 300])
def test_numbers_come_out_rounded_to_the_nearest(dtype, width):
    wire, sent = Wire(dtype, width, 2), numbers(50, width)
    came = wire.unpack(wire.pack(sent, torch.ones((50, 2))))
    # In 8 bits what is far below the largest of its group is rounded to steps of that.
    least = sent.abs().amax(dim=1, keepdim=True) * 2**-10 / 448 if dtype == "fp8" else 1e-7
    assert ((came - sent).abs() <= sent.abs() * RELATIVE[dtype] + least).all()
    torch.testing.assert_close(wire.rounded(came), came, rtol=1e-6, atol=0.0)
    assert torch.equal(wire.rounded(sent), came)


def test_a_group_of_zeros_stays_zeros_and_scales_are_each_groups_own():
    wire, sent = Wire("fp8", 300), torch.zeros((2, 300))
    sent[0, 128:256] = 1e-20
    sent[1, 256:] = 3e30
    torch.testing.assert_close(wire.unpack(wire.pack(sent)), sent, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", FORMATS)
def test_no_rows_are_no_bytes(dtype):
    wire = Wire(dtype, 130)
    assert wire.pack(torch.empty(0, 130)).shape == (0, wire.bytes) and wire.rounded(torch.empty(0, 130)).shape == (
        0,
        130,
    )


def test_rows_that_go_on_as_one_are_summed_before_they_are_rounded():
    wire = Wire("bf16", 2)
    rows = wire.pack(torch.tensor([[256.0, 1.0], [1.0, 1.0], [1.0, 1.0], [5.0, 5.0]]))
    summed = wire.unpack(wire.summed(rows, torch.tensor([0, 0, 0, 1]), 2))
    assert summed.tolist() == [[258.0, 3.0], [5.0, 5.0]], "one by one, 256 + 1 would stay 256"
