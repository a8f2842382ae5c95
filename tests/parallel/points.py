"""Work for crews to do: functions of a module, which other processes find."""

import gc
import multiprocessing
import os
import signal
import struct
import threading
import time
from multiprocessing.queues import SimpleQueue
from pathlib import Path

from engine.errors import InputError


def square(common, index, stop, report):
    """The square of a number and who computed it, after `seconds`."""
    numbers, seconds = common
    time.sleep(seconds)
    return numbers[index] ** 2, os.getpid()


def half_way(common, index, stop, report):
    report(0.5, "half way", 1.0, None)
    return index


def refuse_third(common, index, stop, report):
    time.sleep(common)
    if index == 2:
        raise InputError("the third point cannot be")
    return index


def until_stopped(common, index, stop, report):
    """Polls `stop` as a kernel does. common: a folder, in which it notes that it has begun."""
    (common / f"begun-{index}").touch()
    while not stop():
        time.sleep(0.01)
    return f"best of {index}"


def deaf(common, index, stop, report):
    """Never asks whether to stop. common: a folder, in which it notes that it has begun."""
    (common / f"begun-{index}").touch()
    time.sleep(60)


def die_once(common, index, stop, report):
    """The worker that gets point 3 first dies with it: a note in the folder tells the second one. common: the folder"""
    time.sleep(0.05)
    if index == 3:
        die_first(Path(common) / "died")
    return index


def die_always(common, index, stop, report):
    """Every worker that gets point 3 dies with it."""
    time.sleep(0.05)
    if index == 3:
        _die()
    return index


def threads(common, index, stop, report):
    """Return the threads that the linear algebra may use here, and the process group."""
    time.sleep(common)
    return os.environ.get("OMP_NUM_THREADS"), os.getpgid(0), threading.current_thread() is threading.main_thread()


def die_in_the_midst_of_an_answer(common, index, stop, report):
    """The worker that gets point 3 first dies when it has sent the length of its answer."""
    time.sleep(0.05)
    if index == 3:
        die_first(Path(common) / "died", half_an_answer=True)
    return index


def send_half_an_answer(common, index, stop, report):
    """Is killed at any time after that."""
    _send_half_an_answer()
    (common / f"sent-{index}").touch()
    time.sleep(60)


def _send_half_an_answer():
    (answers,) = (part for part in gc.get_objects() if isinstance(part, SimpleQueue))
    os.write(answers._writer.fileno(), struct.pack("!i", 1000))


def _die():
    assert multiprocessing.parent_process() is not None, "the process of the test must not end"
    os.kill(os.getpid(), signal.SIGKILL)


# Questions of a pool


class Sent:
    """Counts how often it has come to this process."""

    times = 0

    def __setstate__(self, state):
        Sent.times += 1

    def __getstate__(self):
        return {"something": True}


def times_sent(large, seconds=0.0):
    time.sleep(seconds)
    return Sent.times, os.getpid()


def refuse(text):
    raise InputError(text)


def die_first(note, half_an_answer=False):
    """The worker that is asked first dies, at once or when it has sent the length of its answer."""
    if not Path(note).exists():
        Path(note).touch()
        if half_an_answer:
            _send_half_an_answer()
        _die()
    return "alive"


def die(_):
    _die()


def leave_note(folder, name, seconds):
    time.sleep(seconds)
    (Path(folder) / name).touch()
