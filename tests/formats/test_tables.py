"""CSV and Parquet tables of routing, loads and traffic, and counts of slots."""

import gzip
import json
from functools import partial
from io import BytesIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.formats import parts, read_workload, tables
from engine.formats.arrays import fold_slots
from engine.formats.long_form import routing_from_columns
from engine.formats.source import Source
from tests.cases.examples import examples
from tests.cases.files import refused, saver
from tests.cases.recordings import MODEL, holds
from tests.cases.refusals import refusal

csv = saver("trace.csv")


def parquet(folder, **columns):
    pq.write_table(pa.table(columns), folder / "trace.parquet")
    return folder / "trace.parquet"


def long_form(experts, **extra):
    token, layer, rank = (axis.ravel() for axis in np.indices(experts.shape))
    return {"token": token, "layer": layer, "expert": experts.ravel(), "rank_in_topk": rank, **extra}


@pytest.mark.parametrize(
    ("text", "experts"),
    [
        ("weight,Expert, layer ,token\n.1,3,7,0\n,1,3,0\n.2,2,3,5\n.1,0,7,5\n", [[[1], [3]], [[2], [0]]]),
        ("\ufeff\r\ntoken,layer,expert\r\n\r\n0,0,3\r\n\r\n1,0,3.0\r\n\r\n", [[[3]], [[3]]]),
        ("token,layer,expert\n0,0,5\n1,0,2\n0,0,1\n1,0,-1\n", [[[5, 1]], [[2, -1]]]),  # the order of choices is kept
        ("token\tlayer\texpert\n0\t0\t0\n", [[[0]]]),
        ("layer\texpert\ttoken\n0\t0\t0\n", [[[0]]]),
    ],
)
def test_csv_of_any_layout(tmp_path, text, experts):
    holds(read_workload(csv(tmp_path, text)), experts=experts, num_experts=np.max(experts) + 1)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=False), st.booleans())
def test_any_row_order_gives_the_same_trace(tokens, layers, k, random, spread):
    experts = np.array([random.randrange(9) for _ in range(tokens * layers * k)]).reshape(tokens, layers, k)
    order = list(range(experts.size))
    random.shuffle(order)
    columns = {name: column[order] for name, column in long_form(experts).items()}
    if spread:
        columns["token"] = columns["token"] * 10**9
    holds(routing_from_columns(Source(None, "t"), columns, str), experts=experts)


def test_columns_of_tokens_in_csv_and_of_all_kinds_in_parquet(tmp_path):
    trace = read_workload(csv(tmp_path, "token,layer,expert,sequence,source_rank\n1,0,0,4,1\n0,0,1,3,0\n"))
    holds(trace, sequence=[3, 4], source_rank=[0, 1])
    experts = np.random.default_rng(0).integers(6, size=(10, 3, 2))
    np.testing.assert_array_equal(read_workload(parquet(tmp_path, **long_form(experts))).experts, experts)
    floats = {name: column.astype(float) for name, column in long_form(experts).items()}
    np.testing.assert_array_equal(read_workload(parquet(tmp_path, **floats)).experts, experts)
    assert read_workload(parquet(tmp_path, expert_0=[1.0], expert_1=[2.0])).load.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("token,layer,expert\n" + "0,0,1\n" * 15 + "0,1,\n", ("line 17: column 'expert' is empty",)),
        ("token,layer,expert\n0,0,1\n\n\n0,1,\n", ("line 5: column 'expert' is empty",)),
        ("token,layer,expert\n0,0,1\n0,1,x\n", ("line 3: column 'expert' is 'x', not a whole number",)),
        ("token,layer,expert\n0,0,1\n0,1,1.5\n", ("line 3", "whole numbers, not 1.5")),
        ("token,layer,expert\n0,0,1\n0,1\n", ("line 3: has 2 columns, the first line 3",)),
        ("token,layer,expert\n0,0,1\n0,-1,2\n", ("line 3", "'layer'", "-1")),
        ("token,layer,expert\n0,0,1\n0,1,2\n3,1,2\n", ("token 3, layer 0", "no row")),
        ("token,layer,expert\n0,0,1\n0,1,2\n0,2,2\n0,1,2\n", ("token 0, layer 1: has 2 rows where most have 1",)),
        ("token,layer,expert,rank_in_topk\n0,0,1,0\n0,0,2,0\n", ("line 3", "second row", "token 0, layer 0, rank 0")),
        ("token,layer,expert,rank_in_topk\n0,0,1,1\n0,0,2,2\n", ("line 3", "counts from 0")),
        ("token,layer,expert,rank_in_topk\n0,0,1,99\n", ("line 2", "99")),
        ("token,layer,expert,sequence\n0,0,1,0\n0,1,2,1\n", ("sequence 0, token 0, layer 1", "no row")),
        ("token,layer,expert\n0,0,40000\n", ("line 2", "40000", "out of range")),
        ("token,layer,expert\n", ("header but no rows",)),
        ("token,expert\n0,1\n", ("column 'layer' is missing",)),
        ("token,layer,expert,token\n0,0,1,1\n", ("two columns", "'token'")),
        ("token;layer;expert\n0;0;1\n", ("semicolons",)),
        ("a,b\n0,1\n", ("token, layer, expert", "src, dst, bytes", "expert_0", "a, b")),
        ("src,dst,bytes\n0,1,5\n1,0,-7\n", ("line 3", "'bytes'", "-7")),
        ("src,dst,bytes\n0,1,5\n0,1,7\n", ("line 3", "second row", "rank 0 to rank 1")),
        ("src,dst,bytes\n0,1000000000,5\n", ("1000000001",)),
        ("src,dst,bytes\n0,-1,5\n", ("line 2", "'dst'")),
        ("0,5,2,1\n3,0,-4,1\n", ("line 2, column 3", "-4")),
        ("1,000,5\n3,0,4\n1_0,0,4\n", ("line 3: column 1 is '1_0', not a number",)),
        ("3,2,1,0\n0,1,2,3\n", ("a placement",)),
        ("0,1,2\n3,0,4\n5,,0\n", ("line 3: column 2 is empty",)),
        ("0,5\nnan,0\n", ("line 2, column 1", "nan")),
        ("expert_0,expert_2\n1,2\n", ("'expert_1' is missing",)),
        ("expert_0,1,expert_1\n1,2,3\n", ("same expert",)),
        ("layer,expert_0,expert_1\n3,1,2\n3,1,2\n", ("line 3", "layer 3 appears twice")),
        ("expert_1,expert_0\n1,2\n3,-4\n", ("line 3, column 'expert_0'", "-4")),
        ("expert_0,expert_1\n0,0\n", ("every load is 0",)),
        ("\n\n", ("no numbers",)),
    ],
)
def test_bad_csv(tmp_path, text, parts):
    refused(csv(tmp_path, text), *parts)


def test_expert_out_of_the_models_range(tmp_path):
    path = csv(tmp_path, "token,layer,expert\n0,0,64\n")
    refused(path, "line 2: expert 64 is out of range, experts are 0 … 63", num_experts=64)
    refused(csv(tmp_path, "expert_0,expert_1\n1,2\n"), "2 experts", "model has 3", num_experts=3)


def test_traffic(tmp_path):
    traffic = read_workload(csv(tmp_path, "0,1.5,2\n3,0,4\n5,6e2,0\n"), bytes_per_token=2)
    np.testing.assert_array_equal(traffic.bytes, [[[0, 1.5, 2], [3, 0, 4], [5, 600, 0]]])
    traffic = read_workload(csv(tmp_path, "dst,src,bytes\n1,0,5\n2,1,7\n"))  # without a layer, and with gaps
    np.testing.assert_array_equal(traffic.bytes, [[[0, 5, 0], [0, 0, 7], [0, 0, 0]]])
    # A square below counted numbers is traffic, and that is said.
    traffic = read_workload(csv(tmp_path, "0,1,2\n3,4,5\n6,7,8\n"))
    np.testing.assert_array_equal(traffic.bytes[0], np.arange(9).reshape(3, 3))
    (finding,) = traffic.origin.findings
    assert finding.severity == "warning" and "expert_0" in finding.message


CELLS = st.one_of(
    st.integers(0, 10**12), st.floats(0, 1e15).map(lambda number: float(f"{number:.4g}")), st.sampled_from([0, 1, 2, 3])
)


@st.composite
def number_tables(draw):
    """float64[row, column] of at least two columns, and the table as a text in one of the ways that people save it."""
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(2, 6))
    table = [[draw(CELLS) for _ in range(columns)] for _ in range(rows)]
    separator, end, space = draw(st.tuples(st.sampled_from(",\t"), st.sampled_from(["\n", "\r\n"]), st.sampled_from(["", " "])))
    write = draw(st.sampled_from([str, lambda cell: f"{cell:.6e}", lambda cell: f'"{cell}"', lambda cell: f"+{cell}"]))
    space = space if '"' not in write(0) else ""  # else the quotes were part of the cell
    text = "".join(separator.join(space + write(cell) for cell in row) + end for row in table)
    if draw(st.booleans()):
        text = text.removesuffix(end)
    return np.array([[float(write(cell).strip('"')) for cell in row] for row in table]), text


@settings(max_examples=examples(300), deadline=None)
@given(number_tables(), st.sampled_from(["t.csv", "t.tsv", "t.txt"]))
def test_a_first_line_of_numbers_is_a_row(tmp_path_factory, table, name):
    numbers, text = table
    path = tmp_path_factory.mktemp("numbers") / name
    path.write_text(text, newline="")
    rows, columns = numbers.shape
    first = next(line for line in text.splitlines()).replace("\t", ",")
    counted = [cell.strip(' "') for cell in first.split(",")] == [str(at) for at in range(columns)]
    if counted and rows != columns:
        return  # the one header of numbers, which other tests are about
    if abs(rows - columns) == 1:
        said = refusal(read_workload, path)
        assert "square" in said or "a placement" in said
        return
    try:
        workload = read_workload(path)
    except InputError as error:
        # A placement, or nothing in it: refused for its content, never for a missing header.
        assert any(reason in str(error) for reason in ("a placement", "every load is 0")), error
        return
    if rows == columns:
        np.testing.assert_array_equal(workload.bytes, numbers[None])
    else:
        np.testing.assert_array_equal(workload.load, numbers[numbers.any(axis=1)])


@pytest.mark.parametrize("header", ["expert_0,expert_1", "0,1"])
def test_loads_leave_dense_layers_out(tmp_path, header):
    holds(read_workload(csv(tmp_path, f"{header}\n0,0\n1,2\n3,0.5\n")), load=[[1, 2], [3, 0.5]], model_layers=(1, 2))
    load = read_workload(csv(tmp_path, "expert_1,layer,expert_0\n1,9,2\n3,4,0\n"))  # layers and columns in any order
    holds(load, load=[[0, 3], [2, 1]], model_layers=(4, 9))


@pytest.mark.parametrize(
    ("columns", "parts"),
    [
        ({"token": [0, 1], "layer": [0, 0], "expert": [1, None]}, ("row 1: column 'expert' is empty",)),
        ({"token": [0, 1], "layer": [0, 0], "expert": ["1", "2"]}, ("'expert' is string",)),
        ({name: pa.array([], pa.int64()) for name in ("token", "layer", "expert")}, ("no rows",)),
        ({"src": [0], "dst": [1], "bytes": [-1.0]}, ("row 0", "-1")),
    ],
)
def test_bad_parquet(tmp_path, columns, parts):
    refused(parquet(tmp_path, **columns), *parts)


def test_tables_that_are_cut_short_or_too_large(tmp_path, monkeypatch):
    path = parquet(tmp_path, token=[0], layer=[0], expert=[1])
    path.write_bytes(path.read_bytes()[:-30])
    refused(path, "damaged")
    zeros = pa.chunked_array([pa.array(np.zeros(10**6, np.int64))] * 11)
    refused(parquet(tmp_path, token=zeros, layer=zeros, expert=zeros), "11,000,000 rows")
    monkeypatch.setattr(tables, "MAX_ROWS", 3)
    refused(csv(tmp_path, "token,layer,expert\n" + "0,0,1\n" * 4), "4 rows")


@given(st.data(), st.integers(1, 5), st.integers(0, 4), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_as_counted_one_by_one(data, experts, redundant, layers, seed):
    rng = np.random.default_rng(seed)
    copies = data.draw(st.lists(st.integers(0, experts - 1), min_size=redundant, max_size=redundant))
    slots = np.array([rng.permutation([*range(experts), *copies]) for _ in range(layers)])
    counts = rng.integers(0, 9, (2, layers, slots.shape[1])).astype(float)
    expected = np.zeros((2, layers, experts))
    for source, layer, slot in np.ndindex(counts.shape):
        expected[source, layer, slots[layer, slot]] += counts[source, layer, slot]
    np.testing.assert_array_equal(fold_slots(counts, slots, experts), expected)


@pytest.mark.parametrize(("ranks", "suffix"), [(2, "csv"), (4, "csv"), (2, "json"), (2, "npy")])
def test_files_of_ranks_lie_side_by_side_where_the_models_experts_divide_by_them(tmp_path, ranks, suffix):
    counts = np.random.default_rng(0).integers(1, 5000, size=(6, 16))
    counts[2, : 16 // ranks] = 0  # a layer that the first rank got nothing in
    for rank, own in enumerate(np.split(counts, ranks, axis=1)):
        path = tmp_path / f"decode_{9 + rank}.{suffix}"  # 9 before 10
        if suffix == "npy":
            np.save(path, own)
        else:
            path.write_text(json.dumps(own.tolist()) if suffix == "json" else "\n".join(",".join(map(str, row)) for row in own))
    (part,) = parts([tmp_path], model=MODEL)
    assert (part.name, len(part.paths)) == ("decode", ranks)
    for options in ({}, {"num_experts": 16}):
        loads = read_workload(tmp_path, model=MODEL, **options)
        np.testing.assert_array_equal(loads.load, counts)
        assert loads.model_layers == MODEL.moe_layers and loads.origin.findings[0].code == "ranks-side-by-side"
    path.unlink()
    if ranks > 2:
        with pytest.raises(InputError, match="3 files of 4 experts each, of 4 ranks"):
            read_workload(tmp_path, model=MODEL)
    for rank in range(2):
        (tmp_path / f"damaged{rank}.parquet").write_bytes(b"PAR1 and nothing else")
    assert len(parts([tmp_path], model=MODEL)) == 3


COUNTS = np.random.default_rng(0).integers(1, 5000, size=(6, 16))
OF_LAYERS = dict(enumerate(COUNTS.tolist()))
LONG = [(layer, expert, int(COUNTS[layer, expert])) for layer, expert in np.ndindex(COUNTS.shape)]


def saved_by(save):
    """The bytes that a function writes into a file."""
    save(file := BytesIO())
    return file.getvalue()


def lines_of(rows, separator=","):
    return "".join(separator.join(map(str, row)) + "\n" for row in rows)


@pytest.mark.parametrize(
    "content",
    [
        lines_of(COUNTS, " "),
        saved_by(lambda file: np.savetxt(file, COUNTS)),
        lines_of([["", *(f"e{expert}" for expert in range(16))], *([layer, *row] for layer, row in OF_LAYERS.items())]),
        lines_of([("layer_idx", "expert_id", "num_tokens"), *LONG]),
        gzip.compress(lines_of([("layer", "expert", "count"), *LONG]).encode()),
        [{"layer": layer, "expert": expert, "count": count} for layer, expert, count in LONG],
        {"layers": [{"layer_id": layer, "loads": row} for layer, row in OF_LAYERS.items()]},
        "".join(json.dumps({"layer": str(layer), "expert_load": row}) + "\n" for layer, row in OF_LAYERS.items()),
        OF_LAYERS,
        {
            "data": {
                f"layer_{layer}": {str(expert): count for expert, count in enumerate(row)} for layer, row in OF_LAYERS.items()
            }
        },
        {"step": 3, "expert_counts": [[str(count) for count in row] for row in COUNTS.tolist()]},
        saved_by(lambda file: np.savez(file, **{f"layer{layer}": row for layer, row in enumerate(COUNTS)})),
        saved_by(lambda file: np.savez(file, loads=COUNTS.astype(np.float32))),
        *(
            saved_by(partial(torch.save, tensors))
            for tensors in (
                {f"model.layers.{layer}.mlp": torch.tensor(row) for layer, row in OF_LAYERS.items()},
                {"tokens_per_expert": torch.tensor(COUNTS)},
                [torch.tensor(row) for row in COUNTS],
            )
        ),
    ],
    ids=lambda _: "",
)
def test_the_same_loads_in_other_forms(tmp_path, content):
    (scratch := tmp_path / "scratch").mkdir()
    loads = read_workload(csv(tmp_path, content, "loads"), model=MODEL, scratch=scratch)
    np.testing.assert_array_equal(loads.load, COUNTS)


def test_counts_of_experts_that_leave_out_those_without_tokens(tmp_path):
    sparse = {f"layer_{layer}": {"3": 5, "11": layer + 1} for layer in range(6)}
    read = read_workload(csv(tmp_path, sparse, "a.json"), model=MODEL)
    assert read.load.shape == (6, 16) and read.load[4, [3, 11]].tolist() == [5, 5] and read.load.sum() == 30 + 21
    for numbers, said in ((COUNTS[0], "16 numbers in a row"), (COUNTS.T % 9, "[16, 6] numbers are [experts, layers] of small")):
        refused(csv(tmp_path, saved_by(lambda file, numbers=numbers: np.save(file, numbers)), "a.npy"), said, model=MODEL)


def test_requests_and_phases_in_words_and_tokens_numbered_within_them(tmp_path):
    head = "request_id,token_idx,layer_idx,expert_id,phase,weight\n"
    rows = [("b", 0, "prefill"), ("b", 1, "decode"), ("a", 0, "extend")]
    text = head + "".join(f"{name},{token},0,{at},{phase},0.5\n" for at, (name, token, phase) in enumerate(rows))
    trace = read_workload(csv(tmp_path, text))
    holds(trace, experts=[[[0]], [[1]], [[2]]], sequence=[0, 0, 1], phase=[0, 1, 0])
    assert trace.origin.findings[0].message == "Columns that are not read: 'weight'."
    refused(csv(tmp_path, text.replace("extend", "train")), "column 'phase' is 'train'; it is prefill or decode")
    for first, second in (("True", "False"), (1, 0)):
        text = f"token,layer,expert,is_prefill\n0,0,1,{first}\n1,0,2,{second}\n"
        holds(read_workload(csv(tmp_path, text)), experts=[[[1]], [[2]]], phase=[0, 1])
    records = [{"token": token, "layer": 0, "topk_ids": [token, 3 - token]} for token in range(2)]
    said = [{"is_prefill": True, "request_id": "x"}, {"is_prefill": False, "request_id": "y", "note": "z"}]
    for more, columns in (([{}, {}], {}), (said, {"phase": [0, 1], "sequence": [0, 1]})):
        content = [record | other for record, other in zip(records, more, strict=True)]
        holds(read_workload(csv(tmp_path, content, "a.json")), experts=[[[0, 3]], [[1, 2]]], **columns)
    refused(csv(tmp_path, [*records, 3], "a.json"), "record 3", "is no JSON object as the first one is")
    refused(csv(tmp_path, [*records, {"token": 2.5, "layer": 0, "topk_ids": [1, 2]}], "a.json"), "not 2.5")


@pytest.mark.parametrize(
    ("name", "forms", "said"),
    [
        ("npu_{}.csv", [lambda own, rows: lines_of([("layer", "expert", "count"), *rows])], "have tokens at different experts"),
        ("rank{}/loads.csv", [lambda own, _: lines_of(own)], "rank0/loads.csv has the first"),
        ("load{}", [lambda own, _: lines_of(own), lambda own, _: own.tolist()], "load0 has the first"),
    ],
)
def test_files_of_ranks_in_other_forms(tmp_path, name, forms, said):
    for rank, own in enumerate(np.split(COUNTS, 4, axis=1)):
        path = tmp_path / name.format(rank)
        path.parent.mkdir(exist_ok=True)
        csv(path.parent, forms[rank % len(forms)](own, [row for row in LONG if row[1] // 4 == rank]), path.name)
    loads = read_workload(tmp_path, model=MODEL)
    np.testing.assert_array_equal(loads.load, COUNTS)
    assert said in loads.origin.findings[0].message
