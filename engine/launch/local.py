"""Run a plan on this machine: pre-flight, torchrun, and the measured timeline beside the predicted one."""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from engine.cluster import Cluster, Gpu, Node
from engine.costs import AlphaBeta, CostProfile, fit_line
from engine.errors import InputError
from engine.launch.compare import measured_timelines
from engine.launch.devices import Devices
from engine.launch.fold import fold_plan, fold_trace
from engine.launch.spec import CALIBRATION, MAX_REPEATS, POOL_STRIDE, PROGRESS, REPORT, LaunchSpec, write_spec
from engine.model import MoEModel
from engine.plan import Plan
from engine.problem import Problem
from engine.result import Stop
from engine.simulate.inference import simulate
from engine.store import data_folder
from engine.timeline import Timeline
from engine.workload import RoutingTrace, Workload

FLOP_BUDGET = 1e12
"""FLOP of one forward pass that a CPU launch replays unless told otherwise: some ten seconds on two cores."""

WORKER = "engine.launch.worker"

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
"""Largest difference from the unplanned output, relative to its largest number, that rounding alone can explain."""


@dataclass(frozen=True)
class Check:
    """One line of the pre-flight check."""

    name: str
    passed: bool
    text: str


@dataclass(frozen=True, eq=False)
class Launch:
    """A launch that is ready to run: what the ranks get, and what they are told to replay."""

    spec: LaunchSpec
    trace: RoutingTrace
    limit: float
    checks: tuple[Check, ...]

    @property
    def ready(self) -> bool:
        return all(check.passed for check in self.checks)

    def command(self, folder: Path) -> list[str]:
        """The exact command, as an argument list."""
        return [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.spec.ranks),
            "--module", WORKER, str(folder),
        ]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Run:
    """A finished launch. totals: seconds of every timed pass; difference: largest deviation from the unplanned output,
    relative to its largest number; measured is the pass of median length."""

    predicted: Timeline
    measured: Timeline
    totals: tuple[float, ...]
    difference: float
    device: str
    tokens: int
    profile: CostProfile


def prepare(
    plan: Plan, workload: Workload, model: MoEModel, devices: Devices, ranks: int | None = None,
    tokens: int | None = None, repeats: int = 3, limit: float = 900.0,
) -> Launch:  # fmt: skip
    """Fold the plan onto the ranks and check that it can run here. Raises InputError when a launch makes no sense.

    tokens: how many tokens of the recording to replay, evenly spaced (default: as many as `FLOP_BUDGET` allows).
    """
    if what := _not_launchable(plan):
        raise InputError(
            f"the plan {plan.name} has {what}, which can be simulated but not launched yet; launch a plan of one model "
            "with vanilla execution"
        )
    if not isinstance(workload, RoutingTrace):
        raise InputError(
            f"{workload.name} has no tokens to replay; a launch needs a routing log (loads and matrices can be planned "
            "and simulated)"
        )
    gpus = plan.placement.gpus
    model.check_recording(workload.layers, workload.num_experts, workload.k, workload.name)
    if plan.placement.layers != workload.layers or plan.placement.experts != workload.num_experts:
        raise InputError(
            f"the plan {plan.name} places {plan.placement.experts} experts in {plan.placement.layers} layers, but the "
            f"recording {workload.name} has {workload.num_experts} in {workload.layers}"
        )
    ranks = devices.default_ranks(gpus) if ranks is None else ranks
    if not 1 <= ranks <= gpus:
        raise InputError(f"{ranks} ranks: choose between 1 and {gpus}, the GPUs of the plan")
    backend = devices.backend(ranks)
    dtype = model.dtype if backend == "nccl" and model.dtype != "fp8" else "bf16" if backend == "nccl" else "fp32"
    model = model.model_copy(update={"dtype": dtype})
    per_token = workload.layers * workload.k * model.ffn_flops_per_token
    affordable = workload.tokens if backend == "nccl" else max(ranks, int(FLOP_BUDGET / per_token))
    replayed = min(workload.tokens, affordable if tokens is None else tokens)
    if replayed < 1:
        raise InputError("replay at least one token")
    if not 1 <= repeats <= MAX_REPEATS:
        raise InputError(f"{repeats} timed passes: choose between 1 and {MAX_REPEATS}")
    if not limit > 0:  # a NaN compares false
        raise InputError(f"the time limit must be above 0 s, not {limit:g}")
    spec = LaunchSpec(plan=fold_plan(plan, ranks), model=model, ranks=ranks, backend=backend, repeats=repeats)
    trace = fold_trace(workload, gpus, ranks).spread(replayed)
    return Launch(spec, trace, limit, tuple(_checks(spec, trace, devices, gpus)))


def _not_launchable(plan: Plan) -> str:
    """What of a plan no worker executes yet; empty when one does."""
    if plan.placement_b is not None:
        return "two colocated models"
    if plan.priority is not None:
        return "a training step"
    return "context-coherent execution" if plan.execution != "vanilla" else ""


def _checks(spec: LaunchSpec, trace: RoutingTrace, devices: Devices, gpus: int):
    share = f"{gpus} GPUs of the plan" if spec.ranks == gpus else f"{gpus} GPUs of the plan, folded onto"
    yield Check("Ranks", True, f"{share} {spec.ranks} ranks" if spec.ranks != gpus else f"{share}, one rank each")
    where = "one GPU per rank" if spec.backend == "nccl" else f"CPU, {devices.cores} cores for {spec.ranks} ranks"
    yield Check("Backend", True, f"{spec.backend.upper() if spec.backend == 'nccl' else 'Gloo'}: {where}")
    model = spec.model
    held = float(spec.plan.placement.slots.max()) * model.bytes_per_expert
    pool = model.bytes_per_expert + POOL_STRIDE * trace.layers * model.experts * model.bytes_per_number
    activations = 6.0 * trace.tokens * (trace.k + 1) * model.bytes_per_token / spec.ranks
    rank_bytes = held + pool + activations
    need = rank_bytes if spec.backend == "nccl" else rank_bytes * spec.ranks
    room = min(devices.memory) if spec.backend == "nccl" else devices.host_memory
    yield Check(
        "Memory", need < 0.8 * room,
        f"{rank_bytes / 2**30:.2f} GiB per rank, {need / 2**30:.2f} of {room / 2**30:.1f} GiB"
        + ("" if need < 0.8 * room else ": replay fewer tokens or use fewer ranks"),
    )  # fmt: skip
    yield Check("Tokens", True, f"{trace.tokens:,} of the recording, {spec.repeats} timed passes after a warm-up")
    yield Check("Numbers", True, f"{model.dtype}, random weights, routing replayed; attention is not run")


def run(
    launch: Launch, folder: Path, stop: Stop, report, start: Callable[..., None] | None = None,
    foretell: Callable[..., Timeline] | None = None,
) -> Run:  # fmt: skip
    """Run a prepared launch in `folder` and read its measurements. Raises InputError when it fails or is stopped, with
    the reason; what the ranks printed is on standard output, which a job keeps as its log.

    start: runs the ranks to their end, given launch, folder, stop and report (default: torchrun on this machine);
    foretell: the prediction, given the launch, the profile fitted at its start and the points it was fitted to, as
    `calibrate` gives them (default: `predict` from the first two).
    """
    failed = [check for check in launch.checks if not check.passed]
    if failed:
        raise InputError(f"pre-flight: {failed[0].name.lower()}: {failed[0].text}")
    with _alone():
        write_spec(folder, launch.spec, launch.trace.experts, launch.trace.source_rank)
        (start or _torchrun)(launch, folder, stop, report)
    outcome = json.loads((folder / REPORT).read_text())
    tolerance = TOLERANCE[launch.spec.model.dtype]
    # Written so that a NaN, which compares false, fails too.
    if not outcome["difference"] <= tolerance:
        raise InputError(
            f"the planned output differs from the unplanned one by {outcome['difference']:.2g} of its largest number "
            f"(allowed: {tolerance:g}); the run is not valid"
        )
    measured = json.loads((folder / CALIBRATION).read_text())
    profile = fit_profile(measured, outcome["device"], launch.spec, len(os.sched_getaffinity(0)))
    timelines = measured_timelines(folder, launch.spec.ranks, outcome["device"])
    totals = tuple(timeline.total for timeline in timelines)
    middle = int(np.argsort(totals)[len(totals) // 2])
    predicted = predict(launch, profile) if foretell is None else foretell(launch, profile, measured)
    return Run(
        predicted, timelines[middle], totals, outcome["difference"], outcome["device"],
        launch.trace.tokens, profile,
    )  # fmt: skip


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold the data folder's only place for a launch: two at once would measure each other. The system gives it up when
    the process ends, however it ends. Raises InputError when another launch is running."""
    with (data_folder() / "launch.lock").open("w") as place:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError("another launch is running on this machine; wait for it or stop it") from None
        yield


def fit_profile(measured: dict[str, list], device: str, spec: LaunchSpec, cores: int) -> CostProfile:
    """The α–β profile of this machine, which has `cores` processors, from the sweep at the start of a launch."""
    lines = {name: fit_line(*np.array(points).T) for name, points in measured.items() if points}
    return CostProfile(
        name=f"{spec.ranks} ranks on {device}",
        origin="measured at the start of the launch, all ranks working",
        gemm={device: lines["gemm"]},
        gate={device: lines["gate"]},
        memory={device: lines["memory"]},
        network=lines.get("network"),
        ranks=spec.ranks,
        cores=cores if spec.backend == "gloo" else spec.ranks,
    )


def predict(
    launch: Launch, profile: CostProfile, bandwidth: np.ndarray | None = None, latency: float = 0.0
) -> Timeline:
    """The simulated timeline of exactly what the ranks ran, with the costs measured on their machine.

    bandwidth: float64[rank] bytes/s in each direction, latency: seconds; they count where the profile has no network.
    """
    device = next(iter(profile.gemm))
    rates = np.ones(launch.spec.ranks) if bandwidth is None else bandwidth

    def gpu(rate: float) -> Gpu:
        # Of a GPU only the type, the memory and at most the bandwidths are read: times come from the profile.
        return Gpu(
            type=device,
            memory=2.0**60,
            memory_bandwidth=1,
            flops_fp32=1,
            flops_fp16=1,
            send_bandwidth=rate,
            receive_bandwidth=rate,
        )

    nodes = tuple(Node(name=f"rank {index}", gpus=(gpu(rate),)) for index, rate in enumerate(rates.tolist()))
    here = Cluster(name="this machine", nodes=nodes, latency=latency)
    timeline = simulate(launch.spec.plan, Problem(launch.trace, here, launch.spec.model, AlphaBeta(profile)))
    names = tuple(f"rank {index}" for index in range(launch.spec.ranks))
    return Timeline(timeline.events, names, timeline.source, timeline.cost_source)


def _torchrun(launch: Launch, folder: Path, stop: Stop, report) -> None:
    run_processes([(launch.command(folder), {"GLOO_SOCKET_IFNAME": "lo"})], launch, folder, stop, report)


def run_processes(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], launch: Launch, folder: Path, stop: Stop, report
) -> None:
    """Run the ranks of a launch, or what starts them, until all have ended well. Raises InputError as soon as one fails,
    when the launch is stopped, and when it takes too long. Nothing is left running, also when this process dies.

    commands: the argument list of every process, and what it needs in its environment beside what all need.
    """
    shared = os.environ | {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // launch.spec.ranks)),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TMPDIR": str(folder),  # torchrun leaves a folder for its logs behind
    }
    root = Path(__file__).parent.parent.parent
    deadline = time.monotonic() + launch.limit
    errors: list[str] = []
    processes: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    try:
        for command, own in commands:
            process = subprocess.Popen(
                command, cwd=root, env=shared | own, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace", preexec_fn=_die_with_parent,
            )  # fmt: skip
            processes.append(process)
            readers.append(threading.Thread(target=_relay, args=(process.stdout, report, errors), daemon=True))
            readers[-1].start()
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            if stop():
                raise InputError("the launch was ended: stopped")
            if time.monotonic() > deadline:
                raise InputError(f"the launch was ended: not finished after {launch.limit:g} s")
            time.sleep(0.05)
    finally:
        _end(processes, folder)
        for reader in readers:
            reader.join(5.0)
    if failed := [code for code in codes if code]:
        raise InputError(f"the ranks ended with exit code {failed[0]}; {errors[0] if errors else 'see the log'}")


def _end(processes: Sequence[subprocess.Popen[str]], folder: Path) -> None:
    """Leave nothing of a launch running: torchrun gives its ranks sessions of their own, and a rank that is still
    starting does not notice that torchrun was killed."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    patience = time.monotonic() + 1.0
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, patience - time.monotonic()))
        process.kill()
        process.wait()
    for rank in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if {WORKER, str(folder)} <= set(rank.cmdline()):
                rank.kill()


def _relay(stream, report, errors: list[str]) -> None:
    """Pass the ranks' progress lines on, print everything else, and collect the lines that name an error."""
    for line in stream:
        told = _progress(line)
        if told is not None:
            report(told["done"], told["message"], None, None)
        else:
            print(line, end="", flush=True)
            if "Error" in line:
                errors.append(line.strip())


def _progress(line: str) -> dict[str, Any] | None:
    """What a progress line says; None for any other, also for one that another rank's output has run into."""
    if not line.startswith(PROGRESS):
        return None
    with contextlib.suppress(ValueError):
        return json.loads(line.removeprefix(PROGRESS))
    return None


def _die_with_parent() -> None:
    """Ask Linux to end this process when the job that started it dies, so that no ranks are left behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 = PR_SET_PDEATHSIG
