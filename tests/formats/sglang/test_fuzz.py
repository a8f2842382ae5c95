"""Anything that looks like a recording of SGLang gives a workload or one line."""

import io
import json
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.formats import read_workload
from tests.formats.fuzzing import any_input, workload_or_one_line
from tests.formats.mutations import VALUES, damaged, mutated
from tests.formats.sglang import test_counts_csv, test_responses
from tests.formats.sglang.recorder import DECODE, EXTEND, MIXED, VERIFY, pass_record, token_record
from tests.formats.sglang.test_statistics import SMALL
from tests.formats.sglang.test_tokens import traffic_entry

pytestmark = pytest.mark.slow


def a_map(*rows):
    return torch.tensor(rows)


TOKENS = [
    token_record(number, 0, mode, positions, [[[]] * 2, [[0, 1], [2, 3]]], extended, [traffic_entry(1, [1, 2])])
    for number, mode, positions, extended in (
        (1, EXTEND, [0, 1], [2]),
        (2, DECODE, [2, 0], None),
        (3, MIXED, [3, 1], [1, 1]),
        (4, VERIFY, [4, 5], None),
    )
]
SEEDS = {
    "stat": {"rank": 0, "logical_count": torch.tensor([[[0, 0], [1, 2], [3, 4]], [[0, 0], [0, 0], [0, 0]]])},
    "by rank": {"logical_count": torch.ones(2, 3, 2), "logical_count_layout": "rank_layer_expert"},
    "per_pass": {
        "records": [pass_record(number, 0, [[0] * 4, [1, 2, 4, 8]]) for number in (1, 2)],
        "last_physical_to_logical_map": a_map([0, 1, 2, 0], [2, 0, 1, 0]),
    },
    "per_token": {"records": TOKENS, "last_physical_to_logical_map": a_map([0, 1, 2, 3, 0], [3, 2, 1, 0, 0])},
}
shapes = st.lists(st.integers(0, 5), max_size=4)
tensors = st.builds(
    lambda shape, dtype, fill: torch.full(shape, fill).to(dtype),
    shapes,
    st.sampled_from([torch.int32, torch.int64, torch.uint8, torch.bool, torch.float32, torch.float64, torch.bfloat16]),
    st.one_of(st.integers(-2, 9), st.sampled_from([float("nan"), float("inf"), 2**31, 2**62])),
)
views = st.builds(lambda size: torch.zeros(1, dtype=torch.int32).expand(size, size, size), st.sampled_from([2, 10**6]))


@pytest.mark.parametrize("kind", SEEDS)
@given(data=st.data(), member=st.sampled_from([None, None, "routing", "traffic"]), with_model=st.booleans())
@any_input
def test_any_dump(kind, data, member, with_model):
    file = io.BytesIO()
    torch.save(data.draw(mutated(SEEDS[kind], st.one_of(VALUES, tensors, views))), file)
    read = partial(read_workload, member=member, model=SMALL if with_model else None)
    with tempfile.TemporaryDirectory() as folder:
        names = [f"expert_distribution_recorder_1.5_{rank}.pt" for rank in range(data.draw(st.integers(1, 2)))]
        for name in names:
            Path(folder, name).write_bytes(data.draw(damaged(file.getvalue())))
        workload_or_one_line(Path(folder), read)


@given(data=st.data(), lines=st.booleans(), with_model=st.booleans())
@any_input
def test_any_answer(data, lines, with_model):
    text = st.sampled_from([test_responses.TEXT, "AAAA", "k05VTVBZ", "\ud800", "=", test_responses.TEXT[:32]])
    answers = [test_responses.generated(), {"sglext": {"routed_experts": test_responses.TEXT}, "choices": [{}]}]
    answers = data.draw(mutated(answers, st.one_of(VALUES, text)))
    written = "\n".join(map(json.dumps, answers)) if lines and isinstance(answers, list) else json.dumps(answers)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "answers.json")
        path.write_bytes(data.draw(damaged(written.encode())))
        workload_or_one_line(path, partial(read_workload, model=test_responses.MODEL if with_model else None))


@given(data=st.data())
@any_input
def test_any_statistics_in_json(data):
    counts = {"logical_count": [[[0, 0], [1, 2]], [[0, 0], [3, 4]]], "logical_count_layout": "rank_layer_expert"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "counts.json")
        path.write_bytes(data.draw(damaged(json.dumps(data.draw(mutated(counts))).encode())))
        workload_or_one_line(path, partial(read_workload, model=SMALL))


cells = st.one_of(st.integers(-1, 9).map(str), st.sampled_from(["", "x", "1e3", "2.5", '"1"', "99999999999999999999"]))


@given(rows=st.lists(st.lists(cells, min_size=2, max_size=4), max_size=4), data=st.data())
@any_input
def test_any_counts_in_csv(rows, data):
    text = test_counts_csv.FIRST + "".join(",".join(row) + "\n" for row in rows)
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(2):
            path = Path(folder, f"expert_distribution_rank{rank}_timestamp1.5.csv")
            path.write_bytes(data.draw(damaged(text.encode())))
        workload_or_one_line(Path(folder))
