"""Long work as a person meets it: cancelled, killed, and found again after a reload."""

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from engine.jobs import runner
from engine.jobs.protocol import living_worker
from tests.browser.conftest import RUN, settle

PLACING = re.compile(r"placing layer (?!1 )\d+ of 26")
"""Progress past the first layer, after which there is a plan to keep."""


def run(page: Page, data_folder: Path) -> runner.Job:
    """Press Run on the Optimise page; the job, once it places experts."""
    page.get_by_role("button", name=RUN).click()
    expect(page.get_by_text(PLACING)).to_be_visible(timeout=60_000)
    return runner.jobs(data_folder)[0]


@pytest.mark.clock
def test_a_job_is_found_after_a_reload_stopped_and_another_one_killed(
    page: Page, start_studio, data_folder: Path, tmp_path: Path
) -> None:
    # A long optimisation: 26 layers of 64 experts, minutes of time limit.
    rng = np.random.default_rng(0)
    popularity = rng.zipf(1.6, 64).astype(float)
    experts = rng.choice(64, size=(2000, 26, 1), p=popularity / popularity.sum()).astype(np.int16)
    trace = tmp_path / "long.npz"
    np.savez(trace, experts=experts, num_experts=64)
    model = tmp_path / "model.json"
    model.write_text('{"name": "long", "layers": 26, "experts": 64, "experts_per_token": 1, "d_model": 2048, "d_ff": 1408}')
    page.goto(start_studio("--sample"))
    settle(page)
    page.locator('input[type="file"]').set_input_files([trace, model])
    expect(page.get_by_text("26 layers × 64 experts")).to_be_visible()
    expect(page.get_by_test_id("stSidebar").get_by_text("64 experts, top-1")).to_be_visible()
    settle(page)
    page.get_by_role("link", name="Make a plan").click()
    page.get_by_text("Systems, travel, number formats, deployed", exact=True).click()
    limit = page.get_by_role("spinbutton", name="Time limit (s)").first
    limit.fill("3000")
    limit.press("Enter")
    settle(page)

    running = run(page, data_folder)
    page.reload()
    expect(page.get_by_text(PLACING)).to_be_visible(timeout=60_000)
    page.get_by_test_id("stMain").get_by_role("button", name="Stop").click()
    begin = time.monotonic()
    assert runner.wait(running, 10).finished
    assert time.monotonic() - begin < 2.0
    expect(page.get_by_text("cancelled", exact=False).first).to_be_visible()
    expect(page.get_by_role("radio", name="Candidate plans")).to_be_visible()
    assert running.result["candidates"][-1]["status"] == "CANCELLED"

    settle(page)
    doomed = run(page, data_folder)
    assert doomed.id != running.id
    os.kill(living_worker(doomed.folder).pid, signal.SIGKILL)
    expect(page.get_by_text("the worker was killed by signal 9")).to_be_visible()
    expect(page.get_by_text("The end of its log:")).to_be_visible()
