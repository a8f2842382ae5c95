"""Seconds until something answers, over what its heaviest library needs: `python -m tests.benchmarks.bench_start`.

Commands are compared with `import numpy`, the studio with `import streamlit`; each is the least of some attempts with files
in memory, in wall time and, since other work of the machine does not change it, in CPU time. The studio is started as a person
does and its first page run over a websocket, then the sample is opened: its resident memory is printed after both.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from engine.cli.output import table
from engine.units import ratio, seconds, size
from tests.benchmarks.bench_sessions import Session, studio
from tests.benchmarks.shared import V2_LITE
from tests.cases.cli import INPUTS, RECORDING

ATTEMPTS, STARTS = 5, 3

Times = tuple[float, float]
"""Wall and CPU seconds."""


def taken(*words: object) -> Times:
    """The times of `python WORDS`."""
    began, before = time.perf_counter(), os.times()
    subprocess.run([sys.executable, *map(str, words)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - began, cpu


def least(*words: object) -> Times:
    """The least of some attempts, after one that brings the files into memory."""
    return least_of([taken(*words) for _ in range(ATTEMPTS + 1)][1:])


def least_of(times: Sequence[Times]) -> Times:
    """Wall and CPU time each at its least."""
    wall, cpu = map(min, zip(*times, strict=True))
    return wall, cpu


def row(name: str, times: Times, unit: Times) -> list[str]:
    """A line of the table. unit: the times that count as 1"""
    ratios = [ratio(time / one) for time, one in zip(times, unit, strict=True)]
    return [name, seconds(times[0]), ratios[0], seconds(times[1]), ratios[1]]


def first_page(folder: Path) -> tuple[Times, Times, int, int]:
    """Times from the start to the first answer and to the first page, and resident bytes with nothing and the sample open."""
    began = time.perf_counter()
    with studio(folder) as (port, process), ExitStack() as open:
        answered = time.perf_counter() - began, sum(process.cpu_times()[:2])
        session = Session(port, 0, open)
        drawn, nothing = (time.perf_counter() - began, sum(process.cpu_times()[:2])), process.memory_info().rss
        session.press("", "Open the sample")
        time.sleep(10)  # modules loaded in the background count too
        return answered, drawn, nothing, process.memory_info().rss


def main() -> None:
    """Print the tables."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SWITCHYARD_DATA"] = str(Path(folder) / "commands")
        commands: dict[str, tuple[object, ...]] = {
            "--help": ("--help",),
            "plan --help": ("plan", "--help"),
            "inspect": ("inspect", RECORDING),
            "convert": ("convert", RECORDING, "-o", Path(folder) / "out.npz"),
        }
        if V2_LITE.exists():
            commands["inspect DeepSeek-V2-Lite"] = ("inspect", f"{V2_LITE}::intent")
        commands["plan --system linear"] = ("plan", *INPUTS, "--system", "linear")
        numpy, streamlit = least("-c", "import numpy"), least("-c", "import streamlit")
        rows = [row("import numpy", numpy, numpy)]
        rows += [row(name, least("-m", "engine", *words), numpy) for name, words in commands.items()]
        runs = [first_page(Path(folder) / f"studio-{attempt}") for attempt in range(STARTS)]
    answers, pages, nothing, sample = zip(*runs, strict=True)
    rows.append(row("import streamlit", streamlit, streamlit))
    rows.append(row("studio answers", least_of(answers), streamlit))
    rows.append(row("its first page", least_of(pages), streamlit))
    print(table(["", "wall", "ratio", "CPU", "ratio"], rows))
    print(f"resident: {size(max(nothing))} with nothing open, {size(max(sample))} with the sample")


if __name__ == "__main__":
    main()
