"""Why a plan is as fast as it is: its bottleneck, layer by layer next to its baseline."""

import re
from pathlib import Path

from playwright.sync_api import Page, expect

from engine.jobs import runner
from engine.plan import Plan
from engine.simulate import simulate
from engine.simulate.events import waits
from engine.store.problems import problem_from
from engine.units import share
from tests.browser.conftest import TITLES, go, settle
from tests.cases.sessions import JOB


def test_the_bottleneck_is_found(page: Page, start_studio, planned: str, data_folder: Path) -> None:
    job = runner.find(JOB, data_folder)
    problem = problem_from(job.request.arguments)
    (opened, _) = job.result["candidates"]
    timeline = simulate(Plan.from_dict(opened["plan"], "plan"), problem)

    go(page, f"{start_studio()}/timeline?session={planned}")
    page.get_by_text("The bottleneck").click()
    settle(page)
    expect(page.locator(TITLES).filter(has_text="finishes last")).to_be_visible()
    titles = [title.text_content() for title in page.locator(TITLES).all()]
    assert re.search("^Linear placement takes .*; it is deployed now$", titles[0]), titles
    # On this cluster it can only be one of the slowest GPUs, which compute and send least.
    (named,) = [title for title in titles if "finishes last" in title]
    gpu = timeline.resources.index(named.split(" finishes")[0])
    times = waits(timeline, problem.network).groupby("gpu")["seconds"].sum()
    assert problem.cluster.gpus[gpu].type == "RTX 2080 Ti" and times.idxmax() == gpu
    assert f"for {share(times[gpu] / timeline.total)} of the time" in named

    # Another stretch of layers is another chart: the last one alone.
    low, high = page.get_by_role("slider").all()
    for handle in (high, low):
        handle.focus()
        page.keyboard.press("End")
        settle(page)
    events = timeline.events
    last = events[events["layer"] == problem.workload.layers - 1]
    length = last["end"].max() - last["start"].min()
    drawn = page.locator(".annotation-text").all_text_contents()
    assert any(text.startswith("Linear placement (deployed now) · ") and f"{length * 1e6:.3g}" in text for text in drawn), drawn


def test_the_work_under_the_pointer_stands_out(page: Page, start_studio, planned: str) -> None:
    """Hovering over a bar dims other kinds of work and other layers, in both plans; leaving brings all back."""
    go(page, f"{start_studio()}/timeline?session={planned}")
    chart = page.locator(".js-plotly-plot").first
    bars = chart.locator(".cartesianlayer .barlayer .point")
    opacity = "bars => bars.map(bar => bar.style.opacity)"
    assert bars.count() and not any(bars.evaluate_all(opacity))

    work = bars.evaluate_all(
        """bars => bars.map(bar => {
            const { trace } = bar.closest(".trace").__data__[0];
            return trace.customdata[bar.__data__.i].split("<br>")[0];
        })"""
    )
    place = bars.first.bounding_box()
    page.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
    expect(chart.locator(".hoverlayer .hovertext")).to_have_count(1)
    (shown,) = {name for name, shade in zip(work, bars.evaluate_all(opacity), strict=True) if not shade}
    assert shown in chart.locator(".hoverlayer .hovertext").first.text_content()
    assert work.count(shown) > 8, "the same work of both plans on all GPUs"

    page.mouse.move(2, 2)
    expect(chart.locator(".hoverlayer .hovertext")).to_have_count(0)
    assert not any(bars.evaluate_all(opacity))
