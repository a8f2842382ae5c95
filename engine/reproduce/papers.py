"""The five papers, and their figures and tables one after the other."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine.errors import InputError, StoppedError
from engine.reproduce import aurora, exflow, lancet, lina, pipemoe
from engine.reproduce.exhibits import Entry, Exhibit
from engine.result import Stop
from engine.systems.base import Report


@dataclass(frozen=True)
class Paper:
    """title: its authors' name for the system; source: authors, title, where it appeared"""

    title: str
    source: str
    entries: tuple[Entry, ...]


PAPERS = {
    "aurora": Paper("Aurora", "Li et al., October 2024", aurora.ENTRIES),
    "exflow": Paper("ExFlow", "Yao et al., IPDPS 2024", exflow.ENTRIES),
    "lina": Paper("Lina", "Li et al., USENIX ATC 2023", lina.ENTRIES),
    "lancet": Paper("Lancet", "Jiang et al., MLSys 2024", lancet.ENTRIES),
    "pipemoe": Paper("PipeMoE", "Shi et al., INFOCOM 2023", pipemoe.ENTRIES),
}


def reproduce(name: str, number: str | None, stop: Stop, report: Report) -> Iterator[tuple[str, Entry, Exhibit]]:
    """Every figure and table of a paper, or of "all": the paper's name, the entry, and what it came to.

    number: only this one, "Figure 13" or "Table VI"

    That in the making when the stop turns True is left out. Raises InputError for a name or a number that is not there.
    """
    if name != "all" and name not in PAPERS:
        raise InputError(f"there is no paper '{name}' (there are: {', '.join(PAPERS)}, all)")
    wanted = [(paper, entry) for paper in (PAPERS if name == "all" else [name]) for entry in PAPERS[paper].entries]
    if number is not None:
        known = wanted
        wanted = [(paper, entry) for paper, entry in known if entry.number.casefold() == number.casefold()]
        if not wanted:
            raise InputError(f"there is no {number} here (there are: {', '.join(entry.number for _, entry in known)})")
    for done, (paper, entry) in enumerate(wanted):
        if stop():
            return
        report(done / len(wanted), f"{PAPERS[paper].title}, {entry.number}: {entry.title}", None, None)
        try:
            exhibit = entry.make(stop)
        except StoppedError:
            return
        if stop():  # it may be a part
            return
        yield paper, entry, exhibit


def claims_as_rows(paper: str, entry: Entry, exhibit: Exhibit) -> list[dict[str, Any]]:
    """A row a claim, in the columns of `reproduce --json`."""
    return [
        {
            "paper": paper,
            "figure": entry.number,
            "quantity": claim.quantity,
            "published": claim.published,
            "ours": claim.ours,
            "verdict": claim.verdict.value,
            "why": claim.why,
        }
        for claim in exhibit.claims
    ]
