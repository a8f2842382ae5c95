"""One meaning, one colour, in every chart and in both themes."""

import html
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

KIND_COLOURS = {
    "dense": "#E69F00",
    "gate": "#8C6BB1",
    "sizes": "#999933",
    "dispatch": "#0072B2",
    "ffn": "#009E73",
    "combine": "#56B4E9",
    "aggregate": "#CC79A7",
    "dx": "#44AA99",
    "dw": "#117733",
    "all_gather": "#A6761D",
    "all_reduce": "#A6761D",
    "prompt_gather": "#7A5615",
    "attention": "#E69F00",
    "host_copy": "#6B7A8F",
    "estimate": "#B9A3E3",
    "schedule": "#6F4FC0",
    "check": "#A43BB5",
}
KIND_TITLES = {
    "dense": "Attention, dense compute",
    "attention": "Attention beyond that at home",
    "gate": "Gate",
    "sizes": "Exchange of sizes",
    "dispatch": "Dispatch all-to-all",
    "ffn": "Expert FFN",
    "combine": "Combine all-to-all",
    "aggregate": "Aggregate",
    "prompt_gather": "All-gather of prompts",
    "all_gather": "All-gather",
    "dx": "dX, gradient of inputs",
    "dw": "dW, gradient of weights",
    "all_reduce": "All-reduce",
    "host_copy": "Host: copies, update",
    "estimate": "Scheduler: estimate",
    "schedule": "Scheduler: hosting",
    "check": "Scheduler: check",
}
"""Title of every kind of event, in the order in which every legend and chart has them, which is that of PARTS."""

EXPOSED = "#DC267F"
PARTS = {
    "attention": ("Attention", KIND_COLOURS["dense"], ""),
    "embedding": ("Embedding", KIND_COLOURS["dense"], "x"),
    "norm": ("Norms", KIND_COLOURS["dense"], "."),
    "dense": ("Attention, dense compute", KIND_COLOURS["dense"], ""),
    "dense FFN": ("Dense FFN", KIND_COLOURS["dense"], "\\"),
    "shared expert": ("Shared experts", KIND_COLOURS["dense"], "/"),
    "head": ("Output head", KIND_COLOURS["dense"], "-"),
    "gate": ("Gate", KIND_COLOURS["gate"], ""),
    "dispatch": ("Dispatch all-to-all", KIND_COLOURS["dispatch"], ""),
    "ffn": ("Expert FFN", KIND_COLOURS["ffn"], ""),
    "combine": ("Combine all-to-all", KIND_COLOURS["combine"], ""),
    "aggregate": ("Aggregate", KIND_COLOURS["aggregate"], ""),
    "prompt_gather": ("All-gather of prompts", KIND_COLOURS["prompt_gather"], ""),
    "all_gather": ("All-gather", KIND_COLOURS["all_gather"], ""),
    "communication": ("Exposed communication", EXPOSED, "/"),
    "overlapped": ("Both at once", "#00897B", ""),
    "computation": ("Computation alone", KIND_COLOURS["dense"], ""),
    "idle": ("Neither", "#8A9694", "."),
    "other": ("Other operators", "#8A9694", ""),
}
"""Title, colour and pattern of every segment of a time, in the order in which every chart stacks them: first the operators of a
layer, then the parts of a step in which things overlap."""

_GPU_COLOURS = {
    "2080": "#BBCC33",
    "V100": "#EEDD88",
    "V100-16": "#CFA881",
    "L4": "#E6C2BC",
    "L40S": "#FFAABB",
    "A30": "#F2D1B0",
    "A100": "#44BB99",
    "A100-40": "#94B474",
    "A100-PCIe": "#B5DB9F",
    "H100": "#77AADD",
    "H100-PCIe": "#8EC2C2",
    "H200": "#99DDFF",
    "B200": "#EE8866",
    "GB200": "#DB9F9F",
    "B300": "#EC8D8D",
    "GB300": "#ECA58D",
    "B60": "#DCB574",
    "RTX-PRO-6000": "#B9AB46",
    "MI300": "#AAAA00",
    "MI325": "#CCA633",
    "MI355": "#CC99BB",
    "Ascend": "#B4A7E5",
    "Ascend-A2-280": "#8EAFC2",
    "Ascend-A2-313": "#BCD1E6",
    "Ascend-A2-376": "#B0C1F2",
}
"""Fills of GPU types by a part of their names, of which the longest counts. All differ by what an eye can tell (13 in CIELAB at
least), none is as warm as MARK, and dark text is legible on each."""
OTHER_GPU = "#DDDDDD"

TEAL = "#00897B"
OPACITY = ((0.0, 0.04), (0.1, 0.28), (1.0, 1.0))
SEQUENTIAL = [[part, f"rgba(0,137,123,{opacity})"] for part, opacity in OPACITY]
"""From the page's own background to teal, for both themes; steep at first, or small values would vanish in the dark."""

NEUTRAL = "#8A9694"
MARK = "#D55E00"
"""A bottleneck, and the worse end of a scale of differences; nothing else is as warm."""
SECOND = "#7B68D8"
"""A second line or set of points, compared with the first in teal."""
MUTED = ("#4A5A58", "#A9B6B4")
"""Text next to a plot, in the light theme and in the dark one."""
PAGES = ((255, 255, 255), (15, 21, 23))
"""Background of a page: red, green, blue of the light theme and of the dark one."""
EDGE = 0.55
"""Brightness of an outline relative to its bar."""
SMALLEST = 12
"""Pixels of the smallest text."""
NARROW, SYMBOL, LETTER, LINE = 640, 44, 6, 28
"""Pixels of a chart in a window of 1024, of a legend's symbol, of a letter in the mean, and of a line of a legend above a
plot."""
TITLE_ROOM = 26
"""Pixels of a figure's title and of the space below it."""
AS_WIDE_AS_CHART = {"orientation": "h", "xref": "container", "x": 0, "xanchor": "left", "yref": "container"}
"""A legend at the side of a chart, as high as its entries."""
DIVERGING = [[0.0, MARK], [0.5, "rgba(138,150,148,0.08)"], [1.0, TEAL]]
"""From worse over equal to better."""

CONFIG = {"displaylogo": False, "modeBarButtons": [["zoom2d", "pan2d", "resetScale2d", "toImage"]]}


def gpu_colour(type_name: str) -> str:
    """The colour of a GPU type; text on it is dark."""
    known = [part for part in _GPU_COLOURS if part in type_name]
    return _GPU_COLOURS[max(known, key=len)] if known else OTHER_GPU


def plain(text: str) -> str:
    """Escape a person's text for plotly, which would read tags in it as markup."""
    return html.escape(text, quote=False)


def ink(dark: bool) -> str:
    """Ink of lines and marks on top of coloured bars, such as bounds and the critical path: a colour of no bar."""
    return "#FFFFFF" if dark else "#16201F"


def bar(kind: str, predicted: bool, hatched: bool = False) -> dict[str, Any]:
    """The marker of a timeline's bars, opaque so that the legend shows the same colour whatever lies below.

    predicted: True outlines the bar in a darker shade
    hatched: True for a second model
    """
    colour = KIND_COLOURS[kind]
    edge = "#" + "".join(f"{int(int(colour[place : place + 2], 16) * EDGE):02x}" for place in (1, 3, 5))
    marker: dict[str, Any] = {"color": colour, "line": {"color": edge, "width": int(predicted)}}
    if hatched:
        marker["pattern"] = {"shape": "/", "fillmode": "overlay", "fgcolor": edge, "size": 6, "solidity": 0.35}
    return marker


def hatched(part: str) -> dict[str, Any]:
    """The marker of a segment of PARTS."""
    _, colour, shape = PARTS[part]
    marker: dict[str, Any] = {"color": colour, "line": {"color": colour, "width": 1}}
    if shape:
        # Dark strokes on the colour: as strokes of the colour on nothing the segment would pale beside its legend.
        marker["pattern"] = {"shape": shape, "fillmode": "overlay", "fgcolor": "#16201F", "size": 6, "solidity": 0.25}
    return marker


def in_order(parts: Iterable[str]) -> list[str]:
    """Segments in the order of PARTS, others behind."""
    known = list(PARTS)
    return sorted(dict.fromkeys(parts), key=lambda part: known.index(part) if part in PARTS else len(known))


def tips(texts: Iterable[str]) -> dict[str, Any]:
    """The tips of a trace's points or bars, one text each, and nothing else in them."""
    return {"customdata": list(texts), "hovertemplate": "%{customdata}<extra></extra>"}


def styled(colour: str, dash: str, symbol: str) -> dict[str, Any]:
    """The look of a line with points that is told from others by three signs."""
    line = {"color": colour, "dash": dash, "width": 2}
    return {"mode": "lines+markers", "line": line, "marker": {"symbol": symbol, "size": 8}}


def range_bar(span: Sequence[float], height: float) -> dict[str, Any]:
    """Range bar of a time axis below a plot of `height` pixels: the whole time in small, with a window to drag."""
    return {"visible": True, "thickness": 34 / height, "range": list(span), "bgcolor": "rgba(138,150,148,0.10)"}


def faint(colour: str, opacity: float = 0.15) -> str:
    """Return a colour, given as #RRGGBB, as the fill of what has an outline or a line of that colour."""
    return f"rgba({int(colour[1:3], 16)},{int(colour[3:5], 16)},{int(colour[5:7], 16)},{opacity})"


def readable(colour: tuple[float, float, float, float], dark: bool) -> str:
    """Return the text colour that is read best on a background over the page of that theme.

    colour: red, green, blue 0 … 255, opacity 0 … 1
    """
    *channels, opacity = colour
    page = PAGES[dark]
    light = sum(
        weight * ((opacity * channel + (1 - opacity) * under) / 255) ** 2.2
        for weight, channel, under in zip((0.2126, 0.7152, 0.0722), channels, page, strict=True)
    )
    # White and the theme's dark ink have the same contrast here (WCAG).
    return ink(dark=light <= 0.2)


def write_numbers(figure: go.Figure, scale: dict, text: list[list[str]], dark: bool, **place_of_plot: int) -> None:
    """Write numbers in the cells of a heatmap at (0, 1, …) on one of the two scales, readable in the page's theme.

    scale: z, zmin, zmax and colorscale as the heatmap has them
    place_of_plot: row and col, of one among subplots

    The text is not the heatmap's own, which takes the page behind pale cells to be white.
    """
    low, high, z = scale["zmin"], scale["zmax"], np.nan_to_num(np.asarray(scale["z"], dtype=float))
    place = np.clip((z - low) / (high - low), 0, 1).ravel()
    if scale["colorscale"] is SEQUENTIAL:
        colours = [(0, 137, 123, opacity) for opacity in np.interp(place, *zip(*OPACITY, strict=True))]
    else:
        colours = [(*((0, 137, 123) if part > 0.5 else (213, 94, 0)), abs(2 * part - 1)) for part in place]
    rows, columns = z.shape
    figure.add_scatter(
        x=np.tile(np.arange(columns), rows),
        y=np.repeat(np.arange(rows), columns),
        mode="text",
        hoverinfo="skip",
        showlegend=False,
        text=[cell for row in text for cell in row],
        textfont={"size": 14, "color": [readable(colour, dark) for colour in colours]},
        **place_of_plot,
    )


def numbered(scale: dict, hover: list[list[str]], text: list[list[str]], dark: bool, bar: dict) -> go.Figure:
    """A heatmap of a few cells with their numbers in them. hover: tips; bar: of the colours; the rest: of `write_numbers`."""
    rows, columns = np.shape(scale["z"])
    look = {"xgap": 2, "ygap": 2, "colorbar": bar, "text": hover, "hovertemplate": "%{text}<extra></extra>"}
    figure = go.Figure(go.Heatmap(x=np.arange(columns), y=np.arange(rows), **look, **scale))
    write_numbers(figure, scale, text, dark)
    return figure


def finish(figure: go.Figure, title: str, height: int, top: int = 44, **layout) -> go.Figure:
    """Give a figure the common look: a title that states the finding, tight margins, the page's own background.

    layout: as for `update_layout`, which takes seven times as long; dictionaries are laid over those already there
    """
    common = {
        "title": {"text": title, "font": {"size": 15}, "x": 0, "xanchor": "left", "y": 1 - 6 / height, "yanchor": "top"},
        "height": height,
        "margin": {"l": 8, "r": 8, "t": top, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hoverlabel": {"align": "left"},
    }
    for name, value in (*common.items(), *layout.items()):
        before = figure.layout[name] if isinstance(value, dict) else None
        figure.layout[name] = value if before is None else before.to_plotly_json() | value
    return figure


def without_title(drawn: dict[str, Any]) -> dict[str, Any]:
    """Take the title and its room from a figure of `legible`; the plot stays as large as it was.

    A page writes the title above, on a second line if it is long; plotly would cut it off at the figure's edge.
    """
    layout = drawn["layout"]
    legend, height = layout["legend"], layout["height"] - TITLE_ROOM
    if legend.get("yref") == "container":
        legend["y"] = 1 - ((1 - legend["y"]) * layout["height"] - TITLE_ROOM) / height
    layout["title"] = {}
    layout["height"] = height
    layout["margin"]["t"] -= TITLE_ROOM
    return drawn


def legible(figure: go.Figure, dark: bool) -> dict[str, Any]:
    """Return data and layout of a figure with no text smaller than SMALLEST or with less contrast than AA asks for; Streamlit's
    template has both.

    A size or colour that a chart chose stays. Dictionaries are filled in a tenth of the time that plotly's objects take.
    """
    drawn = figure.to_plotly_json()
    layout, beside = drawn["layout"], {"size": SMALLEST, "color": MUTED[dark]}
    for name in {"xaxis", "yaxis"} | {name for name in layout if name.startswith(("xaxis", "yaxis"))}:
        axis = layout.setdefault(name, {})
        _fill(axis, "tickfont", beside)
        _fill(axis.setdefault("title", {}), "font", beside | {"size": SMALLEST + 1})
    for trace in drawn["data"]:
        if bar := trace.get("colorbar") or trace.get("marker", {}).get("colorbar"):
            _fill(bar, "tickfont", beside)
            _fill(bar.setdefault("title", {}), "font", beside)
    for annotation in layout.get("annotations", ()):
        _fill(annotation, "font", beside)
    _fill(layout.setdefault("legend", {}), "font", {"size": SMALLEST, "color": ink(dark)})
    return drawn


def _fill(owner: dict[str, Any], font: str, usual: dict[str, Any]) -> None:
    owner[font] = usual | owner.get(font, {})


def legend_above(height: int) -> dict[str, Any]:
    """A legend between the title and the plot of a chart of this height in pixels, as wide as the chart."""
    return AS_WIDE_AS_CHART | {"y": 1 - 34 / height, "yanchor": "top"}


def rank(kind: str) -> int:
    """Place of a kind of event in a legend, whichever plan or lane has it first; other entries come behind."""
    return list(KIND_TITLES).index(kind)


def legend_lines(names: Iterable[str]) -> int:
    """Lines that a legend of these entries takes in a narrow window."""
    lines, used = 1, 0.0
    for name in names:
        width = SYMBOL + LETTER * len(name)
        lines, used = (lines, used + width) if used + width <= NARROW else (lines + 1, width)
    return lines


def legend_below(y: float) -> dict[str, Any]:
    """A legend as wide as the plot. y: its top, in heights of the plot; negative is below."""
    return {"orientation": "h", "x": 0, "y": y, "yanchor": "top", "traceorder": "normal"}


def legend_at_foot() -> dict[str, Any]:
    """A legend at the lower edge of a chart and as wide as that.

    The chart's lower margin has to hold it, on as many lines as it takes in a narrow window.
    """
    return AS_WIDE_AS_CHART | {"y": 0, "yanchor": "bottom", "traceorder": "normal", "maxheight": 1}


def short(name: str) -> str:
    """A plan's name for a title: without its text in brackets, and without markup."""
    return plain(name.split(" (")[0])


NAME = 32
"""Most characters of a plan's name in a title that names two."""


def shortened(name: str, most: int) -> str:
    """Shorten a name to `most` characters, keeping its end too, in which names of one system differ."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-(most - most // 2 - 1) :]}"


def name_above_bar(name: str, top: float, dark: bool) -> dict[str, Any]:
    """The annotation with a name on a horizontal bar, from the left edge of the plot: at its side a long one would leave a
    narrow window no room for the bar.

    top: top of the bar, on the axis
    """
    font = {"size": SMALLEST, "color": ink(dark)}
    left = {"x": 0, "xref": "paper", "xanchor": "left"}
    return {**left, "y": top, "yanchor": "bottom", "yshift": -1, "text": name, "showarrow": False, "font": font}


def strokes(values: Sequence[float], places: Sequence[float], half: float) -> dict[str, list[float | None]]:
    """x and y of one trace of lines across horizontal bars: each at its value, `half` above and below its place."""
    return {
        "x": [end for value in values for end in (value, value, None)],
        "y": [end for place in places for end in (place - half, place + half, None)],
    }
