"""Real Gloo ranks that execute training steps and report their events: `python -m tests.launch.step_ranks FOLDER`."""

import multiprocessing
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from pydantic import ConfigDict, TypeAdapter

from engine.launch.rank.context import RankContext
from engine.launch.rank.difference import Difference
from engine.launch.rank.instructions import RankInstructions, Tokens
from engine.launch.rank.layer import Weights
from engine.launch.step.run import StepExecutor
from engine.launch.step.weights import LEARNING_RATE
from engine.model import MoEModel
from engine.parallel.processes import leave_with_parent
from engine.plan import Plan
from engine.runtime.exchange.recorder import Mark, Recorder
from engine.training import TrainingStep
from tests import warm

CPU = torch.device("cpu")
CASES = "cases.json"


@dataclass(frozen=True)
class Case:
    """A step to execute. double: in 64 bits, where rounding hides nothing; slow: seconds that every all-to-all takes longer;
    probed: whether to spoil the gradients afterwards; recorded: tokens in the recording; staged:
    whether collectives pass through the host's memory, as those of a GPU do over Gloo."""

    name: str
    plan: Plan
    model: MoEModel
    step: TrainingStep
    double: bool = True
    slow: float = 0.0
    probed: bool = False
    recorded: int = 90
    staged: bool = False

    @property
    def ranks(self) -> int:
        return self.plan.placement.gpus


@dataclass(frozen=True)
class Outcome:
    """The outcome of one rank. difference: None but on rank 0; spoilt: the same with a gradient's number changed on the last
    rank, and with NaN in its place, if probed; events: kind, layer, start, end, bytes and label in the second of two steps;
    repeated: both gave the same gradients to the bit; updated: the weights have moved against the gradients."""

    difference: Difference | None
    spoilt: tuple[Difference | None, ...]
    events: list[tuple]
    repeated: bool
    updated: bool


OUTCOMES = TypeAdapter(dict[str, Outcome], config=ConfigDict(ser_json_inf_nan="constants"))


class Double(RankContext):
    """A job in 64 bits."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64

    def weights(self, model: MoEModel, layers: int) -> Weights:
        return self._weights.setdefault(0, Weights(model, layers, self.instructions.seed, self.device, torch.float64))


class Staged(Double):
    """A job with a device that passes for another one than Gloo's."""

    communication_device = torch.device("cpu", 0)


class Listener(Recorder):
    """A recorder that keeps its log."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, CPU)
        self.heard: list[tuple] = []

    def log(self, kind: str, layer: int, start: Mark, end: Mark, *, bytes: float = 0.0, label: str = "", **_) -> None:
        self.heard.append((kind, layer, start.when, end.when, bytes, label))


def recording(case: Case) -> Tokens:
    """Skewed routing, some choices missing; the last of several ranks has no token recorded."""
    rng = np.random.default_rng(5)
    shape = (case.recorded, len(case.model.moe_layers), case.model.experts)
    keys = rng.random(shape) ** (1 / np.arange(1, case.model.experts + 1))
    experts = np.argsort(-keys, axis=-1)[:, :, : case.model.experts_per_token].astype(np.int16)
    experts[rng.random(shape[:2]) < 0.05] = -1
    return Tokens(experts, rng.integers(0, max(1, case.ranks - 1), case.recorded).astype(np.int32))


def forget_sizes(executor: StepExecutor) -> None:
    """Take from the all-to-alls of real tokens what the replayed routing knows of the rows to come: an exchange has to tell."""
    operators = executor.graph.operators
    for name in {operators[executor.program.operators[task]].name for task in executor.program.sizes}:
        node = executor.nodes[name]

        def sizes(at, backward: bool, known=node.sizes) -> tuple:
            to, come = known(at, backward)
            return (to, come) if backward else (to, [])

        node.sizes = sizes


@torch.inference_mode()
def execute(case: Case, rank: int) -> Outcome:
    """Two steps on one rank, looked at from all sides."""
    instructions = RankInstructions(
        plans=(case.plan,), model=case.model, step=case.step, ranks=case.ranks, backend="gloo", limit=60
    )
    kind = Staged if case.staged else Double if case.double else RankContext
    context = kind(instructions, (recording(case),), rank, CPU, Listener(rank))
    executor = StepExecutor(context, case.plan)
    forget_sizes(executor)
    before = {name: weight.value.clone() for name, weight in executor.weights.items()}
    executor.run(lambda done, message: None)
    first = {name: weight.gradient.clone() for name, weight in executor.weights.items()}
    context.recorder.heard.clear()
    exchange = dist.all_to_all_single

    def slowly(*args, **more):
        work = exchange(*args, **more)
        return SimpleNamespace(wait=lambda: (work.wait(), time.sleep(case.slow)))

    dist.all_to_all_single = slowly
    executor.run(lambda done, message: None)
    dist.all_to_all_single = exchange
    repeated = all(torch.equal(weight.gradient, first[name]) for name, weight in executor.weights.items())
    moved = (
        before[name].to(weight.parameter.master).add(weight.gradient, alpha=-LEARNING_RATE).to(weight.value)
        for name, weight in executor.weights.items()
    )
    updated = all(torch.equal(weight.value, own) for weight, own in zip(executor.weights.values(), moved, strict=True))
    difference = executor.difference()
    gradient = next(iter(executor.weights.values())).gradient.view(-1)
    spoilt = []
    for wrong in (float(gradient[0] + 2 * gradient.abs().max()), float("nan")) if case.probed else ():
        if rank == case.ranks - 1:
            gradient[0] = wrong
        spoilt.append(executor.difference())
    return Outcome(difference, tuple(spoilt), context.recorder.heard, repeated, updated)


def run(cases: Sequence[Case], folder: Path, environment: dict[str, str], limit: float = 150.0) -> dict[str, list[Outcome]]:
    """The outcomes of all ranks by case, from processes of their own: they fork before PyTorch has any thread."""
    (folder / CASES).write_bytes(TypeAdapter(list[Case]).dump_json(list(cases), exclude_none=True))
    command = [str(warm.PYTHON), "-m", "tests.launch.step_ranks", str(folder)]
    done = subprocess.run(command, env=environment, timeout=limit, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    outcomes = {}
    for ranks in {case.ranks for case in cases}:
        parts = [OUTCOMES.validate_json((folder / f"{ranks}-{rank}.json").read_bytes()) for rank in range(ranks)]
        outcomes |= {name: [part[name] for part in parts] for name in parts[0]}
    return outcomes


def rank_main(rank: int, cases: list[Case], folder: Path) -> None:
    """One rank through all cases of its world."""
    ranks = cases[0].ranks
    leave_with_parent()
    store = f"file://{folder / f'store-{ranks}'}"
    dist.init_process_group("gloo", store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    outcomes = {case.name: execute(case, rank) for case in cases}
    (folder / f"{ranks}-{rank}.json").write_bytes(OUTCOMES.dump_json(outcomes))
    dist.destroy_process_group()


def main(folder: Path) -> None:
    cases = TypeAdapter(list[Case]).validate_json((folder / CASES).read_bytes())
    fork = multiprocessing.get_context("fork")
    for ranks in sorted({case.ranks for case in cases}):
        own = [case for case in cases if case.ranks == ranks]
        processes = [fork.Process(target=rank_main, args=(rank, own, folder), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:  # the others would wait for it; as daemons they end with this process
                sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
