"""Every file of sample_traces/ reads, is what its README says, and can be made again."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from engine.catalogue import cluster_presets, model_presets
from engine.cluster import Cluster
from engine.model import MoEModel
from engine.workload import RoutingTrace

SAMPLES = Path(__file__).parent.parent / "sample_traces"
RECORDINGS = sorted(path.stem for path in SAMPLES.glob("tiny-moe/*.npz"))


def recorded(name: str) -> RoutingTrace:
    with np.load(SAMPLES / "tiny-moe" / f"{name}.npz") as arrays:
        return RoutingTrace(name, arrays["experts"], 16, arrays["sequence"])


def model_of(name: str) -> MoEModel:
    path = SAMPLES / f"tiny-moe-{name.partition('-')[0]}.json"
    return MoEModel.from_json(path.read_bytes(), path.name)


def test_all_recordings_are_there():
    kinds = ("code", "man", "prose")
    expected = [f"{model}-{kind}" for model in ("alpha", "beta") for kind in kinds]
    assert sorted([*expected, "alpha-early-code", "alpha-mid-code"]) == RECORDINGS


@pytest.mark.parametrize("name", RECORDINGS)
def test_recording(name):
    trace, model = recorded(name), model_of(name)
    assert trace.experts.dtype == np.int16
    assert trace.experts.min() >= 0
    assert trace.experts.max() < 16
    model.check_recording(trace.layers, trace.num_experts, trace.k, name)
    assert trace.tokens == model.batch * model.sequence_length
    assert trace.sequence.dtype == np.int32
    np.testing.assert_array_equal(np.unique(trace.sequence, return_counts=True)[1], np.full(96, 128))
    in_order = np.sort(trace.experts, axis=-1)
    assert (np.diff(in_order, axis=-1) > 0).all(), "a token chose an expert twice"


def test_cluster():
    cluster = Cluster.from_json((SAMPLES / "mixed-8.json").read_bytes(), "mixed-8.json")
    assert cluster == cluster_presets()["mixed-8"].cluster


@pytest.mark.parametrize("name", ["tiny-moe-alpha", "tiny-moe-beta"])
def test_model(name):
    assert MoEModel.from_json((SAMPLES / f"{name}.json").read_bytes(), name) == model_presets()[name].model


def test_traffic_is_that_of_the_recording():
    traffic = np.loadtxt(SAMPLES / "traffic-8.csv", delimiter=",")
    pairs = recorded("alpha-code").demand(8)[3].reshape(8, 8, 2).sum(axis=2)
    np.testing.assert_array_equal(traffic, pairs * model_of("alpha").bytes_per_token)
    assert traffic.sum() == 12288 * 128 * 2


def test_the_readmes_recipe_makes_the_traffic_again(tmp_path, monkeypatch):
    (recipe,) = re.findall(r"```python\n(.*?)```", (SAMPLES / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    shutil.copytree(SAMPLES / "tiny-moe", tmp_path / "tiny-moe")
    monkeypatch.chdir(tmp_path)
    exec(recipe, {})
    assert Path("traffic-8.csv").read_text() == (SAMPLES / "traffic-8.csv").read_text()
