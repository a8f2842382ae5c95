"""`export`, plan files of serving engines, `verdict` and `redundancy`."""

import json
from pathlib import Path

import numpy as np
import pytest

from engine.compare.figures import Metrics
from engine.formats import read_plan
from tests.cases import checkers
from tests.cases.cli import CLUSTER, INPUTS, MODEL, RECORDING, SAMPLES

BOTH = ["--model", MODEL, "--cluster", CLUSTER]


@pytest.fixture
def uneven(saved, tmp_path) -> Path:
    """The same with expert 1 on GPU 1 in all layers."""
    file, even = tmp_path / "uneven.json", read_plan(saved)
    rows = tuple(((0,), (1, 2, 3), *row[2:]) for row in even.placement.experts_of_gpu)
    placement = even.placement.model_copy(update={"experts_of_gpu": rows})
    file.write_text(even.model_copy(update={"placement": placement, "claim": None}).to_json())
    return file


GOES_OUT = ("sglang.json", "sglang.pt", "trtllm.yaml", "vllm.jsonl", "vllm-ascend.json", "megatron.json", "exflow.csv")


@pytest.mark.parametrize("name", [*GOES_OUT, "csv.csv"])
def test_what_goes_out_comes_in_as_a_plan(engine, saved, tmp_path, name):
    out, target = tmp_path / "out" / name, name.partition(".")[0]
    out.parent.mkdir()
    answer = engine.json("export", saved, "--to", target, "-o", out)
    assert answer["saved"] == str(out) and answer["even"] is None and answer["to"] == target
    assert list(out.parent.iterdir()) == [out]
    rows = engine.json("compare", saved, out)["plans"]
    assert rows[1]["moved_experts"] == 0 and rows[1]["metrics"]["balancedness"] == rows[0]["metrics"]["balancedness"]
    simulated = engine.json("simulate", out, *INPUTS)["metrics"]
    assert {*Metrics.__dataclass_fields__, "balancedness"} == set(simulated)
    engine.text("plan", *INPUTS, "--system", "linear", "--in-use", out, "-o", tmp_path / "next.json")


def test_lines_to_add_are_printed(engine, saved, tmp_path):
    text = engine.text("export", saved, "--to", "sglang", "-o", tmp_path / "map.json")
    assert "  --init-expert-location map.json\n  --ep-num-redundant-experts 0\n  --ep-size 8\n" in text
    answer = engine.json("export", saved, "--to", "sglang", "-o", tmp_path / "map.json")
    assert answer["lines"][0] == "--init-expert-location map.json"
    engine.text("export", saved, "--to", "trtllm", "--mtp", "-o", tmp_path / "t.yaml")
    assert len(checkers.tensorrt_llm((tmp_path / "t.yaml").read_bytes(), tuple(range(8)), 16, 8, mtp=8)) == 8


def test_an_uneven_plan_is_refused_or_projected_with_its_price(engine, uneven, tmp_path):
    out = tmp_path / "map.json"
    code, printed, error = engine("export", uneven, "--to", "sglang", "-o", out)
    assert code == 2 and not printed and not out.exists()
    assert error.startswith(
        "error: SGLang needs as many slots on every GPU, but layer 0 (model layer 0) has 3 on GPU 1; 2 on GPUs 2 … 7; 1 "
    )
    assert error.count("\n") == 1 and "(--even)" in error
    even = engine.json("export", uneven, "--to", "sglang", "--even", "-o", out)["even"]
    held = checkers.sglang(out.read_bytes(), 8, (), 16, 8)
    assert {len(slots) for row in held for slots in row} == {even["slots"]} == {2}
    (row,) = engine.json("compare", out, *INPUTS)["plans"]
    assert row["metrics"]["total"] == even["after"]["total"] and even["before"]["total"] > 0
    assert row["metrics"]["balancedness"] == even["after"]["balancedness"]
    assert even["added"] == even["dropped"] == 8
    text = engine.text("export", uneven, "--to", "sglang", "--even", "-o", out)
    assert text.startswith("even: 2 slots on every GPU, ") and "balancedness" in text
    engine.text("export", uneven, "--to", "csv", "-o", tmp_path / "all.csv")


def test_default_layouts_are_plans_too(engine, saved, tmp_path):
    linear, dealt = engine.json("compare", "linear", "round-robin", *INPUTS)["plans"]
    assert linear["metrics"]["total"] != dealt["metrics"]["total"]
    assert engine.json("compare", saved, "linear")["plans"][1]["moved_experts"] == 0
    engine.text("plan", *INPUTS, "--system", "linear", "--in-use", "round-robin")
    engine.text("export", "linear", "--to", "vllm", *BOTH, "-o", tmp_path / "x.jsonl")


def test_from_one_engine_to_another(engine, saved, tmp_path):
    engine.text("export", saved, "--to", "vllm", "-o", tmp_path / "a.jsonl")
    engine.text("export", tmp_path / "a.jsonl", "--to", "trtllm", *BOTH, "-o", tmp_path / "b.yaml")
    held = checkers.tensorrt_llm((tmp_path / "b.yaml").read_bytes(), tuple(range(8)), 16, 8)
    assert held[0] == [[2 * gpu, 2 * gpu + 1] for gpu in range(8)]


def test_perfetto_has_the_prediction_and_beside_it_the_measurement(engine, saved, tmp_path):
    out, timeline = tmp_path / "trace.json", tmp_path / "timeline.json"
    engine.text("export", saved, "--to", "perfetto", "-o", out)
    trace = json.loads(out.read_text())
    engine.text("simulate", saved, "-o", timeline)
    predicted = json.loads(timeline.read_text())
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == len(predicted["events"]["start"])
    measured = predicted | {"source": "measured", "resources": [f"rank {rank}" for rank in range(8)]}
    launched, this = tmp_path / "run.json", read_plan(saved).id
    runs = [{"plan": "other"}, {"plan": this, "predicted": predicted, "measured": measured}]
    launched.write_text(json.dumps({"runs": runs}))
    engine.text("export", saved, "--to", "perfetto", "--measured", launched, "-o", out)
    events = json.loads(out.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert "measured · rank 7" in names and len(names) == 16 and any(name.startswith("simulated · ") for name in names)
    for content, part in (
        ({"runs": runs[:1]}, "has no run of the plan"),
        ({"runs": [{"plan": this}]}, "its timelines are not as a launch saves them"),
        ({"runs": [{"plan": this, "predicted": predicted, "measured": {"events": []}}]}, "its timelines are not"),
        ({"runs": 3}, "has no run of the plan"),
    ):
        launched.write_text(json.dumps(content))
        code, _, error = engine("export", saved, "--to", "perfetto", "--measured", launched, "-o", out)
        assert code == 2 and error.startswith("error: run.json: ") and part in error


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
        code, printed, error = engine("export", *arguments, *([] if "-o" in arguments else ["-o", out]))
        assert code == 2 and part in error and error.count("\n") == 1 and not printed
    assert not out.exists()


PROSE, MAN = (SAMPLES / "tiny-moe" / f"alpha-{text}.npz" for text in ("prose", "man"))


@pytest.fixture
def eplb_plan(engine, tmp_path):
    """EPLB's for the shipped recording of code."""
    asked = ["--system", "eplb", "--set", "algorithm=eplb", "--set", "slots=even"]
    engine.text("plan", *INPUTS, *asked, "-o", tmp_path / "eplb.json")
    return tmp_path / "eplb.json"


def test_a_verdict_counts_the_plans_own_recording_once(engine, eplb_plan):
    answer = engine.json("verdict", eplb_plan, "--workload", PROSE, MAN)
    assert answer["gain_held_out"] == pytest.approx(np.mean([part["gain"] for part in answer["parts"]]))
    assert answer["memory_bytes"] == 8 * 8 * 2 * 128 * 512 * 2
    assert engine.json("verdict", eplb_plan, "--workload", PROSE, "--workload", RECORDING, MAN) == answer


def paid(text: str) -> str:
    """The value of until the move pays off, in the table of criteria."""
    (line,) = (line for line in text.splitlines() if line.startswith("until the move pays off"))
    return line.removeprefix("until the move pays off").split("at most")[0].strip()


def test_a_move_that_loses_never_pays(engine, eplb_plan):
    answer = engine.json("verdict", eplb_plan, "--deployed", "linear", "--workload", PROSE)
    assert answer["gain_held_out"] < 0 and answer["break_even_steps"] is None
    assert paid(engine.text("verdict", eplb_plan, "--deployed", "linear", "--workload", PROSE)) == "never"


def test_what_is_deployed_may_be_a_plan_or_a_bare_placement(engine, eplb_plan, tmp_path):
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


def test_the_gain_of_a_whole_step(engine, files):
    inputs = [*INPUTS[:2], "--cluster", files["cluster"], *INPUTS[4:]]
    engine.text("plan", *inputs, "--system", "eplb", "--set", "algorithm=eplb", "-o", files["eplb"])
    of_layers = engine.json("verdict", files["eplb"], "--workload", PROSE)
    serving = ["--serving", files["step"], "--config", files["config"]]
    answer = engine.json("verdict", files["eplb"], "--workload", PROSE, *serving)
    assert answer["unit"] == "a whole decode step of 32 sequences per GPU"
    assert abs(answer["gain_held_out"]) < abs(of_layers["gain_held_out"])
    assert answer["notes"][0].startswith("operators by the datasheet")


def test_spare_slots(engine):
    answer = engine.json("redundancy", *INPUTS, "--algorithm", "eplb")
    assert answer["held_out"] is True and answer["judged_on"] == ["alpha-code, later half"]
    assert all(point["slots"] % 8 == 0 for point in answer["points"])
    assert answer["knee"] in answer["points"] and answer["why"]
    first, second, *_ = answer["points"]
    assert first["gain_low"] == first["gain_high"] == 0 and second["gain_low"] < second["gain"] < second["gain_high"]
    assert "no more than one slot for each of 16 experts" in answer["limit"]
    judged = engine.text("redundancy", "--workload", RECORDING, PROSE, *INPUTS[2:], "--algorithm", "eplb")
    assert "planned on alpha-code, judged on alpha-prose" in judged


def test_spare_slots_of_what_cannot_be_are_refused(engine):
    assert "at least one recording" in engine.refused("redundancy", *INPUTS[2:])
    assert "leave out the training step" in engine.refused("redundancy", *INPUTS, "--training", "usual")
    assert "16 experts do not divide into 3 groups" in engine.refused("redundancy", *INPUTS, "--groups", 3)
