"""Measure the attached devices, or a testbed: start the ranks that do it, and make a source of costs of their measurements."""

import contextlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine import catalogue
from engine.catalogue.links import type_of
from engine.costs.device_profile import DeviceProfile, fits_of, held_out_of
from engine.costs.measured import CollectiveTimes, GemmTimes, MeasuredTimes, MemoryTimes
from engine.errors import InputError
from engine.files import make_folder, write_atomically
from engine.launch.calibration.sweep import COLLECTIVES, MAX_RANKS, MEASURED, REQUEST, Sweep
from engine.launch.places.devices import Devices, counted, driver_version
from engine.launch.places.testbed import Testbed
from engine.launch.rank.instructions import writing
from engine.launch.results.run_files import read_json
from engine.launch.running.local import alone
from engine.launch.running.processes import SWEEP_RANK, commands_of, run_processes
from engine.result import Stop

FULL, QUICK = 30.0, 5.0
"""Seconds of measuring; starting the ranks comes on top."""

DTYPES = ("bf16", "fp16", "fp32")
"""Types that can be measured: eight-bit numbers have no plain GEMM in PyTorch."""

LONGEST_TYPE = 40
"""Most letters of a GPU type's name in a cluster."""


def plan_sweep(devices: Devices, ranks: int | None = None, dtypes: Sequence[str] = (), quick: bool = False) -> Sweep:
    """The measurements to make on these devices. Raises InputError if they make no sense.

    ranks: default: one per attached GPU; without GPUs as many as there are processors, two at least and four at most
    dtypes: default: bf16 and fp32 on GPUs, and fp32 without, in which a launch computes there
    """
    most = len(devices.gpus) or MAX_RANKS
    if ranks is None:
        ranks = len(devices.gpus) or min(max(devices.cores, 2), 4)
    if not 1 <= ranks <= most:
        why = f", one for each attached GPU ({counted(devices.gpus)})" if devices.gpus else ""
        raise InputError(f"{ranks} ranks: choose between 1 and {most}{why}")
    if unknown := [dtype for dtype in dtypes if dtype not in DTYPES]:
        raise InputError(f"GEMMs of {unknown[0]} cannot be measured; choose from {', '.join(DTYPES)}")
    backend, usual = ("nccl", ("bf16", "fp32")) if devices.gpus else ("gloo", ("fp32",))
    return Sweep(
        ranks=ranks,
        backend=backend,
        dtypes=tuple(dict.fromkeys(dtypes)) or usual,
        seconds=QUICK if quick else FULL,
        repeats=3 if quick else 7,
        held_out=8 if quick else 24,
    )


def calibrate(
    sweep: Sweep, folder: Path, stop: Stop, report, type: str | None = None, testbed: Testbed | None = None
) -> DeviceProfile:
    """Measure with the ranks of a sweep on this machine, or in a testbed. Raises InputError if it fails, is stopped or
    takes too long; the ranks' output is on standard output.

    type: the catalogue's type to take for GPUs that it does not know by name
    """
    if type is not None:
        catalogue.gpu(type)
    with alone(), testbed or contextlib.nullcontext():
        with writing(folder):
            make_folder(folder)
            write_atomically(folder / REQUEST, sweep.to_json())
        commands = commands_of(SWEEP_RANK, sweep.ranks, folder, testbed)
        run_processes(commands, sweep.ranks, sweep.limit, folder, stop, report)
    times = read_json(folder / MEASURED)
    return read_measured(times, sweep, testbed.name if testbed else "local", type)


def read_measured(times: Mapping[str, Any], sweep: Sweep, on: str, type: str | None = None) -> DeviceProfile:
    """The calibration from the measurements of `sweep_rank`."""
    # In a cluster a device has the catalogue's name if there is one, or the one chosen.
    names = {name: name if name == "CPU" else type_of(name) or type or name[:LONGEST_TYPE] for name in times["computed"]}
    spreads: dict[tuple[str, ...], float] = {}
    gemm, memory, held_out = [], [], []
    for name, gpu in names.items():
        computed = times["computed"][name]
        for dtype in sweep.dtypes:
            rows = computed[f"gemm {dtype}"]
            spreads["gemm", gpu, dtype] = _median_spread(rows)
            gemm.append(GemmTimes(gpu=gpu, dtype=dtype, points=_points(rows)))
            held_out.append(GemmTimes(gpu=gpu, dtype=dtype, points=_points(computed[f"held out {dtype}"])))
        spreads["memory", gpu] = _median_spread(computed["memory"])
        memory.append(MemoryTimes(gpu=gpu, points=_points(computed["memory"])))
    sent = {operation: times[operation] for operation in COLLECTIVES if operation in times}
    spreads |= {(operation,): _median_spread(rows) for operation, rows in sent.items()}
    moment = datetime.now(UTC)
    versions = {"PyTorch": times["torch"], "CUDA": times["cuda"], "driver": driver_version() if times["cuda"] else None}
    versions = {name: version for name, version in versions.items() if version}
    devices = times["devices"]
    ranks = f"{sweep.ranks} rank{'s' if sweep.ranks > 1 else ''} at work on {counted(devices)}"
    where = "" if on == "local" else f" on {on}"
    backend = sweep.backend.upper() if sweep.backend == "nccl" else "Gloo"
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    measured = MeasuredTimes(
        name=f"{counted(names[name] for name in times['devices'])} {moment:%Y-%m-%d %H:%M}"[:80],
        origin=f"calibrated {moment:%Y-%m-%d}: {ranks}{where}, {backend}, {software}"[:300],
        gemm=gemm,
        memory=memory,
        collectives=[
            CollectiveTimes(operation=operation, ranks=sweep.ranks, points=_points(rows))
            for operation, rows in sent.items()
            if operation != "exchange"
        ],
    )
    exchange = _points(sent.get("exchange", []))
    return DeviceProfile(
        made=moment.isoformat(timespec="seconds"),
        devices=tuple(times["devices"]),
        versions=versions,
        backend=sweep.backend,
        on=on,
        measured=measured,
        exchange=exchange,
        fits=fits_of(measured, exchange, spreads),
        held_out=held_out_of(measured, held_out),
    )


def _points(rows: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """(size, ..., seconds) of [size, ..., seconds, spread]."""
    return tuple(tuple(row[:-1]) for row in rows)


def _median_spread(rows: Sequence[Sequence[float]]) -> float:
    """Median spread of rows [size, ..., seconds, spread]."""
    ordered = sorted(row[-1] for row in rows)
    return ordered[len(ordered) // 2]
