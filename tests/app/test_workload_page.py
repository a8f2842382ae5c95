"""The Workload page: files dropped on it, faults of a recording with their remedies, and its balance, alike on every page."""

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from app import model_catalogue, state, workload
from app.charts import optimise as charts
from engine import formats, store
from engine.catalogue import model_presets
from engine.compare.synthetic import Recipe
from engine.recording import GUIDES
from engine.store import team
from engine.store.database import database
from engine.units import ratio
from engine.workload import DECODE, PREFILL, Finding, Origin, RoutingTrace
from tests.cases.cli import ROOT, SAMPLES
from tests.cases.pages import answers, buttons, complaints, metrics, open_sample, pick, press, put, run, said, upload, visit
from tests.cases.reviews import save
from tests.cases.samples import sample
from tests.cases.sessions import open_recording, problem_of
from tests.costs.silicon import needs_tables

NCCL_LOG = ROOT.parent / "shared" / "data" / "measurements" / "xxrjun_N1_G8.log"
PHRASE = "token,layer,expert\n0,0,1\n0,1,0\n"


def drop(app: AppTest, **files: bytes) -> AppTest:
    """Files by name, with `__` for the dot."""
    return upload(app, "recordings", {name.replace("__", "."): content for name, content in files.items()})


def add(app: AppTest, **files: bytes) -> None:
    """Add files to those in the zone."""
    zone = app.file_uploader(key="recordings")
    zone._files = zone._get_files_to_register()  # `upload` takes only those away that it brought itself
    for name, content in files.items():
        zone.upload(name.replace("__", "."), content)
    app.run()
    assert not app.exception, app.exception


def is_unfolded(app: AppTest) -> bool:
    """True if the form with the drop zone is open."""
    return next(part for part in app.expander if "recording" in part.label).proto.expanded


def sglang_plan(layers: int, experts: int) -> bytes:
    return json.dumps({"physical_to_logical_map": [list(range(experts))[::-1]] * layers}).encode()


def test_everything_at_once_in_any_order(app: AppTest) -> None:
    drop(
        app,
        deployed__json=sglang_plan(8, 16),
        cluster__json=(SAMPLES / "mixed-8.json").read_bytes(),
        model__json=(SAMPLES / "tiny-moe-alpha.json").read_bytes(),
        trace__npz=(SAMPLES / "tiny-moe" / "alpha-code.npz").read_bytes(),
        nonsense__bin=b"\0\1",
    )
    assert answers(app) == [
        "deployed.json counts as deployed now: SGLang expert locations",
        "opened the cluster mixed-8",
        "opened the model tiny-moe-alpha",
        "opened trace",
    ]
    assert complaints(app) == ["nonsense.bin: is a binary file that Switchyard cannot read; docs/formats.md lists what is read"]
    deployed = app.session_state["in_use"]
    assert list(app.session_state["imported"]) == [deployed]
    visit(app, "optimise")
    assert any("deployed" in option for box in app.selectbox if box.label == "Deployed now" for option in box.options)


def test_a_plan_needs_its_model_and_cluster(app: AppTest) -> None:
    drop(app, deployed__json=sglang_plan(8, 16))
    (complaint,) = complaints(app)
    assert complaint == "deployed.json: is a plan of a serving engine, not a recording: open its model and cluster first"
    open_sample(app)  # the file is still in the zone
    assert not complaints(app) and answers(app) == ["deployed.json counts as deployed now: SGLang expert locations"]


def test_a_plan_of_another_model_or_that_breaks_a_rule_is_not_taken(two_plans: AppTest) -> None:
    app = visit(two_plans, "workload")
    drop(app, deployed__json=sglang_plan(7, 16))
    assert "deployed.json" in complaints(app)[0] and app.session_state["in_use"] is None
    broken = app.plans[1].model_dump(mode="json")
    broken["send_order"]["dispatch"][0]["bytes"][0] *= 2
    drop(app, broken__json=json.dumps(broken).encode())
    (complaint,) = complaints(app)
    assert complaint.startswith("broken.json: cannot count as deployed: ")
    assert app.session_state["in_use"] is None and not app.session_state["imported"]


def test_an_archive_is_the_files_in_it(app: AppTest) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.write(SAMPLES / "tiny-moe" / "alpha-man.npz", "run/alpha-man.npz")
        archive.writestr("run/broken.csv", "token,layer,expert\n0,0,-9\n")
        archive.writestr("run/notes.md", "what a fine day")
    drop(app, run__zip=packed.getvalue())
    assert list(app.session_state["workloads"].values()) == ["alpha-man"]
    assert len(complaints(app)) == 1 and complaints(app)[0].startswith("opened alpha-man; run.zip: broken.csv")


def test_what_is_in_the_zone_is_opened_once(app: AppTest) -> None:
    first, second = PHRASE.encode(), (PHRASE + "1,0,1\n1,1,1\n").encode()
    drop(app, first__csv=first)
    drop(app, first__csv=first, second__csv=second)
    names = app.session_state["workloads"]
    assert list(names.values()) == ["first", "second"] and names[app.session_state["workload"]] == "second"


def test_a_new_upload_clears_what_was_said_of_those_before_it(app: AppTest) -> None:
    def refused() -> list[str]:
        return [text.split(":")[0] for text in complaints(app) if ".bin: " in text]

    add(app, wrong__bin=b"\0\1")
    assert refused() == ["wrong.bin"] and is_unfolded(app)
    add(app, good__csv=PHRASE.encode())
    assert not refused() and answers(app) == ["opened good"] and not is_unfolded(app)
    add(app, second__csv=(PHRASE + "1,0,1\n1,1,1\n").encode(), other__bin=b"\0\2")
    assert answers(app) == ["opened second"] and refused() == ["other.bin"]
    assert not is_unfolded(app), "something was opened, so that there is something to see"
    add(app, third__bin=b"\0\3")
    assert not answers(app) and refused() == ["third.bin"] and is_unfolded(app)
    add(app, model__json=(SAMPLES / "tiny-moe-alpha.json").read_bytes())
    assert not refused(), "read again for another model, but of an earlier upload and refused as it was"


def test_of_a_traffic_matrix_it_is_said_what_of_the_model_counts(sample: AppTest) -> None:
    counts = "Of tiny-moe-alpha only the sizes of a token and of an expert count"
    assert counts not in said(visit(sample, "workload").caption)
    press(sample, "Traffic 8 × 8")
    assert counts in said(sample.caption)


def test_measured_times_go_to_the_costs(app: AppTest) -> None:
    drop(open_sample(app), times__csv=b"operation,ranks,bytes,seconds\nall_to_all,8,1000,1e-5\nall_to_all,8,2000,2e-5\n")
    assert answers(app) == ["read times: choose it for computation or for the network on the Cluster page"]
    assert list(app.session_state["sources"]) == ["times"]


def test_how_to_record_and_the_size_of_a_recording_of_the_open_model(app: AppTest) -> None:
    press(app, "How to record")
    assert any(GUIDES[0].ways[0].start in block.value for block in app.code) and "Open a model" in said(app.caption)
    press(open_sample(app), "How to record")
    assert "1,000 passes × 8 layers × 16 experts × 4 bytes" in said(app.markdown)
    assert "**512 kB**" in said(app.markdown)


@pytest.mark.skipif(not NCCL_LOG.is_file(), reason="the shared recordings are not here")
def test_what_of_a_log_was_left_out_is_told(app: AppTest) -> None:
    drop(open_sample(app), xxrjun__log=NCCL_LOG.read_bytes())
    (text,) = answers(app)
    assert text.startswith("read xxrjun: choose it") and "all_gather" in text


ALPHA, BETA = (SAMPLES / "tiny-moe" / f"{name}-prose.npz" for name in ("alpha", "beta"))


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
    assert "fits only tiny-moe-alpha" in said(app.toast)
    assert not offered(app) and not table(app), "one recording needs no table"
    # Where the open model does not fit another is offered.
    drop(app, other__npz=BETA.read_bytes())
    assert app.session_state["model"].name == "tiny-moe-alpha", "the open model stays until a person says"
    assert offered(app) == ["tiny-moe-beta"]
    assert "8 layers × 16 experts, top-2 fits" in said(app.markdown)
    press(app, app.button(key="fitting-tiny-moe-beta").label)
    assert app.session_state["model"].name == "tiny-moe-beta" and not offered(app)


def test_of_several_the_last_that_tells_a_model_counts_and_the_recordings_stand_below(app: AppTest) -> None:
    traffic = (SAMPLES / "traffic-8.csv").read_bytes()
    drop(app, a__npz=ALPHA.read_bytes(), b__npz=BETA.read_bytes(), traffic__csv=traffic)
    assert app.session_state["workloads"][app.session_state["workload"]] == "traffic"
    assert app.session_state["model"].name == "tiny-moe-beta" and app.session_state["cluster"] is None
    pick(app, "workload-view", "Traffic")
    assert "Open a cluster" in said(app.info), "what a view lacks is said"
    assert "Recordings of this session" in said(app.subheader)


@needs_tables
def test_several_models_are_offered_and_none_is_opened(app: AppTest) -> None:
    drop(app, loads__csv=as_csv(np.ones((58, 256)) + np.arange(256)))
    assert app.session_state["model"] is None
    assert offered(app)[0] == "DeepSeek-R1, DeepSeek-V3" and len(offered(app)) > 1
    press(app, app.button(key="fitting-DeepSeek-R1").label)
    model = model_presets()["DeepSeek-R1"].model
    assert app.session_state["model"] == model
    assert dict(app.session_state["configs"]) == {model.digest: "deepseek-ai/DeepSeek-R1"}
    assert model_catalogue._title(("X", "a/Y", "a/Z")) == "X, Y …", "titles are short"


def table(app: AppTest) -> list[dict]:
    return next((frame.value.to_dict("records") for frame in app.dataframe if "Remove" in frame.value), [])


def test_a_recording_that_fits_no_model_and_several_in_a_table(app: AppTest) -> None:
    loads = as_csv(np.arange(1, 22).reshape(3, 7))
    drop(app, loads__csv=loads)
    assert not offered(app) and app.session_state["model"] is None
    assert "No model of the catalogue has 3 layers × 7 experts" in said(app.info)
    drop(app, code__npz=ALPHA.read_bytes(), loads__csv=loads)
    rows = {row["Open"].removesuffix(" (open)"): row for row in table(app)}
    first, second, trace = rows["code"], rows["loads"], formats.read_workload(ALPHA)
    shown = [first[column] for column in ("Kind", "Phase", "Tokens", "Layers × experts")]
    assert shown == ["routing log", "—", f"{trace.tokens:,}", "8 × 16"]
    assert [second[column] for column in ("Kind", "Phase", "Tokens", "Worst skew")] == ["expert loads", "—", "—", "1.75×"]
    assert [row["Open"].endswith(" (open)") for row in rows.values()].count(True) == 1


@pytest.mark.parametrize(("phase", "said"), [([0, 0], "prefill"), ([1, 1], "decode"), ([0, 1], "50 % decode"), (None, "—")])
def test_the_phase_where_it_is_known(phase: list[int] | None, said: str) -> None:
    trace = RoutingTrace("t", np.zeros((2, 1, 1), np.int16), 1, phase=phase and np.array(phase, np.int8))
    assert workload._phase(trace) == said
    named = replace(trace, name="decode_in2000", phase=None)
    assert workload._phase(named) == "decode", "as plans are judged"


def test_a_click_opens_a_recording_with_its_model_and_another_removes_one(own_data_folder: Path, empty_session: None) -> None:
    for name in ("tiny-moe-alpha", "tiny-moe-beta"):
        model = model_presets()[name].model
        state.open_workload(Recipe(tokens=64, skew=0.6, affinity=0.3).draw(model))
        state.change(model=model)
        state.remember_model(state.session.workload, model)
    first = next(iter(state.session.workloads))

    def click(key: str, row: int, act: Callable[[list[str]], None]) -> None:
        st.session_state[key] = SimpleNamespace(row=row)
        act(list(state.session.workloads))

    click(workload.OPEN, 0, workload._open_pressed)
    assert state.session.workload == first and state.session.model.name == "tiny-moe-alpha"
    state.update(others=[first])
    click(workload.REMOVE, 1, workload._remove)
    assert list(state.session.workloads) == [first] and state.session.workload == first
    click(workload.REMOVE, 0, workload._remove)
    assert not state.session.workloads and state.session.workload is None and not st.session_state.others
    assert "no longer in this session" in state.visit.take("notice")


@pytest.fixture
def page(sample: AppTest) -> AppTest:
    """The sample on the Workload page."""
    return visit(sample, "workload")


def opened(page: AppTest, trace: RoutingTrace) -> AppTest:
    open_recording(page, trace)
    return run(page)


def recording(page: AppTest) -> RoutingTrace:
    return store.load_workload(page.session_state["workload"])


def remedies(page: AppTest) -> list[str]:
    return [button.key for button in page.button if (button.key or "").startswith("remedy-")]


def test_profile_rows_are_cut_by_a_button_and_a_clean_recording_is_saved_as_a_file(page: AppTest) -> None:
    assert not remedies(page) and "Write the file" in buttons(page)
    next(box for box in page.selectbox if box.key == "save-recording-as").set_value("sglang-statistics")
    press(page, "Write the file")
    assert "Left out" in said(page.caption) and not page.error
    same = np.repeat(sample("alpha-code").experts[:1], 8448, axis=0)
    opened(page, RoutingTrace("warm", np.concatenate([same, sample("alpha-code").experts]), 16))
    button = next(button for button in page.button if button.key == "remedy-cut-profile-rows")
    assert button.label.startswith("Cut the first 8,4")
    press(page, button.label)
    assert abs(recording(page).tokens - sample("alpha-code").tokens) <= 1
    assert "warm" in page.session_state["workloads"].values(), "the recording as it was stays"
    assert button.label not in buttons(page)
    assert any("skew" in message.value and "Cut 8,4" in message.value for message in page.success)


def test_a_remedy_that_is_not_known_here_has_no_button(page: AppTest) -> None:
    trace = sample("alpha-code")
    finding = Finding(severity="warning", code="of-tomorrow", message="Tomorrow's fault.", remedy="mend-of-tomorrow")
    opened(page, RoutingTrace("newer", trace.experts, trace.num_experts, origin=Origin(format="npz", findings=(finding,))))
    assert "Tomorrow" in said(page.warning)
    assert not remedies(page)


def test_one_phase_is_kept_by_a_button(page: AppTest) -> None:
    trace = sample("alpha-code")
    phase = np.where(trace.experts[:, 0, 0] < 8, DECODE, PREFILL).astype(np.int8)
    opened(page, RoutingTrace("mixed", trace.experts, trace.num_experts, phase=phase))
    press(page, "Keep the decode")
    assert recording(page).tokens == int((phase == DECODE).sum())


@pytest.fixture
def compared(two_plans: AppTest) -> AppTest:
    """A linear plan, which is open, and one that sends shortest first on the same placement."""
    team.add_workspace(database(), "Autumn", "Ana")
    return visit(two_plans, "timeline")


def percentiles(values: np.ndarray) -> str:
    """`p50 1.2×, …, worst 2×`."""
    return ", ".join(
        [*(f"p{at} {ratio(np.percentile(values, at))}" for at in (50, 75, 90, 95)), f"worst {ratio(values.max())}"]
    )


def overload(compared: AppTest):
    return next(metric for metric in compared.metric if metric.label == "Overload factor")


def test_on_every_page_of_a_plan(compared: AppTest) -> None:
    load = np.einsum("le,leg->lg", problem_of(compared).workload.load, compared.plans[0].placement.share)
    of_layer = load.max(axis=1) / load.mean(axis=1)
    mean, over = ratio(of_layer.mean()), percentiles(of_layer)

    shown = overload(compared)
    assert shown.value == mean and over in shown.help
    assert f"imbalance ratio {of_layer.mean() - 1:.3g} (TensorRT-LLM)" in shown.help
    even = load.mean(axis=1).sum() / load.max(axis=1).sum()
    assert (
        f"balancedness {(1 / of_layer).mean():.3g} (EPLB), {(1 / of_layer).mean():.3g} (SGLang), {even:.3g} (vLLM)"
        in shown.help
    )

    visit(compared, "optimise")
    table = compared.dataframe[0].value
    assert set(table["Overload factor"]) == {f"{mean} · p95 {ratio(np.percentile(of_layer, 95))}"}
    assert f"Overload factor: {mean} on average over layers; {over}" in said(compared.markdown)

    visit(compared, "launch")
    assert not compared.exception and f"Linear placement: {mean} on average over layers; {over}" in said(compared.caption)

    visit(compared, "review")
    save(compared, "ours")
    put(compared, choices={**compared.session_state["choices"], "review-charts": True})
    assert overload(compared).value == mean and over in overload(compared).help
    press(compared, "Compare")
    rows = compared.dataframe[0].value.set_index("")
    assert rows.loc["Overload factor"].tolist() == [mean, mean, "1×"]
    over_layers = rows.loc["Overload p50 · p75 · p90 · p95"].tolist()
    assert over_layers[0] == over_layers[1] and over_layers[2] == "1 · 1 · 1 · 1×"
    assert over_layers[0].split(" · ")[0] + "×" == ratio(np.percentile(of_layer, 50))


def test_a_recordings_skew_over_layers(compared: AppTest) -> None:
    load = problem_of(compared).workload.load
    skew = load.max(axis=1) / load.mean(axis=1)
    visit(compared, "workload")
    shown = {metric.label: metric for metric in compared.metric}
    assert shown["Worst skew"].value == ratio(skew.max()) and percentiles(skew) in shown["Worst skew"].help
    low, high = np.percentile(skew, [50, 95])
    assert shown["Skew, p50 – p95"].value == f"{ratio(low)} – {ratio(high)}"


def test_imbalance_workloads_are_previewed_and_opened(compared: AppTest) -> None:
    visit(compared, "what_if")
    compared.segmented_control(key="what-if-study").set_value("synthetic")
    compared.run()
    recipe = compared.selectbox(key="synthetic-recipe")
    assert recipe.options[0] == "Power law and affinity" and recipe.options[7] == "W6 rotating hotspot"
    recipe.set_value("w0").run()
    assert metrics(compared)["Worst skew"] == "1×" and "Skew of a step" not in metrics(compared)
    assert not any(slider.label in ("Skew", "Affinity") for slider in compared.slider)
    compared.selectbox(key="synthetic-recipe").set_value("w6").run()
    assert float(metrics(compared)["Skew of a step"].split("×")[0]) > 3
    assert float(metrics(compared)["Worst skew"].removesuffix("×")) < 1.2
    assert "Isolates a plan that has grown stale" in said(compared.caption)
    compared.number_input(key="synthetic-steps").set_value(6).run()
    press(compared, "Open it")
    assert not compared.exception and not compared.error
    name = "synthetic W6_rotating_hotspot, 16,384 tokens in 6 steps"
    assert compared.session_state["workloads"][compared.session_state["workload"]] == name


def test_tips_of_a_front_and_of_plans_on_other_recordings():
    """With the percentiles of balancedness where they are known: not of results that an older version kept."""
    figures = {"mean": 1.5, "p50": 1.4, "p75": 1.6, "p90": 1.8, "p95": 1.9, "max": 2.0}
    added = "<br>overload factor 1.5×; p50 1.4×, p75 1.6×, p90 1.8×, p95 1.9×, worst 2×"
    point = {"kept_share": 0.4, "balancedness": 0.6, "weight": 0.5, "seconds": 1e-3}
    new, old = (charts.front([point | {"overload": known}], {}).data[0].text[0] for known in (figures, None))
    assert new == old + added
    table, overload = [[0.7, 0.6], [None, None]], [[figures, figures], [None, None]]
    tips = charts.matrix(["a", "b"], table, "balancedness", overload=overload).data[0].text
    assert tips[0][1] == f"made from a<br>scored on b: 0.6{added}"
    assert tips[1][0] == "made from b<br>scored on a: …"
    assert "overload" not in str(charts.matrix(["a", "b"], table, "balancedness").data[0].text)
    assert "overload" not in str(charts.matrix(["a", "b"], table, "seconds", overload=overload).data[0].text)
