"""What stands on top of every page: what is open and ways to change it, the page's terms, who is looking, the guide's line."""

import streamlit as st

from app import cached, model_catalogue, plan_chooser, samples, state
from app.optimise import step as step_form
from app.serving import form as serving_form
from app.serving.model import routing_is_assumed
from app.text import plain
from app.visitor import glossary, people, tour
from engine import units
from engine.costs import choice
from engine.workload import RoutingTrace, TrafficMatrix


def show(title: str, question: str) -> None:
    """The strip, then what this page is for."""
    step_form.follow_model()
    serving_form.follow_model()
    _remember_model()
    _say_what_is_not_kept()
    strip()
    with st.container(horizontal=True, vertical_alignment="center"):
        st.header(title, anchor=False, width="content")
        st.caption(question, width="stretch")
        glossary.popover(title)
        people.show()
    tour.show(title)
    if text := state.take_notice():
        st.toast(plain(text))
    if text := state.take_left_out():
        st.toast(plain(text), icon=":material/warning:", duration="infinite")


def _say_what_is_not_kept() -> None:
    """What a person does here that a reload would not find again, and the ways out."""
    if state.is_overtaken():
        with st.container(horizontal=True, vertical_alignment="center", key="overtaken"):
            st.warning(
                "This session was changed in another tab. What is changed in this one is not kept until you choose.",
                icon=":material/tab:",
            )
            st.button("Open what the other tab has", icon=":material/sync:", on_click=state.open_newer)
            st.button("Keep what this tab has", icon=":material/save:", on_click=state.keep_older)
    elif reason := state.not_stored():
        with st.container(horizontal=True, vertical_alignment="center", key="not-stored"):
            st.error(f"What you change stays in this tab only: {plain(reason)}.", icon=":material/error:")
            st.button("Try again", icon=":material/sync:", on_click=state.store_again)


def _remember_model() -> None:
    """A recording that is open with a model that fits it counts as made with that model."""
    recording, model = cached.workload(), state.model()
    if recording is None or model is None:
        return
    fits = isinstance(recording, TrafficMatrix) or cached.model_fault(recording, model) is None
    if not fits:  # a traffic matrix fits every model
        return
    state.remember_model(state.workload_digest(), model)


def strip() -> None:
    """workload ▸ cluster ▸ model ▸ plan: what is open, each with its key figures and a way to change it."""
    places = st.columns(4, gap="small")
    with places[0]:
        _workload_popover()
    with places[1]:
        _cluster_popover()
    with places[2]:
        _model_popover()
    with places[3]:
        _plan_popover()


def _workload_popover() -> None:
    workload = cached.workload()
    step = state.step()
    assumed = routing_is_assumed()
    balanced = assumed or (step is not None and step.routing == "balanced")
    name = "Balanced routing" if balanced else plain(workload.name) if workload else "No workload"
    with st.popover(name, icon=":material/database:", width="stretch"):
        for digest, known in state.workloads().items():
            if st.button(plain(known), key=f"strip-workload-{digest}", disabled=digest == state.workload_digest()):
                state.choose_workload(digest)
                st.rerun()
        st.page_link("../pages/workload.py", label="Upload or pick a sample", icon=":material/upload:")
    if step:
        how = "assumed" if balanced else "routed as recorded"
        st.caption(f"training step: {step.batch:,} × {step.sequence_length:,} tokens on each GPU, {how}")
    elif assumed:
        st.caption("assumed: no recording of this model is open")
    elif workload:
        tokens = f"{workload.tokens:,} tokens × " if isinstance(workload, RoutingTrace) else ""
        beside = f" · beside {plain(state.workloads().get(state.second(), ''))}" if state.second() else ""
        st.caption(f"{tokens}{workload.layers} layers × {workload.num_experts} experts{beside}")


def _cluster_popover() -> None:
    cluster = state.cluster()
    with st.popover(plain(cluster.name) if cluster else "No cluster", icon=":material/dns:", width="stretch"):
        for name, preset in samples.clusters().items():
            if st.button(plain(name), key=f"strip-cluster-{name}", help=plain(preset.description)):
                state.open_cluster(preset.cluster)
                st.rerun()
        st.page_link("../pages/cluster.py", label="Describe your own, choose costs", icon=":material/edit:")
    if cluster:
        types = [gpu.type for gpu in cluster.gpus]
        gpus = " · ".join(f"{types.count(gpu_type)} × {plain(gpu_type)}" for gpu_type in dict.fromkeys(types))
        st.caption(f"{gpus} · costs: {plain(choice.short(state.cost()))}")


def _model_popover() -> None:
    model = state.model()
    with st.popover(plain(model.name) if model else "No model", icon=":material/account_tree:", width="stretch"):
        for name, preset in samples.models().items():
            if st.button(plain(name), key=f"strip-model-{name}"):
                state.open_model(preset.model)
                st.rerun()
        model_catalogue.search("strip")
        st.page_link("../pages/workload.py", label="Upload a config.json", icon=":material/upload:")
    if model:
        st.caption(
            f"d_model {model.d_model:,} · {model.experts} experts, top-{model.experts_per_token} · {model.dtype}"
        )


def _plan_popover() -> None:
    candidates = cached.candidates()
    plan = cached.open_plan()
    with st.popover(plain(plan.name) if plan else "No plan", icon=":material/route:", width="stretch"):
        plan_chooser.choose()
        st.page_link("../pages/optimise.py", label="Make a plan", icon=":material/play_arrow:")
    if plan and plan.claim:
        gap = units.share(candidates[plan.id].plan.claim.objective / plan.claim.bound - 1) if plan.claim.bound else "—"
        st.caption(
            f"{units.seconds(plan.claim.objective)} simulated · {gap} above its bound, by its optimiser's account"
        )
