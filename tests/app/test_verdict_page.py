"""Verdicts on the Review page: computed in a job, kept, computed again after another choice; and the chart of their parts."""

import json
import shutil

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from app.charts import review as charts
from app.review import thresholds
from engine import store
from engine.compare.evidence import Criterion, Thresholds
from engine.compare.verdict import Judgement, Verdict, verdict_of
from engine.errors import InputError
from engine.jobs import runner
from engine.jobs.protocol import CANCELLED, FINAL, RESULT
from engine.jobs.runner import Job, State
from engine.store import team
from engine.store.database import database
from engine.systems import SYSTEMS, usual_plan
from engine.workload import RoutingTrace
from tests.cases.pages import field, press, run_the_job, said, studio, visit
from tests.cases.reviews import link, save
from tests.cases.sessions import problem_of

pytestmark = pytest.mark.usefixtures("warm_python")


@pytest.fixture
def app(ana: AppTest) -> AppTest:
    """Ana's saved plan on the Review page."""
    team.add_workspace(database(), "Autumn", "Ana")
    visit(ana, "review")
    ana.saved = save(ana, question="")
    return ana


def tell(app: AppTest) -> Job:
    return run_the_job(app, "Judge this plan", "verdict")


def text(app: AppTest) -> str:
    return said(app.markdown)


def tables(app: AppTest, column: str) -> list:
    return [frame.value for frame in app.dataframe if column in frame.value.columns]


def test_a_verdict_is_told_once_it_is_asked_for_and_seen_by_others(app: AppTest) -> None:
    assert "Not judged yet" in said(app.info) and not app.title
    tell(app)
    problem = problem_of(app)
    wanted = verdict_of(app.plans[1], problem, [problem.workload], usual_plan(SYSTEMS["linear"], problem)[0])
    words = {"do-it": "Do it", "try-it": "Try it", "not-now": "Not now", "cannot-say": "Cannot say yet"}
    assert app.title[0].value.endswith(words[wanted.verdict])
    assert all(reason in text(app) for reason in wanted.reasons)
    (rows,) = tables(app, "Threshold")
    assert len(rows) == len(wanted.criteria) and rows["Threshold"].iloc[0] == "at least 5.0 %"
    assert (rows[""] == "✓ passed").tolist() == [criterion.passed for criterion in wanted.criteria]
    (beside,) = tables(app, "Memory of replicas")
    assert beside["Compared with"].tolist() == [row.name for row in wanted.beside]
    assert any(name.startswith("no plan: experts in contiguous blocks") for name in beside["Compared with"])
    labels = {metric.label for metric in app.metric}
    assert {"Gain held out", "Pays back after", "Persistence"} <= labels
    assert "Memory of replicas" not in labels, "of a plan without any"
    others = link(plan=app.saved.plan)
    assert others.title[0].value == app.title[0].value and not others.error
    job = runner.jobs(store.data_folder(), "verdict")[0]
    stopped = Job(f"9{job.id[1:]}", job.folder.with_name(f"9{job.id[1:]}"))  # a later one, which ended without a result
    shutil.copytree(job.folder, stopped.folder)
    for name in (RESULT, FINAL):
        (stopped.folder / name).unlink()
    (stopped.folder / CANCELLED).touch()
    assert runner.jobs(store.data_folder(), "verdict")[0] == stopped and stopped.state is State.CANCELLED
    app.run()
    assert app.title[0].value == others.title[0].value, "what was told before stays"
    (job.folder / RESULT).write_text(json.dumps({"verdict": "do-it"}))
    app.run()
    assert not app.exception and not app.title and "of an older version" in said(app.info)


def test_a_verdict_holds_out_what_fits_is_told_with_the_sessions_thresholds_and_goes_to_the_report(
    app: AppTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    dossiers = []
    monkeypatch.setattr("app.review.report.html", lambda dossier: dossiers.append(dossier) or "")
    app.session_state["report"] = True  # the popover is open
    trace = problem_of(app).workload
    other = RoutingTrace("another hour", (trace.experts + 5) % 16, 16)
    alien = RoutingTrace("another model", np.zeros((8, 2, 1), dtype=np.int16), 4)
    names = {store.save_workload(recording): recording.name for recording in (other, alien)}
    app.session_state["workloads"] = {**app.session_state["workloads"], **names}
    app.run()
    chooser = field(app, "Held-out recordings")
    assert chooser.options == ["another hour"] and chooser.value == [other.digest]
    assert dossiers[-1].verdict is None
    set_threshold(app, "Gain held out, to try it, %", 50.0)
    assert app.session_state["thresholds"] == Thresholds(try_gain=0.5) and "Not judged yet" in said(app.info)

    job = tell(app)
    told = Judgement.from_dict(job.result, "verdict")
    assert job.request.arguments["recordings"] == [trace.digest, other.digest]
    parts = told.evidence.parts
    assert [part.by for part in parts] == ["time", "recording"] and parts[1].part == "another hour"
    assert dossiers[-1].verdict == told.verdict and dossiers[-1].judged_at == job.started
    assert job.result["thresholds"]["try_gain"] == 0.5
    (rows,) = tables(app, "Threshold")
    assert "at least 50 %" in rows["Threshold"].tolist() and "other thresholds" not in text(app)
    again = studio(session=app.query_params["session"])
    assert again.run().session_state["thresholds"] == Thresholds(try_gain=0.5), "a reload finds them"
    field(app, "Held-out recordings").set_value([]).run()
    assert "Judge it again" in said(app.info), "what it was told with is no longer what is chosen"


def set_threshold(app: AppTest, name: str, value: float) -> None:
    field(app, name).set_value(value)
    press(app, "Apply")


def word(app: AppTest) -> str:
    return app.title[0].value.split("] ")[1]


def test_a_changed_threshold_decides_again_at_once_for_everybody_but_who_may_only_look_changes_nothing(
    app: AppTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tell(app)
    before, evidence = word(app), job.result["evidence"]
    others = link(plan=app.saved.plan)
    set_threshold(app, "Tokens per expert", 1e8)
    assert runner.jobs(store.data_folder(), "verdict") == [job], "no job was started"
    assert before != word(app) == "Cannot say yet" and "Record at least" in text(app)
    assert "Judge it again" not in said(app.info) and "other thresholds" not in text(app)
    (rows,) = tables(app, "Threshold")
    assert "at least 100,000,000" in rows["Threshold"].tolist()
    kept = Judgement.from_dict(job.result, "verdict")
    assert job.result["evidence"] == evidence and kept.thresholds == Thresholds(tokens_per_expert=1e8)
    others.run()
    assert word(others) == "Cannot say yet"
    assert "Decided with other thresholds than this session's: tokens per expert 100,000,000 (here 25)." in text(others)
    press(others, "Apply this session's")
    assert word(others) == before and "other thresholds" not in text(others)
    app.run()
    assert word(app) == before and "tokens per expert 25 (here 100,000,000)" in text(app)
    press(app, "Restore defaults")
    assert app.session_state["thresholds"] == Thresholds() and "other thresholds" not in text(app)

    def refuse(*_) -> None:
        raise InputError("only planners may plan")

    told = job.result
    monkeypatch.setattr("app.visitor.people.allow", refuse)
    set_threshold(app, "Gain held out, to try it, %", 50.0)
    assert "only planners may plan" in said(app.error) and job.result == told
    app.run()
    for label in ("Apply this session's", "Judge this plan"):
        press(app, label)
        assert "only planners may plan" in said(app.error) and job.result == told, label
    assert runner.jobs(store.data_folder(), "verdict") == [job]


def criterion(**more) -> Criterion:
    usual = {"name": "gain", "title": "gain held out", "value": 0.1, "threshold": 0.05, "unit": "share", "at_least": True}
    return Criterion(**usual | {"passed": True} | more)


EVEN = {"name": "break_even_minutes", "unit": "minutes"}


@pytest.mark.parametrize(
    ("shown", "value", "threshold"),
    [
        (criterion(), "10 %", "at least 5.0 %"),
        (criterion(value=None, passed=False), "unknown", "at least 5.0 %"),
        (criterion(value=0.0497, passed=False), "4.97 %", "at least 5.0 %"),
        (criterion(name="replica_gain", value=None, infinite=True), "no replicas", "at least 5.0 %"),
        (criterion(**EVEN, value=None, infinite=True, at_least=False, passed=False), "never", "at most 3 s"),
        (criterion(**EVEN, value=90.0, threshold=10.0, at_least=False), "90 min", "at most 10 min"),
        (criterion(**EVEN, value=0.5, threshold=10.0), "30 s", "at least 10 min"),
        (criterion(name="tokens_per_expert", value=384.0, threshold=25.0, unit="count"), "384", "at least 25"),
    ],
)
def test_a_criterion_in_words(shown: Criterion, value: str, threshold: str) -> None:
    assert list(thresholds.LABELS) == list(Thresholds.model_fields)
    row = thresholds.as_text([shown]).iloc[0]
    assert (row["Value"], row["Threshold"]) == (value, threshold) and row["Criterion"]


def test_the_chart_has_every_part_with_its_interval_and_the_thresholds() -> None:
    part = {"by": "recording", "tokens": 1e4, "planned_on": "now", "seconds_deployed": 1.2, "seconds": 1.0, "error": 0.01}
    parts = [part | {"part": "<b>code</b>", "gain": 0.2}, part | {"part": "p" * 60, "gain": 0.1}]
    gain = {
        "gain_held_out": 0.15,
        "gain_low": 0.13,
        "gain_high": 0.17,
        "confidence": 0.95,
        "gain_worst": 0.1,
        "persistence": 0.8,
    }
    memory = {"memory_bytes": 0.0, "memory_bytes_per_gpu": 0.0, "memory_share": 0.1, "tokens_per_expert": 100.0}
    move = {"move_copies": 1, "move_bytes": 1.0, "move_seconds": 1.0, "break_even_steps": 3.0, "break_even_minutes": 1.0}
    words = {"verdict": "do-it", "plan": "new", "deployed": "old", "unit": "a pass", "beside": [], "reasons": ["because"]}
    criteria = [criterion(), criterion(name="try_gain", threshold=0.02)]
    figure = charts.gains(Verdict.model_validate(gain | memory | move | words | {"parts": parts, "criteria": criteria}))
    bars, mean = figure.data
    assert list(bars.x) == [20.0, 10.0] and mean.x == (15.0,)
    assert bars.error_x.array == pytest.approx([1.96, 1.96], abs=0.01) and mean.error_x.array == pytest.approx([2.0])
    assert {shape.x0 for shape in figure.layout.shapes} == {0, 5.0, 2.0}
    assert figure.layout.title.text == "Held out it gains +15.0 %; 95 % interval +13.0 % to +17.0 %"
    names = figure.layout.yaxis.ticktext
    assert names[-1] == "mean" and "<b>" not in names[0] and len(names[1]) < 60
