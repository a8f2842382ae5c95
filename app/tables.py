"""Tables whose cells a spreadsheet may open: Streamlit's tables can be downloaded, and names in them come out of files."""

import re
from typing import Any

import pandas as pd
import streamlit as st

FIGURE = re.compile(r"[+-][\d.,]+(e[+-]?\d+)?( ?[\w%×/µ·]+)*")
"""A signed figure with its unit, which is no formula."""


def cell(text: str) -> str:
    """`text`, never a formula: what a spreadsheet would compute begins with an apostrophe (OWASP, CSV injection)."""
    formula = text.startswith(("=", "@", "\t", "\r")) or (text.startswith(("+", "-")) and not FIGURE.fullmatch(text))
    return f"'{text}" if formula else text


def without_formulas(frame: pd.DataFrame) -> pd.DataFrame:
    """The same table; no text in it, nor a column's name, is a formula."""
    return frame.map(_harmless).rename(columns=_harmless)


def show(table: pd.DataFrame | dict[str, list] | list[dict], **options: Any) -> Any:
    """`st.dataframe` of columns or rows whose texts may come from a person or a file; options: those of `st.dataframe`."""
    return st.dataframe(without_formulas(pd.DataFrame(table)), **options)


def as_csv(frame: pd.DataFrame) -> str:
    """The table as a file for a spreadsheet, without its index."""
    return without_formulas(frame).to_csv(index=False)


def _harmless(value: Any) -> Any:
    return cell(value) if isinstance(value, str) else value
