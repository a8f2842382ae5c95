"""Recordings of serving and training engines that are nearly right: each gives a workload or one clear line."""

import json
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from engine.formats import read_workload
from tests.cases import mutations, sglang
from tests.cases.files import balance_lines, json_lines, saver
from tests.cases.fuzzing import any_input, workload_or_one_line
from tests.cases.megatron import run
from tests.cases.mutations import VALUES, damaged, json_texts, mutated, npy_files, values_with, zips
from tests.cases.plan_files import saved_tensors
from tests.cases.vllm import FIRST, FORMS, META, MOVED, ROUTED, ROWS, answer, chunk, npy, route_meta, routes, stats

saved = saver("recording.json")
ODD_VALUES = values_with(
    *("AAAA", "k05VTVBZ", "=", npy(ROWS), sglang.ROUTED_TEXT, sglang.ROUTED_TEXT[:32]), "\ud800", "eplb_load_stats", "base64"
)
COUNTS = {"logical_count": [[[0, 0], [1, 2]], [[0, 0], [3, 4]]]}
SEEDS = {
    "responses": [
        *([answer(form), answer(form, usage=None)] for form in FORMS.values()),
        [answer(ROWS[2:], prompt_routed_experts=ROWS[:2])],
        [chunk(0, npy(ROWS)), chunk(1, ROWS), chunk(0, None, usage={"prompt_tokens": 3})],
        [{"request_id": "7", "prompt_token_ids": [9], "outputs": [{"token_ids": [1, 2], "routed_experts": ROWS}]}],
        [{"choices": [{"index": 0}], "nvext": {"routed_experts": FORMS["Dynamo"]}}],
    ],
    "loads": [[META, stats(1, FIRST), stats(2, FIRST, MOVED)], [stats(1, FIRST), {"record_type": "bench_run_start"}]],
    "routes": [[route_meta(), *routes(0, ROUTED[0])], [route_meta(), *routes(0, ROUTED[0]), *routes(3, ROUTED[3])]],
    "batches": [balance_lines(), balance_lines(rows=False, origin_row=1)],
    "bare list": [[[[1, 2, 3], [4, 5, 6]]], [[[0, 0], [1, 2.5]]]],
    "statistics": [[COUNTS], [COUNTS | {"logical_count_layout": "rank_layer_expert"}]],
    "answers of SGLang": [[sglang.generated(), {"sglext": {"routed_experts": sglang.ROUTED_TEXT}, "choices": [{}]}]],
}


@st.composite
def documents(draw, kind: str) -> bytes:
    """A recording with up to three values replaced or left out, in one of the forms of a file, and perhaps cut short."""
    records = draw(mutated(draw(st.sampled_from(SEEDS[kind])), ODD_VALUES))
    form = draw(st.sampled_from(["lines", "list", "indented", "events"])) if kind == "responses" else "lines"
    if kind == "bare list":
        text = json.dumps(records[0] if records else records)
    elif form == "lines":
        text = json_lines(records)
    elif form == "events":
        text = "".join(f"data: {json.dumps(record)}\n\n" for record in records) + "data: [DONE]\n"
    else:
        text = json.dumps(records, indent=1 if form == "indented" else None)
    return draw(damaged(text.encode()))


@pytest.mark.parametrize("kind", SEEDS)
@given(data=st.data(), model=st.sampled_from([None, sglang.SMALL, sglang.ROUTED_MODEL]))
@any_input
def test_any_bytes(tmp_path, kind, data, model):
    workload_or_one_line(saved(tmp_path, data.draw(documents(kind))), partial(read_workload, model=model))


@given(data=st.data(), prompt=st.booleans())
@any_input
def test_any_archive_of_a_request(data, prompt):
    members = {"routed_experts": np.array(ROWS, np.uint8)} | ({"prompt_token_ids": np.arange(2)} if prompt else {})
    changed = data.draw(st.sets(st.sampled_from(sorted(members))))
    files = {
        f"{name}.npy": data.draw(npy_files(array)) if name in changed else mutations.npy(array)
        for name, array in members.items()
    }
    with TemporaryDirectory() as folder:
        saved(Path(folder), data.draw(zips(files)), "request-1.npz")
        np.savez(Path(folder, "request-2.npz"), **members)
        workload_or_one_line(Path(folder))


TOKENS = [
    sglang.token_record(number, 0, mode, positions, [[[]] * 2, [[0, 1], [2, 3]]], extended, [sglang.traffic_entry(1, [1, 2])])
    for number, mode, positions, extended in (
        (1, sglang.EXTEND, [0, 1], [2]),
        (2, sglang.DECODE, [2, 0], None),
        (3, sglang.MIXED, [3, 1], [1, 1]),
        (4, sglang.VERIFY, [4, 5], None),
    )
]
DUMPS = {
    "loads alone": {"whole": torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 3.5]])},
    "stat": {"rank": 0, "logical_count": torch.tensor([[[0, 0], [1, 2], [3, 4]], [[0, 0], [0, 0], [0, 0]]])},
    "by rank": {"logical_count": torch.ones(2, 3, 2), "logical_count_layout": "rank_layer_expert"},
    "per_pass": {
        "records": [sglang.pass_record(number, 0, [[0] * 4, [1, 2, 4, 8]]) for number in (1, 2)],
        "last_physical_to_logical_map": torch.tensor([[0, 1, 2, 0], [2, 0, 1, 0]]),
    },
    "per_token": {"records": TOKENS, "last_physical_to_logical_map": torch.tensor([[0, 1, 2, 3, 0], [3, 2, 1, 0, 0]])},
}
shapes = st.lists(st.integers(0, 5), max_size=4)
tensors = st.builds(
    lambda shape, dtype, fill: torch.full(shape, fill).to(dtype),
    shapes,
    st.sampled_from([torch.int32, torch.int64, torch.uint8, torch.bool, torch.float32, torch.float64, torch.bfloat16]),
    st.one_of(st.integers(-2, 9), st.sampled_from([float("nan"), float("inf"), 2**31, 2**62])),
)
views = st.builds(lambda size: torch.zeros(1, dtype=torch.int32).expand(size, size, size), st.sampled_from([2, 10**6]))


@pytest.mark.parametrize("kind", DUMPS)
@given(data=st.data(), member=st.sampled_from([None, None, "routing", "traffic"]), with_model=st.booleans())
@any_input
def test_any_dump(kind, data, member, with_model):
    content = data.draw(mutated(DUMPS[kind], st.one_of(VALUES, tensors, views)))
    content = saved_tensors(content.get("whole") if kind == "loads alone" else content)
    read = partial(read_workload, member=member, model=sglang.SMALL if with_model else None)
    with TemporaryDirectory() as folder:
        for rank in range(data.draw(st.integers(1, 2))):
            saved(Path(folder), data.draw(damaged(content)), f"expert_distribution_recorder_1.5_{rank}.pt")
        workload_or_one_line(Path(folder), read)


cells = st.one_of(st.integers(-1, 9).map(str), st.sampled_from(["", "x", "1e3", "2.5", '"1"', "99999999999999999999"]))


@given(rows=st.lists(st.lists(cells, min_size=2, max_size=4), max_size=4), data=st.data())
@any_input
def test_any_counts_in_csv(tmp_path, rows, data):
    text = sglang.COUNTS_CSV + "".join(",".join(row) + "\n" for row in rows)
    for rank in range(2):
        saved(tmp_path, data.draw(damaged(text.encode())), f"expert_distribution_rank{rank}_timestamp1.5.csv")
    workload_or_one_line(tmp_path)


@given(
    data=st.data(), layers=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), min_size=1, max_size=4)
)
@any_input
def test_any_trace(data, layers):
    separators = data.draw(st.sampled_from([None, (",", ":")]))
    with TemporaryDirectory() as folder:
        for rank, own in enumerate(layers):
            records = data.draw(mutated(run(own, rank, seed=rank, steps=1, tokens=3), values_with("mtp", "decoder")))
            text = "".join(json.dumps(record, separators=separators) + "\n" for record in records)
            saved(Path(folder), data.draw(damaged(text.encode())), f"router_trace_rank{rank}.jsonl")
        workload_or_one_line(Path(folder))


IN_RANGE = st.tuples(st.integers(0, 3), st.integers(0, 4)).map(lambda key: f"{key[0]}_{key[1]}")
KEYS = st.sampled_from([IN_RANGE] * 19 + [st.sampled_from(["0_1000", "9999999999_1", "1_-1", "weight", ""])]).flatmap(
    lambda keys: keys
)
TENSORRT_ROWS = st.tuples(st.just(np.int64), st.just((4,)), st.integers(0, 9))
ODD_ROWS = st.tuples(
    st.sampled_from([np.int64, np.int32, np.float32, np.uint8, np.bool_]),
    st.sampled_from([(4,), (3,), (0,), (), (4, 4), (70_000,)]),
    st.integers(-1, 9),
)
TENSORS = st.dictionaries(
    KEYS, st.sampled_from([TENSORRT_ROWS] * 9 + [ODD_ROWS]).flatmap(lambda rows: rows), min_size=1, max_size=6
)


@given(data=st.data(), ranks=st.lists(TENSORS, min_size=1, max_size=3))
@any_input
def test_any_recording(data, ranks):
    meta = {"num_experts": 4, "num_experts_per_token": 2, "ep_size": 2, "experts_per_rank": 2}
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        saved(folder, data.draw(json_texts(data.draw(mutated(meta)))), "meta_info.json")
        saved(folder, data.draw(json_texts(data.draw(mutated({"0_1": 4, "1_2": 0})))), "rank0_numtokens.json")
        for rank, tensors in enumerate(ranks):
            content = save({key: np.full(shape, value).astype(kind) for key, (kind, shape, value) in tensors.items()})
            saved(folder, content if rank else data.draw(damaged(content)), f"rank{rank}.safetensors")
        workload_or_one_line(folder)


HEADER = st.dictionaries(
    KEYS,
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["I64", "I64", "I32", "F64", "X9", 1]),
            "shape": st.sampled_from([[4], [4], [2**40], [-1], [], [2, 2], "4"]),
            "data_offsets": st.sampled_from([[0, 32], [32, 64], [0, 64], [0, 2**60], [64, 0], [0], None]),
        }
    ),
    min_size=1,
    max_size=3,
)


@given(HEADER, st.sampled_from([0, 0, 0, 1, -1, 2**31, 2**63]), st.sampled_from([32, 64, 96, 31, 0]))
@any_input
def test_any_header(tmp_path, header, further, size):
    """A header with any claims, its length included, over so many bytes of counts."""
    text = json.dumps(header).encode()
    content = (len(text) + further).to_bytes(8, "little") + text + b"\1" + bytes(size)[1:]
    workload_or_one_line(saved(tmp_path, content, "rank0.safetensors"))
