"""Files of times that are nearly right: each gives times or one clear line."""

import gzip
import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from engine.costs import AlphaBeta, CostProfile, MeasuredTimes, Profiled
from engine.costs.pair_cluster import draw_pairs
from engine.formats import findings_of_times, read_costs
from engine.formats.measured.nccl_pairs import pairs_in, read_pairs
from tests.cases import files
from tests.cases.files import nccl_test_log as printed
from tests.cases.fuzzing import answer_or_one_line, any_input
from tests.cases.mutations import PIECES, changed_text, damaged, json_texts, mutated

saved = files.saver("times")


def read_all(path: Path) -> None:
    """Read a file as times in every way that a page or a command does."""
    costs = answer_or_one_line(lambda: read_costs(path))
    findings_of_times(path)
    if isinstance(costs, MeasuredTimes):
        assert costs.gemm or costs.collectives or costs.exchanges or costs.memory
        assert isinstance(Profiled(costs).digest, str)
    elif isinstance(costs, CostProfile):
        assert AlphaBeta(costs).source


TESTS = [
    printed(),
    printed("all_reduce_perf", redop="sum"),
    printed("sendrecv_perf", gpus=2, nodes=2),
    printed(None, root=""),
    files.pair_log((("a", "1b"), ("b", "1b")), 1e9),
    files.pair_log((("a", "1b"), ("a", "43")), 1e9, binary="alltoall_perf"),
]


@given(st.data(), st.lists(st.sampled_from(TESTS), min_size=1, max_size=4))
@any_input
def test_logs_of_nccl_tests(tmp_path, data, tests):
    path = saved(tmp_path, data.draw(changed_text("".join(tests))), "run.log")
    read_all(path)
    pairs = answer_or_one_line(lambda: read_pairs([path])[0])
    if not isinstance(pairs, str):
        assert pairs_in(path), "what can be read is recognised"
        drawn = answer_or_one_line(lambda: draw_pairs(pairs, "fuzz", "H100"))
        assert isinstance(drawn, str) or np.isfinite(drawn.mean_error)


@given(st.data(), st.sampled_from([files.nccl_json(), [files.rccl_record(1024), files.rccl_record(2048, 1)]]))
@any_input
def test_json_of_nccl_tests_and_records_of_rccl_tests(tmp_path, data, content):
    path = saved(tmp_path, data.draw(damaged(data.draw(json_texts(data.draw(mutated(content)))))))
    read_all(path)
    answer_or_one_line(lambda: read_pairs([path]))


@given(st.data(), st.lists(st.sampled_from([files.STEADY_WAITS, files.SLOW_WAITS]), min_size=1, max_size=3), st.booleans())
@any_input
def test_logs_of_deepxtrace(tmp_path, data, windows, bare):
    read_all(saved(tmp_path, data.draw(changed_text("".join(files.waits_log("Dispatch", rows, bare) for rows in windows)))))


WORDS = (*PIECES, *("gemm", "all_reduce", "send_receive", "operation", "seconds", "ranks", "fp8", "4.0", "1e-300", "1e300"))


@given(st.data())
@any_input
def test_tables_of_measured_times(tmp_path, data):
    read_all(saved(tmp_path, data.draw(damaged(data.draw(changed_text(files.TIMES_TABLE, WORDS)).encode()))))


odd = st.sampled_from([None, -1, 0, 1, 2.5, 1e400, 10**30, "", "x", [], {}, [1], [[1, 2], [2, 3]], True, "float", "8"])
EVENTS = [
    files.operator(),
    files.operator("aten::addmm", ((64,), (48, 32), (32, 64))),
    files.kernel(),
    files.collective(),
    files.collective("allreduce", 512, "Float"),
    files.kernel(name="void deep_ep::intranode::dispatch<8, 768, 8192>(int4*)"),
    files.kernel(name="void deep_ep::internode_ll::combine<(bool)0, (int)6144, (int)11>(void *)"),
    {"ph": "X", "name": "gloo:all_reduce", "dur": 4.0, "args": {"Input type": ["float"], "Input Dims": [[64, 64]]}},
]


@st.composite
def events(draw: st.DrawFn) -> object:
    event = json.loads(json.dumps(draw(st.sampled_from(EVENTS))))
    for _ in range(draw(st.integers(0, 2))):
        part = draw(st.sampled_from([event, event["args"]])) if isinstance(event.get("args"), dict) else event
        if part:
            part[draw(st.sampled_from(sorted(part)))] = draw(odd)
    return event


@given(
    st.lists(events() | odd, max_size=6),
    st.fixed_dictionaries({}, optional={"deviceProperties": odd, "distributedInfo": odd | st.just({"world_size": 2})}),
    st.integers(0, 400),
    st.booleans(),
)
@any_input
def test_traces_of_the_profiler(tmp_path, some, about, cut, packed):
    text = json.dumps({"schemaVersion": 1} | about | {"traceEvents": some}).encode()
    text = text if cut > 100 else text[: len(text) - cut]
    read_all(saved(tmp_path, gzip.compress(text) if packed else text, "trace.json"))


COLUMNS = {"device": ["NVIDIA H100 80GB HBM3", "", "odd\ndevice"], "gemm_dtype": ["bfloat16", "fp8", "nvfp4"]}
COLUMNS |= {"op_name": ["alltoall", "all_reduce", "broadcast"], "nccl_dtype": ["half", "half", "int8"], "num_gpus": [2, 8, 1]}
COLUMNS |= {"message_size": [512, 1024, 0], "m": [1, 8, 64], "n": [64] * 3, "k": [128] * 3, "latency": [0.01, 0.02, 0.03]}
COLUMNS |= {"moe_dtype": ["fp8"] * 3, "dispatch_avg_t_us": [1.0, 2.0, 3.0], "combine_avg_t_us": [1.0, 2.0, 3.0]}
GEMM, NCCL = (("gemm_dtype", "m", "n", "k", "latency"), ("op_name", "nccl_dtype", "num_gpus", "message_size", "latency"))
cells = st.sampled_from([None, float("nan"), float("inf"), -1.0, 0.0, 1e308, 5.0])


@given(
    st.sampled_from([GEMM, NCCL]),
    st.sets(st.sampled_from(sorted(COLUMNS)), max_size=4),
    st.dictionaries(
        st.sampled_from(sorted(COLUMNS)), st.lists(cells, min_size=3, max_size=3) | st.just([[1], [2], [3]]), max_size=2
    ),
    st.tuples(st.integers(0, 5000), st.integers(0, 255)),
    st.integers(0, 3),
)
@any_input
def test_tables_of_aiconfigurator(tmp_path, needed, more, other, flip, damage):
    columns = {name: COLUMNS[name] for name in {*needed, *more}} | other
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    content = bytearray(file.getvalue())
    if damage == 0:
        content[flip[0] % len(content)] = flip[1]
    read_all(saved(tmp_path, bytes(content), "perf.parquet"))
