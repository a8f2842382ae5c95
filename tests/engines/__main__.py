"""Runs the engines' own code beside ours and prints a table: `make engines`, or `python -m tests.engines ENGINE ...`.

Pinned wheels are downloaded into a temporary folder and read, not installed; single functions of theirs run, with their
settings stood in for. Nothing of it needs a GPU. Ends with status 1 if a row does not hold.
"""

import importlib
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

ENGINES = ("sglang",)


def main(engines: list[str]) -> int:
    """The exit status, with the table printed. engines: those to compare; none means all."""
    table, fine = Table("Compared", "With", "Agreement", ""), True
    with tempfile.TemporaryDirectory() as there:
        for engine in engines or ENGINES:
            for row in importlib.import_module(f"tests.engines.{engine}").rows(Path(there)):
                table.add_row(row.compared, row.package, row.agreement, "" if row.holds else "differs")
                fine = fine and row.holds
    Console().print(table)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
