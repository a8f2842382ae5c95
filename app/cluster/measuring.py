"""Measured times: calibration of the attached devices, the choice of cost sources, also unasked for what was just opened,
measured pairs of GPUs, and the distance of simulated times from public measurements."""

import json

import pandas as pd
import streamlit as st

from app import cached, failing, kept, opening, state, studies, tables, widgets
from app.charts import trust as charts
from app.tables import plain
from app.visitor import people
from engine import catalogue, store, units
from engine.catalogue.links import type_of
from engine.cluster import Cluster
from engine.compare.trust import ENGINES, SECTIONS, Prediction, summaries
from engine.compare.trust.deepep import OLD_PRICING
from engine.costs import CostModel, Datasheet, Profiled, choice, combine
from engine.costs.device_profile import DeviceProfile
from engine.errors import InputError
from engine.jobs import runner
from engine.jobs.launches import table_of
from engine.jobs.runner import Job, State
from engine.launch.calibration.calibrate import plan_sweep
from engine.launch.calibration.sweep import MAX_RANKS
from engine.launch.places.devices import Devices
from engine.model import MoEModel
from engine.reproduce.measured_steps import TRAINING_STEPS, training_steps
from engine.units import bandwidth, share, signed
from engine.workload import digest_of

KIND = "calibrate"
TAKEN = "evidence"
"""Key of the choice that holds the model and cluster that measured tables were last looked for, and True if they were taken."""


def calibration_panel(cluster: Cluster, model: MoEModel | None) -> None:
    """Start a calibration, watch it, and use its result."""
    with st.expander("Calibrate attached devices", icon=":material/speed:"):
        st.caption(
            "Measures GEMMs, passes over memory and, with two ranks or more, all-to-alls and all-reduces on the machine that "
            "the studio runs on, and checks the times on shapes that were left out."
        )
        _start(cached.attached())
        failing.fragment(run_every=1 if studies.is_running(KIND) else None)(_watch)()
        widgets.other_jobs(KIND, [state.session.study_jobs.get(KIND) or ""], lambda id: state.set_study_job(KIND, id))
        if (job := studies.newest(KIND)) and job.state is State.DONE:
            with failing.saying():
                _show_result(job, cluster, model)


def _start(devices: Devices) -> None:
    st.markdown(plain(devices.summary))
    with st.container(horizontal=True, vertical_alignment="bottom"):
        ranks = kept.number_input(
            "Ranks that measure",
            1,
            len(devices.gpus) or MAX_RANKS,
            plan_sweep(devices).ranks,
            width=160,
            key="measure-ranks",
            help="one per GPU; on a CPU, ranks beyond the number of processors wait for each other",
        )
        kind = None
        if any(type_of(gpu) is None for gpu in devices.gpus):
            kind = st.selectbox(
                "GPU type of these devices",
                list(catalogue.fastest_first(catalogue.gpu_types())),
                index=None,
                placeholder="as the driver says",
                width=240,
                help="what the drawn cluster calls them; the catalogue does not know them by name",
            )
        quick = kept.checkbox("Quick", key="measure-quickly", help="some 5 s instead of some 30 s, with fewer sizes")
        kinds = ("launch", KIND)
        busy = any(not job.state.finished for kind in kinds for job in runner.jobs(store.data_folder(), kind))
        refused = people.why_not_launch(st.context, st.user)
        pressed = st.button("Calibrate", icon=":material/speed:", disabled=bool(refused or busy))
    if refused:
        st.warning(refused, icon=":material/lock:")
    elif busy:
        st.caption("A launch or calibration is running on these devices; one runs at a time.")
    if pressed:
        arguments = {"ranks": ranks, "quick": quick, "type": kind}
        with failing.saying():
            state.set_study_job(KIND, runner.start(KIND, arguments, store.data_folder()).id)
            st.rerun()


def _watch() -> None:
    """The newest calibration; once it has ended the page is drawn again, with its result."""
    if job := studies.newest(KIND):
        widgets.job_row(job)
        if state.visit.newly_finished(job.id, job.state.finished):
            st.rerun()


def _show_result(job: Job, cluster: Cluster, model: MoEModel | None) -> None:
    answer = cached.result_of(job)
    profile = answer.calibration
    rows = [{name.capitalize(): cell for name, cell in row.items()} for row in table_of(profile)]
    tables.show(rows, hide_index=True, key="calibration-fits")
    for held_out in answer.held_out:
        st.markdown(
            f"{held_out.shapes} held-out shapes, {held_out.dtype} on {plain(held_out.gpu)}: mean error "
            f"**{units.share(held_out.mean)}**, worst {units.share(held_out.worst)}."
        )
    st.caption(plain(answer.origin))
    with st.container(horizontal=True):
        wanted = st.button("Use it", type="primary", icon=":material/check:", key="use-calibration")
        widgets.download("Save as JSON", profile.to_json(), "profile.json", key="save-calibration")
    if not wanted:
        return
    try:
        cost = usable(profile, cluster, model)
    except InputError as error:
        st.error(f"It cannot be used: {plain(str(error))}.", icon=":material/error:")
    else:
        state.add_cost_source(profile.measured.name, choice.to_dict(Profiled(profile.measured)))
        state.update(cost=choice.to_dict(cost))
        state.visit.notice = f"times come from {choice.short(state.session.cost)}"
        st.rerun()


def usable(profile: DeviceProfile, cluster: Cluster, model: MoEModel | None) -> CostModel:
    """The profile as costs of the cluster; the datasheet prices computation or network if the profile has none.

    Raises InputError when it has neither.
    """
    measured = Profiled(profile.measured)
    lacks = [why for why in (measured.lacks_computation(cluster), measured.lacks_network(cluster)) if why]
    if len(lacks) == 2:
        raise InputError("; ".join(lacks))
    cost = combine({"calibration": measured, "datasheet": Datasheet()}, cluster) if lacks else measured
    if reason := choice.why_not(cost, cluster, model):
        raise InputError(reason)
    return cost


DATASHEET, SILICON, DEEPEP = "Datasheet", "Measured tables (aiconfigurator)", "DeepEP's exchanges (aiconfigurator)"
TABLES = ("datasheet", "silicon", "deepep")
"""Sources that do not come from a file."""
PARTS = {"Computation": "GEMMs and passes over memory", "Network": "all-to-alls and all-reduces"}


def _label(cost: dict) -> str:
    return f"{choice.name_in_file(cost)} (file)"


def choose_costs(cluster: Cluster, model: MoEModel | None) -> None:
    """Inputs for the sources of computation and network. A source that cannot answer is refused with its reason, and the last
    valid one stays."""
    now = state.session.cost
    parts = (now["computation"], now["network"]) if now["source"] == "combined" else (now, now)
    sources = {DATASHEET: state.DATASHEET, SILICON: {"source": "silicon"}}
    sources |= {_label(cost): cost for cost in state.session.sources.values()}
    for part in parts:  # a file that this session knows only from the costs in use
        if part["source"] not in TABLES and part not in sources.values():
            sources[_label(part)] = part
    of_part = {"Computation": sources, "Network": sources | {DEEPEP: {"source": "deepep"}}}
    chosen_sources: list[dict] = []
    round = digest_of(json.dumps([now, *sources]))[:12]  # a source opened elsewhere makes new inputs
    with st.container(horizontal=True, vertical_alignment="bottom"):
        for (title, covers), part in zip(PARTS.items(), parts, strict=True):
            at = next(
                (
                    place
                    for place, source in enumerate(of_part[title].values())
                    if source["source"] == part["source"] and (source == part or part["source"] in TABLES)
                ),
                0,
            )
            help = f"Source of the times of {covers}."
            chosen = st.selectbox(title, list(of_part[title]), at, width=340, help=help, key=f"cost-{title}-{round}")
            chosen_sources.append(of_part[title][chosen])
    opening.show(
        "cost-file",
        "Measured times or a profile",
        "A profile or measured times as JSON, a CSV table (operation, gpu, dtype, m, n, k, bytes, ranks, seconds), what "
        "nccl-tests prints, or a trace of the PyTorch profiler (.json, .json.gz).",
    )
    computation, network = chosen_sources
    combined = {"source": "combined", "computation": computation, "network": network}
    _use(computation if computation == network else combined, now, cluster, model)
    try:
        st.caption(f"In use: {plain(choice.from_dict(state.session.cost).source)}; {plain(cluster.reached_in_words)}.")
    except InputError as error:
        st.caption(plain(str(error)))


def _use(costs: dict, now: dict, cluster: Cluster, model: MoEModel | None) -> None:
    """Open the chosen costs, or say why they are refused. now: the costs in use."""
    try:
        cost = choice.from_dict(costs)
        reason = choice.why_not(cost, cluster, model)
    except InputError as error:
        reason = str(error)
    if reason is not None:
        if costs == now:
            st.error(f"The costs in use cannot time this cluster and model: {plain(reason)}.", icon=":material/error:")
            st.button(
                "Use the datasheet costs", icon=":material/menu_book:", on_click=state.update, kwargs={"cost": state.DATASHEET}
            )
        else:
            st.error(f"Refused: {plain(reason)}. Still in use: {plain(choice.short(now))}.", icon=":material/error:")
    elif costs != now:
        state.update(cost=costs)
        st.rerun()


WORST = 10
"""Most pairs that are listed."""


def show_pairs() -> None:
    """The measured pairs of the open cluster's hosts; nothing if none were measured."""
    pairs = cached.measured_pairs()
    if pairs is None:
        return
    st.subheader("Measured pairs", anchor=False)
    unmeasured = " What was not measured is crossed out or empty." if pairs.is_partial else ""
    st.caption(
        "One pair of GPUs at a time, both ways at once, as in the logs, against the cluster above with its edits. "
        f"Mean difference {share(pairs.mean_error)}.{unmeasured}"
    )
    if len(pairs.names) <= charts.MOST_GPUS:
        widgets.chart(charts.pair_rates(pairs, st.context.theme.type == "dark"), "measured-pairs")
    else:
        st.caption(f"Matrices of more than {charts.MOST_GPUS} GPUs are not drawn.")
    with st.expander("Pairs with the largest error"):
        rows = [
            {
                "Pair": f"{pairs.names[first]} with {pairs.names[second]}",
                "Measured": bandwidth(pairs.measured[first, second]),
                "Drawn": bandwidth(pairs.drawn[first, second]),
                "Difference": signed(pairs.difference[first, second]),
            }
            for first, second in pairs.worst(WORST)
        ]
        tables.show(rows, hide_index=True)


def show_trust() -> None:
    """A chart and a table, once they are asked for: they take some seconds."""
    st.caption(
        "Predictions beside public measurements of real machines. Fitted models use half of the points; errors are on the rest."
    )
    if not kept.toggle("Compare predictions with measurements", key="trust-shown"):
        return
    try:
        sections = _sections()
    except InputError as error:
        st.info(plain(str(error)), icon=":material/info:")
        return
    held_out = {
        name: [point for point in points if not point.fitted and not point.of.endswith(OLD_PRICING)]
        for name, points in sections.items()
        if name != ENGINES  # with a chart of their own, by GPU type
    }
    old = [point for points in sections.values() for point in points if point.of.endswith(OLD_PRICING)]
    errors = [abs(point.error) for points in held_out.values() for point in points]
    title = (
        f"{len(errors):,} held-out predictions are {units.share(sum(errors) / len(errors))} off on average; without knowing "
        f"how tokens travel DeepEP's would be {units.share(sum(abs(point.error) for point in old) / len(old))} off"
    )
    widgets.chart(charts.predicted_measured(held_out, old, title), "trust")
    rows = [
        {
            "Predicted": row.of,
            "On": row.hardware,
            "Nodes": row.nodes,
            "Mean error": units.share(row.mean),
            "Worst": units.share(row.worst),
            "Points held out": row.points,
            "Points fitted": row.fitted,
        }
        for row in summaries(point for points in sections.values() for point in points)
    ]
    tables.show(pd.DataFrame(rows), hide_index=True)


@st.cache_resource(max_entries=1, show_spinner="Predicting what was measured")
def _sections() -> dict[str, list[Prediction]]:
    return {name: list(section()) for name, section in (SECTIONS | {TRAINING_STEPS: training_steps}).items()}


def take_measured() -> None:
    """Take the measured tables of a model and cluster just opened, and the way of travelling that they are of, and say so.

    They are given up where they have no times of what is opened next. A person's own choice stays, and so does a plan's.
    """
    cluster, model = state.session.cluster, state.session.model
    if cluster is None or model is None:
        return
    of = f"{cluster.digest} {model.name}"
    seen, taken = state.session.choices.get(TAKEN, (None, False))
    if seen == of:
        return
    now, found = state.session.cost, choice.measured(cluster, model)
    takes = found is not None and now == state.DATASHEET and state.session.travel is None and cached.open_plan() is None
    gives_up = taken and found is None and choice.why_not(choice.from_dict(now), cluster, model) is not None
    if takes:
        state.update(cost=choice.to_dict(found.cost), travel=found.travel)
        state.visit.notice = f"Times come from {found.words}. Cluster has other sources, Optimise other ways of travelling"
    elif gives_up:
        state.update(cost=state.DATASHEET, travel=None)
        state.visit.notice = f"{choice.short(now).capitalize()} has no times of {cluster.name}: the datasheet is used"
    state.keep_choice(TAKEN, (of, takes or (taken and not gives_up)))
