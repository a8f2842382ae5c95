"""Exchanges of a measured table have no order to choose: every page, file and command says so, and none shows a gap of 0.0 %,
which would look like a proof."""

import json
import re
from html import unescape
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from app.charts import what_if as what_if_charts
from app.review import report
from engine import store
from engine.catalogue import cluster_presets
from engine.compare.figures import metrics, proof_of_plan
from engine.compare.standing import standing_of
from engine.compare.what_if import outlook
from engine.costs import Combined, Datasheet, DeepEP, choice
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.result import NOT_BOUNDED, Status, not_bounded
from engine.serving.step import ServingStep
from engine.store import team
from engine.store.database import database
from engine.systems import SYSTEMS, TRAINING, run
from engine.training import usual_step
from tests.cases.cli import ALPHA, INPUTS, CommandLine
from tests.cases.pages import put, visit
from tests.cases.reviews import save
from tests.cases.samples import sample, sample_model
from tests.cases.sessions import JOB, plan, problem_of
from tests.costs.silicon import needs_tables

pytestmark = needs_tables

CLUSTER = cluster_presets()["hgx-h100-8"].cluster
COST = Combined(Datasheet(), DeepEP())
WHY = not_bounded("measured exchanges have no order to choose")
PROOF = re.compile(
    r"0\.0 % (above|away)|[Nn]o order (of|can)|(bound|below) \d|Proven optimal|Bound: any|its bound|"
    r"(by order|this placement): [\d<]"
)
"""Words of a bound on orders, with a figure."""


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem(sample("alpha-code", 400), CLUSTER, sample_model("alpha"), COST)


@pytest.mark.parametrize("order", ["concurrent", "matched"])
def test_a_time_of_a_table_carries_the_fact_and_no_bound(problem: Problem, order: str) -> None:
    outcome = run(SYSTEMS["eplb"], problem, {"order": order})
    plan = outcome.result.solution
    figures = metrics(plan, problem)
    assert figures.unbounded == problem.network.unbounded == WHY.partition(": ")[2]
    assert figures.order_bound is figures.order_gap is figures.bound is None
    assert figures == type(figures).from_dict(json.loads(json.dumps(figures.to_dict())))
    assert plan.claim.bound == 0 and plan.claim.status is Status.FEASIBLE, "what is not proven is not claimed either"
    # A plan of an earlier version may claim the table's own time as its bound.
    claim = plan.claim.model_copy(update={"bound": plan.claim.objective, "status": Status.OPTIMAL})
    assert metrics(plan.model_copy(update={"claim": claim}), problem).bound is None
    proof = proof_of_plan(plan, figures)
    assert proof.proven == proof.in_words == "no bound on order" and WHY in proof.sentence
    standing = standing_of(plan, figures, plan, figures, problem, None)
    assert standing.above_bounds == ("Left to gain by order", NOT_BOUNDED) and standing.gap is None
    assert standing.bound_covers == f"{WHY.capitalize()}."
    assert outlook(plan, problem).bound is None
    drawn = what_if_charts.totals([what_if_charts.Case(plan.name, outlook(plan, problem), None)], "")
    assert NOT_BOUNDED in str(drawn.layout.annotations) and "its bound" not in [trace.name for trace in drawn.data]


def test_sends_that_are_simulated_and_steps_of_training_stay_bounded() -> None:
    trace, model = sample("alpha-code", 400), sample_model("alpha")
    step = usual_step(model, 8).model_copy(update={"batch": 1, "sequence_length": 16})
    in_a_step = make_problem(trace, CLUSTER, model, COST, step=step)
    plain = make_problem(trace, CLUSTER, model, Datasheet())
    for here, system in ((plain, SYSTEMS["linear"]), (in_a_step, TRAINING["deepspeed"])):
        plan = run(system, here).result.solution
        figures = metrics(plan, here)
        assert figures.unbounded is None and 0 < figures.order_bound <= figures.total * (1 + 1e-9)
        assert plan.claim.bound == pytest.approx(figures.order_bound)


def told(app: AppTest) -> str:
    """All that a page shows: text, figures with their tips, tables, and charts."""
    words = [element.value for part in (app.markdown, app.caption, app.info, app.success) for element in part]
    words += [f"{metric.label}: {metric.value} ({metric.help})" for metric in app.metric]
    words += [frame.value.to_csv() for frame in app.dataframe]
    words += [json.dumps(json.loads(chart.proto.spec)["layout"]) for chart in app.get("plotly_chart")]
    return "\n".join(words).replace("\\", "")


def with_tables(app: AppTest, *systems: str) -> list[Plan]:
    """A session with these costs, and plans for them, the last of them open."""
    for name, value in {"cluster": CLUSTER, "cost": choice.to_dict(COST), "person": "Ana"}.items():
        app.session_state[name] = value
    here = problem_of(app)
    plans = plan(make_problem(here.workload, CLUSTER, here.model, COST), JOB, *systems)
    app.session_state["plan_jobs"], app.session_state["plan"] = [JOB], plans[-1].id
    return plans


def judged_pages(app: AppTest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The words of every page with a plan, of its brief and of the report."""
    texts = {page: told(visit(app, page)) for page in ("optimise", "timeline", "what_if", "launch")}
    team.add_workspace(database(), "Autumn", "Ana")
    visit(app, "review")
    save(app, "ours", question="")
    reports: list[str] = []
    monkeypatch.setattr("app.review.report.html", lambda dossier, made=report.html: reports.append(made(dossier)) or "")
    texts["brief"] = told(put(app, report=True))
    texts["report"] = unescape(re.sub(r"(?s)<script.*?</script>", "", reports[-1]))
    return texts


def test_every_page_and_file_says_that_a_pass_is_not_bounded(sample: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    with_tables(sample, "linear", "eplb")
    for page, text in judged_pages(sample, monkeypatch).items():
        assert NOT_BOUNDED in text, page
        assert not PROOF.search(text), (page, PROOF.search(text))


def test_the_serving_step_is_not_bounded_either(sample: AppTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ALPHA))
    step, model = ServingStep(phase="decode", sequences=64, context=10, output=10), sample.session_state["model"].digest
    put(sample, serving=step, servings={model: step}, configs={model: store.save_config(tmp_path / "config.json")})
    with_tables(sample, "linear", "eplb")
    for page, text in judged_pages(sample, monkeypatch).items():
        assert NOT_BOUNDED in text, page
        assert not PROOF.search(text), (page, PROOF.search(text))


def test_every_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    engine, file, step = CommandLine(capsys), tmp_path / "plan.json", tmp_path / "step.json"
    (tmp_path / "cluster.json").write_text(CLUSTER.to_json())
    (tmp_path / "config.json").write_text(json.dumps(ALPHA))
    step.write_text(ServingStep(phase="decode", sequences=64, context=10, output=10).to_json())
    inputs = [*INPUTS[:2], "--cluster", tmp_path / "cluster.json", *INPUTS[4:], "--cost", "deepep", "--cost", "datasheet"]
    told = {"plan": engine.text("plan", *inputs, "--system", "linear", "--output", file)}
    told["simulate"] = engine.text("simulate", file, *inputs)
    told["compare"] = engine.text("compare", file, file, *inputs)
    told["serve"] = engine.text("serve", file, *inputs, "--config", tmp_path / "config.json", "--serving", step)
    for command, text in told.items():
        assert NOT_BOUNDED in text and not PROOF.search(text), (command, text)
    assert WHY in told["simulate"]
    assert "have no order to choose" in engine.refused("study", "contention", "--plan", file, *inputs)
