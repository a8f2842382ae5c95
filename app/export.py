"""Export of a plan: the files of engines and training frameworks with the flags to add and the parts left behind, a trace,
a table.

A plan that an engine refuses can be projected to an even one, at a price; a trace has the prediction and a measured run.
"""

import re
from dataclasses import dataclass

import streamlit as st

from app import cached, failing, kept, widgets
from app.launch import history, report
from app.launch.history import Launched
from app.tables import plain
from engine import units
from engine.compare.redundancy import EvenProjection, project_evenly
from engine.errors import InputError
from engine.formats.perfetto import write_trace
from engine.formats.placements import OF_TRAINING, TARGETS, Export, Target, write_placement
from engine.formats.placements.export import PROJECT
from engine.formats.placements.training_step import STEP_TARGETS, StepTarget, write_step
from engine.goal import Goal
from engine.jobs.runner import State
from engine.launch.preparation.launch import PLACES
from engine.model import MoEModel
from engine.plan import Plan
from engine.problem import Problem
from engine.training import TrainingStep

PERFETTO = "perfetto"
ENGINE_LINES = "Add to the engine's command line or configuration, with the path of the file:"


@dataclass(frozen=True)
class Taker:
    """A format of the export. target: of `write_placement`, or PERFETTO; suffix: of the file's name; about: its readers."""

    title: str
    target: Target | StepTarget | str
    suffix: str
    about: str

    def takes(self, plan: Plan) -> bool:
        """True if plans for this goal go there."""
        ours = (*OF_TRAINING, *STEP_TARGETS, PERFETTO) if plan.goal is Goal.TRAINING else (*TARGETS, PERFETTO)
        return self.target in ours


TAKERS = (
    Taker("SGLang, JSON", "sglang", ".json", "SGLang reads it at start-up; experts stay where the file has them."),
    Taker("SGLang, .pt", "sglang", ".pt", "The same map as SGLang saves its own, for tools that load tensors."),
    Taker("TensorRT-LLM", "trtllm", ".yaml", "A static load balancer that moe_config points to."),
    Taker("vLLM", "vllm", ".jsonl", "The initial mapping of vLLM's pull request #41141; releases without it read none."),
    Taker("vLLM-Ascend", "vllm-ascend", ".json", "For its first model runner only; the second (MRv2) refuses maps."),
    Taker("Megatron-Core, DeepSpeed", "megatron", ".json", "A permutation of experts to reorder a checkpoint by."),
    Taker("ExFlow", "exflow", ".csv", "The table that ExFlow's own code reads: one GPU for every expert."),
    Taker("Megatron-LM, flags", "megatron-step", ".txt", "The step's and the schedule's flags, one a line."),
    Taker("DeepSpeed, JSON", "deepspeed", ".json", "A configuration, with the arguments of its MoE layer."),
    Taker("Tutel, JSON", "tutel", ".json", "Every MoE layer's arguments, with its pipeline degree."),
    Taker("Table (CSV)", "csv", ".csv", "Every slot of every GPU in a row, for a spreadsheet or a script."),
    Taker("Perfetto", PERFETTO, ".json", "The timeline as a trace, for ui.perfetto.dev."),
)


def file_name(plan: Plan, taker: Taker) -> str:
    """A name that every file system takes, and that command lines need not quote."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", plan.name).strip("-").lower()[:60] or "plan"
    return f"{name}-{plan.id[:8]}-{taker.target}{taker.suffix}"


@cached.kept_with_refusal(
    32, "Writing the file and reading it back", cached.BY_NAME | {Taker: lambda taker: (taker.target, taker.suffix)}
)
def exported(plan: Plan, model: MoEModel, step: TrainingStep | None, taker: Taker, mtp: bool) -> Export:
    """The plan's placement for an engine, or its schedule for a framework. Raises InputError if that cannot load it."""
    if taker.target in STEP_TARGETS:
        return write_step(taker.target, plan, model, step, file_name(plan, taker))
    return write_placement(taker.target, plan, model, file_name(plan, taker), mtp)


def without_flags(text: str) -> str:
    """A sentence of the command line without the flags that it names: the page has widgets for them."""
    return re.sub(r" \(--[\w-]+\)", "", text)


@cached.kept_with_refusal(16, "Projecting the plan and simulating both", cached.BY_NAME)
def _projection(plan: Plan, problem: Problem) -> EvenProjection:
    return project_evenly(plan, problem)


def offer(plan: Plan, problem: Problem, refusal: str, key: str) -> Plan | None:
    """The projected plan if the refusal can be mended so and a person has asked for it."""
    if PROJECT not in refusal:
        return None
    asked = st.toggle(
        "Project it to an even plan",
        key=f"{key}-export-even-{plan.id[:16]}",
        help="The nearest plan with as many slots on every GPU in every layer and no expert twice on a GPU: another plan, "
        "whose price is shown.",
    )
    if asked:
        with failing.saying():
            projection = _projection(plan, problem)
            _price(projection, problem)
            return projection.plan
    return None


def _price(projection: EvenProjection, problem: Problem) -> None:
    before, after = projection.before, projection.after
    serving = cached.open_serving(problem)
    was, becomes = (cached.seconds_for(each, problem, serving) for each in (projection.given, projection.plan))
    change = f" ({units.signed(becomes / was - 1)})" if was else ""
    with st.container(horizontal=True, gap="medium"):
        for label, value, difference, help in (
            (
                f"Time per {'pass' if serving is None else 'step'}, simulated",
                units.seconds(becomes),
                f"{units.seconds(was)} before{change}",
                "before and after, with all sends at once as engines send them",
            ),
            (
                "Balancedness",
                f"{after.balancedness:.3f}",
                f"{before.balancedness:.3f} before",
                "mean over layers of mean / largest load of the GPUs; 1 is even",
            ),
            (
                "Slots on every GPU",
                str(projection.slots),
                f"{projection.added:,} copies new, {projection.dropped:,} given up",
                "of a layer; copies of experts over all layers",
            ),
        ):
            st.metric(label, value, difference, delta_color="off", delta_arrow="off", help=help)


def show_trace(plan: Plan, problem: Problem, taker: Taker, key: str) -> None:
    """The choice of a measured run if there is one, and the download."""
    runs = _runs(plan)
    chosen = None
    if runs:
        chosen = st.selectbox(
            "Measurement as a second group",
            [*range(len(runs)), None],
            format_func=lambda place: "none, the prediction for the cluster alone" if place is None else _title(runs[place][0]),
            key=f"{key}-export-run-{plan.id[:16]}",
            width=480,
            help="The prediction beside it is then the one for where it ran, not for the drawn cluster.",
        )
    else:
        st.caption("Once a launch of this plan has been measured, its measurement can go along as a second group.")
    widgets.download(
        f"Download {file_name(plan, taker)}",
        lambda: write_trace(*([cached.simulate(plan, problem)] if chosen is None else report.timelines(*runs[chosen]))),
        file_name(plan, taker),
        key=f"{key}-export-trace",
    )


def _title(launch: Launched) -> str:
    ranks = "" if launch.brief.ranks is None else f", {launch.brief.ranks} ranks"
    return f"{widgets.describe_time(launch.started)}, {PLACES[launch.brief.on]}{ranks}"


def _runs(plan: Plan) -> list[tuple[Launched, int]]:
    """Launches that measured the plan, newest first, each with its place among those that ran in turn."""
    runs = []
    for launch in history.launches():
        if launch.state is not State.DONE:
            continue
        try:
            answer = cached.result_of(launch.job)
        except InputError:
            continue
        measured = () if answer is None else answer.runs
        whole = [(place, run) for place, run in enumerate(measured) if run.predicted and run.measured]
        runs += [(launch, place) for place, run in whole if run.plan == plan.id]
    return runs


WIDTH = 320


def show(plan: Plan, problem: Problem, key: str) -> None:
    """Show the export of a plan in a box that a person opens. key: of the page."""
    training = plan.goal is Goal.TRAINING
    with st.expander(
        f"Export to a {'training framework' if training else 'serving engine'}",
        icon=":material/output:",
        on_change="rerun",
        key=f"{key}-export",
    ) as box:
        if not box.open:
            return
        with st.container(horizontal=True, vertical_alignment="bottom"):
            fixed = plan.travel is not None and plan.travel.replicas == "fixed"
            first = "megatron-step" if training else "vllm-ascend" if fixed else "sglang"
            takers = [taker for taker in TAKERS if taker.takes(plan)]
            usual = next(place for place, taker in enumerate(takers) if taker.target == first)
            label, name = ("Framework", "framework") if training else ("Engine", "engine")
            taker = kept.selectbox(label, takers, usual, lambda taker: taker.title, key=f"{key}-export-{name}", width=WIDTH)
            mtp = taker.target == "trtllm" and kept.checkbox(
                "With a layer for MTP",
                key=f"{key}-export-mtp",
                help="Multi-token prediction: with speculative decoding on, TensorRT-LLM asks for one layer more. It gets "
                "a copy of the last layer's placement, for want of a recording of it.",
            )
        st.caption(plain(taker.about))
        if taker.target == PERFETTO:
            show_trace(plan, problem, taker, key)
        else:
            _placement(plan, problem, taker, mtp, key)


def _placement(plan: Plan, problem: Problem, taker: Taker, mtp: bool, key: str) -> None:
    """The file, or why there is none and the way to mend it."""
    try:
        _file(plan, problem, taker, mtp, key)
    except InputError as error:
        st.error(plain(without_flags(str(error))), icon=":material/block:")
        if (projected := offer(plan, problem, str(error), key)) is None:
            return
        try:
            _file(projected, problem, taker, mtp, f"{key}-even")
        except InputError as other:
            st.error(plain(without_flags(str(other))), icon=":material/block:")


def _file(plan: Plan, problem: Problem, taker: Taker, mtp: bool, key: str) -> None:
    """The flags to add, the parts left behind, and the download. Raises InputError if the engine cannot load the plan."""
    export = exported(plan, problem.model, problem.step, taker, mtp)
    if export.lines:
        where = "Use the file, by its path:" if taker.target in STEP_TARGETS else ENGINE_LINES
        st.markdown(where)
        st.code("\n".join(export.lines), language=None, wrap_lines=True)
    if notes := [without_flags(note) for note in export.notes]:
        st.markdown("\n".join(f"- {plain(f'{note[:1].upper()}{note[1:]}.')}" for note in notes))
    ((name, content),) = export.files.items()
    widgets.download(f"Download {name}", content, name, key=f"{key}-export-file")
