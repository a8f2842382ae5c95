"""Send orders and travels on the testbed with their predictions: `python -m tests.benchmarks.bench_testbed [RUNS [PASSES]]`.

Two nodes of two H100 with links nine times as fast as their ports (400 and 44.4 Mbit/s) and experts in contiguous blocks. First
the recording `alpha-code`: everything at once, matched phases, and a two-tier order. Then everything at once by how the tokens
of `beta-code` (two experts each) travel: one row per token copy, a row per GPU, a row per node, and that with fp8 there and
bf16 back. All run in turn in one job; RUNS jobs (default 3) of PASSES timed passes (default 5). Needs root. Nothing else should
run on the machine: the load is printed with every job.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
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
from engine.plan import OrderMode, Plan, SendOrder, Travel
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


def plans_of(problem: Problem, orders: Sequence[OrderMode] = (), travels: Sequence[Travel] = ()) -> Iterator[Plan]:
    """Plans with experts in contiguous blocks: of each order, and everything at once by how tokens travel."""
    linear = run(SYSTEMS["linear"], problem, {}).result.solution
    load = Load(problem, linear.placement, problem.travel)
    for mode in orders:
        yield linear.with_parts(name=mode, send_order=phased_order(load, mode, never), claim=None)
    for travel in travels:
        yield linear.with_parts(name=travel.in_words, send_order=SendOrder(mode="concurrent"), travel=travel, claim=None)


def main(jobs: int = 3, passes: int = 5) -> None:
    node = cluster_presets()["hgx-h100-4-nodes"].cluster.nodes[0]
    nodes = tuple(node.model_copy(update={"name": name, "gpus": node.gpus[:2]}) for name in ("left", "right"))
    cluster = Cluster(name="two nodes", nodes=nodes)
    travels = (Travel(), Travel(unit="gpu"), Travel(unit="node"), Travel(unit="node", dispatch="fp8", combine="bf16"))
    for name, wanted in (("alpha", {"orders": ("concurrent", "matched", "two-tier")}), ("beta", {"travels": travels})):
        model = read_model(SAMPLES / f"tiny-moe-{name}.json")
        trace = sample(f"{name}-code")
        plans = tuple(plans_of(make_problem(trace, cluster, model, Datasheet()), **wanted))
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
