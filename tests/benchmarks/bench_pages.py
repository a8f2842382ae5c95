"""The time of every page: `python -m tests.benchmarks.bench_pages [GPUS …]` (default 64 320).

On the sample and on DeepSeek-R1's recording of `shared` for each number of GPUs, with plans (of the default systems; for
DeepSeek-R1 the linear placement and EPLB), one of them saved for the Review page. A page is the first that a process draws of
the open inputs, with everything imported and nothing computed, as after a restart of the studio; then it is drawn again, as a
click does. A browser's protocol is spoken over a real websocket; the browser's drawing is not in the figures. Wall time and,
since it does not depend on other work of the machine, the server's CPU time, each the least of some attempts.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from engine.catalogue import cluster_presets
from engine.cli.output import table
from engine.compare.synthetic import synthetic
from engine.costs import Datasheet
from engine.problem import make_problem
from engine.store import team
from engine.store.database import database
from engine.store.problems import problem_arguments, save_recordings
from engine.systems import systems_for
from engine.units import seconds
from tests import warm
from tests.benchmarks.bench_sessions import Session, stored, studio
from tests.benchmarks.shared import MODEL, RECIPE, cluster_of
from tests.cases.samples import sample, sample_model
from tests.cases.sessions import JOB, plan

SIZES = (64, 320)
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
    """A session with plans, one of them saved for the team, and every page seen, so that all that is stored has been. gpus: for
    DeepSeek-R1's recording; None: the sample"""
    if gpus:
        trace, cluster, model = synthetic(MODEL, RECIPE), cluster_of(gpus), MODEL
    else:
        trace, cluster, model = sample("alpha-code"), cluster_presets()["mixed-8"].cluster, sample_model("alpha", 8)
    problem = make_problem(trace, cluster, model, Datasheet())
    save_recordings(problem)
    usual = [name for name, system in systems_for(problem).items() if system.preselected]
    best = min(plan(problem, JOB, *(("linear", "eplb") if gpus else usual)), key=lambda plan: plan.claim.objective)
    room = team.add_workspace(database(), "room", "bench").id
    team.save_plan(database(), room, best, "bench", inputs=problem_arguments(problem))
    query = stored("bench-session", [trace], cluster, model, plan_jobs=[JOB], plan=best.id)
    with studio(folder, warm_address()) as (port, _), ExitStack() as open:
        session = Session(port, 0, open, query)
        kept = Kept(query, best.id, session.pages)
        for page in kept.pages:
            session.query = kept.query_of(page)
            session.run(page)
        refuse(session)
    return kept


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
