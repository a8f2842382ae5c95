"""Where a recording comes from: how to record with each engine, what comes out, how large it becomes, what has gone wrong."""

import streamlit as st

from app import kept, state
from app.text import plain
from engine import units
from engine.model import MoEModel
from engine.recording import GUIDES
from engine.recording.estimate import estimate
from engine.recording.guide import EngineGuide, Way


def button() -> None:
    """Opens the guide over the page."""
    if st.button("How to record", icon=":material/radio_button_checked:", help="Flags and calls of each engine"):
        _guide()


@st.dialog("How to record", width="large")
def _guide() -> None:
    guides = {guide.name: guide for guide in GUIDES}
    name = kept.segments("Engine", list(guides), default=GUIDES[0].name, required=True, key="record-engine")
    _engine(guides[name], state.model())


def _engine(guide: EngineGuide, model: MoEModel | None) -> None:
    st.markdown(guide.advice)
    ways = {way.key: way for way in guide.ways}
    key = next(iter(ways))
    if len(ways) > 1:
        key = kept.radio("Way", list(ways), format_func=lambda key: ways[key].title, key=f"record-way-{guide.name}")
    _way(ways[key], model)


def _way(way: Way, model: MoEModel | None) -> None:
    st.code(way.start, language="python" if way.start.startswith(("from ", "import ")) else "bash", wrap_lines=True)
    if way.then:
        st.caption("While it runs")
        st.code(way.then, language="bash", wrap_lines=True)
    if way.ours:
        st.caption("Or with Switchyard, once the server runs")
        st.code(way.ours, language="bash", wrap_lines=True)
    st.markdown(f"**What comes out.** {way.gives}")
    _size(way, model)
    st.markdown("\n".join(f"* {trap}" for trap in way.traps))
    st.caption(f"Source: {way.source}.")


def _size(way: Way, model: MoEModel | None) -> None:
    st.markdown(f"**Size.** {way.size}")
    if model is None:
        st.caption("Open a model to see how many bytes that is.")
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        tokens = kept.number_input("Tokens", 1, 10**9, 100_000, step=10_000, key="record-tokens", width=160)
        passes = kept.number_input("Forward passes", 1, 10**8, 1000, step=100, key="record-passes", width=160)
        ranks = kept.number_input("Ranks", 1, 4096, _gpus(), key="record-ranks", width=120)
    size = estimate(way.key, model, tokens, passes, ranks)
    st.markdown(f"About **{units.size(size.bytes)}** of {plain(model.name)}: {plain(size.sum)}.")


def _gpus() -> int:
    cluster = state.cluster()
    return len(cluster.gpus) if cluster else 8
