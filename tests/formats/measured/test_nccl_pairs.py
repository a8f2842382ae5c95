"""Logs of pairs of GPUs, written by hand as nccl-tests prints them, as a cluster."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from engine.costs.pair_cluster import draw_pairs
from engine.errors import InputError
from engine.formats.measured.nccl_pairs import read_pairs
from engine.network import Network
from tests.formats.faults import refused as refused_by
from tests.formats.measured.test_nccl_tests import printed

DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "measurements"
SIZES = (1 << 10, 1 << 20, 1 << 26)
ALPHA = 20e-6


def pair_log(ends, rate: float, binary="sendrecv_perf", device="NVIDIA H100 80GB HBM3", sizes=SIZES) -> str:
    """ends: (host, bus) of both; rate: bytes/s each way; a start-up of 20 µs."""
    sent = 0.5 if binary == "alltoall_perf" else 1
    lines = ["# nccl-tests version 2.17.6", f"# Collective test starting: {binary}", "#", "# Using devices"]
    lines += [
        f"#  Rank  {rank} Group  0 Pid {44 + rank} on {host} device  0 [{bus}] {device}"
        for rank, (host, bus) in enumerate(ends)
    ]
    lines += [
        "#",
        "#                                                out-of-place                       in-place",
        "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time",
    ]
    for size in sizes:
        micros = (ALPHA + sent * size / rate) * 1e6
        lines.append(
            f"{size:12} {size // 8:8} double none -1 {micros:.4f} {size / micros / 1e3:.2f} 1.00 0 7.0 1.0 1.0 N/A"
        )
    return "\n".join([*lines, "# Avg bus bandwidth    : 13.4", f"# Collective test concluded: {binary}"]) + "\n"


def logs(folder: Path, rate_of, ends, **options) -> list[Path]:
    """One log for every pair of ends whose rate is not None."""
    paths = []
    for number, (a, b) in enumerate(combinations(ends, 2)):
        if (rate := rate_of(a, b)) is not None:
            path = folder / f"{number}.log"
            path.write_text(pair_log((a, b), rate, **options))
            paths.append(path)
    return paths


def drawn_from(paths, kind=None):
    pairs, notes = read_pairs(paths)
    drawn = draw_pairs(pairs, "measured", kind)
    return drawn, [*notes, *drawn.notes]


NODES = [(host, bus) for host in ("node2", "node10") for bus in ("0000:1b:00", "0000:43:00")]


def two_nodes(a, b) -> float:
    return 300e9 if a[0] == b[0] else 40e9


def test_links_and_ports_of_two_nodes(tmp_path):
    drawn, notes = drawn_from(logs(tmp_path, two_nodes, NODES))
    cluster = drawn.cluster
    assert [(node.name, len(node.gpus)) for node in cluster.nodes] == [("node2", 2), ("node10", 2)]
    assert [node.link_bandwidth for node in cluster.nodes] == pytest.approx([300e9] * 2, rel=1e-3)
    assert [gpu.send_bandwidth for gpu in cluster.gpus] == pytest.approx([40e9] * 4, rel=1e-3)
    assert [gpu.receive_bandwidth for gpu in cluster.gpus] == [gpu.send_bandwidth for gpu in cluster.gpus]
    assert cluster.latency == pytest.approx(ALPHA, rel=1e-2)
    assert cluster.nodes[0].link_latency == pytest.approx(ALPHA, rel=1e-2)
    assert {gpu.type for gpu in cluster.gpus} == {"H100"}
    assert drawn.names[2] == "node10 [0000:1b:00]"
    assert drawn.mean_error < 1e-3
    assert not any("more than" in note or "not measured" in note for note in notes)


def test_a_slow_port_is_where_the_pairs_say_it_is(tmp_path):
    ends = [(f"h{number}", "0000:1b:00") for number in range(4)]
    slow = {"h2": 10e9, "h3": 25e9}
    drawn, _ = drawn_from(logs(tmp_path, lambda a, b: min(slow.get(end[0], 50e9) for end in (a, b)), ends))
    assert [gpu.send_bandwidth for gpu in drawn.cluster.gpus] == pytest.approx([50e9, 50e9, 10e9, 25e9], rel=1e-3)
    network = Network.of(drawn.cluster)
    own = np.minimum(network.send[:, None], network.receive)
    shown = ~np.eye(4, dtype=bool)
    assert drawn.drawn[shown] == pytest.approx(own[shown])
    assert np.isnan(np.diag(drawn.measured)).all()


def test_what_no_port_can_hold_is_said(tmp_path):
    """Two rails: GPUs of one rail reach each other at 40 GB/s, others over the spine at 10."""
    ends = [(f"h{number}", "0000:1b:00") for number in range(4)]
    rail = {"h0": 0, "h1": 0, "h2": 1, "h3": 1}
    drawn, notes = drawn_from(logs(tmp_path, lambda a, b: 40e9 if rail[a[0]] == rail[b[0]] else 10e9, ends))
    (said,) = [note for note in notes if "a rate for each port, not for each pair" in note]
    assert "of 6 pairs are more than 10 % off" in said
    first, second = drawn.worst(1)[0]
    assert abs(drawn.difference[first, second]) > 0.5
    assert drawn.measured[0, 1] == pytest.approx(40e9, rel=1e-3)


def test_pairs_of_a_node_that_differ_share_one_number(tmp_path):
    ends = [("host", bus) for bus in ("0000:1b:00", "0000:43:00", "0000:52:00")]
    drawn, notes = drawn_from(logs(tmp_path, lambda a, b: 80e9 if "0000:1b:00" in (*a, *b) else 20e9, ends))
    assert drawn.cluster.nodes[0].link_bandwidth == pytest.approx((80 * 80 * 20) ** (1 / 3) * 1e9, rel=1e-3)
    assert any("a node has one number" in note for note in notes)
    assert any(note.startswith("no GPU was measured with one of another host: ports") for note in notes)
    assert drawn.cluster.gpus[0].send_bandwidth == 50e9  # the catalogue's


def test_an_all_to_all_of_two_sends_half_of_its_buffer(tmp_path):
    drawn, _ = drawn_from(logs(tmp_path, two_nodes, NODES, binary="alltoall_perf"))
    assert drawn.cluster.gpus[0].send_bandwidth == pytest.approx(40e9, rel=1e-3)


def test_gpus_are_told_by_their_bus_not_by_their_number(tmp_path):
    """CUDA_VISIBLE_DEVICES makes both of them device 0."""
    drawn, _ = drawn_from(logs(tmp_path, two_nodes, NODES[:2]))
    assert len(drawn.cluster.gpus) == 2


def test_pairs_that_are_missing_are_counted(tmp_path):
    """Only the first GPUs of both nodes met."""
    met = {("0000:1b:00", "0000:1b:00")}
    rate_of = lambda a, b: 300e9 if a[0] == b[0] else 40e9 if (a[1], b[1]) in met else None  # noqa: E731
    drawn, notes = drawn_from(logs(tmp_path, rate_of, NODES))
    assert any(note.startswith("3 of the 6 pairs of these 4 GPUs were not measured") for note in notes)
    assert any(note.startswith("some GPUs were measured with none of another host: ports") for note in notes)
    assert np.isnan(drawn.drawn[0, 3])
    assert [gpu.send_bandwidth for gpu in drawn.cluster.gpus] == pytest.approx([40e9] * 4, rel=1e-3)
    only_between, notes = drawn_from(logs(tmp_path, lambda a, b: None if a[0] == b[0] else 40e9, NODES))
    assert only_between.cluster.nodes[0].link_bandwidth is None
    assert any("drawn without links of their own" in note for note in notes)


def test_other_tests_among_the_pairs_are_left_out(tmp_path):
    path = tmp_path / "all.log"
    text = "".join(pair_log((a, b), two_nodes(a, b)) for a, b in combinations(NODES, 2))
    path.write_text(text + pair_log(NODES[:2], 1e9, binary="all_gather_perf") + pair_log(NODES, 1e9))
    drawn, notes = drawn_from([path])
    assert notes[0].startswith("2 tests left out")
    assert drawn.mean_error < 1e-3


def test_large_sizes_say_little_of_start_ups(tmp_path):
    _, notes = drawn_from(logs(tmp_path, two_nodes, NODES, sizes=(1 << 25, 1 << 26)))
    assert any("32 MiB and more" in note for note in notes)


def test_unknown_devices_need_a_type(tmp_path):
    paths = logs(tmp_path, two_nodes, NODES, device="AMD Instinct MI300X")
    with pytest.raises(InputError, match="'AMD Instinct MI300X' of node2 is not in the catalogue"):
        drawn_from(paths)
    drawn, _ = drawn_from(paths, "H200")
    assert {gpu.type for gpu in drawn.cluster.gpus} == {"H200"}


def test_logs_without_pairs_are_refused(tmp_path):
    path = tmp_path / "four.log"
    path.write_text(pair_log(NODES, 1e9))
    with pytest.raises(InputError, match="no test of sendrecv_perf or alltoall_perf between two GPUs in 1 file"):
        read_pairs([path])
    path.write_text(pair_log((NODES[0], NODES[0]), 1e9))
    refused_by(path, "test from line 2", "both ranks are on one GPU", read=lambda path: read_pairs([path]))
    path.write_text(pair_log(NODES[:2], 1e9).replace("double none -1", "double none -1 x"))
    refused_by(path, "line 10", "a row needs", read=lambda path: read_pairs([path]))
    path.write_text(pair_log(NODES[:2], 1e30))  # only start-ups
    with pytest.raises(InputError, match="do not grow with the bytes"):
        read_pairs([path])


def test_an_unnamed_sum_of_one_gpu_is_no_pair(tmp_path):
    """Old versions do not name their test, and the ratio by which an all-reduce is told needs two GPUs."""
    path = tmp_path / "old.log"
    path.write_text(printed(None, redop="sum", root="", gpus=1, share=1.0))
    with pytest.raises(InputError, match="between two GPUs"):
        read_pairs([path])


@pytest.mark.skipif(not DATA.exists(), reason="needs ../shared/data")
def test_a_published_pair_of_hosts():
    drawn, _ = drawn_from([DATA / "xxrjun_N2_G1.log"])
    assert [node.name for node in drawn.cluster.nodes] == ["cnode2-001", "cnode2-002"]
    assert drawn.cluster.gpus[0].send_bandwidth == pytest.approx(13.55e9, rel=0.01)
