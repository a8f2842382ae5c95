"""Spare slots on the Optimise page: advice by recordings, numbers that engines take, the chart."""

import json
from dataclasses import replace

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest
from streamlit.testing.v1.element_tree import NumberInput

from app.charts import optimise as charts
from app.optimise import spare
from engine.compare.redundancy import Knee, RedundancyPoint
from engine.workload import ExpertLoad, RoutingTrace
from tests.cases.pages import enter, field, press, put, run_the_job, said, tick, visit
from tests.cases.sessions import open_recording

pytestmark = pytest.mark.usefixtures("warm_python")


@pytest.fixture
def app(sample: AppTest) -> AppTest:
    """The sample, opened."""
    return sample


@pytest.fixture
def short(sample: AppTest) -> AppTest:
    """The sample's model with two of its layers, for which plans are made soon."""
    sample.session_state["model"] = sample.session_state["model"].model_copy(update={"layers": 2})
    return sample


def points(*gains: float) -> list[RedundancyPoint]:
    usual = {"balancedness": 0.7, "least_balancedness": 0.6, "planned_balancedness": 0.9}

    def point(turn: int, gain: float) -> RedundancyPoint:
        slots = {"slots": 16 + 8 * turn, "spare": 8 * turn, "slots_of_gpu": 2 + turn}
        memory = {"memory_bytes": 8 * turn * 1e6, "gpu_bytes": (2 + turn) * 1e6}
        gained = {"seconds": 1e-3 / (1 + gain), "gain": gain, "gain_worst": gain, "error": 0.01 if turn else 0.0}
        return RedundancyPoint(**usual | slots | memory | gained)

    return [point(turn, gain) for turn, gain in enumerate(gains)]


def test_advice_is_planned_on_the_open_recording_judged_held_out_and_taken(short: AppTest) -> None:
    rng = np.random.default_rng(1)
    # One expert of every layer gets most tokens.
    experts = rng.choice(16, (8192, 2, 1), p=[0.6, *[0.4 / 15] * 15]).astype(np.int16)
    open_recording(short, RoutingTrace("another", experts[::-1], 16), alone=True)
    digest = open_recording(short, RoutingTrace("lop-sided", experts, 16))
    visit(short, "optimise")
    enter(short, "Show", "Spare slots")
    assert "No curve yet" in said(short.info)
    field(short, "Judged on").set_value([])
    short.run()
    job = run_the_job(short, "Advise", "redundancy")
    assert job.request.arguments["recordings"] == [digest]
    result = job.result
    advised = next(point for point in result["points"] if point["slots"] == result["knee"]["slots"])
    number = advised["slots_of_gpu"] - 2
    assert number > 0, "a hot expert is worth a second copy"
    assert f"**{number} spare slot" in said(short.markdown) and result["knee"]["reason"] in said(short.markdown)
    assert "lop-sided, earlier half" in said(short.caption)
    table = short.dataframe[0].value
    assert len(table) == len(result["points"]) and table["Per GPU"].iloc[0] == "+0" and table["Spare in all"].iloc[0] == "0"
    press(short, "Use it")
    ticked = {box.label.split("**")[1]: box.value for box in short.checkbox if box.label.startswith("**")}
    assert ticked["Replication (EPLB)"]

    def spare() -> NumberInput:
        return next(box for box in short.number_input if box.label == "Spare slots" and "eplb" in box.key)

    assert spare().value == number
    # A number typed over it counts, until advice is taken again.
    spare().set_value(5).run()
    press(short, "Use it")
    assert spare().value == number


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (3, "3 slots of a layer on 3 GPUs, 2 on 5: engines take 0 or 8 in all."),
        (8, "3 slots of a layer on every GPU."),
        (4096, "16 slots of a layer on every GPU."),
    ],
)
def test_spare_slots_in_all_say_which_numbers_engines_take_and_stay(app: AppTest, number: int, text: str) -> None:
    tick(visit(app, "optimise"), "Replication")
    enter(app, "Counted", "in all")
    enter(app, "Spare slots", number)
    assert text in said(app.caption)
    visit(app, "cluster")
    assert text in said(visit(app, "optimise").caption)
    enter(app, "Counted", "per GPU")
    assert "slots of a layer on" not in said(app.caption) and field(app, "Spare slots").value == number


def test_loads_are_judged_in_sample_and_a_curve_of_another_cluster_or_without_intervals_asks_for_another(
    short: AppTest,
) -> None:
    open_recording(short, ExpertLoad("loads", np.tile([40.0, 40.0, *[5.0] * 14], (2, 1)), (0, 1)), alone=True)
    visit(short, "optimise")
    enter(short, "Show", "Spare slots")
    job = run_the_job(short, "Advise", "redundancy")
    result = job.result
    assert not result["held_out"] and "which is in sample" in said(short.caption)
    whole = short.session_state["cluster"]
    put(short, cluster=whole.part(list(range(4))))
    assert "run it again for what is open" in said(short.info)
    short.session_state["cluster"] = whole
    older = [{name: value for name, value in point.items() if name != "error"} for point in result["points"]]
    (job.folder / "result.json").write_text(json.dumps(result | {"points": older, "knee": 16}))
    short.run()
    assert not short.exception and "of an older version" in said(short.info)


def advice(slots: int, rule: str = "enough") -> Knee:
    return Knee(slots=slots, rule=rule, reason="because")


def test_the_chart_marks_the_advised_number() -> None:
    band, curve, advised = (figure := charts.spare_slots(points(0.0, 0.09, 0.1), advice(24), True)).data[:3]
    assert band.y == pytest.approx([0, 7.04, 8.04, 11.96, 10.96, 0], abs=0.01) and band.x == (0, 1, 2, 2, 1, 0)
    assert "95 % interval +7.0 % to +11.0 %" in curve.hovertext[1]
    assert curve.y == pytest.approx([0, 9, 10]) and advised.x == (1,) and advised.text == ("advised",)
    assert figure.layout.title.text == "1 spare slot per GPU brings 9.0 % for 8 MB on all GPUs"
    assert "hollow" not in figure.layout.xaxis.title.text
    assert figure.layout.xaxis.ticktext == ("0<br>+0<br>0", "8<br>+1<br>8", "16<br>+2<br>16")
    assert "held out" in figure.layout.yaxis.title.text


def test_numbers_that_engines_do_not_take_are_hollow_and_said_to_be() -> None:
    few, more, most = points(0.0, 0.09, 0.1)
    uneven = replace(more, slots=20, spare=4, even=False)
    figure = charts.spare_slots([few, uneven, most], advice(32), True)
    assert figure.data[1].marker.symbol == ("circle", "circle-open", "circle")
    assert (
        figure.layout.xaxis.ticktext[1] == "4<br>+0 or 1<br>8"
        and "hollow: no engine takes it" in figure.layout.xaxis.title.text
    )
    assert spare.as_text([few, uneven])["Per GPU"].tolist() == ["+0", "+0 or 1"]


def test_the_chart_while_it_runs_and_where_nothing_is_gained() -> None:
    assert "in sample" in charts.spare_slots(points(0.0, -0.1), advice(16), False).layout.yaxis.title.text
    for shown, knee, title in (
        (points(0.0), None, "So far one number of slots"),
        (points(0.0, -0.1), advice(16, "too little"), "No number of spare slots is worth its memory here"),
        (points(0.0, 0.015), advice(16, "noise"), "What spare slots gain here may as well be nothing"),
    ):
        assert charts.spare_slots(shown, knee, True).layout.title.text == title
    row = spare.as_text(points(0.0, 0.09)).iloc[1]
    assert row["Gain"] == "+9.0 %" and row["Slots per layer"] == "24" and row["Memory of spare"] == "8 MB"
    assert (row["95 % interval"], row["Worst"]) == ("+7.0 % to +11.0 %", "+9.0 %")
