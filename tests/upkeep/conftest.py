"""The databases of the store's tests, and a data folder with a bit of everything."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from engine import store
from engine.files import write_atomically
from engine.jobs.protocol import FINAL, REQUEST, Request
from engine.plan import Plan
from engine.store import team
from engine.store.database import Database
from engine.upkeep.retention import DAY
from engine.workload import RoutingTrace
from tests.store.conftest import db, new_file, postgres, url  # noqa: F401  fixtures

NOW = time.time()


@dataclass(frozen=True)
class Folder:
    path: Path

    def recording(self, seed: int, days: float) -> str:
        experts = np.random.default_rng(seed).integers(0, 16, (8, 2, 1)).astype(np.int16)
        digest = store.save_workload(RoutingTrace(f"log {seed}", experts, 16))
        age(self.path / "workloads" / f"{digest}.npz", days)
        return digest

    def session(self, token: str, days: float, **content: object) -> Path:
        store.save_session(token, json.dumps(content))
        return age(self.path / "sessions" / f"{token}.json", days)

    def job(self, number: int, days: float, done: bool = True, kind: str = "optimise", **arguments: object) -> str:
        """The id of a job that was started, and has ended if it is done, so many days ago."""
        id = f"20250102T030405{number:06d}-0123abcd"
        folder = self.path / "jobs" / id
        folder.mkdir(parents=True)
        asked = Request(kind=kind, arguments=arguments, created=NOW - days * DAY)
        write_atomically(folder / REQUEST, asked.to_json())
        if done:
            (folder / FINAL).touch()
        for path in (*folder.iterdir(), folder):
            age(path, days)
        return id

    def names(self) -> set[str]:
        """Every file below the folder but the database's and locks."""
        found = (path.relative_to(self.path).as_posix() for path in self.path.rglob("*") if path.is_file())
        return {name for name in found if not name.startswith("switchyard.db") and not name.endswith(".lock")}


def age(path: Path, days: float) -> Path:
    os.utime(path, (NOW - days * DAY, NOW - days * DAY))
    return path


@pytest.fixture
def folder(own_data_folder: Path) -> Folder:
    return Folder(store.data_folder())


def save(db: Database, plan: Plan, **inputs: object) -> team.SavedPlan:  # noqa: F811
    """A plan in a workspace of its own, with a review and a run."""
    room = team.add_workspace(db, "späť", "Ana").id
    saved = team.save_plan(db, room, plan, "Ana", "why <b>not</b>\n", inputs, {"total": 0.25})
    review = team.open_review(db, saved.number, "Ship it?", "Ana").id
    team.add_comment(db, review, "fine", "Ben")
    team.decide(db, review, "approved", "", "Ben")
    return saved
