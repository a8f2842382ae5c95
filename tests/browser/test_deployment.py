"""From a serving engine's recording to its next plan: SGLang's statistics and map in, a verdict, a map out."""

import json
import re
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, expect

from tests.browser.conftest import VERDICTS, new_workspace, run_systems, settle, shoot
from tests.cases import checkers
from tests.cases.samples import sample

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
GPUS, LAYERS, EXPERTS = 8, 8, 16


def files_of_an_operator(folder: Path) -> list[Path]:
    """Two hours of SGLang's statistics, the map that it runs with, the cluster and the model."""
    written = {
        "hour-1.json": {"logical_count": sample("alpha-code").load.tolist()},
        "hour-2.json": {"logical_count": sample("alpha-prose").load.tolist()},
        "running.json": {"physical_to_logical_map": [list(range(EXPERTS))] * LAYERS},
    }
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content))
    paths = [folder / name for name in written]
    return [*paths, SAMPLES / "mixed-8.json", SAMPLES / "tiny-moe-alpha.json"]


def test_an_sglang_recording_becomes_a_plan_that_sglang_loads(page: Page, studio: str, tmp_path: Path) -> None:
    page.goto(studio)
    settle(page)
    page.locator('input[type="file"]').set_input_files(files_of_an_operator(tmp_path))
    expect(page.get_by_text("running.json counts as deployed now")).to_be_visible(timeout=60_000)
    for opened in ("opened hour-1", "opened hour-2", "opened the cluster mixed-8", "opened the model tiny-moe-alpha"):
        expect(page.get_by_text(opened)).to_be_visible()
    settle(page)
    shoot(page, "deployment-1-dropped")

    page.get_by_role("link", name="Make a plan").click()
    settle(page)
    expect(page.get_by_role("combobox", name="Deployed now")).to_have_value("running.json")
    run_systems(page)

    page.get_by_role("link", name="Review", exact=True).click()
    new_workspace(page)
    page.get_by_role("button", name="Save the open plan").click()
    page.get_by_role("button", name="Save", exact=True).click()
    settle(page)
    page.get_by_role("button", name="Judge this plan").click()
    expect(page.get_by_role("heading", name=VERDICTS)).to_be_visible(timeout=120_000)
    settle(page)
    shoot(page, "deployment-2-verdict")

    page.get_by_text("Export to a serving engine").click()
    settle(page)
    with page.expect_download() as download:
        page.get_by_role("button", name=re.compile("^Download .*json")).click()
    download.value.save_as(tmp_path / "next.json")
    shoot(page, "deployment-3-export")
    held = checkers.sglang((tmp_path / "next.json").read_bytes(), LAYERS, (), EXPERTS, GPUS)
    assert np.array(held).shape[:2] == (LAYERS, GPUS)
    assert held != checkers.sglang((tmp_path / "running.json").read_bytes(), LAYERS, (), EXPERTS, GPUS)
