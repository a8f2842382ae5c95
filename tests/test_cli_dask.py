"""`plan --system all` on a Dask cluster, and the message where there is none."""

import json
import sys

import pytest

from engine.cli import plan
from engine.compare.comparison import Comparison
from engine.errors import InputError
from engine.parallel import ADDRESS
from tests.cases.cli import INPUTS, error_line
from tests.cli.conftest import engine

__all__ = ["engine"]
ALL = ["plan", *INPUTS, "--system", "all", "--set", "time_limit=0.1"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was afterwards: --dask stands for the variable."""
    monkeypatch.setenv(ADDRESS, "")


def test_a_cluster_makes_the_plans_that_this_machine_makes(engine, tmp_path):
    distributed = pytest.importorskip("distributed")
    here = {row["system"]: row for row in engine.json(*ALL)["plans"]}
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=":0", local_directory=str(tmp_path)
    ) as cluster:
        there = {row["system"]: row for row in engine.json(*ALL, "--dask", cluster.scheduler_address)["plans"]}
    assert set(there) == set(here)
    for name in ("linear", "round-robin", "rga", "lina"):  # none of them searches for as long as it is given
        assert there[name]["id"] == here[name]["id"] and there[name]["metrics"] == here[name]["metrics"]


def test_without_the_library_one_line_says_what_to_install(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    line = engine.refused(*ALL, "--dask", "tcp://127.0.0.1:9")
    assert line.endswith("distributed is not installed; pip install -r requirements-dask.txt")


def test_a_cluster_that_dies_half_way_costs_no_plan_that_was_there(engine, monkeypatch, tmp_path):
    class Dying(Comparison):
        def run(self, choices, stop, report):
            yield next(super().run(choices, stop, report))
            raise InputError("no Dask scheduler answers at tcp://x; 1 of 9 points are done")

    monkeypatch.setattr(plan, "Comparison", Dying)
    code, out, errors = engine(*ALL, "--json", "-o", tmp_path / "best.json")
    assert code == 2 and len(json.loads(out)["plans"]) == 1 and (tmp_path / "best.json").exists()
    assert error_line(errors) == "error: no Dask scheduler answers at tcp://x; 1 of 9 points are done"
