"""`size` on the command line: the contract's JSON, the files of a point, a front, whole steps, and refusals of one line."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from engine.cli import STOPPED
from engine.cli.size import INFEASIBLE
from tests.cases.cli import INPUTS, MODEL, RECORDING, error_line

EXAMPLE = {"nodes": [{"type": "aurora-100g", "price": 6, "most": 2}, {"type": "aurora-50g", "price": 2, "most": 2}]}
"""Prices are an example."""


@pytest.fixture
def inputs(tmp_path) -> list:
    (tmp_path / "catalogue.json").write_text(json.dumps(EXAMPLE))
    return ["size", "--workload", RECORDING, "--model", MODEL, "--catalogue", tmp_path / "catalogue.json", "--target"]


def test_every_point_opens_as_cluster_plan_and_recording(engine, inputs, tmp_path, own_data_folder):
    code, out, _ = engine(*inputs, "1.6 ms a pass", "--front", "2", "-o", tmp_path / "sized", "--json")
    points = json.loads(out)
    assert code == 0 and [point["price"] for point in points] == sorted(point["price"] for point in points)
    met = [point for point in points if point["met"]]
    assert met and met[0]["objective"] <= 1.6e-3
    for point in points:
        assert set(point) == {"nodes", "price", "objective", "bound", "met", "plan"}
        assert point["price"] == sum(EXAMPLE["nodes"][name == "aurora-50g"]["price"] * n for name, n in point["nodes"].items())
    for point in met:
        assert point["bound"] <= point["objective"]
        files = [Path(point["plan"].replace("-plan.json", f"-{part}")) for part in ("cluster.json", "recording.npz")]
        simulated = engine.json("simulate", point["plan"], "--cluster", files[0], "--workload", files[1], "--model", MODEL)
        assert simulated["metrics"]["total"] == pytest.approx(point["objective"])
        assert engine.json("simulate", point["plan"])["metrics"]["total"] == pytest.approx(point["objective"])


def test_a_folder_that_cannot_be_made_is_found_before_the_search(engine, inputs, tmp_path):
    for folder, reason in ((tmp_path / "catalogue.json" / "sized", "Not a directory"), (Path("/proc/sized"), "No such file")):
        code, out, errors = engine(*inputs, "1.6 ms a pass", "-o", folder)
        assert (code, out) == (2, "") and f"{folder} cannot be made: {reason}" in error_line(errors)
        assert errors.count("\n") == 1, "no progress"


def test_a_whole_step_on_two_types_is_what_serve_says(engine, inputs, files, tmp_path):
    served = ["--config", files["config"], "--operators", "datasheet"]
    code, out, _ = engine(*inputs, "100 tokens/s at 16 sequences", *served, "-o", tmp_path / "sized", "--json")
    point = json.loads(out)[-1]
    assert code == 0 and point["met"] and point["objective"] <= 0.16
    step = {"phase": "decode", "sequences": 16 // (2 * sum(point["nodes"].values())), "context": 2000, "output": 1000}
    (tmp_path / "whole.json").write_text(json.dumps(step))
    again = engine.json("serve", point["plan"], "--serving", tmp_path / "whole.json", *served)["plans"][0]
    assert again["step_seconds"] == pytest.approx(point["objective"])
    text = engine.text(*inputs, "at most $4 an hour", "--serving", tmp_path / "whole.json", *served)
    assert "a whole decode step of" in text and "$" in text


@pytest.mark.parametrize("command", ["size", "plan", "study"])
def test_broken_off_before_an_answer_is_neither_infeasible_nor_bad_input(engine, inputs, command, monkeypatch, own_data_folder):
    monkeypatch.setattr(f"engine.cli.{command}.stopped_by_signals", lambda: nullcontext(lambda: True))
    options = [*INPUTS, "--system", "eplb"]
    words = {"size": [*inputs, "2 ms"], "plan": ["plan", *options], "study": ["drift", *options, "--parts", "3"]}[command]
    assert engine(*words)[0] == STOPPED


def test_a_front_of_no_cluster_is_refused(engine, inputs, capsys):
    with pytest.raises(SystemExit):
        engine(*inputs, "2 ms", "--front", "-1")
    assert "--front: -1 is below 1" in capsys.readouterr().err


def test_a_target_that_nothing_meets_is_infeasible_and_proven_so(engine, inputs):
    code, out, _ = engine(*inputs, "1 ns a pass")
    assert code == INFEASIBLE and out.startswith("no cluster was found that meets the target")
    code, out, _ = engine(*inputs, "1 ns a pass", "--json")
    assert code == INFEASIBLE and json.loads(out) == []


@pytest.mark.parametrize(
    ("target", "more", "message"),
    [
        ("soon", [], "'soon' is not understood; write such as"),
        ("first token in 2 s", [], "name its Hugging Face config.json with --config"),
        ("2 ms", ["--travel", "wagon"], "--travel wagon"),
        ("2 ms", ["--catalogue", MODEL], "nodes"),
        ("1 ns", ["--model", MODEL.with_stem("tiny-moe-beta")], "does not fit the recording"),
        ("9 s at 64 sequences", ["--model", MODEL.with_stem("tiny-moe-beta")], "does not fit the recording"),
    ],
)
def test_refusals_are_one_line(engine, inputs, target, more, message):
    assert message in engine.refused(*inputs, target, *more)
