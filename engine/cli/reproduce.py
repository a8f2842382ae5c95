"""The command `reproduce`: what the papers printed beside what our engine computes."""

import argparse
from typing import Any

from engine.cli.output import answer, columns, progress, stopped_by_signals
from engine.reproduce.exhibits import in_words
from engine.reproduce.papers import claims_as_rows, reproduce


def run_reproduce(options: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    with stopped_by_signals() as stop, progress() as report:
        for paper, entry, exhibit in reproduce(options.paper, options.figure, stop, report):
            rows += claims_as_rows(paper, entry, exhibit)
    answer(options, rows, _as_text)
    return 0


def _as_text(rows: list[dict[str, Any]]) -> str:
    cells = {
        "paper": "paper",
        "figure": "figure",
        "quantity": "quantity",
        "published": lambda row: in_words(row["published"]),
        "ours": lambda row: in_words(row["ours"]),
        "verdict": "verdict",
    }
    reasons = dict.fromkeys(f"{row['paper']}, {row['figure']}: {row['why']}" for row in rows)
    return "\n".join([columns(rows, cells), "", *reasons])
