"""A person's own model on the pages: recorded on the Workload page, with nothing of its texts kept."""

import json
import shutil
import time
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

pytest.importorskip("transformers")

from app import own_model
from app.launch import watch
from engine import store
from engine.jobs import runner
from engine.jobs.runner import State
from engine.runtime.checkpoint import SWITCH
from engine.workload import DECODE, PREFILL
from tests.cases.jobs import until
from tests.cases.pages import button, buttons, complaints, enter, finished, press, put, run, said, studio, upload, visit
from tests.cases.samples import EIGHT
from tests.cases.tiny_models import TEXTS


@pytest.fixture
def form(app: AppTest, models: Path, monkeypatch: pytest.MonkeyPatch) -> AppTest:
    """The form of a recording from that model."""
    monkeypatch.setenv(SWITCH, str(models))
    return press(app, "Record from your model")


def type_in(app: AppTest, *texts: str) -> AppTest:
    app.text_area(key="record-typed").set_value("\n".join(texts))
    return run(app)


@pytest.mark.usefixtures("warm_python")
def test_a_recording_is_made_and_opened_with_its_model_and_its_texts_are_kept_nowhere(form: AppTest) -> None:
    assert button(form, "Record").disabled
    enter(form, "New tokens", 3)
    enter(form, "Source ranks", 2)
    type_in(form, *TEXTS)
    assert "3 texts, 11 tokens: about **136 B** to record, 17 tokens × 2 layers × 2 experts × 2 bytes" in said(form.markdown)
    press(form, "Record")
    job = finished("record")
    run(form)
    recording = store.load_workload(form.session_state["workload"])
    assert recording.name == "olmoe, typed texts" and recording.tokens == 17
    assert set(recording.phase) == {PREFILL, DECODE} and set(recording.source_rank) == {0, 1}
    assert form.session_state["model"].name == "olmoe" and form.session_state["model"].experts == 8
    config = store.config_path(form.session_state["configs"][form.session_state["model"].digest])
    assert json.loads(config.read_text())["model_type"] == "olmoe"
    everything = [path.read_bytes() for path in store.data_folder().rglob("*") if path.is_file()]
    assert not any(b"w41 w42" in content or b"41,42,43" in content for content in everything)
    assert b"41, 42" not in json.dumps(job.request.arguments).encode() and "Record from your model" in buttons(form)
    # It is opened once: whoever takes it out of the session again does not find it there at the next look.
    put(form, workloads={}, workload=None)
    assert visit(form, "workload").session_state["workload"] is None


@pytest.mark.usefixtures("warm_python")
def test_a_recording_that_ends_while_the_studio_is_left_is_opened_at_the_next_visit(form: AppTest) -> None:
    type_in(form, *TEXTS)
    press(form, "Record")
    finished("record")
    later = visit(studio(session=form.session_state["token"]).run(), "workload")
    assert later.session_state["workload"] and later.session_state["model"].name == "olmoe"


@pytest.mark.clock
@pytest.mark.usefixtures("warm_python")
def test_a_stopped_recording_ends_within_two_seconds_and_keeps_the_texts_so_far(form: AppTest, models: Path) -> None:
    ask = {"folder": str(models / "tiny"), "name": "long", "batch": 1}
    handed = json.dumps([[1, 2, 3]] * 50_000).encode()
    job = runner.start("record", ask, store.data_folder(), handed=handed)
    until(lambda: any("of 50,000 texts" in report.message for report in job.history), 60)
    begin = time.monotonic()
    runner.cancel(job)
    assert runner.wait(job, 5) is State.CANCELLED and time.monotonic() - begin < 2
    put(form, study_jobs={"record": job.id})
    recording = store.load_workload(form.session_state["workload"])
    assert 0 < recording.tokens < 150_000 and "stopped before the last text" in said(form.warning)


def test_a_stopped_recording_has_the_time_to_keep_what_it_has(form: AppTest, models: Path) -> None:
    job = runner.start("record", {"folder": str(models / "tiny"), "name": "a"}, store.data_folder(), handed=b"[[1]]")
    assert watch.grace(job) > runner.GRACE
    runner.cancel(job, grace=0)
    assert runner.wait(job, 5).finished


def test_source_ranks_are_the_open_clusters_gpus_unless_said_otherwise(form: AppTest) -> None:
    assert next(box for box in form.number_input if box.label == "Source ranks").value is None
    put(form, cluster=EIGHT)
    assert next(box for box in form.number_input if box.label == "Source ranks").value == len(EIGHT.gpus)


def test_wrong_texts_are_one_line(form: AppTest) -> None:
    for name, content, line in (
        ("texts.jsonl", '{"messages": []}', "texts.jsonl, line 1: needs 'prompt' or 'text', has 'messages'; messages have to"),
        ("texts.jsonl", "[1, 96]", "Text 1 has token 96, and the model knows 96: the tokenizer is another model's."),
        ("texts.jsonl", "[" * 100_000, "texts.jsonl: the JSON is nested too deeply"),
        ("texts.txt", b"\xff", "texts.txt: is not UTF-8 text; save it as UTF-8."),
        ("texts.txt", " \n", "texts.txt: has no prompt; write one a line."),
    ):
        upload(form, "record-file", {name: content})
        (complaint,) = complaints(form)
        assert line in complaint and button(form, "Record").disabled, complaint
    upload(form, "record-file", {"texts.jsonl": json.dumps([5, 17])})
    assert not complaints(form) and not button(form, "Record").disabled
    enter(form, "New tokens", 129)
    assert "129 new tokens of each text do not fit into the model's 128 positions" in complaints(form)[0]


def test_a_recording_that_would_be_too_large_is_refused(form: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.recording.own_model.MAX_RECORDED_BYTES", 10)
    type_in(form, *TEXTS)
    assert "The recording would be larger than a file of 200 MB" in complaints(form)[0]


def test_a_folder_that_cannot_be_recorded_is_one_line(form: AppTest, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((models / "tiny" / "config.json").read_text())
    for place, changed, line in (
        ("quantised", {"quantization_config": {"bits": 4}}, "config.json: the weights are quantised (quantization_config)"),
        ("no tokenizer", {}, "tokenizer.json: there is no such file; without it texts have to be lists of token ids"),
        ("no experts", {"model_type": "llama", "num_experts": 0}, "config.json"),
    ):
        folder = models.parent / f"{models.name} {place}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | changed))
        monkeypatch.setenv(SWITCH, str(folder))
        type_in(run(form), *TEXTS)
        assert any(line in complaint for complaint in complaints(form)), complaints(form)
        assert button(form, "Record").disabled


def test_without_models_or_their_libraries_a_line_says_how(app: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    press(app, "Record from your model")
    assert f"Start the studio with `{SWITCH}=/models`" in said(app.info) and "Record" not in buttons(app)
    monkeypatch.setattr(own_model, "find_spec", lambda name: None)
    assert "Models that run here need transformers; run: python -m pip install" in said(run(app).info)
    press(app, "Close")
    assert "transformers" not in said(app.info)


@pytest.mark.usefixtures("warm_python")
def test_a_job_without_its_texts_or_with_a_strange_family_says_so_until_it_is_put_away(form: AppTest, models: Path) -> None:
    config = json.loads((models / "tiny" / "config.json").read_text())
    strange = models / "tiny" / "strange"  # in a listed folder, though not offered
    strange.mkdir(exist_ok=True)
    (strange / "config.json").write_text(json.dumps(config | {"model_type": "qwen4_moe"}))
    for handed, line in ((None, "the texts are kept nowhere"), (b"[[1,2]]", "the family 'qwen4_moe' has no adapter")):
        job = runner.start("record", {"folder": str(strange), "name": "a"}, store.data_folder(), handed=handed)
        assert runner.wait(job, 60) is State.FAILED
        put(form, study_jobs={"record": job.id})
        assert line in complaints(form)[-1]
        press(form, "Put away")
        assert not complaints(form)


@pytest.mark.usefixtures("warm_python")
def test_routing_of_random_weights_is_a_finding_that_stays_with_the_recording(form: AppTest, models: Path) -> None:
    bare = models / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(models / "tiny" / name, bare)
    enter(run(form), "Model", str(bare))
    assert "random ones are drawn" in said(form.caption)
    type_in(form, *TEXTS)
    assert "The folder has no weights: the routing is of random ones" in said(form.caption)
    press(form, "Record")
    finished("record")
    run(form)
    assert "the folder has no weights: the routing is of random ones" in said(form.warning)
    shutil.rmtree(bare)
