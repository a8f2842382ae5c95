"""`solve KERNEL`: JSON in, JSON out, every answer held against the rules of its problem."""

import json
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.plan import Schedule
from engine.validate import check_assignment, check_schedule
from tests.cases.examples import examples

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
COMMON = {"status", "objective", "bound", "runtime"}


def schedule_of(answer: dict) -> Schedule:
    rows = [(send, phase) for phase, sent in enumerate(answer["phases"]) for send in sent["sends"]]
    for send, _ in rows:
        assert set(send) == {"src", "dst", "bytes"}
        assert type(send["src"]) is type(send["dst"]) is int
    columns = {name: tuple(send[name] for send, _ in rows) for name in ("src", "dst", "bytes")}
    duration = tuple(phase["duration"] for phase in answer["phases"])
    return Schedule(phase=tuple(phase for _, phase in rows), duration=duration, **columns)


def held_against_the_rules(answer: dict, instance: dict) -> None:
    """Legal, and the makespan, the bound and the status are what the phases really give."""
    assert set(answer) == COMMON | {"phases"} and all(set(phase) == {"duration", "sends"} for phase in answer["phases"])
    traffic = np.array(instance["traffic"], dtype=float)
    rate = np.broadcast_to(np.array(instance["bandwidth"], dtype=float), len(traffic))
    makespan, bound = check_schedule(schedule_of(answer), traffic, rate, rate, instance.get("mode", "matched"))
    assert answer["objective"] == pytest.approx(makespan, rel=1e-9)
    assert answer["bound"] == pytest.approx(bound, rel=1e-9)
    assert answer["objective"] == pytest.approx(bound, rel=1e-9) and answer["status"] == "OPTIMAL"
    assert answer["runtime"] >= 0


def worth_of(answer: dict, instance: dict) -> float:
    tokens, rate = np.array(instance["tokens"], float), np.array(instance["bandwidth"], float)
    compute = np.outer(instance["seconds_per_token"], tokens.sum(axis=0))
    ones = np.ones(len(tokens), dtype=int)
    return check_assignment(np.array(answer["gpu_of_expert"]), tokens, compute, rate, rate, ones)


def best_by_trying_all(instance: dict) -> float:
    return min(
        worth_of({"gpu_of_expert": list(permutation)}, instance)
        for permutation in permutations(range(len(instance["tokens"])))
    )


@pytest.mark.parametrize("mode", ["matched", "shared"])
@pytest.mark.parametrize("bandwidth", [1e9, 7, [3e9, 1e9, 2e9, 5e8]], ids=["number", "whole number", "list"])
def test_order(solver, mode, bandwidth):
    traffic = [[9e6, 1e6, 0, 4e6], [2e6, 0, 5e6, 1e6], [0, 3e6, 0, 8e6], [6e6, 1e6, 2e6, 0]]
    instance = {"traffic": traffic, "bandwidth": bandwidth, "mode": mode}
    held_against_the_rules(solver.answer("order", instance), instance)


def test_order_is_matched_unless_told_otherwise(solver):
    instance = {"traffic": [[0, 4, 4], [0, 0, 0], [0, 0, 0]], "bandwidth": [1, 4, 4]}
    answer = solver.answer("order", instance)
    held_against_the_rules(answer, instance)
    assert all(len(phase["sends"]) == 1 for phase in answer["phases"])


def test_the_modes_differ_where_a_fast_receiver_meets_slow_senders(solver):
    instance = {"traffic": [[0, 0, 6], [0, 0, 6], [0, 0, 0]], "bandwidth": [1, 1, 2]}
    matched, shared = (solver.answer("order", instance | {"mode": mode}) for mode in ("matched", "shared"))
    assert (matched["objective"], shared["objective"]) == (pytest.approx(12), pytest.approx(6))


@pytest.mark.parametrize("mode", ["matched", "shared"])
@pytest.mark.parametrize("traffic", [[[0]], [[5]], [[0, 0], [0, 0]], [[3, 0], [0, 4]]])
def test_order_without_anything_to_send(solver, mode, traffic):
    answer = solver.answer("order", {"traffic": traffic, "bandwidth": 2, "mode": mode})
    assert (answer["objective"], answer["bound"], answer["status"]) == (0, 0, "OPTIMAL")
    assert not any(phase["sends"] for phase in answer["phases"])


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 6).flatmap(
        lambda n: st.fixed_dictionaries(
            {
                "traffic": st.lists(
                    st.lists(st.one_of(st.just(0), st.integers(1, 10**9)), min_size=n, max_size=n),
                    min_size=n,
                    max_size=n,
                ),
                "bandwidth": st.one_of(
                    st.floats(1, 1e11), st.lists(st.sampled_from([5e9, 1.25e10, 1e8]), min_size=n, max_size=n)
                ),
                "mode": st.sampled_from(["matched", "shared"]),
            }
        )
    )
)
def test_any_order_is_legal_and_meets_its_bound(solver, instance):
    held_against_the_rules(solver.answer("order", instance), instance)


def test_assign(solver):
    instance = {
        "tokens": [[4, 1, 0], [2, 6, 1], [0, 3, 9]],
        "bandwidth": [10, 5, 20],
        "seconds_per_token": [0.1, 0.3, 0.05],
    }
    answer = solver.answer("assign", instance)
    assert set(answer) == COMMON | {"gpu_of_expert"}
    assert sorted(answer["gpu_of_expert"]) == [0, 1, 2]
    assert answer["objective"] == pytest.approx(worth_of(answer, instance), rel=1e-9)
    assert answer["objective"] == pytest.approx(best_by_trying_all(instance), rel=1e-9)
    assert answer["status"] == "OPTIMAL" and answer["bound"] == pytest.approx(answer["objective"], rel=1e-9)


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 5).flatmap(
        lambda n: st.fixed_dictionaries(
            {
                "tokens": st.lists(st.lists(st.integers(0, 50), min_size=n, max_size=n), min_size=n, max_size=n),
                "bandwidth": st.lists(st.floats(0.1, 100), min_size=n, max_size=n),
                "seconds_per_token": st.lists(st.floats(0, 1), min_size=n, max_size=n),
            }
        )
    )
)
def test_no_other_assignment_is_better(solver, instance):
    answer = solver.answer("assign", instance)
    assert answer["objective"] == pytest.approx(worth_of(answer, instance), rel=1e-9, abs=1e-12)
    assert answer["objective"] == pytest.approx(best_by_trying_all(instance), rel=1e-9, abs=1e-12)
    assert answer["bound"] <= answer["objective"] * (1 + 1e-9)


@pytest.mark.parametrize("tokens", [[[0]], [[7]], [[0, 0], [0, 0]]])
def test_assign_of_one_gpu_and_of_nothing(solver, tokens):
    n = len(tokens)
    instance = {"tokens": tokens, "bandwidth": [1] * n, "seconds_per_token": [2] * n}
    answer = solver.answer("assign", instance)
    assert sorted(answer["gpu_of_expert"]) == list(range(n))
    assert answer["objective"] == 2 * np.sum(tokens)


def test_an_array_in_is_an_array_out_in_the_same_order(solver):
    sizes = (1, 3, 2)
    instances = [{"traffic": (np.ones((n, n)) * 6).tolist(), "bandwidth": 2} for n in sizes]
    answers = solver.answer("order", instances)
    assert [answer["objective"] for answer in answers] == [pytest.approx(3 * (n - 1)) for n in sizes]
    assert solver.answer("order", []) == []
    assert solver.answer("order", instances[:1])[0].keys() == COMMON | {"phases"}


def test_a_time_limit_keeps_a_legal_answer_and_says_so(solver):
    rng = np.random.default_rng(3)
    instance = {"traffic": rng.integers(1, 10**6, (48, 48)).tolist(), "bandwidth": 1e6}
    answer = solver.answer("order", instance, '{"time_limit": 1e-9}')
    traffic, rate = np.array(instance["traffic"], float), np.full(48, 1e6)
    makespan, bound = check_schedule(schedule_of(answer), traffic, rate, rate, "matched")
    assert answer["objective"] == pytest.approx(makespan) and bound <= makespan
    assert answer["status"] == "TIME_LIMIT"


ORDER = {"traffic": [[0, 1], [2, 0]], "bandwidth": 1}
ASSIGN = {"tokens": [[0, 1], [2, 0]], "bandwidth": [1, 1], "seconds_per_token": [1, 1]}


@pytest.mark.parametrize(
    ("instance", "parts"),
    [
        ("", ["standard input", "JSON"]),
        ('{"traffic": [[0', ["standard input", "JSON"]),
        ("[" * 100_000, ["standard input"]),
        ("null", ["order"]),
        ("7", ["order"]),
        ('{"bandwidth": 1}', ["traffic"]),
        ({"traffic": [[0]]}, ["bandwidth"]),
        (ORDER | {"traffic": []}, ["traffic"]),
        (ORDER | {"traffic": [[]]}, ["traffic"]),
        (ORDER | {"traffic": [[0, 1]]}, ["order"]),
        (ORDER | {"traffic": [[0, 1], [2]]}, ["traffic"]),
        (ORDER | {"traffic": [[0, -1], [2, 0]]}, ["order"]),
        (ORDER | {"traffic": [[0, "x"], [2, 0]]}, ["traffic"]),
        (ORDER | {"traffic": [[0, None], [2, 0]]}, ["traffic"]),
        ('{"traffic": [[0, NaN], [2, 0]], "bandwidth": 1}', ["traffic"]),
        ('{"traffic": [[0, 1e999], [2, 0]], "bandwidth": 1}', ["traffic"]),
        ('{"traffic": [[0, 1' + "0" * 400 + '], [2, 0]], "bandwidth": 1}', ["traffic"]),
        (ORDER | {"bandwidth": 0}, ["order"]),
        (ORDER | {"bandwidth": -1}, ["order"]),
        (ORDER | {"bandwidth": [1, 0]}, ["order"]),
        (ORDER | {"bandwidth": [1, 1, 1]}, ["order"]),
        (ORDER | {"bandwidth": []}, ["order"]),
        (ORDER | {"mode": "sequential"}, ["mode"]),
        (ORDER | {"speed": 3}, ["speed"]),
        ([ORDER, ORDER | {"bandwidth": [1]}], ["instance 1"]),
        ([ORDER, []], ["instance 1"]),
    ],
)
def test_a_malformed_order_is_one_line(solver, instance, parts):
    solver.refused("order", instance, *parts)


@pytest.mark.parametrize(
    ("instance", "parts"),
    [
        ({name: value for name, value in ASSIGN.items() if name != "seconds_per_token"}, ["seconds_per_token"]),
        (ASSIGN | {"tokens": [[1, 2, 3], [1, 2, 3]]}, ["2 GPUs and 3 experts"]),
        (ASSIGN | {"tokens": [[1, 2], [3]]}, ["tokens"]),
        (ASSIGN | {"tokens": [[1, -2], [3, 4]]}, ["negative"]),
        (ASSIGN | {"bandwidth": [1]}, ["bandwidth", "2", "1"]),
        (ASSIGN | {"bandwidth": [1, 0]}, ["bandwidth"]),
        (ASSIGN | {"bandwidth": 1}, ["bandwidth"]),
        (ASSIGN | {"seconds_per_token": [1, 1, 1]}, ["seconds_per_token", "2", "3"]),
        (ASSIGN | {"seconds_per_token": [1, -1]}, ["seconds_per_token"]),
        ([ASSIGN, ASSIGN, ASSIGN | {"tokens": []}], ["instance 2", "tokens"]),
    ],
)
def test_a_malformed_assignment_is_one_line(solver, instance, parts):
    solver.refused("assign", instance, *parts)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ('{"speed": 3}', ["--options", "speed"]),
        ('{"time_limit": 0}', ["--options", "time_limit"]),
        ('{"seed": -1}', ["seed"]),
        ("{", ["--options", "JSON"]),
        ("[]", ["--options"]),
        ("[" * 100_000, ["--options", "JSON"]),
    ],
)
def test_malformed_options_are_one_line(solver, options, parts):
    solver.refused("order", ORDER, *parts, options=options)


def test_through_a_real_process():
    def run(text: str, *more: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "engine", "solve", "order", *more]
        return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True)

    good = run(json.dumps(ORDER), "--options", '{"time_limit": 10, "seed": 0, "exact": true}')
    assert (good.returncode, good.stderr) == (0, "")
    held_against_the_rules(json.loads(good.stdout), ORDER)
    bad = run('{"traffic": ')
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)
    assert bad.stderr.startswith("error: ") and "Traceback" not in bad.stderr
