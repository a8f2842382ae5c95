"""One rank of a launch; started by torchrun with the run folder as its only argument.

Runs the planned layers or training step with real tensors. Tokens and their experts are replayed from the recording, so
all ranks know all counts and exchange no sizes; a person's own model routes its texts itself. Every rank writes its events;
rank 0 also compares the outcome with the unplanned computation on one process.
"""

import json
import os
import socket
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from engine.errors import InputError
from engine.files import write_atomically
from engine.goal import Goal
from engine.launch.rank.coherent import Coherent
from engine.launch.rank.colocated import Colocated
from engine.launch.rank.context import Executor, RankContext
from engine.launch.rank.forward import Forward
from engine.launch.rank.instructions import BEGINS, COMPARED, MACHINE_TIMES, REPORT, read_instructions, writing
from engine.launch.rank.joining import joined, reporting_failure
from engine.launch.rank.links import links_of
from engine.launch.rank.measure_machine import measure_machine
from engine.launch.rank.settings import settle
from engine.parallel.processes import leave_with_parent
from engine.plan import Plan
from engine.runtime.exchange.recorder import Recorder


def main(folder: Path) -> None:
    """Join the other ranks, run, write `events-RANK.npz` (and on rank 0 the report)."""
    leave_with_parent()
    with reporting_failure():
        instructions, tokens = read_instructions(folder)
        settle(instructions.backend)
        rank = int(os.environ["RANK"])
        device = torch.device("cpu")
        if instructions.device == "cuda":
            device = gpu_of(rank)
            torch.cuda.set_device(device)
        with joined(instructions.backend, instructions.limit, device), torch.inference_mode():
            run(RankContext(instructions, tokens, rank, device, Recorder(rank, device)), folder)


def gpu_of(rank: int) -> torch.device:
    """The GPU that a rank computes on: its own, or in turn if its node has fewer than ranks. Raises InputError if
    PyTorch sees none."""
    seen = torch.cuda.device_count()
    if not seen:
        why = "this PyTorch is built without CUDA" if torch.version.cuda is None else "PyTorch finds none that it can use"
        raise InputError(f"rank {rank} sees no GPU on {socket.gethostname()}: {why}; ask for nodes that have some, or for none")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % seen)


def run(context: RankContext, folder: Path) -> None:
    """Measure the machine, warm every plan up once, then run all plans in turn, A B A B, `repeats` times: drift during
    the job affects all of them alike."""
    instructions, recorder = context.instructions, context.recorder
    recorder.align(instructions.ranks)
    context.report(0.0, "measuring this machine")
    if instructions.goal is Goal.TRAINING:
        # Imported here and below: with the imports of a step every rank of any launch would take half as long again to start.
        from engine.launch.step.measure_machine import measure_machine_for_step

        measured = measure_machine_for_step(context)
    elif instructions.own is not None:
        from engine.launch.own.run import measure_machine_for_own

        measured = measure_machine_for_own(context)
    else:
        measured = measure_machine(context)
        context = replace(context, links=links_of(instructions, measured))
    if context.rank == 0:
        with writing(folder):
            write_atomically(folder / MACHINE_TIMES, json.dumps(measured))
    compared = COMPARED[instructions.goal is Goal.TRAINING]
    if instructions.own is None:
        own, executors = None, [executor_of(context, plan) for plan in instructions.plans]
    else:
        from engine.launch.own.run import executors_of

        own, executors = executors_of(context)
    plans = len(instructions.plans)
    turns = list(product(range(instructions.repeats + 1), range(plans)))
    for turn, (number, index) in enumerate(turns):
        which = "warm-up" if number == 0 else f"pass {number} of {instructions.repeats}"
        which += f", {instructions.plans[index].name}" if plans > 1 else ""

        def report(done: float, message: str, turn: int = turn, which: str = which) -> None:
            context.report(BEGINS + (compared - BEGINS) * (turn + done) / len(turns), f"{which}, {message}")

        recorder.begin(index, number)
        executors[index].run(report)
        recorder.end()
    with writing(folder):
        recorder.save(folder / f"events-{context.rank}.npz")
    if own is not None:
        own.save(folder)
    differences = []
    for number, executor in enumerate(executors):
        which = f"plan {number + 1} of {plans}" if plans > 1 else "the result"
        context.report(compared + (1 - compared) * number / plans, f"comparing {which} with the unplanned computation")
        differences.append(executor.difference())
    errors: list[float] = [0.0] * instructions.ranks
    dist.all_gather_object(errors, recorder.clock_error)
    facts = {} if own is None else {"own": own.facts()}
    if context.rank == 0:
        device = torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else "CPU"
        decisions = [getattr(executor, "decisions", []) for executor in executors]
        outcome = {"differences": differences, "device": device, "clock_error": max(errors), "decisions": decisions} | facts
        with writing(folder):
            write_atomically(folder / REPORT, json.dumps(outcome))


def executor_of(context: RankContext, plan: Plan) -> Executor:
    """The executor of a plan."""
    if context.instructions.goal is Goal.TRAINING:
        from engine.launch.step.run import StepExecutor

        return StepExecutor(context, plan)
    if plan.goal is Goal.TWO_MODELS:
        return Colocated(context, plan)
    if plan.reaction is not None:
        from engine.launch.rank.scheduled import Scheduled

        return Scheduled(context, plan)
    return Coherent(context, plan) if plan.execution == "context-coherent" else Forward(context, plan)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
