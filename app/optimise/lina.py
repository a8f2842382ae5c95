"""The panel of the Optimise page for Lina's two-phase scheduling."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import streamlit as st

from app import cached, kept, state, studies, tables, widgets
from app.charts import optimise as charts
from app.tables import plain
from engine import units
from engine.errors import InputError
from engine.jobs.scores import LinaAnswer, LinaRun
from engine.problem import Problem
from engine.simulate.scheduler import PAPER_CHECK, PAPER_SCHEDULE, PAPER_SLOTS, TwoPhaseOptions, device_slots, with_reaction
from engine.workload import RoutingTrace


def panel(problem: Problem) -> None:
    """Lina's two-phase scheduling, batch by batch."""
    st.caption(
        "Simulated batch by batch: what the scheduler predicts, how often it has to correct itself, and what that "
        "costs. Scheduling takes what it takes on this cluster unless you say otherwise (the paper's testbed: "
        f"{PAPER_SCHEDULE * 1e3:g} and {PAPER_CHECK * 1e3:g} ms)."
    )
    if not isinstance(problem.workload, RoutingTrace):
        st.info("Lina learns from the paths of tokens: open a routing log.", icon=":material/info:")
        return
    try:
        slots = device_slots(problem)
    except InputError as error:
        st.error(plain(str(error)), icon=":material/error:")
        return
    _form(problem, slots)
    studies.watch("lina", _show, "Nothing simulated yet: press Simulate.")
    with st.expander("Most popular experts of every layer", icon=":material/leaderboard:"):
        _most_popular(problem.workload.load)


def _form(problem: Problem, usual_slots: int) -> None:
    """Inputs of learning, serving and scheduling, and the start button. usual_slots: see `device_slots`."""
    default = with_reaction(problem, TwoPhaseOptions(max_experts_per_device=usual_slots))
    recordings = {
        digest: name
        for digest, name in state.session.workloads.items()
        if digest != state.session.workload and isinstance(cached.recording(digest), RoutingTrace)
    }
    with st.container(horizontal=True, vertical_alignment="bottom"):
        profile = kept.selectbox(
            "Learn from",
            [None, *recordings],
            width=260,
            key="lina-profile",
            format_func=lambda digest: "first half (serve the second)" if digest is None else recordings[digest],
        )
        lengths = kept.multiselect("Path lengths", [1, 2, 3, 4, 5, 6], [1, 3, 6], width=220, key="lina-lengths")
        batch = kept.number_input("Recorded tokens per batch", 16, 10**6, 1024, width=190, key="lina-batch")
        copies = kept.number_input("Tokens for each recorded one", 1.0, 1e6, 64.0, width=220, key="lina-copies")
    with st.container(horizontal=True, vertical_alignment="bottom"):
        priced = [round(seconds * 1e3, 3) for seconds in (default.schedule_seconds, default.check_seconds)]
        schedule = kept.number_input("Scheduling, ms", 0.0, 1e4, priced[0], format="%.3f", width=150, key="lina-scheduling")
        check = kept.number_input("Popularity check, ms", 0.0, 1e4, priced[1], format="%.3f", width=130, key="lina-check")
        help = "attention and the like, which also hides the first phase"
        other = kept.number_input("Rest of a layer, ms", 0.0, 1e4, 0.0, width=170, key="lina-rest", help=help)
        host = kept.number_input("Host link, GB/s", 0.1, 1e3, default.host_bandwidth / 1e9, width=150, key="lina-host-link")
        help = (
            f"of a layer, at most; 0: {usual_slots}, which is the paper's {PAPER_SLOTS} or twice an even share, as "
            "far as the memory holds them"
        )
        slots = kept.number_input("Experts per device", 0, 4096, 0, width=150, key="lina-slots", help=help)
        packing = kept.selectbox(
            "Hosting", ["lina", "best"], width=120, key="lina-hosting", help="the paper's packing, or the best there is"
        )
        if st.button("Simulate", icon=":material/play_arrow:", type="primary", disabled=not lengths):
            options = {
                "batch_tokens": batch,
                "copies": copies,
                "schedule_seconds": schedule / 1e3,
                "check_seconds": check / 1e3,
                "other_seconds": other / 1e3,
                "host_bandwidth": host * 1e9,
                "packing": packing,
                "max_experts_per_device": slots,
            }
            studies.start("lina", problem, {"profile": profile, "lengths": sorted(lengths), "options": options})


def _show(answer: LinaAnswer) -> None:
    """Times and accuracy of the batches simulated so far."""
    runs = answer.runs
    if not runs:
        return
    middle = runs[len(runs) // 2]
    what = kept.segments(
        "Times", charts.TIMES, charts.TIMES.get, default="inference", key="lina-times", label_visibility="collapsed"
    )
    left, right = st.columns(2)
    with left:
        widgets.chart(charts.lina(middle.figures, middle.options.path_length, what), "lina")
    with right:
        widgets.chart(charts.accuracy(runs), "lina-accuracy")
    tables.show(_as_text(runs, what), hide_index=True)
    widgets.caption_with_costs(
        f"Learnt from {plain(answer.profile)}, served {plain(answer.served)} in {middle.batches} batches. "
        f"An ideal batch takes {units.seconds(middle.ideal_seconds)}; scheduling one layer again takes "
        f"{units.seconds(middle.options.schedule_seconds)}, which a short layer cannot win back.",
        middle.cost_source,
    )


def _as_text(runs: Sequence[LinaRun], what: str) -> pd.DataFrame:
    """One row for each path length. what: a key of TIMES."""
    rows = [
        {
            "Path length": run.options.path_length,
            "Correct, any order": units.share(run.accuracy),
            "Correct, in order": units.share(run.accuracy_in_order),
            "Re-tuned": units.share(run.fine_tuning_rate),
            **{
                f"{title}, {end}": f"{getattr(run.figures[scheme], f'{key}_{what}'):.3g}×"
                for scheme, (title, _, _) in charts.SCHEMES.items()
                for key, end in (("median", "median"), ("tail", "95 %"))
            },
        }
        for run in runs
    ]
    return pd.DataFrame(rows)


def _most_popular(load: np.ndarray) -> None:
    """The first experts of every layer. load: float64[layer, expert]."""
    st.caption("As Lina's Table 2: who is popular changes from layer to layer, so hosting must be decided per layer.")
    order = np.argsort(-load, axis=1, kind="stable")[:, : min(4, load.shape[1])]
    part = np.take_along_axis(load / np.maximum(load.sum(axis=1, keepdims=True), 1), order, axis=1)
    tables.show(
        pd.DataFrame(
            [
                {"Layer": layer}
                | {
                    f"{turn + 1}.": f"expert {expert} · {units.share(popularity)}"
                    for turn, (expert, popularity) in enumerate(zip(experts, parts, strict=True))
                }
                for layer, (experts, parts) in enumerate(zip(order.tolist(), part.tolist(), strict=True))
            ]
        ),
        hide_index=True,
    )
