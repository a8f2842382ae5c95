"""The What-if page: a faster network, noisier traffic, a bigger model; and how many GPUs to have."""

import streamlit as st

from app import header, state, widgets
from app.what_if import live, questions, studies, sweeps
from engine.goal import Goal

header.show("What-if", "What if the network were twice as fast? How many GPUs does a goal take, and at which price?")
if questions.is_chosen():
    questions.panel()
    st.stop()
if widgets.problem_or_advice() is None:
    if state.session.model and state.session.cluster and state.session.step is None:
        st.subheader("Or make a synthetic recording for the open model", anchor=False)
        sweeps.synthetic_panel()
    st.stop()
problem = widgets.needed_problem()
live.panel(problem)
st.divider()
if problem.goal is Goal.TRAINING:
    sweeps.panel(problem)
    st.subheader("Sensitivity", anchor=False)
    studies.sensitivity(problem)
else:
    studies.panel(problem)
