"""The studio: path, page config, navigation, run."""

import contextlib
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SIDEBAR = 232
"""Pixels: room for the names of the open inputs, and at a window of 1024 enough left for a page."""
INK, INK_IN_THE_DARK = "#128373", "#8FD6C9"
"""Colours of the name in the wordmark: of the file, and that of links on the dark sidebar."""
if str(ROOT) not in sys.path:
    # `streamlit run app/main.py` puts app/ on the path; everything is imported from the project's root.
    sys.path.insert(0, str(ROOT))

# Streamlit's name of this script. New processes, which read the main script again under another name, have nothing to do here.
if __name__ == "__main__":
    import gc

    import streamlit as st

    gc.disable()  # until all is imported, see `warm_up.spare`

    from app import cached, failing, samples, sidebar, state, warm_up
    from app.cluster import measuring
    from app.visitor import people, sessions
    from engine import logs
    from engine.errors import InputError
    from engine.jobs import workers

    warm_up.spare()
    icon = str(ROOT / "app" / "icon.png")
    st.set_page_config(page_title="Switchyard", page_icon=icon, layout="wide", initial_sidebar_state=SIDEBAR)
    wordmark = (ROOT / "app" / "wordmark.svg").read_text(encoding="utf-8")
    st.logo(wordmark.replace(INK, INK_IN_THE_DARK) if st.context.theme.type == "dark" else wordmark, size="large")
    logs.configure()
    with contextlib.suppress(InputError, OSError):  # a panel that needs the data folder says so
        cached.resume_jobs()
    people.admit()
    state.restore()

    PAGES = ROOT / "pages"
    pages = [entry for section in sidebar.SECTIONS.values() for entry in section]
    if people.may_operate(st.context, st.user):  # reached from the visitor's name
        pages.append(sidebar.OPERATE)
    # The sidebar has links of its own: a screen reader cannot use the list that Streamlit draws with sections.
    page = st.navigation(
        [
            st.Page(
                PAGES / f"{entry.file}.py",
                title=entry.title,
                icon=entry.icon,
                url_path=entry.file.replace("_", "-"),
                default=number == 0,
            )
            for number, entry in enumerate(pages)
        ],
        position="hidden",
    )
    people.lead_back()
    people.note(page.title)
    sidebar.links()
    sessions.remember()
    steps = [samples.open_sample] if "--sample" in sys.argv[1:] and state.is_empty() else [measuring.take_measured]
    try:
        for step in (*steps, page.run):
            with failing.in_a_line():
                step()
    finally:  # also when the page begins anew; after it, so that it waits for nothing but its own
        workers.keep_standby()
        warm_up.begin()
        if state.session.plan or state.session.imported:
            warm_up.begin_simulation()
