"""`trust`: predictions beside public measurements."""

import argparse

from engine.cli import text
from engine.cli.output import answer
from engine.compare.trust import predictions, summaries


def run_trust(options: argparse.Namespace) -> int:
    held = list(predictions())
    if options.json:
        answer(options, [prediction._asdict() for prediction in held], text.trusted)
    else:
        answer(options, [summary._asdict() for summary in summaries(held)], text.trusted)
    return 0
