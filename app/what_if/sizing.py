"""The What-if page's search for the cheapest clusters, with their plans, that meet a target."""

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pandas as pd
import streamlit as st

from app import cached, kept, state, studies, tables, widgets
from app.charts import sizing as charts
from app.optimise import serving_form
from app.tables import plain
from app.what_if.live import outlooks_of, plan_to_study, run_button
from app.what_if.prices import Prices
from engine import store, units
from engine.catalogue import node_types
from engine.cluster import Cluster, Node
from engine.errors import InputError
from engine.goal import Goal
from engine.jobs.runner import State
from engine.jobs.tasks import Excluded, SizeAnswer, SizeAsk, SizedPoint, SizedRow
from engine.plan import Plan
from engine.problem import Problem
from engine.serving.sizes import of_lengths
from engine.sizing.inputs import EXAMPLES, Catalogue, Counted, Target, in_words, read_target
from engine.sizing.search import proven
from engine.store.problems import as_json, problem_arguments
from engine.workload import TrafficMatrix

KIND, OFFERS = "size", "size-offers"
FRONT, MOST_FRONT, MOST_SEQUENCES = 5, 20, 100_000
UNTYPED, MOST_TYPES = (None, None), 12
RUNGS = {
    "memory": "experts and sequences do not fit its memory",
    "fluid": "all work over the speed of all GPUs",
    "experts by type": "experts divided among types of GPUs, rows between nodes",
}
"""Proofs in words."""

EACH = "For each further cluster the target is a fifth less than the time of the one before it."


def sizing(problem: Problem, priced: Prices) -> None:
    """Ask for a target and machines, and show the clusters that are found."""
    if problem.goal is not Goal.INFERENCE:
        st.info("Clusters are sized for one model: close the second one.", icon=":material/info:")
        return
    names = {problem.workload.digest: problem.workload.name, **widgets.fitting_recordings(problem)}
    names = {digest: name for digest, name in names.items() if not _is_matrix(digest, problem)}
    if not names:
        st.info("A traffic matrix is between its own GPUs: open a routing log or expert loads.", icon=":material/info:")
        return
    _form(problem, names, priced)
    job = studies.newest(KIND)
    about = problem_arguments(problem)
    if job is not None and (_asked(job.request.arguments) != _asked(about) or not _known(job.request.arguments, names)):
        text = "The last search is for another recording, model, cost source or travel: run it again for what is open."
        st.info(text, icon=":material/info:")
        return
    studies.watch(KIND, _show, "Nothing run yet. Type how many of each machine you can have.")


def _is_matrix(digest: str, problem: Problem) -> bool:
    recording = problem.workload if digest == problem.workload.digest else cached.recording(digest)
    return isinstance(recording, TrafficMatrix)


def _asked(arguments: dict[str, Any]) -> tuple:
    """All but the target that an answer depends on: the open cluster is no part of it."""
    travel = {name: value for name, value in (arguments.get("travel") or {}).items() if name != "ranks_per_node"}
    return arguments.get("model"), arguments.get("cost"), travel


def _known(arguments: dict[str, Any], names: dict[str, str]) -> bool:
    return set(arguments.get("recordings", ())) <= names.keys()


def _form(problem: Problem, names: dict[str, str], priced: Prices) -> None:
    """Target, recordings and machines, and the button that starts the search."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        target = kept.text_input("Target", _usual_target(problem), key="size-target", width=420, help=f"such as {EXAMPLES}")
        help = (
            "Every further one takes a fifth less time than the last one found. 1: the cheapest, for a price alone the fastest."
        )
        faults: list[str] = []
        front = kept.limited(faults, "Clusters", 1, MOST_FRONT, FRONT, width=120, key="size-front", help=help)
        chosen = list(names)
        if len(names) > 1 or problem.workload.digest not in names:
            usual = [digest for digest in (problem.workload.digest, *state.others()) if digest in names]
            help = "the slowest counts"
            chosen = kept.multiselect(
                "Recordings", names, usual or chosen[:1], names.get, width=380, key="size-recordings", help=help
            )
    own = _own_nodes(problem.cluster)
    offers = _table(problem.cluster, own, priced)
    wanted: dict[str, Any] = {}
    try:
        if faults:
            raise InputError(faults[0])
        wanted = _question(problem, target, int(front), chosen, _catalogue(offers, own, priced.currency))
    except InputError as error:
        st.error(tables.sentence(str(error)), icon=":material/error:")
    if run_button("Find the cheapest clusters", KIND, bool(wanted) and bool(wanted["catalogue"])):
        studies.start_and_rerun(KIND, problem, wanted)


def _usual_target(problem: Problem) -> str:
    """A fifth less than the open plan takes, or is deployed; where experts do not fit the open cluster, an example."""
    try:
        plan, _ = plan_to_study(problem)
        return f"{units.seconds(0.8 * outlooks_of(problem, [plan])[plan.id].total)} a pass"
    except InputError:
        return "50 ms a token"


Own = dict[str, tuple[Node, float | None]]
"""Nodes that are none of the catalogue's types, with the seconds that their fabric takes to start a transfer, by name."""


def _own_nodes(cluster: Cluster) -> Own:
    """One of each kind: those of the last search, and of the open cluster, by its name without its number."""
    job, own = studies.newest(KIND), Own()
    with suppress(InputError):
        earlier = () if job is None else SizeAsk.from_dict(job.request.arguments, "request").catalogue.nodes
        own = {offer.type: (offer.node, offer.latency) for offer in earlier if offer.node is not None}
    known = {
        _drawn(node) for node in (*(kind.node("node") for kind in node_types().values()), *(node for node, _ in own.values()))
    }
    for node in cluster.nodes:
        name = re.sub(r"[-_ ]?\d+$", "", node.name)[:40] or "node"
        if _drawn(node) not in known:
            known.add(_drawn(node))
            own[name if name not in (*own, *node_types()) else f"{name} {len(own) + 1}"] = node, cluster.latency
    return own


def _drawn(node: Node) -> str:
    """A node as it is apart from its name."""
    return node.digest_without("name")


Offers = dict[str, tuple[float | None, int | None]]
"""(price, how many can be had) by node type; None: not typed."""


def _table(cluster: Cluster, own: Own, priced: Prices) -> Offers:
    """The editable table of node types: those that can be had first, then those of the open cluster. Their prices are those of
    their GPUs until others are typed."""
    nodes = {name: node for name, (node, _) in own.items()} | {name: kind.node(name) for name, kind in node_types().items()}
    usual = {name: (priced.of_all([gpu.type for gpu in node.gpus]), None) for name, node in nodes.items()}
    known, left = state.visit.offers_base, _left()
    # The same object while it is edited: a data editor whose input changes drops edits.
    if known is None or known[0] != usual or state.visit.widget_key(OFFERS) not in st.session_state:
        state.visit.draw_anew([OFFERS])
        drawn = {_drawn(node) for node in cluster.nodes}
        ranked = sorted(nodes, key=lambda name: (left.get(name, UNTYPED)[1] is None, _drawn(nodes[name]) not in drawn))
        offers = {
            name: (usual[name][0] if left.get(name, UNTYPED)[0] is None else left[name][0], left.get(name, UNTYPED)[1])
            for name in ranked
        }
        known = state.visit.offers_base = usual, _base({name: nodes[name] for name in ranked}, offers)
    number = st.column_config.NumberColumn
    edited = st.data_editor(
        known[1],
        key=state.visit.widget_key(OFFERS),
        hide_index=True,
        disabled=["type", "gpus"],
        height=tables.low(len(nodes)),
        placeholder="—",
        column_config={
            "type": st.column_config.TextColumn("Machine"),
            "gpus": st.column_config.TextColumn("GPUs"),
            "price": number(
                "Price of one, an hour", min_value=0.0, max_value=1e9, format="%.4g", help="of its GPUs until typed"
            ),
            "most": number("How many at most", min_value=1, max_value=1000, step=1, format="%d", help="empty: not to be had"),
        },
    )
    offers = {
        row["type"]: (
            None if pd.isna(row["price"]) else float(row["price"]),
            None if pd.isna(row["most"]) else int(row["most"]),
        )
        for row in edited.to_dict("records")
    }
    same = {name: (None if price == usual[name][0] else price, most) for name, (price, most) in offers.items()}
    typed = {name: offer for name, offer in (left | same).items() if offer != UNTYPED}
    state.keep_choice(OFFERS, [value for name, offer in typed.items() for value in (name, *offer)])
    return offers


def _left() -> Offers:
    """The prices and numbers as they were left."""
    flat = state.session.choices.get(OFFERS)
    flat = flat if isinstance(flat, list) else []
    rows = zip(flat[::3], flat[1::3], flat[2::3], strict=False)
    return {
        str(name): (price, most)
        for name, price, most in rows
        if (price is None or (type(price) in (int, float) and 0 <= price <= 1e9))
        and (most is None or (type(most) is int and 1 <= most <= 1000))
    }


def _base(nodes: dict[str, Node], left: Offers) -> pd.DataFrame:
    rows = []
    for name, node in nodes.items():
        price, most = left.get(name, UNTYPED)
        gpus = in_words(Counter(gpu.type for gpu in node.gpus))
        rows.append({"type": name, "gpus": gpus, "price": price, "most": most})
    return pd.DataFrame(rows).astype({"price": "float64", "most": "Int64"})


def _catalogue(offers: Offers, own: Own, currency: str) -> Catalogue | None:
    """The machines that can be had; None: none yet. Raises InputError."""
    nodes: list[dict[str, Any]] = []
    there = {name: offer for name, offer in offers.items() if offer[1] is not None}
    if len(there) > MOST_TYPES:
        raise InputError(f"{len(there)} machines can be had; at most {MOST_TYPES} can be compared: empty some numbers")
    for name, (price, most) in there.items():
        if price is None:
            raise InputError(f"{name}: type its price, or those of its GPUs")
        node, latency = own.get(name, (None, None))
        nodes.append({"type": name, "price": price, "most": most, "node": node and as_json(node), "latency": latency})
    return Catalogue.from_dict({"nodes": nodes, "currency": currency}, "machines") if nodes else None


def _question(
    problem: Problem, target: str, front: int, recordings: Sequence[str], catalogue: Catalogue | None
) -> dict[str, Any]:
    """The arguments of the search, after a sentence on the step that counts. Raises InputError for those that cannot be."""
    wanted, step, config = read_target(target), state.serving(), None
    if not recordings:
        raise InputError("choose at least one recording")
    if step is not None and wanted.seconds is not None and step.phase != wanted.phase:
        step = None
    if step is not None:
        sequences = min(step.sequences * len(problem.cluster.gpus), MOST_SEQUENCES)
        step = step.model_copy(update={"sequences": sequences})
    if step is not None or wanted.sequences or wanted.phase == "prefill":
        config = cached.beside_experts(problem.model).config
        if step is None and config is not None and (wanted.sequences or wanted.phase == "prefill"):
            step = of_lengths(serving_form.open_step(), wanted.phase)
    arguments = {
        "recordings": list(recordings),
        "catalogue": None if catalogue is None else as_json(catalogue),
        "target": target,
        "front": front if front > 1 else None,
        "step": None if step is None else as_json(step),
        "config": None if config is None else str(config),
    }
    offered = arguments["catalogue"] or {"nodes": [{"type": next(iter(node_types())), "price": 0, "most": 1}]}
    asked = SizeAsk.from_dict({"model": as_json(problem.model), **arguments, "catalogue": offered}, "the question")
    counted = asked.counted()
    notes = "".join(f" Note: {note}." for note in counted.notes)
    st.caption(plain(f"The target is of {counted.unit}.{notes}"))
    return arguments


def _show(answer: SizeAnswer) -> None:
    """The front as a chart and a table of which each row can be opened, and the clusters that are not proven or left out."""
    job = studies.newest(KIND)
    ask = SizeAsk.from_dict(job.request.arguments, "request")
    target, catalogue = read_target(ask.target), ask.catalogue
    rows, undecided = answer.candidates, answer.undecided
    met = [row.point for row in rows]
    complete = job.state.finished
    if met or undecided:
        figure = charts.front(met, undecided, target, catalogue.money, complete, st.context.theme.type == "dark")
        widgets.chart(figure, "what-if-sizing")
    elif complete:
        st.info("No cluster was found that meets the target.", icon=":material/info:")
    notes = "".join(f" Note: {note}." for note in answer.notes)
    tokens = "Tokens start in equal shares, by the GPUs' ports or mostly on one node, as is fastest."
    dealt = "" if ask.counted().served else f" {tokens}"
    st.caption(plain(f"For {ask.target}. Times are of {answer.unit}, by {answer.cost_source}.{dealt}{notes}"))
    if rows:
        _table_of(rows, ask, job.id)
    how = proven(target, ask.front is not None, len(met), len(undecided), not complete or job.state is not State.DONE)
    if undecided:
        nearest = sorted(undecided, key=lambda point: point.objective or float("inf"))
        with st.expander(plain(how), icon=":material/help:"):
            if ask.front:
                st.caption(EACH)
            tables.show(as_text(nearest, catalogue), hide_index=True, height=tables.low(len(nearest)))
    elif how:
        st.markdown(tables.sentence(how))
    if answer.excluded:
        _exclusions(answer.excluded, target, ask.front is not None)


def _table_of(rows: Sequence[SizedRow], ask: SizeAsk, job: str) -> None:
    """The clusters that meet the target; the selected one, or the cheapest, can be opened with its plan."""
    key = f"size-table-{job}-{len(rows)}"
    picked = st.session_state.get(key, {}).get("selection", {}).get("rows", [])
    chosen = rows[picked[0]] if picked else rows[0]
    text = as_text([row.point for row in rows], ask.catalogue)
    tables.show(text, key=key, hide_index=True, on_select="rerun", selection_mode="single-row")
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button("Open cluster, plan and recording", icon=":material/dns:", key="size-open", disabled=_is_open(chosen)):
            _open(chosen, job, ask.counted())
            st.rerun(scope="app")
        how = "" if picked or len(rows) == 1 else ", the cheapest; select a row for another"
        st.caption(plain(f"{'Open now' if _is_open(chosen) else 'This one'}: {in_words(chosen.point.nodes)}{how}."))
        studies.download_table(to_download([row.point for row in rows]), KIND)


def _is_open(row: SizedRow) -> bool:
    inputs, cluster = row.plan.provenance.inputs, state.session.cluster
    fits = cluster is not None and (cluster.digest, state.session.workload) == (inputs["cluster"], inputs["workload"])
    return fits and state.session.plan == row.plan.id


def open_made(plan: Plan, job: str, dealt: str) -> tuple[Cluster, str]:
    """Open a plan that a job made, with its cluster and its recording; returns the cluster and the recording's own name.

    dealt: of a recording that was not open, how its tokens start, in words
    """
    inputs = plan.provenance.inputs
    cluster, recording = store.load_document(Cluster, inputs["cluster"]), store.load_workload(inputs["workload"])
    state.open_cluster(cluster)
    state.change(
        workloads={recording.digest: f"{recording.name}, {dealt}"[:200]} | state.session.workloads,
        model_of={**state.session.model_of, recording.digest: state.session.model},
        workload=recording.digest,
    )
    state.take_plan(plan.id, job)
    state.update(plan=plan.id)
    return cluster, recording.name


def _open(row: SizedRow, job: str, counted: Counted) -> None:
    """Open a cluster of the answer and, where all GPUs can have as many sequences, the step: on these it takes the time that
    the table says."""
    of = in_words(row.point.nodes)
    cluster, name = open_made(row.plan, job, f"dealt to {of}")
    said = f"opened {of}, its plan, and {name} with its tokens dealt as for it"
    if counted.served is not None:
        sequences, gpus = counted.served.sequences, len(cluster.gpus)
        if sequences % gpus:
            said += f"; {sequences:,} sequences are no whole number for each of {gpus} GPUs, so pages show the MoE layers alone"
        else:
            state.open_serving(counted.served.step.model_copy(update={"sequences": sequences // gpus}))
            state.update(plan=row.plan.id)
    state.visit.notice = said


def as_text(points: Sequence[SizedPoint], catalogue: Catalogue) -> pd.DataFrame:
    """Clusters as the command prints them."""
    planned = [point.objective for point in points]
    left = [None if point.objective is None else 1 - point.bound / point.objective for point in points]
    columns = {
        "Cluster": [in_words(point.nodes) for point in points],
        "An hour": [catalogue.money(point.price) for point in points],
        "Time": ["not planned" if value is None else units.seconds(value) for value in planned],
        "Bound": [units.seconds(point.bound) for point in points],
        "Left": [tables.MISSING if value is None else units.share(value) for value in left],
    }
    return pd.DataFrame(columns)


def to_download(points: Sequence[SizedPoint]) -> pd.DataFrame:
    """Clusters as numbers; seconds."""
    rows = [{"cluster": in_words(point.nodes), **point.model_dump(include={"price", "objective", "bound"})} for point in points]
    return pd.DataFrame(rows)


def _exclusions(excluded: Sequence[Excluded], target: Target, front: bool) -> None:
    """The clusters that proofs leave out, the nearest to the target first. front: True if one was asked for"""
    ranked = sorted(excluded, key=lambda each: float("inf") if each.seconds is None else each.seconds)
    table = {
        "Cluster, and all smaller ones": [in_words(each.nodes) for each in ranked],
        "Takes at least": [tables.MISSING if each.seconds is None else units.seconds(each.seconds) for each in ranked],
        "Proof": [RUNGS[each.rung] for each in ranked],
    }
    if target.seconds is not None:
        over = [0.0 if each.seconds is None else each.seconds / target.seconds - 1 for each in ranked]
        table["Above the target"] = [units.share(part) if part > 0 else tables.MISSING for part in over]
    if len({each.recording for each in ranked}) > 1:
        table["Recording"] = [each.recording for each in ranked]
    with st.expander(f"{len(ranked)} proof{'s leave' if len(ranked) > 1 else ' leaves'} out clusters", icon=":material/block:"):
        st.caption(f"A cluster is left out for every target below its time.{f' {EACH}' if front else ''}")
        tables.show(table, hide_index=True, height=tables.low(len(ranked)))
