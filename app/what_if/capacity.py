"""The What-if page's search for the number of GPUs that a target time takes."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import pandas as pd
import streamlit as st

from app import cached, kept, state, studies, tables, widgets
from app.charts import what_if_studies as charts
from app.tables import plain
from app.what_if.live import outlooks_of, plan_to_study, run_button
from app.what_if.prices import Prices
from app.what_if.sizing import open_made
from engine import units
from engine.cluster import Cluster, Node
from engine.compare.capacity import CapacityPoint, grown, hardware, ladder, most_gpus, parts_of, smallest, why_slower
from engine.errors import InputError
from engine.goal import Goal
from engine.jobs.studies import CapacityAnswer
from engine.plan import Plan
from engine.problem import Problem
from engine.store.problems import problem_arguments
from engine.systems import SYSTEMS, systems_for
from engine.workload import RoutingTrace, TrafficMatrix

LEAST_TARGET, MOST_TARGET = 1e-3, 1e9
"""Milliseconds."""


def capacity(problem: Problem, priced: Prices) -> None:
    """Search the number of GPUs for a target time, and show the sizes tried. Raises InputError as `plan_to_study`."""
    if isinstance(problem.workload, TrafficMatrix):
        st.info(
            "A traffic matrix is between a fixed number of GPUs: open a routing log or expert loads.", icon=":material/info:"
        )
        return
    plan, is_open = plan_to_study(problem)
    now = outlooks_of(problem, [plan])[plan.id].total
    part = _form(problem, plan, f"{'The open plan' if is_open else 'What is deployed'} takes {units.seconds(now)}.", now)
    text = "Nothing run yet. Each size gets a plan of its own, within the time per plan."
    studies.watch_for_problem("capacity", problem, {}, partial(_show, problem, part, priced), text)


def _form(problem: Problem, plan: Plan, takes: str, now: float) -> str:
    """Target, part and system, and the button that starts the search; returns the part in words.

    takes: time of the plan, in a sentence
    now: that time in seconds
    """
    parts, systems = parts_of(problem.cluster), systems_for(problem)
    faults: list[str] = []
    with st.container(horizontal=True, vertical_alignment="bottom"):
        target = kept.limited(
            faults,
            "Target, ms",
            LEAST_TARGET,
            MOST_TARGET,
            float(f"{0.8e3 * now:.3g}"),
            format="%g",
            width=130,
            key=f"what-if-target-{plan.id[:8]}",
            help=f"Time of one pass through all MoE layers. {takes}",
        )
        help = "Every size is a cluster of so many of these, and of nothing else."
        part = kept.selectbox("Grows by", list(parts), len(parts) - 1, width=300, key="what-if-part", help=help)
        own = sum(len(node.gpus) for node in parts[part])
        usual = ", ".join(str(count * own) for count in ladder(problem.cluster, parts[part]))
        text = kept.text_input("Sizes, GPUs", usual, width=300, key=f"what-if-sizes-{own}-{len(problem.cluster.gpus)}")
        system = kept.selectbox("System", list(systems), 0, lambda name: systems[name].title, width=210, key="what-if-system")
        limit = kept.limited(faults, "Time per plan, s", 0.1, 600.0, 5.0, width=140, key="what-if-capacity-limit")
        spare = problem.goal is Goal.INFERENCE and kept.checkbox(
            "Spare slots too",
            True,
            key="what-if-spare",
            help="Also tries copies of popular experts: in slots that would stay empty, and in one more on every GPU. Three "
            "plans for each size instead of one.",
        )
        sizes = []
        try:
            sizes = sizes_of(text, own, most_gpus(problem.cluster))
        except InputError as error:
            faults.append(str(error))
        if run_button("Find the number of GPUs", "capacity", not faults):
            options = {"time_limit": limit} if "time_limit" in systems[system].options.model_fields else {}
            arguments = {
                "part": [node.model_dump(mode="json") for node in parts[part]],
                "title": part,
                "target": target / 1e3,
                "sizes": sizes,
                "system": system,
                "options": options,
                "spare": spare,
            }
            studies.start_and_rerun("capacity", problem, arguments)
    st.caption(plain(grows(problem.cluster, parts[part])))
    for fault in faults:
        st.error(tables.sentence(fault), icon=":material/error:")
    trace, most = problem.workload, max(sizes, default=0) * own
    if isinstance(trace, RoutingTrace) and trace.sources < most:
        kind = "source ranks" if trace.source_rank is not None else "sequences" if trace.sequence is not None else "tokens"
        st.caption(
            f"{plain(trace.name)} has {trace.sources:,} {kind}: on more than {trace.sources:,} GPUs some start with no "
            "tokens, which makes such sizes look worse than they are under full load."
        )
    return part


def grows(cluster: Cluster, part: Sequence[Node]) -> str:
    """Sentences on the clusters that are tried: their parts, and the nodes of the open cluster that are in none of them."""
    kinds = {(node.gpus, node.link_bandwidth, node.link_latency): node for node in cluster.nodes}
    for node in part:
        kinds.pop((node.gpus, node.link_bandwidth, node.link_latency), None)
    nodes = "a node" if len(part) == 1 else f"{len(part)} nodes"
    said = f"Every size is so many times {nodes} of {hardware(part)}, as in {cluster.name}"
    if not kinds:
        return f"{said}."
    return f"{said}; {units.in_a_row([hardware([node]) for node in kinds.values()])} of the open cluster are in none of them."


def sizes_of(text: str, own: int, most: int) -> list[int]:
    """Numbers of parts from numbers of GPUs such as `8, 16, 32-64`. Raises InputError for anything else.

    own: GPUs of a part; most: GPUs at most
    """
    found: set[int] = set()
    for word in re.split(r"[,;\s]+", text.strip()):
        if not (match := re.fullmatch(r"(\d{1,6})(?:[-–](\d{1,6}))?", word)):
            raise InputError(f"sizes: '{word[:40]}' is no number of GPUs; write such as {own}, {2 * own}, {3 * own}-{5 * own}")
        first, last = int(match[1]), int(match[2] or match[1])
        if not own <= first <= last <= max(own, most):
            raise InputError(f"sizes: {word} is not between {own} and {max(own, most)} GPUs")
        if match[2] is None and first % own:
            raise InputError(f"sizes: {first} GPUs are no whole number of parts of {own}; write {first - first % own}")
        found.update(range(-(-first // own), last // own + 1))
    return sorted(found)


def _show(problem: Problem, chosen: str, priced: Prices, answer: CapacityAnswer, complete: bool) -> None:
    """The sizes tried so far, of which each opens as a cluster. chosen: the part above, in words."""
    points = sorted(answer.points, key=lambda point: point.parts)
    nodes = parts_of(problem.cluster).get(answer.title)
    if not points:
        return
    if nodes is None:
        st.info(
            plain(f"The last search, built from {answer.title}, is an older version's. Run it again."), icon=":material/info:"
        )
        return
    if answer.title != chosen:
        st.info(plain(f"These sizes are built from {answer.title}. Run the search for {chosen}."), icon=":material/info:")
    target, prices = answer.target, {gpu.type: priced.of.get(gpu.type) for node in nodes for gpu in node.gpus}
    price, dark = _price(nodes, prices), st.context.theme.type == "dark"
    widgets.chart(charts.capacity(points, target, nodes, complete, price, dark), "what-if-capacity")
    st.caption(honestly(points, target, answer, complete))
    slower = {point.gpus: why_slower(point, points) for point in points}
    if said := [f"* **{gpus} GPUs**: {plain(why)}." for gpus, why in slower.items() if why]:
        st.markdown("\n".join(said))
    for sentence in _answers_of_other_parts(problem, answer, prices):
        st.markdown(plain(sentence))
    job = studies.newest("capacity").id
    key = f"capacity-table-{job}-{len(points)}"
    picked = st.session_state.get(key, {}).get("selection", {}).get("rows", [])
    tables.show(
        as_text(points, nodes, target, price, priced.currency),
        key=key,
        hide_index=True,
        on_select="rerun",
        selection_mode="single-row",
    )
    best = smallest(points, target) or min(points, key=lambda point: math.inf if point.total is None else point.total)
    row = points[picked[0]] if picked and picked[0] < len(points) else best
    with st.container(horizontal=True, vertical_alignment="center"):
        made = next((each.plan for each in answer.candidates if each.gpus == row.gpus), None)
        opens = f"Open the cluster of {row.gpus} GPUs{' and its plan' if made else ''}"
        if st.button(opens, icon=":material/dns:", key="what-if-grown"):
            if made:
                open_made(made, job, "starting anywhere")
            else:
                state.open_cluster(grown(problem.cluster, nodes, row.parts))
            st.rerun(scope="app")
        studies.download_table(to_download(points, answer, prices, price), "capacity")


def _price(part: Sequence[Node], prices: Mapping[str, float | None]) -> float | None:
    """The price of a part for an hour; None if the price of one of its GPUs is not known."""
    each = [prices.get(gpu.type) for node in part for gpu in node.gpus]
    return None if None in each else sum(each)


def _answers_of_other_parts(problem: Problem, answer: CapacityAnswer, prices: Mapping[str, float | None]) -> list[str]:
    """Results of earlier searches of this session for the same target with clusters of other parts.

    prices: of a GPU-hour by type
    """
    about, parts, sentences = problem_arguments(problem), parts_of(problem.cluster), {}
    for job in cached.jobs(state.study_jobs()):
        asked = job.request.arguments
        same = job.request.kind == "capacity" and {name: asked.get(name) for name in about} == about
        if not same or asked["target"] != answer.target or asked["title"] in (answer.title, *sentences):
            continue
        try:
            found = cached.result_of(job)
        except InputError:  # the answer is damaged
            continue
        fewest = None if found is None else smallest(found.points, asked["target"])
        if fewest is not None:
            price = _price(parts[asked["title"]], prices) if asked["title"] in parts else None
            cost = "" if price is None else f", cost {units.digits(price * fewest.parts)} per hour"
            sentences[asked["title"]] = (
                f"Earlier search, {asked['title']}: {fewest.gpus} GPUs meet this target ({units.seconds(fewest.total)}{cost})."
            )
    return list(sentences.values())


def honestly(points: list[CapacityPoint], target: float, answer: CapacityAnswer, complete: bool) -> str:
    """Sentences on the proven and the unproven part of the search."""
    system, fewest = SYSTEMS[answer.system].title, smallest(points, target)
    parts = [f"Built from {plain(answer.title)}, planned by {plain(system)}, simulated."]
    if fewest is not None:
        parts += _of_smaller(points, fewest, target, complete)
        parts += _of_larger(points, fewest, target, complete)
    elif complete:
        untried = ["Another model parallelism"] if answer.spare else ["Copies of experts", "another model parallelism"]
        parts.append(f"{', '.join(untried)} or other GPUs were not tried.")
    parts.append(f"The same tokens on every size. Costs: {plain(answer.cost_source)}.")
    return " ".join(parts)


def _of_smaller(points: list[CapacityPoint], fewest: CapacityPoint, target: float, complete: bool) -> list[str]:
    """A sentence on smaller sizes than the smallest found: if one of them could meet the target."""
    smaller = [point for point in points if point.gpus < fewest.gpus]
    undecided = [point for point in smaller if not point.cannot_meet(target)]
    tried, own, sentences = {point.parts for point in points}, fewest.gpus // fewest.parts, []
    untried = [parts * own for parts in range(1, fewest.parts) if parts not in tried]
    if undecided:
        *others, last = (str(point.gpus) for point in undecided)
        sizes = f"{', '.join(others)} or {last}" if others else last
        sentences.append(f"No plan found for {sizes} GPUs meets it; a better plan might.")
    elif smaller:
        sentences.append(
            f"No smaller size{' tried' if untried else ''} can meet it without replicas and with equal slots per GPU: its "
            "bound is above the target, or the experts do not fit."
        )
    if untried and complete:
        sentences.append(f"Smaller sizes that were not tried: {', '.join(map(str, untried))} GPUs.")
    return sentences


def _of_larger(points: list[CapacityPoint], fewest: CapacityPoint, target: float, complete: bool) -> list[str]:
    """A sentence on larger sizes than the smallest found: with more GPUs time need not fall."""
    larger = [point for point in points if point.gpus > fewest.gpus]
    again = [str(point.gpus) for point in larger if not point.meets(target)]
    if again:
        return [f"More is not always enough: with {', '.join(again)} GPUs the target is missed again."]
    if not complete:
        return []
    most = max(point.gpus for point in points)
    if larger:
        return [f"The larger sizes tried also meet it; beyond {most} GPUs nothing was tried."]
    return [f"Beyond {most} GPUs nothing was tried."]


BOUNDS = {"order": "Bound for this placement", "placement and order": "Bound for any placement"}
"""Titles of bounds by the scope of the claim: no send order of the placement found is faster, or no plan of any placement
without replicas and with equal slots per GPU."""


def as_text(
    points: list[CapacityPoint], part: Sequence[Node], target: float, price: float | None = None, currency: str = ""
) -> pd.DataFrame:
    """The sizes tried, as text with units. price: of a part for an hour"""
    factor, unit = units.scale_of(max([target, *(point.total or 0.0 for point in points)]), units.TIME)

    def figures(values: Iterable[float | None]) -> list[str]:
        return [tables.MISSING if value is None else units.digits(value / factor) for value in values]

    columns = {
        "GPUs": [str(point.gpus) for point in points],
        "Cluster": [hardware(part, point.parts) for point in points],
        f"Time, {unit}": figures(point.total for point in points),
        **{f"{title}, {unit}": figures(bounds) for title, bounds in _bounds(points).items()},
        **({} if price is None else {"Cost per hour": [f"{currency}{units.digits(price * point.parts)}" for point in points]}),
        "Result": [_outcome(point, target) for point in points],
    }
    if any(point.spare for point in points):
        columns["Spare slots"] = [str(point.spare) if point.spare else tables.MISSING for point in points]
    return pd.DataFrame(columns)


def to_download(
    points: list[CapacityPoint], answer: CapacityAnswer, prices: Mapping[str, float | None], price: float | None
) -> pd.DataFrame:
    """The sizes as numbers, with the question in each row. price: of a part for an hour; prices: of a GPU-hour by type."""

    def figures(values: Iterable[float | None]) -> list[float | None]:
        return [None if value is None else float(f"{1e3 * value:.6g}") for value in values]

    priced = {f"Price per {kind}-hour": each for kind, each in prices.items()}
    cost = {"Cost per hour": [float(f"{price * point.parts:.6g}") for point in points]} if price is not None else {}
    columns = {
        "Built from": answer.title,
        "System": SYSTEMS[answer.system].title,
        "GPUs": [point.gpus for point in points],
        "Target, ms": figures([answer.target] * len(points)),
        "Time, ms": figures(point.total for point in points),
        **{f"{title}, ms": figures(bounds) for title, bounds in _bounds(points).items()},
        **(priced | cost if cost else {}),
        "Result": [_outcome(point, answer.target) for point in points],
        "Spare slots": [point.spare for point in points],
        "Why it is slower": [why_slower(point, points) for point in points],
    }
    return pd.DataFrame(columns)


def _bounds(points: list[CapacityPoint]) -> dict[str, list[float | None]]:
    """Bounds in seconds by the scope's title; only of scopes that some size has a bound of."""
    return {
        title: [point.bound if point.scope == scope else None for point in points]
        for scope, title in BOUNDS.items()
        if any(point.scope == scope and point.bound is not None for point in points)
    }


def _outcome(point: CapacityPoint, target: float) -> str:
    """The outcome of a size against the target, as far as it is proven."""
    if point.total is None:
        return point.refused
    if point.meets(target):
        return "meets the target"
    if point.cannot_meet(target):
        return "cannot: the bound for any placement is above the target"
    return "misses the target; another placement might meet it"
