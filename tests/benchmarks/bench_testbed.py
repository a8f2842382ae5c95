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
from engine.cli.output import table
from engine.cluster import Cluster
from engine.costs import Datasheet
from engine.formats import read_model, read_workload
from engine.launch.preparation.launch import Launch, PreparedLaunch
from engine.launch.preparation.prepare import prepare
from engine.launch.results.comparison import compare
from engine.launch.results.preference import prefer
from engine.launch.results.run import Run
from engine.launch.running.local import run_here
from engine.plan import Plan, SendOrder, Travel
from engine.problem import Problem, make_problem
from engine.result import never
from engine.simulate.work import Load
from engine.systems import SYSTEMS
from engine.systems.base import run, silent
from engine.systems.pieces import phased_order
from engine.units import ratio, seconds

SAMPLES = Path(__file__).parents[2] / "sample_traces"


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
    for sample, plans_for in (("alpha", tiered_plans_of), ("beta", travelling_plans_of)):
        model = read_model(SAMPLES / f"tiny-moe-{sample}.json")
        trace = read_workload(SAMPLES / "tiny-moe" / f"{sample}-code.npz", num_experts=model.experts)
        plans = tuple(plans_for(make_problem(trace, cluster, model, Datasheet())))
        print(f"\n{cluster.name}, {trace.name}")
        launch = Launch(plans, trace, model, cluster, on="testbed", ranks=4, scale=9000.0, repeats=passes)
        measure(prepare(launch), jobs)


def measure(launch: PreparedLaunch, jobs: int) -> None:
    """Run a launch so often, and print every job and how far its plans were from their predictions."""
    for check in launch.checks:
        print(f"{check.name}: {check.text}")
    factors = {plan.name: [] for plan in launch.plans}
    for job in range(jobs):
        before = load()
        with tempfile.TemporaryDirectory() as folder:
            run = run_here(launch, Path(folder) / "run", never, silent)
        source = run.runs[0].predicted.cost_source
        print(f"\njob {job + 1} of {jobs}, load {before} before and {load()} after; {source}")
        show(run)
        for plan_run in run.runs:
            factors[plan_run.plan.name].append(float(np.median(plan_run.totals)) / plan_run.predicted.total)
    print("\nmeasured / predicted of every job")
    for name, each in factors.items():
        print(f"  {name:32} {'  '.join(f'{factor:.3f}' for factor in each)}")
    worst = max((abs(factor - 1) for each in factors.values() for factor in each), default=0.0)
    print(f"furthest from its prediction: {worst:.1%}")


def show(run: Run) -> None:
    """The table of one job."""
    rows = []
    for plan_run in run.runs:
        median, laid = float(np.median(plan_run.totals)), compare(plan_run.predicted, plan_run.measured)
        network = laid.by_kind.set_index("kind").loc[["dispatch", "combine"], ["predicted", "measured"]].sum()
        rows.append(
            [
                plan_run.plan.name,
                seconds(plan_run.predicted.total),
                seconds(median),
                ratio(median / plan_run.predicted.total),
                f"{seconds(min(plan_run.totals))} to {seconds(max(plan_run.totals))}",
                ratio(network["measured"] / network["predicted"]),
                ratio(laid.waiting / laid.predicted_waiting),
            ]
        )
    header = ["order", "predicted", "measured", "ratio", "passes", "network alone", "meetings alone"]
    print(table(header, rows))
    print("\n".join(prefer(run.runs).lines))


def load() -> str:
    """Processes that were running or ready to, mean over the last minute."""
    return Path("/proc/loadavg").read_text().split()[0]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
