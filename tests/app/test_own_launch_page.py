"""A person's own model on the Launch page: what is asked and checked, what is kept of its texts, and the report of plans."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest

pytest.importorskip("transformers")

from app.launch import own
from engine import formats, store
from engine.costs import CostProfile, Line
from engine.jobs import runner, workers
from engine.jobs.kinds import read_answer
from engine.jobs.launches import ByKind, ByLayer, KeptPreference, LaunchAnswer, LaunchedPlan
from engine.jobs.protocol import Context
from engine.launch.rank.instructions import OwnModel
from engine.launch.results.own import Generated, OwnFacts, Pace
from engine.plan import Plan
from engine.runtime.checkpoint import SWITCH
from engine.timeline import KINDS, STREAMS, Timeline
from tests.cases.launched import request_of
from tests.cases.pages import (
    button,
    buttons,
    complaints,
    field,
    finished,
    metrics,
    press,
    put,
    run,
    said,
    studio,
    titles,
    visit,
)
from tests.cases.sessions import comes_from, launches, open_recording, wanted
from tests.cases.tiny_models import TEXTS, model_of, plan_of, recorded, saved
from tests.cases.two_nodes import cluster_of


@pytest.fixture
def app(models: Path, own_data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AppTest:
    """The Launch page with the model's recording, two GPUs, a plan by EPLB, which is open, and the linear one, which counts as
    deployed; own models are chosen."""
    monkeypatch.setenv(SWITCH, str(models))
    comes_from(None, monkeypatch)
    app, model = studio().run(), model_of("olmoe")
    app.plans = [plan_of(model, 2, "eplb", algorithm="eplb"), plan_of(model, 2)]
    open_recording(app, recorded(model), alone=True)
    app.session_state["model"] = formats.read_model(models / "tiny" / "config.json")
    app.session_state["cluster"] = cluster_of((1, None), (1, None))
    app.session_state["imported"] = {plan.id: store.save_document(plan) for plan in app.plans}
    app.session_state["plan"], app.session_state["in_use"] = app.plans[0].id, app.plans[1].id
    app.session_state["choices"] = {"launch-what": "own"}
    yield visit(app, "launch")
    for job in launches():
        runner.cancel(job, grace=0)
        assert runner.wait(job, 5).finished


def type_in(app: AppTest, *texts: str) -> AppTest:
    app.text_area(key="launch-typed").set_value("\n".join(texts))
    return run(app)


def fill(app: AppTest, **values: object) -> None:
    for label, value in values.items():
        field(app, label.replace("_", " ")).set_value(value)
    run(app)


def in_files(words: bytes) -> bool:
    """True if any file of the data folder has these bytes."""
    return any(words in path.read_bytes() for path in store.data_folder().rglob("*") if path.is_file())


def test_what_is_chosen_is_what_is_started_and_the_texts_are_in_no_file(app: AppTest, tmp_path: Path, monkeypatch) -> None:
    waiting = tmp_path / "python"
    waiting.write_text('#!/bin/sh\ncat > "$0.texts"\nexec sleep 600\n')
    waiting.chmod(0o700)
    monkeypatch.setattr(workers, "sys", SimpleNamespace(executable=str(waiting)))
    assert "Start" not in buttons(app) and "Tokens to replay" not in [box.label for box in app.number_input]
    type_in(app, *TEXTS)
    fill(app, New_tokens=3, Timed_passes=2)
    assert "3 texts, 11 tokens, dealt to the ranks in turn; 9 new ones in each pass." in said(app.caption)
    assert "OlmoeForCausalLM" in said(app.markdown) and "relative tolerance" in said(app.markdown)
    assert app.multiselect[0].value == [app.plans[1].id], "the deployed plan is compared with"
    press(app, "Start")
    (job,) = launches()
    asked = job.request.arguments
    assert [Plan.from_dict(plan, "plan").id for plan in asked["plans"]] == [plan.id for plan in app.plans]
    assert asked["own"] == {"folder": field(app, "Model").value, "prompts": [], "new_tokens": 3, "compared": True}
    assert (asked["ranks"], asked["repeats"], asked["tokens"], asked["model"]["d_model"]) == (2, 2, None, 32)
    assert not in_files(b"41, 42") and not in_files(b"41,42") and not in_files(b"w41")
    handed = waiting.with_name("python.texts")
    assert json.loads(handed.read_text()) == [[5, 17, 3], [8], [41, 42, 43, 44, 45, 46, 47]]


def test_what_does_not_go_together_is_one_line(app: AppTest, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(app, *TEXTS)
    fill(app, New_tokens=129)
    assert "129 new tokens of each text do not fit into the model's 128 positions" in complaints(app)[0]
    fill(app, New_tokens=2)
    assert not complaints(app) and not button(app, "Start").disabled
    other = models.parent / f"{models.name} other"
    saved(other, "olmoe", num_experts=4)
    monkeypatch.setenv(SWITCH, str(other))
    type_in(run(app), *TEXTS)
    assert "places 8 experts a layer, OlmoeForCausalLM has 4 in layer 0" in complaints(app)[0] and "Start" not in buttons(app)


def ended(app: AppTest, decided: bool = True, **facts: object) -> AppTest:
    """The report of a launch that has ended, with made-up times: the second plan takes a tenth longer than the first.

    decided: True if that is more than noise; facts: other fields of its own model, and `same_tokens` of the second plan
    """
    same = facts.pop("same_tokens", True)
    timeline = Timeline(EVENTS, ("rank 0", "rank 1"), "measured", "CPU", labels=("prefill",) * 4 + ("token 2",) * 4)
    runs = []
    for number, plan in enumerate(app.plans):
        pace = Pace(prefill_seconds=0.2, token_seconds=0.1 * (1 + number / 10), tokens_per_second=30.0 / (1 + number / 10))
        generated = Generated(measured=pace, predicted=pace, passes=(pace,), same_tokens=same if number else True)
        each = (1.0, 2.0)
        runs.append(
            LaunchedPlan(
                plan=plan.id,
                name=plan.name,
                predicted=replace(timeline, source="simulated").to_dict(),
                measured=timeline.to_dict(),
                by_kind=ByKind(kind=("attention", "ffn"), predicted=each, measured=each, ratio=(1.0, 1.0)),
                by_layer=ByLayer(layer=(-1, 0), predicted=each, measured=each, ratio=(1.0, 1.0)),
                predicted_seconds=3.0,
                measured_seconds=3.0 + number / 10,
                waiting_seconds=0.1,
                pass_seconds=(3.0 + number / 10,) * 3,
                difference=None if facts.get("not_compared") else 2e-7,
                generated=generated,
            )
        )
    about = {"random_weights": False, "prompts": 3, "prompt_tokens": 11, "new_tokens": 2, "padded": 0, "not_compared": ""}
    about |= {"predicted_from": "made up.", "predicted_memory": (1e6,), "measured_memory": (2e6,), "folder": "tiny"} | facts
    answer = LaunchAnswer(
        runs=tuple(runs),
        preference=KeptPreference(order=(0, 1), pairs=(), decided=decided, ranked_alike=True, lines=("one is", "as predicted")),
        device="CPU",
        tokens=17,
        profile=CostProfile(name="made up", origin="a test", gemm={"CPU": Line(alpha=0, beta=1)}),
        own=OwnFacts(**about),
    )
    texts = OwnModel(folder="tiny", prompts=((1,),), new_tokens=2)
    job = request_of(replace(wanted(app), own=texts), store.data_folder())
    Context(job.folder).finish(answer)
    return visit(put(app, launch_jobs=[job.id]), "launch")


EVENTS = pd.DataFrame(
    {
        "resource": [0, 1] * 4,
        "stream": ["compute"] * 8,
        "start": np.repeat([0.0, 0.1, 0.2, 0.3], 2),
        "end": np.repeat([0.1, 0.2, 0.3, 0.4], 2),
        "kind": ["ffn", "ffn", "attention", "attention"] * 2,
        "layer": [0, 0, -1, -1] * 2,
        "model": 0,
        "peer": -1,
        "bytes": 0.0,
    }
).astype({"stream": pd.CategoricalDtype(list(STREAMS)), "kind": pd.CategoricalDtype(list(KINDS))})


def test_the_report_has_the_pace_of_plans_and_says_whose_tokens_they_are(app: AppTest) -> None:
    ended(app)
    first, second = (plan.name for plan in app.plans)
    assert titles(app, "totals") == [f"{first} generates 30 tokens/s, 1.1× {second}'s 27.3"]
    (paces,) = (table.value for table in app.dataframe if "Tokens/s" in table.value)
    assert paces["Plan"].tolist() == [first, second] and paces["ms to first token"].tolist() == ["200", "200"]
    assert paces["ms a token"].tolist() == ["100", "110"]
    assert "to 2e-07 of the largest, and all 6 new tokens are the same" in said(app.markdown)
    assert "3 texts, 11 tokens, 2 new tokens of each. Weights on the fullest rank 2 MB, predicted 1 MB." in said(app.caption)
    assert metrics(app)["Logits differ by"] == "2e-07" and button(app, "Relaunch").disabled
    # The last norm and the head are drawn behind the last MoE layer, and a pass at a time.
    (chart,) = (chart for chart in app.get("plotly_chart") if "-gantt-" in chart.proto.id)
    assert "Attention, dense compute" in chart.proto.spec and "beyond that at home" not in chart.proto.spec
    next(slider for slider in app.select_slider if slider.label == "Pass").set_value("Token 2")
    run(app)
    (chart,) = (chart for chart in app.get("plotly_chart") if "-gantt-" in chart.proto.id)
    assert "token 2" in chart.proto.id


def test_the_report_names_what_is_not_to_be_trusted(app: AppTest) -> None:
    ended(app, decided=False, random_weights=True, padded=4, same_tokens=False)
    assert titles(app, "totals")[0].endswith("27.3: noise is not ruled out")
    assert "The folder has no weights: random ones were run" in said(app.warning)
    assert f"Tokens under {app.plans[1].name} are others" in said(app.warning) and "4 computed as padding" in said(app.caption)


def test_a_model_that_was_too_large_to_compare_with_says_so(app: AppTest) -> None:
    ended(app, not_compared="it does not fit into the memory of one rank", same_tokens=None)
    assert "Not compared with the unplanned model: it does not fit into the memory of one rank." in said(app.info)
    assert metrics(app)["Logits differ by"] == "—" and "are the same" not in said(app.markdown)


@pytest.mark.everything
@pytest.mark.usefixtures("warm_python")
def test_the_whole_launch_and_its_report(app: AppTest) -> None:
    type_in(app, *TEXTS)
    fill(app, New_tokens=3, Timed_passes=1)
    press(app, "Start")
    job = finished("launch")
    run(app)
    answer = read_answer(job)
    names = [plan.name for plan in app.plans]
    assert titles(app, "totals")[0] == own.finding(answer, names)
    assert "Logits are those of the unplanned model to" in said(app.markdown) and "all 9 new tokens are the same" in said(
        app.markdown
    )
    (paces,) = (table.value for table in app.dataframe if "Tokens/s" in table.value)
    assert paces["Plan"].tolist() == names
    assert "3 texts, 11 tokens" in said(app.caption) and "random ones" not in said(app.warning)
    assert button(app, "Relaunch").disabled
    assert not in_files(b"41,42") and not in_files(b"41, 42")
    slider = next(slider for slider in app.select_slider if slider.label == "Pass")
    assert slider.options == ["Prefill", "Token 2", "Token 3"]
