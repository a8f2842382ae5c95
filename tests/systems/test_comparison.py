"""Systems run one after another: what is noted of each, what is reported, and when it ends."""

import pytest

from engine.compare.comparison import Comparison
from engine.errors import InputError
from engine.systems import SYSTEMS
from tests.systems.samples import sample_problem

PROBLEM = sample_problem("alpha-code", tokens=400)
LINEAR, ROUND_ROBIN, FOR_TWO = (SYSTEMS[name] for name in ("linear", "round-robin", "rec"))


def test_every_system_gets_a_row_or_a_reason():
    comparison = Comparison(PROBLEM)
    outcomes = list(comparison.run([(LINEAR, {}), (FOR_TWO, {}), (ROUND_ROBIN, {"slots": "even"})]))
    assert [outcome.result.provenance.optimiser for outcome in outcomes] == ["linear", "round-robin"]
    rows = comparison.candidates
    assert [row.plan.name for row in rows] == [LINEAR.title, ROUND_ROBIN.title]
    assert [row.metrics.total for row in rows] == [outcome.result.objective for outcome in outcomes]
    assert list(comparison.refused) == [FOR_TWO.title] and "two models" in comparison.refused[FOR_TWO.title]


def test_the_only_system_that_refuses_says_why_itself():
    with pytest.raises(InputError, match="two models"):
        list(Comparison(PROBLEM).run([(FOR_TWO, {})]))


def test_the_systems_report_as_one_piece_of_work_with_the_best_of_all():
    reports = []
    comparison = Comparison(PROBLEM)
    list(comparison.run([(LINEAR, {}), (ROUND_ROBIN, {})], report=lambda *report: reports.append(report)))
    done, message, best, bound = next(report for report in reports if report[1].startswith(ROUND_ROBIN.title))
    assert (done, message, bound) == (0.5, f"{ROUND_ROBIN.title}: started", None)
    assert best == comparison.candidates[0].metrics.total
    assert all(0 <= report[0] <= 1 for report in reports)


def test_no_system_begins_after_a_stop_but_what_was_found_stays():
    asked = []
    comparison = Comparison(PROBLEM)
    for _ in comparison.run([(LINEAR, {}), (ROUND_ROBIN, {})], stop=lambda: bool(asked)):
        asked.append(True)
    assert [row.plan.name for row in comparison.candidates] == [LINEAR.title]
