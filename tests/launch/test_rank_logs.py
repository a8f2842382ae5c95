"""Each rank's own log, and how far each rank is."""

import sys
from pathlib import Path

import pytest

from engine.errors import InputError
from engine.launch.rank import failure as rank_logs
from engine.launch.rank.failure import LIMIT, RankLogs, RankProgress, Standing, log_of, log_tail, standing
from engine.launch.running import processes
from engine.launch.running.processes import run_processes
from engine.result import never

TALKS = """
import json, os, sys, time
rank = os.environ.get("RANK") or sys.argv[1]
print(f"hello from {rank}", flush=True)
print("progress " + json.dumps({"done": 0.25, "message": f"layer {rank}"}), flush=True)
print("progress nonsense", "progress 5", 'progress {"done": "x", "message": 1}', sep="\\n", flush=True)
print(f"bye from {rank}", file=sys.stderr, flush=True)
"""


def ranks(count: int, script: str = TALKS) -> list[tuple[list[str], dict[str, str]]]:
    return [([sys.executable, "-c", script], {"RANK": str(rank)}) for rank in range(count)]


def words(folder: Path, rank: int) -> list[str]:
    """A rank's log without the seconds, which begin every line."""
    lines = log_tail(folder, rank, 10**6).splitlines()
    assert all(float(line.split(" s  ")[0]) >= 0 for line in lines)
    return [line.split(" s  ", 1)[1].strip() for line in lines]


def test_every_rank_has_a_log_of_its_own_and_only_the_first_ones_progress_is_the_launchs(tmp_path, capfd):
    reports = []
    run_processes(ranks(3), 3, 30.0, tmp_path, never, lambda *report: reports.append(report))
    for rank in range(3):
        said = words(tmp_path, rank)
        assert said[:2] == [f"hello from {rank}", f"25%  layer {rank}"] and said[-1] == f"bye from {rank}"
        assert "progress nonsense" in said
    assert reports == [(0.25, "layer 0", None, None)]
    now = standing(tmp_path)
    assert [step.message for step in now.steps] == ["layer 0", "layer 1", "layer 2"] and now.failed is None
    log = capfd.readouterr().out
    assert "[rank 2] hello from 2" in log and "layer" not in log


def test_torchrun_says_whose_a_line_is(tmp_path):
    talk = TALKS.replace('print(f"hello from {rank}"', 'print(f"[rank {rank}] hello"').replace(
        '"progress " + json', 'f"[rank {rank}] progress " + json'
    )
    reports = []
    command = [sys.executable, "-c", talk, "1"]
    run_processes([(command, {})], 2, 30.0, tmp_path, never, lambda *report: reports.append(report))
    assert words(tmp_path, 1) == ["hello", "25%  layer 1"] and words(tmp_path, 0) == [] and not reports
    assert [step and step.done for step in standing(tmp_path).steps] == [None, 0.25]


def test_the_rank_that_ended_a_launch_is_noted(tmp_path):
    script = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(60)"
    with pytest.raises(InputError, match="rank 1 ended with exit code 3"):
        run_processes(ranks(2, script), 2, 30.0, tmp_path, never, lambda *report: None)
    assert (standing(tmp_path).failed, standing(tmp_path).code) == (1, 3)


def test_a_launch_that_prints_without_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "MOST_PRINTED", 2**22)
    script = "while True: print('x' * 1000)"
    with pytest.raises(InputError, match="printed more than 4 MiB"):
        run_processes(ranks(1, script), 1, 30.0, tmp_path, never, lambda *report: None)
    assert log_of(tmp_path, 0).stat().st_size <= LIMIT


def test_a_long_log_keeps_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_logs, "LIMIT", 4000)
    logs = RankLogs(tmp_path, 1)
    for number in range(500):
        logs.print(0, f"line {number}\n")
        assert log_of(tmp_path, 0).stat().st_size <= 4000
    first, *kept = log_tail(tmp_path, 0, 1000).splitlines()
    numbers = [int(line.split()[-1]) for line in kept]
    assert "dropped" in first and len(numbers) > 50
    assert numbers == list(range(500 - len(numbers), 500))
    logs.print(0, "y" * 10_000)
    assert log_of(tmp_path, 0).stat().st_size <= 4000 and log_tail(tmp_path, 0, 1).endswith("y")


def test_a_rank_that_has_said_nothing_and_a_launch_that_has_not_begun(tmp_path):
    assert log_tail(tmp_path, 0) == "" and standing(tmp_path) is None
    logs = RankLogs(tmp_path, 2)
    logs.save()
    assert standing(tmp_path) == Standing(steps=(None, None))
    logs.progress(1, RankProgress.read('{"done": 7.0, "message": "m"}'))
    logs.save()
    first, second = standing(tmp_path).steps
    assert first is None and second.done == 1.0
    logs.failed = 1, -9
    logs.save()
    assert standing(tmp_path).code == -9


def test_a_run_folder_that_is_gone_stops_nobody(tmp_path):
    logs = RankLogs(tmp_path / "run", 1)
    logs.print(0, "lost\n")
    logs.progress(0, RankProgress(done=0.5, message="lost", time=0.0))
    logs.save()
    assert not (tmp_path / "run").exists()
