"""What no order of sends can beat, with relays where a cluster allows them and without, and no placement."""

import streamlit as st

from app import cached
from engine import units
from engine.plan import Plan
from engine.problem import Problem
from engine.simulate.metrics import Metrics

SAME = 1e-9
"""Relative difference of two times that are the same."""


def show(plan: Plan, problem: Problem, figures: Metrics) -> None:
    """The bound of a plan's placement, which holds for every order, and also, where GPUs could relay for each other but in the
    plan's own order do not, the closer one of the orders without relays; and that of its optimiser over all placements."""
    st.metric(
        "Bound for this placement",
        units.seconds(figures.order_bound),
        help="no order of sends can be faster, not even one in which the GPUs of a node relay for each other where they have "
        "links: every all-to-all at the time of its busiest port",
    )
    without = cached.bound(plan, problem, 0, problem.workload.layers - 1, straight=True)
    if without > figures.order_bound * (1 + SAME):
        st.metric(
            "Bound without relays",
            units.seconds(without),
            help="no order can be faster in which bytes go straight to their receivers, as in this plan; one with relays "
            "might be",
        )
    if figures.bound is not None and plan.claim.scope != "order":
        st.metric(
            "Bound for any placement",
            units.seconds(figures.bound),
            help="as its optimiser claims of placements with as many slots per GPU; not computed again",
        )
