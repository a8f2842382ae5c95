"""Tables whose cells a spreadsheet may open: Streamlit's tables can be downloaded, and names in them come out of files."""

import re
from typing import Any

import pandas as pd
import streamlit as st

FORMULA = ("=", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""How a cell begins that a spreadsheet computes, or trims until it does; the wide forms count in East Asian editions."""
SIGNED = ("+", "-")
FIGURE = re.compile(r"[+-]\d[\d.,]*(e[+-]?\d+)?( ?[A-Za-z%×µ·][\w%×/µ·]*)*")
"""A signed figure with its unit, which is no formula."""


def cell(text: str) -> str:
    """`text`, never a formula: what a spreadsheet would compute begins with an apostrophe (OWASP, CSV injection)."""
    formula = text.startswith(FORMULA) or (text.startswith(SIGNED) and not FIGURE.fullmatch(text))
    return f"'{text}" if formula else text


def without_formulas(frame: pd.DataFrame) -> pd.DataFrame:
    """The same table; no text in it, in a list in it, in its index or in a column's name is a formula."""
    return frame.map(_harmless).rename(index=_harmless, columns=_harmless)


def show(table: pd.DataFrame | dict[str, list] | list[dict], **options: Any) -> Any:
    """`st.dataframe` of columns or rows whose texts may come from a person or a file; options: those of `st.dataframe`."""
    return st.dataframe(without_formulas(pd.DataFrame(table)), **options)


def as_csv(frame: pd.DataFrame) -> str:
    """The table as a file for a spreadsheet, without its index."""
    return without_formulas(frame).to_csv(index=False)


def _harmless(value: Any) -> Any:
    if isinstance(value, str):
        return cell(value)
    return [_harmless(part) for part in value] if isinstance(value, list) else value
