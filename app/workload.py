"""The Workload page: checks and figures of the open recording, the guide to recording, the table of recordings, downloads, drop
zone and samples, and the welcome of a newcomer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import streamlit as st

from app import cached, failing, kept, model_catalogue, opening, own_model, samples, state, studies, tables, uploads, widgets
from app.charts import workload as charts
from app.launch import watch
from app.tables import plain, sentence
from app.visitor import sessions
from engine import store, units
from engine.compare.held_out import phase_of
from engine.compare.inspection import KINDS, Inspection, skew_of_layers
from engine.errors import InputError
from engine.formats.remedies import REMEDIES, Remedy, mend, what_was_done
from engine.formats.writers import WRITERS, Converted, Writer, write_recording
from engine.jobs.recordings import MOST_AT_ONCE, RecordAsk, handed_over
from engine.model import MoEModel
from engine.program import as_typed
from engine.recording import GUIDES
from engine.recording.estimate import estimate
from engine.recording.guide import EngineGuide, Way
from engine.recording.own_model import tokenised
from engine.systems import SYSTEMS
from engine.timeline import over_layers
from engine.workload import DECODE, Finding, RoutingTrace, Workload

LEVELS = {
    "ok": (st.success, ":material/check_circle:"),
    "warning": (st.warning, ":material/warning:"),
    "error": (st.error, ":material/error:"),
}


def show_checks(workload: Workload, findings: list[Finding]) -> None:
    """A sentence for each finding, the worst first, with a button for its remedy. Open if there is an error, else behind a
    button."""
    order = list(LEVELS)
    ranked = sorted(findings, key=lambda finding: -order.index(finding.severity))
    worst = ranked[0].severity
    title, icon = f"Checks: {worst}", LEVELS[worst][1]
    with st.expander(title, expanded=True, icon=icon) if has_error(findings) else st.popover(title, icon=icon):
        named = {finding.remedy for finding in ranked} & set(REMEDIES)  # a file of a newer version may name others
        if sum(REMEDIES[name].automatic for name in named) > 1:
            st.button("Fix all of it", icon=":material/healing:", on_click=_open, args=(mend, workload, findings))
        for finding in ranked:
            remedy = finding.remedy if finding.remedy in named else None
            named.discard(remedy)  # offered once
            _finding(workload, finding, remedy)


def has_error(findings: list[Finding]) -> bool:
    """True if the recording cannot be trusted as it is."""
    return any(finding.severity == "error" for finding in findings)


def _finding(workload: Workload, finding: Finding, remedy: str | None) -> None:
    show, icon = LEVELS[finding.severity]
    if remedy is None:
        show(plain(finding.message), icon=icon)
        return
    with st.container(horizontal=True, horizontal_alignment="right", vertical_alignment="center"):
        show(plain(finding.message), icon=icon)
        _button(workload, REMEDIES[remedy])


def _button(workload: Workload, remedy: Remedy) -> None:
    # The placement of the plan that counts as deployed, if it has as many layers as the recording.
    ran = cached.placement_in_use() if remedy.needs_placement else None
    ran = ran if ran is not None and ran.layers == workload.layers else None
    lacking = remedy.needs_placement and ran is None
    st.button(
        remedy.title(workload),
        key=f"remedy-{remedy.name}",
        icon=":material/healing:",
        disabled=lacking,
        help="Open the plan that ran: drop its file on this page." if lacking else None,
        on_click=_open,
        args=(remedy.apply, workload, *(() if ran is None else (ran,))),
    )


def _open(mending: Callable[..., Workload], *arguments: Any) -> None:
    """Open a mended recording before the page is drawn, so that all of it shows that one."""
    try:
        mended = mending(*arguments)
    except InputError as error:
        state.visit.notice = str(error)
        return
    state.open_workload(mended)
    state.visit.notice = f"{what_was_done(mended)[-1]} The recording as it was stays in the list of workloads."


def show_figures(inspection: Inspection) -> None:
    """One row, in a window of 1024 too: size, unevenness, and how surely one expert tells the next."""
    skew = inspection.balance.factors
    with st.container(horizontal=True, gap="xsmall"):
        st.metric("Recorded", inspection.title)
        if inspection.tokens is not None:
            st.metric("Tokens", f"{inspection.tokens:,}")
        st.metric("Layers × experts", f"{inspection.layers} × {inspection.experts}")
        help = (
            f"busiest expert / mean expert of a layer; over layers {units.ratio(skew['mean'])} on average, {over_layers(skew)}"
        )
        st.metric("Worst skew", units.ratio(skew["max"]), help=help)
        if inspection.layers > 1:
            st.metric(
                "Skew, p50 – p95",
                f"{units.ratio(skew['p50'])} – {units.ratio(skew['p95'])}",
                width="content",  # squeezed, it would be written smaller
                help=f"busiest expert / mean expert, median and 95th percentile of the layers; {over_layers(skew)}",
            )
        if inspection.predicted is not None and len(inspection.predicted):
            st.metric(
                "Predictability",
                units.share(float(inspection.predicted.mean())),
                help=f"how often the likeliest next expert is right, given the current one; by chance "
                f"{units.share(1 / inspection.experts)} (ExFlow §III)",
            )


@st.dialog("How to record", width="large")
def _guide() -> None:
    """The guide over the page: for each engine its recording, size and pitfalls."""
    guides = {guide.name: guide for guide in GUIDES}
    name = kept.segments("Engine", list(guides), default=GUIDES[0].name, required=True, key="record-engine")
    _engine(guides[name], state.session.model)


def _engine(guide: EngineGuide, model: MoEModel | None) -> None:
    st.markdown(guide.advice)
    ways = {way.key: way for way in guide.ways}
    key = next(iter(ways))
    if len(ways) > 1:
        key = kept.radio("Way", list(ways), format_func=lambda key: ways[key].title, key=f"record-way-{guide.name}")
    _way(ways[key], model)


def _way(way: Way, model: MoEModel | None) -> None:
    st.code(way.start, language="python" if way.start.startswith(("from ", "import ")) else "bash", wrap_lines=True)
    if way.then:
        st.caption("While it runs")
        st.code(way.then, language="bash", wrap_lines=True)
    if way.ours:
        st.caption("Or with Switchyard, once the server runs")
        st.code(as_typed(way.ours), language="bash", wrap_lines=True)
    st.markdown(f"**What comes out.** {way.gives}")
    _size(way, model)
    st.markdown("\n".join(f"* {trap}" for trap in way.traps))
    st.caption(f"Source: {way.source}.")


def _size(way: Way, model: MoEModel | None) -> None:
    st.markdown(f"**Size.** {way.size}")
    if model is None:
        st.caption("Open a model to see how many bytes that is.")
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        tokens = kept.number_input("Tokens", 1, 10**9, 100_000, step=10_000, key="record-tokens", width=160)
        passes = kept.number_input("Forward passes", 1, 10**8, 1000, step=100, key="record-passes", width=160)
        gpus = len(state.session.cluster.gpus) if state.session.cluster else 8
        ranks = kept.number_input("Ranks", 1, 4096, gpus, key="record-ranks", width=120)
    size = estimate(way.key, model, tokens, passes, ranks)
    st.markdown(f"About **{units.size(size.bytes)}** of {plain(model.name)}: {plain(size.sum)}.")


KIND, TAKEN = "record", "recording-taken"
"""Kind of the job that records a model here, and key of the choice that holds the newest one that was dealt with."""


def _record() -> None:
    """The form of a recording from a model in a folder."""
    with st.container(border=True, key="record-own"):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown("**Record from your model**", width="stretch")
            st.button("Close", icon=":material/close:", type="tertiary", on_click=state.visit.set, kwargs={"records": False})
        gpus = len(state.session.cluster.gpus) if state.session.cluster else None
        with st.container(horizontal=True):
            folder = own_model.choose_folder("record-model")
            if folder is None:
                return
            help = "generated of each text, greedily; the last one has no routing, for nothing is computed with it"
            new_tokens = kept.number_input("New tokens", 0, 100_000, 0, key="record-new", help=help, width=150)
            help = "in a batch; the recording is the same but for rounding"
            batch = kept.number_input("Texts at a time", 1, MOST_AT_ONCE, 8, key="record-batch", help=help, width=150)
            help = "the texts are dealt to so many ranks in turn, as a source of each token; empty: none is recorded"
            ranks = kept.number_input(
                "Source ranks", 1, 100_000, gpus, key=f"record-sources-{gpus}", help=help, placeholder="none", width=150
            )
        own_model.say_sizes(folder)
        given = own_model.ask_for_texts(folder, new_tokens, "record", tokenised)
        if given is not None:
            _say_size(given)
        with st.container(horizontal=True, vertical_alignment="center"):
            busy = given is None or studies.is_running(KIND)
            pressed = st.button("Record", type="primary", icon=":material/mic:", disabled=busy)
            st.caption("Texts are kept nowhere; the recording has ids of experts alone (docs/recording.md).", width="stretch")
        if pressed:
            with failing.saying(sentence):
                _start(given, new_tokens, batch, ranks)


def _say_size(given: own_model.OwnTexts) -> None:
    texts = given.texts
    tokens = f"{len(texts.ids):,} text{'s' * (len(texts.ids) != 1)}, {sum(map(len, texts.ids)):,} tokens"
    st.markdown(f"{tokens}: about **{units.size(texts.size.bytes)}** to record, {plain(texts.size.sum)}.")
    for note in texts.notes(given.folder):
        st.caption(f":material/info: {sentence(note)}")


def _start(given: own_model.OwnTexts, new_tokens: int, batch: int, ranks: int | None) -> None:
    """Start the job, and forget the texts. Raises InputError as `widgets.start_job`."""
    texts = given.texts
    ask = RecordAsk(
        folder=str(given.folder),
        name=f"{texts.model.name}, {given.title}"[:120],
        new_tokens=new_tokens,
        batch=batch,
        ranks=ranks,
        cut=texts.cut,
        empty=texts.empty,
    )
    state.set_study_job(KIND, widgets.start_job(KIND, ask.model_dump(), handed_over(texts)).id)
    state.visit.own_texts, state.visit.records = None, False
    st.rerun()


def open_recorded() -> None:
    """Open a recording from a model, and the model, once its job has ended, on whatever page the visitor was meanwhile."""
    job = studies.newest(KIND)
    if job is None or not job.state.finished or state.session.choices.get(TAKEN) == job.id:
        return
    with failing.saying(sentence):
        made = cached.result_of(job)
        if made is None or not store.has_workload(made.workload):
            return
        state.keep_choice(TAKEN, job.id)
        state.change(workloads={**state.session.workloads, made.workload: made.name}, workload=made.workload, model=made.model)
        state.remember_config(made.model, made.config)
        state.visit.notice = "; ".join(
            [f"{made.name}: {made.tokens:,} tokens of {made.recorded:,} of {made.texts:,} texts recorded and open", *made.notes]
        )


def show_recording() -> None:
    """The form, if it was asked for; the recording from a model that goes on; or why the last one came to nothing, until that
    is put away."""
    if state.visit.records:
        _record()
    job = studies.newest(KIND)
    if job is None or state.session.choices.get(TAKEN) == job.id:
        return
    running = not job.state.finished

    @failing.fragment(run_every=1 if running else None)
    def follow() -> None:
        widgets.job_row(job, watch.grace(job))
        if running and job.state.finished:
            st.rerun()

    follow()
    if not running:
        st.button("Put away", icon=":material/close:", on_click=state.keep_choice, args=(TAKEN, job.id))


MOST_ROWS, ROW_HEIGHT = 5, 35
NAME_WIDTH, CROSS_WIDTH = 230, 40
"""Pixels, as the heights: columns keep their place with every recording."""
OPEN, REMOVE = "recordings-open", "recordings-remove"


def show_recordings() -> None:
    """The table of recordings, if there are several."""
    digests = list(state.session.workloads)
    if len(digests) < 2:
        return
    st.subheader("Recordings of this session", anchor=False)
    rows = [_row(digest) for digest in digests]
    height = ROW_HEIGHT * (MOST_ROWS + 1) if len(rows) > MOST_ROWS else "auto"
    column_config = {
        "Open": st.column_config.ButtonColumn(
            "Recording", width=NAME_WIDTH, type="tertiary", alignment="left", on_click=_open_pressed, args=(digests,), key=OPEN
        ),
        "Remove": st.column_config.ButtonColumn(
            "",
            width=CROSS_WIDTH,
            type="tertiary",
            on_click=_remove,
            args=(digests,),
            key=REMOVE,
            help="Takes it out of the session",
        ),
    }
    tables.show(rows, hide_index=True, width="content", height=height, column_config=column_config)


def _row(digest: str) -> dict[str, str]:
    name, is_open = state.session.workloads[digest], digest == state.session.workload
    row = {"Open": f"{name} (open)" if is_open else name, "Remove": "✕"}
    try:
        return row | _figures(digest)
    except InputError:
        return row | {"Kind": "lost from the data folder"}


@st.cache_data(max_entries=512, show_spinner="Reading the recordings")
def _figures(digest: str) -> dict[str, str]:
    """A recording's figures in the table. Raises InputError if the data folder has lost it."""
    recording = cached.recording(digest)
    _, kind = KINDS[type(recording)]
    return {
        "Kind": kind,
        "Tokens": f"{recording.tokens:,}" if isinstance(recording, RoutingTrace) else tables.MISSING,
        "Layers × experts": f"{recording.layers} × {recording.num_experts}",
        "Worst skew": units.ratio(float(skew_of_layers(recording).max())),
        "Phase": _phase(recording),
    }


def _phase(recording: Workload) -> str:
    """Prefill, decode, or the share of decode tokens; without phases that of its name, by which plans are judged too, else a
    dash."""
    if not isinstance(recording, RoutingTrace) or recording.phase is None or not len(recording.phase):
        return phase_of(recording) or tables.MISSING
    decode = float((recording.phase == DECODE).mean())
    return {0.0: "prefill", 1.0: "decode"}.get(decode, f"{units.share(decode)} decode")


def _open_pressed(digests: list[str]) -> None:
    """Open the recording with the pressed name, and the model that it was made with if the open one does not fit."""
    digest = digests[st.session_state[OPEN].row]
    state.change(workload=digest)
    made_with, recording = state.session.model_of.get(digest), cached.workload()
    if made_with is None or recording is None or state.session.model is None:
        return
    if cached.model_fault(recording, state.session.model) is not None:
        state.change(model=made_with)


def _remove(digests: list[str]) -> None:
    digest = digests[st.session_state[REMOVE].row]
    name = state.session.workloads[digest]
    state.remove_workload(digest)
    state.visit.notice = f"{name} is no longer in this session"


def save_popover(workload: Workload) -> None:
    """A choice of formats with the parts that each leaves out, and the download."""
    writers = {name: writer for name, writer in WRITERS.items() if isinstance(workload, writer.carries)}
    with st.popover("Save as", icon=":material/download:"):
        name = kept.selectbox("Format", list(writers), format_func=lambda name: _title(writers[name]), key="save-recording-as")
        if not st.button("Write the file", icon=":material/description:"):
            return
        try:
            content, written = _written(workload, writers[name])
        except InputError as error:
            st.error(plain(str(error)), icon=":material/error:")
            return
        for lost in written.lost:
            st.caption(f"Left out: {plain(lost)}.")
        widgets.download(f"Download {written.path.name}", content, written.path.name)


def _title(writer: Writer) -> str:
    """The title of a format in the choice."""
    title = writer.title.removeprefix("a ")
    return f"{title[0].upper()}{title[1:]} ({writer.suffix})"


def _written(workload: Workload, writer: Writer) -> tuple[bytes, Converted]:
    stem = "".join(char if char.isalnum() or char in "-_. " else "_" for char in workload.name)[:80]
    with store.scratch() as folder:
        written = write_recording(workload, Path(folder) / f"{stem}{writer.suffix}", writer.name, state.session.model)
        return written.path.read_bytes(), written


ZONE = "recordings"


def show_sources() -> None:
    """Drop zone and samples: in full while nothing is open, or if all of an upload was refused.

    Else one line, and below it the answers to the last upload, which leaves the room to the charts.
    """
    known = len(state.session.workloads)
    told = uploads.shown_in(ZONE, [file.file_id for file in st.session_state.get(ZONE) or []])
    refused = bool(uploads.complaints(told)) and not uploads.answers(told)
    folded = state.session.workload is not None and not refused
    title = "Add a recording or open a sample" if known else "Open a recording or a sample"
    beside = f" · {known} in this session" if known > 1 else ""
    with st.expander(
        f"{title}{beside}",
        expanded=not folded,
        icon=":material/upload_file:",
        type="compact" if known else "default",
        key=f"sources-{told[-1] if told else ''}",  # another one after an upload: one that a person unfolded would stay so
    ):
        drop, gallery = st.columns([2, 3], gap="large")
        with drop:
            _drop(tells=not folded)
        with gallery:
            _samples()
    if folded:
        opening.tell(told)


def _drop(tells: bool) -> None:
    opening.show(
        ZONE,
        "Routing logs, expert loads, traffic matrices, a model's config.json",
        "Recordings of SGLang, vLLM, TensorRT-LLM and Megatron-Core, tables, NumPy files; several files of one recording, "
        "or an archive of them (docs/formats.md).",
        tells=tells,
    )
    st.caption("Up to 200 MB per file. For more, record fewer tokens, or save as .npz or Parquet, which are smaller.")
    with st.container(horizontal=True):
        if st.button("How to record", icon=":material/radio_button_checked:", help="Flags and calls of each engine"):
            _guide()
        help = "Runs texts through a model on this machine"
        st.button(
            "Record from your model", icon=":material/mic:", help=help, on_click=state.visit.set, kwargs={"records": True}
        )
    model_catalogue.search("workload")


def _samples() -> None:
    st.caption("Real routing of two small models, recorded on held-out text; see sample_traces/README.md.")
    with st.container(horizontal=True, gap="small"):
        for sample in samples.RECORDINGS:
            if st.button(sample.title, key=sample.file, help=sample.text):
                samples.open_recording(sample)
                st.rerun()
    st.caption("Production size, but synthetic: drawn from a power law with some affinity, not recorded from a model.")
    if st.button(
        "DeepSeek-R1 size (synthetic)", key="large", help="58 MoE layers × 256 experts, top-8, on four nodes of eight H100"
    ):
        with st.spinner("Drawing 4,096 tokens through 58 layers …"):
            samples.open_large()
        st.rerun()


def show_welcome() -> None:
    """The welcome, until an input is the visitor's own, or they have said that they bring one."""
    words, figure = st.columns([2, 3], gap="large", vertical_alignment="center")
    with words:
        st.header("Plan a Mixture-of-Experts model before you deploy it", anchor=False)
        st.write(
            "Switchyard decides which experts share a GPU, which of them get copies and in what order tokens are sent, for "
            "serving and for training. From your own routing logs, on your own cluster, with a proven bound beside each plan."
        )
        with st.container(horizontal=True):
            if st.button("Plan the sample", type="primary", icon=":material/play_arrow:"):
                samples.open_sample()
                state.visit.run = True
                st.switch_page("../pages/optimise.py")
            st.button("Upload mine", icon=":material/upload:", on_click=state.visit.set, kwargs={"brings_own": True})
            if st.button("Open the sample", type="tertiary", icon=":material/science:"):
                samples.open_sample()
                st.rerun()
        sessions.offer()
    with figure:
        gain = samples.gain()
        system = SYSTEMS[gain["system"]].title
        times = (gain["linear_seconds"], gain["seconds"], gain["bound"])
        widgets.chart(lambda: charts.gain(*times, system), "welcome-gain")
