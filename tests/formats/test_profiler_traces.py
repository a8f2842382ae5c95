"""Traces of the PyTorch profiler: one recorded on the CPU, GPU traces from the documented keys, damaged ones."""

import gzip
import io
import json
import tracemalloc
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.costs import Profiled
from engine.errors import InputError
from engine.formats import read_costs
from engine.formats.measured import kineto
from engine.formats.measured.deepxtrace import kernel_of
from engine.formats.measured.kineto import read_members
from tests.cases.examples import examples
from tests.cases.files import collective, kernel, operator, profiler_trace, saved_trace
from tests.cases.files import refused as refused_by
from tests.cases.refusals import refusal
from tests.strategies import cluster_of, make_gpu

refused = partial(refused_by, read=read_costs)


def read(folder: Path, *events: dict, **more: object) -> object:
    return read_costs(saved_trace(folder, profiler_trace(*events, **more)))


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_gemms_take_the_time_of_their_kernels(tmp_path, name):
    events = [
        *(operator(id=1), kernel(1, 10.0), kernel(1, 5.0)),  # a split-k GEMM has two kernels
        *(operator(id=2), kernel(2, 20.0), operator(id=3), kernel(3, 14.0)),
        *(operator("aten::addmm", ((64,), (48, 32), (32, 64)), id=4), kernel(4, 30.0)),
        *(operator("aten::relu", ((16, 32), (32, 64)), id=5), kernel(5, 77.0)),
        operator(id=6),  # without a kernel
    ]
    measured = read_costs(saved_trace(tmp_path, profiler_trace(*events), name))
    (gemm,) = measured.gemm
    assert (gemm.gpu, gemm.dtype) == ("H100", "bf16")
    assert gemm.points == ((16, 64, 32, pytest.approx(15e-6)), (48, 64, 32, pytest.approx(30e-6)))
    assert (measured.name, measured.origin) == ("step", "PyTorch profiler trace on H100")


def test_collectives_have_bytes_and_ranks(tmp_path):
    events = [
        *(collective(dur=dur) for dur in (50.0, 70.0, 60.0)),
        collective(count=2048, dur=90.0),
        collective("allreduce", 512, "Float", dur=33.0),
        collective("allreduce", 512, "Float", ranks=2, dur=11.0),
        *(collective("allgather"), collective(ranks=1), collective(count=0), collective(dtype="Unknown")),
    ]
    measured = read(tmp_path, *events)
    points_of = {(times.operation, times.ranks): times.points for times in measured.collectives}
    assert points_of == {
        ("all_to_all", 8): ((2048, pytest.approx(60e-6)), (4096, pytest.approx(90e-6))),
        ("all_reduce", 8): ((2048, pytest.approx(33e-6)),),
        ("all_reduce", 2): ((2048, pytest.approx(11e-6)),),
    }
    assert float(Profiled(measured).all_to_all(cluster_of(*[make_gpu()] * 8), 3072)) == pytest.approx(75e-6)


def test_other_collectives_are_counted_and_the_device_may_come_last(tmp_path):
    (note,) = read(tmp_path, collective(), *[collective("_allgather_base")] * 3, collective("broadcast")).notes
    assert note == "left out, as not used for planning: 3 × '_allgather_base', 1 × 'broadcast'"
    assert read(tmp_path, collective()).notes is None
    # The metadata of a trace may come last.
    data = profiler_trace(operator(), kernel())
    data["deviceProperties"] = data.pop("deviceProperties")
    assert read_costs(saved_trace(tmp_path, data)).gemm[0].gpu == "H100"


def test_memory_stays_small_beside_a_large_trace(tmp_path, monkeypatch):
    events = [json.dumps(operator()), *[json.dumps(kernel())] * 5_000]
    path = tmp_path / "large.json"
    path.write_text('{"schemaVersion": 1, "traceEvents": [' + ",".join(events) + "]}")
    monkeypatch.setattr("engine.formats.measured.kineto.PIECE", 10_000)
    tracemalloc.start()
    read_costs(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < path.stat().st_size / 5


def test_dtypes_are_kept_apart_and_devices_have_the_catalogues_names_where_they_are_the_same(tmp_path):
    operators = [operator(id=1), operator(kind="float", id=2), operator(kind="long int", id=3)]
    measured = read(tmp_path, *operators, *map(kernel, (1, 2, 3)))
    assert sorted(times.dtype for times in measured.gemm) == ["bf16", "fp32"]
    for device, kind in (
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe"),
        ("", "GPU"),
        ("AMD Instinct MI300X", "MI300X"),
    ):
        assert read(tmp_path, operator(), kernel(), device=device).gemm[0].gpu == kind


def test_a_trace_made_here_is_read(tmp_path):
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile

    a, b = torch.ones(24, 40), torch.ones(40, 56)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        for _ in range(3):
            a @ b
        torch.addmm(torch.ones(56), a, b)
    path = tmp_path / "cpu.json"
    recorded.export_chrome_trace(str(path))
    (gemm,) = read_costs(path).gemm
    assert (gemm.gpu, gemm.dtype) == ("CPU", "fp32")
    assert [point[:3] for point in gemm.points] == [(24, 56, 40)]
    assert 0 < gemm.points[0][3] < 10


def test_gloo_ranges_are_read_without_a_gpu(tmp_path):
    """As two ranks of PyTorch 2.13 recorded them."""

    def gloo(name, dims, dur, kind="float"):
        args = {"External id": 513, "Input type": [kind], "Input Strides": [[1]], "Input Dims": dims, "Ev Idx": 0}
        event = {"ph": "X", "cat": "user_annotation", "name": name, "ts": 1.0, "dur": dur, "pid": 1, "tid": 2}
        return event | {"args": args}

    reduced, exchanged = gloo("gloo:all_reduce", [[64, 64]], 11.0), gloo("gloo:all_to_all", [[4096]], 4.0)
    data = profiler_trace(reduced, exchanged, gloo("gloo:barrier", [], 9)) | {"deviceProperties": []}
    data |= {"distributedInfo": {"backend": "gloo", "rank": 0, "world_size": 2}}
    measured = read_costs(saved_trace(tmp_path, data))
    points = {times.operation: (times.ranks, times.points) for times in measured.collectives}
    reduced, exchanged = ((2, ((16384, pytest.approx(seconds)),)) for seconds in (11e-6, 4e-6))
    assert points == {"all_reduce": reduced, "all_to_all": exchanged}


@pytest.mark.parametrize(
    "events",
    [
        [],
        [operator(dims=((16, 32), (33, 64))), kernel()],
        [operator(dims=((16, -32), (-32, 64))), kernel()],
        [{"ph": "X"}, 3, None, {"ph": "X", "args": 7, "dur": 1}, {"ph": "M", "args": {}}],
        [operator() | {"args": {"Input Dims": "x", "Input type": 3, "External id": []}}, kernel()],
        [operator(name=[1]), kernel(name={})],
        [collective(name=3), collective(count="many"), collective(ranks=None), collective(dur=-1.0)],
        [operator(), kernel(dur="long")],
    ],
)
def test_traces_with_nothing_to_use_are_refused(tmp_path, events):
    refused(saved_trace(tmp_path, profiler_trace(*events)), "no GEMMs with shapes", "record_shapes=True")


def test_damaged_traces_are_refused(tmp_path, monkeypatch):
    refused(saved_trace(tmp_path, {"traceEvents": {}}), "'traceEvents' is not a list")
    with pytest.raises(InputError, match=r"^x\.json: is JSON that Switchyard does not recognise"):
        read_costs(saved_trace(tmp_path, [1], "x.json.gz"))
    path = saved_trace(tmp_path, profiler_trace(operator(), kernel()), "y.json.gz")
    path.write_bytes(path.read_bytes()[:40])
    refused(path)
    path.write_bytes(b"{}")
    refused(path, "is not a gzip file", "although")
    path.write_bytes(gzip.compress(b'{"traceEvents": ['))
    refused(path, "not valid JSON, or cut off")
    refused(saved_trace(tmp_path, {"kind": "other"}), "kind")
    monkeypatch.setattr(kineto, "MAX_TRACE_BYTES", 10**6)
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * 10**7))
    refused(path, "unpacks to more than")


NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def test_a_name_says_which_kernel_it_is():
    for name, says in {
        "intranode::dispatch<8, 768, 8192>(int4*, float*, int*)": ("intranode", "dispatch", 8, None, None),
        "intranode::dispatch<(int)4, (int)768, (int)8192>(int4 *, float *)": ("intranode", "dispatch", 4, None, None),
        "intranode::cached_notify_combine<8>(void**, int*)": ("intranode", "notify", 8, None, None),
        "internode::notify_dispatch<false, 4>(int const*, int*)": ("internode", "notify", None, 4, None),
        "internode::dispatch<false, 4, false, 7, 4>(int4*, deep_ep::SourceMeta*)": ("internode", "dispatch", None, 4, None),
        "internode_ll::dispatch<(bool)1, (bool)1, (int)6144>(void *)": ("low-latency", "dispatch", None, None, 6144),
        "internode_ll::combine<(bool)0, (int)6144, (int)11>(void *, void *)": ("low-latency", "combine", None, None, 6144),
        "internode_ll::dispatch<true, 3, 10, 7168>(void*, float*)": ("low-latency", "dispatch", None, None, 7168),
        "intranode::dispatch": ("intranode", "dispatch", None, None, None),
        "internode::get_dispatch_layout<256, 32, 8>(long const*)": None,
        "intranode::barrier<8>(int**)": None,
    }.items():
        assert [kernel_of(f"void deep_ep::{name}"), kernel_of(f"deep_ep::{name}")] == [says, says]
    assert kernel_of("void dpsk::ep::internode::dispatch_ll(void*)") == ("low-latency", "dispatch", None, None, None)
    assert [kernel_of(name) for name in (NCCL, "void dispatch<8>(int)", "")] == [None] * 3  # outside the library


DISPATCH = "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*)"


def test_a_trace_says_how_often_and_how_long_but_not_how_much(tmp_path):
    measured = read(tmp_path, *[kernel(id=None, dur=100.0 + 10 * number, name=DISPATCH) for number in range(11)])
    (times,) = measured.exchanges
    assert (times.kernels, times.part, times.gpus, times.launches) == ("intranode", "dispatch", 8, 11)
    assert (times.low, times.median, times.high) == pytest.approx((110e-6, 150e-6, 190e-6))
    assert not measured.collectives and not measured.gemm
    assert "11 DeepEP intranode dispatch kernels over 8 GPUs: 150 µs in the median" in measured.notes[0]
    assert "does not say how many tokens" in measured.notes[0]
    measured = read(tmp_path, operator(), kernel(), kernel(id=None, name=DISPATCH))
    assert len(measured.gemm) == 1
    assert measured.exchanges[0].launches == 1
    path = tmp_path / "times.json"
    path.write_text(measured.to_json())
    assert read_costs(path) == measured


PATH = Path("trace.json")
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
values = st.recursive(scalars, lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=3), part, max_size=3))


def members(text: str, most: int = 10**6) -> list[tuple[str, object]]:
    return list(read_members(io.StringIO(text), PATH, "events", most))


@given(
    st.dictionaries(st.text(max_size=5), values, max_size=3), st.lists(values, max_size=6), st.integers(1, 40), st.booleans()
)
@settings(max_examples=examples(25), deadline=None)
def test_members_and_elements_are_those_of_the_whole(other, events, piece, spaced):
    other.pop("events", None)
    text = json.dumps(other | {"events": events, "last": 12345}, indent=2 if spaced else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kineto, "PIECE", piece)
        assert members(text) == [*other.items(), *(("events", event) for event in events), ("last", 12345)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a JSON object {…} is needed"),
        ('{"events": 3}', "'events' is not a list"),
        ('{"events": [1, 2', "it ends in the middle"),
        ('{"events": [{"a": ', "not valid JSON, or cut off"),
        ('{"a" 1}', "'1' instead of :"),
        ("{1: 2}", "a key must be a text"),
        ('{"a": 1,}', "a value is missing"),
        ('{"a": 1} {', "more after its end"),
    ],
)
def test_other_texts_are_refused(text, says):
    assert refusal(members, text).startswith("trace.json: ") and says in refusal(members, text)


def test_more_than_is_read_and_one_endless_value_are_refused_and_nothing_taken_is_kept(monkeypatch):
    assert "unpacks to more than is read" in refusal(members, '{"events": [' + " " * 2_000_000, most=10**6)
    monkeypatch.setattr(kineto, "PIECE", 100)
    monkeypatch.setattr(kineto, "MAX_VALUE", 1000)
    file = io.StringIO('{"a": "' + "x" * 100_000)
    assert "cut off" in refusal(list, read_members(file, PATH, "events", 10**6))
    assert file.tell() < 10_000
    monkeypatch.setattr(kineto, "PIECE", 1000)
    file = io.StringIO('{"events": [' + ",".join(["1"] * 50_000) + "]}")
    next(read_members(file, PATH, "events", 10**6))
    assert file.tell() < 5000
