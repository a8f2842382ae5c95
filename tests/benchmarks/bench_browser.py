"""The wait of a person for every page: `python -m tests.benchmarks.bench_browser [GPUS …]` (default 64 320).

On the sessions of `bench_pages`, in headless Chromium at 1440 × 900: seconds from a click on a page in the sidebar until
the last thing is drawn, on the first visit in a studio that was restarted and has drawn its start page, and again. Without a
graphics card the browser draws with the same processors as the studio.
"""

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, expect

from app.sidebar import SECTIONS
from engine.cli.output import table
from engine.units import seconds
from tests.benchmarks.bench_pages import ATTEMPTS, SIZES, Kept, cases_kept, warm_address
from tests.benchmarks.bench_sessions import ELSEWHERE, studio
from tests.browser.conftest import chromium, settle, watched_page

PAGES = {entry.file.replace("_", "-"): entry.title for section in SECTIONS.values() for entry in section}
FIRST = "workload"


def waits(folder: Path, kept: Kept, page: Page, name: str) -> tuple[float, float]:
    """Seconds of the first visit of a page after a restart, and of going there again."""
    with studio(folder, warm_address()) as (port, _):
        start = ELSEWHERE if name == FIRST else ""
        page.goto(f"http://127.0.0.1:{port}/{start}?{kept.query_of(name)}")
        settle(page)
        first = _wait(page, PAGES[name])
        _wait(page, PAGES[FIRST if name != FIRST else "launch"])
        again = _wait(page, PAGES[name])
        page.goto("about:blank")  # before the studio is gone
    return first, again


def _wait(page: Page, title: str) -> float:
    """Click a page in the sidebar; seconds until it is drawn."""
    link = page.get_by_test_id("stSidebar").get_by_role("link", name=title, exact=True)
    begun = link.evaluate("link => { const now = performance.now(); link.click(); return now; }")
    expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
    settle(page)
    return (page.evaluate("Math.max(window.answered, window.drawn)") - begun) / 1000


def main() -> int:
    sizes = [int(word) for word in sys.argv[1:]] or list(SIZES)
    columns: dict[str, dict[str, list[float]]] = {}
    with (
        tempfile.TemporaryDirectory() as name,
        chromium() as browser,
        watched_page(browser, viewport={"width": 1440, "height": 900}) as page,
    ):
        for case, folder, kept in cases_kept(Path(name), sizes):
            columns[case] = {}
            for page_name in PAGES:
                visits = [waits(folder, kept, page, page_name) for _ in range(ATTEMPTS)]
                columns[case][page_name] = [min(times) for times in zip(*visits, strict=True)]
                print(case, page_name, *map(seconds, columns[case][page_name]), file=sys.stderr, flush=True)
    cells = [[page, *("; ".join(map(seconds, column[page])) for column in columns.values())] for page in PAGES]
    print(table(["in Chromium: first visit after a restart; again", *columns], cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
