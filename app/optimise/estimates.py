"""How long a system is likely to take, as it stands beside its name before it is run."""

from typing import Any

import streamlit as st

from app import option_inputs, state
from engine import units
from engine.jobs import runtimes
from engine.problem import Problem
from engine.systems import System

LIMIT = "time_limit"


def beside(problem: Problem, system: System, key: str) -> str:
    """` · about 20 s` or ` · under 1 s`, with the time limit that is set on the page; empty for a system that was never
    measured. key: of its options, as `option_inputs.show` takes it."""
    options: dict[str, Any] = {}
    limit_key = option_inputs.key_of(key, LIMIT)
    if (limit := st.session_state.get(state.widget_key(limit_key), state.choice(limit_key))) is not None:
        options[LIMIT] = limit
    seconds = runtimes.estimate(problem, system, options)
    if seconds is None:
        return ""
    return f" · about {units.roughly(seconds)}" if seconds >= 1 else " · under 1 s"
