"""The main job as a person does it, in a real browser; in `make everything` its processes start as a person starts them."""

import time
from pathlib import Path

from playwright.sync_api import Page, expect

from tests import everything
from tests.browser.conftest import CLICKED, TITLES, WINDOWS, begins_at, finished, settle


def test_from_the_start_page_to_a_gantt_in_two_clicks_and_a_finished_launch_in_four(
    page: Page, start_studio, data_folder: Path
) -> None:
    page.goto(start_studio(cold=everything.WANTED))
    clicks, begun = len(CLICKED), time.monotonic()
    gain = page.locator(TITLES)
    expect(gain).to_be_in_viewport(ratio=1)
    expect(gain).to_contain_text("speed by planning (simulated, in sample)")
    settle(page)

    page.get_by_role("button", name="Plan the sample").click()
    expect(page.get_by_text("8 layers × 16 experts")).to_be_visible(timeout=60_000)
    finished(data_folder, "optimise")
    expect(page.get_by_text("done · ")).to_be_visible()
    settle(page)

    page.get_by_role("link", name="See why on the timeline").click()
    gantt = page.locator(".js-plotly-plot").first
    expect(gantt).to_be_visible()
    settle(page)
    for name in ("Aurora ·", "Linear placement (deployed now) ·"):
        expect(gantt.get_by_text(name).first).to_be_visible()
    print(f"a plan and its Gantt after {time.monotonic() - begun:.1f} s")
    assert len(CLICKED) - clicks == 2
    usual = page.viewport_size
    for width, height in WINDOWS:
        assert begins_at(page, width, height) < 300, "below the guide and a verdict line with both bounds"

    page.get_by_role("link", name="Launch", exact=True).click()
    expect(page.get_by_role("spinbutton", name="Ranks")).to_have_value("4", timeout=60_000)
    page.set_viewport_size(usual)  # not before: it draws all charts anew
    if not everything.WANTED:  # whose launch has as many as a launch has time for
        page.get_by_role("spinbutton", name="Tokens to replay").fill("64")
        page.keyboard.press("Enter")
        settle(page)
    page.get_by_role("button", name="Start", exact=True).click()
    finished(data_folder, "launch")
    expect(page.get_by_text("Measured / predicted")).to_be_visible()
    settle(page)
    expect(page.get_by_text("Output differs by")).to_be_visible()
    assert len(CLICKED) - clicks == 4
