"""The table of a session's recordings, as a person clicks in it."""

import re
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

from app.workload import CROSS_WIDTH, NAME_WIDTH, ROW_HEIGHT
from tests.browser.conftest import begins_at, go, open_sample, settle

ON_NAME = 40
"""Pixels from the left: on every name."""
SAMPLES = Path(__file__).parents[2] / "sample_traces"


def names(table: Locator) -> Locator:
    """The texts that the table keeps next to its canvas for screen readers."""
    return table.locator('table [role="gridcell"][aria-colindex="1"]')


def click(page: Page, table: Locator, row: int, x: float) -> None:
    table.click(position={"x": x, "y": ROW_HEIGHT * (row + 1.5)})
    settle(page)


def test_the_form_folds_once_an_upload_is_open_though_it_was_unfolded(page: Page, studio: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.csv").write_text("a,b\nx,y\n")
    open_sample(page, studio)
    form = page.get_by_test_id("stExpander").first
    form.locator("summary").click()
    settle(page)
    files = page.locator('input[type="file"]').first
    files.set_input_files(tmp_path / "wrong.csv")
    expect(page.get_by_role("alert").filter(has_text="wrong.csv")).to_be_visible()
    settle(page)
    files.set_input_files([SAMPLES / "tiny-moe" / f"alpha-{name}.npz" for name in ("man", "prose")])
    expect(page.get_by_text("opened alpha-man · opened alpha-prose")).to_be_visible()
    settle(page)
    expect(page.get_by_role("alert").filter(has_text="wrong.csv")).to_have_count(0)
    page.get_by_role("button", name="End guide").click()
    settle(page)
    for width, height in ((1440, 900), (1024, 768)):
        assert begins_at(page, width, height) < 300


def test_a_click_opens_a_recording_and_the_cross_removes_it(page: Page, studio: str) -> None:
    go(page, studio)
    files = [SAMPLES / "tiny-moe" / "alpha-code.npz", SAMPLES / "tiny-moe" / "alpha-prose.npz", SAMPLES / "traffic-8.csv"]
    page.locator('input[type="file"]').set_input_files(files)
    table = page.get_by_test_id("stDataFrame").first
    expect(names(table)).to_have_text(["alpha-code", "alpha-prose", "traffic-8 (open)"])
    settle(page)
    click(page, table, 1, ON_NAME)
    expect(names(table)).to_have_text(["alpha-code", "alpha-prose (open)", "traffic-8"])
    click(page, table, 1, NAME_WIDTH + CROSS_WIDTH / 2)
    expect(names(table)).to_have_text([re.compile("alpha-code"), "traffic-8 (open)"])
    expect(page.get_by_text("alpha-prose is no longer in this session")).to_be_visible()
