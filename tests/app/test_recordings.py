"""A recording and the models that it may come from; the table of several recordings."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from app import model_catalogue, state, workload
from engine import formats
from engine.catalogue import model_presets
from engine.compare.synthetic import Recipe
from engine.workload import ExpertLoad, RoutingTrace
from tests.app.test_drop_zone import SAMPLES, answers, drop
from tests.app.test_pages import ROOT, open_sample, press, visit
from tests.app.test_what_if_page import choose
from tests.costs.silicon import needs_tables

ALPHA, BETA = (SAMPLES / "tiny-moe" / f"{name}-prose.npz" for name in ("alpha", "beta"))
RECIPE = Recipe(tokens=64, skew=0.6, affinity=0.3)


@pytest.fixture
def app(own_data_folder: Path) -> AppTest:
    return AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60).run()


def as_csv(loads: np.ndarray) -> bytes:
    header = ",".join(f"expert_{expert}" for expert in range(loads.shape[1]))
    return "\n".join([header, *(",".join(map(str, row)) for row in loads.tolist())]).encode()


def offered(app: AppTest) -> list[str]:
    return [button.label.replace("\\", "") for button in app.button if (button.key or "").startswith("fitting-")]


def test_the_only_model_that_fits_is_opened_and_said(app: AppTest) -> None:
    drop(app, code__npz=ALPHA.read_bytes())
    assert app.session_state["model"] == model_presets()["tiny-moe-alpha"].model
    assert answers(app) == [
        "opened code; opened the model tiny-moe-alpha, the only one of the catalogue with 8 layers × 16 experts, top-1"
    ]
    assert any("fits only tiny-moe-alpha" in toast.value.replace("\\", "") for toast in app.toast)
    assert not offered(app)


def test_of_several_the_last_that_tells_a_model_counts(app: AppTest) -> None:
    drop(
        app, a__npz=ALPHA.read_bytes(), b__npz=BETA.read_bytes(), traffic__csv=(SAMPLES / "traffic-8.csv").read_bytes()
    )
    assert app.session_state["workloads"][app.session_state["workload"]] == "traffic"
    assert app.session_state["model"].name == "tiny-moe-beta"


def test_a_model_dropped_along_counts(app: AppTest) -> None:
    drop(app, code__npz=ALPHA.read_bytes(), model__json=(SAMPLES / "tiny-moe-alpha.json").read_bytes())
    assert answers(app) == ["opened code", "opened the model tiny-moe-alpha"]


def test_where_the_open_model_does_not_fit_another_is_offered(app: AppTest) -> None:
    visit(open_sample(app), "workload")
    drop(app, other__npz=BETA.read_bytes())
    assert app.session_state["model"].name == "tiny-moe-alpha", "the open model stays until a person says"
    assert offered(app) == ["tiny-moe-beta"]
    assert any("8 layers × 16 experts, top-2 fits" in text.value for text in app.markdown)
    press(app, app.button(key="fitting-tiny-moe-beta").label)
    assert app.session_state["model"].name == "tiny-moe-beta" and not offered(app)


@needs_tables
def test_several_models_are_offered_and_none_is_opened(app: AppTest) -> None:
    drop(app, loads__csv=as_csv(np.ones((58, 256)) + np.arange(256)))
    assert app.session_state["model"] is None
    assert offered(app)[0] == "DeepSeek-R1, DeepSeek-V3" and len(offered(app)) > 1
    press(app, app.button(key="fitting-DeepSeek-R1").label)
    assert app.session_state["model"] == model_presets()["DeepSeek-R1"].model
    assert state.stored.Session.model_validate({"configs": app.session_state["configs"]}).configs == {
        app.session_state["model"].digest: "deepseek-ai/DeepSeek-R1"
    }


def test_what_fits_no_model_is_said(app: AppTest) -> None:
    drop(app, loads__csv=as_csv(np.arange(1, 22).reshape(3, 7)))
    assert not offered(app) and app.session_state["model"] is None
    assert any("No model of the catalogue has 3 layers × 7 experts" in info.value for info in app.info)


def table(app: AppTest) -> list[dict]:
    return next((frame.value.to_dict("records") for frame in app.dataframe if "Remove" in frame.value), [])


def test_several_recordings_are_a_table(app: AppTest) -> None:
    drop(app, code__npz=ALPHA.read_bytes())
    assert not table(app), "one needs no table"
    drop(app, code__npz=ALPHA.read_bytes(), loads__csv=as_csv(np.arange(1, 22).reshape(3, 7)))
    first, second = table(app)
    trace = formats.read_workload(ALPHA)
    assert (first["Open"], first["Kind"], first["Phase"]) == ("code", "routing log", "—")
    assert first["Tokens"] == f"{trace.tokens:,}" and first["Layers × experts"] == "8 × 16"
    assert (second["Open"], second["Kind"], second["Tokens"]) == ("loads (open)", "expert loads", "—")
    assert second["Worst skew"] == "1.75×"  # 7 / 4


@pytest.mark.parametrize(
    ("phase", "said"), [([0, 0], "prefill"), ([1, 1], "decode"), ([0, 1], "50 % decode"), (None, "—")]
)
def test_the_phase_where_it_is_known(phase: list[int] | None, said: str) -> None:
    trace = RoutingTrace("t", np.zeros((2, 1, 1), np.int16), 1, phase=phase and np.array(phase, np.int8))
    assert workload._phase(trace) == said
    assert workload._phase(ExpertLoad("l", np.ones((1, 1)), None)) == "—"


@pytest.fixture
def two(own_data_folder: Path, empty_session: None) -> list[str]:
    """Digests of recordings of two models, the second of which is open."""
    for name in ("tiny-moe-alpha", "tiny-moe-beta"):
        model = model_presets()[name].model
        state.open_workload(RECIPE.draw(model))
        state.change(model=model)
        state.remember_model(state.session.workload, model)
    return list(state.session.workloads)


def click(key: str, row: int) -> None:
    st.session_state[key] = SimpleNamespace(row=row)


def test_a_click_opens_a_recording_with_its_model(two: list[str]) -> None:
    click(workload.OPEN, 0)
    workload._open_pressed(two)
    assert state.session.workload == two[0] and state.session.model.name == "tiny-moe-alpha"


def test_a_recording_is_removed(two: list[str]) -> None:
    state.update(others=[two[0]])
    click(workload.REMOVE, 1)
    workload._remove(two)
    assert list(state.session.workloads) == [two[0]] and state.session.workload == two[0]
    click(workload.REMOVE, 0)
    workload._remove([two[0]])
    assert not state.session.workloads and state.session.workload is None and not st.session_state.others
    assert "no longer in this session" in state.visit.take("notice")


def test_titles_are_short() -> None:
    assert model_catalogue._title(("a/X", "b/X")) == "X"
    assert model_catalogue._title(("X", "a/Y", "a/Z")) == "X, Y …"


def test_the_recordings_stand_there_though_a_view_lacks_something(app: AppTest) -> None:
    drop(app, a__npz=ALPHA.read_bytes(), b__npz=BETA.read_bytes())
    assert app.session_state["cluster"] is None
    choose(app, "workload-view", "Traffic")
    assert any("Open a cluster" in info.value for info in app.info)
    assert any(header.value == "Recordings of this session" for header in app.subheader)
