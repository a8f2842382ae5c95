"""Where files are dropped: any page takes any file, and brings it to its place."""

from collections.abc import Sequence

import streamlit as st

from app import opening, state
from app.text import plain


def show(key: str, label: str, help: str, gpu_type: str | None = None, tells: bool = True) -> None:
    """A drop zone, and below it what the files of the last upload were opened as, or why they were not.

    key: of its widget; label: what this page hopes for; help: which files those are; gpu_type: of machines whose files do not
    name it; tells: say what became of files, else the page does. Files of one recording may be dropped one after another: those
    still in the zone are read with them. One that was refused is read again once another model or cluster is open, or a file
    beside it leaves: it may have been for that; it is spoken of again only where it fares otherwise.
    """
    files = st.file_uploader(
        label,
        accept_multiple_files=True,
        key=key,
        help=f"{help} Cluster, model, plan and measurement files are recognised as well.",
    )
    ids = [file.file_id for file in files]
    refused = {id: complaints for id in ids if (complaints := state.complaints([id]))}
    came = state.newly_in(key, ids)
    is_new = [state.first_time(f"{id} {gpu_type or ''}") for id in ids]
    open_now = " ".join(document.digest for document in (state.model(), state.cluster()) if document is not None)
    others_open = [state.first_time(f"{id} beside {open_now}") for id in ids]
    is_new = [new or (other and id in refused) for id, new, other in zip(ids, is_new, others_open, strict=True)]
    if any(is_new):
        answers = opening.receive([(file.name, file.getvalue()) for file in files], is_new, gpu_type)
        answered = {id: answer for id, answer in zip(ids, answers, strict=True) if answer is not None}
        for id, answer in answered.items():
            (state.complain if answer.refused else state.answer_upload)(id, answer.text)
        otherwise = [id for id in answered if id in came or state.complaints([id]) != refused.get(id)]
        state.tell_of(key, otherwise, alone=bool(came))
        if answered:
            st.rerun()
    if tells:
        tell(state.told_of(key, ids))


def tell(ids: Sequence[str]) -> None:
    """What became of dropped files: those that were opened in a line, then why others were not."""
    if answers := state.answers_of_uploads(ids):
        st.caption(f":material/check: {plain(' · '.join(answers))}")
    for complaint in state.complaints(ids):
        st.error(plain(complaint), icon=":material/error:")
