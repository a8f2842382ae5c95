"""Measure the attached devices, or a testbed: start the ranks that do it, and make a source of costs of what they found."""

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine import catalogue
from engine.catalogue.nvidia import type_of
from engine.costs.calibration import Calibration, fits_of, held_out_of
from engine.costs.measured import CollectiveTimes, GemmTimes, MeasuredTimes, MemoryTimes
from engine.errors import InputError
from engine.jobs.protocol import write_atomically
from engine.launch.compare import unreadable
from engine.launch.devices import Devices, counted, driver_version
from engine.launch.local import alone
from engine.launch.processes import run_processes, torchrun
from engine.launch.spec import MEASURER, writing
from engine.launch.sweep import COLLECTIVES, MAX_RANKS, MEASURED, REQUEST, Sweep
from engine.launch.testbed import Testbed
from engine.result import Stop

FULL, QUICK = 30.0, 5.0
"""Seconds that the measuring takes; starting the ranks comes on top."""

DTYPES = ("bf16", "fp16", "fp32")
"""That can be measured: eight-bit numbers have no plain GEMM in PyTorch."""

LONGEST_TYPE = 40
"""Letters of a GPU type's name in a cluster."""


def plan_sweep(devices: Devices, ranks: int | None = None, dtypes: Sequence[str] = (), quick: bool = False) -> Sweep:
    """What to measure on these devices. Raises InputError when it makes no sense.

    ranks: default: one per attached GPU; without GPUs as many as there are processors, two at least and four at most
    dtypes: default: bf16 and fp32 on GPUs, and fp32 without, which is what a launch computes with there
    """
    most = len(devices.gpus) or MAX_RANKS
    if ranks is None:
        ranks = len(devices.gpus) or min(max(devices.cores, 2), 4)
    if not 1 <= ranks <= most:
        why = f", one for each attached GPU ({counted(devices.gpus)})" if devices.gpus else ""
        raise InputError(f"{ranks} ranks: choose between 1 and {most}{why}")
    if unknown := [dtype for dtype in dtypes if dtype not in DTYPES]:
        raise InputError(f"GEMMs of {unknown[0]} cannot be measured; choose from {', '.join(DTYPES)}")
    usual = ("bf16", "fp32") if devices.gpus else ("fp32",)
    return Sweep(
        ranks=ranks,
        backend="nccl" if devices.gpus else "gloo",
        dtypes=tuple(dict.fromkeys(dtypes)) or usual,
        seconds=QUICK if quick else FULL,
        repeats=3 if quick else 7,
        held_out=8 if quick else 24,
    )


def calibrate(
    sweep: Sweep, folder: Path, stop: Stop, report, type: str | None = None, bed: Testbed | None = None
) -> Calibration:
    """Measure with the ranks of a sweep on this machine, or in a testbed that has been entered. Raises InputError when it
    fails, is stopped or takes too long; what the ranks printed is on standard output.

    type: the catalogue's type to take for GPUs that it does not know by name
    """
    if type is not None:
        catalogue.gpu(type)
    if bed is None:
        commands = [(torchrun(sweep.ranks, MEASURER, folder), {"GLOO_SOCKET_IFNAME": "lo"})]
    else:
        own = [sys.executable, "-m", MEASURER, str(folder)]
        commands = [(bed.inside(rank, own), bed.environment(rank)) for rank in range(bed.ranks)]
    with alone():
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / REQUEST, sweep.to_json())
        run_processes(commands, sweep.ranks, sweep.limit, folder, stop, report)
    try:
        found = json.loads((folder / MEASURED).read_text())
    except (OSError, ValueError) as error:
        raise unreadable(folder / MEASURED, error) from None
    return read_measured(found, sweep, bed.name if bed else "local", type)


def read_measured(found: Mapping[str, Any], sweep: Sweep, on: str, type: str | None = None) -> Calibration:
    """The calibration from what `engine.launch.measure` found."""
    names = {name: _type_name(name, type) for name in found["computed"]}
    spreads: dict[tuple[str, ...], float] = {}

    def points_of(key: tuple[str, ...], rows: list[list[float]]) -> tuple[tuple[float, ...], ...]:
        """(size, ..., seconds) of [size, ..., seconds, spread]."""
        ordered = sorted(row[-1] for row in rows)
        spreads[key] = ordered[len(ordered) // 2]
        return tuple(tuple(row[:-1]) for row in rows)

    gemm, memory, held_out = [], [], []
    for name, kind in names.items():
        computed = found["computed"][name]
        for dtype in sweep.dtypes:
            points = points_of(("gemm", kind, dtype), computed[f"gemm {dtype}"])
            gemm.append(GemmTimes(gpu=kind, dtype=dtype, points=points))
            shapes = tuple(tuple(row[:-1]) for row in computed[f"held out {dtype}"])
            held_out.append(GemmTimes(gpu=kind, dtype=dtype, points=shapes))
        memory.append(MemoryTimes(gpu=kind, points=points_of(("memory", kind), computed["memory"])))
    sent = {operation: points_of((operation,), found[operation]) for operation in COLLECTIVES if operation in found}
    made = datetime.now(UTC)
    versions = {"PyTorch": found["torch"], "CUDA": found["cuda"], "driver": driver_version() if found["cuda"] else None}
    versions = {name: version for name, version in versions.items() if version}
    where = "" if on == "local" else f" on {on}"
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    measured = MeasuredTimes(
        name=f"{counted(names[name] for name in found['devices'])} {made:%Y-%m-%d %H:%M}"[:80],
        origin=f"calibrated {made:%Y-%m-%d}: {sweep.ranks} rank{'s' if sweep.ranks > 1 else ''} at work on "
        f"{counted(found['devices'])}{where}, {sweep.backend.upper() if sweep.backend == 'nccl' else 'Gloo'}, {told}"[
            :300
        ],
        gemm=gemm,
        memory=memory,
        collectives=[
            CollectiveTimes(operation=operation, ranks=sweep.ranks, points=points)
            for operation, points in sent.items()
            if operation != "exchange"
        ],
    )
    exchange = sent.get("exchange", ())
    return Calibration(
        made=made.isoformat(timespec="seconds"),
        devices=tuple(found["devices"]),
        versions=versions,
        backend=sweep.backend,
        on=on,
        measured=measured,
        exchange=exchange,
        fits=fits_of(measured, exchange, spreads),
        held_out=held_out_of(measured, held_out),
    )


def _type_name(device: str, type: str | None) -> str:
    """What a cluster calls the device: the catalogue's name where it has one, or the one chosen."""
    if device == "CPU":
        return device
    return type_of(device) or type or device[:LONGEST_TYPE]
