"""The rows of the check: one line each, and all of them as JSON with the machine that they were measured on."""

import json
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import torch

from engine.launch.places.devices import Devices, driver_version
from tests.gpu.packages import ROOT

WIDTH = 46
"""Width of the names' column."""


class CheckError(Exception):
    """A check does not hold: the fault, for a person."""


class SkipError(Exception):
    """Why a check does not apply here, for a person."""


def needs(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CheckError(otherwise)


@dataclass(frozen=True)
class Finding:
    """The message of a check that holds. name: of the part of the check, where it has several; figures: numbers for JSON"""

    text: str
    name: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    result: Literal["ok", "FAIL", "skip"]
    name: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        return f"{self.result:4}  {self.name:<{WIDTH}}  {self.text}"


def document(rows: Sequence[Row], devices: Devices) -> str:
    """The table as JSON."""
    return json.dumps({**surroundings(devices), "rows": [asdict(row) for row in rows]}, indent=1) + "\n"


def surroundings(devices: Devices) -> dict[str, Any]:
    """The machine and the versions of its software; None if one is not known."""
    cuda = torch.version.cuda
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "gpus": list(devices.gpus),
        "machine": [gpu.name for gpu in devices.machine],
        "cores": devices.cores,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
            "driver": driver_version(),
        },
    }


def commit() -> str | None:
    """The commit that is checked, with a plus if files were changed; None outside a repository."""
    if (git := shutil.which("git")) is None:
        return None
    command = [git, "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    described = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return described.stdout.strip() or None
