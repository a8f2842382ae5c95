"""Seven journeys through the studio: `make journeys` prints the seconds of each and photographs every step.

    python -m tests.browser.journeys [newcomer] [engineer] [planner] [trainer] [team] [reader] [owner]

A step ends when its page has come to rest; then it is photographed as `VARIANTS` say, which counts in no time. The pictures are
for people to look at: a newcomer's eye finds what no test asks for.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, Locator, Page, expect

from app import samples
from engine.catalogue.packaged import installed_folder
from engine.runtime.checkpoint import SWITCH
from engine.workload import RoutingTrace
from tests.browser import conftest
from tests.browser.pictures import JOB_TIMEOUT, LAUNCH_TIMEOUT, choose_in_strip

PICTURES = Path(__file__).parent / "screenshots" / "journeys"
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 1024, "height": 768}
VARIANTS = ((NARROW, "dark"), (NARROW, "light"), (WIDE, "dark"), (WIDE, "light"))
"""Window and theme of every picture; the last is how a person goes on."""
DENSE_LAYERS = 3
"""The dense layers of DeepSeek-R1: their rows in SGLang's statistics stay zero."""
STEP_TIMEOUT = 900_000
"""Milliseconds for a launched training step of GPT2-L, the time limit that the page proposes."""
MODELS = "models"
"""The folder of the models that a studio may open."""
QUESTION = "Why does this layer wait for GPU 6?"


class Journey:
    """A person's way, in one browser or several: its seconds and clicks, and pictures of it."""

    def __init__(self, browser: Browser, name: str, address: str) -> None:
        self.browser, self.name, self.address = browser, name, address
        self.seconds: list[float] = []
        self.begun = len(conftest.CLICKED)

    @contextlib.contextmanager
    def person(self) -> Iterator[Page]:
        """Somebody's browser."""
        with conftest.watched_page(self.browser, viewport=WIDE, color_scheme="light") as page:
            yield page

    @contextlib.contextmanager
    def step(self, page: Page, title: str, sight: Locator | None = None) -> Iterator[None]:
        """A person's actions until a page is at rest. sight: the part that they then look at, the top if none"""
        clicks, begun = len(conftest.CLICKED), time.monotonic()
        yield
        conftest.settle(page)
        self.seconds.append(time.monotonic() - begun)
        print(f"  {title:<40} {self.seconds[-1]:5.1f} s, {len(conftest.CLICKED) - clicks} clicks", flush=True)
        page.mouse.move(2, 2)  # away from any tooltip
        for window, theme in VARIANTS:
            page.set_viewport_size(window)
            conftest.wear(page, theme)
            page.evaluate("document.activeElement.blur()")
            page.keyboard.press("r")  # charts take the colours of the theme that a run finds
            conftest.settle(page)
            if sight is not None:
                sight.scroll_into_view_if_needed()
                conftest.settle(page)
            name = f"{self.name}-{len(self.seconds)}-{title.replace(' ', '-')}-{window['width']}-{theme}.png"
            page.screenshot(path=PICTURES / name)

    def say(self, title: str) -> None:
        print(f"  {title:<40} {sum(self.seconds):5.1f} s, {len(conftest.CLICKED) - self.begun} clicks")


def newcomer(journey: Journey, folder: Path) -> None:
    """From the start page to a measured launch, knowing nothing."""
    with journey.person() as page:
        with journey.step(page, "start page"):
            page.goto(journey.address)
            expect(page.locator(conftest.TITLES, has_text="speed by planning")).to_be_in_viewport(ratio=1)
        with journey.step(page, "plans"):
            begun = time.monotonic()
            page.get_by_role("button", name="Plan the sample").click()
            page.locator(".st-key-answer").wait_for()
            answered = time.monotonic() - begun
            conftest.wait_for_plans(page)
        begun = time.monotonic()
        subprocess.run([sys.executable, "-c", "import streamlit"], check=True)
        imported = time.monotonic() - begun
        print(f"  {'first answer, the search goes on':<40} {answered:5.1f} s, {answered / imported:.1f} × import streamlit")
        with journey.step(page, "Gantt"):
            page.get_by_role("link", name="See why on the timeline").click()
            expect(page.locator(".js-plotly-plot").first).to_be_visible()
        journey.say("a plan and its Gantt after")
        with journey.step(page, "launch"):
            conftest.visit(page, "Launch")
            expect(page.get_by_role("button", name="Start", exact=True)).to_be_visible()
        measured = page.get_by_role("heading", name=re.compile("^Measured: "))
        with journey.step(page, "measured", measured):
            page.get_by_role("button", name="Start", exact=True).click()
            expect(measured).to_be_visible(timeout=LAUNCH_TIMEOUT)


def files_of_an_engineer(folder: Path) -> list[Path]:
    """Two halves of a synthetic hour on DeepSeek-R1 as SGLang counts them, and its config.json."""
    drawn = samples.LARGE.draw(samples.models()["DeepSeek-R1"].model)
    half = drawn.tokens // 2
    written = [folder / "synthetic-hour-1.json", folder / "synthetic-hour-2.json", folder / "config.json"]
    for path, experts in zip(written, (drawn.experts[:half], drawn.experts[half:]), strict=False):
        load = RoutingTrace(path.stem, experts, drawn.num_experts).load.tolist()
        dense = [[0] * drawn.num_experts] * DENSE_LAYERS
        path.write_text(json.dumps({"logical_count": dense + load}))
    config = installed_folder("R1's sizes") / "model_configs" / "deepseek-ai--DeepSeek-R1_config.json"
    written[-1].write_bytes(config.read_bytes())
    return written


def engineer(journey: Journey, folder: Path) -> None:
    """From SGLang's recording of a model of R1's size to a file that it loads, judged on another recording."""
    files = files_of_an_engineer(folder)
    with journey.person() as page:
        with journey.step(page, "start page"):
            page.goto(journey.address)
            page.get_by_role("button", name="Upload mine").click()
            expect(page.get_by_text("Routing logs, expert loads").first).to_be_visible()
        with journey.step(page, "dropped"):
            page.locator('input[type="file"]').set_input_files(files)
            expect(page.get_by_text("58 layers × 256 experts").first).to_be_visible()
        with journey.step(page, "cluster"):
            conftest.visit(page, "Cluster")
            page.get_by_role("button", name="hgx-h100-4-nodes", exact=True).click()
            expect(page.get_by_text("32 × H100").first).to_be_visible()
        with journey.step(page, "plans"):
            conftest.visit(page, "Optimise")
            conftest.run_systems(page)
        with journey.step(page, "Gantt"):
            page.get_by_role("link", name="See why on the timeline").click()
            expect(page.locator(".js-plotly-plot").first).to_be_visible()
        with journey.step(page, "saved"):
            conftest.visit(page, "Review")
            conftest.save_plan(page)
        verdict = page.get_by_role("heading", name=conftest.VERDICTS)
        with journey.step(page, "verdict", verdict):
            page.get_by_role("button", name="Judge this plan").click()
            expect(verdict).to_be_visible(timeout=JOB_TIMEOUT)
        download = page.get_by_role("button", name=re.compile("^Download .*json"))
        with journey.step(page, "export", download):
            page.get_by_text("Export to a serving engine").click()
            with page.expect_download() as file:
                download.click()
        content = json.loads(file.value.path().read_bytes())
        print(f"  {file.value.suggested_filename}: {', '.join(content)} of {len(content['physical_to_logical_map'])} layers")


def planner(journey: Journey, folder: Path) -> None:
    """From a purchase of 64 mixed GPUs, drawn, to the price of a target time and a brief for those who pay."""
    with journey.person() as page:
        with journey.step(page, "sample"):
            page.goto(journey.address)
            page.get_by_role("button", name="DeepSeek-R1 size (synthetic)").click()
            expect(page.get_by_text("58 layers × 256 experts").first).to_be_visible()
        with journey.step(page, "64 mixed GPUs"):
            conftest.visit(page, "Cluster")
            page.get_by_role("button", name="Presets").click()
            page.get_by_role("button", name="hgx-h100-and-l40s", exact=True).click()
            expect(page.get_by_text("16 GPUs of 2 types").first).to_be_visible()
            nodes = page.get_by_role("application").get_by_role("button", name=re.compile("^Node "))
            for number, modifiers in ((0, []), (1, ["Shift"])):
                conftest.settle(page)
                nodes.nth(number).click(position={"x": 20, "y": 14}, modifiers=modifiers)
            inspector = page.get_by_role("group", name="Inspector of what is selected")
            inspector.get_by_label("How many more nodes").fill("3")
            inspector.get_by_role("button", name="more nodes like this").click()
            expect(page.get_by_text("64 GPUs of 2 types").first).to_be_visible()
        with journey.step(page, "plans"):
            conftest.visit(page, "Optimise")
            conftest.run_systems(page)
        front = page.locator(".js-plotly-plot").last
        with journey.step(page, "time against cost", front):
            conftest.visit(page, "What-if")
            page.get_by_test_id("stMain").get_by_role("radio", name="Capacity").click()
            page.get_by_test_id("stMain").get_by_role("radio", name="More GPUs like these").click()
            page.get_by_role("button", name="Find the number of GPUs").click()
            expect(page.get_by_role("button", name="Open the cluster of")).to_be_visible(timeout=JOB_TIMEOUT)
            expect(page.get_by_test_id("stMain").get_by_test_id("stProgress")).to_have_count(0, timeout=JOB_TIMEOUT)
            expect(front.locator(".xtitle")).to_contain_text("cost per hour")
        with journey.step(page, "GPU types side by side"):
            page.get_by_test_id("stMain").get_by_role("radio", name="GPUs for my users").click()
            page.get_by_role("button", name="Compare").click()
            expect(page.get_by_text("The next GPU type:")).to_be_visible(timeout=JOB_TIMEOUT)
            expect(page.get_by_test_id("stMain").get_by_test_id("stProgress")).to_have_count(0, timeout=JOB_TIMEOUT)
        with journey.step(page, "brief"):
            conftest.visit(page, "Review")
            conftest.save_plan(page)
        with journey.step(page, "report"):
            page.get_by_role("button", name="Report", exact=True).click()
            with page.expect_download() as file:
                page.get_by_role("button", name="Download the report").click()
            file.value.save_as(folder / "report.html")
        with contextlib.closing(journey.browser.new_context(viewport=WIDE, offline=True)) as context:
            report = context.new_page()
            report.goto((folder / "report.html").as_uri())
            report.screenshot(path=PICTURES / "planner-report.png", full_page=True)
            report.pdf(path=PICTURES / "planner-report.pdf", format="A4", print_background=True)


def trainer(journey: Journey, folder: Path) -> None:
    """From a cluster and a model to the schedule of a training step, the flags that set it, and a step that was run."""
    with journey.person() as page:
        with journey.step(page, "cluster and model"):
            page.goto(journey.address)
            conftest.visit(page, "Cluster")
            page.get_by_role("button", name="lina-4-nodes", exact=True).click()
            expect(page.get_by_text("16 × A100").first).to_be_visible()
            choose_in_strip(page, 2, "GPT2-L-MoE")
        with journey.step(page, "schedules"):
            conftest.visit(page, "Optimise")
            page.get_by_role("button", name="Training step").click()
            conftest.run_systems(page)
        with journey.step(page, "Gantt"):
            page.get_by_role("link", name="See why on the timeline").click()
            expect(page.locator(".js-plotly-plot").first).to_be_visible()
        with journey.step(page, "launch"):
            conftest.visit(page, "Launch")
            expect(page.get_by_role("button", name="Start", exact=True)).to_be_visible()
        flags = page.get_by_role("button", name=re.compile("^Download "))
        with journey.step(page, "flags", flags.first):
            page.get_by_text("Export to a training framework").click()
            expect(flags.first).to_be_visible()
        measured = page.get_by_role("heading", name=re.compile("^Measured: "))
        with journey.step(page, "measured", measured):
            page.get_by_role("button", name="Start", exact=True).click()
            expect(measured).to_be_visible(timeout=STEP_TIMEOUT)


def team(journey: Journey, folder: Path) -> None:
    """Ana asks about a plan, Ben points to a layer, Ana looks there and decides."""
    with journey.person() as ana, journey.person() as ben:
        with journey.step(ana, "Ana plans"):
            ana.goto(journey.address)
            ana.get_by_role("button", name="Plan the sample").click()
            conftest.wait_for_plans(ana)
        with journey.step(ana, "Ana asks"):
            conftest.call_oneself(ana, "Ana")
            conftest.visit(ana, "Review")
            conftest.save_plan(ana)
        with journey.step(ben, "Ben opens the link"):
            ben.goto(conftest.link_of_plan(ana))
            expect(ben.get_by_role("heading", name="Discussion")).to_be_visible()
        with journey.step(ben, "Ben writes", ben.get_by_role("heading", name="Discussion")):
            conftest.call_oneself(ben, "Ben")
            ben.get_by_role("textbox", name="Your comment").fill(QUESTION)
            ben.get_by_role("combobox", name="About").click()
            ben.get_by_role("option", name="Layer 3 on Timeline").click()
        with journey.step(ana, "Ana reads", ana.get_by_role("heading", name="Discussion")):
            ben.get_by_role("button", name="Comment", exact=True).click()
            expect(ana.get_by_test_id("stText").filter(has_text=QUESTION)).to_be_visible()
        with journey.step(ana, "Ana looks there"):
            ana.get_by_role("button", name="Layer 3 on Timeline").click()
            expect(ana.get_by_role("heading", name="Timeline", exact=True)).to_be_visible()
        with journey.step(ana, "Ana answers", ana.get_by_role("heading", name="Discussion")):
            conftest.visit(ana, "Review")
            ana.get_by_role("textbox", name="Reason").fill("It waits for the slowest card, as under any plan.")
        with journey.step(ben, "Ana approves and Ben sees it"):
            ana.get_by_role("button", name="Approve", exact=True).click()
            expect(ben.get_by_role("button", name="Reopen")).to_be_visible()


def reader(journey: Journey, folder: Path) -> None:
    """From a figure's number in the Aurora paper to our value, the reason of the difference, and the setting as a plan."""
    with journey.person() as page:
        with journey.step(page, "start page"):
            page.goto(journey.address)
        with journey.step(page, "Figure 13 of Aurora"):
            conftest.visit(page, "Papers")
            page.get_by_role("radio", name="Figure 13").click()
            expect(page.get_by_role("button", name="Compute Figure 13")).to_be_visible()
        found = page.locator(conftest.TITLES, has_text="of 1 published number")
        with journey.step(page, "ours and why they differ", found):
            page.get_by_role("button", name="Compute Figure 13").click()
            expect(found).to_be_visible(timeout=JOB_TIMEOUT)
        with journey.step(page, "its setting as a plan"):
            page.get_by_test_id("stMain").get_by_role("button", name=re.compile("on mixed|aurora")).first.click()
            expect(page.get_by_role("link", name="See why on the timeline")).to_be_visible(timeout=JOB_TIMEOUT)


def owner(journey: Journey, folder: Path) -> None:
    """From a model of one's own and texts to that model under a plan, measured against contiguous blocks."""
    from tests.cases.tiny_models import saved  # with PyTorch, which no other journey needs

    saved(folder / MODELS / "olmoe", "olmoe", hidden_size=256, intermediate_size=512)
    texts = folder / "texts.txt"
    texts.write_text("\n".join(" ".join(f"w{(7 * line + word) % 48}" for word in range(8 + line % 9)) for line in range(200)))
    with journey.person() as page:
        with journey.step(page, "texts for the model"):
            page.goto(journey.address)
            conftest.visit(page, "Workload")
            page.get_by_role("button", name="Record from your model").click()
            page.locator('.st-key-record-own input[type="file"]').set_input_files(texts)
            expect(page.get_by_text("to record,").first).to_be_visible()
        with journey.step(page, "recorded"):
            page.get_by_role("button", name="Record", exact=True).click()
            expect(page.get_by_text("2 layers × 8 experts").first).to_be_visible(timeout=JOB_TIMEOUT)
        with journey.step(page, "cluster"):
            conftest.visit(page, "Cluster")
            page.get_by_role("button", name="exflow-1-node", exact=True).click()
            expect(page.get_by_text("4 × A100").first).to_be_visible()
        with journey.step(page, "plans"):
            conftest.visit(page, "Optimise")
            conftest.run_systems(page)
        with journey.step(page, "launch"):
            conftest.visit(page, "Launch")
            page.get_by_test_id("stMain").get_by_role("radio", name="Your model").click()
            page.get_by_test_id("stMain").locator('input[type="file"]').set_input_files(texts)
            expect(page.get_by_role("button", name="Start", exact=True)).to_be_enabled(timeout=JOB_TIMEOUT)
        measured = page.get_by_role("heading", name=re.compile("^Measured: "))
        with journey.step(page, "measured", measured):
            page.get_by_role("button", name="Start", exact=True).click()
            expect(measured).to_be_visible(timeout=LAUNCH_TIMEOUT)
        with journey.step(page, "Gantt", page.get_by_text("what follows the last MoE layer")):
            pass


JOURNEYS = {journey.__name__: journey for journey in (newcomer, engineer, planner, trainer, team, reader, owner)}


def main(names: list[str]) -> None:
    """Go all ways, or those of some names, each in a studio of its own."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    with conftest.chromium() as browser:
        for name in names or JOURNEYS:
            print(f"{name}: {JOURNEYS[name].__doc__}")
            with tempfile.TemporaryDirectory() as folder, conftest.studios(Path(folder) / "data") as start:
                os.environ[SWITCH] = str(Path(folder) / MODELS)
                journey = Journey(browser, name, start())
                JOURNEYS[name](journey, Path(folder))
            journey.say("in all")


if __name__ == "__main__":
    main(sys.argv[1:])
