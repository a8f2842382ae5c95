"""Charts of studies and sweeps state the findings and draw the simulated times."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from app.charts import sizing as sizing_charts
from app.charts import sweep as sweep_charts
from app.charts import what_if as live
from app.charts import what_if_studies as study_charts
from app.charts.what_if import Case
from app.what_if import capacity
from engine.catalogue import gpu
from engine.compare.capacity import CapacityPoint
from engine.compare.contention import ContentionPoint
from engine.compare.imprecision import ImprecisionPoint
from engine.compare.sensitivity import ANEW, CurvePoint, SensitivityPoint
from engine.compare.sweep import SweepPoint
from engine.compare.what_if import Outlook
from engine.jobs.tasks import SizedPoint
from engine.serving.deployment import Demand, Deployment, Ranks
from engine.sizing.deployments import Point
from engine.sizing.inputs import Catalogue, ServingTarget, Target
from tests.strategies import cluster_of


def outlook(scale: float = 1.0, **more) -> Outlook:
    parts = {"gate": 0.25 * scale, "dispatch": 0.75 * scale}
    usual = {"parts": parts, "resources": ("GPU 0 · A", "GPU 1 · B", "GPU 2 · B"), "layers": np.array([0.25, 0.75]) * scale}
    busy = {stream: np.array([1.0, 2.0, 1.0]) * scale / 4 for stream in ("compute", "network")}
    return Outlook(**{"total": scale, "bound": 0.9 * scale} | usual | busy | more)


def test_totals_before_and_after() -> None:
    cases = [
        Case("Aurora", outlook(1.0), outlook(0.5)),
        Case("<b>other</b> (X)", outlook(2.0), outlook(1.0)),
        Case("Replanned", None, outlook(0.25)),
    ]
    figure = live.totals(cases, "network 2×")
    assert figure.layout.title.text == ("Aurora takes 500 ms instead of 1 s, +100.0 % over &lt;b&gt;other&lt;/b&gt;")
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert [bar.name for bar in bars] == ["Gate", "Dispatch all-to-all"]
    assert np.allclose(sum(np.array(bar.x) for bar in bars), [1, 0.5, 2, 1, 0.25])
    assert [note.text for note in figure.layout.annotations] == [
        "Aurora, now: 1 s",
        "Aurora, changed: 500 ms, 0.5× today's",
        "&lt;b&gt;other&lt;/b&gt;, now: 2 s",
        "&lt;b&gt;other&lt;/b&gt;, changed: 1 s, 0.5× today's",
        "Replanned, changed: 250 ms, 0.5× that of Aurora, changed",
    ]
    assert figure.layout.yaxis.visible is False, "names beside the bars take their room"
    assert "changed: network 2×" in figure.layout.xaxis.title.text


@pytest.mark.parametrize(
    "after, other, sentence",
    [
        (None, 1.5, "Aurora takes 1 s, +50.0 % over Rival"),
        (None, 1.0, "Aurora takes 1 s, as long as Rival"),
        (1.0, None, "Aurora takes 1 s as before"),
    ],
)
def test_findings(after: float | None, other: float | None, sentence: str) -> None:
    cases = [Case("Aurora", outlook(), after and outlook(after))]
    cases += [Case("Rival (R)", outlook(other), None)] if other else []
    assert live.finding(cases) == sentence
    bound = [
        Case(case.name, *(part and replace(part, simulated=False) for part in (case.before, case.after))) for case in cases
    ]
    assert live.finding(bound) == sentence.replace("Aurora takes", "Aurora takes at least")


def test_the_busiest_gpu_is_marked_and_a_bound_is_called_one() -> None:
    case = Case("Aurora", outlook(), outlook(0.5, simulated=False))
    figure = live.per_gpu(case, overlaps=False)
    assert figure.layout.title.text == "GPU 1 is busiest, 50 % communicating"
    assert figure.layout.annotations[0].x == 1 and "(bound)" in figure.layout.yaxis.title.text
    assert list(figure.layout.xaxis.ticktext) == ["0", "1", "2"]
    now = next(trace for trace in figure.data if trace.name == "now")
    assert np.allclose(now.y, [0.5, 1, 0.5])
    assert live.per_gpu(Case("A", outlook(), None), overlaps=True).layout.barmode == "group"


def test_lines_of_layers_name_the_longest_and_long_names_keep_both_ends() -> None:
    rival = "Linear placement of experts · on alpha-code"
    figure = live.per_layer([Case("Aurora", outlook(), outlook(0.5)), Case(rival, outlook(2), outlook(1))])
    assert figure.layout.title.text.startswith("Layer 1 is slowest: 375 ms, 1.5× mean")
    now, aurora, shown = (trace.name for trace in figure.data)
    assert (now, aurora, len(shown)) == ("now", "Aurora", live.NAME)
    assert shown.startswith("Linear place") and shown.endswith("alpha-code")


@pytest.mark.parametrize(
    "busy, title",
    [
        ((1.0, 1.01, 1.0), "All GPUs are about equally busy"),
        ((1.0, 2.0, 1.99), "The 2 B are busiest"),
        ((2.0, 1.99, 1.0), "Several GPUs are busiest"),
        ((2.0, 1.9, 1.0), "GPU 0 is busiest"),
    ],
)
def test_of_gpus_that_are_about_as_busy_none_is_named(busy: tuple[float, ...], title: str) -> None:
    half = np.array(busy) / 2
    figure = live.per_gpu(Case("A", outlook(compute=half, network=half), None), overlaps=False)
    assert figure.layout.title.text == f"{title}, 50 % communicating"
    assert len(figure.layout.annotations) == title.endswith("is busiest")


def test_kinds_of_a_step_are_outlined_as_they_are_now() -> None:
    now, then = outlook(kinds={"ffn": 0.5, "dispatch": 0.25}), outlook(kinds={"ffn": 0.1, "dispatch": 0.4, "dw": 0.2})
    figure = live.per_kind(Case("Lancet", now, then))
    assert figure.layout.title.text == "Dispatch all-to-all runs longest: 400 ms of 1 s"
    assert list(figure.data[0].y) == ["Dispatch all-to-all", "Expert FFN", "dW, gradient of weights"]
    assert np.allclose(figure.data[0].x, [250, 500, 0]) and np.allclose(figure.data[1].x, [400, 100, 200])
    assert len(live.per_kind(Case("Lancet", now, None)).data) == 1


def test_a_tornado_has_the_widest_on_top() -> None:
    points = [SensitivityPoint(*point) for point in (("latency", 1.0, 1.0), ("network", 1.5, 0.8), ("tokens", 0.9, 1.1))]
    figure = study_charts.tornado(points, 1.0, 0.25)
    assert figure.layout.title.text == "Network counts most: 25 % more saves 20 % of the time; latency does not matter"
    assert list(figure.layout.yaxis.ticktext) == ["network", "tokens", "latency"]
    assert np.allclose(figure.data[0].x, [50, -10, 0]) and np.allclose(figure.data[1].x, [-20, 10, 0])
    assert "(bound)" in study_charts.tornado(points, 1.0, 0.25, tag="bound").layout.xaxis.title.text
    assert study_charts.tornado(points[:1], 1.0, 0.25, complete=False).layout.title.text.startswith("So far: ")


def test_of_a_serving_step_titles_say_its_time_and_gains_are_in_tokens() -> None:
    points = [SensitivityPoint("batch", 0.8, 1.3, 75.0, 92.5), SensitivityPoint("network", 1.2, 0.9, 80.0, 111.0)]
    figure = study_charts.tornado(points, 1.0, 0.25, True, "simulated", "decode", 100.0)
    assert figure.layout.title.text == "Time per token: batch counts most, 25 % less: 800 ms, 75 tokens/s per GPU (−25.0 %)"
    assert "time per token, % of 1 s, 100 tokens/s per GPU" in figure.layout.xaxis.title.text
    early = study_charts.tornado(points[1:], 1.0, 0.25, False, "simulated", "prefill", 100.0).layout.title.text
    assert early == "Time to first token so far: network counts most, 25 % more: 900 ms, 111 tokens/s per GPU (+11.0 %)"
    line = [CurvePoint(name, 2.0, total, 64 / total) for name, total in (("Aurora", 1.0), ("Rival (R)", 1.5))]
    figure = study_charts.curve(line, "tokens", ["Aurora", "Rival (R)"], phase="decode")
    assert figure.layout.title.text == "Time per token: Aurora gains +50.0 % over Rival"
    assert figure.layout.xaxis.title.text == "batch, × today's" and "time per token" in figure.layout.yaxis.title.text
    noise = [ImprecisionPoint("aurora", level, 0, total) for level, total in ((0.0, 1.0), (0.5, 1.2))]
    title = study_charts.imprecise_times(noise, {"aurora": "Aurora"}, True, "decode").layout.title.text
    assert title == "Time per token: at 50 % noise Aurora's plan takes 20 % longer"


def test_a_curve_finds_what_keeping_a_plan_costs() -> None:
    times = {"Aurora": {1.0: 1.0, 4.0: 0.6, 8.0: None}, "Rival (R)": {1.0: 2.0, 4.0: 0.5}}
    points = [CurvePoint(name, value, time) for name, of_value in times.items() for value, time in of_value.items()]
    figure = study_charts.curve(points, "network", ["Aurora", "Rival (R)"])
    assert figure.layout.title.text == "Rival is faster at 4×"
    assert figure.layout.xaxis.type == "log" and list(figure.data[0].x) == [1, 4]
    anew = [*points, CurvePoint(ANEW, 1.0, 1.0), CurvePoint(ANEW, 4.0, 0.5)]
    assert study_charts.curve(anew, "network", ["Aurora", "Rival (R)"]).layout.title.text == (
        "Keeping Aurora costs at most 20 % (at 4×)"
    )
    ahead = study_charts.curve([points[0], points[3]], "noise", ["Aurora", "Rival (R)"], complete=False)
    assert ahead.layout.title.text == "So far: Aurora gains +100.0 % over Rival" and ahead.layout.xaxis.type == "linear"


def test_imprecision_is_the_median_with_its_band() -> None:
    titles = {"aurora": "Aurora", "rcs": "Random order (RCS)"}
    points = [ImprecisionPoint("aurora", 0.0, 0, 1.0), ImprecisionPoint("rcs", 0.0, 0, 2.0)]
    for seed, (aurora, theirs) in enumerate([(1.2, 2.0), (1.1, 2.2), (4.0, 2.0)]):
        points += [ImprecisionPoint("aurora", 0.75, seed, aurora), ImprecisionPoint("rcs", 0.75, seed, theirs)]
    figure = study_charts.imprecise_times(points, titles)
    assert figure.layout.title.text == "At 75 % noise Aurora's plan takes 20 % longer"
    assert list(figure.data[1].y) == [1.0, 1.2] and list(figure.data[0].y) == [1.0, 4.0, 1.1, 1.0]
    ratios = study_charts.speed_ups(points, titles)
    assert np.allclose(ratios.data[0].y, [2.0, np.median([2 / 1.2, 2.0, 0.5])])
    assert ratios.layout.title.text == "Aurora gains +66.7 % or more"
    lost = [*points, ImprecisionPoint("aurora", 1.0, 0, 4.0), ImprecisionPoint("rcs", 1.0, 0, 2.0)]
    assert study_charts.speed_ups(lost, titles).layout.title.text == "Aurora loses to Random order at 100 % noise: −50.0 %"
    assert "So far" in study_charts.imprecise_times(points[:2], titles, complete=False).layout.title.text


PART = cluster_of(*(gpu("H100") for _ in range(4))).nodes


def test_capacity_marks_the_smallest_that_meets_the_target() -> None:
    points = [
        CapacityPoint(1, 4, refused="no room"),
        CapacityPoint(2, 8, 3.0, 2.0, "placement and order"),
        CapacityPoint(3, 12, 1.0, 1.0, "placement and order"),
    ]
    figure = study_charts.capacity(points, 1.5, PART)
    assert figure.layout.title.text == "12 × H100 are enough for 1.5 s: 1 s"
    assert list(figure.data[0].marker.symbol) == ["circle-open", "circle"]
    assert next(trace for trace in figure.data if trace.name == "cannot be planned").x == (4,)
    assert next(trace for trace in figure.data if trace.name.startswith("lower bound")).x == (8, 12)
    many, two = (cluster_of(*map(gpu, ("H100", "L40S", "L40S", last))).nodes for last in ("A100-80", "L40S"))
    for shown, part, complete, title in (
        (points[:2], PART, False, "So far: up to 8 × H100 miss the target"),
        (points[:2], PART, True, "the best, 8 × H100"),
        (points, many, True, "12 GPUs of 3 types are enough"),
        (points, two, True, "3 × H100 + 9 × L40S are enough"),
        (points[:1], PART, True, "No size could be planned for"),
    ):
        assert title in study_charts.capacity(shown, 1.5, part, complete).layout.title.text


def test_time_against_cost_is_a_front_of_sizes_that_pay() -> None:
    """A size that is no faster than a smaller one is off it; a price that a person gives makes GPUs cost."""
    points = [CapacityPoint(at, 4 * at, total) for at, total in ((3, 2.5), (1, 3.0), (2, 2.0), (4, 1.0))]
    front, off = study_charts.capacity(points, 1.5, PART).data[:2]
    assert list(front.x) == [4, 8, 16] and list(front.y) == [3, 2, 1] and front.line.shape == "hv"
    assert list(off.x) == [12]
    priced = study_charts.capacity(points, 1.5, PART, price=10.0)  # of a part, four GPUs of any mix
    assert list(priced.data[0].x) == [10, 20, 40] and "cost 40 per hour" in priced.data[0].customdata[-1]
    assert priced.layout.xaxis.title.text == "cost per hour"
    assert priced.layout.title.text.endswith("1 s, cost 40 per hour")
    table = capacity.as_text(sorted(points, key=lambda point: point.parts), PART, 1.5, 10.0)
    assert " ".join(table["Cost per hour"]) == "10 20 30 40"


def test_popularity_is_by_rank_or_by_expert_and_steps_are_each_on_their_own() -> None:
    load = np.array([[1.0, 3.0], [3.0, 1.0], [1.0, 3.0]])
    by_rank, by_expert = (sweep_charts.popularity(load, ranked=ranked).data[0] for ranked in (True, False))
    assert list(by_rank.y) == [75, 25] and list(by_rank.x) == [1, 2]
    assert list(by_expert.y) == pytest.approx([125 / 3, 175 / 3]) and list(by_expert.x) == [0, 1]
    steps = sweep_charts.steps(np.array([[6.0, 2.0], [0.0, 0.0], [1.0, 3.0]]))
    assert steps.data[0].z.tolist() == [[75, 25], [0, 0], [25, 75]]
    assert all("1.5× the mean" in figure.layout.title.text for figure in (steps, sweep_charts.popularity(load)))


@pytest.mark.parametrize(
    ("pays_from", "matched", "finding"),
    [
        (0.05, 1.2, "Ordering pays from 5 % contention on, and gains +66.7 % at 100 %"),
        (0.0, 1.0, "Ordering pays as things are, and gains +100.0 % at 100 % contention"),
        (None, 3.0, "Ordering does not pay up to 100 % contention"),
        (None, 1.6, "Ordering pays at 100 % contention, and gains +25.0 %"),
    ],
)
def test_contention_says_from_where_ordering_pays(pays_from, matched, finding) -> None:
    points = [
        ContentionPoint(value, {"concurrent": 1 + value, "matched": matched, "two-tier": 4.0}) for value in (0.0, 0.1, 1.0)
    ]
    figure = live.contention(points, pays_from)
    assert figure.layout.title.text == finding
    assert [trace.name for trace in figure.data] == ["all at once", "one peer at a time", "by relays"]
    assert list(figure.layout.xaxis.ticktext) == ["0 %", "10 %", "100 %"]
    assert len(figure.layout.shapes) == (pays_from is not None)
    if pays_from:
        assert figure.layout.shapes[0].x0 == pytest.approx(0.5)
    alike = live.contention([ContentionPoint(value, {"concurrent": 1.0, "matched": 1.0}) for value in (0.0, 1.0)], 0.0)
    assert alike.layout.title.text == "Ordering changes nothing up to 100 % contention" and not alike.layout.shapes
    assert live.contention(points[:1], None, False).layout.title.text == "So far: at 0 % all at once takes 1 s"
    assert live.contention([], None, False).layout.title.text == "No points yet"


def point(value: float | None, total: float, series: str = "one", forward: float = 0.03, bound: float = 0.05) -> SweepPoint:
    parts = {"communication": total / 4, "computation": total / 2, "overlapped": total / 4, "idle": 0.0}
    return SweepPoint(series, value, total, bound, forward, parts, 10, 0.001, 2, f"plan-{series}-{value}")


MICRO = [point(10, 0.1), point(30, 0.0936), point(200, 0.0974)]


def trace(figure, name: str):
    return next(trace for trace in figure.data if trace.name == name)


def said(figure) -> list[str]:
    return [annotation.text for annotation in figure.layout.annotations if annotation.text]


def test_the_title_states_the_best_value_and_what_the_worst_costs() -> None:
    best = "30 MB micro-ops are best: 93.6 ms"
    for kind, points, said in (
        ("micro_op", MICRO, f"{best}; 10 MB cost 6.8 % more"),
        ("micro_op", [*MICRO, point(None, 0.089, "fair sharing")], f"{best}, but 89 ms with fair sharing"),
        ("degree", [point(1, 0.12), point(2, 0.1), point(3, 0.1)], "Degrees 2 to 3 are best: 100 ms; 1 costs 20 % more"),
        ("range", [point(0, 0.12), point(8, 0.1)], "Ranges up to 8 operators are best: 100 ms; none costs 20 % more"),
        ("range", [point(0, 0.1), point(8, 0.12)], "No partition is best: 100 ms; ranges up to 8 cost 20 % more"),
        ("degree", [point(2, 0.1), point(4, 0.1)], "Every value takes 100 ms"),
        ("degree", [point(2, 0.1)], "Degree 2 is best: 100 ms"),
        ("degree", [], "No points yet"),
        ("degree", [point(None, 1.0)], "No points yet"),
    ):
        assert sweep_charts.title(points, kind) == said
    assert sweep_charts.title(MICRO[:2], "micro_op", complete=False).startswith("So far: 30 MB micro-ops are best")
    forward = sweep_charts.times([point(0, 0.1, forward=0.04), point(8, 0.11, forward=0.02)], "range", "forward")
    assert forward.layout.title.text == "Ranges up to 8 operators are best: 20 ms; none costs 100 % more"
    assert list(trace(forward, "one").y) == pytest.approx([40, 20])


def test_every_series_is_a_line_and_the_best_point_is_marked() -> None:
    points = [point(1, 0.11), point(2, 0.1), point(1, 0.11, "two"), point(2, 0.09, "two"), point(None, 0.08, "<b>own")]
    figure = sweep_charts.times(points, "degree")
    assert list(trace(figure, "one").x) == list(trace(figure, "two").x) == [1, 2]
    assert trace(figure, "one").line.dash != trace(figure, "two").line.dash
    star = next(trace for trace in figure.data if trace.marker.symbol == "star")
    assert (star.x[0], star.y[0]) == (2, pytest.approx(90)) and "90 ms" in star.text[0]
    assert sweep_charts.times([point(1, 0.1, "<b>")], "degree").data[0].name == "&lt;b&gt;"
    assert "&lt;b&gt;own, 80 ms" in said(figure) and "<b>own" not in figure.to_json()
    assert "bound, 50 ms" in said(figure)


def test_names_of_references_stand_away_from_the_best_point_and_join_where_lines_do() -> None:
    references = [point(None, 0.0889, "fair"), point(None, 0.0893, "fixed"), point(None, 0.117, "naive")]
    figure = sweep_charts.times([*MICRO, *references], "micro_op")
    names = {note.text: note.yanchor for note in figure.layout.annotations if note.text}
    assert names["fair, 88.9 ms · fixed, 89.3 ms"] == "top" and names["naive, 117 ms"] == "bottom"
    assert len([shape for shape in figure.layout.shapes if shape.type == "line"]) == 3


def test_axes_fit_their_values() -> None:
    figure = sweep_charts.times([point(value, 0.1) for value in (1, 2, 5, 10, 11, 12, 200)], "micro_op")
    low, high = figure.layout.xaxis.range
    assert figure.layout.xaxis.type == "log" and low < 0 and high > math.log10(200)
    shown = figure.layout.xaxis.tickvals
    assert 200 in shown and len(shown) < 7, "labels that would run into each other are left out"
    figure = sweep_charts.times([point(value, 0.1) for value in (0, 4, 136)], "range")
    assert figure.layout.xaxis.ticktext == ("none", "4", "136") and list(trace(figure, "one").x) == [0, 1, 2]
    assert sweep_charts.times([point(16, 0.1)], "degree").layout.xaxis.ticktext == ("16",)
    assert "ms (simulated)" in sweep_charts.times(MICRO, "micro_op").layout.yaxis.title.text


def test_the_parts_add_up_and_name_the_least_exposed_value() -> None:
    figure = sweep_charts.decomposition([*MICRO, point(5, 0.01, "two")], "micro_op", "one")
    assert [sum(trace.y[place] for trace in figure.data) for place in range(3)] == pytest.approx([100, 93.6, 97.4])
    assert len(figure.data) == 3, "what takes no time has no place in the legend"
    assert all(trace.stackgroup for trace in figure.data)
    assert figure.layout.title.text == "Least exposed: 23.4 ms with 30 MB micro-ops"
    assert len({trace.fillpattern.shape for trace in figure.data[:2]}) == 2, "colour is never the only sign"


@pytest.mark.parametrize("kind", sweep_charts.AXES)
@pytest.mark.parametrize("points", [[], [point(4, 0.1)], [point(None, 0.1, "alone")]])
def test_few_points_can_be_drawn(kind: str, points: list[SweepPoint]) -> None:
    for figure in (sweep_charts.times(points, kind), sweep_charts.decomposition(points, kind, "one")):
        json.loads(figure.to_json())
        assert figure.layout.title.text


def test_clusters_lie_by_price_and_time_with_their_bounds() -> None:
    met = [SizedPoint(nodes={"<b>": 2}, price=4.0, objective=0.04, bound=0.03, plan_id="a" * 64)]
    met += [SizedPoint(nodes={"x": 1, "y": 3}, price=9.0, objective=0.02, bound=0.02, plan_id="b" * 64)]
    undecided = [
        SizedPoint(nodes={"<b>": 1}, price=2.0, objective=0.06, bound=0.01),
        SizedPoint(nodes={"x": 1}, price=3.0, objective=None, bound=0.015),
    ]
    money = Catalogue.model_construct(currency="€").money
    figure = sizing_charts.front(met, undecided, Target(0.05, 10.0), money)
    assert figure.layout.title.text == "2 × &lt;b&gt;, €4.00 an hour: 40 ms, the cheapest found"
    lines = {trace.name: (list(trace.x), list(trace.y)) for trace in figure.data if trace.mode != "lines"}
    assert lines["meets the target"] == ([40.0, 20.0], [4.0, 9.0])
    assert lines["undecided, with a plan"] == ([60.0], [2.0]) and lines["undecided, at its bound"] == ([15.0], [3.0])
    assert [(list(trace.x), trace.showlegend) for trace in figure.data[:2]] == [([30.0, 40.0], True), ([20.0, 20.0], False)]
    assert [note.text for note in figure.layout.annotations] == ["target, 50 ms", "at most €10.00"]
    assert "25 % left" in figure.data[2].customdata[0] and "not planned: at least 15 ms" in figure.data[4].customdata[0]
    for target, points, complete, title in (
        (Target(None, 10.0), met, True, "1 × x + 3 × y, €9.00 an hour: 20 ms, the fastest found"),
        (Target(0.05), met, False, "So far: 2 × &lt;b&gt;, €4.00 an hour: 40 ms"),
        (Target(0.05), [], True, "No cluster was found that meets the target"),
        (Target(0.05), [], False, "No cluster that meets the target yet"),
    ):
        assert sizing_charts.front(points, undecided, target, money, complete).layout.title.text == title


def deployed(gpu: str, token: float, million: float, best: bool = True) -> Point:
    of = Deployment(engine="e", version="1", checkpoint="c", gpu=gpu, precision="fp8", decode=Ranks(tensor=2, expert=2))
    times = {"first_token": 1.0, "token": token, "low": 0.8 * token, "high": 1.25 * token, "rate": 100.0}
    demand = Demand(prompt=10, output=10, users=8)
    parts = {"experts": 0.25 * token, "attention": 0.7 * token, "layers": 0.045 * token, "step": 0.005 * token}
    about = {"replicas": 2, "gpus": 4, "hour": 30.0, "million": million, "best": best, "parts": parts}
    return Point(deployment=of, demand=demand, **times, **about)


def test_deployments_lie_by_price_and_speed_with_their_intervals() -> None:
    points = [deployed("H200", 0.02, 1.0), deployed("B200", 0.02, 1.5, best=False), deployed("B200", 0.01, 2.0)]
    figure = sizing_charts.deployments(points, ServingTarget(0.025), "€")
    assert figure.layout.title.text == "4 × H200, €1.00 a million tokens: 50 tokens/s of a user, the cheapest"
    traces = {trace.name: trace for trace in figure.data}
    assert {name: (list(trace.x), list(trace.y)) for name, trace in traces.items()} == {
        "B200": ([50.0, 100.0], [1.5, 2.0]),
        "H200": ([50.0], [1.0]),
    }
    assert list(traces["B200"].marker.symbol) == ["circle-open", "circle"], "colour is never the only sign"
    assert traces["H200"].marker.symbol[0] != "circle" and traces["H200"].line.color != traces["B200"].line.color
    assert list(traces["B200"].error_x.array) == pytest.approx([0, 25]) and traces["H200"].error_x.arrayminus[0] == 10
    assert [note.text for note in figure.layout.annotations] == ["target, 25 ms a token"]
    said = "4 × H200, e 1 fp8, 1 × tp2 ep2 × 2, 16 users<br>€1.00 a million tokens"
    assert list(traces["H200"].customdata) == [said]
    by_hour = sizing_charts.deployments(points, ServingTarget(rate=150.0), "€", complete=False)
    assert by_hour.layout.title.text == "So far: 4 × H200, €30.00 an hour: 50 tokens/s of a user"
    assert list(by_hour.data[0].y) == [30.0, 30.0] and by_hour.layout.yaxis.title.text == "price an hour"


def test_the_parts_of_a_token_follow_one_another_and_small_ones_are_one() -> None:
    figure = sizing_charts.parts(deployed("H200", 0.02, 1.0))
    assert figure.layout.title.text == "Attention: 70 % of the 20 ms of a token"
    ends = [(trace.base[0], trace.base[0] + trace.x[0]) for trace in figure.data]
    assert ends == [pytest.approx(pair) for pair in [(0, 14), (14, 19), (19, 19.9), (19.9, 20), (0, 20)]]
    names = [note.text for note in figure.layout.annotations][::2]
    assert names == ["attention", "experts", "layers", "others", "a token"]
