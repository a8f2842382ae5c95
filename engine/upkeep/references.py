"""What refers to what: the digests and jobs that a session, a job or the team's work names.

They are found by how they look, not by the fields that they stand in: a reference that some other version wrote counts too.
"""

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sqlalchemy import select

from engine.store import tables
from engine.store.database import Database

NAMED = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])|\d{8}T\d{12}-[0-9a-f]{8}", re.ASCII)
"""A digest, or the id of a job."""


@dataclass(frozen=True)
class TeamsWork:
    """What the team's database refers to. names: digests and ids of jobs; plans: ids of the saved plans."""

    names: frozenset[str]
    plans: frozenset[str]


def named_in(text: str) -> frozenset[str]:
    """Every digest and every id of a job in a text."""
    return frozenset(NAMED.findall(text))


def named_in_file(path: Path) -> frozenset[str]:
    """The same of a file; nothing where it is gone."""
    try:
        at = path.stat()
        return _named_in_file(path, at.st_mtime_ns, at.st_size)
    except FileNotFoundError:
        return frozenset()


@lru_cache(maxsize=4096)
def _named_in_file(path: Path, written: int, size: int) -> frozenset[str]:
    return named_in(path.read_text(encoding="utf-8", errors="replace"))


def teams_work(db: Database) -> TeamsWork:
    """What saved plans were made from, and the launches that were noted. Raises InputError when the database does not answer:
    what is not known to be free stays."""
    names: set[str] = set()
    plans: set[str] = set()
    with db.reading() as connection:
        for plan, inputs in connection.execute(select(tables.saved_plan.c.plan, tables.saved_plan.c.inputs)):
            plans.add(plan)
            names |= named_in(json.dumps(inputs))
        for (run,) in connection.execute(select(tables.run.c.id)):  # the id of its job, and which of its plans it was
            names |= named_in(run)
    return TeamsWork(frozenset(names), frozenset(plans))
