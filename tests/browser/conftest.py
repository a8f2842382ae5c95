"""A studio for all tests, or one of a test's own, and a browser page that fails the test on any error or outside request."""

import contextlib
import functools
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from playwright.sync_api import Browser, Error, Locator, LocatorAssertions, Page, TimeoutError, expect, sync_playwright

from engine.jobs import runner
from tests import everything, warm
from tests.cases.jobs import until
from tests.cases.sessions import session_with_plans

ROOT = Path(__file__).parents[2]
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
NO_CHROMIUM = "no Chromium on this machine (Debian: apt-get install chromium-headless-shell)"
QUIET = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run"),
    # A page lives for seconds: compiling its scripts well, and threads that help the collector, never pay.
    "--js-flags=--no-opt --no-maglev --single-threaded",
]

CLICKED: list[Locator] = []
"""Every element that was clicked on, click by click."""
RUN = re.compile("^Plan it$")
"""The button of Optimise; others begin with its name."""
VERDICTS = re.compile("Do it|Try it|Not now|Cannot say yet")
TITLES = '[class*="st-key-titled-"] [data-testid="stMarkdown"]'
"""The titles of charts, which stand above them."""
FAULT = '[class*="st-key-failed-"], [data-testid="stException"]'
"""The elements by which a page shows a fault of ours."""

STILL = """
document.addEventListener("DOMContentLoaded", () => {
  const style = document.createElement("style");
  style.textContent = "*, *::before, *::after { animation: none !important; transition: none !important; }";
  document.head.append(style);
});
"""
"""Nothing moves: without a graphics card every picture of an animation costs a processor's time."""
NEWS = """
window.asked = window.wanted = window.answered = window.begun = window.drawn = 0;
const RERUN_SCRIPT = 11 << 3 | 2, NEW_SESSION = 4 << 3 | 2, HASH = 1 << 3 | 2, METADATA = 2 << 3 | 2;
const kind = (message) => {
  const bytes = new Uint8Array(message);
  let at = 0;
  while (bytes[at] === HASH || bytes[at] === METADATA) {
    let size = 0, shift = 0;
    do size |= (bytes[++at] & 127) << shift, shift += 7; while (bytes[at] > 127);
    at += size + 1;
  }
  return bytes[at];
};
const send = WebSocket.prototype.send, watched = new WeakSet();
WebSocket.prototype.send = function (message) {
  if (!watched.has(this)) this.addEventListener("message", ({ data }) => {
    window.answered = performance.now();
    if (kind(data) === NEW_SESSION) window.begun = window.answered;
  });
  watched.add(this);
  window.asked = performance.now();
  if (message[0] === RERUN_SCRIPT) window.wanted = window.asked;
  return send.call(this, message);
};
new MutationObserver(() => { window.drawn = performance.now(); })
  .observe(document, {subtree: true, childList: true, characterData: true, attributes: true});
"""
"""When the page last asked the studio for anything and for a run, when it was last answered and a run last began, and when it
last drew anything, in milliseconds. Of a message's protocol buffer (Streamlit's BackMsg.proto and ForwardMsg.proto) only the
number of the first field counts; of an answer that of the third, after a hash and metadata."""
SETTLED = """() => {
  const app = document.querySelector('[data-testid="stApp"]'), now = performance.now();
  return app?.dataset.testScriptState === "notRunning" && window.asked <= window.answered
      && (window.wanted <= window.begun || now - window.wanted > %d)
      && !document.querySelector('[data-testid="stSkeleton"]')
      && now - Math.max(window.answered, window.drawn) > %d;
}"""
"""A run that was asked for has begun and ended, not another one that was under way; an element whose code is still fetched is
none yet."""
NEVER_BEGINS = 30_000
"""Milliseconds after which a run that has not begun never will: the element that asked for it is gone from the page."""
AT_REST = 250
"""Milliseconds: a slider tells the studio that it was moved 200 ms later."""
HANDS = ("click", "fill", "focus", "set_input_files")
EYES = ("to_be_visible", "to_be_attached", "to_be_checked", "to_be_in_viewport", "to_contain_text", "to_have_value")
PATIENCE = 5_000
"""Milliseconds that a person waits for a page that does not come to rest, as while a job tells of itself, before using it."""
BEGINS = 120
"""Seconds that a studio may take to answer: the first one of a run waits until every module is compiled and imported."""
WINDOWS = ((1440, 900), (1024, 768)) if everything.WANTED else ((1440, 900),)
"""Sizes of windows in which a page's first chart is in sight; every further one has the page draw all its charts anew."""
PATIENT = 60_000
"""Milliseconds for whatever is expected, on a machine that does other things too."""
expect.set_options(timeout=PATIENT)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)
            if CHROMIUM is None:
                item.add_marker(pytest.mark.skip(reason=NO_CHROMIUM))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """The text on the page of a failed test, which the next run may not show again."""
    report = yield
    page = getattr(item, "funcargs", {}).get("page")
    if report.when == "call" and report.failed and page is not None:
        with contextlib.suppress(Error):
            report.sections.append((f"Page {page.url}", page.locator("body").inner_text(timeout=5_000)))
    return report


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Chromium. A page is left to come to rest before anything on it is used: an element about to be drawn anew would lose
    the click, the text or the list that was opened."""
    with sync_playwright() as playwright, pytest.MonkeyPatch.context() as patch:
        for name in HANDS:
            patch.setattr(Locator, name, at_rest(getattr(Locator, name)))
        for name in EYES:
            patch.setattr(LocatorAssertions, name, once_there(getattr(LocatorAssertions, name)))
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


def at_rest(use: Callable) -> Callable:
    """The same method of a locator, once its page is at rest, or has not been for longer than a person waits."""

    @functools.wraps(use)
    def use_at_rest(locator: Locator, *arguments: Any, **options: Any) -> None:
        await_rest(locator.page)
        use(locator, *arguments, **options)
        if use.__name__ == "click":
            CLICKED.append(locator)

    return use_at_rest


def once_there(check: Callable) -> Callable:
    """The same assertion, made once its element is there: Playwright describes the whole page whenever it looks in vain."""

    @functools.wraps(check)
    def check_once_there(assertions: LocatorAssertions, *arguments: Any, **options: Any) -> None:
        locator, timeout = assertions._impl_obj._actual_locator.first, options.get("timeout", PATIENT)
        with contextlib.suppress(TimeoutError):
            assertions._sync(locator.wait_for(state="attached", timeout=timeout))
        check(assertions, *arguments, **options)

    return check_once_there


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def studios(data_folder: Path, warm_process: Path | None = None) -> Iterator[Callable[..., str]]:
    """Starts studios, which end with the block: `start("--sample")` returns the address of one that answers.

    data_folder: its `SWITCHYARD_DATA`; logs lie next to it.
    warm_process: the address of the process of `tests.warm`; None: all of them start cold.

    `start` takes `cold`, to start as a person starts it and not from a process that has imported everything, and `port`, from
    `free_port`.
    """
    servers: list[subprocess.Popen] = []

    def start(*arguments: str, cold: bool = False, port: int | None = None) -> str:
        port = port or free_port()
        log = data_folder.parent / f"studio-{port}.log"
        python = sys.executable if cold or warm_process is None else str(warm.PYTHON)
        command = [python, "-m", "streamlit", "run", "app/main.py", "--server.port", str(port), "--", *arguments]
        environment = os.environ | {"SWITCHYARD_DATA": str(data_folder), warm.ADDRESS: str(warm_process)}
        with log.open("wb") as output:
            servers.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output))
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + BEGINS
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{address}/_stcore/health", timeout=1)
                return address
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"no studio after {BEGINS} s: {log.read_text()}")

    try:
        yield start
    finally:
        for server in servers:
            server.terminate()
            server.wait(60)


@pytest.fixture
def start_studio(data_folder: Path, warm_process: Path) -> Iterator[Callable[..., str]]:
    """Starts a studio of the test's own, for tests that restart or configure one or count its jobs."""
    with studios(data_folder, warm_process) as start:
        yield start


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of `studio`."""
    return tmp_path_factory.mktemp("studio") / "data"


@pytest.fixture(scope="session")
def studio(shared_folder: Path, warm_process: Path) -> Iterator[str]:
    """The address of one studio for all tests, each of which has sessions of its own."""
    with studios(shared_folder, warm_process) as start:
        yield start()


@pytest.fixture
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page of 1440 × 900 with errors, and any request off the machine, failing the test at its end."""
    if "start_studio" in request.fixturenames:
        request.getfixturevalue("start_studio")  # ends after the page: a lost connection is an error too
    with watched_page(browser, viewport={"width": 1440, "height": 900}) as page:
        yield page


@contextlib.contextmanager
def watched_page(browser: Browser, **options: Any) -> Iterator[Page]:
    """A page of a browser of its own, which fails the test for the reasons of `page`, and for any dialog."""
    context = browser.new_context(accept_downloads=True, **options)
    page = context.new_page()
    page.add_init_script(STILL)
    page.add_init_script(NEWS)
    page.set_default_timeout(120_000)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(f"page error: {error}"))
    page.on("console", lambda message: _note_console(message, faults))
    page.on("request", lambda request: _note_request(request.url, faults))
    page.on("dialog", lambda dialog: faults.append(f"a script ran: {dialog.message}") or dialog.dismiss())
    yield page
    context.close()
    assert not faults, "\n".join(faults)


@pytest.fixture
def planned(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The token of a session of the sample with two plans, linear and shortest first, the first of them open."""
    monkeypatch.setenv("SWITCHYARD_DATA", str(data_folder))
    return session_with_plans(data_folder, 0)[0]


def go(page: Page, address: str) -> None:
    """Open an address and wait until its page is at rest."""
    page.goto(address)
    settle(page)


def open_sample(page: Page, studio: str) -> None:
    """Open the sample in a session of its own."""
    go(page, studio)
    page.get_by_role("button", name="Open the sample").click()
    settle(page)


def visit(page: Page, title: str) -> None:
    """Go to a page by the sidebar."""
    page.get_by_test_id("stSidebar").get_by_role("link", name=title, exact=True).click()
    expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
    settle(page)


def _note_console(message, faults: list[str]) -> None:
    # Streamlit asks for its health below the page's own path first when a subpage is opened by address.
    if message.type == "error" and "_stcore" not in message.location.get("url", ""):
        faults.append(f"console: {message.text} ({message.location.get('url')})")


def _note_request(url: str, faults: list[str]) -> None:
    if not url.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:")):
        faults.append(f"request off the machine: {url}")


def settle(page: Page) -> None:
    """Wait until the studio has answered the page and runs nothing, and the page stands still, without a fault."""
    page.wait_for_function(SETTLED % (NEVER_BEGINS, AT_REST), polling=50)
    assert not page.locator(FAULT).count(), page.locator(FAULT).first.inner_text()


def await_rest(page: Page) -> None:
    """`settle`, but for as long as a person waits."""
    with contextlib.suppress(TimeoutError):
        page.wait_for_function(SETTLED % (NEVER_BEGINS, AT_REST), polling=50, timeout=PATIENCE)


def wait_for_plans(page: Page) -> None:
    """Until the systems that run have ended and their plans are drawn."""
    expect(page.get_by_text("done · ")).to_be_visible(timeout=120_000)
    # The tabs of several views, or, where a goal has one view, the link below the table.
    shown = page.get_by_text("Candidate plans").or_(page.get_by_role("link", name="See why on the timeline"))
    expect(shown.last).to_be_visible()
    settle(page)


def run_systems(page: Page) -> None:
    """Press Run on Optimise and wait for the plans."""
    page.get_by_role("button", name=RUN).click()
    wait_for_plans(page)


def save_plan(page: Page, workspace: str = "Autumn", name: str | None = None, note: str | None = None) -> None:
    """Save the open plan on Review, in a new workspace, under its own name unless another is given."""
    page.get_by_role("button", name="New workspace").click()
    page.get_by_role("textbox", name="Name of the workspace").fill(workspace)
    page.get_by_role("button", name="Create").click()
    page.get_by_role("button", name="Save the open plan").click()
    for label, text in (("Name of the plan", name), ("Note", note)):
        if text is not None:
            page.get_by_role("textbox", name=label).fill(text)
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_role("heading", name=name or "Discussion")).to_be_visible()
    settle(page)


def call_oneself(page: Page, name: str) -> None:
    """Tell the studio one's name."""
    corner = page.locator(".st-key-people").get_by_role("button").first
    corner.click()
    page.get_by_role("textbox", name="Your name").fill(name)
    page.get_by_role("button", name="Set name").click()
    expect(corner).to_contain_text(name)
    page.keyboard.press("Escape")
    settle(page)


def link_of_plan(page: Page) -> str:
    """The link to the plan that Review shows."""
    page.get_by_role("button", name="Link", exact=True).first.click()
    link = page.get_by_test_id("stPopoverBody").get_by_test_id("stCode").inner_text().strip()
    page.keyboard.press("Escape")
    settle(page)
    return link


def finished(data_folder: Path, kind: str) -> runner.Job:
    """The newest job of a kind, once it is done: to look for its end on the page would take the browser more time."""
    job = until(lambda: runner.jobs(data_folder, kind))[0]
    assert runner.wait(job, 180) is runner.State.DONE, job.log_tail()
    return job


def begins_at(page: Page, width: int, height: int) -> float:
    """Pixels above the first chart of a page in a window of that size, which it keeps."""
    page.set_viewport_size({"width": width, "height": height})
    settle(page)
    page.get_by_test_id("stMain").evaluate("main => { main.scrollTop = 0; }")
    return page.locator(".js-plotly-plot").first.bounding_box()["y"]


def wear(page: Page, theme: str) -> None:
    """Show a page as in a browser that prefers a theme, `light` or `dark`."""
    page.emulate_media(color_scheme=theme)
    page.wait_for_function("theme => getComputedStyle(document.querySelector('.stApp')).colorScheme === theme", arg=theme)
    settle(page)


@contextlib.contextmanager
def held(process: psutil.Process | None) -> Iterator[None]:
    """Inside, a process stands still: its running state can be looked at on a machine of any speed."""
    assert process is not None, "it had ended before anything was looked for"
    process.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
