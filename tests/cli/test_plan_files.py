"""`export`, plan files of serving engines, `verdict` and `redundancy`."""

import json
from pathlib import Path

import pytest

from engine.formats import read_plan
from tests.cases import checkers
from tests.cases.cli import CLUSTER, INPUTS, MODEL, SAMPLES

BOTH = ["--model", MODEL, "--cluster", CLUSTER]


@pytest.fixture
def uneven(saved, tmp_path) -> Path:
    """The same with expert 1 on GPU 1 in all layers."""
    file, even = tmp_path / "uneven.json", read_plan(saved)
    rows = tuple(((0,), (1, 2, 3), *row[2:]) for row in even.placement.experts_of_gpu)
    placement = even.placement.model_copy(update={"experts_of_gpu": rows})
    file.write_text(even.model_copy(update={"placement": placement, "claim": None}).to_json())
    return file


def test_an_uneven_plan_is_refused_or_projected_with_its_price(engine, uneven, tmp_path):
    out = tmp_path / "map.json"
    error = engine.refused("export", uneven, "--to", "sglang", "-o", out)
    assert "but layer 0 (model layer 0) has 3 on GPU 1; 2 on GPUs 2 … 7; 1 " in error and "(--even)" in error
    assert not out.exists()
    even = engine.json("export", uneven, "--to", "sglang", "--even", "-o", out)["even"]
    held = checkers.sglang(out.read_bytes(), 8, (), 16, 8)
    assert {len(slots) for row in held for slots in row} == {even["slots"]} == {2}
    (row,) = engine.json("compare", out, *INPUTS)["plans"]
    assert row["metrics"]["total"] == even["after"]["total"] and even["added"] == even["dropped"] == 8
    text = engine.text("export", uneven, "--to", "sglang", "--even", "-o", out)
    assert text.startswith("even: 2 slots on every GPU, ") and "balancedness" in text
    assert "  --init-expert-location map.json\n  --ep-num-redundant-experts 0\n  --tp-size 8\n  --ep-size 8\n" in text
    engine.text("export", uneven, "--to", "csv", "-o", tmp_path / "all.csv")
    engine.text("export", out, "--to", "vllm", *BOTH, "-o", tmp_path / "a.jsonl")
    engine.text("plan", *INPUTS, "--system", "linear", "--in-use", tmp_path / "a.jsonl")
    engine.text("plan", *INPUTS, "--system", "linear", "--in-use", "round-robin")


def test_perfetto_has_the_prediction_and_beside_it_the_measurement(engine, saved, tmp_path):
    out, timeline = tmp_path / "trace.json", tmp_path / "timeline.json"
    engine.text("simulate", saved, "-o", timeline)
    predicted = json.loads(timeline.read_text())
    measured = predicted | {"source": "measured", "resources": [f"rank {rank}" for rank in range(8)]}
    launched, this = tmp_path / "run.json", read_plan(saved).id
    runs = [{"plan": "other"}, {"plan": this, "predicted": predicted, "measured": measured}]
    launched.write_text(json.dumps({"runs": runs}))
    engine.text("export", saved, "--to", "perfetto", "--measured", launched, "-o", out)
    events = json.loads(out.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert "measured · rank 7" in names and len(names) == 16 and any(name.startswith("simulated · ") for name in names)
    bad = {"plan": this, "predicted": predicted, "measured": {"events": []}}
    for content, part in ((runs[:1], "has no run of the plan"), ([bad], "its timelines are not"), (3, "has no run")):
        launched.write_text(json.dumps({"runs": content}))
        error = engine.refused("export", saved, "--to", "perfetto", "--measured", launched, "-o", out)
        assert error.startswith("error: run.json: ") and part in error


def test_what_does_not_go_is_one_line(engine, saved, tmp_path):
    out, bare = tmp_path / "x.json", tmp_path / "bare.json"
    engine.text("export", saved, "--to", "vllm-ascend", "-o", bare)
    bad = tmp_path / "bad.json"
    bad.write_text('{"logical_count": [[1]]}')
    two_b = ["--model", SAMPLES / "tiny-moe-alpha.json"]
    for arguments, part in (
        ([bare, "--to", "sglang"], "bare.json: a bare placement needs --model and --cluster beside it"),
        ([bare, "--to", "sglang", "--even"], "bare.json: a bare placement needs --workload, --cluster and --model"),
        ([bad, "--to", "sglang", *BOTH], "bad.json: holds the loads of experts"),
        ([tmp_path / "no.json", "--to", "sglang"], "no.json: there is no such file"),
        ([saved, "--to", "sglang", "--mtp"], "only TensorRT-LLM's placement has a layer for MTP"),
        ([saved, "--to", "sglang", "--measured", bad], "--measured is for --to perfetto"),
        ([saved, "--to", "perfetto", "--even"], "--even and --mtp are for serving engines"),
        ([saved, "--to", "csv", "--model", "deepseek-ai/DeepSeek-R1"], "the plan places 8 MoE layers, but the model"),
        ([saved, "--to", "csv", *two_b, "-o", tmp_path / "none" / "x"], "cannot be written"),
    ):
        assert part in engine.refused("export", *arguments, *([] if "-o" in arguments else ["-o", out]))
    assert not out.exists()


PROSE, MAN = (SAMPLES / "tiny-moe" / f"alpha-{text}.npz" for text in ("prose", "man"))


@pytest.fixture
def eplb_plan(engine, tmp_path):
    asked = ["--system", "eplb", "--set", "algorithm=eplb", "--set", "slots=even"]
    engine.text("plan", *INPUTS, *asked, "-o", tmp_path / "eplb.json")
    return tmp_path / "eplb.json"


def paid(text: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith("until the move pays off"))
    return line.removeprefix("until the move pays off").split("at most")[0].strip()


def test_what_is_deployed_may_be_a_plan_or_a_bare_placement(engine, eplb_plan, tmp_path):
    assert paid(engine.text("verdict", eplb_plan, "--deployed", "linear", "--workload", PROSE)) == "never"
    same = engine.json("verdict", eplb_plan, "--deployed", eplb_plan)
    assert same["verdict"] == "not-now" and same["gain_held_out"] is None
    assert paid(engine.text("verdict", eplb_plan, "--deployed", eplb_plan)) == "unknown"
    csv = tmp_path / "deployed.csv"
    csv.write_text("Expert,Node\n" + "".join(f"{expert},{(expert + expert // 16) % 8}\n" for expert in range(8 * 16)))
    answer = engine.json("verdict", eplb_plan, "--deployed", csv, "--workload", PROSE)
    assert answer["deployed"] == "deployed" and answer["move_copies"] > 0
    assert answer["beside"][1]["gain"] != 0


def test_thresholds_have_names(engine, eplb_plan):
    strict = engine.json("verdict", eplb_plan, "--threshold", "tokens_per_expert=1000", "--threshold", "gain=0.5")
    assert strict["verdict"] == "cannot-say"
    limits = {criterion["name"]: criterion["threshold"] for criterion in strict["criteria"]}
    assert (limits["tokens_per_expert"], limits["gain"], limits["persistence"]) == (1000, 0.5, 0.5)
    for option, value, message in (
        ("--threshold", "hope=1", "there is no threshold 'hope' (there are: gain, try_gain"),
        ("--threshold", "gain=much", "option gain: 'much' is not a number"),
        ("--threshold", "gain", "--threshold gain: write KEY=VALUE"),
        ("--threshold", "persistence=2", "option persistence: 2 is not between 0 and 1"),
        ("--training", "usual", "is for inference, but what is open is a training step"),
    ):
        assert message in engine.refused("verdict", eplb_plan, option, value)


def test_spare_slots_of_what_cannot_be_are_refused(engine):
    assert "at least one recording" in engine.refused("redundancy", *INPUTS[2:])
    assert "leave out the training step" in engine.refused("redundancy", *INPUTS, "--training", "usual")
    assert "16 experts do not divide into 3 groups" in engine.refused("redundancy", *INPUTS, "--groups", 3)
