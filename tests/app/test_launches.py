"""Past launches on the Launch page: listed, searched, reported and started again."""

import getpass
import json
import shutil
import time
from dataclasses import replace

import pytest
from streamlit.testing.v1 import AppTest

from app.charts import launch as charts
from app.charts.theme import SMALLEST
from app.launch import history, report
from engine import store
from engine.costs import Datasheet
from engine.jobs import tasks
from engine.jobs.launches import BRIEF, run_folder
from engine.jobs.protocol import CANCELLED, REQUEST, RESULT, Context
from engine.jobs.runner import Job, State
from engine.launch.rank.failure import RankLogs, RankProgress
from engine.plan import Plan
from engine.problem import make_problem
from engine.simulate.training.step import simulate_step
from engine.store.problems import problem_arguments
from engine.timeline import Timeline
from engine.training import usual_step
from tests.cases.launched import fail, finish, request_of
from tests.cases.pages import button, field, metrics, press, run, said, studio, visit
from tests.cases.sessions import launches, problem_of, wanted
from tests.jobs.asking import in_json


@pytest.fixture
def app(launch_page: AppTest) -> AppTest:
    """A linear plan, which is open, and another one."""
    return launch_page


def show(app: AppTest, job: Job) -> None:
    """Choose a past launch."""
    app.session_state["launch_shown"] = job.id
    run(app)


def test_past_launches_are_listed_searched_and_shown(app: AppTest, monkeypatch: pytest.MonkeyPatch):
    root, now = store.data_folder(), time.time()
    old = finish(request_of(wanted(app, tokens=32), root, now - 86_400), 1.25, monkeypatch)
    bad = fail(request_of(replace(wanted(app), plans=(app.plans[1],)), root, now - 60), "rank 1 lost its way")
    app.run()
    table = app.dataframe[0].value
    assert list(table["State"]) == ["failed", "done"] and list(table["Tokens"]) == ["64", "32"]
    first, second = app.plans
    assert list(table["Plans"]) == [second.name, f"{first.name} · {second.name}"] and set(table["Where"]) == {"this machine"}
    assert table["Ratio"][1] == "1.25× · 1.38×" and table["Ratio"][0] == ""
    day = time.strftime("%Y-%m-%d", time.localtime(now - 86_400))
    found = {"": 2, "failed": 1, f"{first.name.split()[0].upper()} 2 ranks": 1, "testbed": 0, f"{day} done": 1}
    for text, count in found.items():
        app.text_input(key="launch-search").set_value(text).run()
        assert len(app.dataframe[0].value if app.dataframe else ()) == count, text
    assert "None of 2 launches" in said(app.caption) or app.dataframe
    app.text_input(key="launch-search").set_value("").run()
    assert "Measured / predicted" not in metrics(app)  # none of these is this session's own
    show(app, old)
    assert list(app.dataframe[0].value[""]) == ["", "▸"] and metrics(app)["Measured / predicted"] == "1.25×"
    show(app, bad)
    assert "rank 1 lost its way" in said(app.error) and "No rank has started yet" in said(app.caption)


def test_launches_are_read_once_and_their_results_not_at_all(app: AppTest, monkeypatch: pytest.MonkeyPatch):
    root = store.data_folder()
    job = finish(request_of(replace(wanted(app), plans=app.plans[:1]), root, 1e9), 1.1, monkeypatch)
    for number in range(1, 30):
        folder = job.folder.parent / f"20010910T{number:012d}-0123abcd"
        shutil.copytree(job.folder, folder)
        (folder / RESULT).write_text("{not to be read}")
    past_launches = history.launches()
    assert len(past_launches) == 30 and {launch.state for launch in past_launches} == {State.DONE}
    for folder in job.folder.parent.glob("20010910T*"):
        (folder / BRIEF).unlink()
        (folder / REQUEST).write_text("{not to be read again}")
    assert history.launches() == past_launches
    assert len(history.as_text(past_launches, None)) == 30


def test_a_launch_that_is_being_made_is_looked_at_again(app: AppTest):
    job = fail(request_of(wanted(app), store.data_folder()), "gone")
    asked = (job.folder / REQUEST).read_text()
    (job.folder / REQUEST).unlink()
    assert history.launches() == []
    (job.folder / REQUEST).write_text(asked)
    assert [launch.job.id for launch in history.launches()] == [job.id]


def test_a_launch_says_which_plan_the_measurement_prefers_to_everybody_and_runs_once_more(
    app: AppTest, monkeypatch: pytest.MonkeyPatch
):
    job = finish(request_of(wanted(app), store.data_folder()), 1.2, monkeypatch)
    app.session_state["launch_jobs"] = [job.id]  # of this session: shown without a click
    app.run()
    first, second = app.plans
    assert "Measured: Linear placement and" in said(app.subheader)
    assert "prediction is for this machine, not for the drawn cluster" in said(app.caption)
    assert metrics(app)["Measured / predicted"] == "1.2×" and metrics(app)["Output differs by"] == "1e-07"
    preference = job.result["preference"]
    title, details = report.finding(preference["lines"])
    assert title.startswith("Measured, ") and details and details in said(app.caption)
    close = ["too close to call: a and b differ by less than the noise", "b", "as predicted: within 10 % of each other"]
    assert report.finding(close)[0].startswith("Too close to call: a and b differ by less than the noise, as pred")
    before = metrics(app)["Measured"]
    app.segmented_control(key=f"launch-plan-{job.id}").set_value(1)
    app.run()
    assert metrics(app)["Measured"] != before and first.name != second.name

    empty = visit(studio(), "launch")
    assert empty.info and len(empty.dataframe[0].value) == 1, "past launches are there with nothing open"
    empty.session_state["launch_shown"] = job.id
    assert "Measured / predicted" in metrics(empty.run())

    press(app, "Relaunch")
    again, older = launches()
    assert older.id == job.id
    assert again.request.arguments == job.request.arguments | {"by": getpass.getuser()}
    assert button(app, "Start").disabled and "one runs at a time" in said(app.caption)


def test_a_run_against_its_prediction_in_words():
    words = {0.989: "1.1 % less time than predicted", 1.2: "20 % more time than predicted", 1.0001: "the predicted time"}
    for measured, said_of_it in (words | {2.3: "2.3× the predicted time"}).items():
        assert charts.against_prediction(1.0, measured) == f"The run took {said_of_it}"


def test_times_stand_behind_their_bars_in_one_readable_size():
    kinds, seconds = ["dispatch", "ffn"], ([1e-3, 2e-3], [1.5e-3, 1e-3])
    by_kind = charts.by_kind(kinds, *seconds, (5e-3, 6e-3), (2e-3, 3.5e-3))
    for figure in (by_kind, charts.by_layer(range(2), *seconds)):
        assert [bars.name for bars in figure.data] == ["Predicted", "Measured"]
        for bars in figure.data:
            assert bars.orientation == "h" and bars.textposition == "outside" and bars.constraintext == "none"
            assert bars.textfont.size >= SMALLEST and bars.textangle == 0 and not bars.cliponaxis
    assert [(bars.y[-1], bars.text[-1]) for bars in by_kind.data] == [
        ("Waiting between steps", at) for at in ("2 ms", "3.5 ms")
    ]
    many = charts.by_layer(range(58), [1e-3] * 58, [2e-3] * 58)
    assert all(bars.orientation is None and bars.text is None for bars in many.data)
    both = charts.totals(["a", "b"], [1e-3, 2e-3], [[3e-3], [4e-3]], "title")
    assert both.layout.annotations[0].text == " 1 ms predicted<br> 3 ms measured"


def test_a_relaunch_without_its_recording_says_so(app: AppTest, monkeypatch: pytest.MonkeyPatch):
    small = problem_of(app).workload.spread(64)
    store.save_workload(small)
    job = finish(request_of(replace(wanted(app), workload=small), store.data_folder()), 1.2, monkeypatch)
    (store.data_folder() / "workloads" / f"{small.digest}.npz").unlink()
    show(app, job)
    press(app, "Relaunch")
    assert "no longer in the data folder" in said(app.error) and len(launches()) == 1


def test_a_failed_launch_shows_the_log_of_the_rank_that_failed_and_others_why_there_is_no_report(
    app: AppTest, monkeypatch: pytest.MonkeyPatch
):
    job = request_of(wanted(app), store.data_folder())
    run_folder(job).mkdir()
    logs = RankLogs(run_folder(job), 2)
    for rank in range(2):
        logs.progress(rank, RankProgress(done=0.5, message=f"layer {rank}", time=0.0))
        logs.print(rank, f"last words of {rank}\n")
    logs.failed = 1, -9
    logs.save()
    fail(job, "the launch failed: rank 1 was killed")
    show(app, job)
    chosen = field(app, "Log of rank")
    assert chosen.value == 1 and "last words of 1" in said(app.code) and "last words of 0" not in said(app.code)
    assert list(app.dataframe[-1].value["Doing"]) == ["layer 0", "layer 1"]
    chosen.set_value(0)
    app.run()
    assert "last words of 0" in said(app.code)
    # A stopped one, and one of another version.
    stopped = request_of(wanted(app), store.data_folder(), time.time() + 1)
    (stopped.folder / CANCELLED).touch()
    show(app, stopped)
    assert "Stopped before" in said(app.info)
    older = finish(request_of(wanted(app), store.data_folder(), time.time() - 5), 1.2, monkeypatch)
    result = older.result
    (older.folder / RESULT).write_text(json.dumps({name: result[name] for name in result if name != "preference"}))
    show(app, older)
    assert "Another version" in said(app.warning) and "Measured / predicted" not in metrics(app)


def test_a_training_step_is_reported_on_its_own_kind_of_timeline(app: AppTest, monkeypatch: pytest.MonkeyPatch):
    problem = problem_of(app)
    step = usual_step(problem.model, 8)
    problem = make_problem(problem.workload, problem.cluster, problem.model, Datasheet(), step=step)
    arguments = problem_arguments(problem) | {"systems": [{"name": "deepspeed"}]}
    (folder := store.data_folder() / "scratch").mkdir()
    (candidate,) = in_json(tasks.optimise)(arguments, Context(folder))["candidates"]
    predicted = simulate_step(Plan.from_dict(candidate["plan"], "plan"), problem)
    measured = Timeline(predicted.events, predicted.resources, "measured", "CPU", predicted.labels)
    job = finish(request_of(replace(wanted(app), plans=app.plans[:1]), store.data_folder()), 1.2, monkeypatch)
    result = job.result
    result["runs"][0] |= {"predicted": predicted.to_dict(), "measured": measured.to_dict()}
    (job.folder / RESULT).write_text(json.dumps(result))
    show(app, job)
    assert any(control.label == "Part of the step" for control in app.segmented_control) and not app.slider
