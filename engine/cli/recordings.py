"""`inspect`: what a recording is."""

import argparse

from engine.cli import text
from engine.cli.command import Commands, add_command
from engine.cli.inputs import read_recording
from engine.cli.output import answer
from engine.studies.inspection import inspect


def add(commands: Commands) -> None:
    """The commands of this group."""
    command = add_command(commands, "inspect", _inspect, "what a recording is, its checks, its skew and affinity")
    command.add_argument("files", nargs="+", metavar="FILE[::NAME]")


def _inspect(options: argparse.Namespace) -> int:
    inspections = [inspect(read_recording(file)) for file in options.files]
    answer(options, {"recordings": [inspection.to_dict() for inspection in inspections]}, text.recordings)
    return 0
