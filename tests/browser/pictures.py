"""The screenshots of the documentation: `make pictures` takes them all again, from a studio on the sample of its own.

    python -m tests.browser.pictures

Each is as wide as a laptop's screen, light, and saved with 256 colours, which keeps it small.
"""

import contextlib
import io
import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from playwright.sync_api import Locator, Page, TimeoutError, expect

from tests.browser import conftest

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
VIEWPORT = {"width": 1440, "height": 3400}
"""Higher than any picture: Streamlit scrolls inside the window, and a picture shows the inside of the window only."""
MARGIN = 14
"""Pixels left free above and below the photographed element."""
JOB_TIMEOUT, LAUNCH_TIMEOUT = 120_000, 300_000
"""Milliseconds."""

RENAME = """names => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode())
    for (const [name, usual] of names)
      if (walker.currentNode.data.includes(name))
        walker.currentNode.data = walker.currentNode.data.replaceAll(name, usual);
}"""
"""In all texts of a page, each of some names gives way to another."""


@dataclass(frozen=True)
class Camera:
    """A page of the studio and how it is photographed.

    usual_names: interpreter, data folder and address as they are here, each with that of `make studio` instead
    """

    page: Page
    usual_names: list[tuple[str, str]]

    def shoot(self, name: str, first: Locator | None = None, last: Locator | None = None) -> None:
        """Save docs/pictures/NAME.png: the full width, from `first` (the top of the page) to the end of `last` (the end of
        the page)."""
        page = self.page
        conftest.settle(page)
        page.mouse.move(2, 2)  # away from any tooltip
        page.evaluate(RENAME, self.usual_names)
        top = first.bounding_box()["y"] - MARGIN if first else 0
        end = (last or page.get_by_test_id("stMainBlockContainer").locator("> div").first).bounding_box()
        bottom = end["y"] + end["height"] + MARGIN
        if bottom > VIEWPORT["height"]:
            raise ValueError(f"{name} is higher than the window; name a `last` that is further up")
        clip = {"x": 0, "y": top, "width": VIEWPORT["width"], "height": bottom - top}
        picture = Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB")
        file = PICTURES / f"{name}.png"
        picture.quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE).save(file, optimize=True)
        print(f"{file.relative_to(ROOT)}: {picture.width} × {picture.height}, {file.stat().st_size / 1000:.0f} kB")


def choose_in_strip(page: Page, place: int, name: str) -> None:
    """Choose by name in a list of the strip. A page that is drawn anew just then closes the list; a person opens it again."""
    opens = page.get_by_test_id("stPopover").get_by_role("button").nth(place)
    choice = page.get_by_role("button", name=name, exact=True)
    opens.click()
    with contextlib.suppress(TimeoutError):
        choice.wait_for(timeout=conftest.PATIENCE)
    if not choice.count():
        opens.click()
    choice.click()
    conftest.settle(page)


def workload(camera: Camera) -> None:
    camera.shoot("workload")


def cluster(camera: Camera) -> None:
    conftest.visit(camera.page, "Cluster")
    expect(camera.page.get_by_role("application")).to_be_visible()
    camera.shoot("cluster", last=camera.page.get_by_test_id("stDataFrame"))


def affinity(camera: Camera) -> None:
    conftest.visit(camera.page, "Affinity")
    camera.page.get_by_text("Grouped by GPU", exact=True).click()
    expect(camera.page.get_by_text("of tokens stay on their GPU (layers 0 and 1)")).to_be_visible()
    camera.shoot("affinity", last=camera.page.get_by_text("Every GPU has a colour of its own"))


def plans(camera: Camera) -> None:
    conftest.visit(camera.page, "Optimise")
    conftest.run_systems(camera.page)
    camera.shoot("optimise")


def timeline(camera: Camera) -> None:
    conftest.visit(camera.page, "Timeline")
    gantt = camera.page.locator('[class*="st-key-titled-"]').first
    expect(gantt.get_by_text("Aurora ·").first).to_be_visible()
    camera.shoot("gantt", first=gantt, last=gantt)
    camera.shoot("timeline")


def board(camera: Camera) -> None:
    """The drawing board with the open plan laid over it, and a node in the inspector."""
    page = camera.page
    conftest.visit(page, "Cluster")
    page.get_by_text("Overlay the open plan").click()
    expect(page.get_by_text("Bars: each GPU's tokens")).to_be_visible()
    conftest.settle(page)
    page.get_by_role("application").get_by_role("button", name=re.compile("^Node aurora-80g-0")).click(
        position={"x": 20, "y": 14}
    )
    camera.shoot("board", first=page.get_by_text("MoE layer", exact=True), last=page.get_by_text("Line width is bandwidth"))


def what_if(camera: Camera) -> None:
    conftest.visit(camera.page, "What-if")
    camera.page.get_by_role("slider", name="Network bandwidth").first.focus()
    for _ in range(4):
        camera.page.keyboard.press("ArrowRight")
    expect(camera.page.locator(".xtitle").filter(has_text="changed: network 2×")).to_be_visible()
    camera.shoot("what-if", last=camera.page.get_by_text("placement and order of sends stay as they are"))


def sizes(camera: Camera) -> None:
    """The cheapest clusters of the nodes of the sample, at prices that are an example."""
    page = camera.page
    page.get_by_test_id("stMain").get_by_role("radio", name="Capacity").click()
    page.get_by_test_id("stMain").get_by_role("radio", name="Machines for the recording").click()
    conftest.settle(page)
    table = page.get_by_test_id("stDataFrame").last
    table.click(position={"x": 0.6 * table.bounding_box()["width"], "y": 52})
    for row, (price, most) in enumerate((("6", "8"), ("4", "8"), ("2", "8"), ("1", "8"))):
        for column, text in ((3, price), (4, most)):
            cell = table.locator(f'table [role="gridcell"][aria-colindex="{column}"]').nth(row)
            page.keyboard.press("Enter")
            page.locator("#portal input").fill(text)
            page.keyboard.press("Tab" if column == 3 else "Enter")  # then to the cell at the right, or below
            expect(cell).to_have_text(text)
            conftest.settle(page)
        page.keyboard.press("ArrowLeft")
    for kind, name, text in (("spinbutton", "Clusters", "3"), ("textbox", "Target", "2 ms a pass")):
        page.get_by_role(kind, name=name).fill(text)
        page.keyboard.press("Enter")
        conftest.settle(page)
    page.get_by_role("button", name="Find the cheapest clusters").click()
    expect(page.get_by_text("the cheapest found")).to_be_visible(timeout=JOB_TIMEOUT)
    camera.shoot("sizing", first=page.get_by_text("The cheapest machines"), last=page.get_by_text("select a row for another"))


def deployed(camera: Camera) -> None:
    """Name today's placement as the baseline, from a serving engine's file."""
    page = camera.page
    conftest.visit(page, "Optimise")
    running = {"physical_to_logical_map": [list(range(16))[::-1]] * 8}
    file = {"name": "running.json", "mimeType": "application/json", "buffer": json.dumps(running).encode()}
    page.get_by_test_id("stFileUploader").locator("input").first.set_input_files([file])
    expect(page.get_by_text("deployed: running.json")).to_be_visible()
    page.get_by_test_id("stExpander").get_by_text("What is deployed today").click()
    expect(page.get_by_text("Deployed today: running.json")).to_be_visible()
    figure = page.get_by_test_id("stMetric").filter(has_text="Cross-node share")
    camera.shoot("deployed", first=page.get_by_text("What is deployed today"), last=figure)


def recordings(camera: Camera) -> None:
    """Other recordings of the model, to hold plans against."""
    page = camera.page
    conftest.visit(page, "Workload")
    page.get_by_text("Add a recording").click()
    for name in ("Alpha on prose", "Alpha on man pages", "Alpha on code"):  # the last stays open
        page.get_by_role("button", name=name).click()
        conftest.settle(page)


def record(camera: Camera) -> None:
    """The guide to recording."""
    page = camera.page
    page.get_by_role("button", name="How to record").click()
    conftest.settle(page)
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_text("Source: SGLang")).to_be_visible()
    camera.shoot("record", first=dialog.get_by_text("How to record").first, last=dialog.get_by_text("Source: SGLang"))
    page.keyboard.press("Escape")


def review(camera: Camera) -> None:
    page = camera.page
    conftest.visit(page, "Review")
    conftest.save_plan(page, "Autumn cluster", "Aurora on the mixed eight", "For the nodes that arrive in October")
    expect(page.locator(".js-plotly-plot")).to_have_count(2)
    camera.shoot("review", last=page.locator(".js-plotly-plot").first)
    page.get_by_role("button", name="Judge this plan").click()
    expect(page.get_by_role("heading", name=conftest.VERDICTS)).to_be_visible(timeout=JOB_TIMEOUT)
    conftest.settle(page)
    camera.shoot("verdict", first=page.get_by_text("Worth it?"), last=page.get_by_test_id("stDataFrame").last)


def launch(camera: Camera) -> None:
    page = camera.page
    conftest.visit(page, "Launch")
    expect(page.get_by_role("spinbutton", name="Ranks")).to_be_visible()
    camera.shoot("launch")
    page.get_by_text("Export to a serving engine").click()
    expect(page.get_by_role("button", name=re.compile("^Download .*sglang"))).to_be_visible()
    export = page.get_by_test_id("stExpander").filter(has_text="Export to a serving engine")
    camera.shoot("export", first=export, last=export)
    page.get_by_text("Export to a serving engine").click()  # closed, it leaves room for the measurement
    page.get_by_role("button", name="Start", exact=True).click()
    expect(page.get_by_text("Output differs by")).to_be_visible(timeout=LAUNCH_TIMEOUT)
    conftest.settle(page)
    camera.shoot(
        "measured", first=page.get_by_role("heading", name=re.compile("^Measured: ")), last=page.locator(".js-plotly-plot").last
    )


def training_step(camera: Camera) -> None:
    page = camera.page
    choose_in_strip(page, 1, "lancet-p4de-2-nodes")
    choose_in_strip(page, 2, "GPT2-S-MoE")
    conftest.visit(camera.page, "Optimise")
    page.get_by_role("button", name="Training step").click()
    expect(page.get_by_text("18.9 MB in each GPU's buffer")).to_be_visible()
    conftest.settle(page)
    conftest.run_systems(page)
    # The job shown as done may be an earlier one; the fastest plan is opened when all have ended.
    expect(page.get_by_test_id("stSidebar").get_by_text("Best of all (tr").first).to_be_visible(timeout=JOB_TIMEOUT)
    conftest.settle(page)
    hidden = page.locator('[class*="st-key-titled-"]').first
    camera.shoot("training", first=hidden, last=page.get_by_test_id("stDataFrame").first)
    conftest.visit(camera.page, "Timeline")
    expect(page.get_by_text("Exposed communication").first).to_be_visible()
    gantt = page.locator('[class*="st-key-titled-"]').first
    camera.shoot("training-timeline", first=gantt, last=gantt)


def capacity(camera: Camera) -> None:
    """GPU types side by side for users of DeepSeek-R1, at list prices."""
    page = camera.page
    choose_in_strip(page, 2, "DeepSeek-R1")
    conftest.visit(page, "What-if")
    for part in ("Capacity", "GPUs for my users"):
        page.get_by_test_id("stMain").get_by_role("radio", name=part).click()
        conftest.settle(page)
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_text("The next GPU type:")).to_be_visible(timeout=JOB_TIMEOUT)
    expect(page.get_by_test_id("stMain").get_by_test_id("stProgress")).to_have_count(0, timeout=JOB_TIMEOUT)
    camera.shoot("capacity", last=page.get_by_text("tp: GPUs that share"))


SERIES = (
    *(workload, cluster, affinity, plans, timeline, board, what_if, sizes, recordings, record, review, launch, deployed),
    *(training_step, capacity),
)
"""In this order: each goes on in the session that the one before has left."""


def main() -> None:
    """Take all of them."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        conftest.studios(Path(folder) / "data") as start,
        conftest.chromium() as browser,
        conftest.watched_page(browser, viewport=VIEWPORT, color_scheme="light") as page,
    ):
        address = start("--sample")
        conftest.go(page, address)
        page.get_by_role("button", name="End guide").click()
        conftest.call_oneself(page, "Ana")
        usual = [(sys.executable, ".venv/bin/python"), (f"{folder}/data", ".switchyard"), (address, "http://127.0.0.1:8501")]
        for photograph in SERIES:
            photograph(Camera(page, usual))


if __name__ == "__main__":
    main()
