"""The Optimise page beyond a first plan: two models, several recordings, studies, and how tokens travel."""

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from app import state
from app.review.brief import words
from app.visitor import roles
from engine import store
from engine.jobs import protocol, runner
from engine.jobs.tasks import OptimiseAnswer
from engine.plan import Plan, Travel
from engine.workload import ExpertLoad
from tests.cases.pages import chooser, enter, field, press, run_the_job, tick, visit

pytestmark = pytest.mark.usefixtures("warm_python")


@pytest.fixture
def app(sample: AppTest) -> AppTest:
    """The sample, opened."""
    return sample


def open_samples(app: AppTest, *titles: str) -> AppTest:
    visit(app, "workload")
    for title in titles:
        press(app, title)
    return app


def test_two_models_from_the_goal_to_the_timeline(app: AppTest) -> None:
    visit(app, "optimise")
    press(app, "Two models on one cluster")
    assert any("Choose the recording of the second model" in info.value for info in app.info)
    enter(app, "Second model's recording", "tiny-moe/beta-prose.npz")
    assert {box.label.split("**")[1] for box in app.checkbox} == {
        "Aurora",
        "Random colocation (REC)",
        "Same-model packing (Lina)",
        "Linear placement",
    }
    run_the_job(app)
    table = app.dataframe[0].value
    assert len(table) == 4 and table["Plan"].tolist()[:2] == ["Linear placement", "Aurora"]
    against = dict(zip(table["Plan"], table["Against Linear placement"], strict=True))
    assert against["Linear placement"] == "deployed" and float(against["Aurora"].rstrip("×")) > 1
    assert table["Above any placement's bound"].iloc[1].endswith(" %") and set(table["Proof"]) <= {
        "nothing",
        "placement",
        "order",
        "placement and order",
    }
    visit(app, "timeline")
    assert not app.error and any(metric.label == "Bound for any placement" for metric in app.metric)
    assert any(heading.value == "Alone and together" for heading in app.subheader)
    visit(app, "launch")
    assert not app.error  # two models are launched together
    visit(app, "optimise")
    press(app, "Inference latency of one model")
    visit(app, "timeline")
    assert any("two models" in info.value for info in app.info)


def test_a_second_model_that_does_not_fit_is_refused_with_a_way_out(app: AppTest) -> None:
    digest = store.save_workload(ExpertLoad("small", np.ones((8, 4)), tuple(range(8))))
    model = app.session_state["model"].model_copy(update={"experts": 4})
    app.session_state["workloads"] = {**app.session_state["workloads"], digest: "small"}
    app.session_state["model_of"] = {digest: model}
    app.session_state["second"] = digest
    visit(app, "optimise")
    assert "choose a second model with 16 experts" in app.error[0].value.replace("\\", "")
    press(app, "Close the second model")
    assert not app.error


def test_what_a_move_costs_counts_from_the_plan_in_use(planned: AppTest) -> None:
    table = planned.dataframe[0].value.set_index("Plan")
    assert table.loc["Linear placement", "Copies to move"].startswith("0 ")
    assert table.loc["Linear placement", "Pays after"] == "at once" and table.loc["Aurora", "Pays after"].endswith(
        "passes"
    )
    ids = {option.split(" · ")[0]: option for option in chooser(planned, "Deployed now").options}
    assert any(name.startswith("Aurora") for name in ids)
    deployed = field(planned, "Deployed now")
    deployed.select_index(next(i for i, option in enumerate(deployed.options) if option.startswith("Aurora")))
    planned.run()
    table = planned.dataframe[0].value.set_index("Plan")
    assert table.loc["Aurora", "Copies to move"].startswith("0 ")
    assert table.loc["Linear placement", "Pays after"] == "never"


@pytest.mark.parametrize("unit", ["copies", "gpu"])
def test_the_front_fills_in_and_its_plans_can_be_opened(app: AppTest, unit: str) -> None:
    open_samples(app, "Alpha on prose", "Alpha on code")
    visit(app, "optimise")
    enter(app, "How tokens travel", unit)
    enter(app, "Show", "Balance against affinity")
    assert any("No front yet" in info.value for info in app.info)
    field(app, "Points on the front").set_value(3)
    field(app, "Time limit, s").set_value(1)
    app.run()
    candidates = run_the_job(app, "Find the front", "front").result["candidates"]
    assert 1 <= len(candidates) <= 3
    assert all((candidate["rows"] is None) is (unit == "copies") for candidate in candidates)
    enter(app, "Scored on as well", app.session_state["workload"] and _other(app))
    press(app, "Open this plan")
    assert app.session_state["plan"] in {candidate["plan_id"] for candidate in candidates}
    enter(app, "Show", "Candidate plans")
    assert any(str(name).startswith("Front at") for name in app.dataframe[0].value["Plan"])


def _other(app: AppTest) -> str:
    return next(digest for digest in app.session_state["workloads"] if digest != app.session_state["workload"])


def test_plan_on_a_score_on_b(app: AppTest) -> None:
    visit(app, "optimise")
    enter(app, "Show", "Cross-workload score")
    assert any("at least two recordings" in info.value for info in app.info)
    open_samples(app, "Alpha on prose")
    visit(app, "optimise")
    enter(app, "Show", "Cross-workload score")
    enter(app, "System", "round-robin")
    result = run_the_job(app, "Score", "matrix").result
    assert len(result["names"]) == 2 and all(value > 0 for row in result["seconds"] for value in row)
    enter(app, "Score", "balancedness")
    assert not app.error


def test_lina_at_run_time(app: AppTest) -> None:
    visit(app, "optimise")
    enter(app, "Show", "Lina at run time")
    field(app, "Experts per device").set_value(3)
    result = run_the_job(app, "Simulate", "lina").result
    assert all(run["options"]["max_experts_per_device"] == 3 for run in result["runs"])
    app.run()
    table = app.dataframe[0].value
    assert table["Path length"].tolist() == [1, 3, 6]
    assert any("scheduling one layer again" in caption.value for caption in app.caption)


def test_linas_row_is_named_for_its_hosting_and_has_the_scheduled_time_beside_it(app: AppTest) -> None:
    visit(app, "optimise")
    tick(app, "Lina (inference)", "Linear placement")
    run_the_job(app)
    table = app.dataframe[0].value.set_index("Plan")
    scheduled = table["With its scheduler, against contiguous blocks"]
    assert scheduled["Lina's hosting, unscheduled"].endswith("×") and scheduled["Linear placement"] == "—"


def test_studies_of_loads_say_what_they_need(app: AppTest) -> None:
    digest = store.save_workload(ExpertLoad("loads", np.ones((8, 16)), tuple(range(8))))
    app.session_state["workloads"], app.session_state["workload"] = {digest: "loads"}, digest
    visit(app, "optimise")
    for view in ("Balance against affinity", "Lina at run time"):
        enter(app, "Show", view)
        assert any("routing log" in info.value for info in app.info) and not app.error


def test_a_robust_plan_serves_the_chosen_recordings(app: AppTest) -> None:
    open_samples(app, "Alpha on prose", "Alpha on code")
    visit(app, "optimise")
    enter(app, "Also plan for", [_other(app)])
    assert app.session_state["others"] == [_other(app)]
    job = run_the_job(tick(app, "Replication"))
    # The baseline is planned too, before all others, although it was not asked for.
    linear, replicated = job.result["candidates"]
    assert linear["plan"]["name"] == "Linear placement"
    note = replicated["notes"]["balancedness"]["value"]
    assert "of the worst recording" in note


def test_a_system_that_cannot_plan_says_why_and_does_not_hold_up_the_others(app: AppTest) -> None:
    digest = store.save_workload(ExpertLoad("loads", np.ones((8, 16)), tuple(range(8))))
    app.session_state["workloads"], app.session_state["workload"] = {digest: "loads"}, digest
    visit(app, "optimise")
    assert list(run_the_job(tick(app, "ExFlow", "Linear")).result["refused"]) == ["ExFlow"]
    assert app.dataframe[0].value["Plan"].tolist() == ["Linear placement"]
    assert any("ExFlow" in warning.value and "routing log" in warning.value for warning in app.warning)


def test_who_may_only_look_starts_nothing(app: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(roles.SETTING, '{"default": "view"}')
    visit(app, "optimise")
    press(app, "Run")
    assert any("you may look at plans" in error.value and "make and save plans" in error.value for error in app.error)
    assert not runner.jobs(store.data_folder(), "optimise")


def test_every_system_says_how_long_it_takes_before_it_is_run(app: AppTest) -> None:
    visit(app, "optimise")
    labels = {box.label.split("**")[1]: box.label for box in app.checkbox if box.label.startswith("**")}
    assert labels["Linear placement"].endswith("** · under 1 s · baseline")
    usual, (limit,) = labels["ExFlow"], [box for box in app.number_input if box.key.endswith("aurora-time_limit")]
    assert all(" s · " in label for name, label in labels.items() if name != "Co-activation")
    next(box for box in app.checkbox if box.label == usual).check().run()
    assert limit.value > 1
    next(box for box in app.number_input if box.key.endswith("exflow-time_limit")).set_value(1.0).run()
    limited = next(box.label for box in app.checkbox if "ExFlow" in box.label)
    assert "about 1 s" in limited and "about 1 s" not in usual


def test_a_plan_is_in_the_table_before_the_others_are_found(planned: AppTest, monkeypatch) -> None:
    job = runner.jobs(store.data_folder(), "optimise")[0]
    everything = job.result
    some = everything | {"candidates": everything["candidates"][1:2]}
    monkeypatch.setattr(runner.Job, "state", runner.State.RUNNING)
    protocol.replace_result(job.folder, OptimiseAnswer(**some))
    planned.run()
    assert list(planned.dataframe[0].value["Plan"]) == [some["candidates"][0]["plan"]["name"]]
    protocol.replace_result(job.folder, OptimiseAnswer(**everything))
    planned.run()
    assert len(planned.dataframe[0].value) == len(everything["candidates"])


def test_whoever_watches_a_job_is_told_of_every_result(empty_session) -> None:
    assert not state.visit.newly_written("job", None) and not state.visit.newly_written("job", None)
    assert (
        state.visit.newly_written("job", 1)
        and not state.visit.newly_written("job", 1)
        and state.visit.newly_written("job", 2)
    )
    assert not state.visit.newly_written("of another session", 5)


def test_a_way_to_travel_is_kept_and_only_plans_of_that_way_are_compared(planned: AppTest) -> None:
    assert len(planned.dataframe) == 1 and "Rows per token" not in planned.dataframe[0].value
    enter(planned, "How tokens travel", "gpu")
    enter(planned, "Dispatch format", "fp8")
    assert planned.session_state.travel == Travel(unit="gpu", dispatch="fp8") and not len(planned.dataframe)
    (candidate, *_) = run_the_job(planned).result["candidates"]
    assert "Rows per token" in planned.dataframe[0].value
    plan = Plan.from_dict(candidate["plan"], "plan")
    planned.session_state["plan"] = plan.id
    visit(planned, "timeline")
    assert any("one row per GPU, fp8 out" in (metric.help or "") for metric in planned.metric)
    said = " ".join(words(plan, None))
    assert "a token once to each GPU that has one of its experts, as fp8 in dispatch" in said and "fewest" not in said
    chosen = plan.model_copy(update={"travel": Travel(unit="node", replicas="fewest")})
    assert "each token to the copies of its experts that touch fewest nodes." in " ".join(words(chosen, None))


def test_tokens_choose_copies_where_rows_are_shared(app: AppTest) -> None:
    visit(app, "optimise")
    assert "Copies of an expert" not in [box.label for box in app.selectbox]
    enter(app, "How tokens travel", "gpu")
    enter(app, "Copies of an expert", "fewest")
    assert app.session_state.travel == Travel(unit="gpu", replicas="fewest")
    enter(app, "How tokens travel", "node")
    assert app.session_state.travel == Travel(unit="node", replicas="fewest")
    enter(app, "How tokens travel", "copies")
    assert app.session_state.travel is None


def test_co_activation_says_what_it_needs(app: AppTest) -> None:
    run_the_job(tick(visit(app, "optimise"), "Co-activation"))  # of the baseline, which is planned first
    assert any("every copy of a token travels on its own" in text.value for text in app.warning)


def test_a_model_in_fp8_is_told_in_what_engines_combine(app: AppTest) -> None:
    visit(app, "optimise")
    assert not any("combine in bf16" in caption.value for caption in app.caption)
    app.session_state["model"] = app.session_state["model"].model_copy(update={"dtype": "fp8"})
    assert any("combine in bf16" in caption.value for caption in app.run().caption)
    enter(app, "Combine format", "bf16")
    assert not any("combine in bf16" in caption.value for caption in app.caption)
