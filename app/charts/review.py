"""Charts for a decision: the load under a plan, the experts of two plans, and the gain on each held-out part."""

import numpy as np
import plotly.graph_objects as go

from app.charts import gantt as gantt_charts
from app.charts import stacks
from app.charts import step as step_charts
from app.charts.theme import DIVERGING, MARK, NEUTRAL, SEQUENTIAL, TEAL, finish, plain
from engine.compare.judge import interval
from engine.compare.standing import gain_in_words
from engine.compare.verdict import Verdict
from engine.plan import Placement, Plan
from engine.problem import Problem
from engine.simulate.work import loads_of
from engine.timeline import Timeline
from engine.units import TIME, ratio, scale_of, seconds, share, signed

MOST_GPUS = 16
"""Most GPUs with a lane: a brief has to be read in one go. The Timeline page has them all."""
EVEN = 0.02
"""Farthest from the mean that a load is even."""
EXACT = 1e-9
"""Relative difference of sums of the same seconds."""
SPARSE = 2_000
"""Cells of a heatmap that have room for gaps between them."""


def relative_load(plan: Plan, problem: Problem) -> tuple[np.ndarray, list[str]]:
    """float64[row, GPU], token copies that every GPU serves in every MoE layer over the mean of the layer, the layers of two
    models one below the other; and the rows' names."""
    loads, rows = [], []
    for own, whose in zip(loads_of(plan, problem), ("", ", second model"), strict=False):
        load = own.served.sum(axis=1)
        mean = load.mean(axis=1, keepdims=True)
        loads.append(np.divide(load, mean, out=np.ones_like(load), where=mean > 0))
        rows += [f"layer {layer}{whose}" for layer in range(len(load))]
    return np.concatenate(loads), rows


def evenly_loaded(load: np.ndarray) -> str | None:
    """A sentence in place of a map without anything to see: all GPUs within EVEN of the mean; None: there is. load: see
    `relative_load`"""
    far = float(np.abs(load - 1).max())
    return None if far > EVEN else f"Every GPU serves the mean of every layer, at most {share(far)} off."


def placement(plan: Plan, problem: Problem, pointed_at: int | None = None) -> go.Figure:
    """A map of `relative_load`, from the least loaded GPU to the most loaded one. pointed_at: a GPU to be framed"""
    load, rows = relative_load(plan, problem)
    row, gpu = np.unravel_index(load.argmax(), load.shape)
    names = [plain(name) for name in problem.cluster.gpu_names]
    figure = _cells(
        "MoE layer",
        load,
        colorscale=SEQUENTIAL,
        zmin=min(float(load.min()), 1 - EVEN),  # the spread is to be seen, not the mean that all have
        zmax=max(float(load.max()), 1 + EVEN),
        colorbar={"title": "× mean"},
        text=np.array([[f"{row}<br>{name}" for name in names] for row in rows]),
        hovertemplate="%{text}<br>%{z:.3g}× the mean of the layer<extra></extra>",
    )
    even = evenly_loaded(load)
    if even is None:
        figure.add_shape(type="rect", x0=gpu - 0.5, x1=gpu + 0.5, y0=row - 0.5, y1=row + 0.5, line={"color": MARK, "width": 2})
    if pointed_at is not None and pointed_at < load.shape[1]:
        figure.add_vrect(pointed_at - 0.5, pointed_at + 0.5, line={"color": MARK, "width": 2, "dash": "dot"})
    if rows[-1].endswith("model"):
        ticks = np.arange(0, len(load), max(1, len(load) // 16))
        figure.update_yaxes(tickvals=ticks, ticktext=[rows[tick] for tick in ticks])
    title = f"GPU {gpu} serves {ratio(float(load[row, gpu]))} the mean in {rows[row]}: the most of any GPU (marked)"
    # In a column of cells that are alike there is nothing to see.
    height = 460 if even is None else 200
    return finish(figure, even or title, int(min(height, 130 + 22 * len(load))))


def _cells(title: str, cells: np.ndarray, **look) -> go.Figure:
    """A heatmap over GPUs, its first row on top. title: of its rows; look: of `go.Heatmap`."""
    rows, gpus = cells.shape
    gap = int(cells.size <= SPARSE)
    axes = {
        "xaxis": {"title": "GPU", "showgrid": False, "dtick": max(1, gpus // 16)},
        "yaxis": {"title": title, "showgrid": False, "zeroline": False, "range": [rows - 0.5, -0.5]},
    }
    axes["yaxis"]["dtick"] = max(1, rows // 16)
    return go.Figure(go.Heatmap(z=cells, x=np.arange(gpus), y=np.arange(rows), xgap=gap, ygap=gap, **look), axes)


def difference(ours: Placement, theirs: Placement, names: tuple[str, str], layer: int | None = None) -> go.Figure:
    """Share of every expert's tokens that a GPU serves in the second placement minus that in the first.

    names: of the two plans
    layer: a MoE layer; None: the mean over all of them
    """
    change = theirs.share - ours.share
    shown = change.mean(axis=0) if layer is None else change[layer]
    far = max(float(np.abs(shown).max()), 1e-9)
    colorbar = {"title": "share of the<br>expert's tokens"}
    hovertemplate = "expert %{y} on GPU %{x}: %{z:+.3g} of its tokens<extra></extra>"
    figure = _cells("expert", shown, colorscale=DIVERGING, zmin=-far, zmax=far, colorbar=colorbar, hovertemplate=hovertemplate)
    fresh = (theirs.share > 0) & (ours.share == 0)
    part = fresh if layer is None else fresh[layer]
    where = "over all layers" if layer is None else f"in layer {layer}"
    title = f"{where.capitalize()}, {int(part.sum()):,} expert copies sit on other GPUs in {plain(names[1])}"
    if not np.abs(shown).max() > 0 and not part.any():
        title = f"{plain(names[0])} and {plain(names[1])} place every expert alike {where}"
    return finish(figure, title, int(min(760, 140 + max(12, min(24, 600 // len(shown))) * len(shown))))


def drawable(shown: dict[str, Timeline], first: int, last: int) -> tuple[int, int]:
    """Return the first and the last of these MoE layers that can be drawn as bars."""
    return gantt_charts.drawable(shown, first, last, MOST_GPUS)


def parts(plans: dict[str, dict[str, float]], times: dict[str, float], title: str, dark: bool = False) -> go.Figure:
    """One stacked bar for a plan and for its baseline: where the time goes.

    plans: seconds by kind of part, by name, as if nothing overlapped
    times: seconds of the pass or step
    title: the decision
    dark: the page's theme
    """
    rows, longest = np.arange(len(plans)), max(sum(spent.values()) for spent in plans.values())
    factor, unit = scale_of(longest, TIME)
    figure = go.Figure()
    stacks.bars(figure, plans, rows, factor, "work")
    hides = any(times[name] < sum(spent.values()) * (1 - EXACT) for name, spent in plans.items())
    if hides:
        stacks.whole_steps(figure, [times[name] for name in plans], rows, factor, dark)
    figure.update_xaxes(title=f"time, {unit} (simulated)", range=[0, longest / factor * 1.02 or 1])
    labels = [stacks.label(name, seconds(times[name])) for name in plans]
    return stacks.arrange(figure, plain(title), labels, rows, dark, across=3)


def timelines(
    shown: dict[str, Timeline],
    layers: tuple[int, int] | None,
    bounds: dict[str, float] | None = None,
    dark: bool = False,
    title: str = "",
    scope: str = "",
) -> go.Figure:
    """One or two timelines, one above the other on one time axis, their times in the title.

    layers: the first and last MoE layer of passes, see `drawable`; None: training steps, whole or only the forward pass if the
        whole is too much
    bounds: seconds, for the layers that are drawn
    dark: the page's theme
    title: empty: their times
    scope: of their gain, as `, in sample`
    """
    names, title = list(shown), plain(title) or against(shown) + scope * (len(shown) > 1)
    if layers is None:
        return step_charts.step_gantt(shown, parts_of_steps(shown), title)
    fewer, lanes = gantt_charts.fewer_lanes(shown, *layers, MOST_GPUS)
    if lanes < (gpus := len(shown[names[0]].resources)):
        title += f" ({lanes} of {gpus} GPUs)"
    return gantt_charts.gantt(fewer, *layers, title, bounds, lanes, dark=dark)


def against(shown: dict[str, Timeline]) -> str:
    """Time of the faster of two timelines, and its gain over the other."""
    (first, ours), *others = ((plain(name), timeline.total) for name, timeline in shown.items())
    if not others:
        return f"{first} takes {seconds(ours)}"
    second, theirs = others[0]
    if 0 < theirs < ours:
        return f"{second} takes {seconds(theirs)}, {gain_in_words(ours / theirs, first)}"
    gain = gain_in_words(theirs / ours, second) if ours else f"as fast as {second}"
    return f"{first} takes {seconds(ours)}, {gain}"


def parts_of_steps(shown: dict[str, Timeline]) -> dict[str, step_charts.Stretch]:
    """The whole steps, or as much of their forward passes as can be drawn."""
    timelines = list(shown.values())
    whole = {name: step_charts.stretch(timeline) for name, timeline in shown.items()}
    if sum(len(stretch.events) for stretch in whole.values()) <= step_charts.MOST_BARS:
        return whole
    layers = step_charts.layers_of(timelines) or [0]
    last = step_charts.last_that_fits(timelines, "forward", layers[0], layers[-1])
    return {name: step_charts.stretch(timeline, "forward", layers[0], last) for name, timeline in shown.items()}


TOGETHER = "mean"
ROW = 34
"""Pixels of a part."""


def gains(verdict: Verdict) -> go.Figure:
    """Gain and interval of every part and of their mean, with the thresholds of the gain as lines. The verdict has a part at
    least."""
    intervals = [interval(part.gain, part.error, verdict.confidence) for part in verdict.parts]
    names = [_short(part.part) for part in verdict.parts]
    figure = go.Figure()
    figure.add_scatter(
        x=[100 * part.gain for part in verdict.parts],
        y=list(range(len(names))),
        error_x=_bars([100 * (high - part.gain) for part, (_, high) in zip(verdict.parts, intervals, strict=True)]),
        mode="markers",
        marker={"color": TEAL, "size": 10},
        hovertext=[
            f"{plain(part.part)}<br>{signed(part.gain)}, {share(verdict.confidence)} interval {signed(low)} to "
            f"{signed(high)}<br>{seconds(part.seconds_deployed)} deployed, {seconds(part.seconds)} planned"
            for part, (low, high) in zip(verdict.parts, intervals, strict=True)
        ],
        hoverinfo="text",
        showlegend=False,
    )
    mean = verdict.gain_held_out
    figure.add_scatter(
        x=[100 * mean],
        y=[len(names)],
        error_x=_bars([100 * (verdict.gain_high - mean)]),
        mode="markers",
        marker={"color": TEAL, "size": 14, "symbol": "diamond"},
        hovertext=f"mean: {signed(mean)}, {signed(verdict.gain_low)} to {signed(verdict.gain_high)}",
        hoverinfo="text",
        showlegend=False,
    )
    limits = {criterion.name: criterion.threshold for criterion in verdict.criteria}
    figure.add_vline(0, line={"color": NEUTRAL, "width": 1})
    for name, text, side in (("gain", "do it", "left"), ("try_gain", "try it", "right")):
        figure.add_vline(100 * limits[name], line={"color": NEUTRAL, "width": 1, "dash": "dash"})
        figure.add_annotation(
            x=100 * limits[name],
            y=1,
            yref="paper",
            yanchor="bottom",
            xanchor=side,
            text=f"{text}: {share(limits[name])}",
            font={"size": 12},
            showarrow=False,
        )
    figure.update_xaxes(title="gain over what is deployed, %", zeroline=False)
    ticktext = [*map(plain, names), TOGETHER]
    tickvals = list(range(len(names) + 1))
    figure.update_yaxes(tickvals=tickvals, ticktext=ticktext, range=[len(names) + 0.6, -0.6], showgrid=False, zeroline=False)
    return finish(figure, _finding(verdict), 130 + ROW * (len(names) + 1), top=62)


def _bars(reach: list[float]) -> dict:
    return {"type": "data", "array": reach, "color": TEAL, "thickness": 2, "width": 6}


def _short(name: str) -> str:
    """Shorten a name to the room next to the chart."""
    return name if len(name) <= 32 else f"{name[:31]}…"


def _finding(verdict: Verdict) -> str:
    low, high, mean = verdict.gain_low, verdict.gain_high, verdict.gain_held_out
    return f"Held out it gains {signed(mean)}; {share(verdict.confidence)} interval {signed(low)} to {signed(high)}"
