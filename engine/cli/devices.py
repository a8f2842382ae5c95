"""`calibrate` and `detect`: what the attached devices take, as a source of costs, and what they are, as a cluster."""

import argparse
import contextlib
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine import formats
from engine.cli import pairs, text
from engine.cli.output import answer, progress, stopped_by_signals, write
from engine.errors import InputError
from engine.formats.nvidia_topo import read_topology
from engine.jobs.launches import CalibrateAnswer, describe_calibration, table_of
from engine.launch.calibration.calibrate import calibrate as calibrate_devices
from engine.launch.calibration.calibrate import plan_sweep
from engine.launch.calibration.sweep import Sweep
from engine.launch.places.devices import attached, cluster_of
from engine.launch.places.testbed import Testbed, emulated_cluster
from engine.launch.running.local import temporary_folder
from engine.units import share

BUSY = 0.2
"""Spread of repeated readings from which on a person is told that the machine is busy."""

USUAL_RANKS = 8
"""On a testbed: as many as two cores still carry."""


def run_calibrate(options: argparse.Namespace) -> int:
    sweep, testbed = _prepared(options)
    # What the ranks print is a log.
    with (
        temporary_folder() as folder,
        stopped_by_signals() as stop,
        progress() as report,
        contextlib.redirect_stdout(sys.stderr),
    ):
        profile = calibrate_devices(sweep, folder, stop, report, options.type, testbed)
    write(options.output, profile.to_json())
    described, saved = describe_calibration(profile), str(options.output)
    content = described.model_dump(mode="json") | {"saved": saved}
    answer(options, content, lambda _: _show(described, saved))
    return 0


def _prepared(options: argparse.Namespace) -> tuple[Sweep, Testbed | None]:
    """What the options ask to measure, and the testbed to do it in where one is named. Raises InputError."""
    _check_output(options.output)
    devices = attached()
    if options.on == "local":
        for option in ("cluster", "scale"):
            if getattr(options, option) is not None:
                raise InputError(f"--{option} is for emulated links; add --on testbed, or leave it out")
        return plan_sweep(devices, options.ranks, options.dtype, options.quick), None
    if options.cluster is None:
        raise InputError("--on testbed needs the cluster to emulate; add --cluster FILE")
    cluster = formats.read_cluster(options.cluster)
    gpus = len(cluster.gpus)
    ranks = min(gpus, USUAL_RANKS) if options.ranks is None else options.ranks
    if not 1 <= ranks <= gpus:
        raise InputError(f"{ranks} ranks: choose between 1 and {gpus}, the GPUs of {cluster.name}")
    # Ranks in namespaces talk over Gloo, from the CPU.
    sweep = plan_sweep(replace(devices, gpus=(), memory=()), ranks, options.dtype, options.quick)
    return sweep, emulated_cluster(cluster, ranks, options.scale)


def _check_output(path: Path) -> None:
    """InputError when the profile could not be written or read again, before anything is measured for it."""
    if path.suffix.lower() != ".json":
        raise InputError(f"{path}: a profile is JSON; give the file a name that ends in .json")
    if path.is_dir():
        raise InputError(f"{path} cannot be written: it is a folder")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def _show(described: CalibrateAnswer, saved: str) -> str:
    """The answer for people: every fit, its errors on held-out shapes, and how to use the file."""
    rows = table_of(described.calibration)
    lines = [described.origin, text.table(list(rows[0]), [list(row.values()) for row in rows])]
    lines += [
        f"held-out shapes ({gemms.dtype} on {gemms.gpu}): mean {share(gemms.mean)}, worst {share(gemms.worst)} of "
        f"{gemms.shapes} that were also measured directly"
        for gemms in described.held_out
    ]
    if (worst := max(fit.spread for fit in described.fits)) > BUSY:
        lines.append(
            f"note: repeated readings lie up to {share(worst)} apart (between the quartiles); is the machine at other work?"
        )
    lines.append(f"saved: {saved}; use it with --cost {saved}, or open it on the Cluster page")
    return "\n".join(lines)


def run_detect(options: argparse.Namespace) -> int:
    content: dict[str, Any] = {"summary": None, "gpus": [], "cluster": None, "notes": [], "saved": None}
    if options.topology and options.pairs:
        raise InputError("--topology and --pairs are two ways to know a cluster; choose one")
    if options.topology:
        drawn = read_topology(options.topology, options.type)
    elif options.pairs:
        drawn = pairs.read(options.pairs, options.output.stem if options.output else "measured pairs", options.type)
        content["pairs"] = pairs.describe(drawn)
    else:
        devices, drawn = attached(), None
        content["summary"], content["notes"] = devices.summary, list(devices.notes)
        content["gpus"] = [{"name": gpu.name, "type": gpu.type, "memory": gpu.memory} for gpu in devices.machine]
        try:
            drawn = cluster_of(devices.machine, options.type)
        except InputError as error:
            # To look is no fault where there is nothing to see, to save it is.
            if options.output or options.type:
                raise
            content["notes"].append(str(error))
    if drawn:
        content["cluster"] = drawn.cluster.model_dump(mode="json", exclude_none=True)
        content["notes"] += drawn.notes
        if options.output:
            write(options.output, drawn.cluster.model_dump_json(indent=1, exclude_none=True))
            content["saved"] = str(options.output)
    answer(options, content, _show_detected)
    return 0


def _show_detected(content: dict[str, Any]) -> str:
    shown = text.detected(content)
    return f"{pairs.show(content['pairs'])}\n{shown}" if "pairs" in content else shown
