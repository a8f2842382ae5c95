"""The What-if page as a person uses it: sliders, a study that goes on through a reload, a synthetic recording; of a training
step wrong values, a sweep, another row's plan, and a sweep that is stopped."""

import re
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

from engine.jobs import runner
from engine.jobs.protocol import living_worker
from tests.browser.conftest import TITLES, begins_at, choose_in_strip, held, settle, shoot
from tests.cases.jobs import until


def type_values(page: Page, label: str, text: str) -> None:
    page.get_by_label(label, exact=True).fill(text)
    page.keyboard.press("Enter")
    settle(page)


def title_of(page: Page, text: str | re.Pattern) -> Locator:
    """The newest of the charts with such a title: one that is about to be replaced may still be there."""
    return page.locator(TITLES).filter(has_text=text).last


def slide(page: Page, label: str, key: str, times: int) -> None:
    page.get_by_role("slider", name=label).first.focus()
    for _ in range(times):
        page.keyboard.press(key)
    settle(page)


def has_points_with_noise(folder: Path) -> bool:
    """True if the newest study of the imprecision has come to a noisy draw."""
    job = next(iter(runner.jobs(folder, "imprecision")), None)
    return bool(job and job.result and any(point["level"] for point in job.result["points"]))


def test_slide_study_reload_and_open_a_synthetic_recording(page: Page, start_studio, data_folder: Path) -> None:
    page.goto(start_studio("--sample"))
    settle(page)
    page.get_by_role("link", name="What-if", exact=True).click()
    expect(title_of(page, "Linear placement takes 1.69 ms")).to_be_visible()
    for width, height in ((1440, 900), (1024, 768)):
        assert begins_at(page, width, height) < 300
    totals = page.locator('[class*="st-key-titled-what-if-totals"]')
    axis, legend = (totals.locator(part).bounding_box() for part in (".xtitle", ".legend"))
    assert axis["y"] + axis["height"] <= legend["y"], "the legend lies below the axis"
    assert totals.locator(".legend .scrollbar").evaluate("bar => Number(bar.getAttribute('height'))") == 0
    page.set_viewport_size({"width": 1440, "height": 900})
    slide(page, "Network bandwidth", "ArrowRight", 4)
    expect(title_of(page, "Linear placement takes 1.03 ms instead of 1.69 ms")).to_be_visible()
    expect(page.get_by_text("Linear placement, changed")).to_be_visible()
    slide(page, "Traffic noise", "ArrowRight", 6)
    expect(page.locator(".xtitle").filter(has_text="changed: network 2×, 30 % traffic noise")).to_be_visible()
    page.get_by_role("button", name="Reset all sliders").click()
    expect(title_of(page, re.compile(r"^Linear placement takes 1\.69 ms$"))).to_be_visible()
    for label, usual in (("Network bandwidth", "1×"), ("Traffic noise", "0 %")):
        expect(page.get_by_role("slider", name=label).first).to_have_attribute("aria-valuetext", usual)

    page.get_by_test_id("stMain").get_by_role("radio", name="Traffic noise").click()
    settle(page)
    type_values(page, "Noise, %", "0, 150")
    expect(page.get_by_text("1.5 is not between 0 and 1")).to_be_visible()
    type_values(page, "Noise, %", "0, 20, 40, 60, 75")
    type_values(page, "Draws per noise level", "20")
    page.get_by_role("button", name="Run the imprecision study").click()
    until(lambda: has_points_with_noise(data_folder), timeout=60)
    with held(living_worker(runner.jobs(data_folder, "imprecision")[0].folder)):
        so_far = title_of(page, re.compile(r"So far: at \d+ % noise"))
        expect(so_far).to_be_visible()
        page.reload()
        settle(page)
        expect(so_far).to_be_visible()
        expect(page.get_by_test_id("stMain").get_by_test_id("stProgress")).to_have_count(1)
    expect(title_of(page, "At 75 % noise Aurora's plan takes")).to_be_visible(timeout=120_000)
    expect(page.get_by_test_id("stMain").get_by_test_id("stProgress")).to_have_count(0, timeout=60_000)
    settle(page)
    shoot(page, "22-what-if-imprecise")

    page.get_by_test_id("stMain").get_by_role("radio", name="Synthetic workload").click()
    settle(page)
    slide(page, "Affinity", "End", 1)
    expect(page.get_by_test_id("stMetric").filter(has_text="followers together")).to_contain_text("100 %")
    page.get_by_role("button", name="Open it").click()
    expect(page.get_by_test_id("stPopover").first).to_contain_text("synthetic, skew 1")


def has_first_points(folder: Path) -> runner.Job | None:
    """The newest sweep, of partition ranges, once it has made some plans and not all."""
    job = next(iter(runner.jobs(folder, "sweep")), None)
    found = len(job.result["candidates"]) if job and job.result and len(runner.jobs(folder, "sweep")) == 2 else 0
    return job if 0 < found < 60 else None


def test_sweep_open_and_stop(page: Page, start_studio, data_folder: Path) -> None:
    page.goto(start_studio("--sample"))
    settle(page)
    choose_in_strip(page, 1, "lancet-p4de-2-nodes")
    choose_in_strip(page, 2, "GPT2-S-MoE")
    page.get_by_role("link", name="Optimise", exact=True).click()
    page.get_by_role("button", name="Training step").click()
    page.mouse.move(0, 0)  # the button's help lies over the links until then
    settle(page)
    page.get_by_role("link", name="What-if", exact=True).click()
    expect(page.get_by_text("No sweep yet")).to_be_visible()

    start = page.get_by_role("button", name="Run the sweep")
    type_values(page, "Micro-op sizes, MB", "30, zero")
    expect(page.get_by_text("'zero' is not a number")).to_be_visible()
    expect(start).to_be_disabled()
    type_values(page, "Micro-op sizes, MB", "2, 30, 100")
    start.click()
    finding = page.locator(TITLES).first
    expect(finding).to_contain_text(re.compile("micro-ops are best: "), timeout=60_000)
    expect(page.get_by_test_id("stMain").get_by_test_id("stProgress")).to_have_count(0, timeout=60_000)
    settle(page)
    expect(page.locator(".js-plotly-plot")).to_have_count(2)
    shoot(page, "20-what-if-micro-ops")

    page.get_by_test_id("stDataFrame").click(position={"x": 16, "y": 52})  # the box of the first row
    expect(page.get_by_text("This plan: 2 MB micro-ops")).to_be_visible()
    page.get_by_role("button", name="Open this plan").click()
    expect(page.get_by_test_id("stPopover").nth(3)).to_contain_text("Lina, 2 MB micro-ops")
    expect(title_of(page, re.compile("^Lina, 2 MB micro-ops takes"))).to_be_visible()
    slide(page, "Network bandwidth", "ArrowLeft", 3)
    expect(title_of(page, re.compile("^Lina, 2 MB micro-ops takes .* instead of"))).to_be_visible()

    page.get_by_text("Partition range", exact=True).click()
    settle(page)
    type_values(page, "Maximum operators per range", "8-71")
    start.click()
    sweep = until(lambda: has_first_points(data_folder))
    with held(living_worker(sweep.folder)):  # it still runs when Stop is pressed, on any machine
        expect(title_of(page, "So far")).to_be_visible(timeout=60_000)
        page.get_by_test_id("stMain").get_by_role("button", name="Stop", exact=True).click()
    expect(page.get_by_text("What was found until then is kept.")).to_be_visible(timeout=60_000)
    settle(page)
    expect(page.locator(".js-plotly-plot")).to_have_count(4)
    shoot(page, "21-what-if-stopped")
