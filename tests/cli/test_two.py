"""The command line with two models, several recordings, a placement in use, and tokens that stay."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.cli import main
from engine.errors import InputError
from engine.formats import read_plan
from engine.launch.running import local as running
from engine.systems import SYSTEMS
from tests.cases.cli import CLUSTER, SAMPLES

SHORT = ["--set", "time_limit=0.2"]


class Files:
    """The first two layers of some shipped recordings, with models of as many layers."""

    def __init__(self, folder: Path):
        self.folder = folder
        for path in (SAMPLES / "tiny-moe").glob("*.npz"):
            with np.load(path) as recorded:
                np.savez(folder / path.name, experts=recorded["experts"][::8, :2], sequence=recorded["sequence"][::8])
        for name in ("alpha", "beta"):
            model = json.loads((SAMPLES / f"tiny-moe-{name}.json").read_text()) | {"layers": 2}
            (folder / f"{name}.json").write_text(json.dumps(model))
        self.first = ["--workload", self.recording("alpha-code"), "--cluster", CLUSTER, "--model", folder / "alpha.json"]
        self.second = ["--workload-b", self.recording("beta-man"), "--model-b", folder / "beta.json"]

    def recording(self, name: str) -> Path:
        return self.folder / f"{name}.npz"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return Files(tmp_path_factory.mktemp("recordings"))


@pytest.fixture
def pair(engine, files, tmp_path) -> Path:
    path = tmp_path / "pair.json"
    engine.json("plan", *files.first, *files.second, "--system", "linear", "-o", path)
    return path


@pytest.fixture
def coherent(engine, files, tmp_path) -> Path:
    path = tmp_path / "coherent.json"
    engine.json("plan", *files.first, "--system", "exflow", *SHORT, "-o", path)
    return path


def test_a_system_that_fails_leaves_the_others_their_plans(engine, files, tmp_path, monkeypatch):
    def fails(problem, options, stop, report):
        raise AssertionError("the bound 2\nlies above 1")

    systems, saved = {"rec": replace(SYSTEMS["rec"], recipe=fails), "linear": SYSTEMS["linear"]}, tmp_path / "best.json"
    monkeypatch.setattr("engine.cli.plan.systems_for", lambda problem: systems)
    monkeypatch.setattr("engine.cli.plan.system_named", lambda name, problem: systems[name])
    asked = "plan", *files.first, *files.second, "-o", saved, "--system"
    code, out, errors = engine(*asked, "all")
    assert code == 0 and "Linear placement" in out and read_plan(saved).name == "Linear placement"
    (line,) = (line for line in errors.splitlines() if "REC" in line and "cannot" in line)
    assert "a fault of Switchyard (AssertionError: the bound 2 lies above 1); run rec alone" in line
    with pytest.raises(AssertionError):
        engine(*asked, "rec")


def test_one_recording_of_the_two_can_be_another(engine, files, pair):
    others = ["--workload", files.recording("alpha-prose")], ["--workload-b", files.recording("beta-code")]
    asked = ([], others[0], others[1] + files.second[2:])
    own, first, second = (engine.json("simulate", pair, *more)["metrics"] for more in asked)
    assert engine.json("simulate", pair, *files.second[:2])["metrics"] == own, "the model is remembered"
    assert own["bound"] is not None and first["bound"] is None and second["bound"] is None
    assert len({own["total"], first["total"], second["total"]}) == 3


def test_what_two_models_cannot_be(engine, files, tmp_path):
    def refused(*more: object, system: str = "aurora") -> str:
        return engine.refused("plan", *files.first, *more, "--system", system, "-o", tmp_path / "plan.json")

    third = refused(*files.second, "--workload-b", files.recording("alpha-prose"))
    assert "3 models on one cluster: a GPU is shared by two models at most" in third
    narrow = json.loads((files.folder / "alpha.json").read_text()) | {"experts": 8, "name": "narrow"}
    (tmp_path / "narrow.json").write_text(json.dumps(narrow))
    np.savez(tmp_path / "narrow.npz", experts=np.zeros((40, 2, 1), dtype=np.int16))
    line = refused("--workload-b", tmp_path / "narrow.npz", "--model-b", tmp_path / "narrow.json")
    assert "16 experts per layer" in line and "choose a second model with 16 experts" in line
    line = refused("--workload-b", files.recording("beta-man"), system="linear")
    assert "tiny-moe-alpha" in line and "beta-man" in line and "experts per token" in line
    line = refused("--model-b", files.folder / "beta.json")
    assert "--model-b needs the second model's recording too (--workload-b)" in line
    for more in (("--also", files.recording("alpha-prose")), ("--in-use", files.recording("alpha-prose"))):
        assert "leave out --workload-b" in refused(*files.second, *more)
    assert "one model at a time; close the second model" in refused(*files.second, system="rcs")
    assert "open a second recording and its model" in refused(system="rec")
    assert "no option 'colour'" in refused(*files.second, "--set", "colour=red", system="all")
    assert not (tmp_path / "plan.json").exists()


def test_plans_of_one_model_and_of_two_do_not_mix(engine, files, pair, tmp_path):
    single = tmp_path / "single.json"
    engine.json("plan", *files.first, "--system", "linear", "-o", single)
    assert "close the second" in engine.refused("simulate", single, *files.second)
    assert "open the second too" in engine.refused("compare", single, pair)
    assert "close the second" in engine.refused("compare", pair, single)
    assert "--workload-b" in engine.refused("simulate", pair, "--model-b", files.folder / "beta.json")


def test_a_plan_for_several_recordings_remembers_them(engine, files, tmp_path):
    path, also = tmp_path / "robust.json", ["--also", files.recording("alpha-prose"), "--also", files.recording("alpha-man")]
    (row,) = engine.json("plan", *files.first, *also, "--system", "eplb", *SHORT, "-o", path)["plans"]
    assert "worst recording" in row["notes"]["balancedness"]["value"]
    assert {"workload_also_0", "workload_also_1"} < set(read_plan(path).provenance.inputs)
    assert engine.json("simulate", path)["metrics"] == row["metrics"]
    line = engine.refused("plan", *files.first, "--also", files.recording("beta-man"), "--system", "eplb")
    assert "tiny-moe-alpha" in line and "beta-man" in line
    assert "nowhere.npz" in engine.refused("plan", *files.first, "--also", "nowhere.npz", "--system", "eplb")


def test_a_placement_file_in_use_and_a_plan_in_use_on_other_gpus(engine, files, tmp_path):
    rows = [f"{layer * 16 + expert},{(expert + layer) % 8}" for layer in range(2) for expert in range(16)]
    (tmp_path / "now.csv").write_text("\n".join(["Expert,Node", *rows]))
    new, joint = tmp_path / "new.json", ["--system", "joint", *SHORT, "--set", "max_moves=2"]
    (row,) = engine.json("plan", *files.first, "--in-use", tmp_path / "now.csv", *joint, "-o", new)["plans"]
    placed = read_plan(new)
    wanted = (np.arange(16) + np.arange(2)[:, None]) % 8
    assert (placed.placement.gpu_of_expert != wanted).sum() in (0, 2) and "in_use" in placed.provenance.inputs
    assert row["notes"]["experts that move"]["value"].endswith("of 32, at most 2 allowed")
    cluster = json.loads(CLUSTER.read_text())
    (tmp_path / "small.json").write_text(json.dumps(cluster | {"nodes": cluster["nodes"][:2]}))
    now = tmp_path / "now.json"
    small = [*files.first[:2], "--cluster", tmp_path / "small.json", *files.first[4:]]
    engine.json("plan", *small, "--system", "linear", "-o", now)
    line = engine.refused("plan", *files.first, "--in-use", now, "--system", "joint")
    assert "now.json: is for 4 GPUs, but there are 8" in line


@pytest.mark.parametrize("which", ["pair", "coherent"])
def test_a_plan_is_launched_with_the_inputs_that_it_was_made_from(engine, request, monkeypatch, which):
    seen = []

    def refuse(launch, *more):
        seen.append(launch)
        raise InputError("seen enough")

    monkeypatch.setattr(running, "run_here", refuse)
    path = request.getfixturevalue(which)
    assert main(["launch", str(path), "--ranks", "2", "--tokens", "64", "--dtype", "bf16"]) == 2
    (launch,) = seen
    models = [launch.instructions.model, *([launch.instructions.model_b] if which == "pair" else [])]
    assert [model.name for model in models] == ["tiny-moe-alpha", "tiny-moe-beta"][: len(models)]
    assert all(model.dtype == "bf16" for model in models) and len(launch.workloads) == len(models)
    assert launch.ready and launch.workloads[0].tokens == 64 and launch.instructions.plans[0].placement.gpus == 2


def test_a_launch_takes_the_second_model_from_its_options(engine, files, pair, coherent):
    missing = ["--workload-b", files.folder / "nowhere.npz"]
    assert "no such file" in engine.refused("launch", pair, "--ranks", "2", *missing)
    assert "at least one token" in engine.refused("launch", pair, "--ranks", "2", "--tokens", "0", *files.second)
    assert "is for one model" in engine.refused("launch", coherent, "--ranks", "2", *files.second)
