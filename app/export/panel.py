"""A plan on its way out: choose an engine, see what to add to its command line and what stays behind, and download."""

import streamlit as st

from app import kept
from app.export import even, trace
from app.export.engines import PERFETTO, TAKERS, Taker, exported, file_name, without_flags
from app.text import plain
from engine.errors import InputError
from engine.formats.placements import Export
from engine.model import MoEModel
from engine.plan import Plan
from engine.problem import Problem

WIDTH = 320


def show(plan: Plan, problem: Problem, key: str) -> None:
    """Everything about taking a plan out, in a box that a person opens. key: of the page."""
    with st.expander(
        "Export to a serving engine", icon=":material/output:", on_change="rerun", key=f"{key}-export"
    ) as box:
        if not box.open:
            return
        with st.container(horizontal=True, vertical_alignment="bottom"):
            taker = kept.selectbox(
                "Engine", TAKERS, format_func=lambda taker: taker.title, key=f"{key}-export-engine", width=WIDTH
            )
            mtp = taker.target == "trtllm" and kept.checkbox(
                "With a layer for MTP",
                key=f"{key}-export-mtp",
                help="Multi-token prediction: with speculative decoding on, TensorRT-LLM asks for one layer more. It gets "
                "a copy of the last layer's placement, for want of a recording of it.",
            )
        st.caption(plain(taker.about))
        if taker.target == PERFETTO:
            trace.show(plan, problem, taker, key)
        else:
            _placement(plan, problem, taker, mtp, key)


def _placement(plan: Plan, problem: Problem, taker: Taker, mtp: bool, key: str) -> None:
    """The file, or why there is none and what to do about it."""
    try:
        _file(plan, problem.model, taker, mtp, key)
    except InputError as error:
        st.error(plain(without_flags(str(error))), icon=":material/block:")
        if (projected := even.offer(plan, problem, str(error), key)) is None:
            return
        try:
            _file(projected, problem.model, taker, mtp, f"{key}-even")
        except InputError as other:
            st.error(plain(without_flags(str(other))), icon=":material/block:")


def _file(plan: Plan, model: MoEModel, taker: Taker, mtp: bool, key: str) -> None:
    """What to add, what stays behind, and the download. Raises InputError where the engine can not load the plan."""
    export = _export(plan, model, taker, mtp)
    if export.lines:
        st.markdown("Add to the engine's command line or configuration, with the path of the file:")
        st.code("\n".join(export.lines), language=None, wrap_lines=True)
    if export.notes:
        st.markdown("\n".join(f"- {plain(_sentence(without_flags(note)))}" for note in export.notes))
    ((name, content),) = export.files.items()
    st.download_button(
        f"Download {name}", content, name, icon=":material/download:", on_click="ignore", key=f"{key}-export-file"
    )


def _sentence(note: str) -> str:
    return f"{note[:1].upper()}{note[1:]}."


def _export(plan: Plan, model: MoEModel, taker: Taker, mtp: bool) -> Export:
    """Kept between runs, and so is why there is none: it would be written at every run."""
    answer = _kept(plan.id, file_name(plan, taker), model.digest, taker.target, mtp, plan, model, taker)
    if isinstance(answer, str):
        raise InputError(answer)
    return answer


@st.cache_resource(max_entries=32, show_spinner="Writing the file and reading it back")
def _kept(
    id: str, name: str, digest: str, target: str, mtp: bool, _plan: Plan, _model: MoEModel, _taker: Taker
) -> Export | str:
    try:
        return exported(_plan, _model, _taker, mtp)
    except InputError as error:
        return str(error)
