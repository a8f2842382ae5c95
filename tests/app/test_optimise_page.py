"""The Optimise page beyond a first plan: two models, several recordings, studies, travel, and its charts."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from app import state
from app.charts import optimise as charts
from app.charts.theme import SECOND, SEQUENTIAL, readable, write_numbers
from app.optimise.table import ALSO, alike
from app.review.brief import words
from app.visitor import roles
from engine import store
from engine.jobs import protocol, runner
from engine.jobs.tasks import OptimiseAnswer
from engine.plan import Plan, Travel
from engine.simulate.two_phase import Figures
from engine.workload import ExpertLoad, RoutingTrace
from tests.cases.pages import enter, field, finished, press, put, run, run_the_job, said, tick, visit
from tests.cases.samples import sample as sample_of
from tests.cases.samples import sample_model
from tests.cases.sessions import open_recording

pytestmark = pytest.mark.usefixtures("warm_python")


@pytest.fixture
def app(sample: AppTest) -> AppTest:
    """The sample, opened."""
    return sample


def open_short(app: AppTest, *names: str) -> list[str]:
    """Open the first two layers of recordings, which are planned soon; the first is before the person. Returns digests."""
    traces = [RoutingTrace(name, sample_of(name, 1000).experts[:, :2], 16) for name in names]
    models = [sample_model(name.partition("-")[0], 2) for name in names]
    digests = [store.save_workload(trace) for trace in traces]
    app.session_state["workloads"] = dict(zip(digests, names, strict=True))
    app.session_state["workload"], app.session_state["model"] = digests[0], models[0]
    app.session_state["model_of"] = dict(zip(digests, models, strict=True))
    return digests


def test_two_models_from_the_goal_to_the_timeline(app: AppTest) -> None:
    _, second = open_short(app, "alpha-code", "beta-prose")
    visit(app, "optimise")
    press(app, "Two models on one cluster")
    assert "Choose the recording of the second model" in said(app.info)
    enter(app, "Second model's recording", second)
    offered = {box.label.split("**")[1] for box in app.checkbox}
    assert offered == {
        *("Aurora", "Sorted colocation", "Decoupled colocation", "Best of all", "Random colocation (REC)"),
        *("Same-model packing (Lina)", "Linear placement"),
    }
    run_the_job(app)
    table = app.dataframe[0].value
    assert len(table) == 5 and table["Plan"].tolist()[:2] == ["Linear placement", "Best of all"]
    against = dict(zip(table["Plan"], table["Gain over Linear placement, in sample"], strict=True))
    assert against["Linear placement"] == "deployed" and against["Aurora"].startswith("+")
    assert table["Above any placement's bound"].iloc[1].endswith(" %")
    assert set(table["Proof"]) <= {"nothing", "placement", "order", "placement and order"}
    visit(app, "timeline")
    assert not app.error and any(metric.label == "Bound for any placement" for metric in app.metric)
    assert any(heading.value == "Alone and together" for heading in app.subheader)
    visit(app, "launch")
    assert not app.error  # two models are launched together
    visit(app, "optimise")
    press(app, "Inference latency of one model")
    visit(app, "timeline")
    assert "two models" in said(app.info)


def test_a_second_model_that_does_not_fit_is_refused_with_a_way_out(app: AppTest) -> None:
    digest = store.save_workload(ExpertLoad("small", np.ones((8, 4)), tuple(range(8))))
    model = app.session_state["model"].model_copy(update={"experts": 4})
    app.session_state["workloads"] = {**app.session_state["workloads"], digest: "small"}
    app.session_state["model_of"] = {digest: model}
    app.session_state["second"] = digest
    visit(app, "optimise")
    assert "choose a second model with 16 experts" in said(app.error)
    press(app, "Close the second model")
    assert not app.error


def test_plans_are_in_the_table_as_they_are_found_and_moves_count_from_the_plan_in_use(planned: AppTest, monkeypatch) -> None:
    job = runner.jobs(store.data_folder(), "optimise")[0]
    everything = job.result
    some = everything | {"candidates": everything["candidates"][1:2]}
    with monkeypatch.context() as patch:
        patch.setattr(runner.Job, "state", runner.State.RUNNING)
        for answer in (some, everything):
            protocol.replace_result(job.folder, OptimiseAnswer(**answer))
            table = planned.run().dataframe[0].value
            plans = [*table["Plan"], *(name for names in table.get(ALSO, []) for name in names.split(", ") if name)]
            assert sorted(plans) == sorted(candidate["plan"]["name"] for candidate in answer["candidates"])
    planned.run()
    table = planned.dataframe[0].value.set_index("Plan")
    assert table.loc["Linear placement", "Copies to move"].startswith("0 ")
    assert table.loc["Linear placement", "Pays after"] == "at once"
    assert table.loc["Aurora", "Pays after"].endswith("passes")
    deployed = field(planned, "Deployed now")
    deployed.select_index(next(i for i, option in enumerate(deployed.options) if option.startswith("Aurora"))).run()
    table = planned.dataframe[0].value.set_index("Plan")
    assert table.loc["Aurora", "Copies to move"].startswith("0 ")
    assert table.loc["Linear placement", "Pays after"] == "never"


def test_the_first_plan_is_open_while_the_search_goes_on_and_gives_way_to_the_best(planned: AppTest, monkeypatch) -> None:
    job = runner.jobs(store.data_folder(), "optimise")[0]
    whole = job.result
    ids = [Plan.from_dict(candidate["plan"], "plan").id for candidate in whole["candidates"]]
    put(planned, plan=None)
    with monkeypatch.context() as patch:
        patch.setattr(runner.Job, "state", runner.State.RUNNING)
        for count, opened in ((1, None), (2, ids[:2])):
            protocol.replace_result(job.folder, OptimiseAnswer(**whole | {"candidates": whole["candidates"][:count]}))
            run(run(planned))
            assert planned.session_state["plan"] in (opened or [None]), "what is deployed is no answer"
        assert "Still searching" in said(planned.markdown)
    run(planned)
    assert "Still searching" not in said(planned.markdown) and "takes" in said(planned.markdown)


def test_several_recordings_are_planned_for_scored_and_weighed_on_a_front(app: AppTest) -> None:
    visit(app, "optimise")
    enter(app, "Show", "Cross-workload score")
    assert "at least two recordings" in said(app.info)
    _, prose = open_short(app, "alpha-code", "alpha-prose")
    app.run()
    enter(app, "System", "round-robin")
    result = run_the_job(app, "Score", "matrix").result
    assert len(result["names"]) == 2 and all(value > 0 for row in result["seconds"] for value in row)
    enter(app, "Score", "balancedness")
    assert not app.error

    enter(app, "Also plan for", [prose])
    assert app.session_state["others"] == [prose]
    enter(app, "Show", "Candidate plans")
    # The baseline is planned too, before all others, although it was not asked for.
    field(tick(app, "Replication"), "Time limit (s)").set_value(0.1)
    linear, replicated = run_the_job(app).result["candidates"]
    assert linear["plan"]["name"] == "Linear placement"
    assert "of the worst recording" in replicated["notes"]["balancedness"]["value"]
    field(app, "Also plan for").set_value([])
    for unit in ("copies", "gpu"):
        field(app, "How tokens travel").set_value(unit)
        enter(app, "Show", "Balance against affinity")
        assert ("No front yet" in said(app.info)) is (unit == "copies")
        field(app, "Points on the front").set_value(2)
        field(app, "Time limit, s").set_value(1)
        app.run()
        candidates = run_the_job(app, "Find the front", "front").result["candidates"]
        assert 1 <= len(candidates) <= 2
        assert all((candidate["rows"] is None) is (unit == "copies") for candidate in candidates)
        enter(app, "Scored on as well", prose)
        press(app, "Open this plan")
        assert app.session_state["plan"] in {candidate["plan_id"] for candidate in candidates}
        enter(app, "Show", "Candidate plans")
        assert any(str(name).startswith("Front at") for name in app.dataframe[0].value["Plan"])


def test_lina_at_run_time_and_its_row_named_for_its_hosting_beside_the_scheduled_time(app: AppTest) -> None:
    open_recording(app, sample_of("alpha-code").spread(4096), alone=True)
    visit(app, "optimise")
    enter(app, "Show", "Lina at run time")
    field(app, "Experts per device").set_value(3)
    result = run_the_job(app, "Simulate", "lina").result
    assert all(run["options"]["max_experts_per_device"] == 3 for run in result["runs"])
    app.run()
    assert app.dataframe[0].value["Path length"].tolist() == [1, 3, 6]
    assert "scheduling one layer again" in said(app.caption)
    enter(app, "Show", "Candidate plans")
    run_the_job(tick(app, "Lina (inference)", "Linear placement"))
    table = app.dataframe[0].value.set_index("Plan")
    scheduled = table["With its scheduler, against contiguous blocks"]
    assert scheduled["Lina's hosting, unscheduled"].endswith("×") and scheduled["Linear placement"] == "—"


def test_loads_alone_are_refused_with_what_is_needed_and_hold_up_no_other_system(app: AppTest) -> None:
    open_recording(app, ExpertLoad("loads", np.ones((8, 16)), tuple(range(8))), alone=True)
    visit(app, "optimise")
    for view in ("Balance against affinity", "Lina at run time"):
        enter(app, "Show", view)
        assert "routing log" in said(app.info) and not app.error
    enter(app, "Show", "Candidate plans")
    assert list(run_the_job(tick(app, "ExFlow", "Linear")).result["refused"]) == ["ExFlow"]
    assert app.dataframe[0].value["Plan"].tolist() == ["Linear placement"]
    assert "ExFlow" in said(app.warning) and "routing log" in said(app.warning)


def test_who_may_only_look_starts_nothing(app: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(roles.SETTING, '{"default": "view"}')
    visit(app, "optimise")
    press(app, "Plan it")
    assert "you may look at plans" in said(app.error) and "make and save plans" in said(app.error)
    assert not runner.jobs(store.data_folder(), "optimise")


@pytest.mark.clock
def test_every_system_says_how_long_it_takes_before_it_is_run(app: AppTest) -> None:
    visit(app, "optimise")
    labels = {box.label.split("**")[1]: box.label for box in app.checkbox if box.label.startswith("**")}
    assert labels["Linear placement"].endswith("** · under 1 s · baseline")
    usual, (limit,) = labels["ExFlow"], [box for box in app.number_input if box.key.endswith("aurora-time_limit")]
    assert all(" s · " in label for name, label in labels.items() if name not in ("Co-activation", "Best of all"))
    next(box for box in app.checkbox if box.label == usual).check().run()
    assert limit.value > 1
    next(box for box in app.number_input if box.key.endswith("exflow-time_limit")).set_value(1.0).run()
    limited = next(box.label for box in app.checkbox if "ExFlow" in box.label)
    assert "about 1 s" in limited and "about 1 s" not in usual


def test_whoever_watches_a_job_is_told_of_every_result(empty_session) -> None:
    told = [state.visit.newly_written("job", written) for written in (None, None, 1, 1, 2)]
    assert told == [False, False, True, False, True]
    assert not state.visit.newly_written("of another session", 5)


def test_a_way_to_travel_is_kept_and_only_plans_of_that_way_are_compared(planned: AppTest) -> None:
    assert len(planned.dataframe) == 1 and "Rows per token" not in planned.dataframe[0].value
    enter(planned, "How tokens travel", "gpu")
    enter(planned, "Dispatch format", "fp8")
    assert planned.session_state.travel == Travel(unit="gpu", dispatch="fp8") and not len(planned.dataframe)
    (candidate,) = run_the_job(tick(planned, "Linear")).result["candidates"]
    assert "Rows per token" in planned.dataframe[0].value
    plan = Plan.from_dict(candidate["plan"], "plan")
    planned.session_state["plan"] = plan.id
    visit(planned, "timeline")
    assert any("one row per GPU, fp8 out" in (metric.help or "") for metric in planned.metric)
    text = " ".join(words(plan, None))
    assert "a token once to each GPU that has one of its experts, as fp8 in dispatch" in text and "fewest" not in text
    chosen = plan.model_copy(update={"travel": Travel(unit="node", replicas="fewest")})
    assert "each token to the copies of its experts that touch fewest nodes." in " ".join(words(chosen, None))


def test_travel_formats_and_copies_are_chosen_where_they_count(app: AppTest) -> None:
    visit(app, "optimise")
    assert "fewest" not in next(box for box in app.selectbox if box.label == "Copies of an expert").options
    enter(app, "Copies of an expert", "nearest (SGLang with DeepEP)")
    assert app.session_state.travel == Travel(replicas="nearest-static")  # on the nodes of whatever cluster is open then
    for chosen in ("gpu", "node"):
        enter(app, "How tokens travel", chosen)
        if chosen == "gpu":
            enter(app, "Copies of an expert", "fewest")
        assert app.session_state.travel == Travel(unit=chosen, replicas="fewest")
    enter(app, "How tokens travel", "copies")
    assert app.session_state.travel is None

    enter(app, "Serving engine", "SGLang, DeepEP normal (prefill)")
    assert app.session_state.travel == Travel(unit="node", replicas="nearest-static")
    enter(app, "How tokens travel", "gpu")
    assert next(box for box in app.selectbox if box.label == "Serving engine").value == "as chosen below"
    enter(app, "Serving engine", "vLLM, DeepEP low latency (decode)")
    assert app.session_state.travel is None

    assert "combine in bf16" not in said(app.caption)
    app.session_state["model"] = app.session_state["model"].model_copy(update={"dtype": "fp8"})
    assert "combine in bf16" in said(app.run().caption)
    enter(app, "Combine format", "bf16")
    assert "combine in bf16" not in said(app.caption)


def test_co_activation_says_what_it_needs(app: AppTest) -> None:
    run_the_job(tick(visit(app, "optimise"), "Co-activation"))  # of the baseline, which is planned first
    assert "every copy of a token travels on its own" in said(app.warning)


def point(kept: float, balance: float, seconds: float = 1e-3) -> dict:
    return {"kept_share": kept, "balancedness": balance, "weight": 0.5, "seconds": seconds}


def test_a_front_runs_from_balance_to_affinity_in_any_order():
    figure = charts.front([point(0.4, 0.6), point(0.2, 0.9), point(0.3, 0.8)], {}, [(0.1, 0.5)], "other <b>")
    front, elsewhere = figure.data
    assert list(front.x) == [20, 30, 40] and list(front.y) == [0.9, 0.8, 0.6]
    assert list(elsewhere.x) == [10] and elsewhere.marker.color == SECOND and "<b>" not in elsewhere.name
    assert "20 % kept at balancedness 0.9 to 40 % at 0.6" in figure.layout.title.text

    others = {"Linear": (0.125, 0.7), "RCS": (0.1250001, 0.7), "<i>mine</i>": (0.3, 0.5)}
    names = charts.front([point(0.4, 0.6)], others).data[1].text
    assert sorted(names) == ["&lt;i&gt;mine&lt;/i&gt;", "Linear, RCS"], "plans at one place share a label"


def test_a_front_of_rows_has_few_rows_to_the_right():
    points = [point(0.5, balance) | {"rows": rows} for rows, balance in ((2, 0.6), (3, 0.9))]
    figure = charts.front(points, {"Linear": (3.54321, 0.7)}, across=charts.ROWS)
    front, others = figure.data
    assert list(front.x) == [3, 2] and list(others.x) == [3.543]
    assert figure.layout.xaxis.autorange == "reversed" and "rows" in figure.layout.xaxis.title.text
    assert figure.layout.title.text == "From 3 rows per token at balancedness 0.9 to 2 at 0.6"


def test_a_matrix_of_times_is_relative_to_each_recordings_own_plan_and_its_scale_has_some_width():
    figure = charts.matrix(["a", "b"], [[1e-3, 3e-3], [2e-3, 2e-3]], "seconds")
    np.testing.assert_allclose(figure.data[0].z, [[1, 1.5], [2, 1]])
    assert "up to 2× " in figure.layout.title.text and list(figure.data[1].text) == ["1 ms", "3 ms", "2 ms", "2 ms"]
    figure = charts.matrix(["a", "b"], [[1.0, 2.0 + 1e-9], [1.0008, 2.0]], "seconds")
    assert np.array_equal(figure.data[0].z, np.ones((2, 2)))
    assert (figure.data[0].zmin, figure.data[0].zmax) == (1.0, 1.05)
    assert figure.layout.title.text.startswith("No plan is slower")
    figure = charts.matrix(["a", "b"], [[1.0, 2.02], [1.0, 2.0]], "seconds")
    assert figure.data[0].zmax == 1.05 and "1.01×" in figure.layout.title.text
    faster = charts.matrix(["a", "b"], [[1.0, 1.0], [1.0, 2.0]], "seconds").data[0]
    assert faster.zmin == 0.5 and faster.zmax == pytest.approx(1.0)
    nothing = charts.matrix(["a", "b"], [[0.0, 0.0], [0.0, 0.0]], "kept_local").data[0]
    assert (nothing.zmin, nothing.zmax) == (0.0, 0.05)
    for score in charts.SCORES:
        filling = charts.matrix(["a", "b"], [[0.5, 0.25], [None, None]], score)
        assert np.isnan(filling.data[0].z[1]).all() and filling.data[1].text[2] == "…"
        assert filling.layout.title.text == "2 of 4 scores so far"
        assert charts.matrix(["a", "b"], [[None, None], [None, None]], score).layout.title.text


def figures(**median: float) -> dict[str, Figures]:
    rest = dict.fromkeys(("median_layer", "tail_layer", "median_all_to_all", "tail_all_to_all", "waiting"), 1.0)
    return {name: Figures(median.get(name, 1.5), 2.0, **rest) for name in charts.SCHEMES}


@pytest.mark.parametrize(
    ("baseline", "lina", "said"), [(1.8, 1.2, "is 1.5× as fast as no"), (1.2, 2.4, "takes 2× the time of no")]
)
def test_lina_says_who_wins(baseline: float, lina: float, said: str) -> None:
    assert f"{said} scheduling" in charts.lina(figures(baseline=baseline, lina=lina), 3).layout.title.text


def test_accuracy_names_the_best_path_length():
    runs = [
        SimpleNamespace(options=SimpleNamespace(path_length=length), accuracy=right, accuracy_of_layer=(None, right, right))
        for length, right in ((1, 0.25), (3, 0.75))
    ]
    figure = charts.accuracy(runs)
    assert figure.layout.title.text == "Path length 3 is right most often: 75 %"
    assert figure.data[1].y[0] is None and figure.data[1].y[1] == 75


@pytest.mark.parametrize("dark", [False, True])
def test_numbers_in_cells_can_be_read(dark):
    figure = charts.go.Figure()
    scale = {"z": [[0.0, 1.0]], "zmin": 0, "zmax": 1, "colorscale": SEQUENTIAL}
    write_numbers(figure, scale, [["0", "1"]], dark)
    pale, full = figure.data[0].textfont.color
    assert pale == readable((0, 137, 123, 0.0), dark) and full == readable((0, 137, 123, 1.0), dark)
    assert pale == ("#FFFFFF" if dark else "#16201F") and full == readable((0, 137, 123, 1.0), not dark)


def test_the_best_plan_of_a_run_is_opened_after_a_look_at_another_page_unless_one_is_kept_open(app: AppTest) -> None:
    open_short(app, "alpha-code")
    visit(app, "optimise")
    enter(app, "Show", "Spare slots")
    press(tick(app, "Round-robin"), "Plan it")
    found = [Plan.from_dict(candidate["plan"], "plan").id for candidate in finished("optimise").result["candidates"]]
    visit(app, "workload")
    visit(app, "optimise")
    assert field(app, "Show").value == "Candidate plans", "a run shows its plans, whichever study was looked at"
    opened = app.session_state["plan"]
    assert opened in found
    assert "instead of" in said(app.markdown) or "is deployed now" in said(app.markdown)
    app.toggle[0].set_value(True).run()
    run_the_job(tick(app, "Aurora"))
    assert app.session_state["plan"] == opened, "kept open"
    app.toggle[0].set_value(False).run()
    run_the_job(app)
    assert app.session_state["plan"] != opened


def test_plans_of_the_same_times_share_a_row_but_for_the_open_and_the_deployed_one() -> None:
    times = [(2.0, 1.0), (1.0, 1.0), (2.0, 1.0), (1.0, 1.0), (2.0, math.nan), (2.0, math.nan)]
    assert alike(times, [False] * 6) == [[0, 2], [1, 3], [4, 5]]
    assert alike(times, [True, False, True, True, False, False]) == [[0], [3, 1], [2], [4, 5]]
