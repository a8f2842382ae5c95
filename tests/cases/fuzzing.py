"""The answers that any bytes may get, and the number of inputs that fuzz tests try: few, or SWITCHYARD_FUZZ in a long run."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from hypothesis import HealthCheck, settings

from engine.errors import InputError
from engine.formats import check_recording, read_workload, scan_lists
from engine.workload import Workload
from tests.cases.examples import examples

Answer = TypeVar("Answer")

EXAMPLES = int(os.environ.get("SWITCHYARD_FUZZ", examples(60)))
MOST_SECONDS = 5
"""Processor seconds, as other tests run at the same time."""
MOST_BYTES = 1.2e9
"""Memory that a reader takes for itself: the libraries with PyTorch take 0.3 GB of 1.5 GB."""
LONGEST_LINE = 1000

any_input = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
_PROCESS = Path("/proc/self")
scan_lists.compile_ahead()  # which `make` does after installing, and is no part of those seconds


@contextmanager
def bearable() -> Iterator[None]:
    """Fail if the block takes more time or memory than reading any file may. Memory is the peak of the process less the
    memory before; it is not measured where Linux does not tell it."""
    if _PROCESS.exists():
        (_PROCESS / "clear_refs").write_text("5")
    before, began = _peak(), time.process_time()
    yield
    assert time.process_time() - began < MOST_SECONDS
    assert _peak() - before < MOST_BYTES


def answer_or_one_line(read: Callable[[], Answer]) -> Answer | str:
    """Return the answer of `read`, or its complaint of one line."""
    with bearable():
        try:
            return read()
        except InputError as error:
            line = str(error)
    assert line and line.isprintable() and len(line) < LONGEST_LINE, line
    return line


def workload_or_one_line(
    paths: Path | list[Path], read: Callable[[Path | list[Path]], Workload] = read_workload
) -> Workload | str:
    """Return the recording in these files, which its checks must be able to describe, or the complaint."""

    def checked() -> Workload:
        workload = read(paths)
        assert workload.load.sum() > 0
        assert check_recording(workload)
        return workload

    return answer_or_one_line(checked)


def _peak() -> int:
    """Most bytes of this process that were in memory at once."""
    if not _PROCESS.exists():
        return 0
    line = next(line for line in (_PROCESS / "status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
