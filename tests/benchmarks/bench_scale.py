"""DeepSeek-R1 on 8 to 1024 H100: seconds and peak memory of reading, planning, simulating, ordering and saving.

`python -m tests.benchmarks.bench_scale [GPUS …]`; model, recording and clusters are those of `shared`. Every size runs in a
process of its own, so that its peak memory is its own.
"""

import json
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from engine.cli.output import table
from engine.communication.two_tier import two_tier
from engine.compare.synthetic import synthetic
from engine.costs import Datasheet
from engine.errors import InputError
from engine.formats import read_plan, read_workload
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.simulate import simulate
from engine.simulate.compile_ahead import compile_ahead
from engine.simulate.work import Load
from engine.systems import run, systems_for
from engine.units import seconds, size
from engine.validate import refuse_broken
from tests.benchmarks.shared import MODEL, RECIPE, cluster_of, in_child, timed

SIZES = (8, 32, 64, 128, 320, 1024)
EVERY_SYSTEM_UP_TO = 64
LARGE = {"linear": 1024, "eplb": 1024, "joint": 320, "lina": 320}
"""Systems that are tried on more GPUs, and on how many at most."""
MATRICES = 8
"""Layers with an ordered all-to-all."""


def measure(gpus: int, folder: Path) -> dict[str, float | str]:
    """Seconds by operation, and the peak memory in bytes."""
    times: dict[str, Any] = {}

    def kept(name: str, work: Callable[..., Any], *arguments: object) -> Any:
        answer, times[name] = timed(work, *arguments)
        return answer

    compile_ahead()  # the compiled code is loaded once a process
    trace = kept("read the log", read_workload, folder / "log.npz")
    problem = kept("problem", make_problem, trace, cluster_of(gpus), MODEL, Datasheet())
    plan = None
    fitting = systems_for(problem)
    for system in fitting if gpus <= EVERY_SYSTEM_UP_TO else [name for name in LARGE if gpus <= LARGE[name]]:
        try:
            outcome = kept(f"plan {system}", run, fitting[system], problem)
        except InputError:  # such as a system that wants an expert on every GPU
            continue
        plan = outcome.result.solution if system == "eplb" else plan
    kept("simulate", simulate, plan, problem)
    kept("check", refuse_broken, plan, problem)
    kept("save and open the plan", save_and_open, plan, folder / f"plan-{gpus}.json")
    if gpus > 8:
        kept("two-tier, a matrix", order_two_tier, plan, problem)
        times["two-tier, a matrix"] /= MATRICES
    times["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return times


def save_and_open(plan: Plan, path: Path) -> None:
    path.write_text(plan.to_json(), encoding="utf-8")
    assert read_plan(path).id == plan.id


def order_two_tier(plan: Plan, problem: Problem) -> None:
    for matrix in Load(problem, plan.placement).traffic[:MATRICES]:
        two_tier(matrix, problem.network)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(int(sys.argv[2]), Path(sys.argv[3]))))
        return
    sizes = [int(word) for word in sys.argv[1:]] or list(SIZES)
    with tempfile.TemporaryDirectory() as folder:
        trace = synthetic(MODEL, RECIPE)
        np.savez_compressed(Path(folder) / "log.npz", experts=trace.experts, sequence=trace.sequence)
        columns = []
        for gpus in sizes:
            columns.append(in_child("tests.benchmarks.bench_scale", gpus, folder))
            print(f"{gpus} GPUs: done", file=sys.stderr, flush=True)
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = []
    for name in names:
        shown = size if name == "memory" else seconds
        rows.append([name, *(shown(column[name]) if name in column else "–" for column in columns)])
    print(table(["", *(f"{gpus} GPUs" for gpus in sizes)], rows))


if __name__ == "__main__":
    main()
