"""Whole engines on the Cluster page: predicted against measured steps, those of the package or a person's own, and why one is
off."""

import pandas as pd
import streamlit as st

from app import failing, kept, tables, uploads, widgets
from app.charts import engines as charts
from app.tables import plain
from engine.compare.trust.whole_steps import SPLITS, Predicted, errors_by, explanations, is_fitted, measured_steps, predicted
from engine.errors import InputError
from engine.formats.measured.serving_rows import Refused, read_steps
from engine.units import digits, seconds, share, signed

TOKEN, FIRST = "Every further token", "The first token"
WORST = 10
HELP = (
    "Columns backend, model_path, system, precision, mode, isl, osl, concurrency, tp_size, attention_dp_size, moe_tp_size, "
    "moe_ep_size, silicon_ttft_ms and silicon_tpot_ms, as in sample_traces/serving-steps.csv; or InferenceX's results in JSON."
)


def show() -> None:
    """A drop zone, a chart of all steps, errors by kind, and the worst ten with the parts of the chosen one."""
    st.subheader("Whole engines", anchor=False)
    st.caption(
        "Time per token and to the first one, predicted by the parts of a step and factors that were fitted to half of the "
        "measured settings."
    )
    file = st.file_uploader("Your measured steps (CSV or JSON)", type=["csv", "json"], key="engine-steps", help=HELP)
    with failing.saying():
        rows, refused = _of_file(file.name, file.getvalue()) if file else (_held_out(), ())
        if not file:
            st.caption(f"{len(rows):,} public measurements that were not fitted; drop a table of your own to see that instead.")
        for each in refused[:WORST]:
            st.warning(plain(f"{each.id}, {each.place}: {each.why}."), icon=":material/block:")
        if len(refused) > WORST:
            st.caption(f"… and {len(refused) - WORST:,} more rows are left out.")
        measured = [row for row in rows if row.error is not None]
        if rows and not measured:
            _list(rows)
        elif measured:
            _compare(measured, whole=not file)


def _compare(rows: list[Predicted], whole: bool) -> None:
    """whole: True for the package's steps"""
    timed = [row for row in rows if row.first_error is not None]
    of = TOKEN if not timed else kept.segments("Time", [TOKEN, FIRST], key="engine-steps-time", default=TOKEN)
    first = of == FIRST
    shown = timed if first else rows
    errors = sorted(abs(row.first_error if first else row.error) for row in shown)
    what = "first tokens" if first else "times per token"
    median, mean = share(errors[len(errors) // 2]), share(sum(errors) / len(errors))
    title = f"{len(shown):,} {what} are {median} off in the median, {mean} in the mean"
    widgets.chart(charts.predicted_measured(shown, first, title), "engine-steps-chart")
    if len(rows) > WORST:
        split = kept.selectbox("Errors by", list(SPLITS), key="engine-steps-split", width=240)
        table = errors_by(rows, split)
        names = {"steps": "Steps", "token": "A token, median", "token_mean": "mean", "first_token": "First token, median"}
        names |= {split: split[:1].upper() + split[1:], "inside": "Inside the interval"}
        written = dict.fromkeys(("A token, median", "mean", "First token, median", "Inside the interval"), share)
        tables.show(table.rename(columns=names), shown=written, hide_index=True)
    worst = sorted(rows, key=lambda row: -abs(row.error))[: WORST if whole else None]
    st.markdown("**The worst ten**" if whole else "**Your steps, the worst first**")
    st.caption("Select one to see its parts, and which kind of work could explain it.")
    _list(worst)


def _list(rows: list[Predicted]) -> None:
    """A table of steps; below it the parts of the chosen one."""
    table = [
        {
            "Step": row.step.id,
            "A token": seconds(row.forecast.token),
            "9 of 10 within": f"{seconds(row.forecast.low)} to {seconds(row.forecast.high)}",
            "Measured": seconds(row.step.token) if row.step.token else "",
            "Off": "" if row.error is None else signed(row.error),
            "First token": seconds(row.forecast.first_token),
        }
        for row in rows
    ]
    chosen = st.session_state.get("engine-step")
    ids = [row.step.id for row in rows]
    tables.choose_row(pd.DataFrame(table), ids, _choose, "engine-steps-table", height=tables.low(len(rows)))
    row = next((row for row in rows if row.step.id == chosen), rows[0])
    widgets.chart(charts.parts(row, st.context.theme.type == "dark"), "engine-step-parts")
    if row.step.token is None:
        return
    if not (causes := explanations(row.forecast, row.step.token)):
        st.caption("No kind of work alone explains the measured time: none takes as long as the difference.")
        return
    st.caption(
        "One kind of work alone would explain the measured time if it took so many times as long. Those that would have to "
        "change least, against how much engines differ in them, come first."
    )
    tables.show(
        {
            "Kind of work": [cause.kind.capitalize() for cause in causes],
            "Predicted": [seconds(cause.seconds) for cause in causes],
            "Times as long": [digits(cause.times) for cause in causes],
            "Engines differ by": [digits(cause.usual) for cause in causes],
        },
        hide_index=True,
    )


def _choose(id: int | str) -> None:
    st.session_state["engine-step"] = id


def _of_file(name: str, content: bytes) -> tuple[list[Predicted], list[Refused]]:
    """A person's steps, and the rows that are left out, those of models that are not known too. Raises InputError."""
    with uploads.as_file(name, content) as path:
        steps, refused = read_steps(path)
    rows = []
    for step in steps:
        try:
            rows.append(predicted(step))
        except InputError as error:
            refused.append(Refused(step.id, "its model", str(error)))
    return rows, refused


@st.cache_resource(max_entries=1, show_spinner="Predicting measured steps")
def _held_out() -> list[Predicted]:
    return [predicted(step) for step in measured_steps() if not is_fitted(step.id)]
