"""`solve`: one kernel on its bare problem."""

import argparse
import json
import sys

from engine.cli.command import Commands, add_command
from engine.errors import InputError
from engine.solve import KERNELS, Options, solve


def add(commands: Commands) -> None:
    """The commands of this group."""
    command = add_command(commands, "solve", _solve, "one kernel on its bare problem: JSON on standard input, JSON out")
    command.add_argument("kernel", choices=list(KERNELS))
    command.add_argument("--options", default="{}", help='for example {"time_limit": 10, "seed": 0, "exact": true}')


def _solve(options: argparse.Namespace) -> int:
    kernel_options = Options.from_json(options.options, "--options")
    try:
        instances = json.load(sys.stdin)
    except (ValueError, RecursionError) as error:
        raise InputError(f"standard input is not valid JSON ({error})") from None
    print(json.dumps(solve(options.kernel, instances, kernel_options)))
    return 0
