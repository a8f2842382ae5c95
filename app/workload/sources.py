"""Where a recording comes from: files that are dropped, and the samples."""

import streamlit as st

from app import drop_zone, model_catalogue, samples, state
from app.workload import guide

ZONE = "recordings"


def show() -> None:
    """In full while nothing is open, and where all of an upload was refused. Else one line, and below it what became of the
    last upload, which leaves the room to the charts."""
    known = len(state.workloads())
    told = state.told_of(ZONE, [file.file_id for file in st.session_state.get(ZONE) or []])
    refused = bool(state.complaints(told)) and not state.answers_of_uploads(told)
    folded = state.workload_digest() is not None and not refused
    title = "Add a recording or open a sample" if known else "Open a recording or a sample"
    beside = f" · {known} in this session" if known > 1 else ""
    with st.expander(
        f"{title}{beside}",
        expanded=not folded,
        icon=":material/upload_file:",
        type="compact" if known else "default",
        key=f"sources-{told[-1] if told else ''}",  # another one after an upload: one that a person unfolded would stay so
    ):
        drop, gallery = st.columns([2, 3], gap="large")
        with drop:
            _drop(tells=not folded)
        with gallery:
            _samples()
    if folded:
        drop_zone.tell(told)


def _drop(tells: bool) -> None:
    drop_zone.show(
        ZONE,
        "Routing logs, expert loads, traffic matrices, a model's config.json",
        "Recordings of SGLang, vLLM, TensorRT-LLM and Megatron-Core, tables, NumPy files; several files of one recording, "
        "or an archive of them (docs/formats.md).",
        tells=tells,
    )
    st.caption("Up to 200 MB per file. For more, record fewer tokens, or save as .npz or Parquet, which are smaller.")
    guide.button()
    model_catalogue.search("workload")


def _samples() -> None:
    st.caption("Real routing of two small models, recorded on held-out text; see sample_traces/README.md.")
    with st.container(horizontal=True, gap="small"):
        for sample in samples.RECORDINGS:
            if st.button(sample.title, key=sample.file, help=sample.text):
                samples.open_recording(sample)
                st.rerun()
    st.caption("Production size, but synthetic: drawn from a power law with some affinity, not recorded from a model.")
    if st.button(
        "DeepSeek-R1 size (synthetic)",
        key="large",
        help="58 MoE layers × 256 experts, top-8, on four nodes of eight H100",
    ):
        with st.spinner("Drawing 4,096 tokens through 58 layers …"):
            samples.open_large()
        st.rerun()
