"""The open recording as a file, in any format that can carry it."""

from pathlib import Path

import streamlit as st

from app import kept, state
from app.text import plain
from engine import store
from engine.errors import InputError
from engine.formats.writers import WRITERS, Converted, Writer, write_recording
from engine.workload import Workload


def popover(workload: Workload) -> None:
    """A choice of formats, what each leaves out, and the download."""
    writers = {name: writer for name, writer in WRITERS.items() if isinstance(workload, writer.carries)}
    with st.popover("Save as", icon=":material/download:"):
        name = kept.selectbox(
            "Format", list(writers), format_func=lambda name: _title(writers[name]), key="save-recording-as"
        )
        if not st.button("Write the file", icon=":material/description:"):
            return
        try:
            content, written = _written(workload, writers[name])
        except InputError as error:
            st.error(plain(str(error)), icon=":material/error:")
            return
        for lost in written.lost:
            st.caption(f"Left out: {plain(lost)}.")
        st.download_button(
            f"Download {written.path.name}", content, written.path.name, icon=":material/download:", on_click="ignore"
        )


def _title(writer: Writer) -> str:
    """As a choice, where it stands in no sentence."""
    title = writer.title.removeprefix("a ")
    return f"{title[0].upper()}{title[1:]} ({writer.suffix})"


def _written(workload: Workload, writer: Writer) -> tuple[bytes, Converted]:
    stem = "".join(char if char.isalnum() or char in "-_. " else "_" for char in workload.name)[:80]
    with store.scratch() as folder:
        written = write_recording(workload, Path(folder) / f"{stem}{writer.suffix}", writer.name, state.model())
        return written.path.read_bytes(), written
