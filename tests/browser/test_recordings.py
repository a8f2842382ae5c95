"""The table of a session's recordings, as a person clicks in it."""

import re
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

from app.workload.recordings import CROSS_WIDTH, NAME_WIDTH, ROW_HEIGHT
from tests.browser.conftest import settle

ON_NAME = 40
"""Pixels from the left: on every name."""
SAMPLES = Path(__file__).parents[2] / "sample_traces"


def names(table: Locator) -> Locator:
    """What the table keeps beside its canvas for screen readers."""
    return table.locator('table [role="gridcell"][aria-colindex="1"]')


def click(page: Page, table: Locator, row: int, x: float) -> None:
    table.click(position={"x": x, "y": ROW_HEIGHT * (row + 1.5)})
    settle(page)


def test_a_click_opens_a_recording_and_the_cross_removes_it(page: Page, start_studio) -> None:
    page.goto(start_studio())
    settle(page)
    files = [
        SAMPLES / "tiny-moe" / "alpha-code.npz",
        SAMPLES / "tiny-moe" / "alpha-prose.npz",
        SAMPLES / "traffic-8.csv",
    ]
    page.locator('input[type="file"]').set_input_files(files)
    table = page.get_by_test_id("stDataFrame").first
    expect(names(table)).to_have_text(["alpha-code", "alpha-prose", "traffic-8 (open)"])
    settle(page)
    click(page, table, 1, ON_NAME)
    expect(names(table)).to_have_text(["alpha-code", "alpha-prose (open)", "traffic-8"])
    click(page, table, 1, NAME_WIDTH + CROSS_WIDTH / 2)
    expect(names(table)).to_have_text([re.compile("alpha-code"), "traffic-8 (open)"])
    expect(page.get_by_text("alpha-prose is no longer in this session")).to_be_visible()
