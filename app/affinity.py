"""The Affinity page: hops that stay on their GPU and node, the choice of two layers, and the two studies as a job."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import streamlit as st

from app import cached, failing, kept, layer_hops, samples, state, studies, widgets
from app.charts import affinity as charts
from engine import formats, units
from engine.cluster import Cluster
from engine.errors import InputError
from engine.jobs import runner
from engine.jobs.studies import AffinityAnswer
from engine.plan import Placement
from engine.problem import Problem
from engine.workload import RoutingTrace, digest_of


@dataclass(frozen=True, eq=False)
class Hops:
    """Figures of the hops. digest: of the open routing log; hops: float64[layer - 1], hops from each layer to the next, between
    first choices or all of them."""

    digest: str
    first_choice: bool
    hops: np.ndarray
    placement: Placement
    cluster: Cluster
    unit: str

    @property
    def made_from(self) -> str:
        """Digest of all that they depend on."""
        return digest_of(self.digest, str(self.first_choice), self.placement.digest, self.cluster.digest)

    def show(self) -> None:
        """All figures, by GPU and by node, and the chart of every layer pair."""
        gpus, nodes = len(self.cluster.gpus), len(self.cluster.nodes)
        covers = "proven limit for placements with equally many experts on every GPU and no replicas, from singular values"
        if not (self.placement.single and len(np.unique(self.placement.slots)) == 1):
            covers += "; the placement shown is not one of them"
        kept = layer_hops.kept_by_pair(self.digest, self.first_choice, self.placement, tuple(range(gpus)))
        limit, chance = self._limits(gpus), self._by_chance(np.arange(gpus))
        self._metrics("GPU", kept, limit, chance, covers)
        if gpus > nodes > 1:
            node_of_gpu = self.cluster.node_of_gpu
            stays = layer_hops.kept_by_pair(self.digest, self.first_choice, self.placement, tuple(node_of_gpu.tolist()))
            equal = len({len(node.gpus) for node in self.cluster.nodes}) == 1
            most = self._limits(nodes) if equal else None
            self._metrics("node", stays, most, self._by_chance(node_of_gpu), covers)
        whole = self._whole(chance)
        widgets.chart(lambda: charts.kept_by_pair(kept, limit, whole, self.unit), "affinity-kept", self.made_from)

    def _whole(self, by_pair: np.ndarray) -> float:
        """A share of every layer pair as one of all hops."""
        return float(np.nansum(by_pair * self.hops) / self.hops.sum())

    def _by_chance(self, group_of_gpu: np.ndarray) -> np.ndarray:
        """float64[layer - 1]: share that stays in its group (GPU or node) if any expert followed any other equally often."""
        part = self.placement.share.mean(axis=1) @ np.eye(len(self.cluster.gpus))[group_of_gpu]
        return (part[:-1] * part[1:]).sum(axis=1)

    def _limits(self, groups: int) -> np.ndarray | None:
        """float64[layer - 1]: no placement keeps a larger share in `groups` equal groups; None without such groups."""
        if self.placement.experts % groups:
            return None
        most = layer_hops.keep_limits(self.digest, self.first_choice, groups)
        return np.divide(most, self.hops, out=np.full(len(most), np.nan), where=self.hops > 0)

    def _metrics(self, what: str, kept: np.ndarray, limit: np.ndarray | None, chance: np.ndarray, covers: str) -> None:
        """Three figures in a row: the share that stays on a `what`, the most that could, and the share by chance.

        Each is as wide as its name, which has to be short: the row has less than 300 pixels in a window of 1024.
        """
        with st.container(horizontal=True, gap="xsmall"):
            about = f"share of hops that stay on their {what}, all layers"
            st.metric(f"On {what}", units.share(self._whole(kept)), width="content", help=about)
            if limit is not None:
                st.metric("Upper bound", units.share(self._whole(limit)), width="content", help=covers)
            by_chance = "if the next expert were chosen at random"
            st.metric("By chance", units.share(self._whole(chance)), width="content", help=by_chance)


PLAY, LAYERS = "affinity-play", "affinity-layers"


def plays(layers: int) -> bool:
    """The switch that steps through the layers, if there are more than two; True if it is on."""
    return layers > 2 and st.toggle("Play", key=PLAY, help="step through the layers")


def choose(layers: int, playing: bool) -> tuple[int, int]:
    """The two layers, first and second; one step further when playing."""
    last = layers - 1
    if last == 1:
        return 0, 1
    start, (low, high) = state.visit.layers_compared
    if high > last:
        start = low, high = 0, 1
    if playing:
        high = max(high, low + 1)
        low, high = (low + 1, high + 1) if high < last else (0, high - low)
        state.visit.layers_compared = ((low, high), (low, high))
        # No slider, which a busy browser may draw at its ends at first and then answer with those, as if a person had moved it.
        st.progress(high / last, f"Layers {low} and {high} of {layers}")
        return low, high
    if f"{LAYERS}-{start}" not in st.session_state:
        start = low, high
    shown = st.slider(
        "Layers compared", 0, last, start, key=f"{LAYERS}-{start}", help="any two: the first and the second layer"
    )
    state.visit.layers_compared = (start, shown)
    low, high = shown
    return (low, high) if low < high else (low, low + 1) if low < last else (low - 1, low)


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
    """Choose, run, watch and show the two studies: are the tokens enough, and does the plan hold on other recordings."""
    st.subheader("How many tokens are enough, and does it hold elsewhere?", anchor=False)
    gpus, experts = len(problem.cluster.gpus), problem.workload.num_experts
    st.caption(
        "Plans are made from one half of a recording and scored on the other: every second sequence is held out, or the later "
        "half of the tokens where no sequences are recorded. Samples take whole sequences in random order, the last one cut to "
        "size, or single tokens (ExFlow §V-G, §V-H). All hops cost the same; nodes are ignored."
    )
    if experts % gpus:
        st.info(
            f"The studies spread experts equally, but {experts} experts do not divide by {gpus} GPUs: open a cluster of "
            "another size.",
            icon=":material/info:",
        )
        return
    others = _other_recordings(problem)
    # A choice made for another recording or model may be no option now.
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
        st.button("Run the study", type="primary", icon=":material/play_arrow:", on_click=_start, args=(gpus, first_choice))
    job = studies.newest(KIND)
    if job is not None:
        _watch(job, {"workload": state.session.workload, "gpus": gpus, "first_choice": first_choice})
    else:
        st.caption("Nothing has run yet.")
    widgets.other_jobs(KIND, [state.session.study_jobs.get(KIND) or ""], lambda id: state.set_study_job(KIND, id))


def _other_recordings(problem: Problem) -> dict[str, str]:
    """Recordings that the model can also be scored on: names by digest, or by file for samples that are not open yet."""
    names = {}
    for digest, name in state.session.workloads.items():
        try:
            recording = cached.recording(digest)
            problem.model.check_recording(recording.layers, recording.num_experts, recording.k, recording.name)
        except InputError:
            continue
        if isinstance(recording, RoutingTrace) and digest != state.session.workload:
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
    """Start the study with these choices. A callback, so that chosen samples can stay chosen once they are open."""
    try:
        own = state.session.workload
        others = [digest for digest in dict.fromkeys(map(_digest, st.session_state[CHOSEN])) if digest != own]
        st.session_state[CHOSEN] = others
        arguments = {"workload": own, "others": others, "gpus": gpus, "first_choice": first_choice}
        state.set_study_job(KIND, widgets.start_job(KIND, arguments).id)
    except InputError as error:
        state.visit.notice = str(error)


def _watch(job: runner.Job, wanted: dict[str, Any]) -> None:
    """The job's row and its result so far, drawn again every second while it runs."""
    running = not job.state.finished

    @failing.fragment(run_every=1 if running else None)
    def newest() -> None:
        finished = job.state.finished
        widgets.job_row(job)
        about = {name: job.request.arguments.get(name) for name in wanted}
        if about != wanted:
            text = "This study is for another recording, number of GPUs or choice of hops: run it again for what is open."
            st.info(text, icon=":material/info:")
        else:
            with failing.saying():
                if answer := cached.result_of(job):
                    _show(answer, job.id)
        if running and finished:
            st.rerun()

    newest()


def _show(answer: AffinityAnswer, id: str) -> None:
    left, right = st.columns(2, gap="large")
    tokens, others = answer.tokens, answer.others
    if tokens:
        with left:
            widgets.chart(charts.tokens_enough(tokens), "tokens-enough")
            halves = "every second sequence" if tokens.unit == "sequences" else "the later half of the recording"
            st.caption(
                f"Planned from up to {tokens.tokens:,} tokens, scored on {tokens.held_out:,} others: {halves}. "
                "The share of hops that stay is counted, not timed."
            )
    if others:
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
            widgets.chart(charts.out_of_distribution(others, view, st.context.theme.type == "dark"), "out-of-distribution")
            st.caption(f"{VIEWS[view][1]} Every recording is scored on its held-out half.")
            if len(others.names) == 1:
                st.caption("Choose other recordings above to see whether the plan holds on them.")
    if tokens:
        widgets.download("Study as JSON", json.dumps(answer.model_dump(mode="json")), f"affinity-{id}.json")
