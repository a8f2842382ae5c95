"""All that needs a GPU, in one go: `python -m tests.gpu.check` (`make gpu`), on any machine with NVIDIA GPUs.

Prints a short table: what was tried, whether it holds, and the figure. Exit code 1 when something does not hold; 0 otherwise,
also on a machine without a GPU, where there is nothing to check. Takes some minutes.
"""

import contextlib
import itertools
import math
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from engine.catalogue import cluster_presets, gpu_types, model_presets
from engine.cluster import Gpu
from engine.costs import Datasheet, Profiled
from engine.costs.device_profile import DeviceProfile
from engine.files import write_atomically
from engine.formats import read_costs, read_model, read_workload
from engine.formats.nvidia_topo import read_topology
from engine.formats.source import one_line
from engine.launch.calibration.calibrate import calibrate, plan_sweep
from engine.launch.places.devices import Devices, attached, cluster_of, counted, driver_version
from engine.launch.preparation.launch import Launch
from engine.launch.preparation.prepare import prepare
from engine.launch.preparation.prepared import PreparedLaunch
from engine.launch.rank.layer import TORCH_DTYPE
from engine.launch.running.local import run_here, temporary_folder
from engine.model import MoEModel
from engine.problem import make_problem
from engine.result import never
from engine.systems import SYSTEMS, TRAINING, run
from engine.systems.base import silent
from engine.training import TrainingStep, balanced_load
from engine.units import seconds, share

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
WITHIN = 0.1
"""Mean error of calibrated GEMM times that is allowed."""
ROWS = (24, 200, 700, 3000)
"""Of the GEMMs that are measured directly: none is among a calibration's."""
READINGS, READING_SECONDS = 7, 2e-3
TOKENS = 4096
STEP_MODEL = MoEModel(
    name="small", layers=4, dense_layers=(0, 2), experts=8, experts_per_token=2, d_model=512, d_ff=1024, ffn_matrices=2
)
STEP = TrainingStep(batch=8, sequence_length=128, heads=8, dense_d_ff=2048, vocabulary=5000, gate="top-k")


class CheckError(Exception):
    """What does not hold, for a person."""


def needs(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CheckError(otherwise)


def discovery() -> str:
    """NVML, PyTorch and the catalogue see the same GPUs, and a cluster can be drawn of them."""
    devices = attached()
    needs(
        len(devices.gpus) == torch.cuda.device_count(), f"PyTorch sees {torch.cuda.device_count()}: {devices.summary}"
    )
    needs(driver_version() is not None, "NVML does not tell the driver's version")
    drawn = cluster_of(devices.machine, stand_in(devices))
    needs(len(drawn.cluster.gpus) == len(devices.machine), f"drawn were {len(drawn.cluster.gpus)}")
    memory = min(devices.memory) / 2**30
    return f"{counted(devices.gpus)}, {memory:.0f} GiB, driver {driver_version()}, CUDA {torch.version.cuda}"


def topology() -> str:
    """What nvidia-smi prints of this machine is read as the cluster that NVML shows."""
    program = shutil.which("nvidia-smi")
    needs(program is not None, "there is no nvidia-smi here")
    printed = [
        subprocess.run([program, *arguments], capture_output=True, text=True, check=True, timeout=60).stdout
        for arguments in (["-L"], ["topo", "-m"])
    ]
    devices = attached()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "topology.txt"
        path.write_text("".join(printed), encoding="utf-8")
        drawn = read_topology(path, stand_in(devices))
    seen = cluster_of(devices.machine, stand_in(devices)).cluster
    needs(
        [gpu.type for gpu in drawn.cluster.gpus] == [gpu.type for gpu in seen.gpus],
        f"read were {counted(gpu.type for gpu in drawn.cluster.gpus)}, NVML shows {counted(gpu.type for gpu in seen.gpus)}",
    )
    return counted(gpu.type for gpu in drawn.cluster.gpus)


def stand_in(devices: Devices) -> str | None:
    """A type of the catalogue for GPUs that it does not know: their rates are not what is checked."""
    return None if all(gpu.type for gpu in devices.machine) else next(iter(gpu_types()))


def launch_alone() -> str:
    """A plan on one rank, over NCCL."""
    return launched(attached(), 1, "nccl")


def launch_shared() -> str:
    """A plan on four ranks that share one GPU, over Gloo."""
    with only_first_gpu() as devices:
        return launched(devices, 4, "gloo")


def launched(devices: Devices, ranks: int, backend: str) -> str:
    """The sample's plan, on a model wide enough to give a GPU some work; its output is compared with the unplanned one."""
    model = read_model(SAMPLES / "tiny-moe-alpha.json").model_copy(update={"d_model": 1024, "d_ff": 2048})
    trace = read_workload(SAMPLES / "tiny-moe" / "alpha-code.npz")
    problem = make_problem(trace, cluster_presets()["mixed-8"].cluster, model, Datasheet())
    plan = run(SYSTEMS["aurora"], problem, {"order": "matched"}).result.solution
    return outcome_of(prepare(Launch((plan,), trace, model, ranks=ranks, tokens=TOKENS), devices), devices, backend)


def step_alone() -> str:
    """A training step as Lancet plans it, on one rank, over NCCL."""
    return stepped(attached(), 1, "nccl")


def step_shared() -> str:
    """The same on two ranks that share one GPU, over Gloo."""
    with only_first_gpu() as devices:
        return stepped(devices, 2, "gloo")


def stepped(devices: Devices, ranks: int, backend: str) -> str:
    """A planned training step; its gradients are compared with those of the unplanned one."""
    cluster = cluster_presets()["hgx-h100-8"].cluster
    problem = make_problem(balanced_load(STEP_MODEL), cluster, STEP_MODEL, Datasheet(), step=STEP)
    plan = run(TRAINING["lancet"], problem).result.solution
    return outcome_of(
        prepare(Launch((plan,), problem.workload, STEP_MODEL, ranks=ranks, step=STEP), devices), devices, backend
    )


def outcome_of(prepared: PreparedLaunch, devices: Devices, backend: str) -> str:
    """Run a launch of one plan; what it computed is compared with the unplanned computation there."""
    needs(prepared.instructions.backend == backend, f"the backend is {prepared.instructions.backend}")
    needs(prepared.instructions.device == "cuda" or not devices.gpus, "the ranks compute on the CPU")
    with temporary_folder() as folder:
        finished = run_here(prepared, folder, never, silent)
    (run,) = finished.runs
    return (
        f"{run.plan.name}, {finished.tokens:,} tokens: {seconds(run.measured.total)} (predicted "
        f"{seconds(run.predicted.total)}), differs from the unplanned by {run.difference:.1g}"
    )


@contextlib.contextmanager
def only_first_gpu() -> Iterator[Devices]:
    """Inside, ranks that are started see one GPU: these are the devices."""
    devices = attached()
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = (before or "0").split(",")[0]
    try:
        yield replace(devices, gpus=devices.gpus[:1], memory=devices.memory[:1])
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def calibrate_quickly() -> str:
    profile = calibrated(quick=True)
    return "; ".join(
        f"{held_out.dtype} on {held_out.gpu}: held-out shapes mean {share(held_out.errors.mean())}, "
        f"worst {share(held_out.errors.max())}"
        for held_out in profile.held_out
    )


def gemms() -> str:
    """Times of a full calibration, read back from its file, against CUDA events round GEMMs of known models: experts and
    routers, by a stopwatch that shares nothing with the calibration's."""
    profile = calibrated(quick=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        write_atomically(path, profile.to_json())
        cost = Profiled(read_costs(path))
    torch.set_float32_matmul_precision("highest")  # as the ranks do
    device, figures, failed = torch.device("cuda", 0), [], []
    gpu = stood_for(profile.measured.gemm[0].gpu)
    for gemm in profile.measured.gemm:
        if gemm.gpu != gpu.type:
            continue  # another type of this machine
        shapes = [(m, n, k) for m in ROWS for n, k in model_shapes()]
        direct = np.array([seconds_of_gemm(m, n, k, TORCH_DTYPE[gemm.dtype], device) for m, n, k in shapes])
        predicted = np.array([float(cost.gemm(gpu, m, n, k, gemm.dtype)) for m, n, k in shapes])
        errors = np.abs(predicted / direct - 1)
        worst = shapes[errors.argmax()]
        figures.append(
            f"{gemm.dtype}: mean {share(errors.mean())}, {share((errors <= WITHIN).mean())} of {len(shapes)} shapes within "
            f"{share(WITHIN)}, worst {share(errors.max())} at m, n, k = {worst}"
        )
        if errors.mean() > WITHIN:
            failed.append(gemm.dtype)
    needs(not failed, "; ".join(figures))
    return "; ".join(figures)


def calibrated(quick: bool) -> DeviceProfile:
    with temporary_folder() as folder:
        return calibrate(plan_sweep(attached(), quick=quick), folder, never, silent)


def model_shapes() -> list[tuple[int, int]]:
    """(n, k) of the experts' two GEMMs and of the router, of every model of the catalogue."""
    shapes = set()
    for preset in model_presets().values():
        model = preset.model
        shapes |= {((model.ffn_matrices - 1) * model.d_ff, model.d_model), (model.d_model, model.d_ff)}
        shapes.add((model.experts, model.d_model))
    return sorted(shapes)


def seconds_of_gemm(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> float:
    """Median seconds of one of several GEMMs, one after another, whose weights together do not fit in the GPU's cache."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    copies = min(64, max(2, math.ceil(2 * cache / (n * k * dtype.itemsize))))
    weights = [torch.randn((k, n), dtype=dtype, device=device) for _ in range(copies)]
    x = torch.randn((m, k), dtype=dtype, device=device)
    turns = itertools.cycle(weights)

    def reading(times: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(times):
            torch.mm(x, next(turns))
        end.record()
        torch.cuda.synchronize(device)
        return begin.elapsed_time(end) / 1e3 / times

    reading(3)
    times = max(3, math.ceil(READING_SECONDS / reading(3)))
    return float(np.median([reading(times) for _ in range(READINGS)]))


def stood_for(kind: str) -> Gpu:
    """A GPU of a type of which nothing else is read."""
    return Gpu(
        type=kind, memory=1, memory_bandwidth=1, flops_fp32=1, flops_fp16=1, send_bandwidth=1, receive_bandwidth=1
    )


CHECKS: Mapping[str, Callable[[], str]] = {
    "GPUs found (NVML, PyTorch)": discovery,
    "nvidia-smi topo -m": topology,
    "launch, 1 rank, NCCL": launch_alone,
    "launch, 4 ranks on one GPU, Gloo": launch_shared,
    "training step, 1 rank, NCCL": step_alone,
    "training step, 2 ranks on one GPU, Gloo": step_shared,
    "calibrate --quick": calibrate_quickly,
    "calibrated GEMMs against direct ones": gemms,
}


def main(checks: Mapping[str, Callable[[], str]] = CHECKS) -> int:
    """Run every check, whatever becomes of the others; returns the exit code."""
    if not torch.cuda.is_available():
        print("There is no GPU here that PyTorch can use, so there is nothing to check. " + "; ".join(attached().notes))
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("SWITCHYARD_DATA")
        os.environ["SWITCHYARD_DATA"] = folder
        try:
            for name, check in checks.items():
                print(f"{name} ...", file=sys.stderr, flush=True)
                rows.append([name, *tried(check, Path(folder) / "log.txt")])
        finally:
            if before is None:
                del os.environ["SWITCHYARD_DATA"]
            else:
                os.environ["SWITCHYARD_DATA"] = before
    width = max(len(name) for name in checks)
    for name, result, figure in rows:
        print(f"{result:4}  {name:<{width}}  {figure}")
    return int(any(result != "ok" for _, result, _ in rows))


def tried(check: Callable[[], str], log: Path) -> tuple[str, str]:
    """("ok" or "FAIL", figure or reason). What ranks printed is shown when the check fails."""
    try:
        with log.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
            return "ok", check()
    except Exception as error:
        if not isinstance(error, CheckError):
            print(log.read_text(encoding="utf-8", errors="replace")[-4000:], file=sys.stderr)
            traceback.print_exc()
        return "FAIL", one_line(str(error) or type(error).__name__)


if __name__ == "__main__":
    sys.exit(main())
