"""The table of `docs/best.md` is that of a command: every number again by all of it, two rows by the shortest way there."""

import pytest

from engine.compare.waterfall import Knobs, waterfall
from engine.simulate import simulate
from tests.benchmarks.bench_best import DATA, PAGE, Row, outcome_of, rows_of, single_of, times

ROWS = rows_of(PAGE.read_text(encoding="utf-8"))
QUICK = [row for row in ROWS if row.is_there and row.travel.unit != "copies" and (row.slots, row.redundant) == ("even", 0)]
QUICK = [row for row in QUICK if row.wide][:2]
PRINTED = 5e-4
"""Half a unit of the last of four digits, at most."""
ELSEWHERE = 0.01
"""Relative difference that other versions of libraries may make."""

if_there = [
    pytest.param(row, id=row.words, marks=pytest.mark.skipif(not row.is_there, reason=f"{DATA} is not there")) for row in ROWS
]


def of(words: str) -> str:
    return f"## What it gained\n\n| recording | best other | `best` |\n|---|---|---|\n| {words} | 1,234.5, 2 (EPLB) | 1, 2 |\n"


def test_a_row_is_read_with_what_it_leaves_to_the_row_above():
    first = "beta, width 1024, 4 × 4 A100, node, `fewest`, one spare slot"
    row, same = rows_of(of(first) + "| the same, no spare slot, uneven, copies in turn | 3, 4 (Linear) | 3, 3 |\n")
    assert (row.single, row.system, row.best) == ((1234.5, 2.0), "EPLB", (1.0, 2.0))
    assert (row.travel.unit, row.travel.replicas, row.redundant, row.slots) == ("node", "fewest", 1, "even")
    assert (same.travel.unit, same.travel.replicas, same.redundant, same.slots) == ("node", None, 0, "uneven")
    assert same.cluster == row.cluster == (4, 4, "A100") and same.wide
    with pytest.raises(ValueError, match=r"docs/best.md: two moons"):
        rows_of(of("beta, two moons"))


def test_of_every_recording_there_is_a_row():
    assert {row.recording for row in ROWS} >= {"alpha", "beta", "DeepSeek-V2-Lite", "DeepSeek-R1 loads"}
    assert len(QUICK) == 2


@pytest.mark.parametrize("row", QUICK, ids=lambda row: row.words)
def test_two_rows_begin_at_the_plan_that_they_name_and_a_search_from_there_comes_to_their_time(row: Row):
    problems, single = row.problems(), single_of(row)
    assert times(single, problems) == pytest.approx(row.single, rel=PRINTED)
    placed = next(waterfall(problems[0], single, (), Knobs(time_limit=0.2))).rows[0]
    assert placed.after * 1e3 == pytest.approx(row.best[0], rel=2 * ELSEWHERE)


@pytest.mark.everything
@pytest.mark.parametrize("row", if_there)
def test_every_row_is_found_again(row: Row):
    problems = row.problems()
    outcome = outcome_of(row, problems[0])
    assert times(outcome.result.solution, problems) == pytest.approx(row.best, rel=ELSEWHERE)
    assert row.system in outcome.notes["best of the other systems"].value
    assert times(single_of(row), problems) == pytest.approx(row.single, rel=ELSEWHERE)
    assert outcome.result.objective == simulate(outcome.result.solution, problems[0]).total
