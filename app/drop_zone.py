"""Where files are dropped: any page takes any file, and brings it to its place."""

import streamlit as st

from app import opening, state
from app.text import plain


def show(key: str, label: str, help: str, gpu_type: str | None = None, tells: bool = True) -> None:
    """A drop zone, and below it what its files were opened as, or why they were not.

    key: of its widget; label: what this page hopes for; help: which files those are; gpu_type: of machines whose files do not
    name it; tells: say what files were opened as, else the page does. Files of one recording may be dropped one after another:
    those still in the zone are read with them. One that was refused is read again once another model or cluster is open, or a
    file beside it leaves: it may have been for that.
    """
    files = st.file_uploader(
        label,
        accept_multiple_files=True,
        key=key,
        help=f"{help} Cluster, model, plan and measurement files are recognised as well.",
    )
    ids = [file.file_id for file in files]
    state.look_again(key, ids)
    is_new = [state.first_time(f"{id} {gpu_type or ''}") for id in ids]
    open_now = " ".join(document.digest for document in (state.model(), state.cluster()) if document is not None)
    others_open = [state.first_time(f"{id} beside {open_now}") for id in ids]
    is_new = [
        new or (other and bool(state.complaints([id]))) for id, new, other in zip(ids, is_new, others_open, strict=True)
    ]
    if any(is_new):
        answers = opening.receive([(file.name, file.getvalue()) for file in files], is_new, gpu_type)
        for id, answer in zip(ids, answers, strict=True):
            if answer is not None:
                (state.complain if answer.refused else state.answer_upload)(id, answer.text)
        if any(answer is not None and not answer.refused for answer in answers):
            st.rerun()
    for text in state.answers_of_uploads(ids) if tells else []:
        st.caption(f":material/check: {plain(text)}")
    for complaint in state.complaints(ids):
        st.error(plain(complaint), icon=":material/error:")
