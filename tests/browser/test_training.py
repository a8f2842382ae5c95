"""A training step in a real browser: GPT2-S-MoE on Lancet's cluster, wrong files, and costs."""

import json
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.browser.conftest import TITLES, choose_in_strip, open_sample, run_systems, settle, shoot


def drop(page: Page, place: int, path: Path, content: str) -> None:
    path.write_text(content)
    page.locator('input[type="file"]').nth(place).set_input_files(path)
    settle(page)


def test_training_step_from_the_goal_to_its_exposed_communication(page: Page, studio: str, tmp_path: Path) -> None:
    open_sample(page, studio)
    settle(page)
    choose_in_strip(page, 1, "lancet-p4de-2-nodes")
    choose_in_strip(page, 2, "GPT2-S-MoE")
    page.get_by_role("link", name="Optimise").click()
    page.get_by_role("button", name="Training step").click()
    expect(page.get_by_text("18.9 MB in each GPU's buffer")).to_be_visible()

    page.get_by_text("Operator graph", exact=True).click()
    drop(page, 0, tmp_path / "graph.json", json.dumps({"name": "x", "operators": [{"name": "a"}]}))
    expect(page.get_by_test_id("stAlert").filter(has_text="graph.json")).to_be_visible()
    graph = {"name": "only one", "operators": [{"name": "a", "kind": "qkv", "phase": "forward", "layer": 0, "seconds": 1}]}
    drop(page, 0, tmp_path / "one.json", json.dumps(graph))
    expect(page.get_by_text("1 operator ·")).to_be_visible()
    page.get_by_role("button", name="Remove the imported graph").click()
    expect(page.get_by_text("371 operators")).to_be_visible()
    settle(page)

    for system in ("PipeMoE", "Lina (training)", "Tutel (best of 1, 2, 4, 8)", "RAF-like (no partition)"):
        page.get_by_test_id("stCheckbox").filter(has_text=system).get_by_text(system, exact=True).click()
        settle(page)
    run_systems(page)
    expect(page.locator(TITLES).filter(has_text="of DeepSpeed's exposed communication")).to_be_visible()
    shoot(page, "9-training-step")

    page.get_by_role("link", name="See why on the timeline").click()
    gantt = page.locator(".js-plotly-plot").first
    expect(gantt.get_by_text("Exposed communication").first).to_be_visible()
    for text in ("exposed", "all-reduce", "forward | backward", "bound 75 ms"):
        expect(gantt.get_by_text(text, exact=True).first).to_be_visible()
    marks = page.evaluate(
        """() => document.querySelector(".js-plotly-plot").data
               .filter(trace => trace.name === "Exposed communication").map(trace => trace.customdata.length)"""
    )
    assert len(marks) == 2 and min(marks) > 5
    settle(page)
    shoot(page, "10-training-timeline")
    shown = "() => document.querySelector('.js-plotly-plot')._fullLayout.xaxis.range[1]"
    grab = page.locator(".rangeslider-grabarea-max")
    grab.scroll_into_view_if_needed()
    before, handle = page.evaluate(shown), grab.bounding_box()
    page.mouse.move(handle["x"] + handle["width"] / 2, handle["y"] + 10)
    page.mouse.down()
    page.mouse.move(handle["x"] - 400, handle["y"] + 10, steps=8)
    page.mouse.up()
    page.wait_for_function(f"before => ({shown})() < 0.8 * before", arg=before)  # the slider below the chart zooms

    page.get_by_test_id("stSidebar").get_by_role("link", name="Cluster").click()
    settle(page)
    page.get_by_role("tab", name="Costs").click()
    drop(page, 0, tmp_path / "times.csv", "operation,seconds\ngemm,1\n")
    expect(page.get_by_test_id("stAlert").filter(has_text="gemm needs a value in column 'gpu'")).to_be_visible()
    rows = "".join(f"all_to_all,8,{size},{size / 1e9}\n" for size in (1000, 1000000))
    drop(page, 0, tmp_path / "eight.csv", f"operation,ranks,bytes,seconds\n{rows}")
    expect(page.get_by_text("read eight")).to_be_visible()
    settle(page)
    network = page.get_by_role("combobox", name="Network")
    network.scroll_into_view_if_needed()  # a list that is open closes when the page scrolls
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    network.click()
    page.get_by_role("option", name="eight (file)").click()
    expect(page.get_by_text("Refused: eight has no all-to-all over 16 GPUs (it has 8)")).to_be_visible()
    settle(page)
    shoot(page, "11-costs-refused")
