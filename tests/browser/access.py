"""Faults of accessibility on a page, as axe finds them; in `make everything` in both themes."""

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests import everything
from tests.browser.conftest import settle, wear

RULES = {"light": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"], "dark": {"type": "rule", "values": ["color-contrast"]}}
"""By theme; names and roles are the same in both."""
GRAVE = ("serious", "critical")
GAVE_UP = "Axe encountered an error"
POPOVER = "[data-testid='stPopoverBody']"
WHOLE = {"width": 2200, "height": 4000}
"""A window large enough that nothing scrolls: axe gives up on elements out of sight in a long page."""
ASIDE = f"""
.stApp {{ right: 760px !important; }}
{POPOVER} {{ position: relative !important; inset: 0 0 0 1440px !important; transform: none !important; }}
"""
"""Open popovers at the right of the page and below each other: axe can not judge elements that lie under others."""
CLOSED, OPEN = (f'[data-testid="stPopover"] button[aria-expanded="{is_open}"]:enabled' for is_open in ("false", "true"))
FOLDED = '[data-testid="stExpander"] details:not([open]) > summary'
"""The elements that a person opens on a page; a press of the mouse on one popover would close the others."""
PRESS_ALL = "selector => { for (const one of document.querySelectorAll(selector)) one.click(); }"


def faults(page: Page, theme: str) -> list[str]:
    """The findings of axe that keep people from using the page."""
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
    """The same in light, and in `make everything` in dark, with all popovers and all that folds out open.

    Leaves the window that large.
    """
    page.set_viewport_size(WHOLE)
    style = page.add_style_tag(content=ASIDE)
    settle(page)
    page.evaluate(PRESS_ALL, f"{CLOSED}, {FOLDED}")
    expect(page.locator(f"{CLOSED}, {FOLDED}")).to_have_count(0)
    found = []
    for theme in RULES if everything.WANTED else ("light",):
        wear(page, theme)
        found += faults(page, theme)
    page.evaluate(PRESS_ALL, OPEN)  # or they would still lie over the next page
    style.evaluate("style => style.remove()")
    settle(page)
    return found
