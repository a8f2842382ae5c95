"""Tables with the columns of AIConfigurator's files, written with pyarrow alone."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.costs import Profiled
from engine.formats import identify, read_costs, read_workload
from tests.formats.faults import refused as refused_by
from tests.strategies import cluster_of, make_gpu

H100 = "NVIDIA H100 80GB HBM3"


def saved(folder: Path, **columns: list) -> Path:
    path = folder / "times.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def gemms(folder: Path, **other: list) -> Path:
    rows = {
        "framework": ["SGLang"] * 5,
        "device": [H100] * 5,
        "op_name": ["gemm"] * 5,
        "kernel_source": ["a", "a", "b", "a", "a"],
        "gemm_dtype": ["bfloat16", "bfloat16", "bfloat16", "fp8", "nvfp4"],
        "m": [1, 8, 8, 8, 8],
        "n": [64] * 5,
        "k": [128] * 5,
        "latency": [0.01, 0.02, 0.04, 0.015, 0.001],
    }
    return saved(folder, **rows | other)


def collectives(folder: Path, **other: list) -> Path:
    rows = {
        "device": [H100] * 5,
        "op_name": ["alltoall", "alltoall", "all_reduce", "all_gather", "alltoall"],
        "kernel_source": ["NCCL"] * 5,
        "nccl_dtype": ["half", "half", "half", "half", "int8"],
        "num_gpus": [8] * 5,
        "message_size": [512, 1024, 512, 512, 1024],
        "latency": [0.02, 0.03, 0.01, 0.5, 0.02],
    }
    return saved(folder, **rows | other)


def test_gemms_are_in_seconds_by_the_catalogues_type(tmp_path):
    path = gemms(tmp_path)
    assert identify(path).name == "aiconfigurator-gemm"
    measured = read_costs(path)
    times = {(gemm.gpu, gemm.dtype): gemm.points for gemm in measured.gemm}
    assert times == {
        ("H100", "bf16"): ((1, 64, 128, pytest.approx(10e-6)), (8, 64, 128, pytest.approx(30e-6))),
        ("H100", "fp8"): ((8, 64, 128, pytest.approx(15e-6)),),
    }
    assert measured.notes == ("left out: 1 GEMMs of 'nvfp4'",)
    assert measured.origin == "AIConfigurator's measurements on 'H100'"


def test_sizes_of_collectives_are_elements_of_two_bytes(tmp_path):
    path = collectives(tmp_path)
    assert identify(path).name == "aiconfigurator-nccl"
    measured = read_costs(path)
    assert {(times.operation, times.ranks): times.points for times in measured.collectives} == {
        ("all_to_all", 8): ((1024, pytest.approx(20e-6)), (2048, pytest.approx(30e-6))),
        ("all_reduce", 8): ((1024, pytest.approx(10e-6)),),
    }
    assert measured.notes[0] == "left out: 2 rows, 'all_gather' and those that are not 16-bit"
    cluster = cluster_of(*[make_gpu()] * 8)
    assert float(Profiled(measured).all_to_all(cluster, 1536)) == pytest.approx(25e-6)


def test_devices_that_are_not_named_or_not_known(tmp_path):
    assert {gemm.gpu for gemm in read_costs(gemms(tmp_path, device=["NVIDIA GB200"] * 5)).gemm} == {"NVIDIA GB200"}
    path = gemms(tmp_path)
    pq.write_table(pq.read_table(path).drop_columns("device"), path)
    assert {gemm.gpu for gemm in read_costs(path).gemm} == {"GPU"}


@pytest.mark.parametrize(
    ("columns", "name", "says"),
    [
        (
            (
                "moe_dtype",
                "num_tokens",
                "hidden_size",
                "inter_size",
                "topk",
                "num_experts",
                "moe_ep_size",
                "distribution",
                "latency",
            ),
            "moe",
            "a step of serving",
        ),
        (
            ("node_num", "num_token", "dispatch_transmit_us", "combine_transmit_us"),
            "deepep-normal",
            "cost source deepep",
        ),
        (
            ("node_num", "num_token", "dispatch_avg_t_us", "combine_avg_t_us"),
            "deepep-low-latency",
            "cost source deepep",
        ),
        (
            ("op_name", "moe_dtype", "num_tokens", "topk", "moe_ep_size", "latency"),
            "trtllm-exchange",
            "TensorRT-LLM's exchanges over NVLink",
        ),
        (("op_name", "kernel_source", "isl", "latency"), "other", "another operation"),
    ],
)
def test_other_tables_are_named_with_where_they_are_used(tmp_path, columns, name, says):
    path = saved(tmp_path, **{column: [1.0] for column in columns})
    assert identify(path).name == f"aiconfigurator-{name}"
    refused_by(path, "is a table of", says, read=read_costs)
    refused_by(path, "not a recording; use it as costs on the Cluster page", read=read_workload)


@pytest.mark.parametrize(
    ("make", "other", "parts"),
    [
        (gemms, {"latency": [0.0] * 5}, ("no row has numbers above 0 in m, n, k, latency",)),
        (gemms, {"latency": ["fast"] * 5}, ("column 'latency' is string, not numbers",)),
        (gemms, {"gemm_dtype": [1, 2, 3, 4, 5]}, ("column 'gemm_dtype' is int64, not texts",)),
        (gemms, {"gemm_dtype": ["nvfp4"] * 5}, ("GEMMs of 'nvfp4' only",)),
        (gemms, {"device": [[1]] * 5}, ("column 'device' is list", "not texts")),
        (gemms, {"m": [[1]] * 5}, ("column 'm' is list", "not numbers")),
        (collectives, {"nccl_dtype": ["int8"] * 5}, ("no alltoall or all_reduce of 16-bit rows",)),
        (collectives, {"num_gpus": [1] * 5}, ("no alltoall or all_reduce",)),
        (collectives, {"device": [H100, "NVIDIA L40S", H100, H100, H100]}, ("collectives on 'H100', 'L40S'",)),
    ],
)
def test_tables_that_say_nothing_are_refused(tmp_path, make, other, parts):
    refused_by(make(tmp_path, **other), *parts, read=read_costs)


def test_rows_without_a_time_are_counted(tmp_path):
    measured = read_costs(gemms(tmp_path, latency=[0.01, None, float("nan"), 0.02, float("inf")]))
    assert "left out: 3 rows without a time" in measured.notes
    assert sum(len(gemm.points) for gemm in measured.gemm) == 2


def test_empty_and_damaged_tables_are_refused(tmp_path):
    path = gemms(tmp_path)
    whole = path.read_bytes()
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    refused_by(path, "has 0 rows", read=read_costs)
    for end in (10, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:end])
        refused_by(path, read=read_costs)
