"""The Workload page's checks: each fault with its button, and the recording as a file."""

from pathlib import Path

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from engine import store
from engine.workload import DECODE, PREFILL, Finding, Origin, RoutingTrace
from tests.app.test_pages import ROOT, open_sample, press, visit
from tests.cases.samples import sample


@pytest.fixture
def app(own_data_folder: Path) -> AppTest:
    return visit(open_sample(AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60).run()), "workload")


def opened(app: AppTest, trace: RoutingTrace) -> AppTest:
    digest = store.save_workload(trace)
    app.session_state["workloads"] = {**app.session_state["workloads"], digest: trace.name}
    app.session_state["workload"] = digest
    app.run()
    assert not app.exception, app.exception
    return app


def recording(app: AppTest) -> RoutingTrace:
    return store.load_workload(app.session_state["workload"])


def labels(app: AppTest) -> list[str]:
    return [button.label for button in app.button]


def with_profile_rows(rows: int) -> RoutingTrace:
    trace = sample("alpha-code")
    same = np.repeat(trace.experts[:1], rows, axis=0)
    return RoutingTrace("warm", np.concatenate([same, trace.experts]), trace.num_experts)


def test_a_clean_recording_has_nothing_to_mend(app: AppTest) -> None:
    assert not any(button.key and button.key.startswith("remedy-") for button in app.button)


def test_profile_rows_are_cut_by_a_button(app: AppTest) -> None:
    opened(app, with_profile_rows(8448))
    button = next(button for button in app.button if button.key == "remedy-cut-profile-rows")
    assert button.label.startswith("Cut the first 8,4")
    press(app, button.label)
    assert abs(recording(app).tokens - sample("alpha-code").tokens) <= 1
    assert "warm" in app.session_state["workloads"].values(), "the recording as it was stays"
    assert button.label not in labels(app)
    assert any("skew" in message.value and "Cut 8,4" in message.value for message in app.success)


def test_a_remedy_that_is_not_known_here_has_no_button(app: AppTest) -> None:
    trace = sample("alpha-code")
    finding = Finding(severity="warning", code="of-tomorrow", message="Tomorrow's fault.", remedy="mend-of-tomorrow")
    opened(
        app, RoutingTrace("newer", trace.experts, trace.num_experts, origin=Origin(format="npz", findings=(finding,)))
    )
    assert any("Tomorrow" in warning.value for warning in app.warning)
    assert not any(button.key and button.key.startswith("remedy-") for button in app.button)


def test_one_phase_is_kept_by_a_button(app: AppTest) -> None:
    trace = sample("alpha-code")
    phase = np.where(trace.experts[:, 0, 0] < 8, DECODE, PREFILL).astype(np.int8)
    opened(app, RoutingTrace("mixed", trace.experts, trace.num_experts, phase=phase))
    press(app, "Keep the decode")
    assert recording(app).tokens == int((phase == DECODE).sum())


def test_the_recording_as_a_file(app: AppTest) -> None:
    assert "Write the file" in labels(app)
    next(box for box in app.selectbox if box.key == "save-recording-as").set_value("sglang-statistics")
    press(app, "Write the file")
    assert any("Left out" in caption.value for caption in app.caption) and not app.error
