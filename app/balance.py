"""How evenly a plan loads its GPUs, in as few words as a page has room for."""

from typing import Any

import streamlit as st

from engine import units
from engine.balance import Balance, over_layers

COLUMN = "Overload factor"
COLUMN_HELP = (
    "Load of the fullest GPU over the mean: the mean of the layers, and the 95th percentile of the layers. 1× is even. It "
    "counts tokens: of GPUs of several types the faster ones are meant to get more. "
    "The notes on the open plan, below, have the other percentiles."
)


def metric(balance: Balance) -> None:
    """The overload factor as a figure of a page, with its percentiles and its other names where the pointer rests."""
    st.metric(COLUMN, units.ratio(balance.mean), help=explanation(balance))


def cell(factors: dict[str, float]) -> str:
    """`1.41× · p95 1.74×` for a table. factors: `Balance.factors`."""
    return f"{units.ratio(factors['mean'])} · p95 {units.ratio(factors['p95'])}"


def explanation(balance: Balance) -> str:
    """What the factor is, all figures over layers, and what other engines call it."""
    return (
        f"load of the fullest GPU over the mean, on average over layers (Megatron-LM). Over layers: "
        f"{over_layers(balance.factors)}. The same as imbalance ratio {units.digits(balance.imbalance_ratio)} "
        f"(TensorRT-LLM) and balancedness {units.digits(balance.balancedness)} (EPLB, vLLM, SGLang). It counts tokens: of "
        "GPUs of several types the faster ones are meant to get more"
    )


def sentence(factors: dict[str, float]) -> str:
    """All figures in a line. factors: `Balance.factors`."""
    return f"{units.ratio(factors['mean'])} on average over layers; {over_layers(factors)}"


def noted(figures: dict[str, Any]) -> None:
    """The figure of a plan that was saved with it; nothing of one that an older version saved."""
    if (balance := figures.get("balance")) is not None:
        factors = balance["overload_factor"]
        st.metric(COLUMN, units.ratio(factors["mean"]), help=f"over layers: {over_layers(factors)}")
