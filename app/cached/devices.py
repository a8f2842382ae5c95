"""What the machine has."""

import streamlit as st

from engine.launch.places.devices import Devices
from engine.launch.places.devices import attached as engine_attached
from engine.launch.preparation.place_checks import testbed_fault as engine_testbed_fault


@st.cache_resource(ttl=60, show_spinner="Looking for devices")
def attached() -> Devices:
    return engine_attached()


@st.cache_resource(ttl=60, show_spinner="Trying whether a testbed can be built here")
def testbed_fault() -> str | None:
    """Why no testbed can be built on this machine; None when one can."""
    return engine_testbed_fault()
