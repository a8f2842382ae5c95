"""The launches of the check, on processors: the same code, on few tokens of small models."""

import pytest

from engine.launch.places.devices import Devices
from engine.simulate.streams import POLICIES
from engine.training import TrainingStep
from tests.cases.launch_plans import MODES
from tests.gpu import launches
from tests.gpu.launches import CASES, Sizes, counts, launched
from tests.gpu.table import CheckError, SkipError
from tests.launch.nvml import GIB

SMALL = Sizes(64, 32, 1, TrainingStep(batch=2, sequence_length=8, heads=2, dense_d_ff=64, vocabulary=50))
HOST = Devices(gpus=(), memory=(), cores=2, host_memory=8 * GIB)
PLANS = {
    "one model": [*MODES, "coherent matched", "coherent concurrent"],
    "two models": [f"{mode} beside {mode}" for mode in MODES if mode != "shared"],
    "Lina's scheduler": ["Lina"],
    "training step": list(POLICIES),
    "training step by Lancet": ["Lancet"],
    "your own model": ["matched", "concurrent"],
}


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("case", CASES)
def test_what_a_gpu_is_to_run_runs_on_two_ranks(case):
    findings = launched(case, 2, "gloo", HOST, SMALL)
    assert [finding.name for finding in findings] == PLANS[case]
    for finding in findings:
        kinds = finding.figures["kinds"]
        assert {"gate", "ffn", "dispatch", "combine", "aggregate"} <= set(kinds)
        assert all(times["measured"] > 0 and times["predicted"] > 0 for times in kinds.values())
        assert len(finding.figures["passes"]) == SMALL.repeats and finding.figures["difference"] <= 0.05
        for kind, times in kinds.items():
            far = abs(times["measured"] / times["predicted"] - 1) > launches.FAR
            assert far == (kind in finding.figures["far"]) and f"{kind} " in finding.text


@pytest.mark.usefixtures("warm_python")
def test_one_rank_has_a_launch_too():
    assert all("dispatch" not in finding.figures["kinds"] for finding in launched("one model", 1, "gloo", HOST, SMALL))


def test_ranks_that_would_not_use_the_backend_are_a_fault():
    with pytest.raises(CheckError, match="the backend is gloo"):
        launched("one model", 2, "nccl", HOST, SMALL)


def test_lancet_is_left_out_where_nothing_solves_its_programs(monkeypatch):
    monkeypatch.setattr(launches, "find_spec", lambda name: None)
    with pytest.raises(SkipError, match="lacks ortools"):
        launched("training step by Lancet", 2, "gloo", HOST, SMALL)


@pytest.mark.parametrize(
    ("gpus", "wanted"), [(0, []), (1, [1]), (4, [1, 2, 3, 4]), (8, [*range(1, 9)]), (20, [*range(1, 9), 16, 20])]
)
def test_a_machine_is_checked_with_these_numbers_of_its_gpus(gpus, wanted):
    assert counts(gpus) == wanted


@pytest.mark.parametrize("case", ["one model", "training step"])
def test_on_gpus_every_rank_has_one_of_its_own(case):
    """The instructions that the ranks would get, as far as they can be looked at here."""
    gpus = Devices(gpus=("H100",) * 3, memory=(80 * GIB,) * 3, cores=8, host_memory=64 * GIB)
    told = launches.prepare(CASES[case](3, launches.FULL), gpus).instructions
    assert (told.ranks, told.backend, told.gpus, told.device) == (3, "nccl", 3, "cuda")
