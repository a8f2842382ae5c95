"""Who sees little or uses no mouse: contrasts, names and roles on every page in both themes, and the main job by keyboard."""

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import RUN, await_rest, settle, shoot

PAGES = ("Workload", "Cluster", "Affinity", "Optimise", "Timeline", "What-if", "Review", "Launch")
RULES = {"light": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"], "dark": {"type": "rule", "values": ["color-contrast"]}}
"""By theme; names and roles are the same in both."""
GRAVE = ("serious", "critical")
MOST_STEPS = 90
"""Presses of Tab to whatever a page has."""


def press(page: Page, target: Locator, key: str = "Enter") -> None:
    """Go to an element with Tab alone and press a key there."""
    expect(target).to_be_visible()
    await_rest(page)
    for _ in range(MOST_STEPS):
        if target.evaluate("one => one === document.activeElement"):
            page.keyboard.press(key)
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"{MOST_STEPS} times Tab did not reach {target}")


def faults(page: Page, theme: str) -> list[str]:
    """What axe finds that keeps people from using the page."""
    report = Axe().run(page, options={"runOnly": RULES[theme], "resultTypes": ["violations"]}).response
    unsure = [rule["id"] for rule in report["incomplete"]]
    assert report["passes"], f"axe looked at nothing on {page.url}, {theme}, or could not tell: {unsure}"
    return [
        f"{page.url}: {violation['id']} at {node['target']}: {node['failureSummary']}\n{node['html'][:300]}"
        for violation in report["violations"]
        if violation["impact"] in GRAVE
        for node in violation["nodes"]
    ]


def faults_in_either_theme(page: Page) -> list[str]:
    """The same in light and then in dark."""
    found = []
    for theme in RULES:
        page.emulate_media(color_scheme=theme)
        page.wait_for_function(
            "theme => getComputedStyle(document.querySelector('.stApp')).colorScheme === theme", arg=theme
        )
        settle(page)
        found += faults(page, theme)
    return found


def test_the_main_job_by_keyboard_and_no_grave_fault_on_any_page_in_either_theme(page: Page, start_studio) -> None:
    page.goto(start_studio())
    settle(page)
    press(page, page.get_by_role("button", name="Open the sample"))
    press(page, page.get_by_role("link", name="Next: make a plan"))
    press(page, page.get_by_role("button", name=RUN))
    expect(page.get_by_text("done · ")).to_be_visible(timeout=120_000)
    settle(page)

    # Of several choices one is reached by Tab, the others by arrows.
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
    page.keyboard.type("8192")  # it still runs when Stop is reached, on any machine
    page.keyboard.press("Enter")
    settle(page)
    press(page, page.get_by_role("button", name="Start", exact=True))
    press(page, page.get_by_test_id("stMain").get_by_role("button", name="Stop", exact=True))
    expect(page.get_by_role("heading", name="stopped")).to_be_visible(timeout=60_000)
    settle(page)

    violations = []
    for name in PAGES:
        page.get_by_role("link", name=name, exact=True).click()
        expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()
        violations += faults_in_either_theme(page)
    shoot(page, "access-dark")
    assert not violations, "\n".join(violations)
