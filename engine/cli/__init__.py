"""The command line: everything a page does, in scripts and on a login node.

Answers go to standard output (`--json`: one JSON object), progress and logs to standard error. Exit 0: done, 2: bad
input (one line says where and why), 3: infeasible, 130: broken off before there was an answer.
"""

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path

from engine.cli.commands import GROUPS
from engine.errors import InputError, StoppedError, one_line
from engine.program import NAME, command, is_installed

STOPPED = 130
LOOK_THEMSELVES = ("record", "size")
"""Commands with an output that may be a folder."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = parser().parse_args(arguments)
    try:
        if isinstance(getattr(options, "output", None), Path) and options.command not in LOOK_THEMSELVES:
            import_module("engine.cli.output").check_output(options.output)
        # One group alone: each imports a part of the engine, which takes seconds.
        code = getattr(import_module(f"engine.cli.{options.group}"), f"run_{options.command}")(options)
        sys.stdout.flush()
    except InputError as error:
        import_module("engine.cli.output").error(one_line(str(error)))
        return STOPPED if isinstance(error, StoppedError) else 2
    except BrokenPipeError:
        # The reader of our output has closed it (`| head`): print nothing more, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    studio = f"{NAME} studio opens the studio in the browser." if is_installed() else None
    top = argparse.ArgumentParser(command(), description="Plan Mixture-of-Experts models on GPU clusters.", epilog=studio)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for add in GROUPS:
        add(commands)
    return top
