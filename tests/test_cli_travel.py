"""The command line with tokens that travel row by row."""

import json

import numpy as np
import pytest

from engine.formats import read_plan
from engine.plan import Travel
from tests.test_cli import CLUSTER, SAMPLES, CommandLine


@pytest.fixture
def engine(capsys) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def inputs(tmp_path) -> list:
    """Two layers of the sample with two experts per token."""
    with np.load(SAMPLES / "tiny-moe" / "beta-code.npz") as recorded:
        np.savez(tmp_path / "beta.npz", experts=recorded["experts"][::16, :2], sequence=recorded["sequence"][::16])
    model = json.loads((SAMPLES / "tiny-moe-beta.json").read_text()) | {"layers": 2}
    (tmp_path / "beta.json").write_text(json.dumps(model))
    return ["--workload", tmp_path / "beta.npz", "--cluster", CLUSTER, "--model", tmp_path / "beta.json"]


def test_a_plan_keeps_how_its_tokens_travel(engine, inputs, tmp_path):
    path = tmp_path / "plan.json"
    engine.json("plan", *inputs, "--system", "linear", "--travel", "node:fp8:bf16", "-o", path)
    assert read_plan(path).travel == Travel(unit="node", dispatch="fp8", combine="bf16")
    simulated = engine.json("simulate", path)
    assert "one row per node, fp8 out, bf16 back" in simulated["cost_source"]
    copies = engine.json("simulate", path, "--travel", "copies")
    assert copies["metrics"]["total"] > simulated["metrics"]["total"] and copies["id"] != simulated["id"]
    assert "row" not in copies["cost_source"]


def test_copies_of_experts_serve_whom_they_save_rows(engine, inputs, tmp_path):
    path, system = tmp_path / "plan.json", ["--system", "coactivation", "--set", "time_limit=1", "--set", "redundant=1"]
    engine.json("plan", *inputs, *system, "--travel", "gpu:::fewest", "-o", path)
    assert read_plan(path).travel == Travel(unit="gpu", replicas="fewest")
    fewest, in_turn = engine.json("simulate", path), engine.json("simulate", path, "--travel", "gpu")
    assert "each token to the copies that touch fewest GPUs" in fewest["cost_source"]
    assert fewest["metrics"]["rows"] < in_turn["metrics"]["rows"]


def test_plain_travel_leaves_plans_as_they_were(engine, inputs, tmp_path):
    for name, more in (("old", []), ("new", ["--travel", "copies"])):
        engine.json("plan", *inputs, "--system", "linear", *more, "-o", tmp_path / f"{name}.json")
    old, new = (read_plan(tmp_path / f"{name}.json") for name in ("old", "new"))
    assert old.id == new.id and old.travel is new.travel is None


@pytest.mark.parametrize(
    ("travel", "parts"),
    [
        ("rail", ["--travel rail", "unit", "'copies', 'gpu' or 'node'"]),
        ("node:int4", ["--travel node:int4", "dispatch"]),
        ("node:fp8:bf16:fp8", ["--travel node:fp8:bf16:fp8", "replicas", "'fewest'"]),
        ("node:fp8:bf16:fewest:2", ["write UNIT, UNIT:OUT, UNIT:OUT:BACK or UNIT:OUT:BACK:fewest"]),
        ("copies:::fewest", ["--travel copies:::fewest: replicas: ", "use gpu or node"]),
    ],
)
def test_wrong_travel_is_one_line(engine, inputs, travel, parts):
    line = engine.refused("plan", *inputs, "--system", "linear", "--travel", travel)
    assert all(part in line for part in parts), line


def test_an_order_made_for_other_rows_is_not_bent(engine, inputs, tmp_path):
    path = tmp_path / "plan.json"
    engine.json("plan", *inputs, "--system", "rcs", "-o", path)
    line = engine.refused("simulate", path, "--travel", "gpu")
    assert "orders its sends for tokens that travel otherwise" in line
