"""What a newcomer sees first: what this is, what one gains by it, and ways to begin."""

import streamlit as st

from app import samples, state, widgets
from app.charts import welcome as charts
from engine.systems import SYSTEMS


def show() -> None:
    """Until something is the visitor's own, or they have said that they bring something."""
    words, figure = st.columns([2, 3], gap="large", vertical_alignment="center")
    with words:
        st.header("Plan a Mixture-of-Experts model before you deploy it", anchor=False)
        st.write(
            "Switchyard decides which experts share a GPU, which of them get copies and in what order tokens are sent, for "
            "serving and for training. From your own routing logs, on your own cluster, with a proven bound beside each "
            "plan."
        )
        with st.container(horizontal=True):
            if st.button("Plan the sample", type="primary", icon=":material/play_arrow:"):
                samples.open_sample()
                state.ask_for_run()
                st.switch_page("../pages/optimise.py")
            st.button("Upload mine", icon=":material/upload:", on_click=state.bring_own)
            if st.button("Open the sample", type="tertiary", icon=":material/science:"):
                samples.open_sample()
                st.rerun()
    with figure:
        gain = samples.gain()
        system = SYSTEMS[gain["system"]].title
        widgets.chart(charts.gain(gain["linear_seconds"], gain["seconds"], gain["bound"], system), "welcome-gain")
