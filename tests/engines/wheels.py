"""Pinned packages of the engines, read without being installed."""

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """A row of the table."""

    compared: str
    """Ours and theirs, in words."""

    package: str
    """The package with its version."""

    agreement: str
    """Figures of their agreement."""

    holds: bool
    """True if they agree as far as they should."""


def wheel_of(requirement: str, folder: Path, *options: str) -> zipfile.ZipFile:
    """The wheel of a pinned package, as the package index has it. options: further ones of pip, as of another Python"""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
    subprocess.run([*command, *options, requirement], check=True, stderr=subprocess.DEVNULL)
    name = requirement.partition("==")[0].replace("-", "_")
    return zipfile.ZipFile(next(folder.glob(f"{name}-*.whl")))
