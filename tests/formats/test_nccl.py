"""Logs of nccl-tests: times of collectives, pairs of GPUs drawn as a cluster, and the choice between both."""

import gzip
import json
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from engine.costs import Profiled, fit_profile
from engine.costs.pair_cluster import draw_pairs
from engine.formats import Part, findings_of_pairs, findings_of_times, parts, read_costs, single_files
from engine.formats.measured import nccl_pairs, nccl_tests
from engine.formats.measured.nccl_pairs import read_pairs
from engine.network import Network
from tests.cases.files import ALPHA, NODES, logs, nccl_json, nccl_test_log, pair_log, rccl_record, saver, two_nodes
from tests.cases.files import refused as refused_by
from tests.cases.refusals import refusal
from tests.strategies import cluster_of, make_gpu

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "measurements"
refused = partial(refused_by, read=read_costs)
saved = saver("bench.txt")


def test_out_of_place_times_are_read_in_seconds(tmp_path):
    measured = read_costs(saved(tmp_path, nccl_test_log()))
    (times,) = measured.collectives
    assert (times.operation, times.ranks) == ("all_to_all", 4)
    assert times.points == ((1024, pytest.approx(10e-6)), (1048576, pytest.approx(50e-6)))
    assert measured.name == "bench"
    assert measured.origin == "nccl-tests on NVIDIA H100 80GB HBM3, 1 node"
    assert float(Profiled(measured).all_to_all(cluster_of(*[make_gpu()] * 4), 1024)) == pytest.approx(10e-6)
    assert float(fit_profile(measured).network.seconds(1048576 * 3 / 4)) == pytest.approx(50e-6)


def test_several_collectives_and_prints_of_old_versions(tmp_path):
    text = nccl_test_log(nodes=2) + nccl_test_log("all_reduce_perf", redop="sum", rows=((2048, 20.0), (4096, 30.0)))
    measured = read_costs(saved(tmp_path, text, "both.log"))
    assert [collective.operation for collective in measured.collectives] == ["all_to_all", "all_reduce"]
    assert measured.collectives[1].points[0] == (2048, pytest.approx(20e-6))
    assert "2 nodes" in measured.origin
    read = read_costs(saved(tmp_path, nccl_test_log("sendrecv_perf", redop="none") + nccl_test_log(gpus=8))).collectives
    assert [times.operation for times in read] == ["send_receive", "all_to_all"]
    assert read_costs(saved(tmp_path, nccl_test_log(None), "send_recv-4.log")).collectives[0].operation == "send_receive"
    reduced = nccl_test_log(None, redop="sum", root="", rows=((1048576, 10.0), (2097152, 20.0)))
    assert read_costs(saved(tmp_path, reduced)).collectives[0].operation == "all_reduce"
    assert read_costs(saved(tmp_path, nccl_test_log(None), "AllToAll-8.out")).collectives[0].operation == "all_to_all"


def test_other_binaries_in_a_log_are_left_out_with_a_note(tmp_path):
    gathered, scattered = nccl_test_log("all_gather_perf"), nccl_test_log("reduce_scatter_perf", redop="sum")
    measured = read_costs(saved(tmp_path, gathered + nccl_test_log() + scattered + gathered))
    assert [times.operation for times in measured.collectives] == ["all_to_all"]
    assert measured.notes == (
        "left out, from line 2 and 1 more: 'all_gather_perf' is not used for planning",
        "left out, from line 38: 'reduce_scatter_perf' is not used for planning",
    )
    assert read_costs(saved(tmp_path, nccl_test_log())).notes is None


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (nccl_test_log("sendrecv_perf", rows=()), "no rows of sizes and times"),
        (nccl_test_log("sendrecv_perf", gpus=1), "one GPU talks to nobody"),
        (nccl_test_log("sendrecv_perf").replace("Group  0 Pid 4002", "Group  1 Pid 4002"), "several groups side by side"),
        (nccl_test_log(None, redop="sum", share=0.75), "by its bandwidths no all-reduce"),
        (nccl_test_log(None), "does not say which collective"),
    ],
)  # fmt: skip
def test_tests_that_say_nothing_are_left_out_beside_good_ones(tmp_path, other, says):
    (note,) = read_costs(saved(tmp_path, nccl_test_log() + other)).notes
    assert says in note
    refused(saved(tmp_path, other), says)


STRAY = "       4096      1024    float    none      -1   99.00    1.00    1.00      0\n"
BETWEEN = "host0:1:1 [0] NCCL INFO Bootstrap : Using eth0\nWarning: 3 of 4\n# Using"


@pytest.mark.parametrize(
    ("text", "points"),
    [
        (nccl_test_log() + "# Collective test concluded: alltoall_perf\n" + STRAY, 2),  # a row after the test's end
        *(
            ("".join(label + line + "\n" for line in nccl_test_log().splitlines()), 2)
            for label in ("[1,0]<stdout>:", "0: ", " 3: ")  # of launchers
        ),
        ("host0:1:1 [0] NCCL INFO Channel 00/16 : 0 1 2 3\n" * 20_000 + nccl_test_log(), 2),
        (nccl_test_log("./build/alltoall_perf"), 2),
        (nccl_test_log().replace("# Using", BETWEEN), 2),
        (nccl_test_log(rows=((0, 0.0), (1024, 10.0))), 1),  # a size too small to be sent
    ],
)
def test_what_does_not_matter_around_the_rows(tmp_path, text, points):
    assert len(read_costs(saved(tmp_path, text)).collectives[0].points) == points


DIED = nccl_test_log(rows=tuple((1024 << at, 10.0 + at) for at in range(3))).split("# Out of")[0]
DIED = DIED.replace("maxBytes 1048576 step: 1024(factor)", "maxBytes 8192 step: 2(factor)")
FAILURE = "host0: Test NCCL failure common.cu:1000 'remote process exited'\n .. host0 pid 44: Test failure common.cu:400\n"
CUT = "        8192          2048     float    none      -1 "
WRONG = nccl_test_log(rows=((1024, 10.0), (2048, 20.0), (4096, 30.0)))
WRONG = "".join(line.replace("      0 ", "     16 ", 1) if "   2048 " in line else line for line in WRONG.splitlines(True))


@pytest.mark.parametrize(
    ("text", "points", "notes"),
    [
        (DIED + FAILURE, 3, ["broke off ('Test NCCL failure common.cu:1000'): 3 of the 4 sizes that it was asked for"]),
        (DIED + CUT + FAILURE, 3, ["broke off ('Test NCCL failure common.cu:1000'): 3 of the 4 sizes"]),
        (DIED + CUT + "\nsrun: error: node1: task 3: Killed\n", 3, ["line 2 broke off ('Killed'): 3 of the 4 sizes"]),
        (DIED + CUT + "host0:1:1 [0] NCCL WARN NET/IB : Got completion with error 12\n", 3, ["broke off: 3 of the 4"]),
        (DIED + "host0: Test timeout (600s) common.cu:410\n", 3, ["('Test timeout (600s)'): 3 of the 4"]),
        (DIED + "# Out of bounds values : 0 OK\n", 3, ["is not whole: 3 of the 4"]),
        (DIED.replace("2(factor)", "1024(bytes)"), 3, ["3 of the 8 sizes"]),
        (DIED.replace("# Using", "# Reducing maxBytes to 4096 due to memory limitation\n# Using"), 3, []),
        (DIED.replace("# nThread", "# threads"), 3, ["broke off: 3 sizes are there"]),
        (DIED[: DIED.index(" 2048 ")], 1, ["1 of the 4 sizes that it was asked for is there"]),
        (DIED + FAILURE + nccl_test_log("all_reduce_perf", redop="sum"), 3, ["test from line 2 broke off"]),
        (WRONG.replace("0 OK", "1 FAILED"), 2, ["line 2: left out 1 of 3 rows, as their data was wrong (#wrong)"]),
        (nccl_test_log().replace("0 OK", "3 FAILED"), 2, ["3 results were wrong in place, none out of place"]),
        (gzip.compress(nccl_test_log().encode()), 2, []),
        (nccl_test_log() + nccl_test_log(), 2, ["2 tests of all_to_all over 4 GPUs count together, by the median"]),
        (nccl_test_log("alltoall_perf_mpi"), 2, []),  # NAME_SUFFIX=_mpi
    ],
)  # fmt: skip
def test_a_test_that_is_not_whole_is_used_with_a_note(tmp_path, text, points, notes):
    measured = read_costs(path := saved(tmp_path, text))
    assert len(measured.collectives[0].points) == points
    assert len(measured.notes or ()) == len(notes)
    assert all(part in note for part, note in zip(notes, measured.notes or (), strict=True)), measured.notes
    said = [finding.message for finding in findings_of_times(path) if finding.code == "times"]
    assert said == list(measured.notes or ())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (nccl_test_log().replace("      0 ", "      3 "), "the data of all its sizes was wrong"),
        (nccl_test_log().replace("#wrong", "error").replace("0 OK", "3 FAILED"), "does not say at which sizes"),
        (nccl_test_log().replace("    time ", " cputime ", 1), "times are those of the CPU"),
    ],
)
def test_times_that_mean_nothing_are_refused(tmp_path, text, says):
    refused(saved(tmp_path, text), says)


def test_json_of_nccl_tests(tmp_path):
    for inside in (True, False):
        measured = read_costs(saved(tmp_path, nccl_json(inside=inside), "out.json"))
        (times,) = measured.collectives
        assert (times.operation, times.ranks, measured.notes) == ("all_to_all", 4, None)
        assert times.points == tuple((size, pytest.approx(size * 1e-8)) for size in (1024, 2048, 4096))
    text = json.dumps(nccl_json(sizes=(1024, 2048)))
    cut = saved(tmp_path, text[: text.index("}, {", text.index('"results"')) + 1], "cut.json")
    assert "the file ends early'): 1 of the 3 sizes" in read_costs(cut).notes[0]
    assert "is not whole: 2 of the 3" in read_costs(saved(tmp_path, text, "out.json")).notes[0]
    wrong = nccl_json()
    wrong["results"][1]["out_of_place"]["nwrong"] = 12.0
    measured = read_costs(saved(tmp_path, wrong, "out.json"))
    assert len(measured.collectives[0].points) == 2 and "left out 1 of 3 rows" in measured.notes[0]
    in_place = nccl_json()
    in_place["results"][0]["in_place"]["nwrong"] = 2.0
    assert "wrong in place, none out of place" in read_costs(saved(tmp_path, in_place, "out.json")).notes[0]
    wrong["results"][0]["out_of_place"] = {"cpu_time": 1.0, "alg_bw": 1.0, "bus_bw": 1.0, "nwrong": None}
    refused(saved(tmp_path, wrong, "out.json"), "times are those of the CPU")
    refused(saved(tmp_path, nccl_json(binary="./all_gather_perf"), "out.json"), "'all_gather_perf' is not a test of")
    refused(saved(tmp_path, nccl_json(results=3), "out.json"), "needs a list of objects under 'results'")
    refused(saved(tmp_path, nccl_json(results=[{"out_of_place": {}}]), "out.json"), "out.json, result 0: ")
    pairs = [saved(tmp_path, nccl_json(binary="sendrecv_perf", gpus=2), "pair.json")]
    assert read_pairs(pairs)[0].hosts == ("host0", "host0")


def test_records_of_rccl_tests(tmp_path):
    rows = [
        rccl_record(1024),
        rccl_record(1024, 1, time=9.0),
        rccl_record(2048),
        rccl_record(1024, name="AllGather"),
        rccl_record(512, wrong="7"),
    ]
    head = ", ".join(rows[0])
    table = "\n".join([head, *(", ".join(map(str, row.values())) for row in rows)])
    for content in (rows, table, "[\n" + ",\n".join(map(json.dumps, rows))):
        measured = read_costs(path := saved(tmp_path, content, "rccl.out"))
        (times,) = measured.collectives
        assert (times.operation, times.ranks) == ("all_to_all", 16)
        assert times.points == ((1024, pytest.approx(10.24e-6)), (2048, pytest.approx(20.48e-6)))
        assert measured.origin == "rccl-tests on GPUs that are not named, 2 nodes"
        assert any("left out 1 of 3 rows" in note for note in measured.notes)
        assert any("'AllGather' is not used" in note for note in measured.notes)
        assert not nccl_pairs.pairs_in(path)
    refused(saved(tmp_path, [rccl_record(1, gpusPerRank=4)]), "several GPUs each (-g)")
    refused(saved(tmp_path, [rccl_record(1, ranks=None)]), "how many GPUs were there?")


@pytest.mark.skipif(not DATA.exists(), reason="needs ../shared/data")
def test_published_logs_of_several_binaries():
    one, two = (read_costs(DATA / f"xxrjun_{name}.log") for name in ("N1_G8", "N2_G1"))
    operations = {times.operation: (times.ranks, len(times.points)) for times in one.collectives}
    assert operations == {"all_reduce": (8, 10), "all_to_all": (8, 10), "send_receive": (8, 10)}
    assert one.collectives[1].points[0] == (33554432, pytest.approx(124.40e-6))
    assert ["all_gather" in note or "reduce_scatter" in note for note in one.notes] == [True, True]
    assert [times.operation for times in two.collectives] == ["all_to_all", "send_receive"]
    assert two.notes is None
    drawn, _ = drawn_from([DATA / "xxrjun_N2_G1.log"])
    assert [node.name for node in drawn.cluster.nodes] == ["cnode2-001", "cnode2-002"]
    assert drawn.cluster.gpus[0].send_bandwidth == pytest.approx(13.55e9, rel=0.01)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (nccl_test_log("all_gather_perf"), ("line 2", "'all_gather_perf' is not a test of alltoall_perf or all_reduce_perf")),
        (nccl_test_log().replace("Rank  1", "Rank  0"), ("4 processes", "MPI=1")),
        (nccl_test_log().split("#        (B)")[1], ("line 2", "keep the whole output")),
        (nccl_test_log().replace("   10.00", "     nan"), ("the time is 'nan'",)),
        (nccl_test_log() + "        1024     256    float    none\n", ("a row needs size",)),
        ("\n".join(line for line in nccl_test_log().splitlines() if "Rank" not in line), ("how many GPUs were there",)),
        (b"# Rank 0 \xff on h device 0 [0] x\n" * 3, ()),
    ],
)  # fmt: skip
def test_other_texts_are_refused_with_the_place(tmp_path, text, parts):
    refused(saved(tmp_path, text), *parts)


def test_logs_of_nothing_but_heads_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(nccl_tests, "MAX_RANKS", 1000)
    refused(saved(tmp_path, nccl_test_log() + "# Collective test starting: x\n" * 1001), "more than 1,000 ranks and tests")


def drawn_from(paths, kind=None):
    pairs, notes = read_pairs(paths)
    drawn = draw_pairs(pairs, "measured", kind)
    return drawn, [*notes, *drawn.notes]


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


def test_pairs_of_a_node_share_one_number_and_unknown_devices_need_a_type(tmp_path):
    ends = [("host", bus) for bus in ("0000:1b:00", "0000:43:00", "0000:52:00")]
    drawn, notes = drawn_from(logs(tmp_path, lambda a, b: 80e9 if "0000:1b:00" in (*a, *b) else 20e9, ends))
    assert drawn.cluster.nodes[0].link_bandwidth == pytest.approx((80 * 80 * 20) ** (1 / 3) * 1e9, rel=1e-3)
    assert any("a node has one number" in note for note in notes)
    assert any(note.startswith("no GPU was measured with one of another host: ports") for note in notes)
    assert drawn.cluster.gpus[0].send_bandwidth == 50e9  # the catalogue's
    paths = logs(tmp_path, two_nodes, NODES, device="AMD Instinct MI100")
    assert "'AMD Instinct MI100' of node2 is not in the catalogue" in refusal(drawn_from, paths)
    drawn, _ = drawn_from(paths, "H200")
    assert {gpu.type for gpu in drawn.cluster.gpus} == {"H200"}


def test_other_logs_of_pairs(tmp_path):
    drawn, _ = drawn_from(logs(tmp_path, two_nodes, NODES, binary="alltoall_perf"))
    assert drawn.cluster.gpus[0].send_bandwidth == pytest.approx(40e9, rel=1e-3)
    # GPUs are told by their bus, not by their number: CUDA_VISIBLE_DEVICES makes both of them device 0.
    drawn, _ = drawn_from(logs(tmp_path, two_nodes, NODES[:2]))
    assert len(drawn.cluster.gpus) == 2
    _, notes = drawn_from(logs(tmp_path, two_nodes, NODES, sizes=(1 << 25, 1 << 26)))
    assert any("32 MiB and more" in note for note in notes)
    path = tmp_path / "all.log"
    text = "".join(pair_log((a, b), two_nodes(a, b)) for a, b in combinations(NODES, 2))
    path.write_text(text + pair_log(NODES[:2], 1e9, binary="all_gather_perf") + pair_log(NODES, 1e9))
    drawn, notes = drawn_from([path])
    assert notes[0].startswith("2 tests left out")
    assert drawn.mean_error < 1e-3


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (pair_log(NODES, 1e9), ("no test of sendrecv_perf or alltoall_perf between two GPUs in 1 file",)),
        (pair_log((NODES[0], NODES[0]), 1e9), ("bench.txt, test from line 2", "both ranks are on one GPU")),
        (pair_log(NODES[:2], 1e9).replace("double none -1", "double none -1 x"), ("bench.txt, line 10", "a row needs")),
        (pair_log(NODES[:2], 1e30), ("do not grow with the bytes",)),  # only start-ups
        # Old versions do not name their test, and the ratio by which an all-reduce is told needs two GPUs.
        (nccl_test_log(None, redop="sum", root="", gpus=1, share=1.0), ("between two GPUs",)),
    ],
)
def test_logs_without_pairs_are_refused(tmp_path, text, said):
    message = refusal(read_pairs, [saved(tmp_path, text)])
    assert all(part in message for part in said), message


ALL_TO_ALL = pair_log(NODES, 50e9, binary="alltoall_perf")


def told(recognised: list[Part]) -> list[tuple[str, list[str]]]:
    return [(part.format.name, [path.name for path in part.paths]) for part in recognised]


def test_logs_of_several_pairs_are_a_set_in_the_place_of_the_first_and_others_are_times(tmp_path):
    paths = logs(tmp_path, two_nodes, NODES)
    assert told(parts(paths)) == [("nccl-pairs", [f"{number}.log" for number in range(6)])]
    assert told(single_files(tmp_path)) == [("nccl-tests", [path.name]) for path in paths]
    every = saved(tmp_path, "".join(path.read_text() for path in paths), "all.log")
    assert told(parts([every])) == [("nccl-pairs", ["all.log"])]
    refused(every, "tests of send_receive over 2 GPUs on 1 and on 2 nodes")  # as times
    first, *_ = logs(tmp_path, two_nodes, NODES)
    again = saved(tmp_path, pair_log(NODES[1::-1], 290e9), "again.log")  # the same pair, the other GPU first
    assert told(parts([first])) == [("nccl-tests", ["0.log"])]
    assert told(parts([first, again])) == [("nccl-tests", ["0.log"]), ("nccl-tests", ["again.log"])]
    cluster = saved(tmp_path, {"nodes": []}, "cluster.json")
    paths: list[Path] = logs(tmp_path, two_nodes, NODES[:3])
    assert [part.format.kind for part in parts([cluster, *paths])] == ["cluster", "pairs"]
    assert [part.format.kind for part in parts([paths[2], cluster, *paths])] == ["pairs", "cluster"]


def test_logs_of_other_tests_stay_out_of_the_set(tmp_path):
    logs(tmp_path, two_nodes, NODES)
    saved(tmp_path, ALL_TO_ALL, "all.log")
    saved(tmp_path, pair_log(NODES[:2], 1e9, binary="all_gather_perf"), "gather.log")
    saved(tmp_path, pair_log(NODES[:2], 1e9, sizes=()), "unended.log")
    saved(tmp_path, {"nodes": []}, "cluster.json")
    assert told(parts([tmp_path])) == [
        ("nccl-pairs", [f"{number}.log" for number in range(6)]),
        ("nccl-tests", ["all.log"]),
        ("cluster", ["cluster.json"]),
        ("nccl-tests", ["gather.log"]),
        ("nccl-tests", ["unended.log"]),
    ]


def test_a_folder_a_pair_is_one_set(tmp_path):
    """Launchers give every job a folder, and all logs one name."""
    for number, ends in enumerate(combinations(NODES, 2)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "out.log").write_text(pair_log(ends, two_nodes(*ends)))
    assert told(parts([tmp_path])) == [("nccl-pairs", ["out.log"] * 6)]


def test_what_is_said_of_a_set_and_of_a_damaged_log_in_it(tmp_path):
    paths = logs(tmp_path, two_nodes, NODES)
    (covers,) = findings_of_pairs(paths)
    assert (covers.severity, covers.message) == ("ok", "6 of the 6 pairs of 4 GPUs on 2 hosts were measured")
    with paths[0].open("a") as log:
        log.write(ALL_TO_ALL)
    covers, left_out = findings_of_pairs(paths[:3])  # the first GPU with all others
    assert (covers.severity, covers.message) == ("warning", "3 of the 6 pairs of 4 GPUs on 2 hosts were measured")
    assert left_out.message.startswith("1 test left out")
    first, *others = logs(tmp_path, two_nodes, NODES)
    first.write_text(first.read_text().replace("double none -1", "double none -1 x"))
    (part,) = parts([first, *others])
    assert part.paths[0] == first
    (finding,) = findings_of_pairs(part.paths)
    assert finding.severity == "error" and finding.message.startswith("0.log, line 10: a row needs size")


def test_what_is_said_of_a_log_alone(tmp_path):
    (pair,) = logs(tmp_path, two_nodes, NODES[:2])
    finding, held = findings_of_times(pair)
    assert held.message == "send-receive over 2 GPUs: 3 sizes, out of place"
    assert finding.severity == "ok"
    assert "drop all of them together on any page, or give them to detect --pairs" in finding.message
    (held,) = findings_of_times(saved(tmp_path, ALL_TO_ALL, "eight.log"))
    assert held.message == "all-to-all over 4 GPUs: 3 sizes, out of place"
