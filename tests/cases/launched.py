"""Launches that have ended, without a rank: their results come from the simulation."""

import time
from pathlib import Path

from engine.catalogue import cluster_presets
from engine.cluster import Cluster, Node
from engine.costs import CostProfile, Datasheet, Line
from engine.files import write_atomically
from engine.jobs import launches
from engine.jobs.kinds import answered
from engine.jobs.protocol import ERROR, EXIT, REQUEST, Context, Request
from engine.jobs.runner import Job
from engine.launch.preparation.launch import Launch, PreparedLaunch
from engine.launch.rank.difference import Difference
from engine.launch.results.run import MeasuredPlan, Run
from engine.problem import make_problem
from engine.simulate import simulate
from engine.timeline import Timeline


def simulated(launch: PreparedLaunch, factor: float) -> Run:
    """Make the run of a launch in which everything took `factor` times as long as predicted, each further plan a tenth
    longer, and the last pass 1.1 times that. The ranks are H100s that meet on a fabric."""
    gpu = cluster_presets()["mixed-8"].cluster.gpus[0]
    nodes = tuple(Node(name=f"rank {rank}", gpus=(gpu,)) for rank in range(launch.instructions.ranks))
    problem = make_problem(launch.workloads[0], Cluster(name="here", nodes=nodes), launch.instructions.model, Datasheet())
    runs = []
    for number, (launched_plan, plan) in enumerate(zip(launch.plans, launch.instructions.plans, strict=True)):
        predicted, longer = simulate(plan, problem), factor * (1 + 0.1 * number)
        events = predicted.events.assign(start=predicted.events["start"] * longer, end=predicted.events["end"] * longer)
        measured = Timeline(events, predicted.resources, "measured", "CPU")
        totals = [measured.total] * launch.instructions.repeats
        totals[-1] *= 1.1
        runs.append(MeasuredPlan(launched_plan, predicted, measured, tuple(totals), Difference(1e-7, 1e-4)))
    profile = CostProfile(name="made up", origin="a test", gemm={"CPU": Line(alpha=0, beta=1)})
    return Run(tuple(runs), "CPU", launch.workloads[0].tokens, profile, 0.0)


def request_of(launch: Launch, root: Path, moment: float | None = None) -> Job:
    """The folder of a launch that was asked for, at a moment in seconds since the epoch; its recording must be in the data
    folder."""
    moment = time.time() if moment is None else moment
    name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(moment))}{int(moment % 1 * 1e6):06d}-0123abcd"
    job = Job(name, root / "jobs" / name)
    job.folder.mkdir(parents=True)
    write_atomically(job.folder / REQUEST, Request(kind="launch", arguments=launch.to_arguments(), created=moment).to_json())
    (job.folder / "pid").write_text('{"pid": 4194305, "start": 0}')  # of nobody: the job has ended
    return job


def finish(job: Job, factor: float, monkeypatch) -> Job:
    """Let a launch have ended well, `factor` times slower than predicted."""
    monkeypatch.setattr(launches, "run", lambda launch, *_: simulated(launch, factor))
    context = Context(job.folder)
    context.finish(answered(launches.launch, job.request.arguments, context))
    return job


def fail(job: Job, message: str) -> Job:
    write_atomically(job.folder / ERROR, f'{{"message": "{message}"}}')
    write_atomically(job.folder / EXIT, "2")
    return job
