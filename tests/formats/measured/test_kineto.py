"""Traces of the PyTorch profiler: one made here on the CPU, GPU ones from the documented keys, and damaged ones."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from engine.costs import Profiled
from engine.formats import read_costs
from engine.formats.measured import kineto
from tests.formats.faults import refused as refused_by
from tests.strategies import cluster_of, make_gpu


def refused(path: Path, *parts: str) -> str:
    return refused_by(path, *parts, read=read_costs)


def operator(name="aten::mm", dims=((16, 32), (32, 64)), kind="c10::BFloat16", id=1, dur=99.0) -> dict:
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": name,
        "ts": 1.0,
        "dur": dur,
        "pid": 1,
        "tid": 1,
        "args": {"External id": id, "Input Dims": [list(dim) for dim in dims], "Input type": [kind] * len(dims)},
    }


def kernel(id=1, dur=10.0, name="gemm_kernel") -> dict:
    args = {"External id": id, "device": 0, "stream": 7}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": 2.0, "dur": dur, "pid": 0, "tid": 7, "args": args}


def collective(name="all_to_allv", count=1024, dtype="BFloat16", ranks=8, dur=50.0) -> dict:
    event = kernel(id=None, dur=dur, name="ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)")
    event["args"] |= {
        "Collective name": name,
        "In msg nelems": count,
        "Out msg nelems": count,
        "Group size": ranks,
        "dtype": dtype,
        "In split size": "[]",
        "Process Group Ranks": "[0, 1, 2]",
    }
    return event


def trace(*events, device="NVIDIA H100 80GB HBM3", **more) -> dict:
    return {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": device}], "traceEvents": list(events)} | more


def saved(folder: Path, data: object, name: str = "step.json") -> Path:
    path = folder / name
    text = json.dumps(data).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_gemms_take_the_time_of_their_kernels(tmp_path, name):
    events = [
        operator(id=1),
        kernel(1, 10.0),
        kernel(1, 5.0),  # a split-k GEMM has two kernels
        operator(id=2),
        kernel(2, 20.0),
        operator(id=3),
        kernel(3, 14.0),
        operator("aten::addmm", ((64,), (48, 32), (32, 64)), id=4),
        kernel(4, 30.0),
        operator("aten::relu", ((16, 32), (32, 64)), id=5),
        kernel(5, 77.0),
        operator(id=6),  # without a kernel
    ]
    measured = read_costs(saved(tmp_path, trace(*events), name))
    (gemm,) = measured.gemm
    assert (gemm.gpu, gemm.dtype) == ("H100", "bf16")
    assert gemm.points == ((16, 64, 32, pytest.approx(15e-6)), (48, 64, 32, pytest.approx(30e-6)))
    assert (measured.name, measured.origin) == ("step", "PyTorch profiler trace on H100")


def test_collectives_have_bytes_and_ranks(tmp_path):
    events = [
        collective(dur=50.0),
        collective(dur=70.0),
        collective(dur=60.0),
        collective(count=2048, dur=90.0),
        collective("allreduce", 512, "Float", dur=33.0),
        collective("allreduce", 512, "Float", ranks=2, dur=11.0),
        collective("allgather"),
        collective(ranks=1),
        collective(count=0),
        collective(dtype="Unknown"),
    ]
    measured = read_costs(saved(tmp_path, trace(*events)))
    points_of = {(times.operation, times.ranks): times.points for times in measured.collectives}
    assert points_of == {
        ("all_to_all", 8): ((2048, pytest.approx(60e-6)), (4096, pytest.approx(90e-6))),
        ("all_reduce", 8): ((2048, pytest.approx(33e-6)),),
        ("all_reduce", 2): ((2048, pytest.approx(11e-6)),),
    }
    cluster = cluster_of(*[make_gpu()] * 8)
    assert float(Profiled(measured).all_to_all(cluster, 3072)) == pytest.approx(75e-6)


def test_other_collectives_are_counted(tmp_path):
    events = [collective(), *[collective("_allgather_base")] * 3, collective("broadcast")]
    (note,) = read_costs(saved(tmp_path, trace(*events))).notes
    assert note == "left out, as not used for planning: 3 × '_allgather_base', 1 × 'broadcast'"
    assert read_costs(saved(tmp_path, trace(collective()))).notes is None


def test_what_the_trace_says_of_itself_may_come_last(tmp_path):
    data = trace(operator(), kernel())
    ordered = {"schemaVersion": 1, "traceEvents": data["traceEvents"], "deviceProperties": data["deviceProperties"]}
    assert read_costs(saved(tmp_path, ordered)).gemm[0].gpu == "H100"


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


def test_dtypes_are_kept_apart(tmp_path):
    events = [
        operator(id=1),
        kernel(1),
        operator(kind="float", id=2),
        kernel(2),
        operator(kind="long int", id=3),
        kernel(3),
    ]
    measured = read_costs(saved(tmp_path, trace(*events)))
    assert sorted(times.dtype for times in measured.gemm) == ["bf16", "fp32"]


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "NVIDIA GB200"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla V100-SXM2-32GB", "V100-32"),
        ("AMD Instinct MI300X", "AMD Instinct MI300X"),
        ("", "GPU"),
        (7, "GPU"),
    ],
)
def test_devices_have_the_catalogues_names_where_they_are_the_same(tmp_path, device, kind):
    assert read_costs(saved(tmp_path, trace(operator(), kernel(), device=device))).gemm[0].gpu == kind


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
        return {
            "ph": "X",
            "cat": "user_annotation",
            "name": name,
            "ts": 1.0,
            "dur": dur,
            "pid": 1,
            "tid": 2,
            "args": args,
        }

    events = [
        gloo("gloo:all_reduce", [[64, 64]], 11.0),
        gloo("gloo:all_to_all", [[4096]], 4.0),
        gloo("gloo:barrier", [], 9),
    ]
    data = trace(*events, distributedInfo={"backend": "gloo", "rank": 0, "world_size": 2}) | {"deviceProperties": []}
    collectives = {
        times.operation: (times.ranks, times.points) for times in read_costs(saved(tmp_path, data)).collectives
    }
    assert collectives == {
        "all_reduce": (2, ((16384, pytest.approx(11e-6)),)),
        "all_to_all": (2, ((16384, pytest.approx(4e-6)),)),
    }


# Faults


@pytest.mark.parametrize(
    "events",
    [
        [],
        [operator(dims=((16, 32), (33, 64))), kernel()],
        [operator(dims=()), kernel()],
        [operator(dims=((16, -32), (-32, 64))), kernel()],
        [{"ph": "X"}, 3, None, {"ph": "X", "args": 7, "dur": 1}, {"ph": "M", "args": {}}],
        [operator() | {"args": {"Input Dims": "x", "Input type": 3, "External id": []}}, kernel()],
        [kernel(id=[1])],
        [operator(name=[1]), kernel(name={})],
        [collective(name=3), collective(count="many"), collective(ranks=None), collective(dur=-1.0)],
        [operator(), kernel(dur="long")],
    ],
)
def test_traces_with_nothing_to_use_are_refused(tmp_path, events):
    refused(saved(tmp_path, trace(*events)), "no GEMMs with shapes", "record_shapes=True")


def test_damaged_traces_are_refused(tmp_path):
    refused(saved(tmp_path, {"traceEvents": {}}), "'traceEvents' is not a list")
    refused(saved(tmp_path, [1], "x.json.gz"), "a gzip file that holds nothing that is read here")
    path = saved(tmp_path, trace(operator(), kernel()), "y.json.gz")
    path.write_bytes(path.read_bytes()[:40])
    refused(path)
    path.write_bytes(b"{}")
    refused(path, "is not a gzip file", "although")
    path.write_bytes(gzip.compress(b'{"traceEvents": ['))
    refused(path, "not valid JSON, or cut off")
    refused(saved(tmp_path, {"kind": "other"}), "kind")


def test_a_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(kineto, "MAX_TRACE_BYTES", 10**6)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * 10**7))
    refused(path, "unpacks to more than")
