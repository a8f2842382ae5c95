"""Who comes back: a typed name is known in its browser, and the open plan stays open until another is chosen."""

from playwright.sync_api import Page, expect

from tests.browser.conftest import call_oneself, go, settle


def test_a_typed_name_is_known_in_another_session_of_the_browser(page: Page, studio: str) -> None:
    go(page, studio)
    call_oneself(page, "Ben")
    go(page, f"{studio}/review")  # without the session
    expect(page.locator(".st-key-people").get_by_role("button").first).to_contain_text("Ben")
    assert "session=" not in page.url, "who only looks has no session of their own"


def test_a_list_of_plans_that_is_left_closes_no_plan(page: Page, start_studio, planned: str) -> None:
    go(page, f"{start_studio()}/timeline?session={planned}")
    plan = page.get_by_test_id("stSidebar").get_by_role("button", name="Linear placement")
    plan.click()
    chosen = page.get_by_role("combobox", name="Open plan")
    chosen.click()
    page.keyboard.press("Escape")
    settle(page)
    page.keyboard.press("Escape")
    settle(page)
    expect(plan).to_be_visible()

    # Removed and brought back, it is open on other pages too.
    if not page.get_by_role("button", name="Remove from the list").is_visible():
        plan.click()
    page.get_by_role("button", name="Remove from the list").click()
    page.get_by_test_id("stSidebar").get_by_role("button", name="No plan").click()
    page.get_by_role("button", name="Bring back").click()
    expect(plan).to_be_visible()
    settle(page)
    page.get_by_role("link", name="What-if", exact=True).click()
    settle(page)
    expect(plan).to_be_visible()
