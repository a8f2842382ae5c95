"""Long work as a person meets it: cancelled, killed, and found again after a reload."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from engine.jobs import runner
from engine.jobs.protocol import living_worker
from tests.browser.conftest import settle, shoot


@pytest.fixture
def running(page: Page, start_studio, data_folder: Path, tmp_path: Path) -> runner.Job:
    """A studio with a long optimisation under way: 26 layers of 64 experts, minutes of time limit."""
    rng = np.random.default_rng(0)
    popularity = rng.zipf(1.6, 64).astype(float)
    experts = rng.choice(64, size=(2000, 26, 1), p=popularity / popularity.sum()).astype(np.int16)
    trace = tmp_path / "long.npz"
    np.savez(trace, experts=experts, num_experts=64)
    model = tmp_path / "model.json"
    model.write_text(
        '{"name": "long", "layers": 26, "experts": 64, "experts_per_token": 1, "d_model": 2048, "d_ff": 1408}'
    )
    page.goto(start_studio("--sample"))
    settle(page)
    page.locator('input[type="file"]').set_input_files([trace, model])
    expect(page.get_by_text("2,000 tokens × 26 layers × 64 experts")).to_be_visible()
    expect(page.get_by_text("d_model 2,048")).to_be_visible()
    settle(page)
    page.get_by_role("link", name="Next: make a plan").click()
    page.get_by_text("Options", exact=True).click()
    limit = page.get_by_role("spinbutton", name="time limit").first
    limit.fill("3000")
    limit.press("Enter")
    settle(page)
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.get_by_text("placing layer")).to_be_visible(timeout=60_000)
    return runner.jobs(data_folder)[0]


def test_a_reload_finds_the_running_job_and_stop_keeps_its_plan(page: Page, running: runner.Job) -> None:
    expect(page.get_by_text("placing layer 2 of 26")).to_be_visible(timeout=120_000)
    page.reload()
    expect(page.get_by_text("placing layer")).to_be_visible(timeout=60_000)
    shoot(page, "7-running")
    page.get_by_role("button", name="Stop").click()
    begin = time.monotonic()
    assert runner.wait(running, 10).finished
    assert time.monotonic() - begin < 2.0
    expect(page.get_by_text("cancelled", exact=False).first).to_be_visible()
    expect(page.get_by_text("Candidate plans")).to_be_visible()
    shoot(page, "8-cancelled")
    assert running.result["candidates"][0]["status"] == "CANCELLED"


def test_a_killed_worker_is_shown_as_failed_with_its_log(page: Page, running: runner.Job) -> None:
    os.kill(living_worker(running.folder).pid, signal.SIGKILL)
    expect(page.get_by_text("the worker was killed by signal 9")).to_be_visible()
    expect(page.get_by_text("The end of its log:")).to_be_visible()
    shoot(page, "9-killed")
