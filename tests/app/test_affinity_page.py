"""The Affinity page in every state it can be met in, without a browser."""

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from engine import store
from engine.catalogue import cluster_presets
from engine.costs import Datasheet
from engine.jobs import runner
from engine.model import MoEModel
from engine.plan import Plan
from engine.problem import make_problem
from engine.store.problems import problem_arguments
from engine.workload import ExpertLoad, RoutingTrace, Workload
from tests.app.test_pages import ROOT, open_sample, press, visit

pytestmark = pytest.mark.slow


@pytest.fixture
def app(warm_python) -> AppTest:
    """The sample, opened."""
    return open_sample(AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60).run())


def metrics(app: AppTest) -> list[tuple[str, str]]:
    return [(metric.label, metric.value) for metric in app.metric]


def titles(app: AppTest) -> list[str]:
    """Of the charts on the page, which they also have as their description."""
    return [chart.proto.alt for chart in app.get("plotly_chart")]


def choose(app: AppTest, key: str, value: str) -> AppTest:
    """An option of a segmented control."""
    next(group for group in app.get("button_group") if (group.key or "").startswith(key)).set_value(value)
    app.run()
    assert not app.exception, app.exception
    return app


def open_recording(app: AppTest, workload: Workload, **model) -> None:
    """Put a recording and a model that fits it into the session."""
    sizes = {"layers": workload.layers, "experts": workload.num_experts, "experts_per_token": workload.k or 1}
    app.session_state["model"] = MoEModel(name="fits", **{**sizes, "d_model": 64, "d_ff": 64, **model})
    digest = store.save_workload(workload)
    app.session_state["workloads"] = {**app.session_state["workloads"], digest: workload.name}
    app.session_state["workload"] = digest


def open_plan(app: AppTest, system: str, options: dict) -> Plan:
    """Make a plan as a job and open it."""
    workload = store.load_workload(app.session_state["workload"])
    problem = make_problem(workload, app.session_state["cluster"], app.session_state["model"], Datasheet())
    arguments = problem_arguments(problem) | {"systems": [{"name": system, "options": options}]}
    job = runner.start("optimise", arguments, store.data_folder())
    assert runner.wait(job, 60) is runner.State.DONE, job.log_tail()
    plan = Plan.from_dict(job.result["candidates"][0]["plan"], "plan")
    app.session_state["plan_jobs"], app.session_state["plan"] = [job.id], plan.id
    return plan


def test_the_sample_under_the_linear_placement(app: AppTest) -> None:
    visit(app, "affinity")
    assert metrics(app) == [
        ("On GPU", "11 %"),
        ("Upper bound", "45 %"),
        ("By chance", "12 %"),
        ("On node", "23 %"),
        ("Upper bound", "67 %"),
        ("By chance", "25 %"),
    ]
    assert any("a linear placement" in caption.value for caption in app.caption)
    assert titles(app)[0] == "Expert 5 sends 59 % of its 229 tokens to expert 6"
    choose(app, "affinity-values", "Counts")
    assert titles(app)[0].startswith("The busiest path, expert ")
    choose(app, "affinity-order", "Grouped by GPU")
    assert titles(app)[0].endswith("of tokens stay on their GPU (layers 0 and 1)")


def test_any_two_layers_and_play(app: AppTest) -> None:
    visit(app, "affinity")
    app.slider[0].set_range(2, 5).run()
    choose(app, "affinity-order", "Grouped by GPU")
    assert "on one GPU in both layers (layers 2 and 5)" in titles(app)[0]
    app.toggle(key="affinity-play").set_value(True).run()
    assert "layers 3 and 6" in titles(app)[0]
    app.run()
    assert "layers 4 and 7" in titles(app)[0]
    app.run()
    assert "layers 0 and 3" in titles(app)[0] and not app.slider
    app.toggle(key="affinity-play").set_value(False).run()
    assert app.slider[0].value == (0, 3) and "layers 0 and 3" in titles(app)[0]
    app.slider[0].set_range(6, 6).run()
    assert "layers 6 and 7" in titles(app)[0] and not app.exception


def test_an_exflow_plan_keeps_more_and_its_own_note_is_shown(app: AppTest) -> None:
    plan = open_plan(app, "exflow", {"time_limit": 1.0})
    visit(app, "affinity")
    kept, limit, chance = (float(value.rstrip(" %")) for _, value in metrics(app)[:3])
    assert chance < 30 < kept <= limit
    assert any(f"the open plan, {plan.name}" in caption.value for caption in app.caption)
    assert any("of hops stay on their GPU" in caption.value.replace("\\", "") for caption in app.caption)


def test_a_plan_that_does_not_fit_gives_way_to_the_linear_placement(app: AppTest) -> None:
    open_plan(app, "random", {})
    app.session_state["cluster"] = cluster_presets()["exflow-4-nodes"].cluster
    visit(app, "affinity")
    text = next(caption.value.replace("\\", "") for caption in app.caption if "Grouped and scored" in caption.value)
    assert "a linear placement: " in text and "is for 8 GPUs, but there are 16" in text
    assert metrics(app)[2] == ("By chance", "6.2 %")


def test_a_plan_with_replicas_is_scored_by_expectation(app: AppTest) -> None:
    plan = open_plan(app, "eplb", {})
    assert not plan.placement.single
    visit(app, "affinity")
    choose(app, "affinity-order", "Grouped by GPU")
    assert any("expected share" in caption.value for caption in app.caption)
    share, trace = plan.placement.share, store.load_workload(app.session_state["workload"]).experts[:, :, 0]
    kept = [share[pair, trace[:, pair]] * share[pair + 1, trace[:, pair + 1]] for pair in range(7)]
    assert metrics(app)[0] == ("On GPU", f"{np.sum(kept) / (7 * len(trace)):.0%}".replace("%", " %"))


def test_a_recording_without_tokens_says_what_to_open(app: AppTest) -> None:
    press(app, "Traffic 8 × 8")
    visit(app, "affinity")
    assert "not the path of each token" in app.info[0].value and not titles(app)
    open_recording(app, ExpertLoad("loads", np.ones((4, 16)), (0, 1, 2, 3)))
    visit(app, "affinity")
    assert "not the path of each token" in app.info[0].value


def test_one_layer_and_padding_have_no_hops(app: AppTest) -> None:
    open_recording(app, RoutingTrace("one", np.zeros((64, 1, 1), dtype=np.int16), 16))
    visit(app, "affinity")
    assert "single MoE layer" in app.info[0].value and not titles(app)
    open_recording(app, RoutingTrace("blank", np.full((64, 3, 1), -1, dtype=np.int16), 16))
    visit(app, "affinity")
    assert "no hops" in app.info[0].value and not titles(app)


def test_two_layers_need_no_slider(app: AppTest) -> None:
    rng = np.random.default_rng(0)
    open_recording(app, RoutingTrace("two", rng.integers(0, 16, (64, 2, 1)).astype(np.int16), 16))
    visit(app, "affinity")
    assert not app.slider and not app.toggle and len(titles(app)) == 3


def test_choices_of_top_k_count_singly_or_in_pairs(app: AppTest) -> None:
    press(app, "Beta on prose")
    visit(app, "affinity")
    first = metrics(app)
    assert "tokens to expert" in titles(app)[0]
    choose(app, "affinity-hops", "All choices")
    assert "pairs of choices to expert" in titles(app)[0] and metrics(app) != first


def test_choices_sorted_by_id_all_count_unless_a_person_insists(app: AppTest) -> None:
    rng = np.random.default_rng(0)
    experts = np.sort(np.argsort(rng.random((200, 3, 16)), axis=2)[:, :, :4], axis=2).astype(np.int16)
    open_recording(app, RoutingTrace("sorted", experts, 16))
    visit(app, "affinity")
    assert "pairs of choices" in titles(app)[0]
    assert any("All choices count because" in caption.value for caption in app.caption)
    choose(app, "affinity-hops", "First choices")
    assert "tokens" in titles(app)[0]


def test_experts_that_do_not_divide_have_no_bound_and_no_study(app: AppTest) -> None:
    app.session_state["cluster"] = cluster_presets()["hgx-h100-4-nodes"].cluster
    visit(app, "affinity")
    assert ("Upper bound", "45 %") not in metrics(app)
    assert any("16 experts do not divide by 32 GPUs" in info.value for info in app.info)
    assert not any(button.label == "Run the study" for button in app.button)


def test_with_two_models_open_the_first_is_shown(app: AppTest) -> None:
    first = app.session_state["workload"]
    press(app, "Beta on prose")
    second, model = app.session_state["workload"], app.session_state["model"]
    press(app, "Alpha on code")
    app.session_state["second"] = second
    app.session_state["model_of"] = {second: model}
    visit(app, "affinity")
    assert app.session_state["workload"] == first and not app.error
    assert titles(app)[0] == "Expert 5 sends 59 % of its 229 tokens to expert 6"


def test_a_study_runs_with_samples_and_is_not_shown_for_other_recordings(app: AppTest) -> None:
    visit(app, "affinity")
    options = app.multiselect(key="affinity-others").options
    assert "Alpha on prose (sample)" in options and not any("Beta" in option for option in options)
    app.multiselect(key="affinity-others").select("tiny-moe/alpha-prose.npz").run()
    press(app, "Run the study")
    job = runner.jobs(store.data_folder(), "affinity")[0]
    assert app.session_state["study_jobs"] == {"affinity": job.id}
    assert runner.wait(job, 60) is runner.State.DONE, job.log_tail()
    app.run()
    assert len(titles(app)) == 5 and "tokens" in titles(app)[3] and "Plans from elsewhere" in titles(app)[4]
    assert "alpha-prose" in app.session_state["workloads"].values()
    assert app.multiselect(key="affinity-others").value == job.request.arguments["others"]
    for view in ("own", "row"):
        choose(app, "affinity-numbers", view)
        assert len(titles(app)) == 5
    visit(app, "workload")
    press(app, "Alpha on man pages")
    visit(app, "affinity")
    assert len(titles(app)) == 3
    assert any("another recording" in info.value for info in app.info)
