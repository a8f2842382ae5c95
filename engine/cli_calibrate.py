"""`calibrate`: measure the attached devices, and write what they take as a source of costs."""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine import formats
from engine.costs.calibration import Calibration
from engine.errors import InputError
from engine.jobs.calibrations import table_of
from engine.launch.calibration import DTYPES, plan_sweep
from engine.launch.devices import attached
from engine.launch.sweep import Sweep
from engine.launch.testbed import Testbed, emulated_cluster
from engine.report import table
from engine.units import share

BUSY = 0.2
"""Spread of repeated readings from which on a person is told that the machine is busy."""

USUAL_RANKS = 8
"""On a testbed: as many as two cores still carry."""


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--on",
        choices=["local", "testbed"],
        default="local",
        help="testbed: a cluster emulated on this machine, with shaped links (needs root and iproute2)",
    )
    command.add_argument("--cluster", type=Path, metavar="FILE", help="testbed: the cluster to emulate")
    command.add_argument(
        "--scale",
        type=float,
        metavar="S",
        help="testbed: links S times as slow as drawn (default: what brings the fastest to 100 Mbit/s)",
    )
    command.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="default: one per attached GPU, without any 2 to 4 on the CPU; on a testbed "
        f"one per GPU of the cluster, at most {USUAL_RANKS}",
    )
    command.add_argument(
        "--dtype",
        action="append",
        choices=DTYPES,
        default=[],
        help="numbers of the GEMMs; may be given several times (default: bf16 and fp32 on GPUs, fp32 on the CPU)",
    )
    command.add_argument("--type", metavar="TYPE", help="the catalogue's type of GPUs that are not known by name")
    command.add_argument("--quick", action="store_true", help="measure for some 5 s instead of some 30 s")
    command.add_argument(
        "-o", "--output", type=Path, required=True, metavar="profile.json", help="where it goes, for --cost"
    )


def prepared(given: argparse.Namespace) -> tuple[Sweep, Testbed | None]:
    """What the options ask to measure, and the testbed to do it in where one is named. Raises InputError."""
    check_output(given.output)
    devices = attached()
    if given.on == "local":
        for option in ("cluster", "scale"):
            if getattr(given, option) is not None:
                raise InputError(f"--{option} is for emulated links; add --on testbed, or leave it out")
        return plan_sweep(devices, given.ranks, given.dtype, given.quick), None
    if given.cluster is None:
        raise InputError("--on testbed needs the cluster to emulate; add --cluster FILE")
    cluster = formats.read_cluster(given.cluster)
    gpus = len(cluster.gpus)
    ranks = min(gpus, USUAL_RANKS) if given.ranks is None else given.ranks
    if not 1 <= ranks <= gpus:
        raise InputError(f"{ranks} ranks: choose between 1 and {gpus}, the GPUs of {cluster.name}")
    # Ranks in namespaces talk over Gloo, from the CPU.
    sweep = plan_sweep(replace(devices, gpus=(), memory=()), ranks, given.dtype, given.quick)
    return sweep, emulated_cluster(cluster, ranks, given.scale)


def check_output(path: Path) -> None:
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


def show(found: dict[str, Any]) -> str:
    """The answer for people: every fit, how well held-out shapes are met, and what to do with the file."""
    rows = table_of(Calibration.from_dict(found["calibration"], "calibration"))
    lines = [found["origin"], table(list(rows[0]), [list(row.values()) for row in rows])]
    lines += [
        f"held-out shapes ({one['dtype']} on {one['gpu']}): mean {share(one['mean'])}, worst {share(one['worst'])} of "
        f"{one['shapes']} that were also measured directly"
        for one in found["held_out"]
    ]
    if (worst := max(fit["spread"] for fit in found["fits"])) > BUSY:
        lines.append(
            f"note: repeated readings lie up to {share(worst)} apart (between the quartiles); is the machine at other work?"
        )
    lines.append(f"saved: {found['saved']}; use it with --cost {found['saved']}, or open it on the Cluster page")
    return "\n".join(lines)
