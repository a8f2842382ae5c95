"""Files that cannot be used: each is answered in the page, and the session keeps its open inputs."""

import json
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, expect

from tests.browser.conftest import open_sample, settle
from tests.cases.files import MIXTRAL

SAMPLE = "8 layers × 16 experts"


def pickled_array(path: Path) -> None:
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)


def too_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(300 * 1024**2)


CASES = {
    "hole.csv": ("token,layer,expert\n0,0,1\n0,1,\n", "line 3"),
    "pickle.npy": (pickled_array, "Python objects"),
    "large.npy": (too_large, "File must be 200.0MB or smaller"),
    "config.json": (json.dumps(MIXTRAL), "does not fit"),
}
"""Files by name: contents, or their writer; and a part of the answer. The last one becomes the open model."""


def test_a_bad_file_is_answered_and_loses_nothing_and_names_are_shown_as_text(page: Page, studio: str, tmp_path: Path) -> None:
    open_sample(page, studio)
    expect(page.get_by_text(SAMPLE)).to_be_visible()
    page.get_by_text("Add a recording").click()
    settle(page)
    for name, (content, reason) in CASES.items():
        path = tmp_path / name
        if isinstance(content, str):
            path.write_text(content)
        else:
            content(path)
        page.locator('input[type="file"]').set_input_files(path)
        # Streamlit itself refuses a file that is too large: it turns red, and the reason is read out and shown on hover.
        answer = page.get_by_test_id("stAlert").or_(page.get_by_role("alert")).filter(has_text=reason)
        expect(answer.first).to_be_attached()
        expect(page.get_by_text(SAMPLE)).to_be_visible()
        settle(page)
    path = tmp_path / "<img src=x onerror=alert(1)> **bold** $x$.csv"
    path.write_text("token,layer,expert\n" + "".join(f"{t},{layer},{t % 4}\n" for t in range(8) for layer in range(2)))
    page.locator('input[type="file"]').set_input_files(path)
    expect(page.get_by_test_id("stSidebar").get_by_text("2 layers × 4 experts")).to_be_visible()
    settle(page)
    assert page.locator('img[src="x"]').count() == 0
    assert page.locator("strong", has_text="bold").count() == 0
