"""Points in processes of this machine: the same answers in order, and nothing left behind, whatever happens to whom."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from engine import parallel
from engine.errors import InputError
from engine.parallel import in_order, processes
from engine.parallel.processes import workers_for
from tests.cases.jobs import until
from tests.cases.processes import left, servers, workers
from tests.parallel import points

ROOT = processes.__file__.split("/engine/")[0]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, as soon as they are there, and however little memory others leave."""
    monkeypatch.setattr(parallel, "PATIENCE", 0.0)
    for module in (parallel, processes):
        monkeypatch.setattr(module, "processors", lambda: 2)
    monkeypatch.setattr(processes, "workers_for", lambda points: min(2, points))
    processes.prepare("tests.parallel.points")


def let_workers_begin(finished: int, index: int) -> None:
    """A `Begun`: the first point is not done before workers have taken the others, however busy the machine is."""
    if finished == 0 and index == 0:
        until(lambda: len(workers()) >= 2)


def test_answers_come_in_order_from_several_processes_and_none_stays():
    seen = []
    numbers = list(range(40))

    def begun(finished: int, index: int) -> None:
        seen.append((finished, index))
        let_workers_begin(finished, index)

    answers = list(in_order(points.square, (numbers, 0.02), 40, begun=begun))
    assert [index for index, _ in answers] == numbers
    assert [square for _, (square, _) in answers] == [number**2 for number in numbers]
    by = [process for _, (_, process) in answers]
    assert by[0] == os.getpid() and len(set(by)) == 3
    assert not workers()
    finished = [count for count, _ in seen]
    assert finished == sorted(finished) and seen[0] == (0, 0) and finished[-1] >= 38


def test_a_point_done_here_tells_how_far_it_is():
    told = []
    list(parallel.reported(points.half_way, None, ["one"], lambda: False, lambda *of: told.append(of)))
    assert told == [(0, "one"), (0.5, "one: half way")]


@pytest.mark.parametrize(("processes_that_fit", "points", "started"), [(0.5, 9, 1), (2.5, 9, 2), (99, 9, 4), (99, 3, 3)])
def test_there_are_no_more_than_processors_points_and_what_fits_the_memory(monkeypatch, processes_that_fit, points, started):
    monkeypatch.setattr(processes, "processors", lambda: 4)
    monkeypatch.setattr(processes, "most_memory", lambda: 1_000_000)
    free = SimpleNamespace(available=processes_that_fit * 1_000_000)
    monkeypatch.setattr(processes.psutil, "virtual_memory", lambda: free)
    assert workers_for(points) == started


def test_what_the_process_that_started_this_one_takes_does_not_count():
    held = bytearray(300_000_000)
    script = "from engine.parallel.processes import most_memory; print(most_memory())"
    child = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 10_000_000 < int(child.stdout) < len(held) < processes.most_memory()


def test_short_work_stays_in_this_process(monkeypatch):
    monkeypatch.setattr(parallel, "PATIENCE", 30.0)
    answers = list(in_order(points.square, (list(range(8)), 0.001), 8))
    assert {process for _, (_, process) in answers} == {os.getpid()}


def test_workers_use_one_thread_and_signals_to_the_group_are_not_for_them(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    answers = [answer for _, answer in in_order(points.threads, 0.02, 30, begun=let_workers_begin)]
    there = [answer for answer in answers if answer[1] != os.getpgid(0)]
    assert there and all(answer[0] == "1" and answer[2] for answer in there)
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_the_server_of_the_processes_leaves_signals_to_this_one():
    blocked = [int(re.search(r"SigBlk:\t(\w+)", Path(f"/proc/{child.pid}/status").read_text())[1], 16) for child in servers()]
    assert len(blocked) == 1
    assert all(blocked[0] >> (number - 1) & 1 for number in (signal.SIGTERM, signal.SIGINT))


def test_what_a_point_raises_is_raised_in_its_place():
    answers = in_order(points.refuse_third, 0.1, 12, begun=let_workers_begin)
    assert next(answers) == (0, 0) and next(answers) == (1, 1)
    with pytest.raises(InputError, match="the third point"):
        for index, _ in answers:
            assert index > 2  # done already by others
    assert not workers()


@pytest.mark.clock
def test_asked_to_stop_points_at_work_hand_back_their_best(tmp_path):
    asked = []

    def stop() -> bool:
        """True once two workers are at work besides the process of the test."""
        if not asked and all((tmp_path / f"begun-{index}").exists() for index in (0, 1, 2)):
            asked.append(time.monotonic())
        return bool(asked)

    answers = list(in_order(points.until_stopped, tmp_path, 20, stop, let_workers_begin))
    assert time.monotonic() - asked[0] < 2.0
    assert answers == [(index, f"best of {index}") for index in range(3)]
    assert not workers()


@pytest.mark.clock
def test_points_that_do_not_listen_are_ended_within_a_second(tmp_path):
    crew = processes.Processes(parallel.Batch(points.deaf, tmp_path), 4)
    futures = {index: crew.submit(index) for index in range(4)}
    until(lambda: len(workers()) >= 2)
    begin = time.monotonic()
    run = parallel._Elsewhere(lambda points: None, 4, 0, lambda: True, lambda *at: None)
    assert list(run.collect(crew, futures)) == []
    assert time.monotonic() - begin < 1.5
    assert not workers()


@pytest.mark.clock
def test_a_point_that_is_finished_while_an_answer_is_taken_is_not_waited_for():
    class Nobody:
        lost, advice = (), ""

        def nothing(self) -> None:
            pass

        check = ask_to_stop = close = nothing

    futures = {index: Future() for index in range(2)}
    futures[0].set_result("first")
    begin = time.monotonic()
    run = parallel._Elsewhere(lambda points: None, 2, 0, lambda: time.monotonic() - begin > 10, lambda *at: None)
    answers = run.collect(Nobody(), dict(futures))
    assert next(answers) == (0, "first")
    futures[1].set_result("second")
    assert list(answers) == [(1, "second")]
    assert time.monotonic() - begin < 5


def test_a_generator_that_is_left_ends_its_workers():
    answers = in_order(points.square, (list(range(100)), 0.05), 100, begun=let_workers_begin)
    for index, (_, process) in answers:
        if index > 10 and process != os.getpid():
            break
    answers.close()
    assert not workers()


@pytest.mark.parametrize("work", [points.die_once, points.die_in_the_midst_of_an_answer])
def test_a_killed_worker_costs_its_points_a_second_attempt_also_in_the_midst_of_its_answer(work, tmp_path):
    answers = list(in_order(work, tmp_path, 20, begun=let_workers_begin))
    assert answers == [(index, index) for index in range(20)]
    assert (tmp_path / "died").exists()


def test_workers_are_ended_also_while_they_send_their_answers(tmp_path):
    crew = processes.Processes(parallel.Batch(points.send_half_an_answer, tmp_path), 1)
    crew.submit(0)
    until((tmp_path / "sent-0").exists)
    closing = threading.Thread(target=crew.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    assert not workers()


def test_a_point_that_kills_every_worker_is_named_as_a_fault_and_the_others_stay():
    batch = parallel.Batch(points.die_always, None)
    crew = processes.Processes(batch, 8)
    futures = {index: crew.submit(index) for index in range(8)}
    run = parallel._Elsewhere(lambda count: processes.Processes(batch, count), 8, 0, lambda: False, lambda *at: None)
    kept = []
    with pytest.raises(InputError, match=r"killed again and again.*\d of 8 points are done"):
        for index, answer in run.collect(crew, futures):
            kept.append((index, answer))
    assert kept[:3] == [(0, 0), (1, 1), (2, 2)] and 3 not in dict(kept)
    assert not workers()


SCRIPT = """
import sys, threading
from engine import parallel
from tests.parallel import points
if __name__ == "__main__":
    parallel.PATIENCE = 0.0
    parallel.processors = parallel.processes.processors = lambda: 2
    for index, _ in parallel.in_order(points.square, (list(range(1000)), 0.1), 1000):
        print(index, flush=True)
"""


def test_work_that_ends_while_processes_are_prepared_leaves_none(tmp_path):
    """Nor does the next study miss the server that was given up."""
    script = SCRIPT.replace("1000", "2").replace("0.1), 2)", "0.03), 2)")
    script += """
    import psutil, time
    time.sleep(0.1)
    print("left", [" ".join(child.cmdline()) for child in psutil.Process().children() if child.status() != "zombie"])
    print("next", [index for index, _ in parallel.in_order(points.square, (list(range(40)), 0.1), 40)] == list(range(40)))
"""
    (tmp_path / "study.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": ROOT}
    study = subprocess.run(
        [sys.executable, "-m", "study"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    left, again = study.stdout.splitlines()[-2:]
    assert left.startswith("left") and "forkserver" not in left and again == "next True" and study.stderr == ""


def test_workers_do_not_outlive_a_process_that_is_killed(tmp_path):
    (tmp_path / "study.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": ROOT, "SWITCHYARD_TEST_ORPHANS": str(tmp_path)}
    study = subprocess.Popen([sys.executable, "-m", "study"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE)

    until(lambda: len(left(str(tmp_path))) == 5)  # the study, its server, its tracker, two workers
    study.send_signal(signal.SIGKILL)
    study.wait()
    until(lambda: not left(str(tmp_path)), 4)


def test_a_process_that_is_asked_ends_with_the_one_that_asks(tmp_path):
    asks = f"from engine.parallel.processes import ask; ask('tests.parallel.asked', {str(tmp_path / 'asked')!r})"
    asking = subprocess.Popen([sys.executable, "-c", asks], cwd=ROOT)
    until((tmp_path / "asked").exists)
    asked = psutil.Process(int((tmp_path / "asked").read_text()))
    asking.kill()
    asking.wait()
    until(lambda: not asked.is_running() or asked.status() == psutil.STATUS_ZOMBIE, 5)
