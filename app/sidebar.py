"""The sidebar of every page: links, open inputs with ways to change them, running jobs, the visitor, the page's terms."""

from typing import NamedTuple

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import cached, model_catalogue, plan_chooser, running, samples, state, widgets
from app.tables import plain
from app.visitor import glossary, people
from engine import units
from engine.costs import choice
from engine.errors import InputError
from engine.plan import Plan
from engine.workload import RoutingTrace


class Entry(NamedTuple):
    """A page: its title, its file in `pages/` without the ending, and its icon."""

    title: str
    file: str
    icon: str


SECTIONS = {
    "Inputs": (Entry("Workload", "workload", ":material/database:"), Entry("Cluster", "cluster", ":material/dns:")),
    "Understand": (
        Entry("Affinity", "affinity", ":material/hub:"),
        Entry("Timeline", "timeline", ":material/view_timeline:"),
        Entry("What-if", "what_if", ":material/experiment:"),
    ),
    "Plan": (Entry("Optimise", "optimise", ":material/tune:"), Entry("Papers", "papers", ":material/article:")),
    "Decide": (Entry("Review", "review", ":material/rate_review:"), Entry("Launch", "launch", ":material/rocket_launch:")),
}
LONGEST = 20
"""Characters of a name that take one line."""
OPERATE = Entry("Administration", "operate", ":material/monitor_heart:")


def links() -> None:
    """Links to the pages, by their purpose."""
    with st.sidebar, st.container(gap="xxsmall", key="pages"):
        for section, entries in SECTIONS.items():
            st.caption(section)
            for entry in entries:
                st.page_link(f"../pages/{entry.file}.py", label=entry.title, icon=entry.icon, width="stretch")


def show(title: str) -> None:
    """The sidebar under the list of pages. title: of the page with the terms to explain."""
    with st.sidebar:
        with st.container(gap="xsmall"):
            for part in (_workload, _cluster, _model, _plan):
                with st.container(gap=None):
                    part()
        running.show()
        with st.container(horizontal=True, gap="small"):
            glossary.popover(title)
            people.show()
        people.remember()


def _popover(name: str, icon: str, what: str, digest: str | None) -> DeltaGenerator:
    """An open input, by its name; pressed, its other figures and the ways to change it.

    Another digest makes another popover, so choosing closes it.
    """
    short = name if len(name) <= LONGEST else f"{name[: LONGEST - 1].rstrip(' ,')}…"
    help = plain(name) if short != name else None
    return st.popover(plain(short), help=help, icon=icon, type="tertiary", width="content", key=f"open-{what}-{digest}")


def _workload() -> None:
    workload = cached.workload()
    step = state.session.step
    assumed = cached.routing_is_assumed()
    balanced = assumed or (step is not None and step.routing == "balanced")
    name = "Balanced routing" if balanced else workload.name if workload else "No workload"
    figure, figures = "", ""
    if step:
        how = "assumed" if balanced else "routed as recorded"
        figure = f"{step.batch:,} × {step.sequence_length:,} tokens per GPU"
        figures = f"training step: {step.batch:,} × {step.sequence_length:,} tokens on each GPU, {how}"
    elif assumed:
        figure, figures = "assumed", "assumed: no recording of this model is open"
    elif workload:
        tokens = f"{workload.tokens:,} tokens × " if isinstance(workload, RoutingTrace) else ""
        beside = f" · beside {plain(state.session.workloads.get(state.session.second, ''))}" if state.session.second else ""
        figure = f"{workload.layers} layer{'s' * (workload.layers > 1)} × {workload.num_experts} experts{beside}"
        figures = f"{tokens}{figure}"
    with _popover(name, ":material/database:", "workload", state.session.workload):
        if figures:
            st.caption(figures)
        for digest, known in state.session.workloads.items():
            if st.button(plain(known), key=f"strip-workload-{digest}", disabled=digest == state.session.workload):
                state.change(workload=digest)
                st.rerun()
        st.page_link("../pages/workload.py", label="Upload or pick a sample", icon=":material/upload:")
    if figure:
        st.caption(figure)


def _cluster() -> None:
    cluster = state.session.cluster
    types = [gpu.type for gpu in cluster.gpus] if cluster else []
    counts = [f"{types.count(gpu_type)} × {plain(gpu_type)}" for gpu_type in dict.fromkeys(types)]
    with _popover(cluster.name if cluster else "No cluster", ":material/dns:", "cluster", cluster and cluster.digest):
        if cluster:
            st.caption(f"{' · '.join(counts)} · costs: {plain(choice.short(state.session.cost))}")
        for name, preset in samples.clusters().items():
            if st.button(plain(name), key=f"strip-cluster-{name}", help=plain(preset.description)):
                state.open_cluster(preset.cluster)
                st.rerun()
        st.page_link("../pages/cluster.py", label="Describe your own, choose costs", icon=":material/edit:")
    if cluster:
        st.caption(counts[0] if len(counts) == 1 else f"{len(types):,} GPUs of {len(counts)} types")


def _model() -> None:
    model = state.session.model
    with _popover(model.name if model else "No model", ":material/account_tree:", "model", model and model.digest):
        if model:
            st.caption(f"d_model {model.d_model:,} · {len(model.moe_layers)} MoE layers · {model.numbers_in_words}")
        for name, preset in samples.models().items():
            if st.button(plain(name), key=f"strip-model-{name}"):
                state.change(model=preset.model)
                st.rerun()
        model_catalogue.search("strip")
        st.page_link("../pages/workload.py", label="Upload a config.json", icon=":material/upload:")
    if model:
        st.caption(f"{model.experts} experts, top-{model.experts_per_token} · {model.numbers_in_words}")


def _plan() -> None:
    plan = cached.open_plan()
    figures = _headline(plan) if plan else ""
    with _popover(plan.name if plan else "No plan", ":material/route:", "plan", plan and plan.id):
        plan_chooser.choose()
        st.page_link("../pages/optimise.py", label="Make a plan", icon=":material/play_arrow:")
    if figures:
        st.caption(figures)


def _headline(plan: Plan) -> str:
    """Time and gain of the open plan for what is open, as every page has them; empty where that takes long or cannot be."""
    try:
        problem = cached.problem()
        if problem is None or widgets.why_not(plan, problem) or not cached.is_soon(plan, problem):
            return ""
        standing = cached.open_standing(plan, problem)
    except InputError:
        return ""
    gain = "deployed" if standing.is_deployed else f"{units.signed(standing.gain - 1)} {standing.scope}".rstrip()
    return f"{units.seconds(standing.seconds)} · {gain}"
