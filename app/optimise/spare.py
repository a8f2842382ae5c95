"""The worth of spare slots against their memory: the advisor, and its advice as an option of Replication (EPLB)."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
import streamlit as st

from app import kept, state, studies, tables, widgets
from app.charts import optimise as charts
from app.optimise import serving_page
from app.tables import plain
from engine import units
from engine.compare.judge import CONFIDENCE
from engine.compare.redundancy import Knee, RedundancyPoint
from engine.jobs.judgements import RedundancyAnswer
from engine.plan import redundant_experts
from engine.problem import Problem
from engine.systems import System
from engine.systems.options import Value

HALF = 132
"""Pixels of an input of which two stand in a row."""
KIND, SYSTEM, OPTION, COUNTED = "redundancy", "eplb", "redundant", "spare"


def key_of(system: str) -> str:
    """Key of a system's checkbox, which begins anew, ticked, when advice on it is taken."""
    taken = state.visit.advised_spare
    return system if taken is None or system != SYSTEM else f"{system}-advised-{taken[1]}"


def is_advised(system: str) -> bool:
    """True if the advice that was taken is for this system."""
    return system == SYSTEM and state.visit.advised_spare is not None


def default_of(system: str, option: str) -> tuple[str, Value | None]:
    """Key and default of an option's input: the advised number if that was taken; else None, for the option's own."""
    if not (is_advised(system) and option in (OPTION, COUNTED)):
        return system, None
    return key_of(system), state.visit.advised_spare[0] if option == OPTION else "per GPU"


def option_inputs(prefix: str, system: System, problem: Problem) -> dict[str, Value]:
    """The inputs of a system's options, and their values by name: a number of spare slots stands in a row with how it counts,
    and says so where engines do not take it."""
    values: dict[str, Value] = {}
    row = None
    for name in system.options.model_fields:
        key, default = default_of(system.name, name)
        if name == OPTION:
            row = st.container(horizontal=True, vertical_alignment="bottom", gap="small")
        in_row = row is not None and name in (OPTION, COUNTED)
        with row if in_row else contextlib.nullcontext():
            width = HALF if in_row else 180
            values[name] = kept.option_input(f"{prefix}-{key}", system.options, name, default, width)
        if name == COUNTED and values[name] == "in all":
            experts, gpus = problem.workload.num_experts, len(problem.cluster.gpus)
            spare = min(values[OPTION], experts * (gpus - 1))
            each, more = divmod(experts + spare, gpus)
            near = redundant_experts(experts, spare, gpus)
            if spare in near:
                st.caption(f"{each} slots of a layer on every GPU.")
            else:
                takes = " or ".join(f"{number:,}" for number in near)
                st.caption(f"{each + 1} slots of a layer on {more} GPUs, {each} on {gpus - more}: engines take {takes} in all.")
    return values


def panel(problem: Problem) -> None:
    """Gain against spare slots and memory, with the number that is advised."""
    st.caption(
        "Spare slots hold second copies of popular experts, and use memory that the KV cache could have. Planned with "
        "Replication (EPLB) on the open recording, for numbers of slots that engines accept, as many on every GPU, and for "
        "16 to 128 in all; judged on other recordings, or on its later half."
    )
    problem = replace(problem, in_use=None, others=())
    others = widgets.fitting_recordings(problem)
    others.pop(problem.workload.digest, None)
    chosen = []
    if others:
        placeholder = "The later half of the open recording"
        chosen = kept.multiselect(
            "Judged on", list(others), list(others), format_func=others.get, placeholder=placeholder, key="spare-judged-on"
        )
    wanted = {"recordings": [problem.workload.digest, *chosen], **serving_page.arguments(problem)}
    if st.button("Advise", icon=":material/memory:", disabled=studies.is_running(KIND)):
        studies.start_and_rerun(KIND, problem, wanted)
    studies.watch_for_problem(
        KIND,
        problem,
        {"serving": None} | wanted,
        lambda answer, complete: _show(problem, answer, complete),
        "No curve yet: press Advise.",
    )


def _show(problem: Problem, answer: RedundancyAnswer, complete: bool) -> None:
    points, advised = answer.points, answer.knee
    if not points:
        return
    if points[0].error is None:
        st.info("This curve is of an older version and has no intervals: press Advise again.", icon=":material/history:")
        return
    widgets.chart(charts.spare_slots(points, advised, answer.held_out), "spare-slots")
    if advised is not None:
        _advice(advised, points)
    elif complete:
        st.caption("Stopped before all numbers were tried, so none is advised.")
    tables.show(as_text(points), hide_index=True, alt="Gain, balance and memory by spare slots")
    where = f"judged on {' and '.join(map(plain, answer.judged_on))}"
    if not answer.held_out:
        where += ", which is in sample: open another recording of this model to hold it out"
    widgets.caption_with_costs(
        f"Planned on {plain(answer.planned_on)}, {where}. The curve ends there because {plain(answer.limit)}. "
        f"The band is the {units.share(CONFIDENCE)} interval of the gain, as far as those recordings are samples. Times are of "
        f"{plain(answer.unit)}.",
        answer.cost_source,
    )
    studies.download_table(pd.DataFrame([point.to_dict() for point in points]), KIND)


def _advice(advised: Knee, points: Sequence[RedundancyPoint]) -> None:
    slots_of_gpu = next(point.slots_of_gpu for point in points if point.slots == advised.slots)
    spare = slots_of_gpu - points[0].slots_of_gpu
    with st.container(horizontal=True, vertical_alignment="center"):
        number = f"{spare} spare slot{'s' * (spare > 1)} per GPU" if spare else "No spare slots"
        st.markdown(f"**{number}**: {advised.reason}.")
        if st.button("Use it", icon=":material/check:", help="sets the spare slots of Replication (EPLB) in the options above"):
            state.visit.advised_spare = spare, (state.visit.advised_spare or (0, 0))[1] + 1
            state.visit.notice = (
                f"Replication (EPLB) plans with {spare or 'no'} spare slot{'s' * (spare != 1)} per GPU: press Plan it."
            )
            st.rerun(scope="app")


def as_text(points: Sequence[RedundancyPoint]) -> pd.DataFrame:
    """One row for each number of slots."""
    columns = {
        "Spare in all": [f"{point.spare:,}" for point in points],
        "Per GPU": [charts.spare_per_gpu(point, points[0]) for point in points],
        "Slots per layer": [f"{point.slots:,}" for point in points],
        "Gain": [units.signed(point.gain) for point in points],
        f"{units.share(CONFIDENCE)} interval": ["", *(" to ".join(map(units.signed, point.interval)) for point in points[1:])],
        "Worst": [units.signed(point.gain_worst) for point in points],
        "Time": [units.seconds(point.seconds) for point in points],
        "Balancedness": [f"{point.balancedness:.3f}" for point in points],
        "As planned": [f"{point.planned_balancedness:.3f}" for point in points],
        "Memory of spare": [units.size(point.memory_bytes) for point in points],
        "Experts per GPU": [units.size(point.gpu_bytes) for point in points],
    }
    return pd.DataFrame(columns)
