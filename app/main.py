"""The studio: path, page config, navigation, run."""

import contextlib
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SIDEBAR = 232
"""Pixels: room for the names of what is open, and at a window of 1024 enough left for a page."""
if str(ROOT) not in sys.path:
    # `streamlit run app/main.py` puts app/ on the path; everything is imported from the project's root.
    sys.path.insert(0, str(ROOT))

# Streamlit's name of this script. New processes, which read the main script again under another name, have nothing to do here.
if __name__ == "__main__":
    import streamlit as st

    from app import cached, collector, failing, samples, state
    from app.visitor import guard, people, presence
    from engine import logs
    from engine.errors import InputError

    icon = str(ROOT / "app" / "icon.png")
    st.set_page_config(page_title="Switchyard", page_icon=icon, layout="wide", initial_sidebar_state=SIDEBAR)
    st.logo(str(ROOT / "app" / "wordmark.svg"), size="large")
    logs.configure()
    collector.spare()
    with contextlib.suppress(InputError, OSError):  # said by whatever needs the data folder
        cached.resume_jobs()
    people.admit()
    state.restore()

    PAGES = ROOT / "pages"
    operating = []
    if guard.may_operate(st.context, st.user):  # reached from the corner with one's name
        icon = ":material/monitor_heart:"
        operating = [st.Page(PAGES / "operate.py", title="Operate", icon=icon, url_path="operate", visibility="hidden")]
    sections = {
        "Inputs": [
            st.Page(
                PAGES / "workload.py", title="Workload", icon=":material/database:", url_path="workload", default=True
            ),
            st.Page(PAGES / "cluster.py", title="Cluster", icon=":material/dns:", url_path="cluster"),
        ],
        "Understand": [
            st.Page(PAGES / "affinity.py", title="Affinity", icon=":material/hub:", url_path="affinity"),
            st.Page(PAGES / "timeline.py", title="Timeline", icon=":material/view_timeline:", url_path="timeline"),
            st.Page(PAGES / "what_if.py", title="What-if", icon=":material/experiment:", url_path="what-if"),
        ],
        "Plan": [st.Page(PAGES / "optimise.py", title="Optimise", icon=":material/tune:", url_path="optimise")],
        "Decide": [
            st.Page(PAGES / "review.py", title="Review", icon=":material/rate_review:", url_path="review"),
            st.Page(PAGES / "launch.py", title="Launch", icon=":material/rocket_launch:", url_path="launch"),
            *operating,
        ],
    }
    page = st.navigation(sections, expanded=True)
    presence.note(page.title)
    steps = [samples.open_sample] if "--sample" in sys.argv[1:] and state.is_empty() else []
    for step in (*steps, page.run):
        with failing.in_a_line():
            step()
