"""Who sees little or uses no mouse: contrasts, names and roles on every page in both themes, and the main job by keyboard."""

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import RUN, await_rest, settle, shoot, wear

PAGES = ("Workload", "Cluster", "Affinity", "Optimise", "Timeline", "What-if", "Review", "Launch")
RULES = {"light": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"], "dark": {"type": "rule", "values": ["color-contrast"]}}
"""By theme; names and roles are the same in both."""
GRAVE = ("serious", "critical")
GAVE_UP = "Axe encountered an error"
MOST_STEPS = 90
"""Presses of Tab to whatever a page has."""
POPOVER = "[data-testid='stPopoverBody']"
WHOLE = {"width": 2200, "height": 4000}
"""A window that nothing has to be scrolled in: axe gives up on what is out of sight in a long page."""
ASIDE = f"""
.stApp {{ right: 760px !important; }}
{POPOVER} {{ position: relative !important; inset: 0 0 0 1440px !important; transform: none !important; }}
"""
"""Open popovers at the right of the page and below each other: of what lies under another axe can say nothing."""
CLOSED, OPEN = (f'[data-testid="stPopover"] button[aria-expanded="{is_open}"]:enabled' for is_open in ("false", "true"))
FOLDED = '[data-testid="stExpander"] details:not([open]) > summary'
"""What a person opens on a page; a press of the mouse on one popover would close the others."""
PRESS_ALL = "selector => { for (const one of document.querySelectorAll(selector)) one.click(); }"


def press(page: Page, target: Locator, key: str = "Enter", steps: int = MOST_STEPS) -> None:
    """Go to an element with at most so many presses of Tab alone and press a key there."""
    expect(target).to_be_visible()
    await_rest(page)
    for step in range(steps + 1):
        if target.evaluate("one => one === document.activeElement"):
            page.keyboard.press(key)
            return
        if step < steps:
            page.keyboard.press("Tab")
    raise AssertionError(f"{steps} times Tab did not reach {target}")


def faults(page: Page, theme: str) -> list[str]:
    """What axe finds that keeps people from using the page."""
    report = Axe().run(page, options={"runOnly": RULES[theme], "resultTypes": ["violations"]}).response
    broken = [node for rule in report["incomplete"] for node in rule["nodes"] if GAVE_UP in node["failureSummary"]]
    assert report["passes"] and not broken, f"axe looked at nothing on {page.url}, {theme}, or gave up: {broken}"
    return [
        f"{page.url}: {violation['id']} at {node['target']}: {node['failureSummary']}\n{node['html'][:300]}"
        for violation in report["violations"]
        if violation["impact"] in GRAVE
        for node in violation["nodes"]
    ]


def faults_in_either_theme(page: Page) -> list[str]:
    """The same in light and in dark, with all popovers and all that folds out open. Leaves the window that large."""
    page.set_viewport_size(WHOLE)
    page.add_style_tag(content=ASIDE)
    settle(page)
    page.evaluate(PRESS_ALL, f"{CLOSED}, {FOLDED}")
    expect(page.locator(f"{CLOSED}, {FOLDED}")).to_have_count(0)
    found = []
    for theme in RULES:
        wear(page, theme)
        found += faults(page, theme)
    page.evaluate(PRESS_ALL, OPEN)  # or they would still lie over the next page
    settle(page)
    return found


def test_the_main_job_by_keyboard_and_no_grave_fault_on_any_page_in_either_theme(page: Page, studio: str) -> None:
    page.goto(studio)
    settle(page)
    press(page, page.get_by_role("button", name="Open the sample"))
    press(page, page.get_by_role("link", name="Make a plan"))
    expect(page.get_by_role("heading", name="Optimise", exact=True)).to_be_visible()
    settle(page)
    page.reload()  # to be at its top
    settle(page)
    press(page, page.get_by_role("link", name="Skip to main content"), steps=1)
    press(page, page.get_by_role("button", name=RUN), steps=9)
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
