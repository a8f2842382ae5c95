"""One command of the command line, as every group of commands adds it."""

import argparse
from collections.abc import Callable
from typing import Any

Handler = Callable[[argparse.Namespace], int]
"""Runs a command with its options; returns the exit code. Raises InputError for bad input."""

Commands = Any
"""What `argparse.ArgumentParser.add_subparsers` returns, whose class argparse does not name."""


def add_command(commands: Commands, name: str, handler: Handler, help: str) -> argparse.ArgumentParser:
    """A new command, which like all of them knows --json. help: its line in the list of commands."""
    command = commands.add_parser(name, help=help, description=help)
    command.set_defaults(handler=handler)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    return command
