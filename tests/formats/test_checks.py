"""What is said about good and doubtful recordings."""

from pathlib import Path

import numpy as np
import pytest

from engine.formats import check_recording, read_workload
from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def trace(experts, num_experts=4, **columns):
    return RoutingTrace("t", np.asarray(experts, np.int16), num_experts, **columns)


def texts(workload, level):
    return [finding.text for finding in check_recording(workload) if finding.level == level]


GOOD = np.stack([np.arange(12) % 4, (np.arange(12) + 1) % 4], axis=1)[:, None, :].repeat(2, axis=1)


def test_good_trace():
    workload = trace(GOOD, source_rank=np.arange(12, dtype=np.int32) % 3)
    assert {finding.level for finding in check_recording(workload)} == {"ok"}
    assert "tokens × k = 24" in texts(workload, "ok")[0]


def test_ids_outside():
    assert "token 0, layer 0" in texts(trace(GOOD + 4), "error")[0]


def test_layer_without_tokens_and_padding():
    experts = GOOD.copy()
    experts[:, 1] = -1
    assert any("layer 1 received no tokens" in text for text in texts(trace(experts), "error"))
    assert any("50.0% of the choices are padding" in text for text in texts(trace(experts), "warning"))


def test_all_mass_on_one_expert():
    zeros = np.zeros((5, 2, 1))
    assert any("expert 0" in text and "layer 0 (and 1 more)" in text for text in texts(trace(zeros), "error"))
    assert any("single expert" in text for text in texts(trace(zeros + 1), "warning"))
    assert not texts(trace(zeros + 1), "error")


def test_same_expert_twice():
    experts = GOOD.copy()
    experts[7, 1] = 2
    assert "token 7, layer 1" in texts(trace(experts), "error")[0]
    padded = GOOD.copy()
    padded[7, 1] = -1
    assert not texts(trace(padded), "error")


def test_experts_never_used():
    assert "layer 0: 2 of 6" in texts(trace(GOOD, num_experts=6), "warning")[0]


def test_ranks_without_tokens():
    ranks = np.full(12, 2_000_000_000, np.int32)
    ranks[:6] = 0
    assert (
        "1999999999 of 2000000001 source ranks have no tokens (first: rank 1)"
        in texts(trace(GOOD, source_rank=ranks), "warning")[0]
    )


def test_one_sequence():
    assert "one sequence" in texts(trace(GOOD, sequence=np.zeros(12, np.int32)), "warning")[0]


def test_loads():
    load = ExpertLoad("l", np.array([[5.0, 5.0], [5.0, 5.0], [1.0, 3.0]]), (0, 1, 2))
    assert "Layer 2 counted 4" in texts(load, "warning")[0]
    assert not texts(ExpertLoad("l", load.load[:2], (0, 1)), "warning")


def test_traffic():
    amounts = np.zeros((2, 3, 3))
    amounts[0, 0, 1] = 5
    traffic = TrafficMatrix("m", amounts, 1.0)
    assert "layer 1 moves no bytes" in texts(traffic, "error")[0]
    assert [text[:40].split(" in ")[0] for text in texts(traffic, "warning")] == [
        "rank 1 (and 1 more) sends nothing",
        "rank 0 (and 1 more) receives nothing",
    ]


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared recordings are not here")
def test_real_recordings_are_clean():
    for path in (*DATA.glob("tiny-moe/*.npz"), *DATA.glob("deepseek-r1-loads/*.json")):
        assert {finding.level for finding in check_recording(read_workload(path))} == {"ok"}, path.name
