"""Two models on one cluster, and the front of one model's plans, in a real browser."""

from playwright.sync_api import Page, expect

from tests.browser.conftest import open_sample, run_systems, settle, shoot


def test_two_models_then_the_front_of_one(page: Page, studio: str) -> None:
    open_sample(page, studio)
    settle(page)
    page.get_by_role("link", name="Optimise").click()
    settle(page)  # Streamlit loses its place when a page is clicked while it still replaces the one before
    page.get_by_role("button", name="Two models on one cluster").click()
    page.get_by_role("combobox", name="Second model's recording").click()
    page.get_by_role("option", name="Beta on prose (sample)").click()
    expect(page.get_by_text("beside beta-prose")).to_be_visible()
    settle(page)
    run_systems(page)
    shoot(page, "6-two-models")
    page.get_by_role("link", name="See why on the timeline").click()
    gantt = page.locator(".js-plotly-plot").first
    expect(gantt.get_by_text("Expert FFN, second model").first).to_be_visible()
    settle(page)
    shoot(page, "7-two-models-timeline")

    page.get_by_test_id("stSidebar").get_by_role("link", name="Optimise").click()
    settle(page)
    page.get_by_role("button", name="Inference latency of one model").click()
    settle(page)
    page.get_by_text("Balance against affinity").click()
    page.get_by_role("spinbutton", name="Points on the front").fill("3")
    page.get_by_role("spinbutton", name="Time limit, s").fill("4")
    page.get_by_role("spinbutton", name="Time limit, s").press("Tab")
    settle(page)
    page.get_by_role("button", name="Find the front").click()
    opened = page.get_by_role("button", name="Open this plan").last  # the one that it replaces may still be there
    expect(opened).to_be_visible(timeout=60_000)
    settle(page)
    shoot(page, "8-front")
