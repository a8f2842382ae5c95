"""`trust`: predictions beside public measurements."""

import argparse

from engine.cli import text
from engine.cli.command import Commands, add_command
from engine.cli.output import answer
from engine.compare.trust import predictions, summaries


def add(commands: Commands) -> None:
    """The commands of this group."""
    add_command(commands, "trust", _trust, "predictions beside public measurements, and how far they are off")


def _trust(options: argparse.Namespace) -> int:
    held = list(predictions())
    if options.json:
        answer(options, [prediction._asdict() for prediction in held], text.trusted)
    else:
        answer(options, [summary._asdict() for summary in summaries(held)], text.trusted)
    return 0
