"""Files dropped on the Workload page: each finds its place, several are one recording, and how to record."""

import io
import json
import zipfile
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from engine import store
from engine.jobs import runner
from engine.recording import GUIDES
from tests.app.test_pages import ROOT, open_sample, plan_the_sample, press, visit

SAMPLES = ROOT / "sample_traces"
NCCL_LOG = ROOT.parent / "shared" / "data" / "measurements" / "xxrjun_N1_G8.log"
PHRASE = "token,layer,expert\n0,0,1\n0,1,0\n"


@pytest.fixture
def app(own_data_folder: Path) -> AppTest:
    return AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60).run()


def drop(app: AppTest, **files: bytes) -> AppTest:
    """Files by name, with `__` for the dot."""
    zone = app.file_uploader(key="recordings")
    zone.set_value([(name.replace("__", "."), content, "application/octet-stream") for name, content in files.items()])
    app.run()
    assert not app.exception, app.exception
    return app


def add(app: AppTest, **files: bytes) -> None:
    """The same, beside the files that are in the zone."""
    zone = app.file_uploader(key="recordings")
    zone._files = zone._get_files_to_register()  # `upload` takes only those away that it brought itself
    for name, content in files.items():
        zone.upload(name.replace("__", "."), content)
    app.run()
    assert not app.exception, app.exception


def answers(app: AppTest) -> list[str]:
    """What files were opened as, which is said in one line."""
    mark = ":material/check: "
    lines = [caption.value for caption in app.caption if caption.value.startswith(mark)]
    assert len(lines) <= 1
    return [answer for line in lines for answer in line.removeprefix(mark).replace("\\", "").split(" · ")]


def complaints(app: AppTest) -> list[str]:
    return [error.value.replace("\\", "") for error in app.error]


def is_unfolded(app: AppTest) -> bool:
    """Whether the form with the drop zone is open."""
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
    assert complaints(app) == [
        "nonsense.bin: is a binary file that Switchyard cannot read; docs/formats.md lists what is read"
    ]
    deployed = app.session_state["in_use"]
    assert list(app.session_state["imported"]) == [deployed]
    visit(app, "optimise")
    assert any("deployed" in option for box in app.selectbox if box.label == "Deployed now" for option in box.options)


def test_a_plan_needs_its_model_and_cluster(app: AppTest) -> None:
    drop(app, deployed__json=sglang_plan(8, 16))
    assert complaints(app) == [
        "deployed.json: is a plan of a serving engine, not a recording: open its model and cluster first"
    ]
    open_sample(app)  # the file is still in the zone
    assert not complaints(app) and answers(app) == ["deployed.json counts as deployed now: SGLang expert locations"]


def test_a_plan_of_another_model_is_not_taken(app: AppTest) -> None:
    visit(open_sample(app), "workload")
    drop(app, deployed__json=sglang_plan(7, 16))
    assert "deployed.json" in complaints(app)[0] and app.session_state["in_use"] is None


def test_a_plan_that_breaks_a_rule_is_not_taken(app: AppTest) -> None:
    visit(plan_the_sample(open_sample(app)), "workload")
    plans = [candidate["plan"] for candidate in runner.jobs(store.data_folder())[0].result["candidates"]]
    broken = next(plan for plan in plans if plan["send_order"].get("dispatch"))
    broken["send_order"]["dispatch"][0]["bytes"][0] *= 2
    drop(app, broken__json=json.dumps(broken).encode())
    assert len(complaints(app)) == 1 and app.session_state["in_use"] is None and not app.session_state["imported"]


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


def test_of_a_traffic_matrix_it_is_said_what_of_the_model_counts(app: AppTest) -> None:
    open_sample(app)
    counts = "Of tiny-moe-alpha only the sizes of a token and of an expert count"
    assert not any(counts in caption.value.replace("\\", "") for caption in app.caption)
    press(app, "Traffic 8 × 8")
    assert any(counts in caption.value.replace("\\", "") for caption in app.caption)


def test_measured_times_go_to_the_costs(app: AppTest) -> None:
    drop(
        open_sample(app), times__csv=b"operation,ranks,bytes,seconds\nall_to_all,8,1000,1e-5\nall_to_all,8,2000,2e-5\n"
    )
    assert answers(app) == ["read times: choose it for computation or for the network on the Cluster page"]
    assert list(app.session_state["sources"]) == ["times"]


def test_how_to_record(app: AppTest) -> None:
    press(app, "How to record")
    shown = "\n".join(block.value for block in app.code)
    assert GUIDES[0].ways[0].start in shown and "Open a model" in "\n".join(caption.value for caption in app.caption)


def test_the_size_of_a_recording_is_told_for_the_open_model(app: AppTest) -> None:
    press(open_sample(app), "How to record")
    assert any("1,000 passes × 8 layers × 16 experts × 4 bytes" in text.value for text in app.markdown)
    assert any("**512 kB**" in text.value for text in app.markdown)


@pytest.mark.skipif(not NCCL_LOG.is_file(), reason="the shared recordings are not here")
def test_what_of_a_log_was_left_out_is_told(app: AppTest) -> None:
    drop(open_sample(app), xxrjun__log=NCCL_LOG.read_bytes())
    (text,) = answers(app)
    assert text.startswith("read xxrjun: choose it") and "all_gather" in text
