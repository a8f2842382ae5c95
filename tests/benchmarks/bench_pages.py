"""How long every page takes to answer a click: `python -m tests.benchmarks.bench_pages [GPUS …]` (default 64 320).

On the sample, on a routing log of 5 million (token, layer) rows and on `deepseek`'s for each number of GPUs, uploaded and with
plans (of the default systems; for `deepseek` the linear placement and EPLB). A browser's protocol is spoken over a real
websocket; what the browser needs to draw is not in the figures. Wall time and, since it does not depend on what else the
machine does, the server's CPU time: of the first visit, which computes what later ones find, and the slower of two later ones.
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
from tests.benchmarks.deepseek import MODEL, cluster_of, routing_log

LAYERS, EXPERTS, ROWS = 24, 64, 5_000_000
SIZES = (64, 320)
UPLOAD, PLAN, VISITS = "upload, check and show", "plan (a job)", 2
SHORT_SYSTEMS = ("Linear placement", "EPLB")

Times = tuple[float, float]
"""Wall and CPU seconds."""


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

    def visit(self) -> dict[str, list[Times]]:
        """Every page: its first visit and the slower of two later ones."""
        times: dict[str, list[Times]] = {}
        for _ in range(1 + VISITS):
            for page in self.session.pages:
                began = self.cpu()
                self.session.run(page)
                times.setdefault(page or "workload", []).append((self.session.times[page], self.cpu() - began))
        return {page: [first, max(later)] for page, (first, *later) in times.items()}

    def upload(self, files: dict[str, bytes], cluster: bytes | None) -> Times:
        """Wall and CPU seconds of the recording's upload."""
        if cluster is not None:
            self.session.run("cluster")
            self.session.upload("cluster", self._labelled("Or open a cluster"), {"cluster.json": cluster})
        self.session.run("")
        label, began, cpu = self._labelled("Routing logs"), time.perf_counter(), self.cpu()
        self.session.upload("", label, files)
        return time.perf_counter() - began, self.cpu() - cpu

    def plan(self, folder: Path, systems: tuple[str, ...] | None) -> Times:
        """Run systems (None: the default ones) and draw Optimise again, as its watcher does; seconds of the job."""
        self.session.run("optimise")
        if systems is not None:
            for label, ticked in list(self.session.ticked.items()):
                if label.startswith("**") and ticked != any(system in label for system in systems):
                    self.session.tick("optimise", label, not ticked)
        began = time.perf_counter()
        self.session.press("optimise", "Run")
        newest = runner.jobs(folder, "optimise")[0]
        if runner.wait(newest, 600) is not runner.State.DONE:
            raise RuntimeError(newest.log_tail())
        took = time.perf_counter() - began
        self.session.run("optimise")
        return took, 0.0

    def _labelled(self, begin: str) -> str:
        return next(label for label in self.session.widgets if label.startswith(begin))


def main() -> int:
    sizes = [int(word) for word in sys.argv[1:]] or list(SIZES)
    log = routing_log()
    uploads = {"5 million rows": ({"long.npz": long_log(), "long.json": model()}, None, None)}
    uploads |= {
        f"R1, {gpus} GPUs": (
            {"r1.npz": log, "r1.json": MODEL.to_json().encode()},
            cluster_of(gpus).to_json().encode(),
            SHORT_SYSTEMS,
        )
        for gpus in sizes
    }
    columns: dict[str, dict[str, list[Times]]] = {}
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server, port = start(folder)
        try:
            for number, case in enumerate(["sample", *uploads]):
                with ExitStack() as open:
                    session = Session(port, number, open)
                    clock = Clock(session, psutil.Process(server.pid))
                    session.press("", "Open the sample")
                    files, cluster, systems = uploads.get(case, ({}, None, None))
                    columns[case] = {UPLOAD: [clock.upload(files, cluster)]} if files else {}
                    columns[case] |= {PLAN: [clock.plan(folder, systems)]} | clock.visit()
                    faults += session.faults
                print(f"{case}: done", file=sys.stderr, flush=True)
        finally:
            server.terminate()
            server.wait(10)
    rows = list(dict.fromkeys(row for column in columns.values() for row in column))
    cells = [[row, *(_cell(column.get(row, [])) for column in columns.values())] for row in rows]
    print(table(["wall (CPU), first visit; later ones", *columns], cells))
    print("\n".join(faults) or "no errors")
    return 1 if faults else 0


def _cell(times: list[Times]) -> str:
    return "; ".join(f"{seconds(wall)} ({seconds(cpu)})" if cpu else seconds(wall) for wall, cpu in times)


if __name__ == "__main__":
    sys.exit(main())
