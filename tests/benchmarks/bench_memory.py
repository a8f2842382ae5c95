"""Memory that a studio gives back: `python -m tests.benchmarks.bench_memory [SESSIONS [RUNS]]` (default 200 and 10 each).

Sessions come one after another, each a real websocket client that opens the sample, visits pages in turn and leaves. Streamlit
keeps a session that has left for two minutes, at most 128, in case its browser comes back; so after the last one this waits as
long, and two more visitors come, who let the studio notice. Printed: the server's memory before, after every quarter, and at
the end, when it ought to be back within 20 MB of its size with every page seen once.
"""

import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path

from engine.units import size
from tests.benchmarks.bench_sessions import Session, studio

KEPT = 125
"""Seconds until Streamlit has forgotten who has left, and a little more."""
ENOUGH = 20e6
"""Bytes within which memory is back."""


def live(port: int, runs: int) -> list[str]:
    """One session that opens the sample and visits pages; returns its faults."""
    with ExitStack() as open:
        session = Session(port, 0, open)
        session.press("", "Open the sample")
        for page in islice(cycle(session.pages), runs):
            session.run(page)
        return session.faults


def main(sessions: int = 200, runs: int = 10) -> int:
    with tempfile.TemporaryDirectory() as folder, studio(Path(folder) / "data") as (port, process):
        for _ in range(3):  # every page seen, every cache of the sample filled
            faults = live(port, 20)
        before = process.memory_info().rss
        print(f"{size(before)} with every page of the sample seen", flush=True)
        began = time.monotonic()
        for number in range(1, sessions + 1):
            faults += live(port, runs)
            if number % max(1, sessions // 4) == 0:
                now, took = process.memory_info().rss, time.monotonic() - began
                print(f"{size(now)} after {number} sessions, {number * runs} runs, {took:.0f} s", flush=True)
        time.sleep(KEPT)
        for _ in range(2):  # Streamlit forgets when somebody leaves, and Python collects when the next page has run
            faults += live(port, runs)
        after = process.memory_info().rss
    print(f"{size(after)} once all have left: {size(after - before)} more")
    print("\n".join(faults) or "no page showed an error")
    return 1 if faults or after - before > ENOUGH else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
