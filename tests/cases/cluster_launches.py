"""Destinations on clusters, launches for them, and the check of their results."""

from pathlib import Path

import numpy as np

from engine.launch.places.destination import SCHEDULERS, Destination
from engine.launch.preparation.launch import Launch, PreparedLaunch
from engine.launch.preparation.prepare import prepare
from engine.model import MoEModel
from engine.workload import RoutingTrace
from tests.cases.launch_plans import blocks, plan_with

MODEL = MoEModel(name="tiny", layers=2, experts=8, experts_per_token=2, d_model=32, d_ff=64)
SIZE = {"cpus_per_node": 8, "memory_per_node": 16 * 2.0**30, "gpu": "H100", "gpu_memory": 80 * 2.0**30}
OWN = {"slurm": {}, "kubernetes": {"image": "registry.example/switchyard:1", "claim": "runs"}}


def destination(scheduler: str, at: Path, gpus: int = 4, **more) -> Destination:
    """A destination of two nodes. gpus: a node; more: other fields"""
    fields = {"nodes": 2, "gpus_per_node": gpus, "ranks_per_node": gpus or 1, "shared": str(at)}
    return SCHEDULERS[scheduler].from_dict(SIZE | fields | OWN[scheduler] | more, "test")


def launch_for(where: Destination, limit: float = 600.0, model: MoEModel = MODEL) -> PreparedLaunch:
    """A launch of a plan for as many GPUs as the destination has ranks, at most eight."""
    gpus = min(8, where.ranks)
    rng = np.random.default_rng(3)
    experts = np.argsort(rng.random((200, model.layers, model.experts)), axis=-1)[:, :, :2].astype(np.int16)
    plan = plan_with(blocks(model, gpus), name="even")
    trace = RoutingTrace("made up", experts, 8)
    return prepare(Launch((plan,), trace, model, on=where.scheduler, destination=where, repeats=2, limit=limit))


def shared_folder(at: Path) -> Path:
    """The folder that a cluster shares, with a name that tries to be a command."""
    folder = at / 'it\'s $(touch owned) ${HOME} "100%j"'
    folder.mkdir()
    return folder


def hold_results(run, launch) -> None:
    """Assert that the results are those of this launch and its output that of one process."""
    (measured_plan,) = run.runs
    assert measured_plan.plan == launch.plans[0] and measured_plan.difference.error < 1e-5 and len(measured_plan.totals) == 2
    assert run.tokens == launch.workloads[0].tokens == 200 and run.device == "CPU"
    assert measured_plan.measured.resources == measured_plan.predicted.resources == ("rank 0", "rank 1")
    size = launch.instructions.model.bytes_per_token
    traffic = launch.workloads[0].demand(2) @ launch.instructions.plans[0].placement.share
    events = measured_plan.measured.events
    for layer in range(2):
        sent = events[(events["layer"] == layer) & (events["kind"] == "dispatch")]
        across = {(src, dst): bytes for src, dst, bytes in zip(sent["resource"], sent["peer"], sent["bytes"], strict=True)}
        assert across == {(src, 1 - src): traffic[layer][src, 1 - src] * size for src in (0, 1)}
