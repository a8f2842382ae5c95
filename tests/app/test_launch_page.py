"""The Launch page: what a new launch asks for, who may start one, and past launches, listed, reported and started again."""

import getpass
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
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
from engine.jobs import tasks, workers
from engine.jobs.launches import BRIEF, Brief, run_folder
from engine.jobs.protocol import CANCELLED, REQUEST, RESULT, Context
from engine.jobs.runner import Job, State
from engine.jobs.runtimes import Took, work_of
from engine.launch.preparation.launch import Launch
from engine.launch.preparation.prepare import prepare
from engine.launch.rank.failure import RankLogs, RankProgress
from engine.plan import Plan, Travel
from engine.problem import make_problem
from engine.simulate.training.step import simulate_step
from engine.store.problems import problem_arguments
from engine.timeline import Timeline
from engine.training import usual_step
from engine.workload import RoutingTrace
from tests.cases.launched import fail, finish, request_of
from tests.cases.pages import button, buttons, enter, field, metrics, press, put, run, said, studio, visit
from tests.cases.samples import sample, sample_model
from tests.cases.sessions import ANOTHER, JOB, comes_from, launches, open_recording, plan, problem_of, wanted
from tests.jobs.asking import in_json
from tests.launch.cluster_fakes import install_slurm
from tests.strategies import make_gpu


@pytest.fixture
def app(launch_page: AppTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AppTest:
    """A linear plan, which is open, and another one. The processes of launches wait until they are ended."""
    waiting = tmp_path / "python"
    waiting.write_text("#!/bin/sh\nexec sleep 600\n")
    waiting.chmod(0o700)
    monkeypatch.setattr(workers, "sys", SimpleNamespace(executable=str(waiting)))
    return launch_page


def place(app: AppTest, name: str) -> AppTest:
    app.segmented_control(key="launch-place").set_value(name)
    return run(app)


def fill(app: AppTest, values: dict[str, object]) -> None:
    """Set inputs, choices and text fields by label and run the page."""
    for label, value in values.items():
        texts = [text for text in app.text_input if text.label == label]
        (texts[0] if texts else field(app, label)).set_value(value)
    run(app)


def test_what_is_chosen_is_what_is_started(app: AppTest):
    assert said(app.markdown).count("check_circle") == 7 and "Devices" in said(app.markdown)
    assert "torchrun picks a free one" in said(app.markdown) and "torch.distributed.run" in app.code[0].value
    chosen = app.multiselect[0]
    assert chosen.label == "Compare with" and chosen.value == []  # an order that nobody would deploy is compared when asked for
    fill(app, {"Compare with": [app.plans[1].id]})
    numbers = {"Ranks": 2, "Tokens to replay": 100, "Timed passes": 5, "Time limit, s": 77}
    fill(app, numbers | {"Number format": "bf16"})
    assert "Its 2 ranks are equal" in said(app.caption) and "5 timed passes each" in said(app.caption)
    assert "100 of the recording, 5 timed passes of each of 2 plans" in said(app.markdown)
    press(app, "Start")
    (job,) = launches()
    asked = Launch.from_arguments(job.request.arguments)
    assert [plan.id for plan in asked.plans] == [plan.id for plan in app.plans] and asked.on == "local"
    assert (asked.ranks, asked.tokens, asked.repeats, asked.limit, asked.dtype) == (2, 100, 5, 77.0, "bf16")
    assert button(app, "Start").disabled and "one runs at a time" in said(app.caption)
    assert "Stop" in buttons(app)
    # Where a person has gone and come back, the numbers are still there.
    visit(app, "optimise")
    visit(app, "launch")
    assert field(app, "Timed passes").value == 5 and field(app, "Ranks").value == 2


def test_how_long_a_launch_takes_is_said_before_it_starts(app: AppTest):
    fill(app, {"Ranks": 2, "Tokens to replay": 64, "Compare with": [app.plans[1].id]})
    assert ": at least " in said(app.caption) and "GFLOP/s, timed just now" in said(app.caption)
    past = wanted(app)
    job, prepared = request_of(past, store.data_folder()), prepare(past, cached.attached())
    took = Took(work=work_of(prepared), start=4.0, passes=40.0, check=16.0)
    write_atomically(job.folder / BRIEF, Brief(plans=("a", "b"), on="local", took=took).to_json())
    fill(app, {"Timed passes": 7})
    assert "7 timed passes each: about 2 min (from the last launch of this shape); ends after" in said(app.caption)
    assert "Raise the time limit" not in said(app.caption)
    fill(app, {"Timed passes": 3, "Time limit, s": 50})
    assert "about 1 min" in said(app.caption) and "Raise the time limit, or choose fewer passes." in said(app.caption)


def test_what_cannot_run_is_said_before_the_start(app: AppTest, monkeypatch: pytest.MonkeyPatch):
    small = replace(cached.attached(), host_memory=1e6)
    monkeypatch.setattr(cached, "attached", lambda: small)
    app.run()
    assert said(app.markdown).count("launch it on a larger machine") == 2, "beside Start and in the pre-flight"
    assert button(app, "Start").disabled
    put(app, model=model_presets()["Mixtral-8x7B"].model)
    assert "does not fit the recording" in said(app.error) and "Start" not in buttons(app)


def test_two_models_are_launched_together(app: AppTest):
    visit(app, "optimise")
    press(app, "Two models on one cluster")
    enter(app, "Second model's recording", "tiny-moe/beta-prose.npz")
    digest = app.session_state["second"]
    problem = problem_of(app)
    beside = (store.load_workload(digest), app.session_state["model_of"][digest])
    problem = make_problem(problem.workload, problem.cluster, problem.model, Datasheet(), beside)
    (rec_plan,) = plan(problem, ANOTHER, "rec")
    app.session_state["plan_jobs"], app.session_state["plan"] = [ANOTHER, JOB], rec_plan.id
    visit(app, "launch")
    assert "of the two recordings" in said(app.markdown)
    assert app.multiselect[0].disabled  # no other plan is for two models
    press(app, "Start")
    assert launches()[0].request.arguments["second"]["workload"] == digest


def open_on_pairs(app: AppTest, nodes: int, order: str = "two-tier", travel: Travel | None = None) -> AppTest:
    """The page with an open plan of a two-tier order, or of another one, on so many nodes of two GPUs."""
    trace = sample("alpha-code")
    short = RoutingTrace("two layers", trace.experts[:, :2], trace.num_experts)
    pairs = [Node(name=f"node {at}", gpus=(make_gpu(),) * 2, link_bandwidth=1e12) for at in range(nodes)]
    app.session_state["cluster"] = Cluster(name="pairs", nodes=pairs)
    app.session_state["model"] = sample_model(layers=2)
    open_recording(app, short)
    problem = replace(problem_of(app), travel=travel)
    job = f"20250102T0304050000{nodes:02}-0123abc{int(travel is not None)}"
    (opened,) = plan(problem, job, {"name": "eplb", "options": {"order": order, "algorithm": "eplb"}})
    app.session_state["plan_jobs"], app.session_state["plan"] = [job], opened.id
    return visit(app, "launch")


def test_two_tier_orders_and_rows_of_nodes_need_ranks_that_can_carry_them_out(app: AppTest):
    assert field(app, "Ranks").value == 4
    open_on_pairs(app, 6)
    assert not app.error and field(app, "Ranks").value == 6 and not button(app, "Start").disabled
    enter(app, "Ranks", 5)
    assert "on 5 ranks one would stand for GPUs of several nodes: choose 6" in said(app.error)
    open_on_pairs(app, 6, "concurrent", Travel(unit="node", dispatch="fp8"))
    assert "whose GPUs pass it on to each other; on 5 ranks one would stand for" in said(app.error)
    enter(app, "Ranks", 6)
    assert not app.error and "one row per node, fp8 out" in said(app.markdown) and not button(app, "Start").disabled
    open_on_pairs(app, 2, "matched", Travel(unit="node"))
    assert "not in a matched order; plan with a concurrent order" in said(app.error)
    assert "Start" not in buttons(app)
    open_on_pairs(app, 9)
    assert not app.error and "takes at least 9 ranks" in said(app.info) and field(app, "Ranks").value is None
    assert "Start" not in buttons(app)
    enter(app, "Ranks", 9)
    assert not app.error and not button(app, "Start").disabled and "folded onto 9 ranks" in said(app.markdown)


def is_folded(app: AppTest) -> bool:
    (form,) = (box for box in app.expander if box.label == "New launch")
    return not form.proto.expanded


def test_the_form_folds_away_while_a_launch_is_shown(app: AppTest, monkeypatch: pytest.MonkeyPatch):
    assert not is_folded(app) and "New launch" not in buttons(app)
    older = finish(request_of(wanted(app), store.data_folder(), time.time() - 60), 1.2, monkeypatch)
    app.session_state["launch_jobs"] = [older.id]
    assert is_folded(app.run()) and "Measured:" in said(app.subheader)
    press(app, "New launch")
    assert not is_folded(app)
    enter(app, "Compare with", [])
    assert "3 timed passes after a warm-up" in said(app.markdown)
    press(app, "Start")
    assert len(launches()[0].request.arguments["plans"]) == 1, "the open plan alone"
    # While one runs only its progress is shown, until another one is chosen.
    assert is_folded(app) and "Measured:" not in said(app.subheader)
    app.session_state["launch_shown"] = older.id
    assert "Measured:" in said(app.run().subheader)


def test_a_testbed_shows_its_links_and_takes_a_scale_that_makes_sense(app: AppTest, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cached, "testbed_fault", lambda: None)
    place(app, "testbed")
    assert field(app, "Ranks").value == 8 and "29500" in said(app.markdown)
    for scale, part in ((1e12, "too slow to run anything on"), (4e5, "but the time limit is 900 s")):
        enter(app, "Scale", scale)
        assert part in said(app.error) + said(app.markdown)
        assert not any(button.label == "Start" and not button.disabled for button in app.button)
    fill(app, {"Tokens to replay": 50, "Scale": 2000.0})
    press(app, "Start")
    arguments = launches()[0].request.arguments
    assert (arguments["on"], arguments["scale"], arguments["ranks"]) == ("testbed", 2000.0, 8)
    assert len(arguments["cluster"]["nodes"]) == 4


def test_without_root_a_testbed_is_refused_before_the_start(app: AppTest, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    cached.testbed_fault.clear()
    place(app, "testbed")
    assert "the testbed needs root" in said(app.warning) and "--on" not in said(app.warning)
    assert button(app, "Start").disabled
    cached.testbed_fault.clear()


def test_slurm_from_the_form_to_the_submission(app: AppTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install_slurm(tmp_path, monkeypatch)
    place(app, "slurm")
    assert "Enter the shared folder" in said(app.info) and not app.code
    assert [field(app, name).value for name in ("Nodes", "GPUs per node", "Ranks per node")] == [4, 2, 2]
    (shared := tmp_path / "shared").mkdir()
    fill(app, {"Shared folder": str(shared), "Partition": "gpu; rm"})
    assert "no partition" in said(app.error)
    fill(app, {"Partition": "gpu"})
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
    assert "Enter the shared folder, the volume claim and the image to" in said(app.info)
    fill(app, {"Shared folder": str(tmp_path), "Volume claim": "runs", "Image": "registry/switchyard:1"})
    enter(app, "GPUs per node", 0)
    assert "image: registry/switchyard:1" in app.code[0].value and "Gloo" in said(app.markdown)
    for label, value in {"Shared folder": "relative", "Image": "two words"}.items():
        fill(app, {label: value})
        assert "absolute path" in said(app.error) or "no image" in said(app.error)


def test_a_visitor_from_elsewhere_looks_and_starts_nothing(app: AppTest, monkeypatch, tmp_path: Path):
    monkeypatch.delenv(people.GUARD_SWITCH, raising=False)
    comes_from("192.0.2.7", monkeypatch)
    app.run()
    assert "Launching is off" in said(app.warning) and button(app, "Start").disabled
    place(app, "slurm")
    fill(app, {"Shared folder": str(tmp_path)})
    assert button(app, "Submit").disabled and button(app, "Write the run folder").disabled
    monkeypatch.setattr(cached, "testbed_fault", None)  # the machine is not made to try a testbed
    place(app, "testbed")
    assert button(app, "Start").disabled
    put(app, launch_shown=finish(request_of(wanted(app), store.data_folder()), 1.2, monkeypatch).id)
    assert button(app, "Relaunch").disabled and "Measured / predicted" in metrics(app)  # to look is free


def test_every_start_asks_the_guard_again(app: AppTest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def refused(label: str, allowed: int) -> None:
        """Press a button while the guard changes its mind: after so many answers, all to the page that draws the button."""
        monkeypatch.setattr(people, "why_not_launch", lambda *_: None)
        run(app)
        answers, before = [None] * allowed, len(launches())
        monkeypatch.setattr(people, "why_not_launch", lambda *_: answers.pop() if answers else "Not any more.")
        press(app, label)
        assert "Not any more" in said(app.error) and len(launches()) == before and not list(tmp_path.glob("run-*"))

    refused("Start", 1)
    place(app, "slurm")
    fill(app, {"Shared folder": str(tmp_path)})
    refused("Submit", 1)
    refused("Write the run folder", 2)
    app.session_state["launch_shown"] = finish(request_of(wanted(app), store.data_folder()), 1.2, monkeypatch).id
    refused("Relaunch", 1)


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


def test_the_pieces_of_a_schedulers_work_are_shown(app: AppTest, monkeypatch: pytest.MonkeyPatch):
    job = finish(request_of(replace(wanted(app), plans=app.plans[:1]), store.data_folder()), 1.2, monkeypatch)
    result = job.result
    work = {"text": "the scheduler hosted 5 of 8 layers anew", "piece": ["check after the gate"], "predicted": [1e-3]}
    result["runs"][0]["scheduler"] = work | {"measured": [2e-3]}
    (job.folder / RESULT).write_text(json.dumps(result))
    show(app, job)
    assert "The scheduler hosted 5 of 8 layers anew. Times are of the slowest rank" in said(app.caption)
    (pieces,) = [table.value for table in app.dataframe if "Of the scheduler" in table.value]
    assert pieces.iloc[0].tolist() == ["check after the gate", "1 ms", "2 ms"]
