"""Tables that are nearly right: each gives a workload or one clear line."""

import io
import tempfile
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.formats import read_workload
from tests.formats.fuzzing import any_input, workload_or_one_line
from tests.formats.mutations import PIECES, changed_text, damaged

pytestmark = pytest.mark.slow

ROUTING = {
    "token": [0, 0, 0, 0, 1, 1, 1, 1],
    "layer": [3, 3, 7, 7, 3, 3, 7, 7],
    "rank_in_topk": [0, 1, 0, 1, 0, 1, 0, 1],
    "expert": [2, 0, 1, 3, -1, 1, 2, 0],
    "sequence": [0, 0, 0, 0, 5, 5, 5, 5],
    "source_rank": [1, 1, 1, 1, 0, 0, 0, 0],
}
COLUMNS = {
    "routing": ROUTING,
    "routing without ranks": {name: ROUTING[name] for name in ("expert", "layer", "token")},
    "traffic": {"layer": [0, 0, 1, 1], "src": [0, 1, 0, 2], "dst": [1, 2, 2, 0], "bytes": [1.0, 2.5, 3e9, 0.0]},
    "loads": {"layer": [1, 0, 2], "expert_0": [1.0, 2, 0], "expert_1": [4.0, 5, 6], "expert_2": [0.0, 1, 2]},
    "numbered loads": {"1": [1, 2, 3, 4], "0": [4, 5, 6, 7]},
}


def text_of(columns: dict[str, list]) -> str:
    return "".join(",".join(map(str, row)) + "\n" for row in (columns, *zip(*columns.values(), strict=True)))


TEXTS = {kind: text_of(columns) for kind, columns in COLUMNS.items()} | {
    "traffic without a head": "0,1,2\n3,0,4e2\n5,6.5,0\n",
    "quoted": '\ufeff"token","layer","expert"\r\n"0","0","1"\r\n"1","0","3.0"\r\n',
}
WORDS = (
    *PIECES,
    *ROUTING,
    "src",
    "dst",
    "bytes",
    "expert_0",
    "expert_9",
    "expert_99999",
    "3.0",
    "1e3",
    "-0",
    "4095",
    "32767",
)


def read(path: Path, num_experts: int | None) -> None:
    workload_or_one_line(path, partial(read_workload, num_experts=num_experts))


@pytest.mark.parametrize("kind", TEXTS)
@given(data=st.data(), num_experts=st.sampled_from([None, None, 4]))
@any_input
def test_any_csv(kind, data, num_experts):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "table.csv")
        path.write_bytes(data.draw(damaged(data.draw(changed_text(TEXTS[kind], WORDS)).encode())))
        read(path, num_experts)


TYPES = (pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.string(), pa.bool_(), pa.decimal128(38, 2))
NUMBERS = (None, float("nan"), float("inf"), -1.0, 0.0, 0.5, 1e308, 2.0**53, 2.0**63, 4095.0, 4096.0, 32767.0)


@st.composite
def changed_columns(draw: st.DrawFn, columns: dict[str, list]) -> pa.Table:
    """A table with columns left out, called otherwise, of other types, with odd numbers, lists or groups in them."""
    arrays = {name: pa.array(values) for name, values in columns.items()}
    for name in draw(st.lists(st.sampled_from(sorted(arrays)), max_size=3)):
        match draw(st.sampled_from(("drop", "name", "type", "number", "lists", "dictionary", "struct"))):
            case "drop":
                arrays.pop(name, None)
            case "name":
                other = draw(st.sampled_from((name.upper(), f" {name}", "expert_7", "layer", "", "é")))
                arrays[other] = pa.array(columns[name])
            case "type":
                arrays[name] = pa.array(columns[name]).cast(draw(st.sampled_from(TYPES)), safe=False)
            case "number":
                values = [float(value) for value in columns[name]]
                values[draw(st.integers(0, len(values) - 1))] = draw(st.sampled_from(NUMBERS))
                arrays[name] = pa.array(values)
            case "lists":
                arrays[name] = pa.array([[value] for value in columns[name]])
            case "dictionary":
                arrays[name] = pa.array(columns[name]).dictionary_encode()
            case "struct":
                arrays[name] = pa.array([{"a": value} for value in columns[name]])
    return pa.table(arrays)


@pytest.mark.parametrize("kind", COLUMNS)
@given(
    data=st.data(),
    num_experts=st.sampled_from([None, None, 4]),
    compression=st.sampled_from(["none", "snappy", "gzip", "zstd", "brotli", "lz4"]),
    rows=st.sampled_from([1, 3, 1000]),
)
@any_input
def test_any_parquet(kind, data, num_experts, compression, rows):
    file = io.BytesIO()
    pq.write_table(data.draw(changed_columns(COLUMNS[kind])), file, row_group_size=rows, compression=compression)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "table.parquet")
        path.write_bytes(data.draw(damaged(file.getvalue())))
        read(path, num_experts)


@pytest.mark.parametrize("layers", [3, 16, 1001])
def test_few_rows_that_name_the_largest_cluster(tmp_path, layers):
    path = tmp_path / "traffic.csv"
    path.write_text("layer,src,dst,bytes\n" + "".join(f"{layer},0,4095,1\n" for layer in range(layers)))
    assert f"[{layers}, 4096, 4096], at most 33,554,432 numbers are read" in workload_or_one_line(path)
