"""The panel of the Affinity page that runs the two studies as a job: are the tokens enough, and does the plan hold."""

import json
from pathlib import Path
from typing import Any

import streamlit as st

from app import cached, failing, kept, samples, state, widgets
from app.charts import affinity_study as charts
from engine import formats
from engine.errors import InputError
from engine.jobs import runner
from engine.problem import Problem
from engine.studies.affinity import OutOfDistribution, TokensEnough
from engine.workload import RoutingTrace

KIND, CHOSEN = "affinity", "affinity-others"
VIEWS = {
    "share": ("Share kept", "The share of hops that stay on their GPU."),
    "own": (
        "Against its own plan",
        "Each column as a ratio to the plan made for that recording: what is lost by planning on another one.",
    ),
    "row": (
        "As in Table III",
        "Each row as a ratio to the recording that the plan was made for, which also shows that some "
        "recordings have more affinity than others.",
    ),
}


def panel(problem: Problem, first_choice: bool) -> None:
    """Choose, run, watch and show."""
    st.subheader("How many tokens are enough, and does it hold elsewhere?", anchor=False)
    gpus, experts = len(problem.cluster.gpus), problem.workload.num_experts
    st.caption(
        "Plans are made from one half of a recording and scored on the other: every second sequence is held out, or the "
        "later half of the tokens where no sequences are recorded. Samples take whole sequences in random order, the "
        "last one cut to size, or single tokens (ExFlow §V-G, §V-H). All hops cost the same; nodes are "
        "ignored."
    )
    if experts % gpus:
        st.info(
            f"The studies spread experts equally, but {experts} experts do not divide by {gpus} GPUs: open a cluster of "
            "another size.",
            icon=":material/info:",
        )
        return
    others = _other_recordings(problem)
    # What was chosen for another recording or model may be no option now.
    st.session_state[CHOSEN] = [key for key in st.session_state.get(CHOSEN, []) if key in others]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.multiselect(
            "Also score on",
            list(others),
            format_func=others.get,
            placeholder="Only the open recording",
            width=560,
            disabled=not others,
            key=CHOSEN,
            help="Recordings of this session that fit the model, and the samples of it.",
        )
        st.button(
            "Run the study", type="primary", icon=":material/play_arrow:", on_click=_start, args=(gpus, first_choice)
        )
    job = next(iter(cached.jobs([state.study_job(KIND)] if state.study_job(KIND) else [])), None)
    if job is not None:
        _watch(job, {"workload": state.workload_digest(), "gpus": gpus, "first_choice": first_choice})
    else:
        st.caption("Nothing has run yet.")
    widgets.other_jobs(KIND, [state.study_job(KIND) or ""], lambda id: state.set_study_job(KIND, id))


def _other_recordings(problem: Problem) -> dict[str, str]:
    """What else the model can be scored on: names by digest, or by file for samples that are not open yet."""
    names = {}
    for digest, name in state.workloads().items():
        try:
            recording = cached.recording(digest)
            problem.model.check_recording(recording.layers, recording.num_experts, recording.k, recording.name)
        except InputError:
            continue
        if isinstance(recording, RoutingTrace) and digest != state.workload_digest():
            names[digest] = name
    taken = {problem.workload.name, *names.values()}
    for sample in samples.RECORDINGS:
        fits = sample.file.endswith(".npz") and Path(sample.model).stem == problem.model.name
        if fits and Path(sample.file).stem not in taken:
            names[sample.file] = f"{sample.title} (sample)"
    return names


def _digest(chosen: str) -> str:
    """The digest of a chosen recording; a sample joins the session."""
    sample = next((sample for sample in samples.RECORDINGS if sample.file == chosen), None)
    if sample is None:
        return chosen
    model = formats.read_model(samples.FOLDER / sample.model)
    return state.add_recording(formats.read_workload(samples.FOLDER / sample.file, num_experts=model.experts), model)


def _start(gpus: int, first_choice: bool) -> None:
    """Start the study with what is chosen. A callback, so that chosen samples can stay chosen once they are open."""
    try:
        own = state.workload_digest()
        others = [digest for digest in dict.fromkeys(map(_digest, st.session_state[CHOSEN])) if digest != own]
        st.session_state[CHOSEN] = others
        arguments = {"workload": own, "others": others, "gpus": gpus, "first_choice": first_choice}
        state.set_study_job(KIND, widgets.start_job(KIND, arguments).id)
    except InputError as error:
        state.notice(str(error))


def _watch(job: runner.Job, wanted: dict[str, Any]) -> None:
    """The job's row and what it has found so far, drawn again every second while it runs."""
    running = not job.state.finished

    @failing.fragment(run_every=1 if running else None)
    def newest() -> None:
        finished = job.state.finished
        widgets.job_row(job)
        about = {name: job.request.arguments.get(name) for name in wanted}
        if about != wanted:
            st.info(
                "This study is for another recording, number of GPUs or choice of hops: run it again for what is open.",
                icon=":material/info:",
            )
        else:
            with failing.saying():
                if result := cached.result_of(job):
                    _show(result, job.id)
        if running and finished:
            st.rerun()

    newest()


def _show(result: dict[str, Any], id: str) -> None:
    left, right = st.columns(2, gap="large")
    if result["tokens"]:
        tokens = TokensEnough.from_dict(result["tokens"])
        with left:
            widgets.chart(charts.tokens_enough(tokens), "tokens-enough")
            halves = "every second sequence" if tokens.unit == "sequences" else "the later half of the recording"
            st.caption(
                f"Planned from up to {tokens.tokens:,} tokens, scored on {tokens.held_out:,} others: {halves}. "
                "The share of hops that stay is counted, not timed."
            )
    if result["others"]:
        others = OutOfDistribution.from_dict(result["others"])
        with right:
            view = "share"
            if len(others.names) > 1:
                view = (
                    kept.segments(
                        "Numbers",
                        list(VIEWS),
                        default="share",
                        format_func=lambda view: VIEWS[view][0],
                        key="affinity-numbers",
                        label_visibility="collapsed",
                    )
                    or "share"
                )
            widgets.chart(
                charts.out_of_distribution(others, view, st.context.theme.type == "dark"), "out-of-distribution"
            )
            st.caption(f"{VIEWS[view][1]} Every recording is scored on its held-out half.")
            if len(others.names) == 1:
                st.caption("Choose other recordings above to see whether the plan holds on them.")
    if result["tokens"]:
        st.download_button(
            "Study as JSON",
            json.dumps(result),
            f"affinity-{id}.json",
            "application/json",
            icon=":material/download:",
            on_click="ignore",
        )
