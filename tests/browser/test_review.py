"""Two people in two browsers decide on a plan: each sees the other's actions; whoever has the report, in `make everything`,
needs no studio."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests import everything
from tests.browser.access import faults_in_either_theme
from tests.browser.conftest import TITLES, WINDOWS, begins_at, call_oneself, go, link_of_plan, save_plan, settle, watched_page
from tests.cases.sessions import session_with_plans

HOSTILE = "<img src=x onerror=alert(1)> **bold**"
SCRIPT = "<script>alert(2)</script> why *not*?"
HIGHEST = 1_400 + 55 + 70
"""Pixels of a saved plan's page at 1440 on opening it, with the guide's line and a note of two."""
SOON = 20_000
"""Milliseconds in which one browser shows the other's action, on a machine that does other things too."""


@pytest.fixture
def planned(shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The token of a session of the sample with two plans, the second of them open."""
    monkeypatch.setenv("SWITCHYARD_DATA", str(shared_folder))
    return session_with_plans(shared_folder, 1)[0]


@pytest.fixture
def other(browser: Browser) -> Iterator[Page]:
    """A second browser, dark and narrow, as strict as the first."""
    with watched_page(browser, viewport={"width": 1024, "height": 900}, color_scheme="dark") as page:
        yield page


def test_save_discuss_and_decide_in_two_browsers(page: Page, other: Page, studio: str, planned: str, tmp_path: Path) -> None:
    go(page, f"{studio}/review?session={planned}")
    call_oneself(page, "Ana")
    save_plan(page, f"Autumn {HOSTILE}", HOSTILE, "first line\nsecond line")
    height = page.get_by_test_id("stMain").evaluate("main => main.scrollHeight")
    assert height <= HIGHEST, "all that a decision needs, the rest is folded"

    # Another person opens the link: exactly this plan, with its inputs.
    link = link_of_plan(page)
    assert link.startswith(f"{studio}/review?plan=") and "session" not in link
    go(other, link)
    expect(other.get_by_role("heading", name=HOSTILE)).to_be_visible()
    expect(other.get_by_test_id("stPopover").first).to_contain_text("alpha-code")
    call_oneself(other, "Ben")
    other.get_by_role("textbox", name="Your comment").fill(SCRIPT)
    other.get_by_role("button", name="Comment", exact=True).click()
    expect(page.get_by_text(SCRIPT)).to_be_visible(timeout=SOON)
    expect(page.get_by_text("Ben", exact=True)).to_be_visible()

    # Both write at once, and one decides.
    page.get_by_role("textbox", name="Your comment").fill("Ana at once")
    other.get_by_role("textbox", name="Your comment").fill("Ben at once")
    page.get_by_role("button", name="Comment", exact=True).click(no_wait_after=True)
    other.get_by_role("button", name="Comment", exact=True).click(no_wait_after=True)
    for tab in (page, other):
        for text in ("Ana at once", "Ben at once"):
            expect(tab.locator('[data-testid="stText"]', has_text=text)).to_be_visible(timeout=SOON)
    page.get_by_role("textbox", name="Reason").fill("worth the move")
    page.get_by_role("button", name="Approve", exact=True).click()
    expect(other.get_by_role("button", name="Reopen")).to_be_visible(timeout=SOON)
    expect(other.get_by_text("worth the move", exact=True)).to_be_visible()
    expect(other.get_by_test_id("stMarkdown").get_by_text("approved", exact=True).first).to_be_visible()
    for tab in (page, other):
        settle(tab)
        expect(tab.locator(".js-plotly-plot")).to_have_count(1)

    if everything.WANTED:
        hold_sight(page)
        hold_report(other, tmp_path / "report.html")
        assert not (found := faults_in_either_theme(page)), "\n".join(found)
        hold_comparison(page)


def hold_sight(page: Page) -> None:
    """The chart is in sight, and the decision one press away."""
    page.get_by_role("button", name="End guide").click()
    if (dismiss := page.get_by_role("button", name="Dismiss")).count():  # of the other one's simultaneous remark
        dismiss.click()
    expect(dismiss).to_have_count(0)
    for (width, height), most in zip(WINDOWS, (300, 340), strict=True):
        assert begins_at(page, width, height) < most, "in a narrow window the figures take two rows"
    page.set_viewport_size({"width": 1440, "height": 900})
    page.get_by_role("link", name="Discuss").click()
    expect(page.get_by_role("button", name="Reopen")).to_be_in_viewport()
    page.get_by_role("button", name="Plans · 1").click()
    expect(page.get_by_role("region", name="Saved plans, newest first")).to_be_visible()
    page.keyboard.press("Escape")


def hold_report(page: Page, path: Path) -> None:
    """The report stands alone: it is drawn without a network, and what people wrote is text in it.

    path: its place once it is downloaded
    """
    page.get_by_role("button", name="Report", exact=True).click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download the report").click()
    download.value.save_as(path)
    page.keyboard.press("Escape")
    context = page.context.browser.new_context(viewport={"width": 1060, "height": 900}, offline=True)
    report, faults, asked = context.new_page(), [], []
    report.on("pageerror", lambda error: faults.append(str(error)))
    report.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    report.on("dialog", lambda dialog: faults.append(f"a script ran: {dialog.message}") or dialog.dismiss())
    report.on("request", lambda request: asked.append(request.url))
    report.goto(path.as_uri())
    expect(report.locator(".js-plotly-plot")).to_have_count(3)
    expect(report.get_by_role("heading", name=HOSTILE)).to_contain_text("approved")
    for text in (SCRIPT, "Ana at once", "worth the move", "second line"):
        expect(report.get_by_text(text)).to_be_visible()
    assert report.locator("img").count() == 0
    context.close()
    assert not faults and asked == [path.as_uri()], (faults, asked)


def hold_comparison(page: Page) -> None:
    """The plan is compared with another one."""
    page.get_by_role("button", name="Compare", exact=True).click()
    page.wait_for_url(lambda address: "plan=" not in address)  # a page that refreshes itself rests before the click counts
    settle(page)
    expect(page.locator(TITLES, has_text="place every expert alike")).to_be_visible(timeout=SOON)
    expect(page.locator(".js-plotly-plot")).to_have_count(2, timeout=SOON)
    for width, height in WINDOWS:
        assert begins_at(page, width, height) < 300
