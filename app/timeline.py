"""The Timeline page: bottleneck, bounds, legend, single sends of a layer, serving and training steps, and colocated models."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import streamlit as st

from app import cached, failing, kept, state, tables, verdict_line, widgets
from app.cached import served, serving_of
from app.charts import cluster as utilisation_charts
from app.charts import gantt, theme
from app.charts import serving as serving_charts
from app.charts import step as step_charts
from app.charts.theme import KIND_TITLES
from app.optimise import serving_page, step
from app.tables import plain
from engine import units
from engine.compare.figures import Metrics
from engine.errors import InputError
from engine.formats.perfetto import write_trace
from engine.goal import Goal
from engine.model import MoEModel
from engine.plan import Plan
from engine.problem import Problem
from engine.result import NOT_BOUNDED, not_bounded
from engine.simulate.serving import ServedStep
from engine.timeline import Timeline
from engine.workload import digest_of

VIEW = "view"
"""Query parameter with the part of a timeline that is in sight, in seconds: an address leads to it."""
SHORTEST = 1e-3
"""Least part of the time that is in sight."""


CRITICAL = "Critical path", "The step that all GPUs wait for longest; pressed again, the next longest."
WAIT = "Longest wait", "The longest stretch in which the network is busy and nothing computes; pressed again, the next longest."
"""The button that leads to the parts that matter, and its help: of a pass or serving step, and of a training step."""


def choose_view(
    whole: float, steps: Sequence[tuple[float, float]], lead: tuple[str, str] = CRITICAL
) -> tuple[float, float] | None:
    """The buttons that move and zoom, and the seconds in sight; None: all of them.

    whole: seconds; steps: begin and end of each part that matters, the longest first; lead: the button that leads there
    """
    if not whole:
        return None
    view = _asked_view(whole) or (0.0, whole)
    low, high = view
    moved = (high - low) / 4
    turn = next((turn for turn, step in enumerate(steps) if np.allclose(_around(step, whole), view, rtol=1e-3)), -1) + 1
    with st.container(horizontal=True, gap="xsmall", vertical_alignment="center", key="gantt-view"):
        for label, icon, keys, to in (
            ("Earlier", "arrow_back", "Left", (low - moved, high - moved)),
            ("Later", "arrow_forward", "Right", (low + moved, high + moved)),
            ("Zoom in", "zoom_in", "Up", (low + moved, high - moved)),
            ("Zoom out", "zoom_out", "Down", (low - 2 * moved, high + 2 * moved)),
        ):
            st.button(label, icon=f":material/{icon}:", shortcut=f"Shift+{keys}", on_click=_look_at, args=(to, whole))
        if steps:
            step = steps[turn % len(steps)]
            label, help = lead
            st.button(label, icon=":material/route:", help=help, on_click=_look_at, args=(_around(step, whole), whole))
        st.button(
            "All", icon=":material/fit_width:", disabled=view == (0.0, whole), on_click=_look_at, args=((0, whole), whole)
        )
    return None if view == (0.0, whole) else view


def _around(step: tuple[float, float], whole: float) -> tuple[float, float]:
    """A step with a third of its length on both sides."""
    return _within((step[0] - (step[1] - step[0]) / 3, step[1] + (step[1] - step[0]) / 3), whole)


def _within(view: tuple[float, float], whole: float) -> tuple[float, float]:
    """A view of the same length within the time, or all of it."""
    middle, length = sum(view) / 2, min(max(view[1] - view[0], SHORTEST * whole), whole)
    low = min(max(middle - length / 2, 0.0), whole - length)
    return low, low + length


def _look_at(view: tuple[float, float], whole: float) -> None:
    low, high = _within(view, whole)
    if (low, high) == (0.0, whole):
        st.query_params.pop(VIEW, None)
    else:
        st.query_params[VIEW] = f"{low:.6g}~{high:.6g}"


def _asked_view(whole: float) -> tuple[float, float] | None:
    """The part that the address asks for; None if it names none of this timeline."""
    try:
        low, high = map(float, st.query_params.get(VIEW, "").split("~"))
    except ValueError:
        return None
    return _within((low, high), whole) if 0 <= low < high <= whole * (1 + SHORTEST) else None


def show_bottleneck(plan: Plan, problem: Problem, gpus: Sequence[str]) -> None:
    """Charts of the waits, by GPU and by layer; nothing for a plan that takes no time. gpus: their names."""
    st.caption(
        "Every step of a layer ends with its slowest GPU; this is the time of the whole open plan by the GPU that the others "
        "wait for, and by layer. A transfer counts at the end with the busier port; of several that finish together one counts."
    )
    waits = cached.waits(plan, problem)
    if not len(waits):
        return
    of, (by_gpu, by_layer) = digest_of(plan.id, *cached.key_of(problem)), st.columns(2, gap="large")
    with by_gpu:
        widgets.chart(lambda: gantt.by_gpu(waits, gpus), "waits-by-gpu", of)
    with by_layer:
        widgets.chart(lambda: gantt.by_layer(waits), "waits-by-layer", of)


SAME = 1e-9
"""Relative difference of two times that are the same."""


def show_bounds(plan: Plan, problem: Problem, figures: Metrics) -> None:
    """The bound of a plan's placement over every order, and that of its optimiser over all placements.

    If GPUs could relay for each other but in the plan's own order do not, also the closer bound over orders without relays.
    """
    if figures.unbounded:
        st.metric("Bound for this placement", NOT_BOUNDED, help=not_bounded(figures.unbounded))
    else:
        st.metric(
            "Bound for this placement",
            units.seconds(figures.order_bound),
            help="no order of sends can be faster, not even one in which the GPUs of a node relay for each other where they "
            "have links: every all-to-all at the time of its busiest port",
        )
        without = cached.bound(plan, problem, 0, problem.workload.layers - 1, straight=True)
        if without > figures.order_bound * (1 + SAME):
            st.metric(
                "Bound without relays",
                units.seconds(without),
                help="no order can be faster in which bytes go straight to their receivers, as in this plan; one with relays "
                "might be",
            )
    if figures.bound is not None and plan.claim.scope != "order":
        help = "as its optimiser claims for placements with as many slots per GPU; not computed again"
        st.metric("Bound for any placement", units.seconds(figures.bound), help=help)


def show_legend(plan: Plan, figures: Metrics, bundled: bool, folded: bool, chosen: bool) -> None:
    """Explain the bars and lines of the chart in words.

    figures: of the open plan
    bundled: True if its sends are bundled
    folded: True if a lane stands for several GPUs
    chosen: True if some GPUs have no lane
    """
    longest = max(figures.seconds, key=figures.seconds.get)
    share = units.share(figures.seconds[longest] / (figures.total or 1.0))
    most = "" if plan.goal is Goal.TWO_MODELS else f"Most of the time goes to {KIND_TITLES[longest]} ({share}). "
    bar = "a send"
    if folded:
        bar = "the time from the first GPU's first send to the last one's last"
    elif bundled:
        bar = "the time in which a GPU sends or receives without a gap: there are too many sends to draw"
    which = " Drawn are those that the others wait for, and the busiest." if chosen else ""
    st.caption(
        f"{most}Outlined bars are {figures.how_simulated}.{which} A bar on a network lane is {bar}. The thin line is the "
        "critical path, which all GPUs wait for. Hover over a bar to see that work on every GPU; drag the range below the "
        "chart to zoom; double-click a kind in the legend to see it alone."
    )


@failing.fragment
def show_sends(plan: Plan, problem: Problem) -> None:
    """The sends of one layer, once asked for: a choice of layer and GPUs, their chart, and a file with its content."""
    gpus, last_layer = problem.cluster.gpu_names, problem.workload.layers - 1
    if not kept.toggle("Send by send", key="send-by-send", help="every send of one layer, of the GPUs you choose"):
        return
    layer = kept.slider("MoE layer", 0, last_layer, 0, key="send-by-send-layer") if last_layer > 0 else 0
    whole = cached.sends_of_layer(plan, problem, layer)
    most = min(gantt.gpus_with_sends(len(gpus), 2 if plan.goal is Goal.TWO_MODELS else 1), gantt.MOST_SENDERS)
    waits = cached.waits(plan, problem)
    awaited = waits.loc[waits["layer"] == layer, "gpu"].unique()[:most].tolist()
    chosen = kept.multiselect(
        "GPUs",
        range(len(gpus)),
        awaited,
        lambda gpu: plain(gpus[gpu]),
        max_selections=most,
        key=f"senders-{plan.id[:16]}-{layer}",
        placeholder=f"Choose up to {most}",
        help="first those that the others wait for in this layer",
    )
    if not chosen:
        return
    part, count = gantt.only(whole, sorted(chosen))
    title = f"Layer {layer} of {plain(plan.name)}, send by send, on {count} of {len(gpus)} GPUs"
    widgets.gantt(
        gantt.gantt({plan.name: part}, layer, layer, title, lanes=count, dark=st.context.theme.type == "dark"),
        f"sends-{plan.id[:16]}",
    )
    widgets.download(
        "Download Perfetto trace of these sends",
        lambda: write_trace(replace(whole, events=whole.events[whole.events["resource"].isin(chosen)])),
        f"timeline-layer-{layer}.json",
    )


MOST_GPUS = 8
"""Most GPUs with a lane."""


def show_serving(shown: dict[str, Plan], problem: Problem) -> bool:
    """Show the plans in the serving step, by name, the open one first; False, after saying why, if they cannot be served."""
    try:
        serving = serving_of(problem)
        comparison = serving_page.compare(problem, serving)
        steps = {name: served(plan, problem, serving) for name, plan in shown.items()}
    except InputError as error:
        st.info(f"No serving step: {plain(str(error))}. Shown are the MoE layers as inference.", icon=":material/info:")
        return False
    name, plan = next(iter(shown.items()))
    figures = steps[name].figures
    row = serving_page.Row(plan, figures)
    serving_page.verdict(row, comparison, problem)
    _gantt(steps, problem.model)
    widgets.chart(
        serving_charts.parts({name: step.figures for name, step in steps.items()}, st.context.theme.type == "dark"),
        "served-parts",
    )
    serving_page.memory(row)
    serving_page.say_sources(serving, figures)
    return True


def _gantt(steps: dict[str, ServedStep], model: MoEModel) -> None:
    """The whole step, layer by layer; with two batches both, as they take turns."""
    timelines = {name: step.whole(model) for name, step in steps.items()}
    name, step = next(iter(steps.items()))
    last_layer = int(max(timeline.events["layer"].max() for timeline in timelines.values()))
    first, last = 0, last_layer
    chart = st.container()
    if last_layer > 0:
        begin, end = state.visit.first_layers(last_layer)
        usual = gantt.drawable(timelines, begin, end, MOST_GPUS)
        first, last = kept.slider("MoE layers of the step", 0, last_layer, usual, key=f"served-layers-{begin}")
    first, last = gantt.drawable(timelines, first, last, MOST_GPUS)
    stretches, drawn = gantt.fewer_lanes(timelines, first, last, MOST_GPUS)
    share = units.share(step.timeline.total / step.figures.seconds)
    layers = "MoE layers, attention included," if step.figures.step.overlap == "two-batch" else "MoE layers"
    title = f"{theme.plain(name)}: {units.seconds(step.figures.seconds)} a step, {layers} {share} of it"
    if drawn < len(step.timeline.resources):
        title += f" ({drawn} of {len(step.timeline.resources)} GPUs)"
    dark, gone = st.context.theme.type == "dark", {of: gantt.longest_steps(own, first, last) for of, own in stretches.items()}
    with chart:
        picture = st.container()
        view = choose_view(max((end for ends in gone.values() for _, end in ends), default=0.0), gone[name])
        with picture:
            drawing = gantt.gantt(stretches, first, last, title, None, drawn, ", second batch", dark, view)
            widgets.gantt(drawing, "served-gantt")
    what = "attention and the layer's other operators, then its MoE part; first embedding and dense layers, last the head"
    if step.figures.step.overlap == "two-batch":
        what = "two batches that take turns, attention among them; first embedding and dense layers, last the head"
    which = ""
    if drawn < len(step.timeline.resources):
        which = " Drawn are the GPUs that the others wait for, and the busiest."
    st.caption(f"Outlined bars are simulated at the tokens of the step: {what}.{which}")
    widgets.download("Download Perfetto trace of the served step", lambda: write_trace(timelines[name]), "served-step.json")


PHASES = {"step": "Whole step", "forward": "Forward", "backward": "Backward"}


def show_step(shown: dict[str, Plan], problem: Problem) -> None:
    """Show the plans in the training step, by name, the open one first."""
    timelines = {name: cached.simulate(plan, problem) for name, plan in shown.items()}
    plan = next(iter(shown.values()))
    verdict_line.show_plan(plan, problem)
    chart = st.container()
    phase, first, last = choose_part(list(timelines.values()))
    parts = {name: step_charts.stretch(timeline, phase, first, last) for name, timeline in timelines.items()}
    title = verdict_line.headline(plan, problem)
    bounds = {name: cached.metrics(plan, problem).order_bound for name, plan in shown.items()} if phase == "step" else None
    with chart:
        draw_step(timelines, parts, title, "step-gantt", bounds)
    verdict_line.say_made_for(plan, problem)
    _figures(plan, problem)
    groups = max(len(timeline.resources) for timeline in timelines.values())
    limit = ""
    if groups > step_charts.MOST_LANES:
        limit = f" Of up to {groups} groups of GPUs the {step_charts.MOST_LANES} that compute longest are drawn."
    st.caption(
        "Outlined bars are simulated. GPUs that do the same at the same time share a lane. Hatched marks above a lane: the "
        f"network is busy and the GPU computes nothing.{limit} Drag the range below the chart to zoom."
    )
    widgets.caption_with_costs(step.assumptions(problem), problem.cost_source)


def draw_step(
    timelines: dict[str, Timeline],
    parts: dict[str, step_charts.Stretch],
    title: str,
    key: str,
    bounds: dict[str, float] | None = None,
) -> None:
    """The chart of parts of training steps, see `step_charts.step_gantt`, above the buttons that move and zoom."""
    picture = st.container()
    waits = step_charts.longest_waits(next(iter(parts.values())))
    view = choose_view(max(part.length for part in parts.values()), waits, WAIT)
    with picture:
        widgets.gantt(step_charts.step_gantt(timelines, parts, title, bounds, view), key)


def _figures(plan: Plan, problem: Problem) -> None:
    figures = cached.metrics(plan, problem)
    own, total = figures.decomposition["communication"], figures.total or 1.0
    with st.container(horizontal=True, gap="medium"):
        st.metric(
            "Bound for this placement",
            f"{units.seconds(figures.order_bound)} (+{units.share(figures.order_gap)})",
            help="proven: no schedule of this placement is faster, however operators are cut, ordered and overlapped; in "
            "brackets what the step takes on top",
        )
        help = "the network is busy and nothing computes, mean over the groups of alike GPUs; and its share of the step"
        st.metric(step_charts.EXPOSED_TITLE, f"{units.seconds(own)} · {units.share(own / total)}", help=help)
        st.metric("Overlap", units.share(figures.overlap), help="share of communication hidden under computation")
        st.metric(
            "GPU utilisation", units.share(figures.utilisation), help="compute time / total, mean over the groups of alike GPUs"
        )
        tables.metric(figures.balance)


def choose_part(timelines: list[Timeline]) -> tuple[step_charts.Phase, int, int]:
    """Phase and model layers to draw; never more than a browser can."""
    layers = step_charts.layers_of(timelines) or [0]
    whole = sum(len(step_charts.stretch(timeline).events) for timeline in timelines) <= step_charts.MOST_BARS
    offered = [phase for phase in PHASES if whole or phase != "step"]
    phase = (
        kept.segments(
            "Part of the step",
            offered,
            default=offered[0],
            format_func=PHASES.get,
            label_visibility="collapsed",
            key="step-phase",
        )
        or offered[0]
    )
    if phase == "step":
        return phase, layers[0], layers[-1]
    first, last = layers[0], step_charts.last_that_fits(timelines, phase, layers[0], layers[-1])
    fits = last
    if len(layers) > 1:
        chosen = kept.slider("Model layers", layers[0], layers[-1], (first, last), key=f"step-layers-{phase}-{layers[-1]}")
        if chosen != (first, last):
            first, last = chosen
            fits = step_charts.last_that_fits(timelines, phase, first, last)
    if fits < last:
        st.warning(
            f"Showing layers {first} to {fits}: more than {step_charts.MOST_BARS:,} bars would stall the browser. The "
            "Perfetto file has everything.",
            icon=":material/warning:",
        )
    elif not whole:
        st.caption(
            f"A part of the step is shown: all of it has more than {step_charts.MOST_BARS:,} bars. The Perfetto file has "
            "everything."
        )
    return phase, first, fits


def show_colocation(plan: Plan, problem: Problem) -> None:
    """The gain of colocation: the time that the GPUs compute with each of two models alone, and with both."""
    st.subheader("Alone and together", anchor=False)
    st.caption(
        "The gain of colocation: GPU utilisation with each model alone on all GPUs, placed as in this plan, and with both "
        "(Aurora, Figure 12). Bars are means over the GPUs, dots single ones."
    )
    widgets.chart(utilisation_charts.exclusive_and_colocated(cached.utilisation(plan, problem).parts), "utilisation")
