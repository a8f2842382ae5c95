"""The time of every system by the size of the problem: `python -m tests.benchmarks.bench_runtimes [-o FILE]`.

With `-o engine/jobs/runtimes.json` it writes the table from which the Optimise page estimates (see `engine/jobs/runtimes.py`).
Every system runs with its own options, in one process, on synthetic recordings (4,096 tokens, skew 0.6, affinity 0.3) and nodes
of eight H100, or copies of the sample's cluster with its four types of GPU. Systems that take less than a second run three
times, and the fastest counts.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from engine.catalogue import cluster_presets
from engine.cluster import Cluster
from engine.compare.synthetic import Recipe
from engine.costs import Datasheet
from engine.errors import InputError
from engine.files import write_atomically
from engine.goal import Goal
from engine.jobs.runtimes import Run, machine, run_of
from engine.model import MoEModel
from engine.plan import Travel
from engine.problem import Problem, make_problem
from engine.simulate.compile_ahead import compile_ahead
from engine.systems import System, run, systems_for
from engine.training import usual_step
from engine.units import seconds
from tests.benchmarks.shared import ROOM, cluster_of, timed

RECIPE = Recipe(tokens=4096, skew=0.6, affinity=0.3)
SIZES = {
    Goal.INFERENCE: ((4, 16, 8), (16, 16, 8), (4, 64, 8), (4, 64, 32), (16, 64, 16), (16, 256, 32), (58, 256, 32)),
    Goal.TWO_MODELS: ((4, 16, 8), (16, 16, 8), (4, 64, 8), (4, 64, 16), (16, 64, 16)),
    Goal.TRAINING: ((4, 16, 8), (12, 16, 8), (12, 16, 32), (12, 64, 16), (24, 64, 32)),
}
"""MoE layers, experts and GPUs."""
OF_ROWS = ((4, 16, 16), (16, 16, 16), (4, 64, 16), (16, 64, 32), (16, 256, 32), (58, 256, 32))
"""The same for inference with one row per node."""
OF_MIXED = ((8, 16, 8), (16, 64, 16), (58, 256, 32))
"""The same for inference on GPUs of several types."""
AGAIN = 3


def problem_of(goal: Goal, layers: int, experts: int, gpus: int, travel: Travel | None = None, mixed: bool = False) -> Problem:
    sizes = {"layers": layers, "experts": experts, "experts_per_token": 2 if experts < 256 else 8}
    model = MoEModel(name=f"{layers} × {experts}", **sizes, d_model=2048, d_ff=1024)
    cluster, recording = (mixed_cluster if mixed else cluster_of)(gpus), RECIPE.draw(model)
    second = (recording, model) if goal is Goal.TWO_MODELS else None
    step = usual_step(model, gpus) if goal is Goal.TRAINING else None
    return make_problem(recording, cluster, model, Datasheet(), second, step=step, travel=travel)


def mixed_cluster(gpus: int) -> Cluster:
    """So many times the sample's eight GPUs, with as much room as `cluster_of` gives."""
    copies = []
    for node in cluster_presets()["mixed-8"].cluster.nodes:
        cards = tuple(card.model_copy(update={"memory": card.memory * ROOM}) for card in node.gpus)
        copies += [node.model_copy(update={"name": f"{node.name} {copy}", "gpus": cards}) for copy in range(gpus // 8)]
    return Cluster(name=f"{gpus} mixed", nodes=tuple(copies), latency=5e-6)


def measure(problem: Problem, system: System, most: int = AGAIN) -> Run:
    """The fastest of some runs. Raises InputError where the system refuses the problem."""
    best = float("inf")
    for _ in range(most):
        best = min(best, timed(run, system, problem)[1])
        if best > 1:
            break
    return run_of(problem, system, {}, best)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    output = parser.parse_args().output
    compile_ahead()
    cases = [(goal, None, False, sizes) for goal, sizes in SIZES.items()]
    cases += [(Goal.INFERENCE, Travel(unit="node"), False, OF_ROWS), (Goal.INFERENCE, None, True, OF_MIXED)]
    runs = []
    for goal, travel, mixed, sizes in cases:
        for size in sizes:
            problem = problem_of(goal, *size, travel, mixed)
            for system in systems_for(problem).values():
                try:
                    if size == sizes[0]:
                        run(system, problem)  # loading, once a process, counts for nobody
                    runs.append(measure(problem, system))
                    print(goal, size, system.name, seconds(runs[-1].seconds), flush=True)
                except InputError as error:
                    print(goal, size, system.name, f"refused: {error}", flush=True)
    if output is not None:
        about = {"machine": machine(), "measured": time.strftime("%Y-%m")}
        rows = [run.model_dump(mode="json", exclude={"machine"}) | {"seconds": float(f"{run.seconds:.3g}")} for run in runs]
        lines = ",\n".join(map(json.dumps, rows))
        write_atomically(output, f'{json.dumps(about)[:-1]}, "runs": [\n{lines}\n]}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
