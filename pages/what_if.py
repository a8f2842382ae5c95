"""What if the network were twice as fast, the traffic noisier, the model bigger?"""

import streamlit as st

from app import state, sweeps, what_if_live, what_if_studies, widgets

widgets.header("What-if", "What if the network were twice as fast, the traffic noisier, the model bigger?")
if state.is_empty():
    widgets.needed_problem()
problem = widgets.needed_problem()
what_if_live.panel(problem)
st.divider()
if problem.step is None:
    what_if_studies.panel(problem)
else:
    sweeps.panel(problem)
    st.subheader("Sensitivity", anchor=False)
    what_if_studies.sensitivity(problem)
