"""Any bytes are a placement or one clear line, soon."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.formats.placements import recognise
from tests.formats.fuzzing import answer_or_one_line, any_input
from tests.formats.placements.cases import TINY
from tests.formats.placements.fuzz import READERS, plan_files, with_pickle
from tests.formats.placements.test_golden import saved


def outcome_of(content: bytes, gpus: int) -> str:
    """`read`, or the message of the one line; whatever else happens is a find."""
    placement = answer_or_one_line(lambda: recognise(Path("f.x"), content).deployed(TINY, gpus).placement)
    if isinstance(placement, str):
        assert placement.startswith("f.x")
        return placement
    assert (placement.layers, placement.gpus, placement.experts) == (2, gpus, 4)
    assert all({expert for held in row for expert in held} == set(range(4)) for row in placement.experts_of_gpu)
    return "read"


@pytest.mark.parametrize("reader", READERS)
@given(data=st.data())
@any_input
def test_a_placement_or_one_line(reader, data):
    outcome_of(data.draw(plan_files(reader)), data.draw(st.sampled_from((1, 2, 3))))


@given(st.binary(max_size=200), st.sampled_from((b"", b"PK\x03\x04", b"{", b"[", b"\x80\x02", b"Expert,Node\n")))
@any_input
def test_any_bytes(content, beginning):
    outcome_of(beginning + content, 2)


@pytest.mark.parametrize(
    "content",
    [
        '{"physical_to_logical_map": [[0, 1, 2, 3, 0, 1], null, [3, 2, 0, 2, 1, 3]]}'  # the row of an MoE layer is none
    ],
)
def test_finds(content):
    assert outcome_of(content.encode(), 1) != "read"


@pytest.mark.parametrize(
    "change", [(b"\x80\x02}", b"\x80\x02"), (b"\x80\x02}", b"\x80}"), (b"\x80\x02}", b"\x80\x39}")]
)
def test_finds_in_pickles(change):
    """PyTorch's own unpickler raises IndexErrors on these, and warns of protocols."""
    data = saved({"physical_to_logical_map": torch.zeros(3, 6, dtype=torch.int64)})
    assert outcome_of(with_pickle(data, lambda pickled: pickled.replace(*change)), 1) != "read"
