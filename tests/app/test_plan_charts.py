"""Charts of training steps and of many plans draw the timelines, and their titles are true."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from app.charts import optimise as plan_charts
from app.charts import step as step_charts
from app.charts.theme import KIND_COLOURS, SECOND, SEQUENTIAL, readable, write_numbers
from engine.catalogue import cluster_presets, model_presets
from engine.compare.figures import Metrics, metrics
from engine.costs import Datasheet
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.simulate.two_phase import Figures
from engine.systems import TRAINING, run
from engine.timeline import COLUMNS, Timeline
from engine.training import balanced_load, usual_step
from engine.units import share

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
def plans(problem: Problem) -> dict[str, tuple[Plan, Timeline, Metrics]]:
    plans = {}
    for name in ("lancet", "deepspeed"):
        outcome = run(TRAINING[name], problem)
        plan = outcome.result.solution
        plans[plan.name] = plan, outcome.timeline, metrics(plan, problem, outcome.timeline)
    return plans


def bars(figure, name: str) -> list:
    return [trace for trace in figure.data if trace.type == "bar" and trace.name == name]


def drawn(figure, title: str) -> list[tuple[float, float]]:
    return [(base, base + length) for trace in bars(figure, title) for base, length in zip(trace.base, trace.x, strict=True)]


def test_bars_of_a_plan_add_up_to_its_time_with_its_bound_and_the_title_says_what_was_hidden(plans) -> None:
    figures = {name: figures_of_plan for name, (_, _, figures_of_plan) in plans.items()}
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
    assert first == "Lancet: 90.8 ms, bound 75 ms, +21 %" and second.startswith("DeepSpeed (no overlap): ")
    assert step_charts.decomposition(figures).layout.title.text == "Lancet waits 15 % of its 90.8 ms for the network"


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
    for _, timeline, figures in plans.values():
        part = step_charts.stretch(timeline)
        network = part.events[part.events["stream"] == "network"]
        each = step_charts.exposed_seconds(network, part.exposed[0])
        alone = network["kind"].isin(["dispatch", "combine"])
        assert each.min() >= 0 and np.all(each <= (network["end"] - network["start"]) * (1 + 1e-9))
        assert each[alone].sum() <= figures.exposed_communication * (1 + 1e-9) <= each.sum() * (1 + 1e-9)


def test_of_long_steps_and_many_lanes_only_what_a_browser_can_draw() -> None:
    rows = [(0, "compute", i, i + 1, "dense", i // 500, 0, -1, 0.0) for i in range(8000)]
    long = Timeline(pd.DataFrame(rows, columns=list(COLUMNS)), ("GPU 0",), "simulated", "test", ("x",) * 8000)
    assert step_charts.last_that_fits([long], "forward", 0, 15) == step_charts.MOST_BARS // 500 - 1
    assert step_charts.last_that_fits([long, long], "forward", 3, 15) == 3 + step_charts.MOST_BARS // 1000 - 1
    rows = [(gpu, "compute", 0.0, 1.0 + gpu, "dense", 0, 0, -1, 0.0) for gpu in range(9)]
    names = tuple(f"GPU {gpu}" for gpu in range(9))
    many = Timeline(pd.DataFrame(rows, columns=list(COLUMNS)), names, "simulated", "test", ("x",) * 9)
    assert step_charts.stretch(many).lanes == (5, 6, 7, 8)


def point(kept: float, balance: float, seconds: float = 1e-3) -> dict:
    return {"kept_share": kept, "balancedness": balance, "weight": 0.5, "seconds": seconds}


def test_a_front_runs_from_balance_to_affinity_in_any_order():
    figure = plan_charts.front([point(0.4, 0.6), point(0.2, 0.9), point(0.3, 0.8)], {}, [(0.1, 0.5)], "other <b>")
    front, elsewhere = figure.data
    assert list(front.x) == [20, 30, 40] and list(front.y) == [0.9, 0.8, 0.6]
    assert list(elsewhere.x) == [10] and elsewhere.marker.color == SECOND and "<b>" not in elsewhere.name
    assert "20 % kept at balancedness 0.9 to 40 % at 0.6" in figure.layout.title.text

    others = {"Linear": (0.125, 0.7), "RCS": (0.1250001, 0.7), "<i>mine</i>": (0.3, 0.5)}
    names = plan_charts.front([point(0.4, 0.6)], others).data[1].text
    assert sorted(names) == ["&lt;i&gt;mine&lt;/i&gt;", "Linear, RCS"], "plans at one place share a label"


def test_a_front_of_rows_has_few_rows_to_the_right():
    points = [{"rows": rows, "balancedness": balance, "weight": 0.5, "seconds": 1e-3} for rows, balance in ((2, 0.6), (3, 0.9))]
    figure = plan_charts.front(points, {"Linear": (3.54321, 0.7)}, across=plan_charts.ROWS)
    front, others = figure.data
    assert list(front.x) == [3, 2] and list(others.x) == [3.543]
    assert figure.layout.xaxis.autorange == "reversed" and "rows" in figure.layout.xaxis.title.text
    assert figure.layout.title.text == "From 3 rows per token at balancedness 0.9 to 2 at 0.6"


def test_a_matrix_of_times_is_relative_to_each_recordings_own_plan_and_its_scale_has_some_width():
    figure = plan_charts.matrix(["a", "b"], [[1e-3, 3e-3], [2e-3, 2e-3]], "seconds")
    np.testing.assert_allclose(figure.data[0].z, [[1, 1.5], [2, 1]])
    assert "up to 2× " in figure.layout.title.text and list(figure.data[1].text) == ["1 ms", "3 ms", "2 ms", "2 ms"]
    figure = plan_charts.matrix(["a", "b"], [[1.0, 2.0 + 1e-9], [1.0008, 2.0]], "seconds")
    assert np.array_equal(figure.data[0].z, np.ones((2, 2)))
    assert (figure.data[0].zmin, figure.data[0].zmax) == (1.0, 1.05)
    assert figure.layout.title.text.startswith("No plan is slower")
    figure = plan_charts.matrix(["a", "b"], [[1.0, 2.02], [1.0, 2.0]], "seconds")
    assert figure.data[0].zmax == 1.05 and "1.01×" in figure.layout.title.text
    faster = plan_charts.matrix(["a", "b"], [[1.0, 1.0], [1.0, 2.0]], "seconds").data[0]
    assert faster.zmin == 0.5 and faster.zmax == pytest.approx(1.0)
    nothing = plan_charts.matrix(["a", "b"], [[0.0, 0.0], [0.0, 0.0]], "kept_local").data[0]
    assert (nothing.zmin, nothing.zmax) == (0.0, 0.05)
    for score in plan_charts.SCORES:
        filling = plan_charts.matrix(["a", "b"], [[0.5, 0.25], [None, None]], score)
        assert np.isnan(filling.data[0].z[1]).all() and filling.data[1].text[2] == "…"
        assert filling.layout.title.text == "2 of 4 scores so far"
        assert plan_charts.matrix(["a", "b"], [[None, None], [None, None]], score).layout.title.text


def figures(**median: float) -> dict[str, Figures]:
    rest = dict.fromkeys(("median_layer", "tail_layer", "median_all_to_all", "tail_all_to_all", "waiting"), 1.0)
    return {name: Figures(median.get(name, 1.5), 2.0, **rest) for name in plan_charts.SCHEMES}


@pytest.mark.parametrize(
    ("baseline", "lina", "said"), [(1.8, 1.2, "is 1.5× as fast as no"), (1.2, 2.4, "takes 2× the time of no")]
)
def test_lina_says_who_wins(baseline: float, lina: float, said: str) -> None:
    assert f"{said} scheduling" in plan_charts.lina(figures(baseline=baseline, lina=lina), 3).layout.title.text


def test_accuracy_names_the_best_path_length():
    runs = [
        SimpleNamespace(options=SimpleNamespace(path_length=length), accuracy=right, accuracy_of_layer=(None, right, right))
        for length, right in ((1, 0.25), (3, 0.75))
    ]
    figure = plan_charts.accuracy(runs)
    assert figure.layout.title.text == "Path length 3 is right most often: 75 %"
    assert figure.data[1].y[0] is None and figure.data[1].y[1] == 75


@pytest.mark.parametrize("dark", [False, True])
def test_numbers_in_cells_can_be_read(dark):
    figure = plan_charts.go.Figure()
    scale = {"z": [[0.0, 1.0]], "zmin": 0, "zmax": 1, "colorscale": SEQUENTIAL}
    write_numbers(figure, scale, [["0", "1"]], dark)
    pale, full = figure.data[0].textfont.color
    assert pale == readable((0, 137, 123, 0.0), dark) and full == readable((0, 137, 123, 1.0), dark)
    assert pale == ("#FFFFFF" if dark else "#16201F") and full == readable((0, 137, 123, 1.0), not dark)
