"""Measured times: tables of AIConfigurator, a CSV table, and the logs of DeepXTrace."""

from collections.abc import Iterable
from math import comb
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.costs import Profiled
from engine.formats import findings_of_times, identify, read_costs, read_workload
from engine.formats.measured.deepxtrace import read_waits
from tests.cases.files import SLOW_WAITS, STEADY_WAITS, TIMES_TABLE, WAITS_HEAD, saver, waits_log
from tests.cases.files import refused as refused_by
from tests.strategies import cluster_of, make_gpu

H100 = "NVIDIA H100 80GB HBM3"


def saved(folder: Path, **columns: list) -> Path:
    path = folder / "times.parquet"
    pq.write_table(pa.table(columns), path)
    return path


FIVE = {"framework": ["SGLang"] * 5, "device": [H100] * 5}
GEMMS = FIVE | {"op_name": ["gemm"] * 5, "gemm_dtype": ["bfloat16", "bfloat16", "bfloat16", "fp8", "nvfp4"]}
GEMMS |= {"kernel_source": ["a", "a", "b", "a", "a"], "m": [1, 8, 8, 8, 8], "n": [64] * 5, "k": [128] * 5}
GEMMS |= {"latency": [0.01, 0.02, 0.04, 0.015, 0.001]}
COLLECTIVES = FIVE | {"op_name": ["alltoall", "alltoall", "all_reduce", "all_gather", "alltoall"], "num_gpus": [8] * 5}
COLLECTIVES |= {"kernel_source": ["NCCL"] * 5, "nccl_dtype": ["half", "half", "half", "half", "int8"]}
COLLECTIVES |= {"message_size": [512, 1024, 512, 512, 1024], "latency": [0.02, 0.03, 0.01, 0.5, 0.02]}


def gemms(folder: Path, **other: list) -> Path:
    return saved(folder, **GEMMS | other)


def collectives(folder: Path, **other: list) -> Path:
    return saved(folder, **COLLECTIVES | other)


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
    assert float(Profiled(measured).all_to_all(cluster_of(*[make_gpu()] * 8), 1536)) == pytest.approx(25e-6)


def test_tables_say_nothing_of_rows_that_are_empty_damaged_or_without_a_time(tmp_path):
    assert {gemm.gpu for gemm in read_costs(gemms(tmp_path, device=["NVIDIA GB200"] * 5)).gemm} == {"NVIDIA GB200"}
    path = gemms(tmp_path)
    pq.write_table(pq.read_table(path).drop_columns("device"), path)
    assert {gemm.gpu for gemm in read_costs(path).gemm} == {"GPU"}
    measured = read_costs(gemms(tmp_path, latency=[0.01, None, float("nan"), 0.02, float("inf")]))
    assert "left out: 3 rows without a time" in measured.notes
    assert sum(len(gemm.points) for gemm in measured.gemm) == 2
    path = gemms(tmp_path)
    whole = path.read_bytes()
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    refused_by(path, "has 0 rows", read=read_costs)
    for end in (10, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:end])
        refused_by(path, read=read_costs)


MOE = "moe_dtype num_tokens hidden_size inter_size topk num_experts moe_ep_size distribution latency"
EXCHANGE = "op_name moe_dtype num_tokens topk moe_ep_size latency"


@pytest.mark.parametrize(
    ("columns", "name", "says"),
    [
        (MOE, "moe", "a step of serving"),
        ("node_num num_token dispatch_transmit_us combine_transmit_us", "deepep-normal", "cost source deepep"),
        ("node_num num_token dispatch_avg_t_us combine_avg_t_us", "deepep-low-latency", "cost source deepep"),
        (EXCHANGE, "trtllm-exchange", "TensorRT-LLM's exchanges over NVLink"),
        ("op_name kernel_source isl latency", "other", "another operation"),
    ],
)
def test_other_tables_are_named_with_where_they_are_used(tmp_path, columns, name, says):
    path = saved(tmp_path, **{column: [1.0] for column in columns.split()})
    assert identify(path).name == f"aiconfigurator-{name}"
    refused_by(path, "is a table of", says, read=read_costs)
    refused_by(path, "not a recording; use it as costs on the Cluster page", read=read_workload)


@pytest.mark.parametrize(
    ("make", "other", "parts"),
    [
        (gemms, {"latency": [0.0] * 5}, ("no row has numbers above 0 in m, n, k, latency",)),
        (gemms, {"gemm_dtype": [1, 2, 3, 4, 5]}, ("column 'gemm_dtype' is int64, not texts",)),
        (gemms, {"gemm_dtype": ["nvfp4"] * 5}, ("GEMMs of 'nvfp4' only",)),
        (gemms, {"device": [[1]] * 5}, ("column 'device' is list", "not texts")),
        (collectives, {"nccl_dtype": ["int8"] * 5}, ("no alltoall or all_reduce of 16-bit rows",)),
        (collectives, {"num_gpus": [1] * 5}, ("no alltoall or all_reduce",)),
        (collectives, {"device": [H100, "NVIDIA L40S", H100, H100, H100]}, ("collectives on 'H100', 'L40S'",)),
    ],
)
def test_tables_that_say_nothing_are_refused(tmp_path, make, other, parts):
    refused_by(make(tmp_path, **other), *parts, read=read_costs)


saved_log = saver("diagnose_rank0.log")


@pytest.mark.parametrize("bare", [False, True])
def test_windows_and_who_is_waited_for(tmp_path, bare):
    logged = (("Dispatch", STEADY_WAITS), ("Combine", STEADY_WAITS), ("Dispatch", SLOW_WAITS))
    path = saved_log(tmp_path, "".join(waits_log(part, waits, bare) for part, waits in logged))
    assert identify(path).name == "deepxtrace"
    windows = read_waits(path)
    assert [window.part for window in windows] == ["dispatch", "combine", "dispatch"]
    assert windows[0].ticks.tolist() == [list(map(float, row)) for row in STEADY_WAITS]
    assert not windows[0].slow() and not windows[0].waiting()
    ((rank, times),) = windows[2].slow()
    assert (rank, times) == (3, pytest.approx(4 * 4570 / (4570 + 57 + 68 + 49)))
    assert not windows[2].waiting()
    (window,) = read_waits(saved_log(tmp_path, waits_log("Combine", list(zip(*SLOW_WAITS, strict=True)), bare)))
    assert [rank for rank, _ in window.waiting()] == [3]  # which waits for all


def test_it_is_no_time_to_plan_with_but_says_who_is_slow(tmp_path):
    path = saved_log(tmp_path, waits_log("Dispatch", SLOW_WAITS) + waits_log("Combine", STEADY_WAITS))
    said = refused_by(path, "a log of DeepXTrace", "all wait for rank 3 (3.9 times the mean)", read=read_costs)
    assert "last combine over 4 ranks: no rank is slow" in said
    (finding,) = findings_of_times(path)
    assert finding.severity == "error" and "rank 3" in finding.message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (WAITS_HEAD.format(part="Dispatch"), "DEEPEP_DIAGNOSE_LOG_DETAILS=1"),
        (waits_log("Dispatch", STEADY_WAITS[:3]), "no rows of waits"),
        (waits_log("Dispatch", STEADY_WAITS).replace("17]", "17 1]"), "5 waits in a row of 4 ranks"),
        (waits_log("Dispatch", STEADY_WAITS).replace("EPSize: 4", "EPSize: 99999"), "between 2 and 1024 ranks"),
        (waits_log("Dispatch", STEADY_WAITS).replace("17]", "9" * 5000 + "]"), "damaged"),
    ],
)
def test_damaged_logs_are_refused(tmp_path, text, says):
    refused_by(saved_log(tmp_path, text), says, read=read_costs)


saved_table = saver("times.csv")


def test_a_table_is_read(tmp_path):
    measured = read_costs(saved_table(tmp_path, "\ufeff" + TIMES_TABLE))
    assert (measured.name, measured.origin) == ("times", "table times.csv")
    assert [(times.gpu, times.dtype, len(times.points)) for times in measured.gemm] == [
        ("type-0", "bf16", 2),
        ("type-0", "fp8", 1),
    ]
    assert measured.gemm[0].points[0] == (16, 64, 32, 1.5e-5)
    assert measured.ranks_of("all_to_all") == [4, 8]
    assert measured.ranks_of("all_reduce") == measured.ranks_of("send_receive") == [4]
    cost, card = Profiled(measured), make_gpu()
    assert float(cost.gemm(card, 16, 64, 32, "bf16")) == 1.5e-5
    assert float(cost.memory_pass(card, 5e5)) == 1e-3
    assert float(cost.all_to_all(cluster_of(*[card] * 4), 2560)) == pytest.approx(1.5e-4)
    measured = read_costs(saved_table(tmp_path, "seconds,operation,bytes,ranks\n1,all_reduce,10,2\n"))
    assert measured.collectives[0].points == ((10, 1),)  # columns nobody needs may be absent


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a,b\n1,2\n", ("column 'operation' is missing",)),
        ("operation,bytes\nmemory,2\n", ("column 'seconds' is missing",)),
        ("operation,seconds\n", ("header but no rows",)),
        (TIMES_TABLE + "send,,,,,,1,1,1,\n", ("line 13", "operation 'send'", "gemm, memory, all_to_all, all_reduce")),
        (TIMES_TABLE + "gemm,type-0,bf16,1,,3,,,1,\n", ("line 13", "gemm needs a value in column 'n'")),
        (TIMES_TABLE + "gemm,type-0,int4,1,2,3,,,1,\n", ("line 13", "dtype 'int4'")),
        (TIMES_TABLE + "memory,type-0,,,,,12,,0,\n", ("line 13", "column 'seconds' is '0', not a number above 0")),
        (TIMES_TABLE + "memory,type-0,,,,,x,,1,\n", ("line 13", "column 'bytes' is 'x'")),
        (TIMES_TABLE + "all_reduce,,,,,,10,1,1,\n", ("line 13", "column 'ranks' is '1', not a whole number of 2 or more")),
        (TIMES_TABLE + "memory\n", ("line 13",)),
    ],
)
def test_bad_tables_are_refused_with_the_line(tmp_path, text, parts):
    refused_by(saved_table(tmp_path, text), *parts, read=read_costs)


def rows_at_rank(gpus: int, tokens: int, choices: int, experts: int) -> int:
    """The rows that come to one of these GPUs when all of them send as many tokens, of random choices."""
    chosen = np.argsort(np.random.default_rng(0).random((gpus * tokens, experts)), axis=1)[:, :choices]
    return int((chosen < experts // gpus).any(axis=1).sum())


def intranode(gpus: int, tokens: int = 1024, choices: int = 8, parts: tuple[str, ...] = ("FP8", "BF16", "combine")) -> str:
    """The lines of DeepEP's test_intranode at 100 GB/s."""
    size = 2 * 7168 * rows_at_rank(gpus, tokens, choices, 64)
    text = f"[config] num_tokens={tokens}, hidden=7168, num_topk={choices}\n[layout] Kernel performance: 0.054 ms\n"
    for part in parts:
        micros = (size * (1 + 4 / 128) / 2 if part == "FP8" else size) / 1e5
        name, mark = ("combine", ":") if part == "combine" else (f"dispatch ({part})", ",")
        text += f"[tuning] SMs 24, NVL chunk 4: 9.00 GB/s (NVL), {2 * micros:.2f} us\n"
        text += f"[tuning] Best {name}: SMs 24, NVL chunk 8{mark} 100.00 GB/s (NVL), t: {micros:.2f} us\n"
    return text


def low_latency(ranks: Iterable[int]) -> str:
    """The lines of its test_low_latency: 1 MB in 77 µs and 2 MB in 150 µs out of each rank."""
    line = "[rank {}] Dispatch bandwidth: 12.99 GB/s, avg_t=77.00 us | Combine bandwidth: 13.33 GB/s, avg_t=150.00 us\n"
    return "Allocating buffer size: 2116.3 MB ...\n" + "".join(line.format(rank) for rank in ranks)


def elastic(gpus: int = 8, domains: int = 1, own: float = 1.0, head: bool = True) -> str:
    """The lines of its test_ep, in which each rank receives the even share of rows. own: part of them that it prints"""
    rows = 4096 * gpus * (1 - comb(256 - 256 // gpus, 6) / comb(256, 6)) * own
    text = f"Config:\n > Ranks: {domains} x {gpus}\n > Experts: 6/256\n > Tokens: 4096 (max: 4096), hidden: 7168\n" * head
    for mark, part, row, micros in (
        ("*", "dispatch", 14408, 500),
        ("#", "cached dispatch", 14408, 9),
        ("@", "combine", 14360, 600),
    ):
        for rank in range(gpus):
            rate = f"{9 * (domains > 1)} GB/s (SO), 400 GB/s (SU), {micros}.000 us, {rows * row:.0f} bytes"
            text += f"   {mark} EP: {rank:3}/{gpus} | {part}: {rate} | copy: 2000 GB/s, 50.000 us\n"
    return text


ROWS = 4096 * 8 * (1 - comb(224, 6) / comb(256, 6))


@pytest.mark.parametrize(
    ("text", "gpus", "points", "notes"),
    [
        (
            intranode(8),
            8,
            [(FP8 := rows_at_rank(8, 1024, 8, 64) * 7392, FP8 / 1e11), (FP8 / 0.515625, FP8 / 0.515625e11)],
            ["rows a token"],
        ),
        (
            intranode(4, parts=("FP8",)),
            4,
            [(rows_at_rank(4, 1024, 8, 64) * 7392, ...)],
            ["by its 3.6", "no result of combine: the test broke off"],
        ),
        (intranode(2) + intranode(2, 2048), 2, [..., ..., ...], ["by its 2.0"]),
        (low_latency(range(16)), 16, [(1e6, 77e-6), (2e6, 150e-6)], ["the 16 ranks that printed are taken for all"]),
        (low_latency(range(2)).replace("\n", "\x1b[0m\r\n"), 2, [(1e6, 77e-6), (2e6, 150e-6)], ["random choices"]),
        (elastic(), 8, [(ROWS * 14384, 550e-6)], ["over 8 GPUs of one domain"]),
        (elastic(own=7 / 8), 8, [(ROWS * 14384, 550e-6)], ["over 8 GPUs of one domain"]),
        (elastic() + low_latency(range(9)), 8, [(ROWS * 14384, 550e-6)], ["over 8 GPUs of one domain"]),
    ],
    ids=lambda value: "",
)
def test_tests_of_deepep_are_all_to_alls(tmp_path, text, gpus, points, notes):
    path = tmp_path / "deepep.log"
    path.write_text("NCCL INFO a line of a launcher\n" * 4000 + text, newline="")
    assert identify(path).name == "deepep-test"
    times, said = read_costs(path).collectives[0], [finding.message for finding in findings_of_times(path)]
    assert (times.operation, times.ranks, len(times.points)) == ("all_to_all", gpus, len(points))
    for (size, seconds), expected in zip(times.points, points, strict=True):
        wanted = (..., ...) if expected is ... else expected
        assert wanted[0] is ... or size == pytest.approx(wanted[0], rel=2e-3)
        assert wanted[1] is ... or seconds == pytest.approx(wanted[1], rel=2e-3)
    assert all(any(note in text for text in said) for note in notes), said
    assert any(f"all-to-all over {gpus} GPUs" in text for text in said)


OLD = (
    "[config] num_tokens=4096, hidden=7168, num_topk=8\n[tuning] Best dispatch (FP8): SMs 24, NVL chunk 4, 140.00 GB/s (NVL)\n"
)
TWO_HOPS = "[config] num_tokens=4096, hidden=7168, num_topk_groups=4, num_topk=8\n[tuning] Best combine: SMs 24, NVL chunk 4, "
TWO_HOPS += (
    "RDMA chunk 8, 30.00 + 900.00 us, 43.15 GB/s (RDMA), 141.04 GB/s (NVL)\n[tuning] Best dispatch (FP8): 9 GB/s (RDMA)\n"
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (OLD + OLD.replace("dispatch (FP8)", "combine"), ("it prints no times (num_tokens=4096", "Best combine: SMs 24")),
        (TWO_HOPS, ("rows go in two hops", "43.15 GB/s (RDMA)")),
        (
            "[layout] Kernel performance: 0.054 ms\nAssertionError\n",
            ("no result of dispatch and combine: the test broke off;",),
        ),
        (low_latency([8, 9, 10]), ("3 of 11 ranks or more printed", "all nodes")),
        (low_latency([0, 1, 1]), ("some ranks printed more lines",)),
        (intranode(8, choices=1), ("rows a token fit 2 or 4 or 8",)),
        (intranode(8).replace("num_tokens=1024", "num_tokens=4096"), ("rows a token fit none of 2, 4 and 8",)),
        (intranode(8).replace("num_tokens=1024", "num_tokens=0"), ("it prints no times",)),
        (elastic(domains=2), ("two hops, between 2 domains",)),
        (elastic(head=False), ("the lines of 'Config:' are missing",)),
        (elastic(own=0.8), ("it did not choose evenly",)),
        (elastic().replace("6/256", "6/4"), ("names 8 GPUs and 4 experts",)),
        (elastic().split("   @")[0], ("no result of combine",)),
        (elastic().replace(" bytes |", " |"), ("no bytes",)),
    ],
    ids=lambda value: "",
)
def test_tests_of_deepep_that_say_too_little_are_named_with_their_rates(tmp_path, text, parts):
    path = tmp_path / "deepep.log"
    path.write_text(text)
    assert identify(path).name == "deepep-test"
    refused_by(
        path, "the output of a test of DeepEP that times no all-to-all", "choose the cost deepep", *parts, read=read_costs
    )
