"""The Launch page without a browser: what can be chosen, what is refused and when, who may start, past launches, reports."""

import getpass
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from app import cached
from app.charts import launch as charts
from app.charts.theme import SMALLEST
from app.launch import history, report
from app.visitor import people
from engine import store
from engine.catalogue import model_presets
from engine.cluster import Cluster, Node
from engine.costs import Datasheet
from engine.files import write_atomically
from engine.jobs import runner, tasks
from engine.jobs.kinds import answered
from engine.jobs.launches import BRIEF, run_folder
from engine.jobs.protocol import CANCELLED, REQUEST, RESULT, Context, Request
from engine.jobs.runner import Job, State
from engine.launch.preparation.launch import Launch
from engine.launch.rank.failure import RankLogs
from engine.model import MoEModel
from engine.plan import Plan, Travel
from engine.problem import Problem, make_problem
from engine.simulate.training.step import simulate_step
from engine.store.problems import problem_arguments
from engine.timeline import Timeline
from engine.training import usual_step
from tests.app.test_pages import ROOT, open_sample, press, visit
from tests.app.test_step_page import enter, field, said
from tests.jobs.asking import in_json
from tests.jobs.launched import fail, finish, request_of
from tests.launch.cluster_fakes import install_slurm
from tests.strategies import make_gpu

pytestmark = pytest.mark.slow

MAIN = str(ROOT / "app" / "main.py")


def problem_of(app: AppTest) -> Problem:
    session = app.session_state
    return make_problem(store.load_workload(session["workload"]), session["cluster"], session["model"], Datasheet())


def plan(problem: Problem, name: str, *systems: str | dict) -> list[Plan]:
    """Make plans as an optimisation does, in the job of that name. systems: names, or dictionaries with options too."""
    folder = store.data_folder() / "jobs" / name
    folder.mkdir(parents=True)
    arguments = problem_arguments(problem) | {
        "systems": [{"name": system} if isinstance(system, str) else system for system in systems]
    }
    write_atomically(folder / REQUEST, Request(kind="optimise", arguments=arguments, created=time.time()).to_json())
    context = Context(folder)
    context.finish(answered(tasks.optimise, arguments, context))
    return [Plan.from_dict(candidate["plan"], "plan") for candidate in Job(folder.name, folder).result["candidates"]]


JOB, ANOTHER = "20250102T030405000006-0123abcd", "20250102T030405000007-0123abcd"


def session_with_plans(folder: Path, opened: int, **more: str) -> tuple[str, list[Plan]]:
    """A session of the sample in the data folder `folder`, with a linear plan and one that sends shortest first; its token
    and its plans. opened: which is open; more: what else the session keeps. SWITCHYARD_DATA must name the folder."""
    app = open_sample(AppTest.from_file(MAIN, default_timeout=60).run())
    plans = plan(problem_of(app), JOB, "linear", "sjf")
    (kept,) = (folder / "sessions").iterdir()
    known = {"plan_jobs": [JOB], "plan": plans[opened].id} | more
    write_atomically(kept, json.dumps(json.loads(kept.read_text()) | known))
    return kept.stem, plans


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[Plan]]:
    """A data folder with a session of the sample and two plans, the first of them open; its token and its plans."""
    folder = tmp_path_factory.mktemp("session") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWITCHYARD_DATA", str(folder))
        return folder, *session_with_plans(folder, 0)


def comes_from(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Visitors have this address; None: they are on this machine."""
    monkeypatch.setattr(type(st.context), "ip_address", property(lambda _: address))


def copied(session: tuple[Path, str, list[Plan]], data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AppTest:
    """A session in a data folder of the test's own, not run yet, visited from this machine; its plans are `plans`."""
    folder, token, plans = session
    shutil.copytree(folder, data_folder)
    comes_from(None, monkeypatch)
    app = AppTest.from_file(MAIN, default_timeout=60)
    app.query_params["session"] = token
    app.plans = plans
    return app


@pytest.fixture
def app(session, own_data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AppTest]:
    """That session on the Launch page. What it starts is ended."""
    yield visit(copied(session, own_data_folder, monkeypatch), "launch")
    for job in launches():
        runner.cancel(job, grace=0)
        assert runner.wait(job, 5).finished


def launches() -> list[Job]:
    return runner.jobs(store.data_folder(), "launch")


def wanted(app: AppTest, **more) -> Launch:
    problem = problem_of(app)
    return Launch(
        tuple(app.plans), problem.workload, problem.model, problem.cluster, **{"ranks": 2, "tokens": 64} | more
    )


def button(app: AppTest, label: str):
    return next(button for button in app.button if button.label == label)


def place(app: AppTest, name: str) -> AppTest:
    app.segmented_control(key="launch-place").set_value(name)
    app.run()
    assert not app.exception, app.exception
    return app


def metrics(app: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in app.metric}


# A new launch.


def test_what_is_chosen_is_what_is_started(app: AppTest):
    assert said(app.markdown).count("check_circle") == 7 and "Devices" in said(app.markdown)
    assert "torchrun picks a free one" in said(app.markdown) and "torch.distributed.run" in app.code[0].value
    chosen = app.multiselect[0]
    assert chosen.label == "Compare with" and chosen.value == [app.plans[1].id]  # the baseline
    for label, value in {
        "Ranks": 2,
        "Tokens to replay": 100,
        "Timed passes": 5,
        "Time limit, s": 77,
        "Number format": "bf16",
    }.items():
        enter(app, label, value)
    assert "Its 2 ranks are equal" in said(app.caption) and "5 timed passes each" in said(app.caption)
    assert "100 of the recording, 5 timed passes of each of 2 plans" in said(app.markdown)
    press(app, "Start")
    (job,) = launches()
    asked = Launch.from_arguments(job.request.arguments)
    assert [plan.id for plan in asked.plans] == [plan.id for plan in app.plans] and asked.on == "local"
    assert (asked.ranks, asked.tokens, asked.repeats, asked.limit, asked.dtype) == (2, 100, 5, 77.0, "bf16")
    assert button(app, "Start").disabled and "one runs at a time" in said(app.caption)
    assert any(button.label == "Stop" for button in app.button)
    # Where a person has gone and come back, the numbers are still there.
    visit(app, "optimise")
    visit(app, "launch")
    assert field(app, "Timed passes").value == 5 and field(app, "Ranks").value == 2


def test_a_plan_alone(app: AppTest):
    app.multiselect[0].set_value([])
    app.run()
    assert "3 timed passes after a warm-up" in said(app.markdown)
    press(app, "Start")
    (job,) = launches()
    assert len(job.request.arguments["plans"]) == 1


def test_what_cannot_run_is_said_before_the_start(app: AppTest, monkeypatch: pytest.MonkeyPatch):
    small = replace(cached.attached(), host_memory=1e6)
    monkeypatch.setattr(cached, "attached", lambda: small)
    app.run()
    assert said(app.markdown).count("launch it on a larger machine") == 2, "beside Start and in the pre-flight"
    assert button(app, "Start").disabled
    app.session_state["model"] = model_presets()["Mixtral-8x7B"].model
    app.run()
    assert "does not fit the recording" in said(app.error) and not any(button.label == "Start" for button in app.button)


def test_two_models_are_launched_together(app: AppTest):
    visit(app, "optimise")
    press(app, "Two models on one cluster")
    second = next(box for box in app.selectbox if box.label == "Second model's recording")
    second.set_value("tiny-moe/beta-prose.npz")
    app.run()
    digest = app.session_state["second"]
    problem = problem_of(app)
    beside = (store.load_workload(digest), model_of(app, digest))
    problem = make_problem(problem.workload, problem.cluster, problem.model, Datasheet(), beside)
    (rec_plan,) = plan(problem, ANOTHER, "rec")
    app.session_state["plan_jobs"], app.session_state["plan"] = [ANOTHER, JOB], rec_plan.id
    visit(app, "launch")
    assert "of the two recordings" in said(app.markdown)
    assert app.multiselect[0].disabled  # no other plan is for two models
    press(app, "Start")
    assert launches()[0].request.arguments["second"]["workload"] == digest


def model_of(app: AppTest, digest: str) -> MoEModel:
    return app.session_state["model_of"][digest]


def open_on_pairs(app: AppTest, nodes: int, order: str = "two-tier", travel: Travel | None = None) -> AppTest:
    """The page with an open plan of a two-tier order, or of another one, on so many nodes of two GPUs."""
    pairs = [Node(name=f"node {at}", gpus=(make_gpu(),) * 2, link_bandwidth=1e12) for at in range(nodes)]
    app.session_state["cluster"] = Cluster(name="pairs", nodes=pairs)
    problem = replace(problem_of(app), travel=travel)
    (opened,) = plan(problem, ANOTHER, {"name": "eplb", "options": {"order": order}})
    app.session_state["plan_jobs"], app.session_state["plan"] = [ANOTHER], opened.id
    return visit(app, "launch")


def test_a_two_tier_plan_is_offered_on_ranks_that_can_carry_it_out(app: AppTest):
    assert field(app, "Ranks").value == 4
    open_on_pairs(app, 6)
    assert not app.error and field(app, "Ranks").value == 6 and not button(app, "Start").disabled
    enter(app, "Ranks", 5)
    assert "on 5 ranks one would stand for GPUs of several nodes: choose 6" in said(app.error)


def test_a_two_tier_plan_of_many_nodes_says_how_many_ranks_it_takes(app: AppTest):
    open_on_pairs(app, 9)
    assert not app.error and "takes at least 9 ranks" in said(app.info) and field(app, "Ranks").value is None
    assert not any(button.label == "Start" for button in app.button)
    enter(app, "Ranks", 9)
    assert not app.error and not button(app, "Start").disabled and "folded onto 9 ranks" in said(app.markdown)


def test_a_plan_of_one_row_a_node_says_so_or_why_it_is_refused(app: AppTest):
    open_on_pairs(app, 6, "concurrent", Travel(unit="node", dispatch="fp8"))
    assert not app.error and "one row per node, fp8 out" in said(app.markdown) and not button(app, "Start").disabled
    enter(app, "Ranks", 5)
    assert "whose GPUs pass it on to each other; on 5 ranks one would stand for" in said(app.error)


def test_an_order_that_rows_of_nodes_cannot_follow_is_refused(app: AppTest):
    open_on_pairs(app, 2, "matched", Travel(unit="node"))
    assert "not in a matched order; plan with a concurrent order" in said(app.error)
    assert not any(button.label == "Start" for button in app.button)


def is_folded(app: AppTest) -> bool:
    (form,) = (box for box in app.expander if box.label == "New launch")
    return not form.proto.expanded


def test_the_form_folds_away_while_a_launch_is_shown(app: AppTest, monkeypatch: pytest.MonkeyPatch):
    assert not is_folded(app) and not any(button.label == "New launch" for button in app.button)
    older = finish(request_of(wanted(app), store.data_folder(), time.time() - 60), 1.2, monkeypatch)
    app.session_state["launch_jobs"] = [older.id]
    assert is_folded(app.run()) and "Measured:" in said(app.subheader)
    press(app, "New launch")
    assert not is_folded(app)
    press(app, "Start")
    # While one runs nothing stands beside how far it is, until another one is chosen.
    assert is_folded(app) and "Measured:" not in said(app.subheader)
    app.session_state["launch_shown"] = older.id
    assert "Measured:" in said(app.run().subheader)


# On a testbed.


def test_a_testbed_shows_its_links_and_takes_a_scale(app: AppTest, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cached, "testbed_fault", lambda: None)
    place(app, "testbed")
    assert field(app, "Ranks").value == 8 and "29500" in said(app.markdown)
    enter(app, "Tokens to replay", 50)
    enter(app, "Scale", 2000.0)
    press(app, "Start")
    arguments = launches()[0].request.arguments
    assert (arguments["on"], arguments["scale"], arguments["ranks"]) == ("testbed", 2000.0, 8)
    assert len(arguments["cluster"]["nodes"]) == 4


@pytest.mark.parametrize(
    ("scale", "part"), [(1e12, "too slow to run anything on"), (4e5, "but the time limit is 900 s")]
)
def test_a_scale_that_makes_no_sense(app: AppTest, scale: float, part: str):
    place(app, "testbed")
    enter(app, "Scale", scale)
    assert part in said(app.error) + said(app.markdown)
    assert not any(button.label == "Start" and not button.disabled for button in app.button)


def test_without_root_a_testbed_is_refused_before_the_start(app: AppTest, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    cached.testbed_fault.clear()
    place(app, "testbed")
    assert "the testbed needs root" in said(app.warning) and "--on" not in said(app.warning)
    assert button(app, "Start").disabled
    cached.testbed_fault.clear()


# On a cluster.


def test_slurm_from_the_form_to_the_submission(app: AppTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install_slurm(tmp_path, monkeypatch)
    place(app, "slurm")
    assert "Enter the shared folder" in said(app.info) and not app.code
    assert [field(app, name).value for name in ("Nodes", "GPUs per node", "Ranks per node")] == [4, 2, 2]
    (shared := tmp_path / "shared").mkdir()
    for label, value in {"Shared folder": str(shared), "Partition": "gpu; rm"}.items():
        next(field for field in app.text_input if field.label == label).set_value(value)
    app.run()
    assert "no partition" in said(app.error)
    next(field for field in app.text_input if field.label == "Partition").set_value("gpu")
    app.run()
    assert "--partition=gpu" in app.code[0].value and f"{shared}/run-JOB" in app.code[0].value
    assert "NCCL: one GPU per rank" in said(app.markdown)
    press(app, "Write the run folder")
    (written,) = shared.glob("run-*")
    assert str(written) in app.code[0].value and str(written) in said(app.caption) and (written / "spec.json").exists()
    press(app, "Submit")
    (job,) = launches()
    asked = Launch.from_arguments(job.request.arguments)
    assert asked.on == "slurm" and asked.destination.partition == "gpu" and asked.destination.ranks == 8


def test_kubernetes_asks_for_what_it_needs(app: AppTest, tmp_path: Path):
    place(app, "kubernetes")
    assert "the shared folder and the volume claim and the image" in said(app.info)
    for label, value in {
        "Shared folder": str(tmp_path),
        "Volume claim": "runs",
        "Image": "registry/switchyard:1",
    }.items():
        next(field for field in app.text_input if field.label == label).set_value(value)
    enter(app, "GPUs per node", 0)
    assert "image: registry/switchyard:1" in app.code[0].value and "Gloo" in said(app.markdown)
    for label, value in {"Shared folder": "relative", "Image": "two words"}.items():
        next(field for field in app.text_input if field.label == label).set_value(value)
        app.run()
        assert "absolute path" in said(app.error) or "no image" in said(app.error)


# Who may.


@pytest.fixture
def from_elsewhere(app: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The visitor comes from another machine."""
    monkeypatch.delenv(people.GUARD_SWITCH, raising=False)
    comes_from("192.0.2.7", monkeypatch)


def allowed(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard changes its mind after so many answers: what was drawn as allowed is not any more when it is pressed."""
    answers = [None] * times
    monkeypatch.setattr(people, "why_not_launch", lambda *_: answers.pop() if answers else "Not any more.")


def test_a_visitor_from_elsewhere_starts_nothing(app: AppTest, from_elsewhere):
    app.run()
    assert "Launching is off" in said(app.warning) and button(app, "Start").disabled


def test_a_visitor_from_elsewhere_relaunches_nothing(app: AppTest, from_elsewhere, monkeypatch: pytest.MonkeyPatch):
    job = finish(request_of(wanted(app), store.data_folder()), 1.2, monkeypatch)
    app.session_state["launch_shown"] = job.id
    app.run()
    assert button(app, "Relaunch").disabled and "Measured / predicted" in metrics(app)  # to look is free


def test_a_visitor_from_elsewhere_submits_and_writes_nothing(app: AppTest, from_elsewhere, tmp_path: Path):
    place(app, "slurm")
    next(field for field in app.text_input if field.label == "Shared folder").set_value(str(tmp_path))
    app.run()
    assert button(app, "Submit").disabled and button(app, "Write the run folder").disabled


def test_a_start_asks_the_guard_again(app: AppTest, monkeypatch: pytest.MonkeyPatch):
    allowed(1, monkeypatch)
    press(app, "Start")
    assert "Not any more" in said(app.error) and not launches()


def test_a_relaunch_asks_the_guard_again(app: AppTest, monkeypatch: pytest.MonkeyPatch):
    job = finish(request_of(wanted(app), store.data_folder()), 1.2, monkeypatch)
    app.session_state["launch_shown"] = job.id
    app.run()
    allowed(1, monkeypatch)
    press(app, "Relaunch")
    assert "Not any more" in said(app.error) and len(launches()) == 1


@pytest.mark.parametrize(("label", "answers"), [("Submit", 1), ("Write the run folder", 2)])
def test_a_submission_asks_the_guard_again(app: AppTest, monkeypatch, tmp_path: Path, label: str, answers: int):
    place(app, "slurm")
    next(field for field in app.text_input if field.label == "Shared folder").set_value(str(tmp_path))
    app.run()
    allowed(answers, monkeypatch)
    press(app, label)
    assert "Not any more" in said(app.error) and not launches() and not list(tmp_path.glob("run-*"))


def test_a_visitor_from_elsewhere_does_not_make_the_machine_try_a_testbed(app: AppTest, from_elsewhere, monkeypatch):
    monkeypatch.setattr(cached, "testbed_fault", None)
    place(app, "testbed")
    assert button(app, "Start").disabled


# Past launches.


def test_past_launches_are_listed_searched_and_shown(app: AppTest, monkeypatch: pytest.MonkeyPatch):
    root, now = store.data_folder(), time.time()
    old = finish(request_of(wanted(app, tokens=32), root, now - 86_400), 1.25, monkeypatch)
    bad = fail(request_of(replace(wanted(app), plans=(app.plans[1],)), root, now - 60), "rank 1 lost its way")
    app.run()
    table = app.dataframe[0].value
    assert list(table["State"]) == ["failed", "done"] and list(table["Tokens"]) == ["64", "32"]
    first, second = app.plans
    assert list(table["Plans"]) == [second.name, f"{first.name} · {second.name}"] and set(table["Where"]) == {
        "this machine"
    }
    assert table["Ratio"][1] == "1.25× · 1.38×" and table["Ratio"][0] == ""
    for text, count in {
        "": 2,
        "failed": 1,
        f"{first.name.split()[0].upper()} 2 ranks": 1,
        "testbed": 0,
        f"{time.strftime('%Y-%m-%d', time.localtime(now - 86_400))} done": 1,
    }.items():
        app.text_input(key="launch-search").set_value(text).run()
        assert len(app.dataframe[0].value if app.dataframe else ()) == count, text
    assert "None of 2 launches" in said(app.caption) or app.dataframe
    app.text_input(key="launch-search").set_value("").run()
    assert "Measured / predicted" not in metrics(app)  # none of these is this session's own
    app.session_state["launch_shown"] = old.id
    app.run()
    assert list(app.dataframe[0].value[""]) == ["", "▸"] and metrics(app)["Measured / predicted"] == "1.25×"
    app.session_state["launch_shown"] = bad.id
    app.run()
    assert "rank 1 lost its way" in said(app.error) and "No rank has started yet" in said(app.caption)


def test_hundreds_of_launches_are_read_once_and_their_results_not_at_all(app: AppTest, monkeypatch: pytest.MonkeyPatch):
    root = store.data_folder()
    job = finish(request_of(replace(wanted(app), plans=app.plans[:1]), root, 1e9), 1.1, monkeypatch)
    for number in range(1, 300):
        folder = job.folder.parent / f"20010910T{number:012d}-0123abcd"
        shutil.copytree(job.folder, folder)
        (folder / RESULT).write_text("{not to be read}")
    begun = time.perf_counter()
    past_launches = history.launches()
    first = time.perf_counter() - begun
    assert len(past_launches) == 300 and {launch.state for launch in past_launches} == {State.DONE}
    for folder in job.folder.parent.glob("20010910T*"):
        (folder / BRIEF).unlink()
        (folder / REQUEST).write_text("{not to be read again}")
    begun = time.perf_counter()
    assert history.launches() == past_launches
    again = time.perf_counter() - begun
    assert again < 0.5 * first
    assert len(history.as_text(past_launches, None)) == 300


def test_a_launch_that_is_being_made_is_looked_at_again(app: AppTest):
    job = fail(request_of(wanted(app), store.data_folder()), "gone")
    asked = (job.folder / REQUEST).read_text()
    (job.folder / REQUEST).unlink()
    assert history.launches() == []
    (job.folder / REQUEST).write_text(asked)
    assert [launch.job.id for launch in history.launches()] == [job.id]


def test_past_launches_are_there_with_nothing_open(app: AppTest, monkeypatch: pytest.MonkeyPatch):
    job = finish(request_of(wanted(app), store.data_folder()), 1.2, monkeypatch)
    empty = AppTest.from_file(MAIN, default_timeout=60).run()
    visit(empty, "launch")
    assert empty.info and len(empty.dataframe[0].value) == 1
    empty.session_state["launch_shown"] = job.id
    empty.run()
    assert "Measured / predicted" in metrics(empty)


# Reports.


def test_a_launch_of_two_plans_says_which_one_the_measurement_prefers(app: AppTest, monkeypatch: pytest.MonkeyPatch):
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


def test_a_run_against_its_prediction_in_words():
    assert charts.against_prediction(1.0, 0.989) == "The run took 1.1 % less time than predicted"
    assert charts.against_prediction(1.0, 1.2) == "The run took 20 % more time than predicted"
    assert charts.against_prediction(1.0, 2.3) == "The run took 2.3× the predicted time"
    assert charts.against_prediction(1.0, 1.0001) == "The run took the predicted time"


def test_times_stand_behind_their_bars_in_one_readable_size():
    kinds, seconds = ["dispatch", "ffn"], ([1e-3, 2e-3], [1.5e-3, 1e-3])
    for figure in (charts.by_kind(kinds, *seconds, (5e-3, 6e-3), (2e-3, 3.5e-3)), charts.by_layer(range(2), *seconds)):
        predicted, measured = figure.data
        assert (predicted.name, measured.name) == ("Predicted", "Measured")
        for bars in figure.data:
            assert bars.orientation == "h" and bars.textposition == "outside" and bars.constraintext == "none"
            assert bars.textfont.size >= SMALLEST and bars.textangle == 0 and not bars.cliponaxis
    figure = charts.by_kind(kinds, *seconds, (5e-3, 6e-3), (2e-3, 3.5e-3))
    assert [bars.y[-1] for bars in figure.data] == ["Waiting between steps"] * 2
    assert [bars.text[-1] for bars in figure.data] == ["2 ms", "3.5 ms"]
    many = charts.by_layer(range(58), [1e-3] * 58, [2e-3] * 58)
    assert all(bars.orientation is None and bars.text is None for bars in many.data)
    both = charts.totals(["a", "b"], [1e-3, 2e-3], [[3e-3], [4e-3]], "title")
    assert both.layout.annotations[0].text == " 1 ms predicted<br> 3 ms measured"


def test_a_relaunch_is_the_same_once_more(app: AppTest, monkeypatch: pytest.MonkeyPatch):
    job = finish(request_of(wanted(app), store.data_folder()), 1.2, monkeypatch)
    app.session_state["launch_shown"] = job.id
    app.run()
    press(app, "Relaunch")
    again, before = launches()
    assert before.id == job.id
    assert again.request.arguments == job.request.arguments | {"by": getpass.getuser()}
    assert button(app, "Start").disabled and "one runs at a time" in said(app.caption)


def test_a_relaunch_without_its_recording_says_so(app: AppTest, monkeypatch: pytest.MonkeyPatch):
    small = problem_of(app).workload.spread(64)
    store.save_workload(small)
    job = finish(request_of(replace(wanted(app), workload=small), store.data_folder()), 1.2, monkeypatch)
    (store.data_folder() / "workloads" / f"{small.digest}.npz").unlink()
    app.session_state["launch_shown"] = job.id
    app.run()
    press(app, "Relaunch")
    assert "no longer in the data folder" in said(app.error) and len(launches()) == 1


def test_a_failed_launch_shows_the_end_of_the_log_of_the_rank_that_failed(app: AppTest):
    job = request_of(wanted(app), store.data_folder())
    run_folder(job).mkdir()
    logs = RankLogs(run_folder(job), 2)
    for rank in range(2):
        logs.progress(rank, {"done": 0.5, "message": f"layer {rank}"})
        logs.print(rank, f"last words of {rank}\n")
    logs.failed = 1, -9
    logs.save()
    fail(job, "the launch failed: rank 1 was killed")
    app.session_state["launch_shown"] = job.id
    app.run()
    chosen = next(control for control in app.segmented_control if control.label == "Log of rank")
    assert chosen.value == 1 and "last words of 1" in said(app.code) and "last words of 0" not in said(app.code)
    assert list(app.dataframe[-1].value["Doing"]) == ["layer 0", "layer 1"]
    chosen.set_value(0)
    app.run()
    assert "last words of 0" in said(app.code)


def test_a_stopped_launch_and_one_of_another_version(app: AppTest, monkeypatch: pytest.MonkeyPatch):
    stopped = request_of(wanted(app), store.data_folder())
    (stopped.folder / CANCELLED).touch()
    app.session_state["launch_shown"] = stopped.id
    app.run()
    assert "Stopped before" in said(app.info)
    older = finish(request_of(wanted(app), store.data_folder(), time.time() - 5), 1.2, monkeypatch)
    result = older.result
    (older.folder / RESULT).write_text(json.dumps({name: result[name] for name in result if name != "preference"}))
    app.session_state["launch_shown"] = older.id
    app.run()
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
    app.session_state["launch_shown"] = job.id
    app.run()
    assert not app.exception
    assert any(control.label == "Part of the step" for control in app.segmented_control) and not app.slider
