"""The goal of a plan on the Optimise page: models, steps, recordings, deployed plan and travel of tokens.

Also the likely time of a system before it runs, and a remark on send orders before anything is planned.
"""

from contextlib import suppress
from typing import Any, get_args

import streamlit as st

from app import cached, kept, samples, state, widgets
from app.optimise import deployed, serving_form, step
from app.tables import plain
from engine import formats, units
from engine.errors import InputError
from engine.jobs import runtimes
from engine.network import Network
from engine.plan import Travel
from engine.plan.send_order import Dtype, Replicas, TravelUnit
from engine.problem import Problem
from engine.systems import System

ONE, TWO, STEP = "Inference latency of one model", "Two models on one cluster", "Training step"
SERVE = "Serving step"
GOALS = {
    ONE: "One model has the GPUs to itself: place its experts and order its all-to-alls.",
    TWO: "Two models share every GPU: while one computes, the other communicates (Aurora §6, §7).",
    STEP: "Forward, backward and update of one model: hide its all-to-alls and all-reduces under computation.",
    SERVE: "One decode or prefill step of a serving engine, attention and all: milliseconds per token and tokens/s per GPU.",
}


def choose_goal() -> str:
    """The goal, one of GOALS. Changes the open second model, training step and serving step."""
    chosen = {STEP: state.session.step, TWO: state.session.second or state.visit.wants_two, SERVE: state.serving()}
    now = next((goal for goal, wanted in chosen.items() if wanted), ONE)
    with st.container(horizontal=True, gap="xsmall"):
        for goal, text in GOALS.items():
            st.button(
                goal,
                key=f"goal-{goal}",
                help=text,
                type="secondary" if goal == now else "tertiary",
                icon=":material/radio_button_checked:" if goal == now else ":material/radio_button_unchecked:",
                on_click=_open,
                args=(goal,),
            )
    if now == TWO:
        _choose_second()
    if now == STEP:
        step.form()
    if now == SERVE:
        serving_form.form()
    return now


def _open(goal: str) -> None:
    state.visit.wants_two = goal == TWO
    if goal != TWO:
        state.change(second=None)
    if goal == STEP:
        step.open_step()
    else:
        state.open_step(None)
    if goal == SERVE:
        serving_form.open_serving()
    else:
        state.open_serving(None)


def _choose_second() -> None:
    """The choice of the second model's recording: those of the session with a known model, then the samples."""
    named = {digest: name for digest, name in state.session.workloads.items() if state.session.model_of.get(digest)}
    shipped = {sample.file: sample for sample in samples.RECORDINGS if sample.file.endswith(".npz")}
    options = [*named, *shipped]
    names = [f"{name} (open)" for name in named.values()] + [f"{sample.title} (sample)" for sample in shipped.values()]
    index = options.index(state.session.second) if state.session.second in options else None
    chosen = st.selectbox(
        "Second model's recording",
        options,
        index,
        lambda option: names[options.index(option)],
        placeholder="Choose the recording of the second model",
        width=420,
        key=f"second-{state.session.second}",
        help="It needs as many MoE layers and experts as the first. An uploaded recording is listed once it has been "
        "open with its model.",
    )
    if chosen is None:
        st.info("Choose the recording of the second model.", icon=":material/info:")
        st.stop()
    if chosen == state.session.second:
        return
    if chosen in shipped:
        model = formats.read_model(samples.FOLDER / shipped[chosen].model)
        workload = formats.read_workload(samples.FOLDER / chosen, num_experts=model.experts)
        chosen = state.add_recording(workload, model)
    state.change(second=chosen)
    st.rerun()


def choose_context(problem: Problem) -> None:
    """Further recordings that the plan must serve, and the placement in use."""
    fitting = widgets.fitting_recordings(problem)
    fitting.pop(state.session.workload, None)
    chosen = _choose_others(fitting)
    is_another = deployed.choose(problem)
    deployed.receive()
    if is_another or chosen != state.others():
        state.update(others=chosen)
        st.rerun()


def _choose_others(fitting: dict[str, str]) -> list[str]:
    """Digests of the recordings that a plan must serve as well; fitting: the name of each that may be chosen."""
    if not fitting:
        st.caption(
            "Also plan for: no other recording. Open another one of this model on the Workload page, and a plan can "
            "be made for the worse of the two."
        )
        return []
    return st.multiselect(
        "Also plan for",
        list(fitting),
        [other for other in state.others() if other in fitting],
        format_func=lambda digest: fitting[digest],
        placeholder="Only the open recording",
        help="Replication and Balance and affinity count the worst of all these recordings, ExFlow and Lina give each the "
        "same weight; Aurora and the baselines plan for the open one alone. Open other recordings of the same model on "
        "the Workload page.",
    )


UNITS = {"copies": "One row per token copy", "gpu": "One row per GPU", "node": "One row per node"}
HELP = (
    "What an engine sends for a token. One row per token copy: each (token, expert) pair, as the papers have it and DeepEP's "
    "low-latency kernels do. One row per GPU: once to each GPU with one of its experts (NCCL paths). One row per node: once "
    "over the fabric to each node, and from there over the node's links (DeepEP's normal kernels). With the last two, experts "
    "that fire together belong together."
)


REPLICAS: dict[str, Replicas | None] = {
    "in turn": None,
    "nearest (SGLang with DeepEP)": "nearest-static",
    "nearest, dynamic (SGLang)": "nearest-dynamic",
    "linear programme (SGLang)": "lp",
    "fixed (vLLM-Ascend)": "fixed",
    "fewest": "fewest",
}
REPLICAS_HELP = (
    "Where an expert has copies. In turn: each serves as many tokens as the others, as in SGLang without an all-to-all "
    "backend, and in vLLM with hundreds of tokens on a rank (of fewer, its first copies serve more). Nearest: SGLang with "
    "DeepEP, its default: a rank has one copy, its own, else its node's first, else one that it drew; dynamic: all in turn "
    "instead; linear programme: those that leave the busiest GPU least to do. Fixed: vLLM-Ascend gives rank r copy r modulo "
    "the copies. Fewest: each token goes to the copies that touch fewest GPUs or nodes, which no engine is known to do. "
    "Replication plans for the rule."
)


ENGINES: dict[str, tuple[TravelUnit, Replicas | None]] = {
    "SGLang, DeepEP low latency (decode)": ("copies", "nearest-static"),
    "SGLang, DeepEP normal (prefill)": ("node", "nearest-static"),
    "vLLM, DeepEP low latency (decode)": ("copies", None),
    "vLLM, DeepEP high throughput (prefill)": ("node", None),
    "vLLM-Ascend": ("copies", "fixed"),
}
OTHER = "as chosen below"


def _as_engine(engine: str, problem: Problem) -> Travel:
    """Tokens of a model as an engine's defaults send them: rows in the model's format, of fp8 models bf16 back."""
    unit, replicas = ENGINES[engine]
    combine = "bf16" if problem.model.dtype == "fp8" else None
    return Travel(unit=unit, replicas=replicas, combine=combine)


def _choose_engine(problem: Problem, now: Travel) -> None:
    """The choice of an engine, which sets the controls below it."""
    engines = {engine: _as_engine(engine, problem) for engine in ENGINES}
    own = next((engine for engine, travel in engines.items() if travel == now), OTHER)
    titles = [OTHER, *ENGINES]
    chosen = st.selectbox(
        "Serving engine",
        titles,
        titles.index(own),
        width=320,
        key=f"travel-engine-{own}",
        help="Sets how tokens travel and which copy serves them as an engine does by default, for plans that it is to run.",
    )
    if chosen in (own, OTHER):
        return
    travel = engines[chosen]
    st.session_state[UNIT_KEY], st.session_state["travel-replicas"] = travel.unit, _way(travel)
    for side in ("dispatch", "combine"):
        st.session_state[f"travel-{side}"] = getattr(travel, side) or _own_format(problem)
    state.update(travel=None if travel == Travel() else travel)
    st.rerun()


def _own_format(problem: Problem) -> str:
    return f"same as the model ({problem.model.dtype})"


def _way(travel: Travel) -> str:
    return next(way for way, replicas in REPLICAS.items() if replicas == travel.replicas)


UNIT_KEY = "travel-unit"


def travel_inputs(problem: Problem) -> None:
    """Controls of `problem.travel`."""
    now = state.session.travel or Travel()
    _choose_engine(problem, now)
    unit = widgets.segments(
        "How tokens travel",
        list(UNITS),
        lambda unit: UNITS[unit].removeprefix("One row ").capitalize().replace("gpu", "GPU"),
        default=now.unit,
        help=HELP,
        key=UNIT_KEY,
    )
    formats: dict[str, Dtype | None] = {}
    own = _own_format(problem)
    for way, title in (("dispatch", "Dispatch format"), ("combine", "Combine format")):
        options = [own, *get_args(Dtype)]
        help = "DeepSeek's engines send fp8 out, with a scale for every 128 numbers, and bf16 back."
        dtype = st.selectbox(title, options, options.index(getattr(now, way) or own), width=240, key=f"travel-{way}", help=help)
        formats[way] = None if dtype == own else dtype
    if problem.model.dtype == "fp8" and formats["combine"] is None:
        st.caption(":material/info: DeepSeek's engines combine in bf16, twice as many bytes as counted here.")
    ways = [way for way, replicas in REPLICAS.items() if unit != "copies" or replicas != "fewest"]
    own_way = _way(now)
    place = ways.index(own_way) if own_way in ways else 0
    way = st.selectbox("Copies of an expert", ways, place, width=240, key="travel-replicas", help=REPLICAS_HELP)
    chosen = Travel(unit=unit, replicas=REPLICAS[way], **formats)
    if chosen != now:
        state.update(travel=None if chosen == Travel() else chosen)
        st.rerun()
    if problem.estimates_rows(chosen):
        st.caption(
            "This recording has no tokens: how many rows there are is an estimate, as if tokens chose their experts by "
            "popularity alone. Experts of real tokens fire together, which saves rows."
        )


def chosen_in_words(problem: Problem, systems: list[System]) -> str:
    """All that the folded choices say: systems, how tokens travel, and the deployed plan, for a caption."""
    parts = [", ".join(system.title for system in systems) or "no system is chosen"]
    if problem.step is None:
        travel = problem.travel or Travel()
        formats = " out, ".join(dict.fromkeys(getattr(travel, way) or problem.model.dtype for way in ("dispatch", "combine")))
        unit = UNITS[travel.unit].lower()
        parts.append(f"{unit}, {formats}{' back' * (' out' in formats)}")
    with suppress(InputError):
        parts.append(f"deployed: {cached.baseline(problem).plan.name}")
    return plain(" · ".join(parts))


LIMIT = "time_limit"


def likely_time(problem: Problem, system: System, key: str) -> str:
    """` · about 20 s` or ` · under 1 s`, with the time limit that is set on the page; empty for a system that was never
    measured.

    key: of its options, as `kept.option_input` takes it
    """
    options: dict[str, Any] = {}
    limit_key = kept.option_key(key, LIMIT)
    if (limit := st.session_state.get(state.visit.widget_key(limit_key), state.session.choices.get(limit_key))) is not None:
        options[LIMIT] = limit
    seconds = runtimes.estimate(problem, system, options)
    if seconds is None:
        return ""
    return f" · about {units.roughly(seconds)}" if seconds >= 1 else " · under 1 s"


def remark_on_orders(network: Network) -> str:
    """A sentence on ports that always reach their whole rate, with a space after it; else nothing."""
    if network.contended or network.gpus < 3:
        return ""
    relays = "" if network.direct else ", but for orders in which the GPUs of a node relay for each other"
    return (
        f"Sending everything at once is then nearly as fast as the best order{relays}. What-if shows how much contention "
        "makes ordering pay. "
    )
