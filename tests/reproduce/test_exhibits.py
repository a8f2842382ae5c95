"""Claims of the papers: the rule of their verdicts, and the shape of every exhibit that is quickly computed."""

import time
from contextlib import suppress
from itertools import pairwise

import pytest

from engine.errors import InputError, StoppedError
from engine.reproduce.exhibits import Claim, Exhibit
from engine.reproduce.papers import PAPERS, claims_as_rows, reproduce
from engine.result import never
from engine.systems import run, systems_for
from engine.systems.base import silent
from tests import everything
from tests.reproduce.page import PAGE, cells
from tests.spent import loop_seconds

SLOW = {
    "aurora": ("11c", "11d", 12, 14),
    "exflow": (6, 10, 12, 13, "III"),
    "lina": (1, "2 and 4", 3, 4, 5, 6, 10, "11 and 12", 13, 14, "14, sweep", "step by step", 15, 16, 17, 18, 19),
    "lancet": (6, 11, 12, 13, 15, 16),
    "pipemoe": ("VI", "VII"),
}
"""Numbers of the figures and tables of a paper that take seconds; they are computed where everything is."""


@pytest.mark.parametrize(
    ("published", "ours", "more", "verdict"),
    [
        (1.38, 1.30, {"neutral": 1.0}, "reproduced"),
        (1.38, 1.53, {"neutral": 1.0}, "partly"),
        (1.05, 1.0, {"neutral": 1.0}, "not"),
        (1.38, 1.18, {"neutral": 1.0}, "not"),
        (1.38, 0.8, {"neutral": 1.0}, "not"),
        (1.38, 2.2, {"neutral": 1.0}, "not"),
        ((1.36, 1.81), (1.4, 1.7), {"neutral": 1.0}, "reproduced"),
        ((1.36, 1.81), 1.28, {"neutral": 1.0}, "reproduced"),
        ((1.36, 1.81), (1.1, 1.5), {"neutral": 1.0}, "partly"),
        (0.083, 0.118, {"neutral": 0.0}, "partly"),
        (0.0, 0.0, {"neutral": 0.0}, "reproduced"),
        (0.0, 0.1, {"neutral": 0.0}, "not"),
        (7.6e-3, 7.0e-3, {}, "reproduced"),
        (7.6e-3, 4.0e-3, {}, "partly"),
        (0.335, 0.339, {"spread": 0.005}, "reproduced"),
        (0.335, 0.345, {"spread": 0.005}, "partly"),
        (0.335, None, {}, "not"),
    ],
)
def test_verdicts(published, ours, more, verdict):
    claim = Claim(quantity="speedup", published=published, ours=ours, why="the rule", **more)
    assert claim.verdict.value == verdict


def entries() -> list:
    every = [(name, entry) for name, paper in PAPERS.items() for entry in paper.entries]
    slow = {(name, str(number)) for name, numbers in SLOW.items() for number in numbers}
    return [each for each in every if everything.WANTED or (each[0], each[1].number.partition(" ")[2]) not in slow]


@pytest.mark.parametrize(("name", "entry"), entries(), ids=lambda part: getattr(part, "number", part))
def test_every_exhibit_has_claims_with_reasons_and_a_chart_of_columns_that_are_there(name, entry):
    exhibit = entry.make(never)
    assert exhibit.claims and all(claim.quantity and claim.why and "\n" not in claim.why for claim in exhibit.claims)
    rows = claims_as_rows(name, entry, exhibit)
    assert len({row["quantity"] for row in rows}) == len(rows)
    assert Exhibit.from_json(exhibit.to_json(), "an exhibit") == exhibit
    page = PAGE.read_text(encoding="utf-8")
    printed = [claim for claim in exhibit.claims if "planning, seconds" not in claim.quantity]  # of the machine
    assert all(f"| {entry.number} | {' | '.join(cells(claim))} |" in page for claim in printed)
    if exhibit.chart is not None:
        used = {exhibit.chart.x, exhibit.chart.y, exhibit.chart.series, exhibit.chart.facet, exhibit.chart.published} - {None}
        assert exhibit.rows and all(used <= set(row) for row in exhibit.rows)


@pytest.mark.parametrize("paper", PAPERS)
def test_a_figure_that_is_stopped_in_the_making_is_left_out(paper):
    asked = []

    def stop() -> bool:
        asked.append(None)
        return len(asked) > 1

    for entry in PAPERS[paper].entries:
        asked.clear()
        assert list(reproduce(paper, entry.number, stop, silent)) == [] and len(asked) > 1


LOOPS = 4
"""Processor time between two looks at a stop, at most, in loops of `tests.spent`: 1.5 s where one takes 0.37 s."""
FEW = 4
"""Looks after which a slow figure is stopped where not everything is tested."""


@pytest.fixture(scope="module")
def loop() -> float:
    return loop_seconds()


@pytest.mark.parametrize(
    ("paper", "number", "few"),
    [("aurora", number, True) for number in ("Figure 11c", "Figure 11d", "Figure 12", "Figure 14")]
    + [
        pytest.param(paper, entry.number, False, marks=pytest.mark.everything)
        for paper, entry in ((name, entry) for name in PAPERS for entry in PAPERS[name].entries)
    ],
)
def test_a_stop_is_looked_at_often(paper, number, few, loop):
    looks = []

    def stop() -> bool:
        looks.append(time.process_time())
        return few and len(looks) > FEW

    (entry,) = (entry for entry in PAPERS[paper].entries if entry.number == number)
    if entry.openings:  # what is loaded at first use is not the figure's
        opening, problem = entry.openings[0], entry.openings[0].problem()
        run(systems_for(problem)[opening.system], problem, opening.options)
    looks.append(time.process_time())
    with suppress(StoppedError):
        entry.make(stop)
    looks.append(time.process_time())
    assert max(after - before for before, after in pairwise(looks)) < LOOPS * loop


EXHIBITS = {
    "aurora": "Figure 11a, Figure 11b, Figure 11c, Figure 11d, Figure 12, Figure 13, Figure 14",
    "exflow": "Table I, Table III, Figure 6, Figure 7, Figure 8, Figure 10, Figure 11, Figure 12, Figure 13",
    "lina": "Table 2, Table 3, Table 4, Table 5, Table 6, Figure 9, Figure 10, Figure 14, Figure 15, Figure 16, Figure 17, "
    "Figure 18, Figure 19, Table 1, Figures 2 and 4, Figure 6, Figures 11 and 12, Figure 13",
    "lancet": "Figure 2, Figure 6, Figure 11, Figure 12, Figure 13, Figure 14, Figure 15, Figure 16",
    "pipemoe": "Table II, Table IV, Table VI, Table VII, Figure 3, Figure 4, Figure 6",
}
"""Figures and tables that each paper evaluates, by its own numbers."""


@pytest.mark.parametrize("name", PAPERS)
def test_every_figure_and_table_that_a_paper_evaluates_is_there_with_its_numbers(name):
    numbers = {entry.number for entry in PAPERS[name].entries}
    assert set(EXHIBITS[name].split(", ")) <= numbers
    section = PAGE.read_text(encoding="utf-8").partition(f"## {PAPERS[name].title}\n")[2].partition("\n## ")[0]
    for number in numbers:
        rows = [line.split(" | ") for line in section.splitlines() if line.startswith(f"| {number} |")]
        assert rows and all(len(row) == 5 and row[2] and row[3] for row in rows), number


def test_papers_are_found_by_name_and_exhibits_by_number():
    for paper in PAPERS.values():
        assert len({entry.number for entry in paper.entries}) == len(paper.entries)
    ((name, entry, _),) = reproduce("pipemoe", "table iv", never, silent)
    assert (name, entry.number) == ("pipemoe", "Table IV")
    with pytest.raises(InputError, match="there is no Table 99 here"):
        next(reproduce("all", "Table 99", never, silent))
    with pytest.raises(InputError, match="there is no paper 'paper'"):
        next(reproduce("paper", None, never, silent))
    assert not list(reproduce("all", None, lambda: True, silent))
