"""Calibration: times of a sweep against GEMMs that are measured directly. The tests know only its shapes: CUDA's events, by
which GEMMs are timed here, need a GPU."""

import itertools
import math
import tempfile
from pathlib import Path

import numpy as np
import torch

from engine.catalogue import model_presets
from engine.cluster import Gpu
from engine.costs import Profiled
from engine.costs.device_profile import DeviceProfile
from engine.files import write_atomically
from engine.launch.calibration.calibrate import calibrate, plan_sweep
from engine.launch.places.devices import attached
from engine.launch.running.local import temporary_folder
from engine.result import never
from engine.runtime.experts import TORCH_DTYPE
from engine.systems.base import silent
from engine.units import share
from tests.gpu.table import Finding, needs

WITHIN = 0.1
"""Mean error of calibrated GEMM times that is allowed."""
ROWS = (24, 200, 700, 3000)
"""Sizes of the GEMMs that are measured directly: none is among a calibration's."""
READINGS, READING_SECONDS = 7, 2e-3


def calibrate_quickly() -> list[Finding]:
    """The short sweep, and how far its lines are off on shapes that it did not fit."""
    texts = []
    for left in calibrated(quick=True).held_out:
        figures = f"mean {share(left.errors.mean())}, worst {share(left.errors.max())}"
        texts.append(f"{left.dtype} on {left.gpu}: held-out shapes {figures}")
    return [Finding("; ".join(texts))]


def gemms() -> list[Finding]:
    """Times of a full calibration, read back from its file, against CUDA events round GEMMs of known models: experts and
    routers, by a stopwatch that shares nothing with the calibration's."""
    torch.set_float32_matmul_precision("highest")  # as the ranks do
    profile = calibrated(quick=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        write_atomically(path, profile.to_json())
        cost = Profiled(DeviceProfile.from_json(path.read_text(encoding="utf-8"), path.name))
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
    return [Finding("; ".join(figures))]


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
    """Median seconds of one of several GEMMs, one after another, with weights that together do not fit in the GPU's cache."""
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
    return Gpu(type=kind, memory=1, memory_bandwidth=1, flops_fp32=1, flops_fp16=1, send_bandwidth=1, receive_bandwidth=1)
