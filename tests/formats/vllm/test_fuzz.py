"""Anything that looks like a recording of vLLM or its relatives gives a workload or one line."""

import io
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.formats import mutations
from tests.formats.fuzzing import any_input, workload_or_one_line
from tests.formats.mutations import damaged, mutated, npy_files, values_with, zips
from tests.formats.test_moe_balance import lines as balance_lines
from tests.formats.vllm.test_eplb import FIRST, META, MOVED, stats
from tests.formats.vllm.test_responses import FORMS, ROWS, answer, chunk, npy
from tests.formats.vllm.test_route_logs import CHOICES, meta, routes

pytestmark = pytest.mark.slow

VALUES = values_with("AAAA", "k05VTVBZ", npy(ROWS), "\ud800", "eplb_load_stats", "base64")
SEEDS = {
    "responses": [
        *([answer(form), answer(form, usage=None)] for form in FORMS.values()),
        [answer(ROWS[2:], prompt_routed_experts=ROWS[:2])],
        [chunk(0, npy(ROWS)), chunk(1, ROWS), chunk(0, None, usage={"prompt_tokens": 3})],
        [{"request_id": "7", "prompt_token_ids": [9], "outputs": [{"token_ids": [1, 2], "routed_experts": ROWS}]}],
        [{"choices": [{"index": 0}], "nvext": {"routed_experts": FORMS["Dynamo"]}}],
    ],
    "loads": [[META, stats(1, FIRST), stats(2, FIRST, MOVED)], [stats(1, FIRST), {"record_type": "bench_run_start"}]],
    "routes": [[meta(), *routes(0, CHOICES[0])], [meta(), *routes(0, CHOICES[0]), *routes(3, CHOICES[3])]],
    "batches": [balance_lines(), balance_lines(rows=False, origin_row=1)],
    "bare list": [[[[1, 2, 3], [4, 5, 6]]], [[[0, 0], [1, 2.5]]]],
}


@st.composite
def documents(draw, kind: str) -> bytes:
    """A recording with up to three values replaced or left out, in one of the forms of a file, and perhaps cut short."""
    records = draw(mutated(draw(st.sampled_from(SEEDS[kind])), VALUES))
    form = draw(st.sampled_from(["lines", "list", "indented", "events"])) if kind == "responses" else "lines"
    if kind == "bare list":
        text = json.dumps(records[0] if records else records)
    elif form == "lines":
        text = "".join(json.dumps(record) + "\n" for record in records)
    elif form == "events":
        text = "".join(f"data: {json.dumps(record)}\n\n" for record in records) + "data: [DONE]\n"
    else:
        text = json.dumps(records, indent=1 if form == "indented" else None)
    return draw(damaged(text.encode()))


@pytest.mark.parametrize("kind", SEEDS)
@given(data=st.data())
@any_input
def test_any_bytes(kind, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recording.json")
        path.write_bytes(data.draw(documents(kind)))
        workload_or_one_line(path)


@given(data=st.data(), prompt=st.booleans())
@any_input
def test_any_archive_of_a_request(data, prompt):
    members = {"routed_experts": np.array(ROWS, np.uint8)} | ({"prompt_token_ids": np.arange(2)} if prompt else {})
    changed = data.draw(st.sets(st.sampled_from(sorted(members))))
    files = {
        f"{name}.npy": data.draw(npy_files(array)) if name in changed else mutations.npy(array)
        for name, array in members.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "request-1.npz").write_bytes(data.draw(zips(files)))
        np.savez(Path(folder, "request-2.npz"), **members)
        workload_or_one_line(Path(folder))


@pytest.mark.parametrize("experts", [np.array(3), np.zeros((1, 1, 1, 1), int)])
def test_other_shapes_of_a_request(tmp_path, experts):
    path = tmp_path / "request.npz"
    np.savez(path, routed_experts=experts, prompt_token_ids=np.arange(2))
    assert "[tokens, layers, k]" in workload_or_one_line(path)


@given(
    numbers=st.lists(st.one_of(st.integers(-2, 9), st.floats(width=32), st.just(2**31)), min_size=1, max_size=12),
    shape=st.sampled_from([(-1,), (1, -1), (-1, 2), (2, -1, 2)]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
    flips=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=3),
)
@any_input
def test_any_tensor(numbers, shape, dtype, flips):
    known = -int(np.prod(shape))
    values = torch.tensor((numbers * known)[: len(numbers) // known * known or known], dtype=torch.float64).reshape(
        shape
    )
    file = io.BytesIO()
    torch.save(values.to(dtype), file)
    data = bytearray(file.getvalue())
    for at, byte in flips:
        data[at % len(data)] = byte
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "loads.pt")
        path.write_bytes(data)
        workload_or_one_line(path)
