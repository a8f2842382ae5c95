"""Prices of GPU types, in one table for all questions of capacity: public list prices to start from, and those that a person
types."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import streamlit as st

from app import kept, state
from engine.catalogue.packaged import every_gpu_type
from engine.sizing.deployments import measured_groups

KEY = "gpu-prices"
ROW, ROWS = 35, 8
"""Pixels of a row of the table, and rows that show without scrolling."""

LIST_PRICES = {
    "GB200": 42.00 / 4,
    "B200": 68.80 / 8,
    "H200": 50.44 / 8,
    "H100": 49.24 / 8,
    "A100-80": 21.60 / 8,
    "L40S": 18.00 / 8,
    "RTX-PRO-6000-SERVER": 20.00 / 8,
}
"""US dollars for one GPU an hour: the price of a whole machine over its GPUs, see SOURCE. B300 and GB300 have none there."""
SELLER, READ = "CoreWeave", "2026-09-20"
SOURCE = (
    f"{SELLER}'s public on-demand list prices (coreweave.com/pricing, North America, read {READ}), of a whole machine over its "
    "GPUs; reserved ones cost less"
)


@dataclass(frozen=True)
class Prices:
    """The table as it stands.

    of: price of a GPU an hour by type, of every type that has one
    ticked: types to compare
    """

    of: dict[str, float]
    ticked: tuple[str, ...]
    currency: str

    @property
    def lacking(self) -> list[str]:
        """Ticked types without a price."""
        return [gpu for gpu in self.ticked if gpu not in self.of]

    def of_all(self, types: Sequence[str]) -> float | None:
        """The price of some GPUs an hour; None if one of them has none."""
        each = [self.of.get(gpu) for gpu in types]
        return None if None in each else sum(each)


def table(only: Sequence[str] = ()) -> Prices:
    """The editable table, with ticks for the types to compare; of a few types their prices alone.

    only: these types; none: all
    """
    with st.container(horizontal=True, vertical_alignment="bottom", wrap=False):
        currency = kept.text_input("Currency", "$", key="size-currency", width=90, max_chars=4) or "$"
        st.caption(f"List prices: {SOURCE}. Type what you pay; a type without a price has none on that list.", width="stretch")
    measured, listed = _measured(), LIST_PRICES if currency == "$" else {}
    usual = {gpu: (listed.get(gpu), gpu in measured and gpu in listed) for gpu in only or every_gpu_type()}
    left, about = _left(), (currency, tuple(only))
    known = state.visit.prices_base
    # The same object while it is edited: a data editor whose input changes drops edits.
    if known is None or known[0] != about or state.visit.widget_key(KEY) not in st.session_state:
        state.visit.draw_anew([KEY])
        rows = usual | {gpu: row for gpu, row in left.items() if gpu in usual}
        ranked = sorted(rows, key=lambda gpu: (gpu not in measured, gpu not in LIST_PRICES))
        known = state.visit.prices_base = about, _base({gpu: rows[gpu] for gpu in ranked}, measured, listed)
    columns = {
        "compare": None if only else st.column_config.CheckboxColumn("Compare", width="small"),
        "gpu": st.column_config.TextColumn("GPU type"),
        "price": st.column_config.NumberColumn(
            f"{currency} a GPU-hour", min_value=0.001, max_value=1e9, format="%.4g", help="Type what you pay."
        ),
        "list": st.column_config.TextColumn("List price", help=SOURCE),
        "measured": None
        if only
        else st.column_config.TextColumn("Engines measured on it", help="apart: some servers take prompts, others generate"),
    }
    edited = st.data_editor(
        known[1],
        key=state.visit.widget_key(KEY),
        hide_index=True,
        disabled=["gpu", "list", "measured"],
        height=ROW * (min(ROWS, len(usual)) + 1) + 3,
        placeholder="—",
        column_config=columns,
    )
    now = {
        row["gpu"]: (None if pd.isna(row["price"]) else float(row["price"]), bool(row["compare"]))
        for row in edited.to_dict("records")
    }
    typed = {gpu: row for gpu, row in (left | now).items() if gpu not in usual or row != usual[gpu]}
    state.keep_choice(KEY, [value for gpu, row in typed.items() for value in (gpu, *row)])
    of = {gpu: price for gpu, (price, _) in now.items() if price is not None}
    return Prices(of, tuple(gpu for gpu, (_, ticked) in now.items() if ticked), currency)


def _measured() -> dict[str, list[str]]:
    measured: dict[str, list[str]] = {}
    for engine, gpu, mode in sorted(measured_groups()):
        measured.setdefault(gpu, []).append(engine if mode == "agg" else f"{engine} apart")
    return measured


Row = tuple[float | None, bool]


def _base(rows: dict[str, Row], measured: dict[str, list[str]], listed: dict[str, float]) -> pd.DataFrame:
    records = [
        {
            "compare": ticked,
            "gpu": gpu,
            "price": price,
            "list": f"{listed[gpu]:.4g}, {SELLER} {READ[:7]}" if gpu in listed else "none",
            "measured": ", ".join(measured.get(gpu, ["none"])),
        }
        for gpu, (price, ticked) in rows.items()
    ]
    return pd.DataFrame(records).astype({"price": "float64"})


def _left() -> dict[str, Row]:
    """The rows that were changed, as they were left."""
    flat = state.session.choices.get(KEY)
    flat = flat if isinstance(flat, list) else []
    rows = zip(flat[::3], flat[1::3], flat[2::3], strict=False)
    return {
        str(gpu): (price, ticked)
        for gpu, price, ticked in rows
        if type(ticked) is bool and (price is None or (type(price) in (int, float) and 0 < price <= 1e9))
    }
