"""The time of every page: `python -m tests.benchmarks.bench_pages [GPUS …]` (default 64 320).

On the sample and on DeepSeek-R1's recording of `shared` for each number of GPUs, uploaded and with plans (of the default
systems; for DeepSeek-R1 the linear placement and EPLB), one of them saved for the Review page. A page is the first that a
process draws of the open inputs, with everything imported and nothing computed, as after a restart of the studio; then it is
drawn again, as a click does. A browser's protocol is spoken over a real websocket; the browser's drawing is not in the
figures. Wall time and, since it does not depend on other work of the machine, the server's CPU time, each the least of some
attempts.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from engine.cli.output import table
from engine.jobs import runner
from engine.plan import Plan
from engine.store import team
from engine.store.database import database
from engine.units import seconds
from tests import warm
from tests.benchmarks.bench_sessions import Session, studio
from tests.benchmarks.shared import MODEL, cluster_of, routing_log

SIZES = (64, 320)
SHORT_SYSTEMS = ("Linear placement", "EPLB")
ATTEMPTS = 3

Times = tuple[float, float]
"""Wall and CPU seconds."""


@dataclass(frozen=True)
class Kept:
    """A session that is stored: the address that leads to it, the plan of it that is saved, and the addresses of the pages."""

    query: str
    plan: str
    pages: dict[str, str]

    def query_of(self, page: str) -> str:
        """Review is looked at with the saved plan open, as by a link."""
        return f"{self.query}&{urlencode({'plan': self.plan})}" if page == "review" else self.query


def prepare(folder: Path, gpus: int | None) -> Kept:
    """A session with everything open, planned, and every page seen, so that all that is stored has been. gpus: for
    DeepSeek-R1's recording; None: the sample by its default systems"""
    with studio(folder, warm_address()) as (port, _), ExitStack() as open:
        session = Session(port, 0, open)
        session.press("", "Open the sample")
        if gpus:
            session.run("cluster")
            session.upload("cluster", "A cluster file", {"cluster.json": cluster_of(gpus).to_json().encode()})
            session.run("")
            session.upload("", "Routing logs", {"r1.npz": routing_log(), "r1.json": MODEL.to_json().encode()})
        session.run("optimise")
        for label, ticked in list(session.ticked.items()) if gpus else ():
            if label.startswith("**") and ticked != any(system in label for system in SHORT_SYSTEMS):
                session.tick("optimise", label, not ticked)
        session.press("optimise", "Run")
        job = runner.jobs(folder, "optimise")[0]
        if runner.wait(job, 600) is not runner.State.DONE:
            raise RuntimeError(job.log_tail())
        session.run("optimise")
        kept = Kept(session.query, save(job), dict(session.pages))
        for page in kept.pages:
            session.query = kept.query_of(page)
            session.run(page)
        refuse(session)
    return kept


def save(job: runner.Job) -> str:
    """Save the fastest plan of a job for the team; its id."""
    plans = [Plan.from_dict(candidate["plan"], "plan") for candidate in job.result["candidates"]]
    plan = min(plans, key=lambda plan: plan.claim.objective)
    inputs = {name: value for name, value in job.request.arguments.items() if name != "systems"}
    workspace = team.add_workspace(database(), job.id, "bench")
    return team.save_plan(database(), workspace.id, plan, "bench", inputs=inputs).plan


def visit(folder: Path, kept: Kept, page: str) -> tuple[Times, Times]:
    """Times of the first visit of a page after a restart, and of drawing it again. Somebody with nothing open was there before:
    a process's very first page also pays for work done only once, which `first_page_cold` has."""
    with studio(folder, warm_address()) as (port, server), ExitStack() as open:
        Session(port, 0, open)
        cpu = [sum(server.cpu_times()[:2])]
        session = Session(port, 0, open, kept.query_of(page), page, kept.pages)
        first = session.times[page]
        cpu.append(sum(server.cpu_times()[:2]))
        session.run(page)
        cpu.append(sum(server.cpu_times()[:2]))
        refuse(session)
    return (first, cpu[1] - cpu[0]), (session.times[page], cpu[2] - cpu[1])


def refuse(session: Session) -> None:
    if session.faults:
        raise RuntimeError("\n".join(session.faults))


def warm_address() -> Path:
    return Path(os.environ[warm.ADDRESS])


def first_page_cold(folder: Path) -> float:
    """Seconds of the first page of a process that has nothing imported, of somebody with nothing open."""
    with studio(folder) as (port, _), ExitStack() as open:
        return Session(port, 0, open).times[""]


def cases_kept(folder: Path, sizes: list[int]) -> Iterator[tuple[str, Path, Kept]]:
    """(name, folder, session) of every case, while a process that has everything imported waits."""
    os.environ[warm.ADDRESS] = str(folder / "warm")
    with warm.serving(folder / "warm"):
        for case, gpus in {"sample": None, **{f"R1, {gpus} GPUs": gpus for gpus in sizes}}.items():
            os.environ["SWITCHYARD_DATA"] = str(folder / case)
            yield case, folder / case, prepare(folder / case, gpus)


def main() -> int:
    sizes = [int(word) for word in sys.argv[1:]] or list(SIZES)
    columns: dict[str, dict[str, list[Times]]] = {}
    with tempfile.TemporaryDirectory() as name:
        for case, folder, kept in cases_kept(Path(name), sizes):
            columns[case] = {}
            for page in kept.pages:
                visits = [visit(folder, kept, page) for _ in range(ATTEMPTS)]
                least = [tuple(map(min, zip(*times, strict=True))) for times in zip(*visits, strict=True)]
                columns[case][page or "workload"] = least
                print(f"{case}, {page or 'workload'}: {_cell(least)}", file=sys.stderr, flush=True)
        cold = min(first_page_cold(Path(name) / "cold") for _ in range(ATTEMPTS))
    rows = list(dict.fromkeys(page for column in columns.values() for page in column))
    cells = [[page, *(_cell(column[page]) for column in columns.values())] for page in rows]
    print(table(["wall (CPU): first visit after a restart; again", *columns], cells))
    print(f"first page of a process that imports everything, nothing open: {seconds(cold)}")
    return 0


def _cell(times: list[Times]) -> str:
    return "; ".join(f"{seconds(wall)} ({seconds(cpu)})" for wall, cpu in times)


if __name__ == "__main__":
    sys.exit(main())
