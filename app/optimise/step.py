"""The form of a training step: its sizes, its operators, and its assumptions."""

from dataclasses import dataclass, replace
from typing import get_args

import streamlit as st

from app import cached, state, uploads, widgets
from app.tables import plain
from engine import formats, units
from engine.compare.sensitivity import operators_of
from engine.errors import InputError
from engine.overlap.operator_graph import OperatorGraph
from engine.problem import MEMORY_SHARE, Problem
from engine.simulate.training.pricing import route
from engine.simulate.training.step import step_state_bytes
from engine.systems import TRAINING, run
from engine.systems.pieces import linear_placement
from engine.training import Gate, TrainingStep, served_in_words, usual_step
from engine.workload import TrafficMatrix

MOST = {"batch": 1_000_000, "sequence_length": 10_000_000, "heads": 4096, "dense_d_ff": 1_000_000, "vocabulary": 10_000_000}


def open_step() -> None:
    """Plan for a training step: the one last described for the open model, or a usual one."""
    state.open_step(state.step_of_model() or usual_step(state.session.model, len(state.session.cluster.gpus)))


def follow_model() -> None:
    """A step and its operators belong to the model that they were described for; another model has its own."""
    if state.session.step is None or state.session.model is None or state.session.cluster is None:
        return
    if state.step_of_model() != state.session.step:
        open_step()
        state.open_graph(None)


def form() -> None:
    """Inputs for every part of the step. An impossible value is refused here, and the last valid step stays."""
    step, model = state.session.step, state.session.model
    inputs = _Inputs(step, {field: f"step-{field}-{model.digest[:12]}" for field in TrainingStep.model_fields})
    usual = usual_step(model, len(state.session.cluster.gpus))
    with st.container(border=True):
        values = inputs.batch_and_experts() | inputs.dense_layers()
        if step.model_copy(update={"routing": "balanced"}) != usual:
            st.button(
                f"Defaults for {plain(model.name)}", icon=":material/restart_alt:", on_click=_reset, args=(usual, inputs.keys)
            )
    try:
        wanted = TrainingStep.from_dict(values, "training step")
    except InputError as error:
        st.error(f"{plain(str(error))}. The last valid step stays.", icon=":material/error:")
        return
    if wanted != step:
        state.open_step(wanted)
        st.rerun()


@dataclass(frozen=True)
class _Inputs:
    """The inputs of a step, filled with its present values. keys: of the widgets, by field."""

    step: TrainingStep
    keys: dict[str, str]

    def _whole(self, label: str, field: str, help: str) -> int:
        now = getattr(self.step, field)
        return st.number_input(label, 1, MOST[field], now, key=self.keys[field], help=help, width=190)

    def batch_and_experts(self) -> dict[str, object]:
        """Number of a GPU's tokens and their choice of experts; values by field."""
        values: dict[str, object] = {}
        with st.container(horizontal=True, vertical_alignment="bottom"):
            values["batch"] = self._whole(
                "Batch per GPU, sequences",
                "batch",
                "Sequences that every GPU holds. Computation and all-to-alls grow with it, the all-reduce "
                "of the gradients does not.",
            )
            values["sequence_length"] = self._whole(
                "Sequence length, tokens", "sequence_length", "Tokens of a sequence. Attention grows with its square."
            )
            help = (
                "How tokens choose experts. Batch-prioritised needs the whole batch, so that nothing before the gate can "
                "be cut (Lancet §2.3)."
            )
            values["gate"] = st.selectbox(
                "Gate", get_args(Gate), get_args(Gate).index(self.step.gate), key=self.keys["gate"], width=190, help=help
            )
            values["capacity_factor"] = st.number_input(
                "Capacity factor",
                0.0,
                1000.0,
                self.step.capacity_factor,
                0.25,
                key=self.keys["capacity_factor"],
                width=150,
                help="An expert takes at most so many times its fair share of a GPU's tokens; the rest is dropped, and buffers "
                "are filled up to it. 0: as many as come, nothing dropped.",
            )
            values["routing"] = self._routing()
        return values

    def _routing(self) -> str:
        recording, options = cached.workload(), {"balanced": "balanced (assumed)"}
        # Only one that says how often this model's experts are chosen.
        known = recording is not None and not isinstance(recording, TrafficMatrix)
        if known and cached.model_fault(recording, state.session.model) is None:
            options["recorded"] = f"as in {recording.name}"
        at = list(options).index(self.step.routing) if self.step.routing in options else 0
        help = (
            "Balanced: every expert is chosen equally often, which a balance loss aims at. As recorded: by the shares "
            "of the open recording, scaled to the tokens of the step; offered when a routing log or expert loads of "
            "this model are open."
        )
        return st.selectbox(
            "Routing", list(options), at, options.get, key=f"{self.keys['routing']}-{len(options) > 1}", width=230, help=help
        )

    def dense_layers(self) -> dict[str, object]:
        """Layers around the experts; values by field."""
        values: dict[str, object] = {}
        with (
            st.expander("Dense layers, vocabulary", icon=":material/tune:"),
            st.container(horizontal=True, vertical_alignment="bottom"),
        ):
            values["heads"] = self._whole("Attention heads", "heads", "Heads of every layer; each has d_model / heads numbers.")
            values["dense_d_ff"] = self._whole("Dense d_ff", "dense_d_ff", "Inner width of the FFN of layers without experts.")
            text = "Rows of the embedding. Head and loss grow with it, and so does the largest all-reduce."
            values["vocabulary"] = self._whole("Vocabulary, tokens", "vocabulary", text)
            help = "Input and output embedding are one matrix, as in GPT-2: its gradient is reduced once."
            values["tied_embeddings"] = st.checkbox(
                "Tied embeddings", self.step.tied_embeddings, key=self.keys["tied_embeddings"], help=help
            )
        return values


def _reset(usual: TrainingStep, keys: dict[str, str]) -> None:
    state.open_step(usual)
    for key in [key for key in st.session_state if any(str(key).startswith(prefix) for prefix in keys.values())]:
        del st.session_state[key]


def summary(problem: Problem) -> None:
    """Totals of the step, and its operators as a file."""
    key = (problem.model.digest, problem.step.digest, len(problem.cluster.gpus), problem.graph and problem.graph.digest)
    graph, placement = _operators_of(key, problem), linear_placement(problem)
    sent = max((operator.sent for operator in graph.of_phase("forward") if operator.network), default=0.0)
    if problem.graph is None:
        sent = float(route(problem, placement, irregular=False).traffic.sum(axis=2).max())
    needed = step_state_bytes(problem, placement)
    shares = needed / problem.cluster.values("memory")
    count = f"{len(graph.operators):,} operator{'s' * (len(graph.operators) > 1)}"
    st.markdown(
        f"**{count}** · {problem.step.tokens:,} tokens on each GPU · {units.size(sent)} in each "
        f"GPU's buffer of an all-to-all, four of them per MoE layer · {units.size(needed.max())} of weights, gradients and "
        f"momentum on a GPU ({units.share(shares.max())} of its memory)"
    )
    if shares.max() > MEMORY_SHARE:
        st.warning(
            f"Weights, gradients and momentum alone take {units.share(shares.max())} of a GPU's memory: add GPUs or "
            "take larger ones. The times below assume that they fit.",
            icon=":material/memory:",
        )
    with st.expander("Operator graph", icon=":material/schema:"):
        file = _graph_panel(problem, graph)
    for complaint in uploads.complaints([file] if file else []):  # outside, to be seen even when the panel is closed
        st.error(plain(complaint), icon=":material/error:")


def _graph_panel(problem: Problem, graph: OperatorGraph) -> str | None:
    """Save, import and remove the operators; returns the id of the uploaded file."""
    if problem.graph is None:
        st.caption(
            "These are the operators of a transformer in GPT-2's layout, made from the model and the step. Import your "
            "own, with measured times where you have them."
        )
    else:
        st.markdown(
            f":material/schema: **{plain(graph.name)}** was imported and counts instead of a transformer's operators; "
            "batch, sequence length and sizes of dense layers above are not read from it."
        )
        if st.button("Remove the imported graph", icon=":material/close:"):
            state.open_graph(None)
            st.rerun()
    widgets.download(
        "Save the graph as JSON",
        lambda: graph.model_dump_json(indent=1, exclude_none=True),
        "operators.json",
        key="graph-download",
    )
    file = st.file_uploader("Import an operator graph (JSON)", type=["json"], key="graph-file")
    if file and uploads.first_time(file.file_id):
        try:
            imported = _read_graph(file.name, file.getvalue(), problem)
        except InputError as error:
            uploads.answer(file.file_id, str(error), refused=True)
        else:
            state.open_graph(imported)
            state.visit.notice = f"imported {imported.name}"
            st.rerun()
    return file.file_id if file else None


def _read_graph(name: str, content: bytes, problem: Problem) -> OperatorGraph:
    """The graph in a file, once a step of it could be simulated. Raises InputError."""
    with uploads.as_file(name, content) as path:
        graph = formats.read_document(OperatorGraph, path)
        run(TRAINING["deepspeed"], replace(problem, graph=graph))
    return graph


@st.cache_resource(max_entries=8, show_spinner=False)
def _operators_of(key: tuple, _problem: Problem) -> OperatorGraph:
    return operators_of(_problem)


def assumptions(problem: Problem) -> str:
    """Assumptions of the step's simulation, as sentences for a caption."""
    step = problem.step
    routing = "every expert is chosen equally often"
    if step.routing == "recorded":
        routing = f"experts are chosen as in {plain(problem.workload.name)}, scaled to the step"
        if served := served_in_words(step, problem.workload):
            routing += f"; {plain(served)}"
    if not step.capacity_factor:
        capacity = "nothing is dropped"
    else:
        capacity = (
            f"an expert takes at most {step.capacity_factor:g}× its fair share, and buffers are filled up to that unless a "
            "plan sends real tokens only"
        )
    return (
        "The whole step is simulated, one program on every GPU: forward, backward, all-reduces of the gradients, update. A "
        f"collective ends for all GPUs at once. Assumed: {routing}; {capacity}."
    )
