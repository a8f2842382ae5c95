"""The What-if page as a person uses it: wrong values, a sweep, another row's plan, and a sweep that is stopped."""

import re

from playwright.sync_api import Page, expect

from tests.browser.conftest import settle, shoot
from tests.browser.test_training import choose_in_strip


def type_values(page: Page, label: str, text: str) -> None:
    page.get_by_label(label, exact=True).fill(text)
    page.keyboard.press("Enter")
    settle(page)


def test_sweep_open_and_stop(page: Page, start_studio) -> None:
    page.goto(start_studio("--sample"))
    settle(page)
    page.get_by_role("link", name="What-if", exact=True).click()
    expect(page.get_by_text("Sweeps are for a training step")).to_be_visible()
    choose_in_strip(page, 1, "lancet-p4de-2-nodes")
    choose_in_strip(page, 2, "GPT2-S-MoE")
    page.get_by_role("link", name="Choose the goal").click()
    page.get_by_role("button", name="Training step").click()
    settle(page)
    page.get_by_role("link", name="What-if", exact=True).click()
    expect(page.get_by_text("Nothing swept yet")).to_be_visible()

    start = page.get_by_role("button", name="Run the sweep")
    type_values(page, "Micro-op sizes, MB", "30, zero")
    expect(page.get_by_text("'zero' is not a number")).to_be_visible()
    expect(start).to_be_disabled()
    type_values(page, "Micro-op sizes, MB", "2, 30, 100")
    start.click()
    finding = page.locator(".js-plotly-plot .gtitle").first
    expect(finding).to_contain_text(re.compile("micro-ops are best: "), timeout=60_000)
    expect(page.get_by_test_id("stProgress")).to_have_count(0, timeout=60_000)
    settle(page)
    expect(page.locator(".js-plotly-plot")).to_have_count(2)
    shoot(page, "20-what-if-micro-ops")

    page.get_by_test_id("stDataFrame").click(position={"x": 16, "y": 52})  # the box of the first row
    expect(page.get_by_text("This plan: 2 MB micro-ops")).to_be_visible()
    page.get_by_role("button", name="Open this plan").click()
    expect(page.get_by_test_id("stPopover").nth(3)).to_contain_text("Lina, 2 MB micro-ops")

    page.get_by_text("Partition range", exact=True).click()
    settle(page)
    # Long enough that it still runs when Stop is pressed, on any machine.
    type_values(page, "Most operators in a range", "8-71")
    start.click()
    expect(finding).to_contain_text("So far", timeout=60_000)
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.get_by_text("What was found until then is kept.")).to_be_visible(timeout=60_000)
    settle(page)
    expect(page.locator(".js-plotly-plot")).to_have_count(2)
    shoot(page, "21-what-if-stopped")
