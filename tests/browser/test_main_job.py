"""The main job as a person does it, in a real browser."""

from playwright.sync_api import Page, expect

from tests.browser.conftest import RUN, settle, shoot


class Clicks:
    """Clicks on a page, counted."""

    def __init__(self, page: Page) -> None:
        self.page, self.count = page, 0

    def __call__(self, locator) -> None:
        locator.click()
        self.count += 1


def test_from_the_start_page_to_a_finished_launch_in_six_clicks(page: Page, start_studio) -> None:
    page.goto(start_studio(cold=True))
    click = Clicks(page)
    settle(page)
    shoot(page, "1-empty-workload")

    click(page.get_by_role("button", name="Open the sample"))
    expect(page.get_by_text("8 layers × 16 experts")).to_be_visible(timeout=60_000)
    settle(page)
    shoot(page, "2-workload")

    click(page.get_by_role("link", name="Next: make a plan"))
    click(page.get_by_role("button", name=RUN))
    expect(page.get_by_text("done · ")).to_be_visible(timeout=120_000)
    settle(page)
    shoot(page, "3-optimise")

    click(page.get_by_role("link", name="See why on the timeline"))
    gantt = page.locator(".js-plotly-plot").first
    expect(gantt).to_be_visible()
    settle(page)
    for name in ("Aurora ·", "Random order (RCS) ·", "Shortest job first (SJF) ·"):
        expect(gantt.get_by_text(name).first).to_be_visible()
    shoot(page, "4-timeline")

    click(page.get_by_role("link", name="Launch", exact=True))
    expect(page.get_by_role("spinbutton", name="Ranks")).to_have_value("4", timeout=60_000)
    click(page.get_by_role("button", name="Start", exact=True))
    expect(page.get_by_text("Measured / predicted")).to_be_visible(timeout=180_000)
    settle(page)
    expect(page.get_by_text("Output differs by")).to_be_visible()
    shoot(page, "5-launch")
    assert click.count == 6
