"""The What-if page's search for the cheapest deployments of the open model, by forecasts of engines."""

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from app import cached, kept, state, studies, tables, widgets
from app.charts import sizing as charts
from app.tables import plain
from app.what_if.live import run_button
from engine import units
from engine.catalogue.packaged import every_gpu_type
from engine.errors import InputError
from engine.jobs.studies import DeploymentsAnswer, DeploymentsAsk
from engine.problem import Problem
from engine.sizing.deployments import Point, formats_of, measured_groups
from engine.sizing.inputs import SERVING_EXAMPLES, read_serving_target
from engine.store.problems import as_json

KIND, PRICES = "deployments", "deployment-prices"
MOST_TOKENS = 10_000_000


def deployments(problem: Problem) -> None:
    """Ask for a demand, a target and prices, and show the front of deployments."""
    st.caption(
        "Finds the cheapest deployments of the open model for a target: engines, GPUs, their division and users, at the prices "
        "that you type. Times are predicted, by parts fitted to measured engines; no recording counts."
    )
    beside = cached.beside_experts(problem.model)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        target = kept.text_input(
            "Target", "20 ms a token", key="deployment-target", width=360, help=f"any of {SERVING_EXAMPLES}; empty: none"
        )
        prompt = kept.number_input("Tokens in", 1, MOST_TOKENS, 1000, key="deployment-prompt", width=130)
        output = kept.number_input("Tokens out", 1, MOST_TOKENS, 1000, key="deployment-output", width=130)
        most = kept.number_input("GPUs at most", 1, 4096, 64, key="deployment-most", width=130)
        currency = kept.text_input("Currency", "$", key="size-currency", width=90, max_chars=4)
    checkpoint = _checkpoint(problem)
    with st.container(horizontal=True, vertical_alignment="center"):
        formats = kept.multiselect(
            "Number formats",
            ("bf16", "fp8", "fp4", "int4"),
            _own_format(checkpoint, problem),
            key=f"deployment-formats-{problem.model.digest[:8]}",
            width=300,
            help="of the weights; those of other checkpoints of the model too",
        )
        extrapolate = kept.checkbox("Also engines never measured on a GPU type", key="deployment-extrapolate")
    prices, wanted = _table(), {}
    st.caption(plain(f"Attention and vocabulary: {beside.origin}."))
    try:
        asked = {
            "sizes": as_json(beside.sizes),
            "checkpoint": checkpoint,
            "prompt": int(prompt),
            "output": int(output),
            "target": target,
            "most": int(most),
            "formats": list(formats),
            "extrapolate": extrapolate,
            "currency": currency,
        }
        # A question is checked before there is a price too.
        DeploymentsAsk.from_dict(asked | {"model": as_json(problem.model), "prices": prices or {"H200": 1.0}}, "the question")
        read_serving_target(target)
        if not formats:
            raise InputError("choose at least one number format")
        wanted = asked | {"prices": prices}
    except InputError as error:
        st.error(tables.sentence(str(error)), icon=":material/error:")
    if run_button("Find the cheapest deployments", KIND, bool(wanted) and bool(prices)):
        studies.start_and_rerun(KIND, problem, wanted)
    job = studies.newest(KIND)
    if job is not None and job.request.arguments.get("model") != as_json(problem.model):
        st.info("The last search is for another model: run it again for what is open.", icon=":material/info:")
        return
    studies.watch(KIND, _show, "Nothing run yet. Type a price for each GPU type that you can have.")


def _checkpoint(problem: Problem) -> str:
    """The name of the open model on the Hub, as far as it is known."""
    remembered = state.session.configs.get(problem.model.digest) or ""
    return remembered if "/" in remembered else problem.model.name


def _own_format(checkpoint: str, problem: Problem) -> list[str]:
    try:
        return list(formats_of(checkpoint, problem.model))
    except InputError:  # of no measured engine: a person chooses another
        return []


def _table() -> dict[str, float]:
    """The editable table of GPU types, measured ones first; the prices that were typed."""
    left = _left()
    if (base := state.visit.prices_base) is None or state.visit.widget_key(PRICES) not in st.session_state:
        state.visit.draw_anew([PRICES])
        measured: dict[str, list[str]] = {}
        for engine, gpu, mode in sorted(measured_groups()):
            measured.setdefault(gpu, []).append(engine if mode == "agg" else f"{engine} apart")
        ranked = sorted(every_gpu_type(), key=lambda gpu: (gpu not in left, gpu not in measured))
        rows = [{"gpu": gpu, "measured": ", ".join(measured.get(gpu, ["none"])), "price": left.get(gpu)} for gpu in ranked]
        base = state.visit.prices_base = pd.DataFrame(rows).astype({"price": "float64"})
    edited = st.data_editor(
        base,
        key=state.visit.widget_key(PRICES),
        hide_index=True,
        disabled=["gpu", "measured"],
        height=tables.low(len(base)),
        placeholder="—",
        column_config={
            "gpu": st.column_config.TextColumn("GPU type"),
            "measured": st.column_config.TextColumn("Measured engines", help="apart: some servers only take prompts"),
            "price": st.column_config.NumberColumn(
                "Price of one, an hour", min_value=0.001, max_value=1e9, format="%.4g", help="empty: not to be had"
            ),
        },
    )
    prices = {row["gpu"]: float(row["price"]) for row in edited.to_dict("records") if not pd.isna(row["price"])}
    state.keep_choice(PRICES, [value for pair in prices.items() for value in pair])
    return prices


def _left() -> dict[str, float]:
    """The prices as they were left."""
    flat = state.session.choices.get(PRICES)
    flat = flat if isinstance(flat, list) else []
    pairs = zip(flat[::2], flat[1::2], strict=False)
    return {
        str(gpu): price for gpu, price in pairs if type(price) in (int, float) and 0 < price <= 1e9 and gpu in every_gpu_type()
    }


def _show(answer: DeploymentsAnswer) -> None:
    """The front as a chart, a table of which each row can be opened, and what was left out."""
    job = studies.newest(KIND)
    ask = DeploymentsAsk.from_dict(job.request.arguments, "request")
    dark, complete = st.context.theme.type == "dark", job.state.finished
    if answer.points:
        figure = charts.deployments(answer.points, ask.limits, ask.currency, complete, dark)
        widgets.chart(figure, "what-if-deployments")
        _table_of(answer.points, ask, job.id, dark)
    elif complete:
        st.info("No deployment is predicted to meet the target.", icon=":material/info:")
    notes = "".join(f" {tables.sentence(note)}" for note in answer.notes)
    if not all(point.held for point in answer.points):
        notes += " †: servers over more machines than any measured, not held against a measurement."
    said = f"{answer.tried:,} deployments timed, most of them never measured"
    st.caption(f"{said}; users ask again as soon as they have an answer.{notes}")
    if answer.left_out:
        nearest = [tables.MISSING if each.nearest is None else units.seconds(each.nearest) for each in answer.left_out]
        with st.expander("What was left out, and why", icon=":material/block:"):
            table = {
                "GPU type": [each.gpu for each in answer.left_out],
                "Left out": [each.in_words for each in answer.left_out],
            }
            tables.show(table | {"Nearest": nearest}, hide_index=True)


def _table_of(points: Sequence[Point], ask: DeploymentsAsk, job: str, dark: bool) -> None:
    """The deployments by price; the selected one, or the cheapest, with the parts of its token."""
    key = f"deployments-table-{job}-{len(points)}"
    picked = st.session_state.get(key, {}).get("selection", {}).get("rows", [])
    chosen = points[picked[0] if picked and picked[0] < len(points) else 0]
    text = as_text(points, ask.currency)
    tables.show(text, key=key, hide_index=True, on_select="rerun", selection_mode="single-row", height=tables.low(len(points)))
    with st.container(horizontal=True, vertical_alignment="center"):
        how = "" if picked else ", the cheapest; select a row for another"
        st.caption(plain(f"A token of {chosen.in_words}{how}."))
        studies.download_table(to_download(points), KIND)
    widgets.chart(charts.parts(chosen, dark), "what-if-deployment-parts")


def as_text(points: Sequence[Point], currency: str) -> pd.DataFrame:
    """Deployments as the command prints them."""
    return pd.DataFrame(
        {
            "GPUs": [f"{point.gpus} × {point.deployment.gpu}" for point in points],
            "Front": ["yes" if point.best else "" for point in points],
            "A million tokens": [f"{currency}{point.million:,.3f}" for point in points],
            "An hour": [f"{currency}{point.hour:,.2f}" for point in points],
            "A token": [units.seconds(point.token) for point in points],
            "9 of 10 within": [f"{units.seconds(point.low)} to {units.seconds(point.high)}" for point in points],
            "First token": [units.seconds(point.first_token) for point in points],
            "tokens/s a user": [units.digits(1 / point.token) for point in points],
            "tokens/s a GPU": [units.digits(point.rate / point.gpus) for point in points],
            "Users": [f"{point.demand.users * point.replicas:,}" for point in points],
            "Engine": [
                f"{point.deployment.engine} {point.deployment.version} {point.deployment.precision}" for point in points
            ],
            "Servers": [point.deployment.servers_in_words + " †" * (not point.held) for point in points],
            "Replicas": [str(point.replicas) for point in points],
        }
    )


def to_download(points: Sequence[Point]) -> pd.DataFrame:
    """Deployments as numbers; seconds."""
    own = ("gpus", "replicas", "first_token", "token", "low", "high", "rate", "hour", "million", "best")
    rows = []
    for point in points:
        of = point.deployment
        about = {"gpu": of.gpu, "engine": of.engine, "version": of.version, "precision": of.precision}
        rows.append(about | {"servers": of.servers_in_words, "users": point.demand.users} | point.model_dump(include=set(own)))
    return pd.DataFrame(rows)
