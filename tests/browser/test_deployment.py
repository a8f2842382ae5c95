"""From a serving engine's recording to its next plan: SGLang's statistics and map in, a verdict, a map out."""

import json
import re
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, expect

from tests.browser.conftest import VERDICTS, go, run_systems, save_plan, settle
from tests.cases import checkers
from tests.cases.samples import sample

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
GPUS, LAYERS, EXPERTS = 8, 8, 16


def files_of_an_operator(folder: Path) -> list[Path]:
    """Two hours of SGLang's statistics, the map that it runs with, the cluster and the model."""
    hours = [{"logical_count": sample(name).load.tolist()} for name in ("alpha-code", "alpha-prose")]
    running = {"physical_to_logical_map": [list(range(EXPERTS))] * LAYERS}
    paths = [folder / name for name in ("hour-1.json", "hour-2.json", "running.json")]
    for path, content in zip(paths, (*hours, running), strict=True):
        path.write_text(json.dumps(content))
    return [*paths, SAMPLES / "mixed-8.json", SAMPLES / "tiny-moe-alpha.json"]


def test_an_sglang_recording_becomes_a_plan_that_sglang_loads(page: Page, studio: str, tmp_path: Path) -> None:
    go(page, studio)
    page.locator('input[type="file"]').set_input_files(files_of_an_operator(tmp_path))
    expect(page.get_by_text("running.json counts as deployed now")).to_be_visible(timeout=60_000)
    for opened in ("opened hour-1", "opened hour-2", "opened the cluster mixed-8", "opened the model tiny-moe-alpha"):
        expect(page.get_by_text(opened)).to_be_visible()
    settle(page)

    page.get_by_role("link", name="Make a plan").click()
    settle(page)
    expect(page.get_by_role("combobox", name="Deployed now")).to_have_value("running.json")
    run_systems(page)

    page.get_by_role("link", name="Review", exact=True).click()
    save_plan(page)
    page.get_by_role("button", name="Judge this plan").click()
    expect(page.get_by_role("heading", name=VERDICTS)).to_be_visible(timeout=120_000)
    settle(page)

    page.get_by_text("Export to a serving engine").click()
    settle(page)
    with page.expect_download() as download:
        page.get_by_role("button", name=re.compile("^Download .*json")).click()
    download.value.save_as(tmp_path / "next.json")
    held = checkers.sglang((tmp_path / "next.json").read_bytes(), LAYERS, (), EXPERTS, GPUS)
    assert np.array(held).shape[:2] == (LAYERS, GPUS)
    assert held != checkers.sglang((tmp_path / "running.json").read_bytes(), LAYERS, (), EXPERTS, GPUS)
