"""Which logs of nccl-tests are a set of pairs, wherever they lie, and which are times."""

import zipfile
from itertools import combinations
from pathlib import Path

import pytest

from engine.errors import InputError
from engine.formats import Part, findings_of_pairs, findings_of_times, parts, read_costs, single_files
from tests.formats.measured.test_nccl_pairs import NODES, logs, pair_log, two_nodes

ALL_TO_ALL = pair_log(NODES, 50e9, binary="alltoall_perf")


def told(recognised: list[Part]) -> list[tuple[str, list[str]]]:
    return [(part.format.name, [path.name for path in part.paths]) for part in recognised]


def test_logs_of_several_pairs_are_a_set(tmp_path):
    paths = logs(tmp_path, two_nodes, NODES)
    assert told(parts(paths)) == [("nccl-pairs", [f"{number}.log" for number in range(6)])]
    assert told(single_files(tmp_path)) == [("nccl-tests", [path.name]) for path in paths]


def test_a_log_alone_and_logs_of_one_pair_are_times(tmp_path):
    first, *_ = logs(tmp_path, two_nodes, NODES)
    again = tmp_path / "again.log"
    again.write_text(pair_log(NODES[1::-1], 290e9))  # the same pair, the other GPU first
    assert told(parts([first])) == [("nccl-tests", ["0.log"])]
    assert told(parts([first, again])) == [("nccl-tests", ["0.log"]), ("nccl-tests", ["again.log"])]


def test_a_log_that_holds_several_pairs_is_a_set(tmp_path):
    """As times it would be two entries for one number of GPUs."""
    path = tmp_path / "all.log"
    path.write_text("".join(pair_log(ends, two_nodes(*ends)) for ends in combinations(NODES, 2)))
    assert told(parts([path])) == [("nccl-pairs", ["all.log"])]
    with pytest.raises(InputError, match="two entries for send_receive 2 ranks"):
        read_costs(path)


def test_logs_of_other_tests_stay_out_of_the_set(tmp_path):
    logs(tmp_path, two_nodes, NODES)
    for name, text in (
        ("all.log", ALL_TO_ALL),
        ("gather.log", pair_log(NODES[:2], 1e9, binary="all_gather_perf")),
        ("unended.log", pair_log(NODES[:2], 1e9, sizes=())),
    ):
        (tmp_path / name).write_text(text)
    (tmp_path / "cluster.json").write_text('{"nodes": []}')
    assert told(parts([tmp_path])) == [
        ("nccl-pairs", [f"{number}.log" for number in range(6)]),
        ("nccl-tests", ["all.log"]),
        ("cluster", ["cluster.json"]),
        ("nccl-tests", ["gather.log"]),
        ("nccl-tests", ["unended.log"]),
    ]


@pytest.mark.parametrize("form", ["folder", "zip"])
def test_a_folder_a_pair_is_one_set(tmp_path, form):
    """Launchers give every job a folder, and all logs one name."""
    runs, scratch = tmp_path / "runs", tmp_path / "scratch"
    scratch.mkdir()
    for number, ends in enumerate(combinations(NODES, 2)):
        (runs / str(number)).mkdir(parents=True)
        (runs / str(number) / "out.log").write_text(pair_log(ends, two_nodes(*ends)))
    packed = runs
    if form == "zip":
        packed = tmp_path / "runs.zip"
        with zipfile.ZipFile(packed, "w") as archive:
            for path in runs.rglob("*.log"):
                archive.write(path, path.relative_to(runs))
    assert told(parts([packed], scratch)) == [("nccl-pairs", ["out.log"] * 6)]


def test_a_damaged_log_belongs_to_the_set_and_its_place_is_named(tmp_path):
    first, *others = logs(tmp_path, two_nodes, NODES)
    first.write_text(first.read_text().replace("double none -1", "double none -1 x"))
    (part,) = parts([first, *others])
    assert part.paths[0] == first
    (finding,) = findings_of_pairs(part.paths)
    assert finding.severity == "error" and finding.message.startswith("0.log, line 10: a row needs size")


def test_what_is_said_of_a_set(tmp_path):
    paths = logs(tmp_path, two_nodes, NODES)
    (covers,) = findings_of_pairs(paths)
    assert (covers.severity, covers.message) == ("ok", "6 of the 6 pairs of 4 GPUs on 2 hosts were measured")
    with paths[0].open("a") as log:
        log.write(ALL_TO_ALL)
    covers, left_out = findings_of_pairs(paths[:3])  # the first GPU with all others
    assert (covers.severity, covers.message) == ("warning", "3 of the 6 pairs of 4 GPUs on 2 hosts were measured")
    assert left_out.message.startswith("1 test left out")


def test_what_is_said_of_a_log_alone(tmp_path):
    (pair,) = logs(tmp_path, two_nodes, NODES[:2])
    (finding,) = findings_of_times(pair)
    assert finding.severity == "ok"
    assert "drop all of them together on any page, or give them to detect --pairs" in finding.message
    eight = tmp_path / "eight.log"
    eight.write_text(ALL_TO_ALL)
    assert findings_of_times(eight) == []


def test_the_place_of_a_set_is_that_of_its_first_log(tmp_path):
    cluster = tmp_path / "cluster.json"
    cluster.write_text('{"nodes": []}')
    paths: list[Path] = logs(tmp_path, two_nodes, NODES[:3])
    assert [part.format.kind for part in parts([cluster, *paths])] == ["cluster", "pairs"]
    assert [part.format.kind for part in parts([paths[2], cluster, *paths])] == ["pairs", "cluster"]
