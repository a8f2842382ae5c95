"""Charts say what they are told to, in the agreed colours, whatever the sizes."""

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from app.charts import cluster as cluster_chart
from app.charts import gantt, theme
from app.charts import gantt as waits_charts
from app.charts import workload as workload_charts
from app.tables import plain
from engine.catalogue import cluster_presets, gpu_types
from engine.simulate.events import EventLog
from engine.simulate.flows import Flows
from engine.timeline import KINDS, Timeline

ROOT = Path(__file__).parents[2]


def timeline(layers: int = 2) -> Timeline:
    log, now = EventLog(), 0.0
    for layer in range(layers):
        now = log.compute("gate", layer, now, np.array([1.0, 2.0]))
        flows = Flows(np.array([0]), np.array([1]), np.array([8.0]), np.array([0.0]), np.array([3.0]))
        now = log.network("dispatch", layer, now, flows)
        now = log.compute("ffn", layer, now, np.array([4.0, 1.0]))
    return Timeline(log.frame(), ("GPU 0 · <b>A</b>", "GPU 1 · B"), "simulated", "test")


def test_names_in_titles_are_no_markup_and_keep_their_quotes():
    """Plotly knows no `&quot;` and would show it."""
    assert theme.plain("""a "b" 'c' <i>d</i> & e""") == """a "b" 'c' &lt;i&gt;d&lt;/i&gt; &amp; e"""


def test_gantt_draws_every_event_of_the_chosen_layers_once() -> None:
    figure = gantt.gantt({"one": timeline(3)}, 1, 1, "title")
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert sum(len(trace.x) for trace in bars) == 5
    assert min(min(trace.base) for trace in bars) == 0
    assert {trace.marker.color for trace in bars} == {theme.KIND_COLOURS[kind] for kind in ("gate", "dispatch", "ffn")}


def test_the_critical_path_is_as_long_as_the_timeline_and_follows_the_slowest() -> None:
    figure = gantt.gantt({"one": timeline(1)}, 0, 0, "title")
    path = next(trace for trace in figure.data if trace.name == "Critical path")
    assert list(path.x) == [0, 2, 2, 5, 5, 9]
    assert [round(lane) for lane in path.y] == [1, 1, 0, 0, 0, 0]


def test_bars_equal_their_legend_and_only_what_was_predicted_is_outlined() -> None:
    measured = replace(timeline(), source="measured")
    figure = gantt.gantt({"predicted": timeline(), "measured": measured}, 0, 1, "title")
    for kind in ("gate", "dispatch", "ffn"):
        predicted, solid = (trace.marker for trace in figure.data if trace.name == theme.KIND_TITLES[kind])
        assert predicted.color == solid.color == theme.KIND_COLOURS[kind] and predicted.opacity in (None, 1)
        assert (predicted.line.width, solid.line.width) == (1, 0)


@pytest.mark.parametrize("dark", [False, True])
def test_the_critical_path_has_a_colour_that_no_bar_has(dark: bool) -> None:
    figure = gantt.gantt({"one": timeline()}, 0, 1, "title", dark=dark)
    path = next(trace for trace in figure.data if trace.name == "Critical path")
    assert path.line.color == theme.ink(dark) not in theme.KIND_COLOURS.values() and path.line.width < 2


@pytest.mark.parametrize(("plans", "gpus"), [(1, 2), (1, 16), (3, 16), (3, 64)])
def test_a_chart_is_never_higher_than_a_laptop_and_has_time_and_range_below(plans: int, gpus: int) -> None:
    many = replace(timeline(), resources=tuple(f"GPU {gpu} · A" for gpu in range(gpus)))
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
    folded = gantt.fold(timeline(1), np.array([0, 0]), ("both",))
    assert folded.resources == ("both",) and folded.total == timeline(1).total
    gate = folded.events[folded.events["kind"] == "gate"]
    assert gate[["start", "end"]].to_numpy().tolist() == [[0, 2]]
    assert folded.events["kind"].tolist() == ["gate", "dispatch", "ffn"]
    assert gantt.gantt({"one": folded}, 0, 0, "title").data[0].customdata[0].split("<br>")[1] == "both"


def test_bounds_carry_their_value() -> None:
    figure = gantt.gantt({"one": timeline()}, 0, 1, "title", {"one": 12.0})
    assert any("12 s" in (annotation.text or "") for annotation in figure.layout.annotations)


def test_names_are_not_markup_in_plotly() -> None:
    figure = gantt.gantt({"<i>plan</i>": timeline()}, 0, 1, "title")
    text = str(figure.to_dict())
    assert "<i>" not in text
    assert "<b>" not in text


def test_a_long_timeline_is_cut_to_what_a_browser_can_draw() -> None:
    long = timeline(5000)
    fits = gantt.layers_that_fit([long])
    assert len(long.events) > gantt.MOST_BARS >= fits * 5


@pytest.mark.parametrize("layers, experts", [(1, 1), (8, 16), (61, 256)])
def test_popularity_names_the_worst_layer(layers: int, experts: int) -> None:
    load = np.ones((layers, experts))
    load[layers // 2, 0] = 10 * experts
    title = workload_charts.popularity(load).layout.title.text
    assert title.startswith(f"Layer {layers // 2} " if layers > 1 else "The busiest expert gets ")


def test_columns_of_a_traffic_matrix_are_gpus_with_whole_numbers() -> None:
    figure = workload_charts.popularity(np.arange(4.0)[None], "GPU")
    assert figure.layout.title.text == "The busiest GPU gets 2× the mean"
    assert (figure.layout.xaxis.title.text, figure.layout.xaxis.dtick) == ("GPU", 1)


def test_traffic_marks_the_busiest_receiver_and_leaves_the_diagonal_out() -> None:
    matrix = np.array([[9e9, 1.0, 5.0], [1.0, 9e9, 5.0], [1.0, 1.0, 9e9]])
    figure = workload_charts.traffic(matrix, ("GPU 0 · A", "GPU 1 · A", "GPU 2 · A"))
    assert figure.layout.title.text.startswith("GPU 2 receives 2.14×")
    assert np.isnan(figure.data[0].z.diagonal()).all()


def test_a_gpu_type_is_not_markup_in_the_traffic_chart() -> None:
    figure = workload_charts.traffic(np.ones((2, 2)), ("GPU 0 · <a href='x'>", "GPU 1 · B"))
    assert "<a" not in str(figure.to_dict())


def test_every_preset_cluster_can_be_drawn() -> None:
    for preset in cluster_presets().values():
        figure = cluster_chart.picture(preset.cluster)
        drawn = next(trace for trace in figure.data if trace.mode == "markers+text")
        assert len(drawn.x) == len(preset.cluster.gpus)


def test_every_kind_has_a_colour_and_every_catalogue_type_a_known_one() -> None:
    assert set(theme.KIND_COLOURS) == set(theme.KIND_TITLES) == set(KINDS)
    assert all(theme.gpu_colour(name) != theme.OTHER_GPU for name in gpu_types())
    assert theme.gpu_colour("a GPU of tomorrow") == theme.OTHER_GPU


@pytest.mark.parametrize("text", ["**bold**", "<b>x</b>", "[a](b)", "$x$", ":red[x]", "`code`", "# head", "a_b_c"])
def test_plain_leaves_no_markdown(text: str) -> None:
    escaped = plain(text)
    assert escaped.replace("\\", "") == text
    specials = [index for index, char in enumerate(escaped) if char in "*<[$:`#_" and escaped[index - 1] != "\\"]
    assert not specials


def imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    packages = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            packages |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            packages.add(node.module.split(".")[0])
    return packages


def test_the_engine_knows_neither_streamlit_nor_plotly_and_charts_know_no_streamlit() -> None:
    for path in (ROOT / "engine").rglob("*.py"):
        assert not imports(path) & {"streamlit", "plotly", "app"}, path
    for path in (ROOT / "app" / "charts").glob("*.py"):
        assert "streamlit" not in imports(path), path


def test_layers_that_take_about_as_long_are_no_finding_and_what_is_not_drawn_is_said() -> None:
    def title(seconds: list[float]) -> str:
        waits = pd.DataFrame({"model": 0, "layer": range(len(seconds)), "kind": "ffn", "gpu": 0, "seconds": seconds})
        return waits_charts.by_layer(waits).layout.title.text

    assert title([1.0, 1.0, 1.01]) == "All layers take about as long: 1 s"
    assert title([1.0, 1.0, 1.5]) == "Layer 2 is slowest: 1.5 s, 1.29× mean"
    assert title([1.0] * 29 + [2.0]) == "Layer 29 is slowest: 2 s, 1.94× mean (the 24 slowest of 30)"
