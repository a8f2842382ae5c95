"""The Slurm cluster of these tests: one for all of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm import real


@pytest.fixture(scope="session")
def one_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[real.Cluster]:
    if reason := real.missing():
        pytest.skip(reason)
    cluster = real.Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        try:
            cluster.start()
        except AssertionError as error:  # nothing of ours has run yet
            pytest.skip(f"Slurm does not start on this machine: {error}")
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def slurm(one_cluster: real.Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[real.Cluster]:
    """Slurm's commands lead to it, and it has nothing to do before and after a test."""
    for name, value in one_cluster.environment.items():
        monkeypatch.setenv(name, value)
    yield one_cluster
    one_cluster.mend()
    for job in one_cluster.say("squeue", "-h", "-o", "%A").split():
        one_cluster.say("scancel", job)
    real.until(one_cluster.idle, real.TO_REST, "idle cluster")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (folder := tmp_path / "shared").mkdir()
    return folder
