"""Plans of `best` and of others on the testbed: `python -m tests.benchmarks.bench_best_testbed [JOBS [PASSES]]`.

`beta-code` with a model of width 1024, where `best` predicts a gain: two nodes of two H100 with links nine times as fast as
their ports and a row per node, without spare slots and with one; four ports of the rates of mixed-8 and a row per GPU; and two
nodes of four. On the testbed most of a pass is network, of H100s hardly any: their ports and links are drawn a tenth as fast,
so that the plans are made for such a pass. All plans of a case run in turn, JOBS jobs (default 3) of PASSES timed passes
(default 9), as other work on the machine slows neighbours alike: next to medians stands the time over that of `best`, pass by
pass. A GPU is a process, and all are as fast as each other, so mixed GPUs differ by their ports alone; the plans are made for
that. Needs root.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from engine.catalogue import cluster_presets, gpu
from engine.cluster import Cluster, Node
from engine.costs import Datasheet
from engine.formats import read_cluster, read_model
from engine.launch.preparation.launch import Launch
from engine.launch.preparation.prepare import prepare
from engine.launch.running.local import run_here
from engine.plan import Travel
from engine.problem import make_problem
from engine.result import never
from engine.systems import run, systems_for
from engine.systems.base import silent
from engine.timeline import Timeline
from engine.units import seconds
from tests.benchmarks.bench_testbed import load
from tests.benchmarks.shared import columns
from tests.cases.cli import SAMPLES
from tests.cases.samples import sample

WIDTH, TOKENS = 1024, 1024
SYSTEMS = ("linear", "aurora", "eplb", "joint", "coactivation", "exflow", "best")
SETTINGS = {"order": "concurrent", "execution": "vanilla"}


def cases() -> dict[str, tuple[Cluster, Travel, int, float]]:
    """Cluster, travel, spare slots and scale by title."""
    drawn = cluster_presets()["hgx-h100-4-nodes"].cluster.nodes[0]
    port = drawn.gpus[0].send_bandwidth / 10
    gpus = tuple(each.model_copy(update={"send_bandwidth": port, "receive_bandwidth": port}) for each in drawn.gpus)
    node = drawn.model_copy(update={"gpus": gpus, "link_bandwidth": drawn.link_bandwidth / 10})
    pair = Cluster(name="two nodes", nodes=tuple(node.model_copy(update={"name": n, "gpus": node.gpus[:2]}) for n in "ab"))
    ports = [each.gpus[0].send_bandwidth for each in read_cluster(SAMPLES / "mixed-8.json").nodes]
    mixed = tuple(Node(name=f"port {at}", gpus=(gpu("H100", rate),)) for at, rate in enumerate(ports))
    eight = tuple(node.model_copy(update={"name": name, "gpus": node.gpus[:4]}) for name in "ab")
    return {
        "2 x 2 H100, a row per node": (pair, Travel(unit="node"), 0, 900.0),
        "the same, one spare slot, fewest": (pair, Travel(unit="node", replicas="fewest"), 1, 900.0),
        "4 GPUs with ports of 100, 80, 50, 40, a row per GPU": (
            Cluster(name="four ports", nodes=mixed),
            Travel(unit="gpu"),
            0,
            1000.0,
        ),
        "2 x 4 H100, a row per node": (Cluster(name="two of four", nodes=eight), Travel(unit="node"), 0, 1800.0),
    }


def main(jobs: int = 3, passes: int = 9) -> None:
    model = read_model(SAMPLES / "tiny-moe-beta.json").model_copy(update={"d_model": WIDTH})
    trace = sample("beta-code").spread(TOKENS)
    for title, (cluster, travel, spare, scale) in cases().items():
        problem = make_problem(trace, cluster, model, Datasheet(), travel=travel)
        plans = []
        for name, system in systems_for(problem).items():
            known = SETTINGS | {"redundant": spare}
            if name in SYSTEMS:
                settings = {key: value for key, value in known.items() if key in system.options.model_fields}
                plan = run(system, problem, settings).result.solution
                plans.append(plan.with_parts(name=system.title, claim=None))
        plans.sort(key=lambda plan: plan.name != systems_for(problem)["best"].title)
        print(f"\n{title}; {TOKENS} tokens of {trace.name}, width {WIDTH}")
        gpus = len(cluster.gpus)
        measure(
            Launch(tuple(plans), trace, model, cluster, on="testbed", ranks=gpus, scale=scale, tokens=TOKENS, repeats=passes),
            jobs,
        )


def measure(launch: Launch, jobs: int) -> None:
    """Run the plans, the one of `best` first, in so many jobs; print what each took, and took of network and computation."""
    prepared = prepare(launch)
    prepared.check()
    totals: list[list[float]] = [[] for _ in launch.plans]
    parts: list[list[tuple[float, float]]] = [[] for _ in launch.plans]
    predicted: list[list[float]] = [[] for _ in launch.plans]
    for _ in range(jobs):
        before = load()
        with tempfile.TemporaryDirectory() as folder:
            done = run_here(prepared, Path(folder) / "run", never, silent)
        print(f"load {before} before a job and {load()} after")
        for at, each in enumerate(done.runs):
            totals[at] += each.totals
            predicted[at].append(each.predicted.total)
            parts[at].append((exposed(each.measured), exposed(each.predicted)))
    heads = {
        "plan": "24",
        "predicted": "10",
        "measured": "10",
        "5 to 95 %": "20",
        "network": "10",
        "predicted ": "10",
        "over best": "9.3f",
    }
    row = columns(heads | {"5 % and 95 % of passes": "14"})
    ours = np.array(totals[0])
    for at, plan in enumerate(launch.plans):
        mine = np.array(totals[at])
        low, high = np.quantile(mine, (0.05, 0.95))
        over = mine / ours
        network, foreseen = np.median(parts[at], axis=0)
        spread = " to ".join(f"{value:.3f}" for value in np.quantile(over, (0.05, 0.95)))
        times = [
            seconds(float(np.median(predicted[at]))),
            seconds(float(np.median(mine))),
            f"{seconds(low)} to {seconds(high)}",
        ]
        row(plan.name, *times, seconds(float(network)), seconds(float(foreseen)), float(np.median(over)), spread)


def exposed(timeline: Timeline) -> float:
    """Seconds in which some send of an all-to-all is under way."""
    network = timeline.events[timeline.events["stream"] == "network"]
    start = network["start"].to_numpy()
    order = np.argsort(start)
    start, end = start[order], np.maximum.accumulate(network["end"].to_numpy()[order])
    return float(np.sum(np.maximum(end - np.maximum(start, np.append(-np.inf, end[:-1])), 0.0)))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
