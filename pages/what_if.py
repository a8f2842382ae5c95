"""What if the network were twice as fast, the traffic noisier, the model bigger?"""

import streamlit as st

from app import header, state, sweeps, what_if_live, what_if_studies, what_if_synthetic, widgets

header.show("What-if", "What if the network were twice as fast, the traffic noisier, the model bigger?")
if widgets.problem_or_advice() is None:
    if state.model() and state.cluster() and state.step() is None:
        st.subheader("Or make a synthetic recording for the open model", anchor=False)
        what_if_synthetic.panel()
    st.stop()
problem = widgets.needed_problem()
what_if_live.panel(problem)
st.divider()
if problem.step is None:
    what_if_studies.panel(problem)
else:
    sweeps.panel(problem)
    st.subheader("Sensitivity", anchor=False)
    what_if_studies.sensitivity(problem)
