"""What nccl-tests prints: rows of both collectives from old and new versions, and texts that are something else."""

from pathlib import Path

import pytest

from engine.costs import Profiled, fit_profile
from engine.formats import read_costs
from engine.formats.measured import nccl_pairs
from tests.formats.faults import refused as refused_by
from tests.strategies import cluster_of, make_gpu

DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "measurements"
DEVICE = "NVIDIA H100 80GB HBM3"


def refused(path: Path, *parts: str) -> str:
    return refused_by(path, *parts, read=read_costs)


def printed(
    test: str | None = "alltoall_perf",
    gpus: int = 4,
    redop: str = "none",
    rows=((1024, 10.0), (1048576, 50.0)),
    nodes: int = 1,
    root: str = "      -1",
    share: float | None = None,
) -> str:
    """Output in the layout of nccl-tests."""
    share = (2 if redop == "sum" else 1) * (gpus - 1) / gpus if share is None else share
    lines = [] if test is None else ["# nccl-tests version 2.17.1 nccl-headers=22703 nccl-library=22703"]
    lines += [] if test is None else [f"# Collective test starting: {test}"]
    lines += ["# nThread 1 nGpus 1 minBytes 1024 maxBytes 1048576 step: 1024(factor) warmup iters: 5 iters: 20", "#"]
    lines += ["# Using devices"]
    lines += [
        f"#  Rank {rank:2} Group  0 Pid {4000 + rank} on  host{rank * nodes // gpus} device {rank:2} [0x0{rank}] {DEVICE}"
        for rank in range(gpus)
    ]
    lines += [
        "#",
        "#                                                       out-of-place                       in-place",
        "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)",
    ]
    for size, time in rows:
        rate = size / time / 1e3 if time else 0.0
        cells = f"{time:8.2f} {rate * 100:7.2f} {rate * 100 * share:7.2f}"
        lines.append(
            f"{size:12} {size // 4:13} float {redop:>7} {root} {cells}      0 {time * 9:8.2f}    1.00    1.00    N/A"
        )
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 12.3", "#"]
    return "\n".join(lines) + "\n"


def saved(folder: Path, text: str, name: str = "bench.txt") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_out_of_place_times_are_read_in_seconds(tmp_path):
    measured = read_costs(saved(tmp_path, printed()))
    (times,) = measured.collectives
    assert (times.operation, times.ranks) == ("all_to_all", 4)
    assert times.points == ((1024, pytest.approx(10e-6)), (1048576, pytest.approx(50e-6)))
    assert measured.name == "bench"
    assert measured.origin == "nccl-tests on NVIDIA H100 80GB HBM3, 1 node"


def test_both_collectives_may_stand_in_one_file(tmp_path):
    text = printed(nodes=2) + printed("all_reduce_perf", redop="sum", rows=((2048, 20.0), (4096, 30.0)))
    measured = read_costs(saved(tmp_path, text, "both.log"))
    assert [collective.operation for collective in measured.collectives] == ["all_to_all", "all_reduce"]
    assert measured.collectives[1].points[0] == (2048, pytest.approx(20e-6))
    assert "2 nodes" in measured.origin


def test_prints_of_old_versions_are_recognised(tmp_path):
    reduced = printed(None, redop="sum", root="", rows=((1048576, 10.0), (2097152, 20.0)))
    assert read_costs(saved(tmp_path, reduced)).collectives[0].operation == "all_reduce"
    exchanged = printed(None)
    assert read_costs(saved(tmp_path, exchanged, "AllToAll-8.out")).collectives[0].operation == "all_to_all"
    refused(saved(tmp_path, exchanged), "does not say which collective", "alltoall")
    refused(saved(tmp_path, printed(None, redop="sum", share=0.75)), "by its bandwidths no all-reduce")


def test_sends_to_the_next_rank_are_read(tmp_path):
    text = printed("sendrecv_perf", redop="none") + printed(gpus=8)
    assert [times.operation for times in read_costs(saved(tmp_path, text)).collectives] == [
        "send_receive",
        "all_to_all",
    ]
    unnamed = saved(tmp_path, printed(None), "send_recv-4.log")
    assert read_costs(unnamed).collectives[0].operation == "send_receive"


def test_other_binaries_in_a_log_are_left_out_with_a_note(tmp_path):
    text = (
        printed("all_gather_perf")
        + printed()
        + printed("reduce_scatter_perf", redop="sum")
        + printed("all_gather_perf")
    )
    measured = read_costs(saved(tmp_path, text))
    assert [times.operation for times in measured.collectives] == ["all_to_all"]
    assert measured.notes == (
        "left out, from line 2 and 1 more: 'all_gather_perf' is not used for planning",
        "left out, from line 38: 'reduce_scatter_perf' is not used for planning",
    )
    assert read_costs(saved(tmp_path, printed())).notes is None


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (printed("sendrecv_perf", rows=()), "no rows of sizes and times"),
        (printed("sendrecv_perf", gpus=1), "one GPU talks to nobody"),
        (printed("sendrecv_perf").replace("Group  0 Pid 4002", "Group  1 Pid 4002"), "several groups side by side"),
        (printed(None, redop="sum", share=0.75), "by its bandwidths no all-reduce"),
        (printed(None), "does not say which collective"),
    ],
)
def test_tests_that_say_nothing_are_left_out_beside_good_ones(tmp_path, other, says):
    (note,) = read_costs(saved(tmp_path, printed() + other)).notes
    assert says in note
    refused(saved(tmp_path, other), says)


def test_rows_after_a_tests_end_are_not_its_own(tmp_path):
    stray = "       4096      1024    float    none      -1   99.00    1.00    1.00      0\n"
    text = printed() + "# Collective test concluded: alltoall_perf\n" + stray
    assert len(read_costs(saved(tmp_path, text)).collectives[0].points) == 2


@pytest.mark.parametrize("label", ["[1,0]<stdout>:", "0: ", " 3: "])
def test_labels_of_launchers_do_not_matter(tmp_path, label):
    text = "".join(label + line + "\n" for line in printed().splitlines())
    assert len(read_costs(saved(tmp_path, text)).collectives[0].points) == 2


def test_the_first_test_may_stand_far_down(tmp_path):
    text = "host0:1:1 [0] NCCL INFO Channel 00/16 : 0 1 2 3\n" * 20_000 + printed()
    assert read_costs(saved(tmp_path, text)).collectives


@pytest.mark.skipif(not DATA.exists(), reason="needs ../shared/data")
def test_published_logs_of_several_binaries():
    one, two = (read_costs(DATA / f"xxrjun_{name}.log") for name in ("N1_G8", "N2_G1"))
    operations = {times.operation: (times.ranks, len(times.points)) for times in one.collectives}
    assert operations == {"all_reduce": (8, 10), "all_to_all": (8, 10), "send_receive": (8, 10)}
    assert one.collectives[1].points[0] == (33554432, pytest.approx(124.40e-6))
    assert ["all_gather" in note or "reduce_scatter" in note for note in one.notes] == [True, True]
    assert [times.operation for times in two.collectives] == ["all_to_all", "send_receive"]
    assert two.notes is None


def test_paths_in_front_of_the_test_do_not_matter(tmp_path):
    assert read_costs(saved(tmp_path, printed("./build/alltoall_perf"))).collectives


def test_log_lines_between_do_not_matter(tmp_path):
    text = printed().replace("# Using", "host0:1:1 [0] NCCL INFO Bootstrap : Using eth0\nWarning: 3 of 4\n# Using")
    assert len(read_costs(saved(tmp_path, text)).collectives[0].points) == 2


def test_sizes_too_small_to_be_sent_are_left_out(tmp_path):
    text = printed(rows=((0, 0.0), (1024, 10.0)))
    assert len(read_costs(saved(tmp_path, text)).collectives[0].points) == 1


def test_a_cost_model_and_a_profile_come_of_it(tmp_path):
    measured = read_costs(saved(tmp_path, printed()))
    cluster = cluster_of(*[make_gpu()] * 4)
    assert float(Profiled(measured).all_to_all(cluster, 1024)) == pytest.approx(10e-6)
    line = fit_profile(measured).network
    assert float(line.seconds(1048576 * 3 / 4)) == pytest.approx(50e-6)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (printed("all_gather_perf"), ("line 2", "'all_gather_perf' is not a test of alltoall_perf or all_reduce_perf")),
        (printed(rows=()), ("test from line 2", "no rows")),
        (printed(gpus=1), ("one GPU talks to nobody",)),
        (printed().replace("Rank  1", "Rank  0"), ("4 processes", "MPI=1")),
        ("just a story\nof two lines\n", ("text file that Switchyard cannot read",)),
        (printed().split("#        (B)")[1], ("line 2", "keep the whole output")),
        (printed().replace("   10.00", "     nan"), ("the time is 'nan'",)),
        (printed().replace("   10.00", "   -1.00"), ("the time is '-1.00'",)),
        (printed() + "        1024     256    float    none\n", ("a row needs size",)),
        (printed() + printed(), ("two entries for all_to_all 4 ranks",)),
    ],
)
def test_other_texts_are_refused_with_the_place(tmp_path, text, parts):
    refused(saved(tmp_path, text), *parts)


def test_logs_of_nothing_but_heads_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(nccl_pairs, "MAX_RANKS", 1000)
    refused(saved(tmp_path, printed() + "# Collective test starting: x\n" * 1001), "more than 1,000 ranks and tests")


def test_rows_without_ranks_are_refused(tmp_path):
    text = "\n".join(line for line in printed().splitlines() if "Rank" not in line)
    refused(saved(tmp_path, text), "how many GPUs were there")


def test_binary_and_empty_files_are_refused(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"\0\1\2")
    refused(path, "binary file")
    path.write_bytes(b"")
    refused(path, "empty")
    path.write_bytes(b"# Rank 0 \xff on h device 0 [0] x\n" * 3)
    refused(path)
