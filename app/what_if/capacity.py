"""The What-if page's search for the number of GPUs that a target time takes."""

from functools import partial
from typing import Any

import pandas as pd
import streamlit as st

from app import kept, state, tables, widgets
from app.charts import what_if_studies as charts
from app.text import plain
from app.what_if import jobs
from app.what_if.live import outlooks_of, plan_to_study
from engine import units
from engine.errors import InputError
from engine.plan import Plan
from engine.problem import Problem
from engine.studies.capacity import CapacityPoint, grown, ladder, most_gpus, parts_of, smallest
from engine.systems import SYSTEMS, systems_for
from engine.workload import RoutingTrace, TrafficMatrix


def capacity(problem: Problem) -> None:
    """How many GPUs for a target time."""
    st.caption(
        "The smallest cluster of equal parts whose plan meets a target time. Sizes around the open cluster are planned for "
        "from scratch, then all between the smallest that meets the target and the next below it."
    )
    if isinstance(problem.workload, TrafficMatrix):
        st.info(
            "A traffic matrix is between a fixed number of GPUs: open a routing log or expert loads.",
            icon=":material/info:",
        )
        return
    try:
        plan, _ = plan_to_study(problem)
        now = outlooks_of(problem, [plan])[plan.id].total
    except InputError as error:
        st.error(plain(str(error)), icon=":material/error:")
        return
    _form(problem, plan, now)
    jobs.watch(
        "capacity",
        problem,
        {},
        partial(_show, problem),
        "Nothing run yet. Each size gets a plan of its own, within the time per plan.",
    )


def _form(problem: Problem, plan: Plan, now: float) -> None:
    """Target, part and system, and the button that starts the search. now: seconds of the plan shown above."""
    parts, systems = parts_of(problem.cluster), systems_for(problem)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        target = kept.number_input(
            "Target, ms",
            0.0,
            None,
            float(f"{0.8e3 * now:.3g}"),
            format="%g",
            width=130,
            key=f"what-if-target-{plan.id[:8]}",
            help=f"of all MoE layers; the plan shown above takes {units.seconds(now)}",
        )
        part = kept.selectbox("Built from", list(parts), len(parts) - 1, width=300, key="what-if-part")
        own = sum(len(node.gpus) for node in parts[part])
        sizes = kept.multiselect(
            "Sizes, GPUs",
            range(1, max(1, most_gpus(problem.cluster) // own) + 1),
            ladder(problem.cluster, parts[part]),
            format_func=lambda count: str(count * own),
            width=440,
            key=f"what-if-sizes-{own}-{len(problem.cluster.gpus)}",
        )
        system = kept.selectbox(
            "System", list(systems), 0, lambda name: systems[name].title, width=210, key="what-if-system"
        )
        limit = kept.number_input("Time per plan, s", 0.1, 600.0, 5.0, width=140, key="what-if-capacity-limit")
        if st.button(
            "Find the number of GPUs",
            icon=":material/play_arrow:",
            type="primary",
            disabled=not target or not sizes or jobs.running("capacity"),
        ):
            options = {"time_limit": limit} if "time_limit" in systems[system].options.model_fields else {}
            jobs.run(
                "capacity",
                problem,
                {
                    "part": [node.model_dump(mode="json") for node in parts[part]],
                    "title": part,
                    "target": target / 1e3,
                    "sizes": sorted(sizes),
                    "system": system,
                    "options": options,
                },
            )
    trace, most = problem.workload, max(sizes, default=0) * own
    if isinstance(trace, RoutingTrace) and trace.sources < most:
        kind = (
            "source ranks" if trace.source_rank is not None else "sequences" if trace.sequence is not None else "tokens"
        )
        st.caption(
            f"{plain(trace.name)} has {trace.sources:,} {kind}: on more than {trace.sources:,} GPUs some start with no "
            "tokens, which makes such sizes look worse than they are under full load."
        )


def _show(problem: Problem, result: dict[str, Any], complete: bool) -> None:
    """The sizes tried so far, and the smallest that meets the target as a cluster to open."""
    points = sorted((CapacityPoint.from_dict(point) for point in result["points"]), key=lambda point: point.parts)
    if not points:
        return
    target = result["target"]
    price = kept.number_input(
        "Price per GPU-hour",
        0.01,
        None,
        None,
        width=180,
        key="what-if-price",
        placeholder="optional",
        help="what you pay for one GPU, in any currency; the chart then shows what an hour of each size costs",
    )
    dark = st.context.theme.type == "dark"
    widgets.chart(charts.capacity(points, target, complete, price, dark), "what-if-capacity")
    st.caption(honestly(points, target, result, complete))
    tables.show(as_text(points, target), hide_index=True)
    fewest = smallest(points, target)
    with st.container(horizontal=True, vertical_alignment="center"):
        if fewest and st.button(f"Open the cluster of {fewest.gpus} GPUs", icon=":material/dns:", key="what-if-grown"):
            nodes = parts_of(problem.cluster).get(result["title"])
            if nodes is not None:
                state.open_cluster(grown(problem.cluster, nodes, fewest.parts))
                st.rerun(scope="app")
        jobs.download(points, "capacity")


def honestly(points: list[CapacityPoint], target: float, result: dict[str, Any], complete: bool) -> str:
    """What the search has shown and what it has not."""
    fewest, parts = smallest(points, target), [f"Planned by {plain(SYSTEMS[result['system']].title)}, simulated."]
    smaller = [point for point in points if fewest is not None and point.gpus < fewest.gpus]
    untried = [] if fewest is None else _untried(points, fewest)
    if fewest is not None and smaller:
        undecided = [point.gpus for point in smaller if not point.cannot_meet(target)]
        tried = " that was tried" if untried else ""
        parts.append(
            f"No smaller size{tried} can, as long as GPUs hold as many experts each and none twice: its bound lies above the "
            "target or its experts do not fit."
            if not undecided
            else f"All smaller sizes{tried.replace('was', 'were')} miss it, but only by the plans found: at "
            f"{', '.join(map(str, undecided))} GPUs the bound leaves room for a better one."
        )
    if untried and complete:
        parts.append(f"Smaller sizes that were not tried: {', '.join(map(str, untried))} GPUs.")
    again = [
        point.gpus for point in points if fewest is not None and point.gpus > fewest.gpus and not point.meets(target)
    ]
    if again:
        parts.append(f"More is not always enough: with {', '.join(map(str, again))} GPUs the target is missed again.")
    elif fewest is not None and complete:
        parts.append("The sizes after it that were tried meet it too; larger ones were not tried.")
    if fewest is None and complete:
        parts.append("Replicas of experts, another model parallelism or other GPUs were not tried.")
    parts.append(f"The same tokens on every size. Costs: {plain(result['cost_source'])}.")
    return " ".join(parts)


def _untried(points: list[CapacityPoint], fewest: CapacityPoint) -> list[int]:
    """GPUs of the sizes below one that were not tried."""
    tried, own = {point.parts for point in points}, fewest.gpus // fewest.parts
    return [parts * own for parts in range(1, fewest.parts) if parts not in tried]


def as_text(points: list[CapacityPoint], target: float) -> pd.DataFrame:
    """The sizes tried, as text with units."""
    factor, unit = units.scale_of(max([target, *(point.total or 0.0 for point in points)]), units.TIME)

    def state_of(point: CapacityPoint) -> str:
        if point.total is None:
            return point.refused
        if point.meets(target):
            return "meets the target"
        return "cannot: its bound is above the target" if point.cannot_meet(target) else "misses the target"

    return pd.DataFrame(
        {
            "GPUs": [str(point.gpus) for point in points],
            f"Time, {unit}": ["—" if point.total is None else units.digits(point.total / factor) for point in points],
            f"Bound, {unit}": ["—" if point.bound is None else units.digits(point.bound / factor) for point in points],
            "": [state_of(point) for point in points],
        }
    )
