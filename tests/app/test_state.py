"""Stored sessions: old and damaged ones open with all that still fits, choices are found again, and tabs do not mix."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from app import state
from app.optimise import goal
from app.state import address
from app.state.stored import MOST_CHOICES, VERSION, Session, read, write
from app.tables import plain
from engine import store
from engine.catalogue import cluster_presets, model_presets
from engine.compare.evidence import Thresholds
from engine.training import usual_step
from engine.workload import RoutingTrace
from tests.cases.cli import ROOT
from tests.cases.pages import PAGES, enter, open_sample, run, studio, visit
from tests.cases.sessions import TOKEN, open_recording

OF_VERSION_1 = (ROOT / "tests" / "data" / "session_of_version_1.json").read_text()
"""A session as studios wrote it before sessions had versions, with a value in every field of that time."""
CHOICES = {"what-if-compute": 2.0, "what-if-noise": 15, "what-if-dtype": "fp8"}
"""The sliders of the What-if page, which had a field of their own."""
SERVING = {"sequences": 2, "context": 4096, "output": 1}
LATER = {
    "revision": 7,
    "choices": CHOICES | {"use-one-eplb": True, "lina-lengths": [1, 3], "what-if-price": None},
    "pairs": "d" * 64,
    "travel": {"unit": "node", "dispatch": "fp8", "combine": "bf16"},
    "serving": SERVING | {"phase": "decode", "overlap": "none", "kv_dtype": "fp8"},
    "servings": {"a" * 64: SERVING | {"phase": "prefill", "overlap": "two-batch", "kv_dtype": "bf16"}},
    "configs": {"a" * 64: "deepseek-ai/DeepSeek-V3", "b" * 64: "c" * 64},
    "imported": {"a" * 64: "b" * 64},
    "earlier_studies": ["20260101-000000-bbbbbbbb"],
    "plan_names": {"a" * 64: "the one for Monday"},
    "removed_plans": {"b" * 64: {"name": "Aurora", "job": "20260101-000002-aaaaaaaa"}},
    "thresholds": Thresholds(gain=0.1).model_dump(mode="json"),
}
"""Something in the fields that came later."""
FULL = json.dumps({name: value for name, value in json.loads(OF_VERSION_1).items() if name != "what_if"} | LATER)

DIGEST = "a" * 64
BROKEN = {
    "version": ["two", 0, None, [2]],
    "revision": [-1, "often", None, [2]],
    "workloads": [None, [DIGEST], {"../../etc": "x"}, {DIGEST: 3}],
    "workload": ["", "../../etc/passwd", 5, {}],
    "cluster": ["mixed-8", {}, {"name": "x", "nodes": []}, [1]],
    "pairs": ["../pairs", 1],
    "model": ["tiny", {"name": "tiny"}, 1],
    "model_of": [{DIGEST: None}, {DIGEST: {"name": "x"}}, []],
    "second": ["beta", 1],
    "others": [DIGEST, ["x"], [None]],
    "step": [True, {"batch": 0, "sequence_length": 1, "heads": 1, "dense_d_ff": 1}, {"colour": "red"}],
    "steps": [{DIGEST: {}}, [{}]],
    "travel": [{"unit": "pigeon"}, "node", [1]],
    "serving": [{"phase": "decode"}, True, {"phase": "rest", "sequences": 1, "context": 1}],
    "servings": [{DIGEST: {}}, [{}], {"plan": None}],
    "configs": [{DIGEST: "../../etc/passwd"}, {DIGEST: 1}, {"model": "a/b"}, {DIGEST: "a/../b"}],
    "graph": ["../graph", 1],
    "cost": [None, {}, {"source": "guess"}, {"source": "datasheet", "compute_efficiency": -1}, "datasheet"],
    "sources": [{"own": {"source": "measured", "measured": {}}}, {"own": None}, {"own": {"source": "datasheet"}}],
    "plan_jobs": ["job", [1], None],
    "study_jobs": [{"front": None}, ["front"]],
    "earlier_studies": [{}, "job", [["x"]]],
    "launch_jobs": [{}, [["x"]]],
    "taken": [{"plan": "job"}, {DIGEST: 1}],
    "saved": [{DIGEST: "three"}, {"plan": 3}, [DIGEST]],
    "plan": ["x" * 64, 0],
    "in_use": [[DIGEST], "none"],
    "imported": [{"plan": "b" * 64}, {DIGEST: "file.json"}, [DIGEST]],
    "plan_names": [{"plan": "x"}, {DIGEST: 3}, [DIGEST]],
    "removed_plans": [[DIGEST], {DIGEST: "Aurora"}, {"plan": {"name": "x", "job": ""}}],
    "thresholds": [{"gain": -1}, {"speed": 0.1}, [0.05], None],
    "choices": [{"what-if-compute": {}}, [1.0]],
    "person": [["Ada"], 7],
    "workspace": [{}, 1],
    "tour": ["off", True],
}
DEPENDS = {"model": "step", "model_of": "second"}
"""Fields that cannot be open without the field."""


def short(text: str | bytes) -> str:
    """The name of a test with a long text."""
    return ascii(text[:12])


def stored(**changes: object) -> str:
    return json.dumps(json.loads(FULL) | changes)


def opened(text: str | bytes) -> AppTest:
    """The studio at the address of a stored session."""
    store.save_session(TOKEN, "{}")
    file_of_session().write_bytes(text if isinstance(text, bytes) else text.encode())
    return run(studio(session=TOKEN))


def file_of_session() -> Path:
    return store.data_folder() / "sessions" / f"{TOKEN}.json"


def test_a_session_without_a_version_opens_in_full() -> None:
    session, left_out = read(OF_VERSION_1)
    assert left_out is None
    before = json.loads(OF_VERSION_1)
    del before["what_if"]
    assert set(before) == set(Session.model_fields) - {"version", *LATER}
    usual = Session().model_dump(mode="json", exclude_none=True, include=set(LATER))
    now = {"version": VERSION, "choices": CHOICES}
    assert session.model_dump(mode="json", exclude_none=True) == before | usual | now


def test_a_session_that_is_written_is_read_as_it_was() -> None:
    for session in (Session(), read(OF_VERSION_1)[0], read(FULL)[0]):
        assert read(write(session)) == (session, None)


def test_a_field_that_an_older_version_did_not_have_is_as_in_an_empty_session() -> None:
    for missing in set(Session.model_fields) - {"version"}:
        before = json.loads(FULL)
        del before[missing]
        session, left_out = read(json.dumps(before))
        assert getattr(session, missing) == getattr(Session(), missing)
        assert (left_out is not None) == (missing in DEPENDS), missing


@pytest.mark.parametrize("name", Session.model_fields)
def test_only_the_field_that_is_broken_is_left_out_and_named(name: str) -> None:
    lost, whole = {name, DEPENDS.get(name, name)}, read(FULL)[0]
    for value in BROKEN[name]:
        session, left_out = read(stored(**{name: value}))
        for field in Session.model_fields:
            assert getattr(session, field) == getattr(Session() if field in lost else whole, field), (value, field)
        for field in lost:
            assert Session.model_fields[field].title in left_out
        assert left_out.count(";") == len(lost) - 1 and "\n" not in left_out


@pytest.mark.parametrize("name", ["colour", "", "digest", "model_fields", "__class__", "<b>x</b>", "x" * 10_000], ids=short)
def test_a_field_that_is_not_known_is_left_out_and_named(name: str) -> None:
    session, left_out = read(stored(**{name: "red"}))
    assert session == read(FULL)[0]
    assert f"{name[:40]} (this version does not know it)" in left_out and len(left_out) < 300


def test_a_session_of_a_later_version_opens_with_what_fits() -> None:
    session, left_out = read(stored(version=VERSION + 1, goal={"kind": "serving"}, cost={"source": "oracle"}))
    assert session.version == VERSION
    assert session.cluster is not None and session.cost == state.DATASHEET
    assert "a later version of Switchyard" in left_out
    assert "goal (this version does not know it)" in left_out and "the cost source (cost: " in left_out
    assert read(stored(version=VERSION + 1)) == (read(FULL)[0], None)


@pytest.mark.parametrize("text", ["", "{", "null", "[1]", '"text"', "\0", "{}{}", "[" * 100_000, "1" * 10_000], ids=short)
def test_what_is_no_session_opens_an_empty_one_and_says_so(text: str) -> None:
    session, left_out = read(text)
    assert session == Session()
    assert left_out.startswith("The session of this address cannot be read (") and "an empty one is open" in left_out


@pytest.mark.parametrize("text", [stored(cluster={"name": "<b>x</b>"}, **{"colour\ud800": "red"}), b"\xff\xfe{}"], ids=short)
def test_a_page_says_once_what_it_could_not_open(text: str | bytes) -> None:
    app = opened(text)
    (toast,) = app.toast
    message = toast.value.replace("\\", "")
    if isinstance(text, bytes):
        assert "cannot be read" in message and app.session_state["model"] is None
    else:
        assert "the cluster (cluster → nodes: Field required); colour? (this version does not know it)." in message
        assert toast.value == plain(read(text)[1])
        assert app.session_state["cluster"] is None and app.session_state["model"].name == "tiny"
    assert not app.run().toast
    open_sample(visit(app, "cluster"))
    assert json.loads(file_of_session().read_text())["version"] == VERSION
    assert read(file_of_session().read_text())[1] is None


MISTAKEN = {"what-if-dtype": "int3", "what-if-noise": 400, "optimise-view": 7, "timeline-layers": [5, 1], "front-points": 1e9}
MISTAKEN |= {"timeline-beside": ["none"], "use-one-eplb": "yes", "launch-repeats": 2.5}
"""Choices that no widget has."""


@pytest.mark.parametrize(
    "names", [("cluster",), ("model",), ("workload",), ("model_of", "cost", "choices")], ids=lambda names: names[0]
)
def test_every_page_opens_without_what_was_left_out(sample: AppTest, names: tuple[str, ...]) -> None:
    opened_now = {field: sample.session_state[field] for field in ("workloads", "workload", "model", "cluster")}
    model, digest = opened_now["model"], opened_now["workload"]
    step = usual_step(model, 8)
    whole = Session(
        **opened_now,
        second=digest if "model_of" in names else None,
        model_of={digest: model},
        choices=MISTAKEN,
        step=step if "model" in names else None,
        steps={model.digest: step},
    )
    app = opened(json.dumps(json.loads(write(whole)) | {name: BROKEN[name][1] for name in names}))
    assert app.toast
    for page in PAGES:
        visit(app, page)


@pytest.mark.usefixtures("empty_session")
def test_what_a_session_has_open_is_stored_as_it_changes() -> None:
    model, cluster = model_presets()["Mixtral-8x7B"].model, cluster_presets()["mixed-8"].cluster
    state.change(model=model)
    state.open_cluster(cluster)
    state.open_step(usual_step(model, 8))
    state.update(cost={"source": "silicon"})
    state.add_saved(DIGEST, None)
    state.add_saved("b" * 64, 4)
    state.keep_choice("compute", 2.0)
    state.keep_choice("layers", (1, 15))
    revision = store.load_session(TOKEN)
    state.keep_choice("layers", (1, 15))
    assert store.load_session(TOKEN) == revision, "nothing changed"
    state.keep_choice("object", object())
    state.keep_choice("long", "x" * 5000)
    session, left_out = read(store.load_session(TOKEN))
    assert left_out is None
    assert (session.model, session.cluster, session.step) == (model, cluster, usual_step(model, 8))
    assert session.steps == {model.digest: session.step} and session.cost == {"source": "silicon"}
    assert list(session.saved.items()) == [("b" * 64, 4), (DIGEST, None)]
    assert session.choices == {"compute": 2.0, "layers": [1, 15]}


def test_a_session_that_is_not_here_is_told_so_and_an_empty_one_is_open() -> None:
    app = run(studio(session="of-another-folder"))
    assert [toast.value.replace("\\", "") for toast in app.toast] == [address.UNKNOWN]
    assert app.session_state["token"] != "of-another-folder" and "session" not in app.query_params
    assert not app.run().toast
    open_sample(app)
    assert store.load_session("of-another-folder") is None  # whoever has it would find another's work in it


def test_a_first_visit_and_its_reload_complain_of_nothing() -> None:
    first = run(studio())
    assert not first.toast and "session" not in first.query_params
    again = run(studio(**first.query_params))
    assert not again.toast
    # Once something is open, the address leads back to it, also on a studio that was started again.
    open_sample(again)
    back = run(studio(**again.query_params))
    assert not back.toast and back.session_state["token"] == again.session_state["token"]
    assert back.session_state["workload"] == again.session_state["workload"] is not None


def test_an_open_session_that_is_deleted_is_stored_again_with_the_next_change() -> None:
    app = open_sample(run(studio()))
    (stored_file,) = (store.data_folder() / "sessions").iterdir()
    stored_file.unlink()
    app.run()
    assert not app.toast and "session" not in app.query_params and app.session_state["workload"] is not None
    visit(app, "optimise")
    enter(app, "How tokens travel", "gpu")
    assert stored_file.exists() and app.query_params["session"] in ([stored_file.stem], stored_file.stem)


PAGE_CHOICES: dict[str, dict[str, Any]] = {
    "optimise": {f"use-{goal.ONE}-eplb": True, f"option-{goal.ONE}-aurora-time_limit": 7.0, f"use-{goal.ONE}-rcs": True},
    "timeline": {"timeline-beside": [], "timeline-layers": (2, 3)},
    "what_if": {"what-if-compute": 2, "what-if-dtype": "fp8", "what-if-noise": 20, "what-if-study": "sensitivity"},
    "affinity": {"affinity-values": "Counts", "affinity-order": "Grouped by GPU"},
    "launch": {"launch-place": "testbed", "launch-repeats": 7, "launch-limit": 120, "launch-dtype": "bf16"},
    "workload": {"workload-view": "Table"},
    "cluster": {"overlay": True},
}
KINDS = ("checkbox", "toggle", "selectbox", "multiselect", "number_input", "slider", "select_slider", "button_group")


def widget(app: AppTest, key: str):
    return next(widget for kind in KINDS for widget in app.get(kind) if widget.key == key)


def test_choices_are_found_on_coming_back_and_in_a_new_tab_and_a_look_chooses_nothing(ana: AppTest) -> None:
    ana.run()
    for page, choices in PAGE_CHOICES.items():
        chosen, kept = ana.session_state["choices"], store.session_written(ana.query_params["session"])
        visit(ana, page)
        assert ana.session_state["choices"] == chosen, page
        assert store.session_written(ana.query_params["session"]) == kept, page
        for key, value in choices.items():
            assert widget(ana, key).value != value, "another one than the default"
            widget(ana, key).set_value(value)
        run(ana)
    tab = studio(session=ana.query_params["session"])
    for page, choices in PAGE_CHOICES.items():
        for one in (ana, tab):
            visit(one, page)
            assert {key: widget(one, key).value for key in choices} == choices, page


@pytest.mark.usefixtures("empty_session")
def test_the_oldest_choices_give_way() -> None:
    state.change(choices={f"key-{number}": number for number in range(MOST_CHOICES)})
    for number in range(MOST_CHOICES, MOST_CHOICES + 3):
        state.keep_choice(f"key-{number}", number)
    state.keep_choice("key-5", "anew")
    choices = read(store.load_session(TOKEN))[0].choices
    assert len(choices) == MOST_CHOICES
    assert next(iter(choices)) == "key-3" and list(choices)[-1] == "key-5" and choices["key-5"] == "anew"


def log(name: str, seed: int = 0) -> RoutingTrace:
    experts = np.random.default_rng(seed).integers(0, 16, (64, 8, 1)).astype(np.int16)
    return RoutingTrace(name, experts, 16)


def test_the_same_contents_under_two_names_keep_the_name_of_each_session() -> None:
    mine, yours = (open_sample(studio().run()) for _ in range(2))
    for app, name in ((mine, "mine"), (yours, "yours")):
        open_recording(app, log(name), alone=True)
    for page in ("workload", "optimise", "affinity", "launch"):
        for app, own, other in ((mine, "mine", "yours"), (yours, "yours", "mine")):
            visit(app, page)
            shown = [button.label for button in app.button] + [popover.proto.popover.label for popover in app.get("popover")]
            shown += [block.value for block in (*app.caption, *app.markdown, *app.info)]
            assert any(own in text.split() or own == text for text in shown), page
            assert not any(other in text.split() for text in shown), page


@pytest.mark.parametrize("seed", range(3))
def test_sessions_that_save_the_same_at_once_do_not_get_in_each_others_way(seed: int) -> None:
    ready = Barrier(8)

    def saved(trace: RoutingTrace) -> str:
        ready.wait()
        return store.load_workload(store.save_workload(trace)).digest

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(saved, [log("any", seed) for _ in range(8)])) == {log("any", seed).digest}
