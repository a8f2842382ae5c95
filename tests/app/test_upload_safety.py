"""Files that mean harm: nothing in them runs, leaves the data folder or becomes markup, and each is answered in a line.

`tests/formats` has the refusals of each reader, `tests/browser/test_bad_input.py` their look in a browser.
"""

import io
import json
import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.protobuf.message import Message
from streamlit.testing.v1 import AppTest

from app import uploads
from engine.catalogue import cluster_presets, model_presets
from engine.errors import InputError
from tests.cases.mutations import npy
from tests.cases.pages import PAGES, complaints, said, upload, visit
from tests.cases.sessions import JOB, plan, problem_of

HOSTILE = "<img src=x onerror=alert(1)>**zz**[l](javascript:1)$x$:red[r]`c`"
MARKUP = re.compile(r"(?<!\\)(<img|\*\*zz|\]\(javascript|\$x|:red\[|`c)")
AS_IT_IS = {"options", "default", "raw_values", "columns", "alt"}
"""Fields that a browser shows letter by letter: choices of lists, columns of a table, and the description of a chart."""
PLAIN = {"arrow_data_frame", "text", "code", "text_input", "text_area", "imgs", "bidi_component", "file_uploader"}
"""Elements that it shows letter by letter, or with texts that never come from a file."""
LOG = np.zeros((8, 2, 1), np.int16)


class Evil:
    """Unpickling one of these makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def archive(**members: bytes) -> bytes:
    with zipfile.ZipFile(file := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as whole:
        for name, content in members.items():
            whole.writestr(name, content)
    return file.getvalue()


def claiming_less(content: bytes, unpacked: int) -> bytes:
    """The archive with another unpacked size in the directory entry of its only member."""
    at = content.index(b"PK\x01\x02") + 24
    return content[:at] + struct.pack("<I", unpacked) + content[at + 4 :]


def model(**changes: object) -> bytes:
    return json.dumps(json.loads(next(iter(model_presets().values())).model.to_json()) | changes).encode()


@pytest.fixture
def app(sample: AppTest) -> AppTest:
    """The sample on the Workload page."""
    return visit(sample, "workload")


def outside(tmp_path: Path) -> set[Path]:
    """The files outside the data folder."""
    return {path for path in tmp_path.rglob("*") if "data" not in path.relative_to(tmp_path).parts}


def test_what_means_harm_is_answered_in_a_line_and_leaves_nothing(app: AppTest, tmp_path: Path) -> None:
    before, mark = outside(tmp_path), tmp_path / "ran"
    evil = npy(np.array([Evil(mark)], dtype=object))
    lying = claiming_less(archive(**{"experts.npy": npy(np.zeros((4_000_000, 2, 1), np.int16))}), 200)
    text = pa.DictionaryArray.from_arrays(np.zeros(1_000_000, np.int32), pa.array(["0" * 65536]))
    numbers = pa.array(np.zeros(1_000_000, np.int64))
    file = io.BytesIO()
    pq.write_table(pa.table({"token": text, "layer": numbers, "expert": numbers}), file)
    assert len(file.getvalue()) < 2_000_000
    cluster = json.loads(next(iter(cluster_presets().values())).cluster.to_json())
    cluster["nodes"][0]["gpus"] = [cluster["nodes"][0]["gpus"][0]] * 5000
    cases = {
        "evil.npy": (evil, "never loaded"),
        "evil.npz": (archive(**{"experts.npy": evil}), "never loaded"),
        "beside.npz": (archive(**{"experts.npy": npy(LOG), "sequence.npy": evil}), "never loaded"),
        "pickle.npz": (archive(**{"data.pkl": evil}), "never loaded"),
        "lying.npz": (lying, "damaged"),
        "many.npz": (archive(**{f"w{at}.npy": npy(LOG) for at in range(65)}), "65 workloads, at most 64"),
        "text.parquet": (file.getvalue(), "not numbers"),
        "crowd.json": (json.dumps(cluster).encode(), "GPUs are more than the limit of 4096"),
        "layers.json": (model(layers=10**9), "less than or equal to 1000"),
        "digits.json": (b'{"nodes": ' + b"9" * 5000 + b"}", "digits"),
        "deep.json": (b"[" * 200_000, "nested too deeply"),
        "infinite.json": (model(d_model=1e400).replace(b"Infinity", b"1e999"), "finite"),
        "ranks.csv": (b"src,dst,bytes\n0,99999999,1\n", "ranks"),
        "picture.parquet": (b"\x89PNG\r\n\x1a\n" + bytes(99), "is not a Parquet file"),
        "program.json": (b"\x7fELF" + bytes(99), "binary file that Switchyard cannot read"),
    }
    upload(app, "recordings", {name: content for name, (content, _) in cases.items()})
    answers = complaints(app)
    assert len(answers) == len(cases)
    for name, (_, reason) in cases.items():
        (answer,) = (answer for answer in answers if answer.startswith(name))
        assert re.search(reason, answer) and "\n" not in answer and str(tmp_path) not in answer, answer
    assert "12,288 tokens" in said(app.caption), "what was open stays"
    assert outside(tmp_path) == before and not mark.exists()
    assert not list((tmp_path / "data").glob("reading-*"))


NAMES = ["../../up.npz", "..\\..\\up.npz", "/etc/up.npz", "C:\\up.npz", "..", ".", "", "/", "a/", "\0.npz", "\ud800.npz"]
NAMES += [f"{'é' * 300}.npz", f"{'x' * 5000}.npz", "a\nb.npz", "con.npz", "-rf.npz", "$(touch x).npz"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_stays_in_its_folder(name: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with uploads.as_file(name, b"content") as path:
        folder = path.resolve().parent
        assert folder.parent.parent == data.resolve() and folder.name == "0" and folder.parent.name.startswith("reading-")
        assert path.read_bytes() == b"content" and path.name.isprintable()
        assert path.suffix == (".npz" if name.endswith(".npz") else "")
    assert not folder.exists() and not outside(tmp_path)


def test_a_disk_that_takes_no_file_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InputError, match=r"a\.npz: .*No space left"), uploads.as_file("a.npz", b""):
        pass


def test_paths_inside_an_archive_are_names(app: AppTest, tmp_path: Path) -> None:
    before = outside(tmp_path)
    upload(app, "recordings", {"slip.npz": archive(**{"../../../slip.npy": npy(LOG), "/slip.npy": npy(LOG + 1)})})
    assert not [error for error in app.error if error.value.startswith("slip")] and outside(tmp_path) == before
    assert {"slip::../../../slip", "slip::/slip"} <= set(app.session_state["workloads"].values())


def strings(message: Message, field: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a message, with the name of its field."""
    for descriptor, value in message.ListFields():
        for part in value if descriptor.is_repeated and not hasattr(value, "items") else [value]:
            if isinstance(part, Message):
                yield from strings(part, descriptor.name)
            elif isinstance(part, str):
                yield descriptor.name, part


def markup(app: AppTest) -> list[str]:
    """The elements in which a text of `HOSTILE` would be read as markup."""
    faults, waiting = [], [app._tree]
    while waiting:
        node = waiting.pop()
        waiting += list(getattr(node, "children", {}).values())
        proto = getattr(node, "proto", None)
        if proto is None or node.type in PLAIN:
            continue
        for field, text in strings(proto):
            # A chart's texts know tags only.
            bad = "<img" in json.dumps(json.loads(text)) if field == "spec" else MARKUP.search(text)
            if bad and field not in AS_IT_IS:
                faults.append(f"{node.type}.{field}: {text[:200]}")
    return faults


def test_the_search_for_markup_finds_it() -> None:
    def script(text: str) -> None:
        import plotly.graph_objects as go
        import streamlit as st

        st.caption(text)
        st.button("b", help=text)
        st.expander(text)
        st.plotly_chart(go.Figure().update_layout(title=text))

    assert len(markup(AppTest.from_function(script, args=(HOSTILE,)).run())) == 4


def test_names_in_files_are_never_markup_on_any_page(app: AppTest) -> None:
    short = HOSTILE[:20] + "**zz**:red[r]"
    cluster = json.loads(next(iter(cluster_presets().values())).cluster.to_json())
    cluster["name"] = HOSTILE
    for at, node in enumerate(cluster["nodes"]):
        node["name"] = f"{at}{HOSTILE}"[:60]
        for gpu in node["gpus"]:
            gpu["type"] = short
    known = json.loads(app.session_state["model"].to_json())
    experts = np.random.default_rng(0).integers(0, known["experts"], (64, len(app.session_state["model"].moe_layers), 1))
    files = {
        "c.json": json.dumps(cluster),
        "m.json": json.dumps(known | {"name": HOSTILE}),
        "n.npz": archive(**{f"{HOSTILE}.npy": npy(experts), "x.npy": npy(experts[::-1])}),
        f"{HOSTILE}.npy": npy(experts[8:]),
    }
    upload(app, "recordings", files)
    assert not app.error
    names = app.session_state["workloads"]
    hostile = next(digest for digest, name in names.items() if "**zz**" in name)
    app.session_state["workload"] = hostile
    app.session_state["plan_jobs"] = [JOB]
    app.session_state["plan"] = plan(problem_of(app), JOB, "linear", "sjf")[1].id
    for page in PAGES:
        visit(app, page)
        assert not markup(app), page
    visit(app, "workload")
    upload(app, "recordings", {f"{HOSTILE}.npz": archive(**{f"{HOSTILE}{at}.npy": b"" for at in range(2)})})
    assert app.error and not markup(app)
