"""Measuring the attached devices, and taking the times as costs."""

import streamlit as st

from app import cached, failing, kept, state, tables, widgets
from app.text import plain
from app.visitor import guard
from engine import catalogue, store, units
from engine.catalogue.nvidia import type_of
from engine.cluster import Cluster
from engine.costs import CostModel, Datasheet, Profiled, choice, combine
from engine.costs.device_profile import DeviceProfile
from engine.errors import InputError
from engine.jobs import runner
from engine.jobs.device_calibration import table_of
from engine.jobs.runner import Job, State
from engine.launch.calibration.calibrate import plan_sweep
from engine.launch.calibration.sweep import MAX_RANKS
from engine.launch.places.devices import Devices
from engine.model import MoEModel

KIND = "calibrate"


def show(cluster: Cluster, model: MoEModel | None) -> None:
    """Start a calibration, watch it, and use what it found."""
    with st.expander("Calibrate attached devices", icon=":material/speed:"):
        st.caption(
            "Measures GEMMs, passes over memory and, with two ranks or more, all-to-alls and all-reduces on the machine that "
            "the studio runs on, and checks the times on shapes that were left out."
        )
        _start(cached.attached())
        _watch()
        widgets.other_jobs(KIND, [state.study_job(KIND) or ""], lambda id: state.set_study_job(KIND, id))
        if (job := _job()) and job.state is State.DONE:
            with failing.saying():
                _show_result(job, cluster, model)


def _job() -> Job | None:
    """The newest calibration of this session, if the data folder still has it."""
    jobs = cached.jobs([id]) if (id := state.study_job(KIND)) else []
    return jobs[0] if jobs else None


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
        refused = guard.why_not(st.context, st.user)
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


@failing.fragment(run_every=1)
def _watch() -> None:
    """The newest calibration; once it has ended the page is drawn again, with what it found."""
    if job := _job():
        widgets.job_row(job)
        if state.newly_finished(job.id, job.state.finished):
            st.rerun()


def _show_result(job: Job, cluster: Cluster, model: MoEModel | None) -> None:
    result = job.result or {}
    profile = DeviceProfile.from_dict(result.get("calibration"), f"job {job.id}, calibration")
    rows = [{name.capitalize(): cell for name, cell in row.items()} for row in table_of(profile)]
    tables.show(rows, hide_index=True, key="calibration-fits")
    for held_out in result["held_out"]:
        st.markdown(
            f"{held_out['shapes']} held-out shapes, {held_out['dtype']} on {plain(held_out['gpu'])}: mean error "
            f"**{units.share(held_out['mean'])}**, worst {units.share(held_out['worst'])}."
        )
    st.caption(plain(result["origin"]))
    with st.container(horizontal=True):
        wanted = st.button("Use it", type="primary", icon=":material/check:", key="use-calibration")
        st.download_button(
            "Save as JSON",
            profile.to_json(),
            "profile.json",
            "application/json",
            icon=":material/download:",
            on_click="ignore",
            key="save-calibration",
        )
    if not wanted:
        return
    try:
        cost = usable(profile, cluster, model)
    except InputError as error:
        st.error(f"It cannot be used: {plain(str(error))}.", icon=":material/error:")
    else:
        state.add_cost_source(profile.measured.name, choice.to_dict(Profiled(profile.measured)))
        state.open_cost(choice.to_dict(cost))
        state.notice(f"times come from {choice.short(state.cost())}")
        st.rerun()


def usable(profile: DeviceProfile, cluster: Cluster, model: MoEModel | None) -> CostModel:
    """The profile as costs of the cluster; what it does not have of computation or network is the datasheet's. Raises
    InputError when it has neither."""
    measured = Profiled(profile.measured)
    lacks = [why for why in (measured.lacks_computation(cluster), measured.lacks_network(cluster)) if why]
    if len(lacks) == 2:
        raise InputError("; ".join(lacks))
    cost = combine({"calibration": measured, "datasheet": Datasheet()}, cluster) if lacks else measured
    if reason := choice.why_not(cost, cluster, model):
        raise InputError(reason)
    return cost
