"""The What-if page at 64 GPUs: `python -m tests.benchmarks.bench_what_if [SESSIONS]` (default 20).

DeepSeek-R1 on eight nodes of eight H100 as in `bench_scale`, one model and two, every session with a recording of its own. For
one session alone and for all at once: how long the first look at the page takes, and how long a slider.
"""

import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
from streamlit.proto.BackMsg_pb2 import BackMsg

from app.what_if.live import FASTER
from engine import store
from engine.cli.output import table
from engine.compare.synthetic import synthetic
from engine.units import ratio, seconds
from engine.workload import RoutingTrace
from tests.benchmarks.bench_sessions import Session, at_once, state_of, stored, studio, times
from tests.benchmarks.shared import MODEL, RECIPE, cluster_of

GPUS = 64
PAGE, SLIDER = "what-if", "Network bandwidth"
FIRST, MOVED = "first look", "a slider"


class Visitor(Session):
    """A browser at the address of a stored session."""

    position = FASTER.index(1.0)

    def look(self) -> None:
        self.run(PAGE)
        self.times[FIRST] = self.times[PAGE]

    def move(self) -> None:
        """The slider, to where it has not been yet."""
        self.position += 1

        def change(message: BackMsg) -> None:
            state = state_of(message, self.widgets[SLIDER])
            state.string_array_value.data.append(ratio(FASTER[self.position]))

        self.run(PAGE, change)
        self.times[MOVED] = self.times[PAGE]


def opened(trace: RoutingTrace, number: int, two: bool) -> str:
    """The same tokens in another order: recordings of their own, as hard as the first."""
    turns = (number + 1, -number - 1)[: 1 + two]
    own = [replace(trace, name=f"log {by}", experts=np.roll(trace.experts, by, axis=0)) for by in turns]
    second = {"second": store.save_workload(own[1])} if two else {}
    return stored(f"visitor-{'two' if two else 'one'}-{number}", own, cluster_of(GPUS), MODEL, **second)


def measure(trace: RoutingTrace, two: bool, count: int, port: int) -> list[list[str]]:
    with ExitStack() as open:
        alone, *others = [Visitor(port, number, open, opened(trace, number, two)) for number in range(count + 1)]
        alone.look()
        for _ in range(3):  # by then the worker processes of the studio have started
            time.sleep(2)
            alone.move()
        rows = []
        for act, name in ((Visitor.look, FIRST), (Visitor.move, MOVED)):
            at_once(others, act)
            label = f"{'two models' if two else 'one model'}, {name}"
            rows.append([label, seconds(alone.times[name]), times(others, name)])
        faults = [f"{visitor.number}: {fault}" for visitor in (alone, *others) for fault in visitor.faults]
        print("\n".join(faults), file=sys.stderr)
    return rows


def main(count: int = 20) -> None:
    trace = synthetic(MODEL, RECIPE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SWITCHYARD_DATA"] = f"{folder}/data"
        with studio(Path(folder) / "data") as (port, _):
            rows = [row for two in (False, True) for row in measure(trace, two, count, port)]
    print(table(["", "alone", f"median of {count} at once"], rows))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
