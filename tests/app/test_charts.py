"""Charts: their texts and shapes, colours, contrasts and fonts, and plans by their time."""

import colorsys
import math
import tomllib
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from app.charts import gantt, stacks, theme
from app.charts import ranked as charts
from app.charts import workload as workload_charts
from app.charts.waterfall import waterfall
from app.tables import plain
from engine.catalogue import cluster_presets, gpu_types
from engine.catalogue.packaged import every_gpu_type
from engine.compare.waterfall import Turn, Waterfall
from engine.timeline import KINDS
from tests.cases.simulations import passes


def test_gantt_draws_every_event_of_the_chosen_layers_once_with_bounds_and_without_markup() -> None:
    figure = gantt.gantt({"<i>one</i>": passes(3)}, 1, 1, "title", {"<i>one</i>": 12.0})
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert sum(len(trace.x) for trace in bars) == 5 and min(min(trace.base) for trace in bars) == 0
    assert {trace.marker.color for trace in bars} == {theme.KIND_COLOURS[kind] for kind in ("gate", "dispatch", "ffn")}
    assert any("12 s" in (annotation.text or "") for annotation in figure.layout.annotations)
    text = str(figure.to_dict())
    assert "<i>" not in text and "<b>" not in text


@pytest.mark.parametrize("dark", [False, True])
def test_the_critical_path_follows_the_slowest_in_a_colour_that_no_bar_has(dark: bool) -> None:
    figure = gantt.gantt({"one": passes(1)}, 0, 0, "title", dark=dark)
    path = next(trace for trace in figure.data if trace.name == "Critical path")
    assert list(path.x) == [0, 2, 2, 5, 5, 9]
    assert [round(lane) for lane in path.y] == [1, 1, 0, 0, 0, 0]
    assert path.line.color == theme.ink(dark) not in theme.KIND_COLOURS.values() and path.line.width < 2


def test_bars_equal_their_legend_and_only_what_was_predicted_is_outlined() -> None:
    measured = replace(passes(), source="measured")
    figure = gantt.gantt({"predicted": passes(), "measured": measured}, 0, 1, "title")
    for kind in ("gate", "dispatch", "ffn"):
        predicted, solid = (trace.marker for trace in figure.data if trace.name == theme.KIND_TITLES[kind])
        assert predicted.color == solid.color == theme.KIND_COLOURS[kind] and predicted.opacity in (None, 1)
        assert (predicted.line.width, solid.line.width) == (1, 0)


@pytest.mark.parametrize(("plans", "gpus"), [(1, 2), (1, 16), (3, 16), (3, 64)])
def test_a_chart_is_never_higher_than_a_laptop_and_has_time_and_range_below(plans: int, gpus: int) -> None:
    many = replace(passes(), resources=tuple(f"GPU {gpu} · A" for gpu in range(gpus)))
    figure = gantt.gantt({f"plan {plan}": many for plan in range(plans)}, 0, 1, "title")
    assert figure.layout.height <= gantt.HEIGHT
    axis = figure.layout[f"xaxis{plans if plans > 1 else ''}"]
    assert axis.ticksuffix == " s" and axis.rangeslider.visible
    named = figure.layout.yaxis.tickvals
    lane = (figure.layout.yaxis.domain[1] - figure.layout.yaxis.domain[0]) * (figure.layout.height - 180) / gpus
    assert len(named) == 1 or (named[1] - named[0]) * lane >= theme.SMALLEST


def test_folded_lanes_last_from_the_first_of_their_gpus_to_the_last() -> None:
    cluster = cluster_presets()["mixed-8"].cluster
    folds = gantt.folds(cluster)
    assert list(folds) == [gantt.NODES, gantt.TYPES]
    groups, names = folds[gantt.TYPES]
    assert len(names) == len({gpu.type for gpu in cluster.gpus}) and names[0].endswith("× 2")
    assert [cluster.gpus[at].type for at in range(8)] == [names[group].split(" × ")[0] for group in groups]
    folded = gantt.fold(passes(1), np.array([0, 0]), ("both",))
    assert folded.resources == ("both",) and folded.total == passes(1).total
    gate = folded.events[folded.events["kind"] == "gate"]
    assert gate[["start", "end"]].to_numpy().tolist() == [[0, 2]]
    assert folded.events["kind"].tolist() == ["gate", "dispatch", "ffn"]
    assert gantt.gantt({"one": folded}, 0, 0, "title").data[0].customdata[0].split("<br>")[1] == "both"


def test_popularity_names_the_worst_layer_and_columns_of_a_traffic_matrix_are_gpus_with_whole_numbers() -> None:
    for layers, begin in ((1, "The busiest expert gets "), (61, "Layer 30 ")):
        load = np.ones((layers, 256))
        load[layers // 2, 0] = 2560
        assert workload_charts.popularity(load).layout.title.text.startswith(begin)
    figure = workload_charts.popularity(np.arange(4.0)[None], "GPU")
    assert figure.layout.title.text == "The busiest GPU gets 2× the mean"
    assert (figure.layout.xaxis.title.text, figure.layout.xaxis.dtick) == ("GPU", 1)


def test_traffic_marks_the_busiest_receiver_and_leaves_the_diagonal_out() -> None:
    matrix = np.array([[9e9, 1.0, 5.0], [1.0, 9e9, 5.0], [1.0, 1.0, 9e9]])
    figure = workload_charts.traffic(matrix, ("GPU 0 · <a href='x'>", "GPU 1 · A", "GPU 2 · A"))
    assert figure.layout.title.text.startswith("GPU 2 receives 2.14×")
    assert np.isnan(figure.data[0].z.diagonal()).all() and "<a" not in str(figure.to_dict())


def test_names_in_titles_are_no_markup_and_keep_their_quotes() -> None:
    """Plotly knows no `&quot;` and would show it."""
    assert theme.plain("""a "b" 'c' <i>d</i> & e""") == """a "b" 'c' &lt;i&gt;d&lt;/i&gt; &amp; e"""


def test_every_kind_has_a_colour_and_every_catalogue_type_a_known_one() -> None:
    assert set(theme.KIND_COLOURS) == set(theme.KIND_TITLES) == set(KINDS)
    colours = {name: theme.gpu_colour(name) for name in {*gpu_types(), *every_gpu_type()}}
    assert theme.OTHER_GPU not in colours.values() and theme.gpu_colour("a GPU of tomorrow") == theme.OTHER_GPU
    for (one, ours), (other, theirs) in combinations(sorted(colours.items()), 2):
        apart = math.dist(channels(ours), channels(theirs))
        assert apart > 15, f"{one} and {other} share a colour"
    assert all(contrast("#16201F", colour) >= TEXT for colour in colours.values())
    assert theme.gpu_colour("NVIDIA GB200 NVL") == theme.gpu_colour("GB200") != theme.gpu_colour("NVIDIA B200")


@pytest.mark.parametrize("text", ["**bold**", "<b>x</b>", "[a](b)", "$x$", ":red[x]", "`code`", "# head", "a_b_c"])
def test_plain_leaves_no_markdown(text: str) -> None:
    escaped = plain(text)
    assert escaped.replace("\\", "") == text
    specials = [index for index, char in enumerate(escaped) if char in "*<[$:`#_" and escaped[index - 1] != "\\"]
    assert not specials


def test_layers_that_take_about_as_long_are_no_finding_and_what_is_not_drawn_is_said() -> None:
    for seconds, title in (
        ([1.0, 1.0, 1.01], "All layers take about as long: 1 s"),
        ([1.0, 1.0, 1.5], "Layer 2 is slowest: 1.5 s, 1.29× mean"),
        ([1.0] * 29 + [2.0], "Layer 29 is slowest: 2 s, 1.94× mean (the 24 slowest of 30)"),
    ):
        waits = pd.DataFrame({"model": 0, "layer": range(len(seconds)), "kind": "ffn", "gpu": 0, "seconds": seconds})
        assert gantt.by_layer(waits).layout.title.text == title


APP = Path(theme.__file__).parents[1]
CONFIG = tomllib.loads((APP / ".streamlit" / "config.toml").read_text())
TOKENS = {name: CONFIG["theme"][name] for name in ("light", "dark")}
TEXT, GRAPHICS = 4.5, 3.0
"""Least contrasts of text, and of lines and bars that carry a meaning."""
CAPTION = 0.6
"""Opacity of Streamlit's captions."""


def channels(colour: str) -> list[int]:
    return [int(colour[place : place + 2], 16) for place in (1, 3, 5)]


def luminance(colour: str) -> float:
    """Relative luminance as WCAG defines it."""
    parts = [channel / 255 for channel in channels(colour)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(colour: str, ground: str) -> float:
    dark, light = sorted((luminance(colour), luminance(ground)))
    return (light + 0.05) / (dark + 0.05)


def over(colour: str, page: str, opacity: float) -> str:
    mixed = (opacity * top + (1 - opacity) * under for top, under in zip(channels(colour), channels(page), strict=True))
    return "#" + "".join(f"{round(part):02x}" for part in mixed)


@pytest.mark.parametrize("name", TOKENS)
def test_texts_have_the_contrast_of_aa_on_all_that_lies_below_them_and_marks_theirs_on_the_page(name):
    tokens = TOKENS[name]
    for page in (tokens["backgroundColor"], tokens["secondaryBackgroundColor"], tokens["dataframeHeaderBackgroundColor"]):
        texts = {token: colour for token, colour in tokens.items() if token.endswith("TextColor")}
        texts |= {token: tokens[token] for token in ("textColor", "linkColor")}
        for token in ("textColor", "codeTextColor"):
            texts[f"{token} of a caption"] = over(tokens[token], page, CAPTION)
        for token, colour in texts.items():
            assert contrast(colour, page) >= TEXT, (token, page)
    assert contrast("#FFFFFF", tokens["primaryColor"]) >= TEXT
    page = tokens["backgroundColor"]
    assert theme.PAGES[name == "dark"] == tuple(channels(page))
    for colour in (tokens["primaryColor"], theme.TEAL, theme.MARK, theme.SECOND, theme.ink(name == "dark")):
        assert contrast(colour, page) >= GRAPHICS, colour


def test_no_kind_of_event_looks_like_a_bottleneck():
    assert not {theme.MARK, theme.EXPOSED} & set(theme.KIND_COLOURS.values())


def test_the_name_on_an_open_popover_of_the_dark_sidebar_is_read():
    """Streamlit writes it in the primary colour, darker by a quarter of all lightness."""
    colour = channels(TOKENS["dark"]["sidebar"]["primaryColor"])
    hue, lightness, saturation = colorsys.rgb_to_hls(*(part / 255 for part in colour))
    darker = colorsys.hls_to_rgb(hue, lightness - 0.25, saturation)
    name = "#" + "".join(f"{round(255 * part):02x}" for part in darker)
    assert contrast(name, TOKENS["dark"]["sidebar"]["backgroundColor"]) >= TEXT


def test_in_the_dark_the_page_is_no_black_the_sidebar_below_it_and_fields_above():
    dark = TOKENS["dark"]
    grounds = dark["sidebar"]["backgroundColor"], dark["backgroundColor"], dark["secondaryBackgroundColor"]
    below, page, above = map(luminance, grounds)
    assert below < page < above and page > 0.005


@pytest.mark.parametrize("name", TOKENS)
def test_what_is_written_beside_a_plot_is_read(name):
    dark = name == "dark"
    figure = go.Figure(go.Heatmap(z=[[1]], colorbar={"title": "unit"})).add_annotation(text="note", font_size=14)
    drawn = go.Figure(theme.legible(figure, dark))
    fonts = [drawn.layout.xaxis.tickfont, drawn.layout.yaxis.title.font, drawn.layout.legend.font]
    fonts += [drawn.data[0].colorbar.tickfont, drawn.layout.annotations[0].font]
    for font in fonts:
        assert font.size >= 12 and contrast(font.color, TOKENS[name]["backgroundColor"]) >= TEXT
    assert drawn.layout.annotations[0].font.size == 14
    theme.legible(go.Figure(go.Bar(y=[1])).add_scatter(y=[1]), dark)


def test_each_face_is_a_file_beside_its_licence():
    static = APP / "static"
    assert CONFIG["server"]["enableStaticServing"]
    faces = CONFIG["theme"]["fontFaces"]
    for face in faces:
        file = APP / face["url"].removeprefix("app/")
        assert file.read_bytes()[:4] == b"wOF2", file
        licence = next(file.parent.glob(f"{face['family'].replace(' ', '')}-OFL.txt")).read_text()
        assert "SIL OPEN FONT LICENSE Version 1.1" in licence
    families = {face["family"] for face in faces}
    assert {CONFIG["theme"][use].split(",")[0] for use in ("font", "headingFont")} == families
    # Everybody who reaches the studio may read this folder: fonts and their licences alone.
    assert {path.suffix for path in static.rglob("*") if path.is_file()} == {".woff2", ".txt"}
    assert "<text" not in (APP / "wordmark.svg").read_text(), "a browser lends a picture none of the page's fonts"


@pytest.mark.parametrize(("entry", "lines"), [("a" * stacks.ENTRY, 2), ("a" * (stacks.ENTRY + 1), 3)])
def test_the_legend_takes_nothing_from_the_bars(entry: str, lines: int) -> None:
    figure = go.Figure([go.Bar(name=name) for name in ("one", "two", entry)] + [go.Bar(name="not in it", showlegend=False)])
    layout = stacks.arrange(figure, "title", ["plan", "other"], [0, 1], False).layout
    assert layout.margin.b == stacks.AXIS + lines * stacks.ENTRIES
    assert layout.height - layout.margin.b - layout.margin.t == pytest.approx(2.2 * stacks.ROW, abs=1)


def test_what_is_said_of_a_plan_is_whole_and_its_name_is_text() -> None:
    label = stacks.label("<b>" + "x" * 100, "90.8 ms, bound 75 ms")
    assert label.startswith("&lt;b&gt;x") and label.endswith("x: 90.8 ms, bound 75 ms")
    assert stacks.label("Aurora", "90.8 ms") == "Aurora: 90.8 ms"


NAMES, TIMES, BOUNDS = ["slow", "<b>fast</b>", "deployed one"], [3.0, 1.0, 2.0], [1.0, 1.0, math.nan]


def trace(figure, begin: str):
    return next(trace for trace in figure.data if (trace.name or "").startswith(begin))


def names_in(figure) -> list[str]:
    """Above the bars, from the top."""
    return [note.text for note in figure.layout.annotations if note.yanchor == "bottom"]


def test_the_fastest_is_on_top_the_open_one_has_its_own_colour_and_bounds_are_marked():
    figure = charts.ranked(NAMES, TIMES, BOUNDS, 2, 1)
    assert names_in(figure) == ["▸ &lt;b&gt;fast&lt;/b&gt;", "deployed one", "slow"]
    low, high = sorted(figure.layout.yaxis.range)
    assert list(figure.layout.yaxis.range) == [high, low], "the first row is the highest"
    opened, others = trace(figure, "The open"), trace(figure, "Other")
    assert list(opened.y) == [charts.BELOW] and list(opened.x) == [1]
    assert list(others.x) == [2, 3] and opened.marker.color != others.marker.color
    assert "<b>" not in str(figure.to_dict())
    # Every proven bound has a tick on its bar, and what is deployed a line through all.
    assert [x for x in trace(figure, "Bound").x if x is not None] == [1, 1, 1, 1]
    assert {round(y) for y in trace(figure, "Bound").y if y is not None} == {0, 2}
    line = trace(figure, "Deployed, 2 s")
    assert set(line.x) - {None} == {2} and {round(y) for y in line.y if y is not None} == {0, 1, 2}


def test_names_stand_above_their_bars_and_leave_them_the_whole_width():
    long = "Replication (EPLB) · " + "r" * 40 + " · seed 7"
    figure = charts.ranked([long, "b"], [1.0, 2.0], [0.5, 1.0], 0, 1)
    assert figure.layout.yaxis.visible is False, "names beside the bars take as much as the longest needs"
    names = [note for note in figure.layout.annotations if note.yanchor == "bottom"]
    assert names[0].text.startswith("Replication (EPLB)") and names[0].text.endswith("· seed 7 (deployed)")
    assert len(names[0].text) < len(long)
    tops = sorted(y - charts.BAR / 2 for bar in figure.data if bar.type == "bar" for y in bar.y)
    assert [(note.xref, note.x, note.y) for note in names] == [("paper", 0, top) for top in tops]
    for name in ("Bound", "Deployed"):
        ends = [y for y in trace(figure, name).y if y is not None]
        assert all(any(abs(y - top - charts.BAR / 2) < 0.3 for top in tops) for y in ends), "no line runs through a name"


@pytest.mark.parametrize(
    ("deployed", "title"),
    [
        (2, "&lt;b&gt;fast&lt;/b&gt; takes 1 s, +100.0 % over what is deployed"),
        (1, "No plan beats what is deployed"),
        (None, "&lt;b&gt;fast&lt;/b&gt; is fastest: 1 s"),
    ],
)
def test_the_title_is_against_what_is_deployed(deployed, title):
    assert charts.ranked(NAMES, TIMES, BOUNDS, deployed).layout.title.text == title
    assert charts.ranked(NAMES, TIMES, BOUNDS, deployed, so_far=True).layout.title.text == f"{title} so far"
    scoped = charts.ranked(NAMES, TIMES, BOUNDS, deployed, scope=", in sample").layout.title.text
    assert scoped == title + ", in sample" * (deployed == 2), "a gain says on which recording it is"
    assert charts.ranked(["a"], [0.0], [0.0], 0).layout.title.text == "a is fastest: 0 s"


def test_of_a_hundred_plans_the_fastest_are_drawn_and_what_is_deployed_and_open():
    times = [float(100 - at) for at in range(100)]
    figure = charts.ranked([f"plan {at}" for at in range(100)], times, [math.nan] * 100, 0, 3)
    shown = names_in(figure)
    assert len(shown) == charts.MOST + 2 and shown[0] == "plan 99" and shown[-2:] == ["▸ plan 3", "plan 0 (deployed)"]
    assert figure.layout.title.text.endswith(f"({charts.MOST + 2} of 100 plans)")
    assert figure.layout.height < 800


TURNED = Waterfall(
    deployed=2.0,
    rows=[
        Turn(knob="Placement", alone=1.5, after=1.5),
        Turn(knob="<b>Copies</b>, 1 spare slot", after=1.5),
        Turn(knob="Send order", alone=2, after=1),
    ],
    floor=0.8,
)


def test_the_knobs_fall_from_what_is_deployed_to_the_floor():
    figure = waterfall(TURNED, so_far=False)
    (steps,) = (trace for trace in figure.data if trace.type == "waterfall")
    assert list(steps.x) == [2, -0.5, 0, -0.5, 1] and list(steps.measure) == ["absolute", *["relative"] * 3, "total"]
    assert names_in(figure) == [
        "Deployed",
        "Placement",
        "&lt;b&gt;Copies&lt;/b&gt;, 1 spare slot",
        "Send order",
        "All knobs",
        "Left at most",
    ]
    beside = [note.text.strip() for note in figure.layout.annotations if note.yanchor != "bottom"]
    assert beside == ["2 s", "−500 ms", "0", "−500 ms", "1 s", "25 %"]
    (left,) = (trace for trace in figure.data if trace.type == "bar")
    alone = trace(figure, "This knob alone")
    assert (list(left.base), list(left.x)) == ([0.8], [pytest.approx(0.2)]) and list(alone.x) == [1.5, 2]
    assert set(trace(figure, "Floor, 800 ms").x) - {None} == {0.8}
    assert figure.layout.title.text == TURNED.in_words and "<b>" not in str(figure.to_dict())


def test_knobs_so_far_and_knobs_without_a_floor_say_no_more_than_is_known():
    figure = waterfall(TURNED.model_copy(update={"floor": None}), so_far=True)
    assert names_in(figure)[-1] == "Knobs so far" and not [trace for trace in figure.data if "Floor" in (trace.name or "")]
    assert figure.layout.title.text == "Placement saves 500 ms of 2 s, send order 500 ms so far"
    loose = waterfall(TURNED.model_copy(update={"floor": TURNED.total / 1e6}))
    assert loose.layout.annotations[-2].text == " > 1,000 %"
    assert waterfall(Waterfall(deployed=0.0)).layout.xaxis.range == (0, 1)
