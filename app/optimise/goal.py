"""What a plan is for: one model or two, a training or a serving step; which recordings it must serve, what is deployed."""

import streamlit as st

from app import samples, state, widgets
from app.optimise import deployed, step
from app.serving import form as serving_form
from engine import formats
from engine.problem import Problem

ONE, TWO, STEP = "Inference latency of one model", "Two models on one cluster", "Training step"
SERVE = "Serving step"
GOALS = {
    ONE: "One model has the GPUs to itself: place its experts and order its all-to-alls.",
    TWO: "Two models share every GPU: while one computes, the other communicates (Aurora §6, §7).",
    STEP: "Forward, backward and update of one model: hide its all-to-alls and all-reduces under computation.",
    SERVE: "One decode or prefill step of a serving engine, attention and all: milliseconds per token and tokens/s per GPU.",
}


def choose() -> str:
    """The goal, one of GOALS. Changes what is open as the second model, as the training and as the serving step."""
    st.subheader("Goal", anchor=False)
    now = STEP if state.step() else TWO if state.second() or state.wants_two() else SERVE if state.serving() else ONE
    with st.container(gap="xsmall"):
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
    state.want_two(goal == TWO)
    if goal != TWO:
        state.open_second(None)
    if goal == STEP:
        step.open_step()
    else:
        state.open_step(None)
    if goal == SERVE:
        serving_form.open_serving()
    else:
        state.open_serving(None)


def _choose_second() -> None:
    """Which recording is the second model's: those of the session whose model is known, then the samples."""
    named = {digest: name for digest, name in state.workloads().items() if state.model_of(digest)}
    shipped = {sample.file: sample for sample in samples.RECORDINGS if sample.file.endswith(".npz")}
    options = [*named, *shipped]
    names = [f"{name} (open)" for name in named.values()] + [f"{sample.title} (sample)" for sample in shipped.values()]
    index = options.index(state.second()) if state.second() in options else None
    chosen = st.selectbox(
        "Second model's recording",
        options,
        index,
        lambda option: names[options.index(option)],
        placeholder="Choose the recording of the second model",
        width=420,
        key=f"second-{state.second()}",
        help="It needs as many MoE layers and experts as the first. An uploaded recording is listed once it has been "
        "open with its model.",
    )
    if chosen is None:
        st.info("Choose the recording of the second model.", icon=":material/info:")
        st.stop()
    if chosen == state.second():
        return
    if chosen in shipped:
        chosen = _open_sample(shipped[chosen])
    state.open_second(chosen)
    st.rerun()


def _open_sample(sample: samples.Sample) -> str:
    model = formats.read_model(samples.FOLDER / sample.model)
    workload = formats.read_workload(samples.FOLDER / sample.file, num_experts=model.experts)
    return state.add_recording(workload, model)


def choose_context(problem: Problem) -> None:
    """Further recordings that the plan must serve, and the placement in use."""
    fitting = widgets.fitting_recordings(problem)
    fitting.pop(state.workload_digest(), None)
    chosen = _choose_others(fitting)
    is_another = deployed.choose(problem)
    with st.expander("Plan file of what is deployed", icon=":material/upload_file:"):
        deployed.receive()
    if is_another or chosen != state.others():
        state.set_others(chosen)
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
