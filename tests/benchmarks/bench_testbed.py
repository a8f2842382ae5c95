"""Send orders and travels on the testbed with their predictions: `python -m tests.benchmarks.bench_testbed [RUNS [PASSES]]`.

Two nodes of two H100 with links nine times as fast as their ports (400 and 44.4 Mbit/s) and experts in contiguous blocks. First
the recording `alpha-code`: everything at once, matched phases, and a two-tier order. Then everything at once by how the tokens
of `beta-code` (two experts each) travel: one row per token copy, a row per GPU, a row per node, and that with fp8 there and
bf16 back. All run in turn in one job; RUNS jobs (default 3) of PASSES timed passes (default 5). Needs root. Nothing else should
run on the machine: the load is printed with every job.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from engine.catalogue import cluster_presets
from engine.cluster import Cluster
from engine.costs import Datasheet
from engine.formats import read_model
from engine.launch.preparation.launch import Launch, PreparedLaunch
from engine.launch.preparation.prepare import prepare
from engine.launch.results.preference import prefer
from engine.launch.running.local import run_here
from engine.plan import Plan, SendOrder, Travel
from engine.problem import Problem, make_problem
from engine.result import never
from engine.simulate.work import Load
from engine.systems import SYSTEMS
from engine.systems.base import run, silent
from engine.systems.pieces import phased_order
from engine.units import seconds
from tests.benchmarks.shared import columns
from tests.cases.cli import SAMPLES
from tests.cases.samples import sample


def two_nodes() -> Cluster:
    """Two nodes of two H100 with links of their own."""
    node = cluster_presets()["hgx-h100-4-nodes"].cluster.nodes[0]
    nodes = tuple(node.model_copy(update={"name": name, "gpus": node.gpus[:2]}) for name in ("left", "right"))
    return Cluster(name="two nodes", nodes=nodes)


def tiered_plans_of(problem: Problem) -> list[Plan]:
    """Everything at once, matched and two-tier, all with the same placement."""
    linear = run(SYSTEMS["linear"], problem, {}).result.solution
    load = Load(problem, linear.placement, problem.travel)
    orders = {mode: phased_order(load, mode, never) for mode in ("concurrent", "matched", "two-tier")}
    parts = ({"name": mode, "send_order": order, "claim": None} for mode, order in orders.items())
    return [linear.model_copy(update=part) for part in parts]


def travelling_plans_of(problem: Problem) -> list[Plan]:
    """Everything at once with the same placement, by how tokens travel."""
    linear = run(SYSTEMS["linear"], problem, {}).result.solution
    travels = (Travel(), Travel(unit="gpu"), Travel(unit="node"), Travel(unit="node", dispatch="fp8", combine="bf16"))
    at_once = dict(linear) | {"send_order": SendOrder(mode="concurrent"), "claim": None}
    return [Plan.model_validate(at_once | {"name": travel.in_words, "travel": travel}) for travel in travels]


def main(jobs: int = 3, passes: int = 5) -> None:
    cluster = two_nodes()
    for name, plans_for in (("alpha", tiered_plans_of), ("beta", travelling_plans_of)):
        model = read_model(SAMPLES / f"tiny-moe-{name}.json")
        trace = sample(f"{name}-code")
        plans = tuple(plans_for(make_problem(trace, cluster, model, Datasheet())))
        print(f"\n{cluster.name}, {trace.name}")
        launch = Launch(plans, trace, model, cluster, on="testbed", ranks=4, scale=9000.0, repeats=passes)
        measure(prepare(launch), jobs)


def measure(launch: PreparedLaunch, jobs: int) -> None:
    """Run a launch so often, and print how far its plans were from their predictions."""
    for check in launch.checks:
        print(f"{check.name}: {check.text}")
    row = columns({"order": "32", "predicted": "10", "measured": "10", "ratio": "6.3f"})
    for job in range(jobs):
        before = load()
        with tempfile.TemporaryDirectory() as folder:
            run = run_here(launch, Path(folder) / "run", never, silent)
        print(f"job {job + 1} of {jobs}, load {before} before and {load()} after; {run.runs[0].predicted.cost_source}")
        for each in run.runs:
            total, median = each.predicted.total, float(np.median(each.totals))
            row(each.plan.name, seconds(total), seconds(median), median / total)
        print("\n".join(prefer(run.runs).lines))


def load() -> str:
    """Processes that were running or ready to, mean over the last minute."""
    return Path("/proc/loadavg").read_text().split()[0]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
