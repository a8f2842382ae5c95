"""The same plan from the same input and seed, whatever else the machine does: searches count their work, not seconds."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from engine.cluster import Cluster
from engine.placement.coactivation.kernel import compile_ahead
from engine.plan import Travel
from engine.problem import Problem
from engine.result import GUARD, Guard, never
from engine.systems import SYSTEMS, run
from engine.systems.base import CUT_SHORT
from engine.workload import RoutingTrace
from tests.cases.processes import slow_machine
from tests.cases.samples import SAMPLES, sample_problem

MIXED = Cluster.from_json((SAMPLES / "mixed-8.json").read_text(encoding="utf-8"), "mixed-8")
BUSY = 4
SHARED_ROWS = ("coactivation", "joint")


def first_layers(layers: int, tokens: int, travel: str | None = None) -> Problem:
    """The sample on its mixed cluster: so many of its first layers, and of their tokens."""
    problem = sample_problem("alpha-code", tokens=tokens, cluster=MIXED)
    trace, model = problem.workload, problem.model.model_copy(update={"layers": layers})
    trace = RoutingTrace(trace.name, trace.experts[:, :layers], trace.num_experts, trace.sequence)
    return replace(problem, workload=trace, model=model, travel=Travel(unit=travel) if travel else None)


@contextmanager
def busy_machine() -> Iterator[None]:
    """Four processes that do nothing but take time from all others."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.parametrize("name", ["aurora", "lina", "eplb", "joint", "sjf", "coactivation"])
def test_a_slow_machine_finds_the_same_plan(name, monkeypatch):
    problem = first_layers(1 if name == "aurora" else 2, 400, "gpu" if name in SHARED_ROWS else None)
    if name in SHARED_ROWS:
        compile_ahead()
    outcomes = []
    for factor in (1.0, 100.0):
        with slow_machine(monkeypatch, factor):
            outcomes.append(run(SYSTEMS[name], problem))
    quick, slow = outcomes
    assert (slow.result.solution.id, slow.result.bound) == (quick.result.solution.id, quick.result.bound)
    assert slow.notes.keys() == quick.notes.keys() and "time limit" not in slow.notes


@pytest.mark.everything
@pytest.mark.parametrize(
    ("name", "travel"),
    [(name, None) for name in ("aurora", "exflow", "lina", "eplb", "joint", "sjf")] + [(name, "gpu") for name in SHARED_ROWS],
)
def test_whole_sample_on_a_busy_machine(name, travel):
    problem = first_layers(4, 2000, travel)
    quiet = run(SYSTEMS[name], problem).result
    with busy_machine():
        busy = run(SYSTEMS[name], problem).result
    assert (busy.solution.id, busy.bound, busy.status) == (quiet.solution.id, quiet.bound, quiet.status)


def test_a_time_limit_that_cuts_says_so(monkeypatch):
    with slow_machine(monkeypatch, 1e4):
        outcome = run(SYSTEMS["exflow"], first_layers(2, 400), {"time_limit": 0.5})
    assert outcome.notes["time limit"].value == CUT_SHORT


def test_the_usual_limit_is_an_amount_of_work_and_another_holds_in_seconds():
    options = SYSTEMS["aurora"].options
    usual, chosen = options().time_limit, options(time_limit=3.0).time_limit
    now = time.perf_counter()
    assert options().guard(never).until - now == pytest.approx(GUARD * usual, abs=1)
    assert options(time_limit=3.0).guard(never).until - now == pytest.approx(chosen, abs=1)


def test_a_guard_remembers_that_it_cut_and_parts_tell_the_whole():
    whole = Guard(never, 100.0)
    late, early = Guard(never, -1.0, whole), whole.part(4)
    assert not early() and not whole.cut and early.until < whole.until
    assert late() and late.cut and whole.cut and not whole()
    stopped = Guard(lambda: True, -1.0)
    assert stopped() and not stopped.cut
