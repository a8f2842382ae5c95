"""`verdict` and `redundancy` on the command line."""

import json

import numpy as np
import pytest

from tests.test_cli import INPUTS, RECORDING, SAMPLES, CommandLine
from tests.test_cli_serve import ALPHA

pytestmark = pytest.mark.slow

PROSE, MAN = (SAMPLES / "tiny-moe" / f"alpha-{text}.npz" for text in ("prose", "man"))
PROMISED = {"verdict", "gain_held_out", "persistence", "memory_bytes", "move_seconds", "break_even_steps", "reasons"}


@pytest.fixture
def engine(capsys):
    return CommandLine(capsys)


@pytest.fixture
def plan(engine, tmp_path):
    """EPLB's for the shipped recording of code."""
    engine.text(
        "plan",
        *INPUTS,
        "--system",
        "eplb",
        "--set",
        "algorithm=eplb",
        "--set",
        "slots=even",
        "-o",
        tmp_path / "eplb.json",
    )
    return tmp_path / "eplb.json"


def test_a_verdict_on_two_other_recordings(engine, plan):
    answer = engine.json("verdict", plan, "--workload", PROSE, MAN)
    assert set(answer) >= PROMISED and answer["verdict"] in ("do-it", "try-it", "not-now", "cannot-say")
    assert [(part["by"], part["part"]) for part in answer["parts"]] == [
        ("time", "alpha-code, later half"),  # its own, which the data folder has
        ("recording", "alpha-prose"),
        ("recording", "alpha-man"),
    ]
    assert answer["gain_held_out"] == pytest.approx(np.mean([part["gain"] for part in answer["parts"]]))
    assert answer["deployed"] == "Linear placement" and answer["memory_bytes"] == 8 * 8 * 2 * 128 * 512 * 2
    assert [row["name"].partition(":")[0] for row in answer["beside"]] == [
        "deployed",
        "no plan",
        "no replicas",
        "Replication (EPLB)",
    ]
    again = engine.json("verdict", plan, "--workload", PROSE, "--workload", RECORDING, MAN)
    assert again == answer
    text = engine.text("verdict", plan, "--workload", PROSE, MAN)
    assert "at least 1.00 %" in text and "none" not in text
    assert text.splitlines()[0].startswith("Replication (EPLB): ") and all(
        reason in text for reason in answer["reasons"]
    )


def paid(text: str) -> str:
    """The value of until the move pays off, in the table of criteria."""
    (line,) = (line for line in text.splitlines() if line.startswith("until the move pays off"))
    return line.removeprefix("until the move pays off").split("at most")[0].strip()


def test_a_move_that_loses_never_pays(engine, plan):
    answer = engine.json("verdict", plan, "--deployed", "linear", "--workload", PROSE)
    assert answer["gain_held_out"] < 0 and answer["break_even_steps"] is None
    assert paid(engine.text("verdict", plan, "--deployed", "linear", "--workload", PROSE)) == "never"


def test_what_is_deployed_may_be_a_plan_or_a_bare_placement(engine, plan, tmp_path):
    same = engine.json("verdict", plan, "--deployed", plan)
    assert same["verdict"] == "not-now" and same["gain_held_out"] is None
    assert paid(engine.text("verdict", plan, "--deployed", plan)) == "unknown"
    csv = tmp_path / "deployed.csv"
    csv.write_text("Expert,Node\n" + "".join(f"{expert},{(expert + expert // 16) % 8}\n" for expert in range(8 * 16)))
    answer = engine.json("verdict", plan, "--deployed", csv, "--workload", PROSE)
    assert answer["deployed"] == "deployed" and answer["move_copies"] > 0
    assert answer["beside"][1]["gain"] != 0


def test_thresholds_have_names(engine, plan):
    strict = engine.json("verdict", plan, "--threshold", "tokens_per_expert=1000", "--threshold", "gain=0.5")
    assert strict["verdict"] == "cannot-say"
    limits = {criterion["name"]: criterion["threshold"] for criterion in strict["criteria"]}
    assert (limits["tokens_per_expert"], limits["gain"], limits["persistence"]) == (1000, 0.5, 0.5)
    said = engine.refused("verdict", plan, "--threshold", "hope=1")
    assert "there is no threshold 'hope' (there are: gain, try_gain" in said
    assert "option gain: 'much' is not a number" in engine.refused("verdict", plan, "--threshold", "gain=much")
    assert "--threshold gain: write KEY=VALUE" in engine.refused("verdict", plan, "--threshold", "gain")
    assert "option persistence: 2 is not between 0 and 1" in engine.refused(
        "verdict", plan, "--threshold", "persistence=2"
    )


def test_the_gain_of_a_whole_step(engine, plan, tmp_path):
    files = {name: tmp_path / f"{name}.json" for name in ("cluster", "linear", "eplb", "step", "config")}
    engine.text("catalogue", "H200", "-o", files["cluster"])
    inputs = [*INPUTS[:2], "--cluster", files["cluster"], *INPUTS[4:]]
    engine.text("plan", *inputs, "--system", "eplb", "--set", "algorithm=eplb", "-o", files["eplb"])
    files["step"].write_text(json.dumps({"phase": "decode", "sequences": 32, "context": 1000, "output": 200}))
    files["config"].write_text(json.dumps(ALPHA))
    answer = engine.json(
        "verdict", files["eplb"], "--workload", PROSE, "--serving", files["step"], "--config", files["config"]
    )
    assert answer["unit"] == "a whole decode step of 32 sequences per GPU"
    assert abs(answer["gain_held_out"]) < abs(
        engine.json("verdict", files["eplb"], "--workload", PROSE)["gain_held_out"]
    )
    assert answer["notes"][0].startswith("operators by the datasheet")


def test_a_training_step_is_refused(engine, plan):
    assert "is for inference, but what is open is a training step" in engine.refused(
        "verdict", plan, "--training", "usual"
    )


def test_spare_slots(engine):
    answer = engine.json("redundancy", *INPUTS, "--algorithm", "eplb")
    assert answer["held_out"] is True and answer["judged_on"] == ["alpha-code, later half"]
    assert all(point["slots"] % 8 == 0 for point in answer["points"])
    assert answer["knee"] in answer["points"] and answer["why"]
    first, second, *_ = answer["points"]
    assert first["gain_low"] == first["gain_high"] == 0 and second["gain_low"] < second["gain"] < second["gain_high"]
    assert "no more than one slot for each of 16 experts" in answer["limit"]
    text = engine.text("redundancy", "--workload", RECORDING, PROSE, *INPUTS[2:], "--algorithm", "eplb")
    assert "planned on alpha-code, judged on alpha-prose" in text and " ←" in text
    assert "95 % interval" in text and "of them spare: " in text


def test_spare_slots_of_what_cannot_be_are_refused(engine):
    assert "at least one recording" in engine.refused("redundancy", *INPUTS[2:])
    assert "leave out the training step" in engine.refused("redundancy", *INPUTS, "--training", "usual")
    assert "16 experts do not divide into 3 groups" in engine.refused("redundancy", *INPUTS, "--groups", 3)
