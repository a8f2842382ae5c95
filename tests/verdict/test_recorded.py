"""Verdicts on recorded loads and routing, as docs/verdict-examples.md prints them."""

from pathlib import Path

import pytest

from tests.benchmarks.bench_verdict import DATA, DECODE, NAMES, R1, lite
from tests.costs.silicon import needs_tables

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "verdict-examples.md"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DATA.is_dir(), reason="the shared recordings are not here")]


@needs_tables
def test_the_table_of_deepseek_r1():
    """One row of each table; `python -m tests.benchmarks.bench_verdict` prints them all."""
    r1, text = R1(DECODE), DOCUMENT.read_text()
    first = r1.row(NAMES[1])
    assert first in text and first.endswith("| do it |")
    assert r1.verdict(NAMES[3], deployed=NAMES[2]).verdict == "not-now"


def test_a_task_and_another_on_deepseek_v2_lite():
    """The second half of a task is served by a plan for its first half; another task is not."""
    alone, both = lite(0, "intent"), lite(0, "intent", "summary")
    assert alone.verdict == "do-it" and alone.persistence > 0.9
    assert both.verdict == "try-it" and both.persistence < 0.5 and both.gain_worst < 0
    assert both.parts[0] == alone.parts[0]
