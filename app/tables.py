"""Tables safe for a spreadsheet, since names in them come from files and Streamlit's tables can be downloaded.

Also people's text as literal markdown, and the balance of a plan's load in few words.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pandas as pd
import streamlit as st
from pandas.io.formats.style import Styler

from engine import units
from engine.timeline import Balance, over_layers
from engine.workload import digest_of

FORMULA = ("=", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""Begin of a cell that a spreadsheet computes, or trims until it does; the wide forms count in East Asian editions."""
SIGNED = ("+", "-")
FIGURE = re.compile(r"[+-]\d[\d.,]*(e[+-]?\d+)?( ?[A-Za-z%×µ·][\w%×/µ·]*)*")
"""A signed figure with its unit, which is no formula."""
WARM = ("#A33B00", "#FF9D5C")
"""Colour of text that marks a worse value, by True if the page is dark."""
MISSING = "—"
"""Replaces a missing text, for which Streamlit writes None."""
ROWS, LOW = 6, 240
IN_POPOVER = 640
"""Pixels of a table in a popover: the most that Streamlit allows."""


def cell(text: str) -> str:
    """`text`, never a formula: a text that a spreadsheet would compute begins with an apostrophe (OWASP, CSV injection)."""
    formula = text.startswith(FORMULA) or (text.startswith(SIGNED) and not FIGURE.fullmatch(text))
    return f"'{text}" if formula else text


def without_formulas(frame: pd.DataFrame) -> pd.DataFrame:
    """The table without formulas in its texts, the lists in it, its index or its columns' names."""
    return frame.map(_harmless).rename(index=_harmless, columns=_harmless)


def show(
    table: pd.DataFrame | dict[str, list] | list[dict],
    shown: Mapping[str, Callable[[Any], str]] = MappingProxyType({}),
    losses: Mapping[str, Sequence[bool]] = MappingProxyType({}),
    **options: Any,
) -> Any:
    """`st.dataframe` of columns or rows with texts that may come from a person or a file.

    They look as they were written; the file that can be downloaded is guarded.
    shown: how the values of a column are written on the page
    losses: by column the rows with a worse value, in the warm colour
    options: those of `st.dataframe`
    """
    frame = pd.DataFrame(table)
    frame = frame.fillna(dict.fromkeys(frame.select_dtypes(["object", "string"]), MISSING))
    safe = without_formulas(frame)
    renamed = {name: written for name, written in zip(safe.columns, frame.columns, strict=True) if name != written}
    options["column_config"] = {
        **{name: st.column_config.Column(written) for name, written in renamed.items()},
        **(options.get("column_config") or {}),
    }
    if shown or losses or not safe.equals(frame.set_axis(safe.columns, axis=1)):
        return st.dataframe(_as_written(safe, shown, losses), **options)
    return st.dataframe(safe, **options)


def show_wrapped(table: dict[str, list], height: int | str) -> None:
    """`st.table`, which offers no file, of columns of sentences: they wrap, unlike those in the cells of a dataframe.

    table: texts as Markdown
    height: as of `st.table`
    """
    st.table(table, border="horizontal", hide_index=True, height=height)


def _as_written(safe: pd.DataFrame, shown: Mapping[str, Callable[[Any], str]], losses: Mapping[str, Sequence[bool]]) -> Styler:
    """A guarded table that looks unguarded: a browser shows the one and writes the other into a file."""
    styler = safe.style.format({name: shown.get(name, _written) for name in safe.columns}, na_rep=MISSING)
    colour = f"color: {WARM[st.context.theme.type == 'dark']}"
    for name, worse in losses.items():
        styler = styler.apply(lambda _, worse=worse: [colour if loss else "" for loss in worse], subset=[name])
    return styler


def _written(value: Any) -> str:
    if isinstance(value, str) and value.startswith("'") and cell(value[1:]) == value:
        return value[1:]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def choose_row(
    table: pd.DataFrame, ids: Sequence[int | str], choose: Callable[[int | str], None], key: str, **options: Any
) -> None:
    """A table of which a person selects one row.

    ids: of the rows
    choose: called with the id of the selected one
    key: of the widget, which is another one for other rows, since a selection is a row's number
    """
    key = f"{key}-{digest_of(*map(str, ids))[:16]}"

    def choose_selected() -> None:
        if rows := st.session_state[key].selection.rows:
            choose(ids[rows[0]])

    show(table, key=key, hide_index=True, on_select=choose_selected, selection_mode="single-row", **options)


def low(rows: int) -> int | str:
    """The height of a table that shows enough rows to choose from, and scrolls."""
    return "content" if rows <= ROWS else LOW


def as_csv(frame: pd.DataFrame) -> str:
    """The table as a file for a spreadsheet, without its index."""
    return without_formulas(frame).to_csv(index=False)


def _harmless(value: Any) -> Any:
    if isinstance(value, str):
        return cell(value)
    return [_harmless(part) for part in value] if isinstance(value, list) else value


def plain(text: str) -> str:
    """The text with its markup escaped."""
    return re.sub(r"([\\`*_{}\[\]()<>#+\-.!|~$:^&=\"'])", r"\\\1", " ".join(text.split()))


def sentence(text: str) -> str:
    """An error or a summary as a sentence, with its markup escaped. A first word that is a file, an option or the like stays as
    it is."""
    first, *_ = text.split(" ")
    begun = f"{text[:1].upper()}{text[1:]}" if re.fullmatch(r"[a-z]+[,:;]?", first) else text
    return plain(begun if begun.endswith((".", "!", "?")) else f"{begun}.")


COLUMN = "Overload factor"
COLUMN_HELP = (
    "Load of the fullest GPU over the mean: the mean of the layers, and the 95th percentile of the layers. 1× is even. It "
    "counts tokens: of GPUs of several types the faster ones are meant to get more. "
    "The notes on the open plan, below, have the other percentiles."
)


def metric(balance: Balance) -> None:
    """The overload factor as a figure of a page, with its percentiles and its other names in the tip."""
    st.metric(COLUMN, units.ratio(balance.mean), help=explanation(balance))


def balance_cell(factors: dict[str, float]) -> str:
    """`1.41× · p95 1.74×` for a table. factors: `Balance.factors`."""
    return f"{units.ratio(factors['mean'])} · p95 {units.ratio(factors['p95'])}"


def explanation(balance: Balance) -> str:
    """Meaning of the factor, all figures over layers, and its names in other engines."""
    return (
        "load of the fullest GPU over the mean, on average over layers (Megatron-LM). Over layers: "
        f"{over_layers(balance.factors)}. The same as imbalance ratio {units.digits(balance.imbalance_ratio)} (TensorRT-LLM) "
        f"and balancedness {balance.in_words}. It counts tokens: of GPUs of several types the faster ones are meant to get more"
    )


def balance_sentence(factors: dict[str, float]) -> str:
    """All figures in a line. factors: `Balance.factors`."""
    return f"{units.ratio(factors['mean'])} on average over layers; {over_layers(factors)}"


def noted(figures: dict[str, Any]) -> None:
    """Show the overload factor that was saved with a plan; nothing for a plan that an older version saved."""
    if (balance := figures.get("balance")) is not None:
        factors = balance["overload_factor"]
        st.metric(COLUMN, units.ratio(factors["mean"]), help=f"over layers: {over_layers(factors)}")
