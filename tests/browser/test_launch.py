"""A launch as a person watches it: every rank's log while it runs, its report, the list of launches, and a rank that dies."""

from pathlib import Path

import psutil
from playwright.sync_api import Page, expect

from engine.jobs import runner
from engine.launch.preparation import place_checks
from engine.launch.rank.failure import log_of
from engine.launch.running.processes import WORKER
from tests.browser.conftest import begins_at, finished, held, settle
from tests.cases.jobs import until

RANKS = 3
SOON = 60_000
"""Milliseconds, on a machine that does other things too."""


def rank_of(folder: Path, number: int) -> psutil.Process:
    """A rank of the launch in this folder."""
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            # The process that enters a namespace names the rank's program too, until it has become it.
            mine = WORKER in words and str(folder / "run") in words and "netns" not in words
            if mine and process.environ().get("RANK") == str(number):
                return process
        except psutil.Error:
            continue
    raise AssertionError(f"rank {number} does not run")


def has_said(folder: Path, rank: int, words: str) -> bool:
    """True if a rank of the launch in this folder has come so far."""
    log = log_of(folder / "run", rank)
    return log.exists() and words in log.read_text()


def enter(page: Page, label: str, value: int) -> None:
    field = page.get_by_role("spinbutton", name=label)
    field.fill(str(value))
    field.press("Enter")
    settle(page)


def test_a_launch_of_two_plans_is_watched_reported_repeated_and_killed(
    page: Page, start_studio, planned: str, data_folder: Path
) -> None:
    page.goto(f"{start_studio()}/launch?session={planned}")
    settle(page)
    emulated = place_checks.testbed_fault() is None
    if emulated:
        page.get_by_role("radio", name="Testbed (emulated links)").click()
        expect(page.get_by_text("in a network of the testbed's own")).to_be_visible(timeout=SOON)
        settle(page)
    enter(page, "Ranks", RANKS)
    enter(page, "Tokens to replay", 300)
    page.get_by_role("button", name="Start", exact=True).click()

    # While it runs.
    (launch,) = until(lambda: runner.jobs(data_folder, "launch"), SOON / 1e3)
    until(lambda: has_said(launch.folder, RANKS - 1, "pass 1 of 3, Linear placement"), SOON / 1e3)
    with held(rank_of(launch.folder, RANKS - 1)):
        page.get_by_role("button", name="New launch", exact=True).click()
        expect(page.get_by_text("one runs at a time")).to_be_visible(timeout=SOON)
        expect(page.get_by_text("measuring this machine").first).to_be_visible(timeout=SOON)
        page.get_by_role("radio", name=str(RANKS - 1), exact=True).click()
        expect(page.get_by_text("pass 1 of 3, Linear placement").first).to_be_visible(timeout=SOON)
        expect(page.get_by_role("radio", name=str(RANKS - 1), exact=True)).to_be_checked(timeout=SOON)

    # Its report.
    done = finished(data_folder, "launch")
    assert ("testbed" in done.result) == emulated
    expect(page.get_by_text("Output differs by")).to_be_visible(timeout=2 * SOON)
    settle(page)
    for rank in range(RANKS):
        assert "pass 3 of 3, Shortest job first" in log_of(done.folder / "run", rank).read_text()
    expect(page.get_by_text("time of one pass").first).to_be_visible(timeout=SOON)
    page.get_by_role("radio", name="Shortest job first (SJF)").click()
    expect(page.get_by_text("Predicted, its bars with a darker outline, above measured").first).to_be_visible(timeout=SOON)
    settle(page)
    assert begins_at(page, 1440, 900) < 300
    assert begins_at(page, 1024, 768) < 300  # the window that the rest is done in

    # Once more, and a rank dies.
    page.get_by_role("button", name="Relaunch").click()
    again = until(lambda: runner.jobs(data_folder, "launch")[:-1], SOON / 1e3)[0]
    until(lambda: has_said(again.folder, 1, "measuring this machine"), SOON / 1e3)
    doomed = rank_of(again.folder, 1)
    with held(doomed):
        expect(page.get_by_text("measuring this machine").first).to_be_visible(timeout=SOON)
        doomed.kill()
    expect(page.get_by_text("rank 1 was killed by signal 9").first).to_be_visible(timeout=SOON)

    # The log in view is that of the rank that died; the list is searched.
    settle(page)
    logs = page.get_by_role("radiogroup", name="Log of rank")
    expect(logs.get_by_role("radio", name="1", exact=True)).to_be_checked()
    page.get_by_role("button", name="Launches · 2").click()
    listed = page.get_by_label("Launches, newest first").locator("td")
    search = page.get_by_role("textbox", name="Search")
    for words, shown, missing in (("linear failed", "failed", "done"), ("linear done", "done", "failed")):
        search.fill(words)
        search.press("Enter")
        settle(page)
        expect(listed.filter(has_text=shown)).to_have_count(1)
        expect(listed.filter(has_text=missing)).to_have_count(0)
    search.fill("nobody knows this")
    search.press("Enter")
    expect(page.get_by_text("None of 2 launches has all these words.")).to_be_visible()
