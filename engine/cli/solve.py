"""`solve`: one kernel on its bare problem."""

import argparse
import sys

from pydantic_core import from_json

from engine.errors import InputError
from engine.schema import long_json_text
from engine.solve import Options, solve

MOST_CHARACTERS = 48 * 2**20
"""The parsed instances take up to thirty times as much memory."""


def run_solve(options: argparse.Namespace) -> int:
    kernel_options = Options.from_json(options.options, "--options")
    try:
        text = sys.stdin.read(MOST_CHARACTERS + 1)
        instances = from_json(text) if len(text) <= MOST_CHARACTERS else None
    except ValueError as error:  # or bytes that are no text
        raise InputError(f"standard input is not valid JSON ({error})") from None
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"standard input has more than {MOST_CHARACTERS:,} characters; solve instances one by one")
    print(long_json_text(solve(options.kernel, instances, kernel_options)))
    return 0
