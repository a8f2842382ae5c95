"""The table of `docs/best.md` again: `python -m tests.benchmarks.bench_best [ROW …]` prints its rows, or some of them.

The first column of the table is read: what a row does not say is as in the row above it. `tests/systems/test_best_table.py`
holds the printed numbers against these.
"""

import re
import sys
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np

from engine.catalogue import cluster_presets, model_presets
from engine.cluster import Cluster
from engine.costs import Datasheet
from engine.formats import read_workload
from engine.model import MoEModel
from engine.plan import Plan, Travel
from engine.problem import Problem, make_problem
from engine.simulate import simulate
from engine.systems import SYSTEMS, Outcome, run
from engine.systems.options import Value, patient
from engine.units import share
from engine.workload import RoutingTrace, Workload

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "best.md"
SAMPLES = ROOT / "sample_traces"
DATA = ROOT.parent / "shared" / "data"
"""Recordings that are not part of the project."""
LOADS = "decode_in1000out1000", "prefill_in1024"
"""The loads of DeepSeek-R1 that are planned on and judged on."""
WORK = 20.0
"""Seconds of work of the search."""
WIDTH = 1024


@dataclass(frozen=True)
class Row:
    """A row of the table: its inputs, and the numbers that it prints.

    cluster: (nodes, GPUs of a node, their type); None: the sample's
    single, best: ms of a pass in sample and held out; system: title of the best other system
    """

    words: str
    recording: str
    cluster: tuple[int, int, str] | None = None
    wide: bool = False
    travel: Travel = field(default_factory=Travel)
    slots: str = "even"
    redundant: int = 0
    single: tuple[float, float] = (0.0, 0.0)
    system: str = ""
    best: tuple[float, float] = (0.0, 0.0)

    @property
    def options(self) -> dict[str, Value]:
        return {"slots": self.slots, "redundant": self.redundant, "order": "concurrent"}

    @property
    def is_there(self) -> bool:
        """True if its recording is in the project, or beside it."""
        return not self.recording.startswith("DeepSeek") or DATA.is_dir()

    def problems(self) -> tuple[Problem, Problem]:
        """(the one that is planned for, the one that is judged on)"""
        model, workloads = _recorded(self.recording)
        if self.wide:
            model = model.model_copy(update={"d_model": WIDTH, "d_ff": 4 * WIDTH})
        return tuple(make_problem(each, _cluster(self.cluster), model, Datasheet(), travel=self.travel) for each in workloads)


@cache
def _recorded(name: str) -> tuple[MoEModel, tuple[Workload, Workload]]:
    if name == "DeepSeek-V2-Lite":
        with np.load(DATA / "deepseek-v2-lite-routing.npz") as recorded:
            trace = RoutingTrace("intent", recorded["intent"].astype(np.int16), 64)
        return model_presets()[name].model, trace.halves()
    if name == "DeepSeek-R1 loads":
        planned, judged = (read_workload(DATA / "deepseek-r1-loads" / f"{load}.json") for load in LOADS)
        return model_presets()["DeepSeek-R1"].model, (planned, judged)
    model = MoEModel.from_json((SAMPLES / f"tiny-moe-{name}.json").read_bytes(), name)
    return model, read_workload(SAMPLES / "tiny-moe" / f"{name}-code.npz").halves()


def _cluster(wanted: tuple[int, int, str] | None) -> Cluster:
    if wanted is None:
        return cluster_presets()["mixed-8"].cluster
    count, gpus, kind = wanted
    of_kind = {"A100": "exflow-4-nodes", "H100": "hgx-h100-4-nodes"}
    whole = cluster_presets()[of_kind[kind]].cluster
    assert all(len(node.gpus) == gpus for node in whole.nodes) and count <= len(whole.nodes)
    return whole.model_copy(update={"nodes": whole.nodes[:count]})


def rows_of(page: str) -> list[Row]:
    """The rows of the table. Raises ValueError for a word in the first column that it does not know."""
    rows: list[Row] = []
    for line in re.findall(r"^\|(.+)\|$", page.partition("## What it gained\n")[2].partition("\n## ")[0], re.MULTILINE):
        cells = [cell.strip() for cell in line.split("|")]
        if (numbers := re.fullmatch(r"([\d.,]+), ([\d.,]+) \((.+)\)", cells[1])) is None:
            continue
        row = _described(cells[0], rows[-1] if rows else None)
        single = tuple(float(number.replace(",", "")) for number in numbers.groups()[:2])
        best = tuple(float(number.replace(",", "")) for number in cells[2].split(", "))
        rows.append(replace(row, words=cells[0], single=single, system=numbers[3], best=best))
    return rows


def _described(words: str, before: Row | None) -> Row:
    first, *more = words.split(", ")
    row = before if first == "the same" else Row(words, first)
    for word in more:
        if nodes := re.fullmatch(r"(\d+) × (\d+) (\w+)", word):
            row = replace(row, cluster=(int(nodes[1]), int(nodes[2]), nodes[3]))
        elif word in ("node", "GPU", "copies"):
            row = replace(row, travel=row.travel.model_copy(update={"unit": word.lower()}))
        elif word in ("even", "uneven"):
            row = replace(row, slots=word)
        elif word in ("`fewest`", "copies in turn"):
            row = replace(row, travel=row.travel.model_copy(update={"replicas": "fewest" if "fewest" in word else None}))
        elif word in ("one spare slot", "no spare slot"):
            row = replace(row, redundant=int(word.startswith("one")))
        elif word == f"width {WIDTH}":
            row = replace(row, wide=True)
        elif word != "mixed-8":
            raise ValueError(f"unknown in the table of docs/best.md: {word}")
    return row


def times(plan: Plan, problems: tuple[Problem, Problem]) -> tuple[float, float]:
    """Ms of a pass in sample and held out."""
    return tuple(simulate(plan, problem).total * 1e3 for problem in problems)


def single_of(row: Row) -> Plan:
    """The plan of the row's best other system."""
    system = next(system for system in SYSTEMS.values() if row.system in system.title)
    options = {name: value for name, value in row.options.items() if name in system.options.model_fields}
    return run(system, row.problems()[0], options).result.solution


def outcome_of(row: Row, problem: Problem) -> Outcome:
    """The answer of `best`, which ends by its work alone."""
    system = SYSTEMS["best"]
    return run(replace(system, options=patient(system.options)), problem, row.options | {"time_limit": WORK})


def main() -> int:
    for number, row in enumerate(rows_of(PAGE.read_text(encoding="utf-8")), start=1):
        if (len(sys.argv) > 1 and str(number) not in sys.argv[1:]) or not row.is_there:
            continue
        problems = row.problems()
        outcome = outcome_of(row, problems[0])
        known, found = times(single_of(row), problems), times(outcome.result.solution, problems)
        gains = ", ".join(share(one / other - 1) for one, other in zip(known, found, strict=True))
        left = outcome.notes["left"].value.partition(":")[0] if "left" in outcome.notes else "–"
        numbers = ["{:,.4g}, {:,.4g}".format(*pair) for pair in (known, found)]
        print(f"| {row.words} | {numbers[0]} ({row.system}) | {numbers[1]} | {gains} | {left} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
