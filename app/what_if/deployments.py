"""Serving users: the cheapest deployments of the open model for a goal, by forecasts of engines, GPU types side by side."""

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from app import cached, kept, state, studies, tables, widgets
from app.charts import sizing as charts
from app.optimise import serving_form
from app.tables import plain
from app.what_if import prices
from app.what_if.live import run_button
from engine import units
from engine.catalogue.packaged import cluster_of_machines
from engine.errors import InputError
from engine.jobs.studies import DeploymentsAnswer, DeploymentsAsk
from engine.model import MoEModel
from engine.sizing.deployments import WHY, Point, by_type, formats_of
from engine.sizing.inputs import read_serving_target
from engine.store.problems import as_json

KIND = "deployments"
MOST_TOKENS, MOST_GPUS, MOST_TYPES = 10_000_000, 4096, 12
LENGTHS = "begins with those of the open serving step, or of the open recording's name; else a chat's, 2,000 in and 1,000 out"
GOALS = (
    *("50 tokens/s a user", "20 ms a token", "first token in 2 s", "5000 tokens/s in all", "200 users at once"),
    "at most $40 an hour",
)
"""Examples of a goal, of which any may stand together."""


def deployments(model: MoEModel) -> None:
    """Ask for a demand, a goal and prices, and show the cheapest deployments."""
    beside, faults = cached.beside_experts(model), list[str]()
    with st.container(horizontal=True, vertical_alignment="bottom"):
        target = kept.text_input("Goal", "50 tokens/s a user", key="deployment-target", width=420)
        step = serving_form.open_step()
        sizes = (("Tokens in", "prompt", step.context), ("Tokens out", "output", step.output))
        prompt, output = (
            # Other lengths of what is open are another field, in which nothing has been typed yet.
            kept.limited(faults, label, 1, MOST_TOKENS, own, key=f"deployment-{name}-{own}", width=130, help=LENGTHS)
            for label, name, own in sizes
        )
        most = kept.limited(faults, "GPUs at most", 1, MOST_GPUS, 64, key="deployment-most", width=130)
    understood = st.empty()
    priced = prices.table()
    checkpoint = _checkpoint(model)
    with kept.expander("Number formats and engines", key="deployment-more"):
        formats = kept.multiselect(
            "Number formats of the weights",
            ("bf16", "fp8", "fp4", "int4"),
            _own_format(checkpoint, model),
            key=f"deployment-formats-{model.digest[:8]}",
            width=300,
            help="those of other checkpoints of the model too",
        )
        extrapolate = kept.checkbox("Also engines never measured on a GPU type", key="deployment-extrapolate")
        st.caption(plain(f"Attention and vocabulary: {beside.origin}."))
    asked = {
        "model": as_json(model),
        "sizes": as_json(beside.sizes),
        "checkpoint": checkpoint,
        "prompt": int(prompt),
        "output": int(output),
        "target": target,
        "most": int(most),
        "formats": list(formats),
        "extrapolate": extrapolate,
        "currency": priced.currency,
        "prices": {gpu: priced.of[gpu] for gpu in priced.ticked if gpu in priced.of},
    }
    ready = False
    with understood:
        try:
            said = read_serving_target(target).in_words
            st.caption(plain(f"Goal: {said}." if said else "No goal: the whole front.") + f" Such as {' · '.join(GOALS)}.")
            ready = True
        except InputError as error:
            st.error(tables.sentence(str(error)), icon=":material/error:")
    try:
        _check(priced, formats, faults)
        DeploymentsAsk.from_dict(asked, "the question")
    except InputError as error:
        ready = False
        st.error(tables.sentence(str(error)), icon=":material/error:")
    if run_button("Compare", KIND, ready):
        studies.start_and_rerun(KIND, None, asked)
    job = studies.newest(KIND)
    if job is not None and job.request.arguments.get("model") != as_json(model):
        st.info("The last answer is for another model: press Compare for the open one.", icon=":material/info:")
        return
    if job is not None and job.state.finished and job.request.arguments != asked:
        st.info("Goal or prices have changed since this answer: press Compare for a new one.", icon=":material/info:")
    studies.watch(KIND, _show, f"Press Compare: it tries every division of {plain(model.name)} on the ticked GPU types.")


def _check(priced: prices.Prices, formats: Sequence[str], faults: Sequence[str]) -> None:
    """Raises InputError for numbers, a table, or formats, that cannot be asked about."""
    if faults:
        raise InputError("; ".join(faults))
    if not priced.ticked:
        raise InputError("tick at least one GPU type to compare")
    if priced.lacking:
        several = len(priced.lacking) > 1
        raise InputError(f"{', '.join(priced.lacking)}: type {'their prices' if several else 'its price'}, or untick")
    if len(priced.ticked) > MOST_TYPES:
        raise InputError(f"{len(priced.ticked)} GPU types are ticked; compare at most {MOST_TYPES}")
    if not formats:
        raise InputError("choose at least one number format")


def _checkpoint(model: MoEModel) -> str:
    """The name of the open model on the Hub, as far as it is known."""
    remembered = state.session.configs.get(model.digest) or ""
    return remembered if "/" in remembered else model.name


def _own_format(checkpoint: str, model: MoEModel) -> list[str]:
    try:
        return list(formats_of(checkpoint, model))
    except InputError:  # of no measured engine: a person chooses another
        return []


def _show(answer: DeploymentsAnswer) -> None:
    """The decision, the front as a chart, GPU types side by side, and what was left out."""
    job = studies.newest(KIND)
    ask = DeploymentsAsk.from_dict(job.request.arguments, "request")
    dark, complete = st.context.theme.type == "dark", job.state.finished
    if answer.points:
        st.markdown(f"**{plain(answer.decision)}**" if complete else f"So far: {plain(answer.decision)}")
        figure = charts.deployments(answer.points, ask.limits, ask.currency, complete, dark)
        widgets.chart(figure, "what-if-deployments")
        _table_of(answer, ask, job.id, dark)
    elif complete:
        st.warning(_nothing(answer), icon=":material/block:")
    notes = "".join(f" {tables.sentence(note)}" for note in answer.notes)
    if not all(point.held for point in answer.points):
        notes += " †: servers over more machines than any measured, not held against a measurement."
    if answer.points and ask.limits.token and answer.points[0].high > ask.limits.token:
        notes = f" 9 of 10 such tokens take up to {units.seconds(answer.points[0].high)}, beyond the goal: measure it." + notes
    about = f"For {ask.target or 'no goal'}, {ask.prompt:,} tokens in, {ask.output:,} out, at most {ask.most:,} GPUs"
    said = f"{plain(about)}: {answer.tried:,} setups timed, most of them never measured"
    st.caption(f"{said}; users ask again as soon as they have an answer.{notes}")
    if answer.left_out:
        nearest = [tables.MISSING if each.nearest is None else units.seconds(each.nearest) for each in answer.left_out]
        with st.expander("What was left out, and why", icon=":material/block:"):
            table = {
                "GPU type": [each.gpu for each in answer.left_out],
                "Left out": [each.in_words for each in answer.left_out],
            }
            tables.show(table | {"Nearest": nearest}, hide_index=True)


def _nothing(answer: DeploymentsAnswer) -> str:
    """The reason why no deployment meets the goal: the last limit that candidates miss, of every GPU type."""
    last = {each.gpu: each for each in sorted(answer.left_out, key=lambda each: list(WHY).index(each.why))}
    reasons = [
        f"{gpu}: {each.in_words}" + (f", the nearest takes {units.seconds(each.nearest)}" if each.nearest else "")
        for gpu, each in last.items()
    ]
    advice = "Ease the goal, tick other types or allow more GPUs."
    return plain(f"No setup is predicted to meet the goal. {'; '.join(reasons)}. {advice}")


WORDS = (
    "tp: GPUs that share the attention of a sequence; dp: groups with sequences of their own; ep: GPUs that experts are "
    "divided among; prompts: servers that only take prompts; replicas: copies of all these servers, all in the price."
)
ROWS = {"types": "Cheapest of each GPU type", "all": "Whole front"}


def _table_of(answer: DeploymentsAnswer, ask: DeploymentsAsk, job: str, dark: bool) -> None:
    """Deployments side by side; the selected one, or the cheapest, opens as a cluster and has the parts of its token."""
    which = kept.segments("Rows", ROWS, ROWS.get, default="types", key="deployment-rows", label_visibility="collapsed")
    points = by_type(answer.points) if which == "types" else answer.points
    key = f"deployments-table-{job}-{which}-{len(points)}"
    picked = st.session_state.get(key, {}).get("selection", {}).get("rows", [])
    chosen = points[picked[0] if picked and picked[0] < len(points) else 0]
    text = as_text(points, ask.currency)
    tables.show(text, key=key, hide_index=True, on_select="rerun", selection_mode="single-row", height=tables.low(len(points)))
    st.caption(WORDS)
    if none := [gpu for gpu in ask.prices if gpu not in {point.deployment.gpu for point in answer.points}]:
        st.caption(plain(f"Nothing on {', '.join(none)} meets the goal: see below why."))
    with st.container(horizontal=True, vertical_alignment="center"):
        cluster = cluster_of_machines(chosen.deployment.gpu, chosen.gpus)
        is_open = state.session.cluster is not None and state.session.cluster.digest == cluster.digest
        if st.button("Open as cluster", icon=":material/dns:", key="deployment-open", disabled=is_open):
            state.open_cluster(cluster)
            state.visit.notice = f"opened {cluster.name} as the cluster"
            st.rerun(scope="app")
        studies.download_table(to_download(answer.points), KIND)
        how = "" if picked else ", the cheapest; select a row for another"
        st.caption(plain(f"{'Open now' if is_open else 'This one'}: {chosen.in_words}{how}."), width="stretch")
    widgets.chart(charts.parts(chosen, dark), "what-if-deployment-parts")


def as_text(points: Sequence[Point], currency: str) -> pd.DataFrame:
    """Deployments as the command prints them."""
    return pd.DataFrame(
        {
            "GPUs": [f"{point.gpus} × {point.deployment.gpu}" for point in points],
            "Servers": [point.deployment.servers_in_words + " †" * (not point.held) for point in points],
            "A million tokens": [f"{currency}{point.million:,.3f}" for point in points],
            "An hour": [f"{currency}{point.hour:,.2f}" for point in points],
            "tokens/s a user": [units.digits(1 / point.token) for point in points],
            "First token": [units.seconds(point.first_token) for point in points],
            "tokens/s a GPU": [units.digits(point.rate / point.gpus) for point in points],
            "in all": [f"{point.rate:,.0f}" for point in points],
            "Users": [f"{point.demand.users * point.replicas:,}" for point in points],
            "Replicas": [str(point.replicas) for point in points],
            "A token": [units.seconds(point.token) for point in points],
            "9 of 10 within": [f"{units.seconds(point.low)} to {units.seconds(point.high)}" for point in points],
            "Engine": [
                f"{point.deployment.engine} {point.deployment.version} {point.deployment.precision}" for point in points
            ],
            "Front": ["yes" if point.best else "" for point in points],
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
