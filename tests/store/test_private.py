"""Nobody but its owner can read what is kept: whoever knows the name of a session can open it."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from app.state.stored import Session, write
from engine import store
from engine.catalogue import cluster_presets
from engine.files import write_atomically
from engine.jobs import runner
from engine.store.database import database
from engine.workload import RoutingTrace


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_everything_in_the_data_folder_is_its_owners_alone(own_data_folder: Path) -> None:
    store.save_workload(RoutingTrace("a trace", np.zeros((4, 1, 1), np.int16), 2))
    store.save_document(cluster_presets()["mixed-8"].cluster)
    with store.alone_with_sessions():
        store.save_session("abcdefgh", write(Session()))
    with database().reading():
        pass
    job = runner.start("count", {"steps": 1, "pause": 0}, own_data_folder, module="tests.jobs.handlers")
    assert runner.wait(job, 60) is runner.State.DONE
    files = [path for path in own_data_folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".npz", ".json", ".db", ".txt", ".jsonl"}
    for path in (own_data_folder, *own_data_folder.rglob("*")):
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path


def test_a_data_folder_of_an_older_version_is_closed(own_data_folder: Path) -> None:
    (own_data_folder / "sessions").mkdir(parents=True)
    own_data_folder.chmod(0o755)
    assert mode(store.data_folder()) == 0o700


def test_a_file_that_a_person_asked_for_is_as_their_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    write_atomically(tmp_path / "plan.json", "{}")
    assert mode(tmp_path / "plan.json") == 0o644
