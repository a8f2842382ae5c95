"""The What-if page's search for the number of GPUs that a target time takes."""

from collections import Counter
from functools import partial
from typing import Any

import pandas as pd
import streamlit as st

from app import cached, kept, state, tables, widgets
from app.charts import what_if_studies as charts
from app.text import plain
from app.what_if import jobs
from app.what_if.live import outlooks_of, plan_to_study
from engine import units
from engine.errors import InputError
from engine.plan import Plan
from engine.problem import Problem
from engine.store.problems import problem_arguments
from engine.studies.capacity import CapacityPoint, grown, ladder, most_gpus, parts_of, smallest
from engine.systems import SYSTEMS, systems_for
from engine.workload import RoutingTrace, TrafficMatrix


def capacity(problem: Problem) -> None:
    """How many GPUs for a target time."""
    st.caption(
        "Finds the smallest cluster of equal parts that meets a target time. Every size gets a plan of its own: first sizes "
        "around the open cluster, then all between the smallest that meets the target and the next one below it."
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
    nodes = parts_of(problem.cluster).get(result["title"])
    price = _price(Counter(gpu.type for node in nodes for gpu in node.gpus)) if nodes else None
    dark = st.context.theme.type == "dark"
    widgets.chart(charts.capacity(points, target, complete, price, dark), "what-if-capacity")
    st.caption(honestly(points, target, result, complete))
    for sentence in _answers_of_other_parts(problem, result):
        st.markdown(plain(sentence))
    tables.show(as_text(points, target, price), hide_index=True)
    fewest = smallest(points, target)
    with st.container(horizontal=True, vertical_alignment="center"):
        opens = f"Open the cluster of {fewest.gpus} GPUs" if fewest else ""
        if opens and nodes and st.button(opens, icon=":material/dns:", key="what-if-grown"):
            state.open_cluster(grown(problem.cluster, nodes, fewest.parts))
            st.rerun(scope="app")
        jobs.download(points, "capacity")


def _price(counts: Counter[str]) -> float | None:
    """What a part costs per hour, once a person has said what each GPU of it costs. counts: of its GPUs, by type."""
    with st.container(horizontal=True):
        prices = {
            kind: kept.number_input(
                f"Price per {plain(kind)}-hour",
                0.01,
                None,
                None,
                width=180,
                key=f"what-if-price-{kind}",
                placeholder="optional",
                help="What you pay for one GPU, in any currency. The chart then shows what each size costs per hour.",
            )
            for kind in counts
        }
    if None in prices.values():
        return None
    return sum(prices[kind] * count for kind, count in counts.items())


def _answers_of_other_parts(problem: Problem, result: dict[str, Any]) -> list[str]:
    """What earlier searches of this session found for the same target with clusters of other parts."""
    about, sentences = problem_arguments(problem), {}
    for job in cached.jobs(state.study_jobs()):
        asked = job.request.arguments
        same = job.request.kind == "capacity" and {name: asked.get(name) for name in about} == about
        if not same or asked["target"] != result["target"] or asked["title"] in (result["title"], *sentences):
            continue
        try:
            points = (cached.result_of(job) or {}).get("points", [])
        except InputError:  # it is damaged
            continue
        fewest = smallest([CapacityPoint.from_dict(point) for point in points], asked["target"])
        if fewest is not None:
            sentences[asked["title"]] = (
                f"Searched before, built from {asked['title']}: {fewest.gpus} GPUs meet the same target, with "
                f"{units.seconds(fewest.total)}."
            )
    return list(sentences.values())


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


def as_text(points: list[CapacityPoint], target: float, price: float | None = None) -> pd.DataFrame:
    """The sizes tried, as text with units. price: of a part for an hour"""
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
            **({} if price is None else {"Cost per hour": [units.digits(price * point.parts) for point in points]}),
            "": [state_of(point) for point in points],
        }
    )
