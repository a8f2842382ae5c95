"""Charts of a training step: bars, lanes, texts of its events, views, and legends with room for all lines."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from app.charts import gantt, theme
from app.charts import step as step_charts
from app.charts.theme import KIND_COLOURS
from engine.catalogue import cluster_presets, model_presets
from engine.compare.figures import Metrics, metrics
from engine.costs import Datasheet
from engine.problem import Problem, make_problem
from engine.systems import TRAINING, run
from engine.timeline import COLUMNS, Timeline
from engine.training import balanced_load, usual_step
from engine.units import share
from tests.cases.simulations import passes

EVENTS = [
    (0, "compute", 0.0, 2.0, "dense", 0, 0, -1, 0.0),
    (0, "network", 1.0, 4.0, "dispatch", 0, 0, -1, 8e6),
    (0, "compute", 4.0, 5.0, "dx", 0, 0, -1, 0.0),
    (0, "network", 5.0, 6.0, "all_reduce", -1, 0, -1, 2e6),
    (0, "compute", 5.5, 7.0, "dw", 1, 0, -1, 0.0),
    (1, "compute", 0.0, 1.0, "dense", 0, 0, -1, 0.0),
    (1, "network", 1.0, 4.0, "dispatch", 0, 0, -1, 8e6),
    (1, "compute", 4.5, 5.0, "dx", 0, 0, -1, 0.0),
]
LANES, COPIES = ["exposed", "all-to-all", "all-reduce", "compute"], "Host: copies, update"
LETTERS = (theme.NARROW - theme.SYMBOL) // theme.LETTER
"""Letters of a legend's entry that fills a line."""
LABELS = (*("0.qkv", "<b>0.dispatch</b>", "dx.0.qkv", "all_reduce.0.qkv", "dw.1.qkv", "0.qkv", "<b>0.dispatch</b>"), "dx.0.qkv")


@pytest.fixture
def timeline() -> Timeline:
    events = pd.DataFrame(EVENTS, columns=list(COLUMNS))
    return Timeline(events, ("GPU 0 · <i>A</i> and 3 like it", "GPU 4 · B"), "simulated", "test", LABELS)


@pytest.fixture(scope="module")
def problem() -> Problem:
    model, cluster = model_presets()["GPT2-S-MoE"].model, cluster_presets()["lancet-p4de-2-nodes"].cluster
    return make_problem(balanced_load(model), cluster, model, Datasheet(), step=usual_step(model, len(cluster.gpus)))


@pytest.fixture(scope="module")
def plans(problem: Problem) -> dict[str, tuple[Timeline, Metrics]]:
    """Timelines and figures of two plans by name."""
    outcomes = [run(TRAINING[name], problem) for name in ("lancet", "deepspeed")]
    plans = [(outcome.result.solution, outcome.timeline) for outcome in outcomes]
    return {plan.name: (timeline, metrics(plan, problem, timeline)) for plan, timeline in plans}


def bars(figure, name: str) -> list:
    return [trace for trace in figure.data if trace.type == "bar" and trace.name == name]


def drawn(figure, title: str) -> list[tuple[float, float]]:
    return [(base, base + length) for trace in bars(figure, title) for base, length in zip(trace.base, trace.x, strict=True)]


def test_bars_of_a_plan_add_up_to_its_time_with_its_bound_and_the_title_says_what_was_hidden(plans) -> None:
    figures = {name: figures_of_plan for name, (_, figures_of_plan) in plans.items()}
    lancet, deepspeed = figures["Lancet"], figures["DeepSpeed (no overlap)"]
    figure = step_charts.decomposition(figures, "DeepSpeed (no overlap)")
    total = np.sum([trace.x for trace in figure.data if trace.type == "bar"], axis=0)
    assert total == pytest.approx([lancet.total * 1e3, deepspeed.total * 1e3])
    assert bars(figure, step_charts.EXPOSED_TITLE)[0].x[1] == pytest.approx(deepspeed.exposed_communication * 1e3)
    hidden = share(1 - lancet.exposed_communication / deepspeed.exposed_communication)
    assert figure.layout.title.text == f"Lancet hides {hidden} of DeepSpeed's exposed communication"
    trace = next(trace for trace in figure.data if trace.name.startswith("Bound"))
    bounds = [metrics.order_bound * 1e3 for metrics in figures.values() for _ in "ab"]
    assert trace.line.dash == "dash" and [at for at in trace.x if at is not None] == pytest.approx(bounds)
    first, second = (annotation.text for annotation in figure.layout.annotations)
    assert first == "Lancet: 91 ms, 7.7 % above bound 84.5 ms" and second.startswith("DeepSpeed (no overlap): ")
    assert step_charts.decomposition(figures).layout.title.text == "Lancet waits 14 % of its 91 ms for the network"


def test_lanes_of_network_and_compute_are_apart_what_stayed_exposed_too_predictions_are_outlined(timeline: Timeline) -> None:
    both = {"one": timeline, "two": replace(timeline, source="measured")}
    figure = step_charts.step_gantt(both, dict.fromkeys(both, step_charts.stretch(timeline)), "title")
    assert [trace.marker.line.width for trace in bars(figure, "Dispatch all-to-all")] == [1, 1, 0, 0]
    assert all(trace.marker.opacity in (None, 1) for trace in figure.data if trace.type == "bar")
    figure = step_charts.step_gantt({"one": timeline}, {"one": step_charts.stretch(timeline)}, "title")
    assert drawn(figure, step_charts.EXPOSED_TITLE) == [(2, 4), (5, 5.5), (1, 4)]
    marks = bars(figure, step_charts.EXPOSED_TITLE)
    assert all(trace.marker.pattern.shape for trace in marks) and len({y for trace in marks for y in trace.y}) == 2
    ticks = list(zip(figure.layout.yaxis.tickvals, figure.layout.yaxis.ticktext, strict=True))
    for kind, title, lane in (
        ("dispatch", "Dispatch all-to-all", "all-to-all"),
        ("all_reduce", "All-reduce", "all-reduce"),
        ("dx", "dX, gradient of inputs", "compute"),
    ):
        for trace in bars(figure, title):
            assert trace.marker.color == KIND_COLOURS[kind]
            assert set(trace.y) <= {y for y, text in ticks if text == lane}
    assert sum(len(trace.x) for trace in figure.data if trace.name != step_charts.EXPOSED_TITLE) == len(EVENTS)


def test_exchanges_of_sizes_are_bars_of_their_own_on_the_lane_of_the_all_to_alls(plans) -> None:
    timeline, _ = plans["Lancet"]
    figure = step_charts.step_gantt({"Lancet": timeline}, {"Lancet": step_charts.stretch(timeline)}, "title")
    (sizes,), (dispatch, *_) = bars(figure, "Exchange of sizes"), bars(figure, "Dispatch all-to-all")
    assert len(sizes.x) == sum(label.startswith("sizes of") for label in timeline.labels) > 12
    assert set(sizes.y) == set(dispatch.y) and sizes.showlegend and max(sizes.x) < min(dispatch.x)
    assert all("sizes of " in text and "Exchange of sizes" in text for text in sizes.customdata)


def test_hover_names_operator_and_bytes_without_markup_and_bound_and_backward_pass_are_lines(timeline: Timeline) -> None:
    part = step_charts.stretch(timeline)
    figure = step_charts.step_gantt({"<i>p</i>": timeline}, {"<i>p</i>": part}, "title", {"<i>p</i>": 6.0})
    text = bars(figure, "Dispatch all-to-all")[0].customdata[0]
    assert "&lt;b&gt;0.dispatch" in text and "8 MB · 3 s, from 1 s" in text and "exposed for 2 s" in text
    assert "exposed for 500 ms" in bars(figure, "All-reduce")[0].customdata[0]
    assert "<i>" not in str(figure.to_dict())
    lines = {(shape.x0, shape.line.dash) for shape in figure.layout.shapes}
    assert lines == {(6, "dash"), (4, "dot"), (4.5, "dot")}
    assert {"bound 6 s", "forward | backward"} <= {annotation.text for annotation in figure.layout.annotations}
    assert figure.layout.xaxis.rangeslider.visible and figure.layout.xaxis.rangeslider.range[0] == 0


def test_a_view_of_a_step_keeps_names_and_the_whole_range_and_the_longest_waits_come_first(timeline: Timeline) -> None:
    part = step_charts.stretch(timeline)
    whole, near = (
        step_charts.step_gantt({"p": timeline}, {"p": part}, "title", view=view).layout for view in (None, (1.0, 2.5))
    )
    assert list(near.xaxis.range) == [1.0, 2.5] and near.xaxis.rangeslider.range == whole.xaxis.rangeslider.range
    (name,) = [note for note in near.annotations if note.text.startswith("p · ")]
    assert (name.x, name.xref) == (0, "x domain"), "in sight in every view"
    assert step_charts.longest_waits(part) == [(2, 4), (5, 5.5)]


def test_every_legend_has_the_kinds_in_one_order_with_room_for_all_lines(timeline: Timeline) -> None:
    order = [theme.PARTS[kind][0] for kind in theme.PARTS if kind in theme.KIND_TITLES and kind != "attention"]
    assert [title for title in theme.KIND_TITLES.values() if title in order] == order
    figure = step_charts.step_gantt({"p": timeline}, {"p": step_charts.stretch(timeline)}, "title")
    # Of another lane, which has a kind that the first one lacks.
    late = replace(timeline, events=timeline.events.assign(kind=["dense", *["dw"] * 4, "gate", "dispatch", "ffn"]))
    other = step_charts.step_gantt({"p": late}, {"p": step_charts.stretch(late)}, "title")
    for own in (figure, other, gantt.gantt({"p": passes()}, 0, 1, "title")):
        entries = [trace for trace in own.data if trace.showlegend and trace.legendrank is not None]
        ranked = sorted((trace.legendrank, trace.name) for trace in entries)
        shown = [name for _, name in ranked]
        assert len(shown) >= 3 and shown == [title for title in theme.KIND_TITLES.values() if title in shown]


@pytest.mark.parametrize(
    ("names", "lines"),
    [(["a"], 1), (["a" * LETTERS], 1), (["a" * LETTERS, "b"], 2), (["a" * 40] * 4, 2), (["a" * 40] * 5, 3), ([], 1)],
)
def test_lines_of_a_legend(names: list[str], lines: int) -> None:
    assert theme.legend_lines(names) == lines


def test_a_legend_of_more_lines_takes_nothing_from_the_lanes() -> None:
    one, two = passes(), passes()
    two = replace(two, events=pd.concat([two.events, two.events.assign(model=1)]))
    few, many = (gantt.gantt({"p": own}, 0, 1, "title").layout for own in (one, two))
    assert many.margin.t - few.margin.t == theme.LINE
    assert many.height - many.margin.t == few.height - few.margin.t


def test_a_part_begins_at_nought_and_keeps_what_runs_meanwhile(timeline: Timeline) -> None:
    part = step_charts.stretch(timeline, "backward", 1, 1)
    assert part.length == pytest.approx(1.5)
    assert part.events["label"].tolist() == ["all_reduce.0.qkv", "dw.1.qkv"]
    assert part.events["start"].tolist() == [0, 0] and part.events["end"].tolist() == [0.5, 1.5]
    assert part.backward == (None, None) and not any(len(intervals) for intervals in part.exposed)
    forward = step_charts.stretch(timeline, "forward")
    assert forward.length == 4 and set(forward.events["kind"]) == {"dense", "dispatch"}
    assert len(step_charts.stretch(timeline, "forward", 7, 9).events) == 0


def test_exposed_seconds_of_events_add_up_to_the_timelines_own(plans) -> None:
    for timeline, figures in plans.values():
        part = step_charts.stretch(timeline)
        network = part.events[part.events["stream"] == "network"]
        each = step_charts.exposed_seconds(network, part.exposed[0])
        alone = network["kind"].isin(["dispatch", "combine"])
        assert each.min() >= 0 and np.all(each <= (network["end"] - network["start"]) * (1 + 1e-9))
        assert each[alone].sum() <= figures.exposed_communication * (1 + 1e-9) <= each.sum() * (1 + 1e-9)


def test_of_long_steps_and_many_lanes_only_what_a_browser_can_draw() -> None:
    def of_rows(rows: list[tuple], names: tuple[str, ...]) -> Timeline:
        return Timeline(pd.DataFrame(rows, columns=list(COLUMNS)), names, "simulated", "test", ("x",) * len(rows))

    long = of_rows([(0, "compute", i, i + 1, "dense", i // 500, 0, -1, 0.0) for i in range(8000)], ("GPU 0",))
    assert step_charts.last_that_fits([long], "forward", 0, 15) == step_charts.MOST_BARS // 500 - 1
    assert step_charts.last_that_fits([long, long], "forward", 3, 15) == 3 + step_charts.MOST_BARS // 1000 - 1
    rows = [(gpu, "compute", 0.0, 1.0 + gpu, "dense", 0, 0, -1, 0.0) for gpu in range(9)]
    many = of_rows(rows, tuple(f"GPU {gpu}" for gpu in range(9)))
    assert step_charts.stretch(many).lanes == (5, 6, 7, 8)


def test_copies_from_and_to_the_host_have_a_lane_of_their_own_only_where_there_are_some(problem):
    outcome = run(TRAINING["lina"], problem, {"packing": "lina", "offload": "packed"})
    without = run(TRAINING["lina"], problem, {"packing": "lina"})
    for found, lanes in ((outcome, [*LANES, "host"]), (without, LANES)):
        figure = step_charts.step_gantt({"a": found.timeline}, {"a": step_charts.stretch(found.timeline)}, "a")
        assert list(figure.layout.yaxis.ticktext) == lanes
        copies = bars(figure, COPIES)
        assert bool(copies) == ("host" in lanes)
    (copies,) = bars(step_charts.step_gantt({"a": outcome.timeline}, {"a": step_charts.stretch(outcome.timeline)}, "a"), COPIES)
    assert len(set(copies.y)) == 1
    events = outcome.timeline.events
    assert len(copies.x) == ((events["resource"] == 0) & (events["kind"] == "host_copy")).sum()
    assert any("MB" in text for text in copies.customdata)
