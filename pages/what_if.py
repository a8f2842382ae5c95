"""What if this were larger, smaller, or cut differently?"""

import streamlit as st

from app import state, sweeps, widgets

widgets.header(
    "What-if", "What if the parts were smaller or cut elsewhere? Sweep one parameter of a plan and see its worth."
)
if state.is_empty():
    widgets.needed_problem()
if state.step() is None:
    st.info("Sweeps are for a training step, but what is open is inference: choose the goal on the Optimise page.",
            icon=":material/info:")  # fmt: skip
    st.page_link("../pages/optimise.py", label="Choose the goal", icon=":material/tune:")
    st.stop()
sweeps.panel(widgets.needed_problem())
