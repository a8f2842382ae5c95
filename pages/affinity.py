"""The Affinity page: where do tokens go next?"""

import streamlit as st

from app import affinity, cached, failing, header, kept, layer_hops, state, widgets
from app.affinity import Hops
from app.charts import affinity as charts
from app.tables import plain
from engine import units
from engine.compare.affinity import kept_by_pair
from engine.workload import RoutingTrace, TrafficMatrix, digest_of

PACE = 1.5
"""Seconds between two steps of the play button."""
PATH_LAYERS = 4

actions = header.show("Affinity", "Where do tokens go next? What stays on its GPU from layer to layer needs no all-to-all.")
problem = widgets.needed_problem()
trace, digest = problem.workload, state.session.workload
if not isinstance(trace, RoutingTrace):
    kind = "traffic" if isinstance(trace, TrafficMatrix) else "loads"
    st.info(
        f"{plain(trace.name)} contains {kind} only, not the path of each token. Record a routing log, or open one of the "
        "samples of Alpha or Beta.",
        icon=":material/info:",
    )
    st.page_link("../pages/workload.py", label="Open a routing log", icon=":material/upload:")
    st.stop()
if trace.layers == 1:
    st.info(
        f"{plain(trace.name)} has a single MoE layer, so there are no hops between layers. Open a recording of several layers.",
        icon=":material/info:",
    )
    st.page_link("../pages/workload.py", label="Open another recording", icon=":material/upload:")
    st.stop()

# Text about the charts stands below them, to leave the room above to the choices.
choices, said, first_choice = st.container(horizontal=True), [], True
if trace.k > 1:
    by_id = layer_hops.sorted_choices(digest)
    with choices:
        default = "All choices" if by_id else "First choices"
        hops = kept.segments(
            "Hops", ["First choices", "All choices"], default=default, key="affinity-hops", label_visibility="collapsed"
        )
    said.append(
        "Hops lead from the first choice of a layer to that of the next, one per token, or from every choice to every choice, "
        "k × k pairs per token."
    )
    first_choice = hops == "First choices" if hops else not by_id
    if by_id:
        say = "All choices count because this" if not first_choice else "This"
        said.append(
            f"{say} recording lists a token's choices by expert id: the first is not the router's favourite but "
            "mostly a low id, which flatters contiguous blocks."
        )
unit = charts.TOKENS if first_choice else charts.PAIRS
counts = layer_hops.transitions(digest, first_choice)
hops_of_pair = counts.sum(axis=(1, 2))
if not hops_of_pair.any():
    st.info(
        f"No token of {plain(trace.name)} has choices in two consecutive layers: there are no hops to show.",
        icon=":material/info:",
    )
    st.stop()

plan = cached.open_plan()
placement, whose = widgets.placement_to_show(plan, problem)
if plan and (reason := widgets.why_not(plan, problem)):
    whose = f"a linear placement: {plain(reason)}"
share, gpu_of_expert = placement.share, placement.gpu_of_expert
figures = Hops(digest, first_choice, hops_of_pair, placement, problem.cluster, unit)

said.append(
    f"Grouped and scored under {whose}."
    + (
        ""
        if placement.single
        else " Experts with replicas are grouped by their first GPU; what stays is the expected share when each token takes "
        "any replica at random, so a dispatcher that prefers the one at hand keeps more."
    )
)
note = cached.candidates()[plan.id].notes.get("affinity") if plan and plan.placement is placement else None
if note:
    said.append(f"The optimiser of this plan noted: {plain(units.quantity(**note))}.")
with choices:
    values = kept.segments(
        "Values", ["Probability", "Counts"], default="Probability", key="affinity-values", label_visibility="collapsed"
    )
    order = kept.segments(
        "Order", ["Expert order", "Grouped by GPU"], default="Expert order", key="affinity-order", label_visibility="collapsed"
    )
with actions:
    playing = affinity.plays(trace.layers)


@failing.fragment(run_every=PACE if playing else None)
def pictures() -> None:
    """The heatmap of two layers, and on its right the figures and the strongest paths from the first of them on."""
    left, right = st.columns([11, 9], gap="medium")
    with left:
        low, high = affinity.choose(trace.layers, playing)
        pair = layer_hops.layer_pair(digest, (low, high), first_choice)
        grouped = order == "Grouped by GPU"
        stays = float(kept_by_pair(share[[low, high]], pair[None])[0]) if grouped else None
        groups = (gpu_of_expert[low], gpu_of_expert[high]) if grouped else None
        widgets.chart(
            lambda: charts.heatmap(pair, (low, high), values != "Counts", unit, groups, stays),
            "affinity-heatmap",
            digest_of(figures.made_from, f"{low}-{high} {values} {order}"),
        )
    with right:
        figures.show()
        first = min(low, max(0, trace.layers - PATH_LAYERS))
        span = slice(first, first + PATH_LAYERS)
        widgets.chart(
            lambda: charts.paths(counts[first : first + PATH_LAYERS - 1], first, gpu_of_expert[span], unit),
            "affinity-paths",
            digest_of(figures.made_from, str(first)),
        )
        st.caption("Teal stays on its GPU, grey leaves it. Every GPU has a colour of its own; a number is an expert.")


pictures()
for sentence in said:
    st.caption(sentence)
with kept.expander("How many tokens are enough, and does it hold elsewhere?", key="affinity-study"):
    affinity.panel(problem, first_choice)
