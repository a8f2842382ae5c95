"""Questions in worker processes: the same answers, large arguments sent once, and no process that outlives this one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from engine.errors import InputError
from engine.parallel import pool as pools
from engine.parallel.pool import Pool, Question
from tests.cases.cli import ROOT
from tests.cases.jobs import until
from tests.cases.processes import left, workers
from tests.parallel import points
from tests.parallel.ready_pool import nothing, ready


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "processors", lambda: 2)
        pool = ready(Pool("tests.parallel.points", nothing))
        yield pool
        pool.close()
    assert not pool.ready and not workers()


def test_answers_come_in_order_from_two_processes(pool):
    questions = [Question(points.times_sent, {f"digest {index}": index}, (0.2,)) for index in range(4)]
    by = [process for _, process in pool.answers(questions)]
    assert len(set(by)) == 2 and os.getpid() not in by
    assert pool.answers([Question(max, small=(index, 3)) for index in range(6)]) == [3, 3, 3, 3, 4, 5]


def test_a_large_argument_is_sent_to_a_worker_once(pool):
    question = Question(points.times_sent, {"digest": points.Sent()}, (0.1,))
    for _ in range(4):
        for times, _ in pool.answers([question, question]):
            assert times == 1


def test_a_worker_keeps_what_it_was_asked_about_last(pool):
    question = Question(points.times_sent, {"kept until others come": points.Sent()}, (0.1,))
    (before, _), _ = pool.answers([question, question])
    for index in range(pools.KEPT):
        pool.answers([Question(points.times_sent, {f"other {index}": "large"}, (0.1,))] * 2)
    (again, _), _ = pool.answers([question, question])
    assert again == before + 1


def test_what_a_question_raises_is_raised_here(pool):
    with pytest.raises(InputError, match="that cannot be"):
        pool.answers([Question(points.refuse, small=("that cannot be",)), Question(max, small=(1, 2))])


def test_a_killed_worker_costs_a_second_attempt(pool, tmp_path):
    # At work when the death is noticed.
    other = Question(points.times_sent, {"digest of another": points.Sent()}, (1.0,))
    answers = pool.answers([Question(points.die_first, small=(str(tmp_path / "note"),)), other])
    assert answers[0] == "alive" and answers[1][0] == 1 and (tmp_path / "note").exists()


def test_a_worker_killed_in_the_midst_of_its_answer_or_while_nobody_asks_is_replaced(pool, tmp_path):
    question = Question(points.die_first, small=(str(tmp_path / "note"), True))
    assert pool.answers([question]) == ["alive"] and (tmp_path / "note").exists()
    for worker in workers():
        worker.kill()
    assert pool.answers([Question(max, small=(1, 2))]) == [2]


def test_a_question_that_kills_every_worker_is_refused_and_the_next_is_answered(pool):
    with pytest.raises(InputError, match="killed again and again"):
        pool.answers([Question(points.die, small=(0,))])
    assert pool.answers([Question(max, small=(1, 2))]) == [2]


def test_what_nobody_waits_for_any_more_is_not_begun(pool, tmp_path):
    class LeftError(Exception):
        pass

    def left() -> None:
        raise LeftError

    notes = [Question(points.leave_note, small=(str(tmp_path), str(index), 0.3)) for index in range(12)]
    with pytest.raises(LeftError):
        pool.answers(notes, left)
    assert pool.answers([Question(max, small=(1, 2))]) == [2]
    time.sleep(0.5)
    # Two were at work, and an executor hands out one more than it has processes.
    assert len(list(tmp_path.iterdir())) <= 4


SCRIPT = """
import time
from engine.parallel import pool as pools
from tests.parallel import points
from tests.parallel.ready_pool import nothing, ready
if __name__ == "__main__":
    pools.processors = lambda: 2
    pool = ready(pools.Pool("tests.parallel.points", nothing))
    print("ready", flush=True)
    END
"""


@pytest.mark.parametrize(
    ("end", "by"), [("pool.answers([pools.Question(points.leave_note, small=('/', '', 60))])", signal.SIGKILL), ("pass", None)]
)
def test_workers_end_with_the_process_they_work_for(tmp_path, end, by):
    (tmp_path / "studio.py").write_text(SCRIPT.replace("END", end))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SWITCHYARD_TEST_ORPHANS": str(tmp_path)}
    command = [sys.executable, "-m", "studio"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as studio:
        assert studio.stdout.readline() == "ready\n"
        if by:
            assert len(left(str(tmp_path))) == 5  # the studio, its server, its tracker, two workers
            studio.send_signal(by)
        studio.wait(30)
    until(lambda: not left(str(tmp_path)), 10)
