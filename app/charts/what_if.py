"""Charts of plans before and after a change: parts of the total, every GPU's time, every layer's; and of contention."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from app.charts import stacks, theme
from engine.compare.contention import MODES, ContentionPoint, all_alike
from engine.compare.standing import gain_in_words
from engine.compare.what_if import Outlook
from engine.result import NOT_BOUNDED
from engine.serving.step import Phase
from engine.units import TIME, ratio, scale_of, seconds, share, signed

COMPUTES, SENDS = theme.KIND_COLOURS["dense"], theme.KIND_COLOURS["dispatch"]
SAME = 5e-4
"""Times that differ by no more than this part are equal."""
ALIKE = 0.02
"""GPUs that are busy within this part of the busiest are as busy."""
LEGEND = theme.legend_below(-0.24)
NAME = 24
"""Most characters of a plan's name in a legend next to the sliders in a window of 1024."""


SPANS: dict[Phase | None, str] = {"decode": "time per token", "prefill": "time to first token", None: "time"}
"""The time that a study is of, by the phase of the serving step; None: of a pass or training step."""


def told(finding: str, complete: bool, phase: Phase | None) -> str:
    """A finding as a title, with the time that it is of and a word where points are missing; it begins with a small letter or a
    name."""
    if phase is not None:
        return f"{SPANS[phase].capitalize()}{'' if complete else ' so far'}: {finding}"
    return f"{finding[0].upper()}{finding[1:]}" if complete else f"So far: {finding}"


@dataclass(frozen=True, eq=False)
class Case:
    """A plan before and after a change. before: None for a plan made for the change; after: None without a change."""

    name: str
    before: Outlook | None
    after: Outlook | None

    @property
    def shown(self) -> Outlook:
        """The outlook after the change, or as things are."""
        return self.after or self.before


def totals(cases: Sequence[Case], change: str, dark: bool = False, scope: str = "") -> go.Figure:
    """One stacked bar for every plan now and after the change, its name and time above it, with a dashed line at its bound, or
    a word that there is none.

    cases: the open plan first, then the plan it is compared with
    change: in words
    dark: the page's theme
    scope: of a gain, as `, in sample`
    """
    rows, places = _rows(cases)
    bars = [place + stacks.BELOW for place in places]
    factor, unit = scale_of(max(outlook.total for _, outlook, _ in rows), TIME)
    figure = go.Figure()
    for key in theme.in_order(key for _, outlook, _ in rows for key in outlook.parts):
        title = theme.PARTS[key][0]
        values = np.array([outlook.parts.get(key, 0.0) for _, outlook, _ in rows])
        figure.add_bar(
            x=values / factor,
            y=bars,
            orientation="h",
            name=title,
            width=stacks.BAR,
            marker=theme.hatched(key) | {"opacity": [0.45 if before and cases[0].after else 1 for *_, before in rows]},
            **theme.tips(
                f"{theme.plain(name)}<br>{title}: {seconds(value)}, {share(value / (outlook.total or 1))}"
                for (name, outlook, _), value in zip(rows, values, strict=True)
            ),
        )
    bounds = [(row[1].bound / factor, bar) for row, bar in zip(rows, bars, strict=True) if row[1].bound is not None]
    if bounds:
        figure.add_scatter(
            **theme.strokes(*zip(*bounds, strict=True), stacks.ACROSS),
            mode="lines",
            name="its bound",
            line={"dash": "dash", "width": 1.5, "color": theme.NEUTRAL},
            hoverinfo="skip",
        )
    longest = max(outlook.total for _, outlook, _ in rows) / factor or 1.0
    changed = f"<br>changed: {theme.plain(change)}" if cases[0].after else ""
    figure.update_xaxes(title=f"time, {unit} ({_tag(cases[0].shown)}){changed}", range=[0, longest * 1.02])
    labels = [
        f"{theme.plain(name)}: {seconds(outlook.total)}{beside}{'' if outlook.bound is not None else f', order {NOT_BOUNDED}'}"
        for (name, outlook, _), beside in zip(rows, _besides(cases), strict=True)
    ]
    return stacks.arrange(figure, finding(cases, scope), labels, places, dark)


def _rows(cases: Sequence[Case]) -> tuple[list[tuple[str, Outlook, bool]], list[float]]:
    """Name, outlook and True if it is as things are now, of every bar; and the place of each bar."""
    rows: list[tuple[str, Outlook, bool]] = []
    places: list[float] = []
    for turn, case in enumerate(cases):
        for outlook, when in ((case.before, "now"), (case.after, "changed")):
            if outlook is not None:
                name = _named(case.name)
                rows.append((name if case.after is None else f"{name}, {when}", outlook, when == "now"))
                places.append(len(places) + 0.5 * turn)
    return rows, places


def _besides(cases: Sequence[Case]) -> list[str]:
    """Text after the time of every row: a plan after the change is compared with itself now, a plan made for the change with
    the first plan after it."""
    labels = []
    for case in cases:
        beside = case.before or cases[0].after
        if case.before is not None:
            labels.append("")
        if case.after is not None:
            whose = "today's" if case.before is not None else f"that of {theme.plain(_named(cases[0].name))}, changed"
            labels.append(f", {ratio(case.after.total / beside.total)} {whose}" if beside.total else "")
    return labels


def finding(cases: Sequence[Case], scope: str = "") -> str:
    """The effect of the change on the first case, and how it then compares with the second. scope: of that, as `totals`"""
    first = cases[0]
    name = f"{theme.plain(_named(first.name))} takes{'' if first.shown.simulated else ' at least'}"
    if first.after is None:
        sentence = f"{name} {seconds(first.before.total)}"
    elif abs(first.after.total - first.before.total) <= SAME * first.before.total:
        sentence = f"{name} {seconds(first.before.total)} as before"
    else:
        sentence = f"{name} {seconds(first.after.total)} instead of {seconds(first.before.total)}"
    if len(cases) > 1 and first.shown.total:
        relative = cases[1].shown.total / first.shown.total
        if abs(relative - 1) <= SAME:
            return f"{sentence}, as long as {theme.plain(_named(cases[1].name))}"
        sentence += f", {gain_in_words(relative, theme.plain(_named(cases[1].name)))}{scope}"
    return sentence


def per_gpu(case: Case, overlaps: bool) -> go.Figure:
    """Seconds that every GPU (or group of alike GPUs) computes and communicates, the busiest marked if it is one; now as lines.

    overlaps: True if a GPU may do both at once: the two bars then stand side by side rather than on each other
    """
    shown, before = case.shown, case.before if case.after is not None else None
    factor, unit = scale_of(max(_highest(outlook, overlaps) for outlook in (shown, before) if outlook is not None), TIME)
    names = [theme.plain(name) for name in shown.resources]
    short = [name.split(" · ")[0].removeprefix("GPU ") for name in names]
    across, step = np.arange(len(names)), -(-len(names) // 12)
    figure = go.Figure()
    for values, title, colour in ((shown.compute, "computes", COMPUTES), (shown.network, "sends or receives", SENDS)):
        figure.add_bar(
            x=across,
            y=values / factor,
            name=title,
            marker={"color": colour, "opacity": 0.9},
            **theme.tips(
                f"{name}<br>{title} {seconds(value)}, {share(value / (shown.total or 1))} of the time"
                for name, value in zip(names, values, strict=True)
            ),
        )
    if before is not None and len(before.resources) == len(names):
        _mark_now(figure, before, overlaps, factor, unit)
    worst, busy = shown.busiest, shown.compute + shown.network
    as_busy = np.flatnonzero(busy >= (1 - ALIKE) * busy[worst])
    if len(as_busy) == 1:
        top = max(shown.compute[worst], shown.network[worst]) if overlaps else busy[worst]
        figure.add_annotation(
            x=worst, y=top / factor, text="busiest", showarrow=True, arrowhead=0, ax=0, ay=-18, arrowcolor=theme.MARK
        )
    figure.update_xaxes(showgrid=False, title="GPU", tickangle=0, tickvals=across[::step], ticktext=short[::step])
    figure.update_yaxes(title=f"busy, {unit} ({_tag(shown)})", rangemode="tozero")
    part = shown.network[as_busy].sum() / busy[as_busy].sum() if busy[worst] else 0.0
    title = f"{_busiest(shown, names, as_busy)}, {share(part)} communicating"
    return theme.finish(figure, title, 320, barmode="group" if overlaps else "stack", legend=LEGEND)


def _busiest(shown: Outlook, names: Sequence[str], as_busy: np.ndarray) -> str:
    """Name the busiest GPU, or the type of several that are as busy. as_busy: int[at least one], their places."""
    if len(as_busy) == 1:
        return f"{names[as_busy[0]].split(' · ')[0]} is busiest"
    if len(as_busy) == len(names):
        return "All GPUs are about equally busy"
    types = [name.partition(" · ")[2] for name in names]
    kind, a_lane_each = types[as_busy[0]], shown.layers is not None  # a training step's lanes are groups of GPUs
    if a_lane_each and [place for place, other in enumerate(types) if other == kind] == as_busy.tolist():
        return f"The {len(as_busy)} {kind} are busiest"
    return "Several GPUs are busiest"


def _mark_now(figure: go.Figure, before: Outlook, overlaps: bool, factor: float, unit: str) -> None:
    """Draw a line across every bar at its time before the change."""
    across = np.arange(len(before.resources))
    pairs = [(across - 0.2, before.compute), (across + 0.2, before.network)]
    stacked = [(across, before.compute + before.network)]
    for place, values in pairs if overlaps else stacked:
        figure.add_scatter(
            x=place,
            y=values / factor,
            mode="markers",
            name="now",
            legendgroup="now",
            showlegend=place is (pairs if overlaps else stacked)[0][0],
            marker={
                "symbol": "line-ew-open",
                "size": max(6, min(18, 300 // len(across))),
                "color": theme.NEUTRAL,
                "line": {"width": 2},
            },
            hovertemplate=f"now %{{y:.3g}} {unit}<extra></extra>",
        )


def per_layer(cases: Sequence[Case]) -> go.Figure:
    """Seconds that every layer adds to the total: bars of the first case, outlined without the change, a line of the second."""
    first = cases[0]
    shown = first.shown.layers
    factor, unit = scale_of(
        max(outlook.layers.max() for case in cases for outlook in (case.before, case.after) if outlook), TIME
    )
    across = np.arange(len(shown))
    figure = go.Figure()
    if first.after is not None:
        marker = {"color": "rgba(0,0,0,0)", "line": {"color": theme.NEUTRAL, "width": 1.5}}
        hovertemplate = f"layer %{{x}}, now: %{{y:.3g}} {unit}<extra></extra>"
        figure.add_bar(
            x=across, y=first.before.layers / factor, name="now", width=0.84, marker=marker, hovertemplate=hovertemplate
        )
    figure.add_bar(
        x=across,
        y=shown / factor,
        name=theme.plain(_named(first.name)),
        width=0.56,
        marker={"color": theme.TEAL},
        hovertemplate=f"layer %{{x}}: %{{y:.3g}} {unit}<extra></extra>",
    )
    if len(cases) > 1:
        figure.add_scatter(
            x=across,
            y=cases[1].shown.layers / factor,
            name=theme.plain(_named(cases[1].name)),
            mode="lines+markers",
            line={"dash": "dot", "width": 1.5, "color": theme.SECOND},
            marker={"size": 6, "symbol": "diamond"},
            hovertemplate=f"layer %{{x}}: %{{y:.3g}} {unit}<extra></extra>",
        )
    figure.update_xaxes(title="MoE layer", showgrid=False, dtick=1 if len(shown) <= 16 else None)
    figure.update_yaxes(title=f"time, {unit} ({_tag(first.shown)})", rangemode="tozero")
    longest = int(shown.argmax())
    mean = shown.mean() or 1.0
    title = f"Layer {longest} is slowest: {seconds(shown[longest])}, {ratio(shown[longest] / mean)} mean"
    return theme.finish(figure, title, 320, barmode="overlay", legend=LEGEND)


def per_kind(case: Case) -> go.Figure:
    """Seconds of every kind of event of a training step, outlined as things are now."""
    shown, before = case.shown, case.before if case.after is not None else None
    keys = [key for key in theme.KIND_TITLES if key in shown.kinds]
    factor, unit = scale_of(max(max(outlook.kinds.values()) for outlook in (shown, before) if outlook is not None), TIME)
    titles = [theme.KIND_TITLES[key] for key in keys]
    figure = go.Figure()
    if before is not None:
        figure.add_bar(
            y=titles,
            x=[before.kinds.get(key, 0.0) / factor for key in keys],
            orientation="h",
            name="now",
            width=0.84,
            marker={"color": "rgba(0,0,0,0)", "line": {"color": theme.NEUTRAL, "width": 1.5}},
            hovertemplate=f"%{{y}}, now: %{{x:.3g}} {unit}<extra></extra>",
        )
    figure.add_bar(
        y=titles,
        x=[shown.kinds[key] / factor for key in keys],
        orientation="h",
        name=theme.plain(_named(case.name)),
        width=0.56,
        marker={"color": [theme.KIND_COLOURS[key] for key in keys]},
        showlegend=False,
        hovertemplate=f"%{{y}}: %{{x:.3g}} {unit}<extra></extra>",
    )
    figure.update_xaxes(title=f"busy, {unit} ({_tag(shown)})", rangemode="tozero")
    figure.update_yaxes(showgrid=False, autorange="reversed")
    longest = max(keys, key=shown.kinds.get)
    title = f"{theme.KIND_TITLES[longest]} runs longest: {seconds(shown.kinds[longest])} of {seconds(shown.total)}"
    return theme.finish(figure, title, 320, barmode="overlay", legend=LEGEND, showlegend=before is not None)


def _highest(outlook: Outlook, overlaps: bool) -> float:
    busy = np.maximum(outlook.compute, outlook.network) if overlaps else outlook.compute + outlook.network
    return float(busy.max())


def _tag(outlook: Outlook) -> str:
    return "simulated" if outlook.simulated else "bound"


def _named(name: str) -> str:
    """A plan's name without its text in brackets, cut to the room next to a line, a bar or a patch of colour."""
    return theme.shortened(name.split(" (")[0], NAME)


STYLES = {
    "concurrent": (theme.SECOND, "dash", "diamond"),
    "matched": (theme.TEAL, "solid", "circle"),
    "two-tier": (theme.NEUTRAL, "dot", "square"),
}


def contention(
    points: Sequence[ContentionPoint], pays_from: float | None, complete: bool = True, phase: Phase | None = None
) -> go.Figure:
    """Time of a placement against contention, a line for every mode of orders; values stand evenly apart.

    pays_from: the contention from which an order is no slower than all sends at once, marked; None: there is none
    phase: of the serving step that is timed; None: a pass
    """
    most = max((total for point in points for total in point.seconds.values()), default=1.0)
    factor, unit = scale_of(most, TIME)
    values = [point.contention for point in points]
    figure = go.Figure()
    for mode, title in MODES.items():
        totals = [point.seconds[mode] for point in points if mode in point.seconds]
        if not totals:
            continue
        figure.add_scatter(
            x=list(range(len(totals))),
            y=[total / factor for total in totals],
            name=title,
            **theme.styled(*STYLES[mode]),
            **theme.tips(
                f"{title}<br>{_percent(value)}: {seconds(total)}" for value, total in zip(values, totals, strict=True)
            ),
        )
    if pays_from is not None and not all_alike(point.seconds for point in points):
        figure.add_vline(
            x=float(np.interp(pays_from, values, np.arange(len(values)))),
            line={"color": theme.NEUTRAL, "width": 1, "dash": "dash"},
            annotation={"text": f"pays from {_percent(pays_from)}", "yanchor": "bottom"},
            annotation_position="top",
        )
    figure.update_xaxes(
        title="contention: how much longer a byte takes for every further send at a port",
        tickvals=list(range(len(values))),
        ticktext=[_percent(value) for value in values],
        showgrid=False,
    )
    figure.update_yaxes(title=f"{SPANS[phase]}, {unit} (simulated)", rangemode="tozero")
    title = _finding(points, pays_from, complete, phase)
    return theme.finish(figure, title, 420, top=64, legend=theme.legend_below(-0.2))


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _finding(points: Sequence[ContentionPoint], pays_from: float | None, complete: bool, phase: Phase | None) -> str:
    if not points:
        return "No points yet"
    last = points[-1]
    if not complete:
        said = f"at {_percent(last.contention)} all at once takes {seconds(last.seconds['concurrent'])}"
        return told(said, False, phase)
    return told(_ordering(points, pays_from), True, phase)


def _ordering(points: Sequence[ContentionPoint], pays_from: float | None) -> str:
    """The contention from which ordering pays, and the gain at the most of it."""
    first, last = points[0], points[-1]
    gain = signed(last.seconds["concurrent"] / (last.seconds["concurrent"] - last.saved) - 1)
    if pays_from is None and last.saved >= 0:  # stopped before the contention was known
        return f"ordering pays at {_percent(last.contention)} contention, and gains {gain}"
    if pays_from is not None and all_alike(point.seconds for point in points):
        return f"ordering changes nothing up to {_percent(last.contention)} contention"
    if pays_from is None:
        return f"ordering does not pay up to {_percent(last.contention)} contention"
    if pays_from == first.contention:
        return f"ordering pays as things are, and gains {gain} at {_percent(last.contention)} contention"
    return f"ordering pays from {_percent(pays_from)} contention on, and gains {gain} at {_percent(last.contention)}"
