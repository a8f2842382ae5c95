"""Seconds that a system, a launch and a running job are likely to take: from measured runs, of this machine if there are some.

Switchyard ships with runs of `tests/benchmarks/bench_runtimes.py`, through which a power law in layers, experts and GPUs is
laid for each system. Runs of this machine, which jobs note in the data folder, give the factor by which it is faster or slower
here. A running job is timed by its reports of the share done.
"""

import contextlib
import functools
import json
import math
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
from pydantic import Field, JsonValue, TypeAdapter

from engine.files import append, data_folder, tail, write_atomically
from engine.goal import Goal
from engine.jobs.protocol import first_progress, whole_lines
from engine.jobs.runner import Job, State
from engine.parallel.processes import processors
from engine.problem import Problem
from engine.schema import Frozen
from engine.systems.base import System
from engine.units import digits, ratio
from engine.workload import digest_of

if TYPE_CHECKING:
    from engine.launch.preparation.launch import PreparedLaunch

SHIPPED = Path(__file__).with_name("runtimes.json")
NOTES = "runtimes.jsonl"
MOST_NOTES = 2**18
"""Bytes of the notes in the data folder, of which the newest quarter is kept when there are more."""
STEEPEST = 3.0
"""The largest power of the law: no known system is steeper than cubic, and a few scattered points must not say so."""
NEAREST = 3
"""Runs of this machine that count, the ones nearest in size."""
ALIKE = 1.0
"""Distance in size within which a quick run still counts: three times as large in one number."""
QUICK = 1.0
"""Seconds under which a run is mostly start-up, which says nothing of larger sizes."""


class Run(Frozen):
    """One measured run.

    rows: True if tokens shared rows (see `Travel`), which are counted token by token
    mixed: True if the cluster has GPUs of several types, for which a search can take many times as long
    limit: seconds that the system was given; None: it takes no limit
    machine: see `machine`
    """

    goal: Goal
    system: str
    rows: bool = False
    mixed: bool = False
    layers: int = Field(ge=1)
    experts: int = Field(ge=1)
    gpus: int = Field(ge=1)
    limit: float | None = Field(default=None, gt=0)
    seconds: float = Field(gt=0)
    machine: str = ""

    @property
    def kind(self) -> tuple[Goal, str, bool, bool]:
        """The key of runs that can be compared."""
        return self.goal, self.system, self.rows, self.mixed

    @property
    def size(self) -> np.ndarray:
        """float64[3]: logarithms of layers, experts and GPUs."""
        return np.log([self.layers, self.experts, self.gpus])


def run_of(problem: Problem, system: System, options: Mapping[str, JsonValue], seconds: float) -> Run:
    """A run of a system on a problem that took so many seconds."""
    return Run(
        goal=problem.goal,
        system=system.name,
        rows=problem.travel is not None and problem.travel.unit != "copies",
        mixed=len({gpu.type for gpu in problem.cluster.gpus}) > 1,
        layers=problem.workload.layers,
        experts=problem.model.experts,
        gpus=len(problem.cluster.gpus),
        limit=options.get("time_limit", _usual_limit(system)),
        seconds=max(seconds, 1e-4),
        machine=machine(),
    )


def note(run: Run) -> None:
    """Note a run of this machine. If it cannot be written, estimates are those of other runs."""
    with contextlib.suppress(OSError):
        path = data_folder() / NOTES
        append(path, f"{run.to_json()}\n".encode())
        if path.stat().st_size > MOST_NOTES:
            newest = tail(path)
            write_atomically(path, newest[newest.find(b"\n") + 1 :])


def noted() -> tuple[Run, ...]:
    """The runs of this machine, oldest first."""
    path = data_folder() / NOTES
    try:
        about = path.stat()
    except OSError:
        return ()
    return _noted(path, about.st_mtime_ns, about.st_size)


@functools.lru_cache(maxsize=4)
def _noted(path: Path, written: int, size: int) -> tuple[Run, ...]:
    return tuple(run for run in whole_lines(Run, tail(path)) if run.machine == machine())


def estimate(problem: Problem, system: System, options: Mapping[str, JsonValue]) -> float | None:
    """Seconds that a system is likely to take on a problem; None for one that was never measured."""
    wanted = run_of(problem, system, options, 1.0)
    law = law_of(wanted.kind) or law_of(wanted.model_copy(update={"mixed": False}).kind)
    same = [run for run in reversed(noted()) if run.kind == wanted.kind]
    near = sorted(same, key=lambda run: _apart(run, wanted))[:NEAREST]  # of those as near the newest
    if law is None:  # of somebody's own system only the same size can be told
        near = [run for run in near if _apart(run, wanted) == 0]
        return float(np.median([run.seconds for run in near])) if near else None
    usual = _usual_limit(system)
    near = [run for run in near if _apart(run, wanted) <= ALIKE or law.seconds(run, usual) >= QUICK]
    factors = [run.seconds / law.seconds(run, usual) for run in near]
    return law.seconds(wanted, usual) * (float(np.median(factors)) if factors else 1.0)


def _apart(run: Run, other: Run) -> float:
    """The distance of two sizes; 1: three times as large in one of its numbers."""
    return float(np.abs(run.size - other.size).sum())


def expected(seconds: Sequence[float | None]) -> float | None:
    """Seconds that a job takes with systems that take so long each, side by side on this machine's processors; None where one
    was never measured."""
    if not seconds or any(part is None for part in seconds):
        return None
    return max(*seconds, sum(seconds) / min(processors(), len(seconds)))


def _usual_limit(system: System) -> float | None:
    field = system.options.model_fields.get("time_limit")
    return None if field is None else float(field.default)


@dataclass(frozen=True, eq=False)
class Law:
    """powers: float64[4], logarithm of the seconds of one layer, expert and GPU, and the powers of these. runs: those that it
    is laid through; searches do not keep to a power law, so between them it is bent to meet each."""

    powers: np.ndarray
    runs: tuple[Run, ...]

    @classmethod
    def through(cls, runs: Sequence[Run]) -> Self:
        """The law that lies best, in logarithms."""
        from scipy.optimize import lsq_linear

        sizes = np.array([[1.0, *run.size] for run in runs])
        limits = ([-np.inf, 0.0, 0.0, 0.0], [np.inf, STEEPEST, STEEPEST, STEEPEST])
        return cls(lsq_linear(sizes, np.log([run.seconds for run in runs]), limits).x, tuple(runs))

    def seconds(self, wanted: Run, usual: float | None) -> float:
        """Seconds of a run. usual: the time limit of the law's runs; a run that is cut by one limit is cut by another."""
        weights = np.array([1 / (1e-6 + _apart(run, wanted) ** 2) for run in self.runs])
        bends = [math.log(run.seconds) - self._straight(run) for run in self.runs]
        seconds = math.exp(self._straight(wanted) + float(weights @ bends / weights.sum()))
        if usual is None or wanted.limit is None:
            return seconds
        beyond = max(0.0, seconds - usual)
        return beyond + (wanted.limit if beyond else min(seconds, wanted.limit))

    def _straight(self, run: Run) -> float:
        return float(self.powers @ [1.0, *run.size])


@functools.cache
def shipped() -> tuple[Run, ...]:
    """The runs that ship with Switchyard."""
    return TypeAdapter(tuple[Run, ...]).validate_python(json.loads(SHIPPED.read_bytes())["runs"])


@functools.cache
def law_of(kind: tuple[Goal, str, bool, bool]) -> Law | None:
    """That of the shipped runs of a kind, see `Run.kind`; None where there are none."""
    runs = [run for run in shipped() if run.kind == kind]
    return Law.through(runs) if runs else None


@functools.cache
def machine() -> str:
    """The name of this machine: its processors. The names of containers change whenever one is started."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{processors()} × {line.partition(':')[2].strip()}"
    return f"{processors()} × {platform.processor() or platform.machine()}"


def seconds_left(job: Job) -> float | None:
    """Seconds until a job is likely to end; 0 where it takes longer than its reports let expect. None while nothing can be
    said: it waits, is stopped or has ended, or has not come far enough."""
    latest = job.progress
    if latest is None or job.state is not State.RUNNING or latest.done is None or latest.done >= 1:
        return None
    first = first_progress(job.folder) or latest
    so_far, done = latest.time - first.time, latest.done - (first.done or 0.0)
    if latest.expected is not None:
        # A job that has done nothing yet goes by the time that it expected; the further it is, the more its own pace counts.
        yet = (1 - latest.done) * ((1 - latest.done) * latest.expected + so_far)
    elif done > 0 and so_far > 0:
        yet = (1 - latest.done) * so_far / done
    else:
        return None
    return max(0.0, yet - (time.time() - latest.time))


class Work(Frozen):
    """The work of a launch on this machine.

    place: the machine and the devices
    shape: digest of all that the times depend on, but for the plans themselves and the number of passes
    flops: of one pass of all plans
    turns: passes of each plan, the warm-up among them
    """

    place: str
    shape: str
    ranks: int = Field(ge=1)
    flops: float = Field(gt=0)
    turns: int = Field(ge=1)


class Took(Frozen):
    """Seconds of a finished launch: until the first pass, of all passes, and of the comparison with its report."""

    work: Work
    start: float = Field(ge=0)
    passes: float = Field(ge=0)
    check: float = Field(ge=0)


class Estimate(NamedTuple):
    """Seconds that a launch is likely to take, see `Took`. how: the source, in words; least: True if it takes longer, as only
    its products are counted."""

    start: float
    passes: float
    check: float
    how: str
    least: bool = False

    @property
    def seconds(self) -> float:
        return self.start + self.passes + self.check


def work_of(launch: "PreparedLaunch") -> Work | None:
    """The work of a launch; None on a cluster, where it waits for its turn."""
    from engine.launch.step.sizes import step_flops  # pages that show the time left need none of it

    own = launch.instructions
    if launch.destination is not None:
        return None
    if own.step is not None:
        flops = own.ranks * sum(step_flops(own.model, own.step, plan) for plan in own.plans)
    elif own.own is not None:
        per_token = len(own.model.moe_layers) * own.model.experts_per_token * own.model.ffn_flops_per_token
        flops = len(own.plans) * launch.tokens * per_token
    else:
        sizes = zip(launch.workloads, (own.model, own.model_b), strict=False)
        passed = sum(trace.tokens * trace.layers * trace.k * model.ffn_flops_per_token for trace, model in sizes)
        flops = len(own.plans) * passed
    where = "testbed" if launch.testbed is not None else "local"
    what = own.goal if own.own is None else "own model"
    place = " · ".join((machine(), where, own.backend, f"{own.gpus} GPUs", what))
    alone = own.model_copy(update={"plans": (), "repeats": 1, "limit": 1.0}).to_json()
    shape = digest_of(str(alone), len(own.plans), *(trace.tokens for trace in launch.workloads if own.step is None))
    return Work(place=place, shape=shape, ranks=own.ranks, flops=flops, turns=own.repeats + 1)


def expect(launch: "PreparedLaunch", past: Iterable[Took]) -> Estimate | None:
    """Seconds that a launch is likely to take: as long as the last one of its shape here; else by its FLOP from the most alike
    one; without any, at least as long as a product of matrices says that is timed now. None on a cluster, and on GPUs before
    the first launch.

    past: the launches that have ended, newest first
    """
    own = work_of(launch)
    if own is None:
        return None
    here = [took for took in past if took.work.place == own.place]
    same = next((took for took in here if took.work.shape == own.shape), None)
    if like := same or min(here, key=lambda took: _unlike(took.work, own), default=None):
        more = own.flops / like.work.flops
        how = "from the last launch of this shape" if same else f"from the most similar launch so far, {ratio(more)} its FLOP"
        start = like.start * own.ranks / like.work.ranks  # ranks that start share the processors
        return Estimate(start, like.passes * more * own.turns / like.work.turns, like.check * more, how)
    if launch.instructions.gpus:
        return None
    model = launch.instructions.model
    rate = _flops_per_second(min(model.d_model, WIDEST), min(model.d_ff, WIDEST))
    work, pace = digits(own.flops * (own.turns + 1) / 1e9), digits(rate / 1e9)
    how = f"{work} GFLOP at {pace} GFLOP/s, timed just now; the first launch here will tell more"
    return Estimate(0.0, own.flops * own.turns / rate, own.flops / rate, how, least=True)


def _unlike(work: Work, other: Work) -> float:
    return abs(math.log(work.flops / other.flops)) + abs(math.log(work.ranks / other.ranks))


WIDEST, ROWS = 2048, 256
"""Most rows and columns of the matrices that are timed, and the rows multiplied with them."""


@functools.lru_cache(maxsize=16)
def _flops_per_second(inner: int, outer: int) -> float:
    """FLOP/s of this machine's processors in a product of matrices in 32 bits, the best of a few."""
    rows, weights = np.ones((ROWS, inner), np.float32), np.ones((inner, outer), np.float32)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        rows @ weights
        seconds.append(time.perf_counter() - begin)
    return 2.0 * ROWS * inner * outer / min(seconds)
