"""Who sees little or uses no mouse: contrasts, names and roles on pages, and the main job by keyboard."""

from pathlib import Path

from playwright.sync_api import Locator, Page, expect

from engine.jobs import runner
from tests import everything
from tests.browser.access import faults_in_either_theme
from tests.browser.conftest import RUN, await_rest, finished, go, held, settle
from tests.cases.jobs import until
from tests.cases.processes import ranks_of

MORE_PAGES = ("Workload", "Cluster", "Affinity", "Timeline", "What-if", "Papers", "Review")
"""Pages at which axe looks in `make everything` alone: each takes Chromium seconds without a graphics card."""
MOST_STEPS = 90
"""Presses of Tab to whatever a page has."""


def press(page: Page, target: Locator, key: str = "Enter", steps: int = MOST_STEPS) -> None:
    """Go to an element with at most so many presses of Tab alone and press a key there."""
    expect(target).to_be_visible()
    await_rest(page)
    element = target.element_handle()
    for step in range(steps + 1):
        if element.evaluate("one => one === document.activeElement"):
            page.keyboard.press(key)
            return
        if step < steps:
            page.keyboard.press("Tab")
    raise AssertionError(f"{steps} times Tab did not reach {target}")


def test_the_main_job_by_keyboard_and_no_grave_fault_on_its_pages(page: Page, studio: str, shared_folder: Path) -> None:
    go(page, studio)
    press(page, page.get_by_role("link", name="Skip to main content"), steps=1)
    press(page, page.get_by_role("button", name="Open the sample"), steps=9)
    press(page, page.get_by_role("link", name="Make a plan"))
    expect(page.get_by_role("heading", name="Optimise", exact=True)).to_be_visible()
    press(page, page.get_by_role("button", name=RUN))
    finished(shared_folder, "optimise")
    expect(page.get_by_text("done · ")).to_be_visible()
    settle(page)
    if everything.WANTED:  # of several choices one is reached by Tab, the others by arrows
        press(page, page.get_by_role("radio", name="Candidate plans"), "ArrowRight")
        press(page, page.get_by_role("radio", name="Balance against affinity"), "Enter")
        expect(page.get_by_role("button", name="Find the front")).to_be_visible()
        press(page, page.get_by_role("radio", name="Balance against affinity"), "ArrowLeft")
        press(page, page.get_by_role("radio", name="Candidate plans"), "Enter")
    press(page, page.get_by_role("link", name="See why on the timeline"))
    expect(page.locator(".js-plotly-plot").first).to_be_visible()

    press(page, page.get_by_role("link", name="Launch", exact=True))
    settle(page)
    tokens = page.get_by_role("spinbutton", name="Tokens to replay")
    press(page, tokens, "Control+a")
    page.keyboard.type("64")
    page.keyboard.press("Enter")
    settle(page)
    press(page, page.get_by_role("button", name="Start", exact=True))
    launch = until(lambda: runner.jobs(shared_folder, "launch"))[0]
    with held(until(lambda: ranks_of(launch.folder))[0]):  # it still runs when Stop is reached, on any machine
        press(page, page.get_by_test_id("stMain").get_by_role("button", name="Stop", exact=True))
    expect(page.get_by_role("heading", name="stopped")).to_be_visible(timeout=60_000)
    settle(page)

    violations = faults_in_either_theme(page)
    for name in ("Optimise", *(MORE_PAGES if everything.WANTED else ())):
        page.get_by_role("link", name=name, exact=True).click()
        expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()
        violations += faults_in_either_theme(page)
    assert not violations, "\n".join(violations)
