"""The Affinity page as a person uses it: group, play, run the study and read its charts."""

import contextlib
import re

from playwright.sync_api import Page, TimeoutError, expect

from tests.browser.conftest import TITLES, open_sample, settle, shoot


def test_group_play_and_study_the_sample(page: Page, studio: str) -> None:
    open_sample(page, studio)
    settle(page)
    page.get_by_role("link", name="Affinity", exact=True).click()
    heatmap = page.locator(".js-plotly-plot").first
    title = page.locator(TITLES).first
    expect(title.get_by_text("Expert 5 sends 59 % of its 229 tokens to expert 6")).to_be_visible()
    expect(page.get_by_text("On GPU")).to_be_visible()
    page.get_by_text("Grouped by GPU", exact=True).click()
    stay = re.compile(r"of tokens stay on their GPU \(layers 0 and 1\)")
    expect(title.get_by_text(stay)).to_be_visible()
    assert heatmap.locator(".shapelayer path").count() == 8 + 2 * 7
    settle(page)
    shoot(page, "10-affinity")

    page.get_by_text("Play", exact=True).click()
    for layer in (2, 3):
        expect(title.get_by_text(f"(layers {layer} and {layer + 1})")).to_be_visible()
    page.get_by_text("Play", exact=True).click()
    settle(page)

    # The last step of the playing may still be drawn, which closes the list.
    chosen = page.get_by_test_id("stMultiSelect").get_by_text("Alpha on prose (sample)")
    for _ in range(20):
        page.get_by_test_id("stMultiSelect").locator("input").focus()
        page.keyboard.press("ArrowDown")
        with contextlib.suppress(TimeoutError):
            page.get_by_role("option", name="Alpha on prose (sample)").click(timeout=3_000)
        if chosen.is_visible():
            break
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Run the study").click()
    expect(page.get_by_text("done · ")).to_be_visible(timeout=120_000)
    expect(page.get_by_text(re.compile(r"tokens (get|gain)"))).to_be_visible()
    expect(page.get_by_text(re.compile("Plans from elsewhere keep"))).to_be_visible()
    expect(page.locator(".js-plotly-plot")).to_have_count(5)
    settle(page)
    shoot(page, "11-affinity-study")
