"""One rank of a launch; started by torchrun with the run folder as its only argument.

Runs the planned layers or training step with real tensors. Tokens and their experts are replayed from the recording, so all
ranks know all counts and exchange no sizes. Every rank writes its events; rank 0 also compares the outcome with the
unplanned computation on one process.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.files import write_atomically
from engine.launch.calibrate import calibrate
from engine.launch.coherent import Coherent
from engine.launch.colocated import Colocated
from engine.launch.forward import Forward
from engine.launch.job import Executor, Job
from engine.launch.joining import joined, leave_with_parent, telling_why
from engine.launch.links import links_of
from engine.launch.recorder import Recorder
from engine.launch.spec import CALIBRATION, REPORT, read_spec, writing
from engine.plan import Plan


def main(folder: Path) -> None:
    """Join the job, run, write `events-RANK.npz` (and on rank 0 the report)."""
    leave_with_parent()
    with telling_why():
        spec, tokens = read_spec(folder)
        rank = int(os.environ["RANK"])
        device = torch.device("cpu")
        if spec.device == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
            torch.cuda.set_device(device)
            if spec.model_b is not None:
                # Two communicators deadlock unless NCCL keeps to the order in which the host hands their exchanges over.
                os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
        with joined(spec.backend, spec.limit), torch.inference_mode():
            run(Job(spec, tokens, rank, device, Recorder(rank, device)), folder)


def run(job: Job, folder: Path) -> None:
    """Measure the machine, warm every plan up once, then run all plans in turn, A B A B, `repeats` times: what drifts
    while the job runs drifts for all of them."""
    spec, recorder = job.spec, job.recorder
    recorder.align(spec.ranks)
    job.tell(0.0, "measuring this machine")
    measured = _measure(job)
    if job.rank == 0:
        with writing(folder):
            write_atomically(folder / CALIBRATION, json.dumps(measured))
    if spec.step is None:
        job = replace(job, links=links_of(spec, measured))
    executors = [executor_of(job, plan) for plan in spec.plans]
    rounds = spec.repeats + 1
    for number in range(rounds):
        for index, executor in enumerate(executors):
            recorder.begin(index, number)
            executor.run(progress_of(job, number, index))
            recorder.end()
    with writing(folder):
        recorder.save(folder / f"events-{job.rank}.npz")
    job.tell(0.85, "comparing with the unplanned computation")
    differences = [executor.difference() for executor in executors]
    errors: list[float] = [0.0] * spec.ranks
    dist.all_gather_object(errors, recorder.clock_error)
    if job.rank == 0:
        device = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "CPU"
        report = {"differences": differences, "device": device, "clock_error": max(errors)}
        with writing(folder):
            write_atomically(folder / REPORT, json.dumps(report))


def _measure(job: Job) -> dict[str, Any]:
    if job.spec.step is None:
        return calibrate(job)
    from engine.launch.step.calibrate import calibrate_step

    return calibrate_step(job)


def executor_of(job: Job, plan: Plan) -> Executor:
    """What runs a plan."""
    if job.spec.step is not None:
        # Imported here and above: what a step needs would take every rank of any launch half as long again to start.
        from engine.launch.step.run import StepExecutor

        return StepExecutor(job, plan)
    if plan.placement_b is not None:
        return Colocated(job, plan)
    return Coherent(job, plan) if plan.execution == "context-coherent" else Forward(job, plan)


def progress_of(job: Job, number: int, index: int) -> Callable[[float, str], None]:
    """What a pass tells, as progress of the whole launch."""
    spec = job.spec
    which = "warm-up" if number == 0 else f"pass {number} of {spec.repeats}"
    which += f", {spec.plans[index].name}" if len(spec.plans) > 1 else ""
    rounds = len(spec.plans) * (spec.repeats + 1)

    def tell(done: float, message: str) -> None:
        job.tell(0.1 + 0.7 * (number * len(spec.plans) + index + done) / rounds, f"{which}, {message}")

    return tell


if __name__ == "__main__":
    main(Path(sys.argv[1]))
