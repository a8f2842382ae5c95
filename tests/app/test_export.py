"""Plans out of the studio: every engine's file, refusals with their reasons, and the price of the even projection."""

import io
import json
from types import SimpleNamespace

import pytest
import torch
import yaml
from streamlit.testing.v1 import AppTest

from app import export
from app.export import PERFETTO, TAKERS, exported, file_name, without_flags
from engine import store
from engine.compare.redundancy import project_evenly
from engine.formats.placements import TARGETS
from engine.formats.placements.training_step import STEP_TARGETS
from engine.jobs.runner import State
from engine.plan import Plan
from tests.cases.launched import finish, request_of
from tests.cases.pages import chooser, run, said, visit
from tests.cases.sessions import problem_of, wanted

EXPERTS, GPUS = 16, 8


@pytest.fixture
def app(ana: AppTest) -> AppTest:
    return ana.run()


def opened(app: AppTest) -> AppTest:
    """The Launch page with the export open."""
    app.session_state["launch-export"] = True
    return visit(app, "launch")


def take(app: AppTest, title: str) -> AppTest:
    chooser(app, "Engine").set_value(next(taker for taker in TAKERS if taker.title == title))
    return run(app)


def lines(app: AppTest) -> list[str]:
    """The text of the last code block."""
    return app.code[-1].value.splitlines()


def button(app: AppTest):
    return next(button for button in app.get("download_button") if button.proto.label.startswith("Download "))


def test_every_target_is_offered_without_flags_of_the_command_line() -> None:
    assert {taker.target for taker in TAKERS} == {*TARGETS, *STEP_TARGETS, PERFETTO}
    assert len({taker.title for taker in TAKERS}) == len(TAKERS)
    assert without_flags("needs a copy (--mtp); export it (--even), please") == "needs a copy; export it, please"


def test_each_engine_has_its_lines_and_notes(app: AppTest) -> None:
    visit(app, "launch")
    assert all(box.label != "Engine" for box in app.selectbox), "nothing is written before it is asked for"
    opened(app)
    for title, line, note in (
        ("SGLang, JSON", "--ep-num-redundant-experts 0", "enable"),
        ("SGLang, .pt", ".pt", "enable"),
        ("vLLM", "--enable-eplb", "41141"),
        ("vLLM-Ascend", "--additional-config", "first model runner"),
        ("Megatron-Core, DeepSpeed", "--expert-model-parallel-size 8", "checkpoint"),
        ("TensorRT-LLM", "enable_attention_dp: true", "architecture"),
    ):
        take(app, title)
        assert any(line in typed for typed in lines(app)), lines(app)
        text = said(app.markdown)
        assert note in text and "Not carried: the order of its sends" in text and "(--" not in text
        assert button(app).proto.label.endswith(next(taker.suffix for taker in TAKERS if taker.title == title))
        ticks = [box for box in app.checkbox if "MTP" in box.label]
        assert len(ticks) == (title == "TensorRT-LLM") and not app.error
    assert "add a copy" in text
    ticks[0].check().run()
    assert "MTP layer's, a copy of layer" in said(app.markdown)


def test_the_files_hold_the_plan(app: AppTest) -> None:
    """The files read by bare libraries, as engines do."""
    plan, model = app.plans[1], app.session_state["model"]
    wanted = [[expert for held in row for expert in held] for row in plan.placement.experts_of_gpu]

    def content(title: str, mtp: bool = False) -> bytes:
        taker = next(taker for taker in TAKERS if taker.title == title)
        ((name, content),) = exported(plan, model, None, taker, mtp).files.items()
        assert name == file_name(plan, taker) and name.endswith(taker.suffix)
        return content

    assert json.loads(content("SGLang, JSON"))["physical_to_logical_map"] == wanted
    tensors = torch.load(io.BytesIO(content("SGLang, .pt")), weights_only=True, map_location="cpu")
    assert tensors["physical_to_logical_map"].tolist() == wanted
    layers = list(model.moe_layers)
    assignments = yaml.safe_load(content("TensorRT-LLM"))["initial_global_assignments"]
    assert [assignments[layer] for layer in layers] == wanted
    with_mtp = yaml.safe_load(content("TensorRT-LLM", mtp=True))["initial_global_assignments"]
    assert set(with_mtp) == {*layers, model.layers}


def test_the_price_of_a_projection_is_that_of_the_step_where_a_serving_step_is_the_goal(app: AppTest, monkeypatch) -> None:
    problem = problem_of(app)
    projected = project_evenly(app.plans[0], problem)
    seconds = {(projected.given.id, "step"): 2.0, (projected.plan.id, "step"): 1.0}
    timed = {"open_serving": lambda problem: "step", "seconds_for": lambda plan, problem, serving: seconds[plan.id, serving]}
    monkeypatch.setattr(export, "cached", SimpleNamespace(**timed))
    shown = []
    monkeypatch.setattr(export.st, "metric", lambda *figure, **more: shown.append(figure))
    export._price(projected, problem)
    assert shown[0] == ("Time per step, simulated", "1 s", "2 s before (−50.0 %)")


def test_an_uneven_plan_is_refused_with_the_reason_and_its_even_projection_priced_where_there_is_one(app: AppTest) -> None:
    codes = len(visit(app, "launch").code)
    placement = app.plans[0].placement
    first, *others = placement.experts_of_gpu
    changed = placement.model_copy(update={"experts_of_gpu": ((*first[:-1], (*first[-1], 0)), *others)})
    parts = {"name": "lop-sided", "placement": changed, "claim": None}
    plan = Plan.model_validate({name: getattr(app.plans[0], name) for name in Plan.model_fields} | parts)
    app.session_state["imported"] = {plan.id: store.save_document(plan)}
    app.session_state["plan"] = plan.id
    take(opened(app), "SGLang, JSON")
    refusal = app.error[-1].value.replace("\\", "")
    assert "SGLang needs as many slots on every GPU" in refusal and "3 on GPU 7" in refusal and "--even" not in refusal
    assert all(not toggle.value for toggle in app.toggle)
    next(toggle for toggle in app.toggle if toggle.label == "Project it to an even plan").set_value(True).run()
    assert not app.exception, app.exception
    figures = {metric.label: metric for metric in app.metric}
    assert figures["Time per pass, simulated"].delta.endswith("%)") and "before" in figures["Balancedness"].delta
    assert figures["Slots on every GPU"].value == "3"
    assert f"--ep-num-redundant-experts {3 * GPUS - EXPERTS}" in lines(app)
    assert "even" in button(app).proto.label
    take(app, "Megatron-Core, DeepSpeed")
    assert "has no replicas" in app.error[-1].value and all("even" not in toggle.label for toggle in app.toggle)
    take(app, "Table (CSV)")
    assert not app.error and len(app.code) == codes, "a table has no line to add"


def test_perfetto_has_the_measurement_as_a_second_group_once_there_is_one(app: AppTest, monkeypatch) -> None:
    take(opened(app), "Perfetto")
    assert "Once a launch of this plan has been measured" in said(app.caption)
    assert finish(request_of(wanted(app), store.data_folder()), 2.0, monkeypatch).state is State.DONE
    app.run()
    runs = chooser(app, "Measurement as a second group").options
    assert "this machine, 2 ranks" in runs[0] and runs[-1].startswith("none")
