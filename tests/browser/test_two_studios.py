"""Two studios on one data folder and one PostgreSQL, as behind a balancer: work done in one goes on in the other."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from engine.jobs import queue, runner
from engine.jobs.runner import State
from tests.browser.conftest import RUN, go, link_of_plan, save_plan, settle, watched_page
from tests.cases.jobs import WORKER, until
from tests.cases.sessions import session_with_plans
from tests.store.conftest import postgres

__all__ = ["postgres"]

UNTIL_STOPPED = {"steps": 100_000, "pause": 0.05}


@pytest.fixture
def session(data_folder: Path, postgres: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The token of a session of the sample with a plan; one job runs at a time."""
    monkeypatch.setenv("SWITCHYARD_DATA", str(data_folder))
    monkeypatch.setenv("DATABASE_URL", postgres)
    monkeypatch.setenv(queue.JOBS, "1")
    return session_with_plans(data_folder, 1)[0]


@pytest.fixture
def other(browser: Browser, start_studio) -> Iterator[Page]:
    with watched_page(browser, viewport={"width": 1440, "height": 900}) as page:
        yield page


def test_sessions_jobs_and_links_work_from_each(page: Page, other: Page, start_studio, session: str, data_folder: Path) -> None:
    first, second = start_studio(), start_studio()

    # A saved plan's link, and a comment on it.
    go(page, f"{first}/review?session={session}")
    save_plan(page, name="The one")
    link = link_of_plan(page)
    assert link.startswith(f"{first}/review?plan=")
    other.goto(link.replace(first, second))
    expect(other.get_by_role("heading", name="The one")).to_be_visible()
    settle(other)

    # A job that waits is seen, and stopped, from the other one.
    running = runner.start("count", UNTIL_STOPPED, data_folder, module=WORKER)
    try:
        until(lambda: running.progress, 60)
        go(page, f"{first}/optimise?session={session}")
        page.get_by_role("button", name=RUN).click()
        expect(page.get_by_test_id("stMain").get_by_text("waiting, next in line")).to_be_visible()
        other.goto(f"{second}/optimise?session={session}")
        expect(other.get_by_test_id("stMain").get_by_text("waiting, next in line")).to_be_visible()
        mine = runner.jobs(data_folder, "optimise")[0]
        assert mine.state is State.WAITING
        stop = other.get_by_test_id("stMain").get_by_role("button", name="Stop")
        expect(stop).to_have_count(1)  # once the page before it has gone
        stop.click()
        assert runner.wait(mine, 60) is State.CANCELLED
        expect(page.get_by_text("cancelled", exact=False).first).to_be_visible()
        settle(page)
        settle(other)
    finally:
        runner.cancel(running, grace=0)
        assert runner.wait(running, 5).finished
