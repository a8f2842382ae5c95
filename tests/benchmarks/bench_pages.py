"""How long every page takes to answer a click: `python -m tests.benchmarks.bench_pages`.

On the sample and on a routing log of 5 million (token, layer) rows that is uploaded, each without and with a plan. A browser's
protocol is spoken over a real websocket; what the browser needs to draw is not in the figures. Wall time and, since it does
not depend on what else the machine does, the server's CPU time; the slower of two visits each.
"""

import io
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil

from engine.cli.text import table
from engine.formats import read_model
from engine.jobs import runner
from engine.units import seconds
from tests.benchmarks.bench_sessions import SAMPLES, Session, start

LAYERS, EXPERTS, ROWS = 24, 64, 5_000_000
UPLOAD, VISITS = "upload, check and show", 2


def long_log() -> bytes:
    """A skewed log of ROWS (token, layer) rows in which two of five tokens follow the expert before, as a file."""
    random = np.random.default_rng(0)
    tokens = ROWS // LAYERS + 1
    experts = np.empty((tokens, LAYERS, 1), np.int16)
    for layer in range(LAYERS):
        experts[:, layer, 0] = random.choice(EXPERTS, tokens, p=random.dirichlet(np.full(EXPERTS, 0.5)))
        if layer:
            follows = random.random(tokens) < 0.4
            experts[follows, layer, 0] = random.permutation(EXPERTS)[experts[follows, layer - 1, 0]]
    file = io.BytesIO()
    np.savez_compressed(file, experts=experts, sequence=np.arange(tokens, dtype=np.int32) // 512)
    return file.getvalue()


def model() -> bytes:
    sample = read_model(SAMPLES / "tiny-moe-alpha.json")
    longer = sample.model_copy(update={"name": "long", "layers": LAYERS, "experts": EXPERTS, "dense_layers": ()})
    return longer.to_json().encode()


class Clock:
    """Wall and CPU time of what a session does, by what it is."""

    def __init__(self, session: Session, server: psutil.Process) -> None:
        self.session, self.server = session, server

    def cpu(self) -> float:
        times = self.server.cpu_times()
        return times.user + times.system

    def visit(self) -> dict[str, tuple[float, float]]:
        """Every page: the slower of two visits, which both find what an earlier one has computed."""
        slowest = {}
        for number in range(1 + VISITS):
            for page in self.session.pages:
                began = self.cpu()
                self.session.run(page)
                if number:
                    now = (self.session.times[page], self.cpu() - began)
                    slowest[page or "workload"] = max(now, slowest.get(page or "workload", now))
        return slowest

    def upload(self) -> tuple[float, float]:
        self.session.run("")
        label = next(widget for widget in self.session.widgets if widget.startswith("Routing logs"))
        content, began, cpu = long_log(), time.perf_counter(), self.cpu()
        self.session.upload("", label, {"long.npz": content, "long.json": model()})
        return time.perf_counter() - began, self.cpu() - cpu

    def plan(self, folder: Path) -> None:
        """Run the default systems and draw Optimise again, as its watcher does."""
        self.session.press("optimise", "Run")
        newest = runner.jobs(folder, "optimise")[0]
        if runner.wait(newest, 300) is not runner.State.DONE:
            raise RuntimeError(newest.log_tail())
        self.session.run("optimise")


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server, port = start(folder)
        try:
            with ExitStack() as open:
                sessions = [Session(port, number, open) for number in range(2)]
                short, long = (Clock(session, psutil.Process(server.pid)) for session in sessions)
                for session in sessions:
                    session.press("", "Open the sample")
                columns = {"sample": short.visit()}
                short.plan(folder)
                columns["sample, planned"] = short.visit()
                columns["5 million rows"] = {UPLOAD: long.upload()} | long.visit()
                long.plan(folder)
                columns["5 million rows, planned"] = long.visit()
        finally:
            server.terminate()
            server.wait(10)
    pages = [UPLOAD, *columns["sample"]]
    cells = [[page, *(_both(column.get(page)) for column in columns.values())] for page in pages]
    print(table(["wall (CPU)", *columns], cells))
    faults = [fault for session in sessions for fault in session.faults]
    print("\n".join(faults) or "no errors")
    return 1 if faults else 0


def _both(times: tuple[float, float] | None) -> str:
    return f"{seconds(times[0])} ({seconds(times[1])})" if times else ""


if __name__ == "__main__":
    sys.exit(main())
