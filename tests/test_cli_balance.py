"""The command line's figures of balance, and its synthetic recordings."""

from pathlib import Path

import numpy as np
import pytest

from engine.compare.imbalance import PRESETS
from engine.formats import read_plan, read_workload
from tests.test_cli import INPUTS, RECORDING, ROOT, SAMPLES, CommandLine

MODEL = SAMPLES / "tiny-moe-beta.json"

pytestmark = pytest.mark.slow


@pytest.fixture
def engine(capsys) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def saved(engine, tmp_path) -> Path:
    engine.json("plan", *INPUTS, "--system", "linear", "-o", path := tmp_path / "linear.json")
    return path


def factors_of(load: np.ndarray) -> dict[str, float]:
    """Of loads float64[layer, gpu], by NumPy alone."""
    factors = load.max(axis=1) / load.mean(axis=1)
    over = np.percentile(factors, [50, 75, 90, 95])
    return dict(zip(["mean", "p50", "p75", "p90", "p95", "max"], [factors.mean(), *over, factors.max()], strict=True))


def counted() -> np.ndarray:
    """int64[layer, expert] tokens of the recording."""
    return np.stack([np.bincount(layer, minlength=16) for layer in np.load(RECORDING)["experts"][:, :, 0].T])


def load_under(plan: Path) -> np.ndarray:
    """float64[layer, gpu]: tokens of every expert times what every GPU holds of it."""
    return np.einsum("le,leg->lg", counted(), read_plan(plan).placement.share)


def test_overload_factors_of_a_plan(engine, saved):
    load = load_under(saved)
    expected = factors_of(load)
    metrics = engine.json("simulate", saved)["metrics"]
    balance = metrics["balance"]
    assert balance["overload_factor"] == pytest.approx(expected)
    assert balance["imbalance_ratio"] == pytest.approx({name: factor - 1 for name, factor in expected.items()})
    assert balance["overload_factor_of_layer"] == pytest.approx(load.max(axis=1) / load.mean(axis=1))
    assert metrics["balancedness"] == pytest.approx((load.mean(axis=1) / load.max(axis=1)).mean())
    (compared,) = engine.json("compare", saved)["plans"]
    assert compared["metrics"]["balance"] == balance


def test_balance_in_words(engine, saved):
    simulated = engine.text("simulate", saved)
    factors = factors_of(load_under(saved))
    assert f"overload factor {factors['mean']:.3g}× (imbalance ratio {factors['mean'] - 1:.3g})" in simulated
    assert "; over layers p50 1.48×, p75 " in simulated and ", p95 2.02×, worst 2.16×" in simulated
    for table in (engine.text("compare", saved), engine.text("plan", *INPUTS, "--system", "linear")):
        assert "1.48× · 2.02× · 2.16×" in table
        assert "overload: largest / mean GPU load, p50 · p95 · worst over layers" in table


def test_balance_of_a_training_step(engine):
    steps = [*INPUTS, "--training", "usual", "--system", "deepspeed"]
    assert "overload:" not in engine.text("plan", *steps), "a table of training steps has no such column"


def test_skew_over_layers(engine):
    recording = engine.json("inspect", RECORDING)
    assert recording["skew"] == pytest.approx(factors_of(counted()))
    assert "2.02× on average over layers; p50 1.94×, p75 2.13×, p90 2.32×, p95 2.43×, worst 2.55×" in engine.text(
        "inspect", RECORDING
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_become_recordings(engine, tmp_path, preset):
    path = tmp_path / f"{preset}.npz"
    answer = engine.json("synthetic", "--model", MODEL, "--preset", preset, "--tokens", 1024, "-o", path)
    assert answer["saved"] == str(path)
    assert answer["recording"]["name"].startswith(f"synthetic {PRESETS[preset].name}, 1,024 tokens")
    trace = read_workload(path, num_experts=16)
    assert (trace.tokens, trace.layers, trace.num_experts, trace.k) == (1024, 8, 16, 2)
    assert engine.json("inspect", path)["skew"] == answer["recording"]["skew"]


def test_skew_and_affinity_become_a_recording(engine, tmp_path):
    path = tmp_path / "made.npz"
    asked = ["--model", MODEL, "--skew", 1.2, "--affinity", 0.9, "--tokens", 4096, "--seed", 7]
    text = engine.text("synthetic", *asked, "-o", path)
    assert text.startswith("synthetic, skew 1.2, affinity 0.9, 4,096 tokens, seed 7: routing log")
    assert text.endswith(f"saved the recording: {path}\n")
    usual = engine.json("synthetic", "--model", MODEL, "-o", path)["recording"]
    assert usual["name"] == "synthetic, skew 1, affinity 0.5, 16,384 tokens"


def test_a_rotating_hotspot_is_seen_from_step_to_step_alone(engine, tmp_path):
    path, skew = tmp_path / "made.npz", []
    for steps in (3, 12):
        asked = ["--preset", "w6", "--steps", steps, "--tokens", 6144]
        skew.append(engine.json("synthetic", "--model", MODEL, *asked, "-o", path)["recording"]["skew"]["mean"])
    assert skew[0] > 3 and skew[1] < 1.2


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        (["--preset", "w1", "--skew", "1"], ["--skew"]),
        (["--preset", "w1", "--affinity", "0"], ["--affinity"]),
        (["--steps", "3"], ["--steps", "--preset"]),
        (["--preset", "w6", "--steps", "0"], ["steps 0"]),
        (["--preset", "w1", "--tokens", "0"], ["tokens 0"]),
        (["--skew", "-1"], ["skew -1"]),
        (["--skew", "nan"], ["skew nan"]),
        (["-o", "made.csv"], ["made.csv", ".npz"]),
        (["-o", "nowhere/made.npz"], ["nowhere", "No such file"]),
        (["--model", "nowhere.json"], ["nowhere.json", "no such file"]),
    ],
)
def test_recordings_that_cannot_be_made(engine, tmp_path, monkeypatch, asked, parts):
    monkeypatch.chdir(tmp_path)
    line = engine.refused("synthetic", "--model", ROOT / MODEL, "-o", "made.npz", *asked)
    assert all(part in line for part in parts), line
    assert list(tmp_path.iterdir()) == []
