"""`inspect --fix` and `convert`: recordings mended, and in other formats."""

import numpy as np
import pytest

from engine.formats import read_model, read_workload
from engine.formats.placements import write_placement
from engine.plan import Placement
from tests.cases.recordings import SAMPLES

BETA = SAMPLES / "beta-man.npz"
MODEL = SAMPLES.parent / "tiny-moe-beta.json"


@pytest.fixture
def profiled(tmp_path):
    """8,448 profile rows before a real recording."""
    parts = dict(np.load(BETA))
    rows = np.zeros(8448, np.int64)
    sequence = np.concatenate([rows, parts["sequence"] + 1])
    np.savez(tmp_path / "run.npz", experts=parts["experts"][np.r_[rows + 4000, 0:12288]], num_experts=16, sequence=sequence)
    return tmp_path / "run.npz"


def test_fix_cuts_profile_rows_and_tells_it_to_a_person(engine, profiled, tmp_path):
    before = profiled.read_bytes()
    answer = engine.json("inspect", profiled, "--fix")
    (check,) = [check for check in answer["checks"] if check["severity"] != "ok"]
    assert set(check) == {"severity", "code", "message", "rows", "layers", "remedy"}
    assert (check["code"], check["rows"], check["remedy"]) == ("profile-rows", [0, 8448], "cut-profile-rows")
    mended = answer["mended"]
    assert mended["file"] == str(profiled.with_name("run-mended.npz"))
    assert mended["done"][0].startswith("Cut 8,448 tokens") and len(mended["done"]) == 1
    sound = engine.json("inspect", BETA)
    again = engine.json("inspect", mended["file"])
    assert again["max_over_mean"] == mended["max_over_mean"] == sound["max_over_mean"]
    assert [check["severity"] for check in again["checks"]] == ["ok"] * len(again["checks"])
    assert again["checks"][0]["message"] == mended["done"][0]
    assert profiled.read_bytes() == before
    text = engine.text("inspect", profiled, "--fix", "-o", tmp_path / "short.npy")
    assert f"mended: {tmp_path / 'short.npy'}" in text and "Cut 8,448 tokens" in text
    assert "not in the file: which sequence a token belongs to" in text
    assert "nothing was mended" in engine.text("inspect", mended["file"], "--fix")


def test_fix_says_how_a_person_chooses_a_phase_and_keeps_it(engine, tmp_path):
    trace = read_workload(BETA)
    experts, phase = trace.experts.copy(), np.arange(trace.tokens) % 2
    experts[phase == 1] = 12 + experts[phase == 1, :, :1] % 3 + np.arange(2)  # far from the choices of prefill
    np.savez(tmp_path / "phases.npz", experts=experts, phase=phase)
    text = engine.text("inspect", tmp_path / "phases.npz", "--fix")
    assert "nothing written; choose with --keep prefill or --keep decode" in text
    answer = engine.json("inspect", tmp_path / "phases.npz", "--fix", "--keep", "decode", "-o", tmp_path / "decode.npz")
    assert answer["mended"]["done"] == ["Kept the 6,144 tokens of decode out of 12,288."]
    np.testing.assert_array_equal(read_workload(tmp_path / "decode.npz").experts, experts[phase == 1])


@pytest.mark.parametrize("engines", ["trtllm", "vllm-ascend", "csv"])
def test_fix_folds_slots_with_the_plan_that_ran(engine, tmp_path, engines):
    trace = read_workload(BETA)
    rng = np.random.default_rng(0)
    own = np.stack([rng.permutation(16).reshape(4, 4) for _ in range(8)])
    slots = np.concatenate([own, np.roll(own[:, :, :1], 1, axis=1)], axis=2).reshape(8, 20)  # and one of the GPU before
    model = read_model(MODEL)
    placement = Placement.from_slots(slots, np.array([5, 5, 5, 5]), 16, model.moe_layers)
    ran = tmp_path / {"trtllm": "ran.yaml", "csv": "ran.csv"}.get(engines, "ran.json")
    ran.write_bytes(write_placement(engines, placement, model, ran.name).files[ran.name])
    slot = np.stack([[row.tolist().index(expert) for expert in range(16)] for row in slots])
    np.savez(tmp_path / "slots.npz", experts=slot[np.arange(8)[:, None], trace.experts], num_experts=20)
    named = ["--model", MODEL, "--deployed", ran]
    answer = engine.json("inspect", tmp_path / "slots.npz", *named, "--fix")
    assert answer["checks"][0]["code"] == "slot-ids"
    assert answer["mended"]["done"] == ["Folded 20 slots to 16 experts."]
    assert "slot-ids" not in [check["code"] for check in answer["mended"]["checks"]]
    folded = read_workload(tmp_path / "slots-mended.npz")
    np.testing.assert_array_equal(folded.experts, trace.experts)
    assert folded.num_experts == 16


def test_convert_one_of_several_and_say_what_is_lost(engine, tmp_path):
    np.savez(tmp_path / "two.npz", first=np.zeros((3, 2, 1), int), second=np.arange(4).reshape(2, 2, 1))
    engine.json("convert", f"{tmp_path / 'two.npz'}::second", "-o", tmp_path / "a.npy")
    assert np.load(tmp_path / "a.npy").ravel().tolist() == [0, 1, 2, 3]
    code, out, errors = engine("convert", BETA, "-o", tmp_path / "a.json", "--model", MODEL)
    assert (code, errors) == (0, "not in a.json: which token chose what: only counts are kept\n")
    assert "written as sglang-statistics" in out


REFUSED = [
    (("inspect", "{run}", "-o", "{folder}/a.npz"), "-o goes with --fix"),
    (("inspect", "{run}", "--keep", "decode"), "--keep goes with --fix"),
    (("inspect", "{run}", "--fix", "--keep", "decode"), "which phase"),
    (("inspect", "{run}", "--fix", "-o", "{run}"), "run.npz: is what is read"),
    (("inspect", "{run}", "{other}", "--fix", "-o", "{folder}/a.npz"), "a.npz: there are several"),
    (("inspect", "{run}", "--fix", "-o", "{folder}/a.dat"), "a.dat: which format?"),
    (("convert", "{run}", "-o", "{folder}/sub/../run.npz"), "is what is read"),
    (("convert", "{folder}", "-o", "{run}"), "run.npz: is in the folder that is read"),
    (("convert", "{run}", "{other}", "-o", "{folder}/a.npz"), "2 recordings"),
    (("convert", "{run}", "-o", "{folder}/a.json"), "give the model that was recorded"),
    (("convert", "{run}", "-o", "{folder}/a.dat"), "a.dat: which format?"),
    (("convert", "{run}::x", "{other}", "-o", "{folder}/a.npz"), "convert one at a time"),
    (("convert", "{model}", "-o", "{folder}/a.npz"), "not a recording"),
]


def test_what_cannot_be_mended_or_converted_is_refused_and_writes_nothing(engine, profiled, tmp_path):
    (tmp_path / "sub").mkdir()
    names = {"run": profiled, "other": BETA, "folder": tmp_path, "model": MODEL}
    for arguments, says in REFUSED:
        assert says in engine.refused(*(argument.format(**names) for argument in arguments))
    assert [path for path in tmp_path.iterdir() if path.is_file()] == [profiled]
