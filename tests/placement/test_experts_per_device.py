"""Experts per device in training: by hand, against the paper's doubling, and what must not change the choice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.placement.experts_per_device import pack_experts, packing_choices
from engine.result import Status
from tests.cases.examples import examples

GB = 1e9
positive = st.floats(0.01, 10)


def doubled(ffn, alltoall, choices, bytes_per_expert, memory):
    """The paper's rule: double until the FFN takes as long as the all-to-all, memory is full, or all are everywhere."""
    at = 0
    while ffn[at] < alltoall[at] and at + 1 < len(choices) and choices[at + 1] * bytes_per_expert <= memory:
        at += 1
    return choices[at]


@pytest.mark.parametrize(
    ("experts", "devices", "choices"),
    [
        (16, 16, [1, 2, 4, 8, 16]),
        (16, 4, [4, 8, 16]),
        (8, 16, [1, 2, 4, 8]),
        (12, 4, [3, 6, 12]),
        (10, 4, [3, 6, 10]),
        (5, 1, [5]),
        (1, 3, [1]),
    ],
)
def test_choices(experts, devices, choices):
    assert packing_choices(experts, devices).tolist() == choices


def test_by_hand():
    ffn, alltoall = [1, 2, 4, 8, 16], [3, 2.9, 2.5, 1.5, 0]
    result = pack_experts(ffn, alltoall, 16, 16, 2 * GB, 100 * GB)
    answer = result.solution
    assert (answer.experts_per_device, result.objective, result.bound) == (4, 0, 0)
    assert answer.efficiency == pytest.approx([1 / 3, 2 / 2.9, 1, 1, 1])
    assert answer.memory.tolist() == [2 * GB, 4 * GB, 8 * GB, 16 * GB, 32 * GB]
    assert not answer.needs_offloading.any()
    # Memory for three experts: two are the most, and the choice with four would need the host's memory.
    result = pack_experts(ffn, alltoall, 16, 16, 2 * GB, 6 * GB)
    assert result.solution.experts_per_device == 2 and result.status is Status.OPTIMAL
    assert result.objective == result.bound == pytest.approx(1 - 2 / 2.9)
    assert result.solution.needs_offloading.tolist() == [False, False, True, True, True]


def test_nothing_fits():
    result = pack_experts([1, 2], [2, 0], 2, 2, 2 * GB, 1 * GB)
    assert result.status is Status.INFEASIBLE and result.solution.experts_per_device is None
    assert result.solution.needs_offloading.all() and result.solution.efficiency.tolist() == [0.5, 1]


def test_more_experts_that_are_worse_are_not_taken():
    # The doubling rule would go on to 4; the table says that 2 hides most.
    result = pack_experts([1, 2, 2], [4, 3, 5], 4, 4, GB, 9 * GB)
    assert result.solution.experts_per_device == 2
    assert doubled([1, 2, 2], [4, 3, 5], [1, 2, 4], GB, 9 * GB) == 4


@settings(max_examples=examples(200), deadline=None)
@given(
    experts=st.integers(1, 64),
    devices=st.integers(1, 64),
    step=st.lists(st.tuples(positive, positive), min_size=7, max_size=7),
    memory=st.integers(0, 80),
    scale=positive,
)
def test_is_the_papers_choice_where_more_experts_are_better(experts, devices, step, memory, scale):
    choices = packing_choices(experts, devices)
    ffn = np.cumsum([grown for grown, _ in step])[: len(choices)]
    alltoall = np.cumsum([shrunk for _, shrunk in step])[::-1][: len(choices)]
    result = pack_experts(ffn, alltoall, experts, devices, 1.0, memory)
    if memory < choices[0]:
        assert result.status is Status.INFEASIBLE
        return
    chosen = result.solution.experts_per_device
    assert chosen == doubled(ffn, alltoall, choices, 1.0, memory) <= memory
    same = pack_experts(scale * ffn, scale * alltoall, experts, devices, 3.0, 3.0 * memory)
    assert same.solution.experts_per_device == chosen
    more = pack_experts(ffn, alltoall, experts, devices, 1.0, memory + 8)
    assert more.objective <= result.objective


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ffn": [1, 2]}, "ffn: wanted .* \\[1, 2, 4\\]"),
        ({"alltoall": [1, 2, -1]}, "alltoall: wanted"),
        ({"alltoall": [1, 2, np.inf]}, "alltoall: wanted"),
        ({"experts": 0}, "0 experts on 4"),
        ({"memory": -1.0}, "memory: wanted"),
        ({"bytes_per_expert": np.nan}, "bytes_per_expert: wanted"),
    ],
)
def test_malformed_tables_are_refused(change, message):
    table = {"ffn": [1, 2, 3], "alltoall": [3, 2, 1], "experts": 4, "devices": 4, "bytes_per_expert": 1, "memory": 9}
    with pytest.raises(InputError, match=message):
        pack_experts(**(table | change))
