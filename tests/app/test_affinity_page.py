"""The Affinity page in every state it can be met in, without a browser."""

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from engine import store
from engine.catalogue import cluster_presets
from engine.workload import ExpertLoad, RoutingTrace, Workload
from tests.cases.pages import buttons, pick, press, run_the_job, said, titles, visit
from tests.cases.samples import sample as sample_of
from tests.cases.sessions import open_plan, open_recording
from tests.strategies import make_model

pytestmark = pytest.mark.usefixtures("warm_python")


@pytest.fixture
def app(sample: AppTest) -> AppTest:
    """The sample, opened."""
    return sample


def metrics(app: AppTest) -> list[tuple[str, str]]:
    return [(metric.label, metric.value) for metric in app.metric]


def open_fitting(app: AppTest, workload: Workload) -> None:
    """Open a recording and a model that fits it."""
    app.session_state["model"] = make_model(workload.layers, workload.num_experts, workload.k or 1)
    open_recording(app, workload)


def test_the_sample_under_the_linear_placement_any_two_layers_and_play(app: AppTest) -> None:
    visit(app, "affinity")
    names = ("On GPU", "Upper bound", "By chance", "On node", "Upper bound", "By chance")
    assert metrics(app) == list(zip(names, ("11 %", "45 %", "12 %", "23 %", "67 %", "25 %"), strict=True))
    assert "a linear placement" in said(app.caption)
    assert titles(app)[0] == "Expert 5 sends 59 % of its 229 tokens to expert 6"
    pick(app, "affinity-values", "Counts")
    assert titles(app)[0].startswith("The busiest path, expert ")
    pick(app, "affinity-order", "Grouped by GPU")
    assert titles(app)[0].endswith("of tokens stay on their GPU (layers 0 and 1)")
    app.slider[0].set_range(2, 5).run()
    assert "on one GPU in both layers (layers 2 and 5)" in titles(app)[0]
    app.toggle(key="affinity-play").set_value(True)
    for layers in ("layers 3 and 6", "layers 4 and 7", "layers 0 and 3"):
        assert layers in titles(app.run())[0] and not app.slider
    app.toggle(key="affinity-play").set_value(False).run()
    assert app.slider[0].value == (0, 3) and "layers 0 and 3" in titles(app)[0]
    app.slider[0].set_range(6, 6).run()
    assert "layers 6 and 7" in titles(app)[0] and not app.exception


def test_an_exflow_plan_keeps_more_and_its_own_note_is_shown(app: AppTest) -> None:
    plan = open_plan(app, "exflow", {"time_limit": 1.0})
    visit(app, "affinity")
    kept, limit, chance = (float(value.rstrip(" %")) for _, value in metrics(app)[:3])
    assert chance < 30 < kept <= limit
    assert f"the open plan, {plan.name}" in said(app.caption) and "of hops stay on their GPU" in said(app.caption)


def test_a_plan_with_replicas_is_scored_by_expectation_and_one_that_does_not_fit_gives_way(app: AppTest) -> None:
    plan = open_plan(app, "eplb", {})
    assert not plan.placement.single
    visit(app, "affinity")
    pick(app, "affinity-order", "Grouped by GPU")
    assert "expected share" in said(app.caption)
    share, trace = plan.placement.share, store.load_workload(app.session_state["workload"]).experts[:, :, 0]
    kept = [share[pair, trace[:, pair]] * share[pair + 1, trace[:, pair + 1]] for pair in range(7)]
    assert metrics(app)[0] == ("On GPU", f"{np.sum(kept) / (7 * len(trace)):.0%}".replace("%", " %"))

    app.session_state["cluster"] = cluster_presets()["exflow-4-nodes"].cluster
    text = next(line for line in said(app.run().caption).split(" | ") if "Grouped and scored" in line)
    assert "a linear placement: " in text and "is for 8 GPUs, but there are 16" in text
    assert metrics(app)[2] == ("By chance", "6.2 %")

    app.session_state["cluster"] = cluster_presets()["hgx-h100-4-nodes"].cluster
    assert "16 experts do not divide by 32 GPUs" in said(app.run().info)
    assert ("Upper bound", "45 %") not in metrics(app) and "Run the study" not in buttons(app)


def test_recordings_without_hops_say_what_to_open_and_two_layers_need_no_slider(app: AppTest) -> None:
    press(visit(app, "workload"), "Traffic 8 × 8")
    visit(app, "affinity")
    assert "not the path of each token" in app.info[0].value and not titles(app)
    rng = np.random.default_rng(0)
    for recording, reason in (
        (ExpertLoad("loads", np.ones((4, 16)), (0, 1, 2, 3)), "not the path of each token"),
        (RoutingTrace("one", np.zeros((64, 1, 1), dtype=np.int16), 16), "single MoE layer"),
        (RoutingTrace("blank", np.full((64, 3, 1), -1, dtype=np.int16), 16), "no hops"),
        (RoutingTrace("two", rng.integers(0, 16, (64, 2, 1)).astype(np.int16), 16), None),
    ):
        open_fitting(app, recording)
        app.run()
        assert not app.exception and (reason is None or reason in app.info[0].value)
        assert len(titles(app)) == (3 if reason is None else 0)
    assert not app.slider and not app.toggle


def test_choices_of_top_k_count_singly_or_in_pairs_and_of_two_models_the_first_is_shown(app: AppTest) -> None:
    first = app.session_state["workload"]
    press(visit(app, "workload"), "Beta on prose")
    second, model = app.session_state["workload"], app.session_state["model"]
    visit(app, "affinity")
    singly = metrics(app)
    assert "tokens to expert" in titles(app)[0]
    pick(app, "affinity-hops", "All choices")
    assert "pairs of choices to expert" in titles(app)[0] and metrics(app) != singly
    pick(app, "affinity-hops", "First choices")
    press(visit(app, "workload"), "Alpha on code")
    app.session_state["second"], app.session_state["model_of"] = second, {second: model}
    visit(app, "affinity")
    assert app.session_state["workload"] == first and not app.error
    assert titles(app)[0] == "Expert 5 sends 59 % of its 229 tokens to expert 6"


def test_choices_sorted_by_id_all_count_unless_a_person_insists(app: AppTest) -> None:
    rng = np.random.default_rng(0)
    experts = np.sort(np.argsort(rng.random((200, 3, 16)), axis=2)[:, :, :4], axis=2).astype(np.int16)
    open_fitting(app, RoutingTrace("sorted", experts, 16))
    visit(app, "affinity")
    assert "pairs of choices" in titles(app)[0]
    assert "All choices count because" in said(app.caption)
    pick(app, "affinity-hops", "First choices")
    assert "tokens" in titles(app)[0]


def test_a_study_runs_with_samples_and_is_not_shown_for_other_recordings(app: AppTest) -> None:
    open_recording(app, sample_of("alpha-code").spread(250), alone=True)  # few tokens, so that few samples are planned from
    visit(app, "affinity")
    options = app.multiselect(key="affinity-others").options
    assert "Alpha on prose (sample)" in options and not any("Beta" in option for option in options)
    app.multiselect(key="affinity-others").select("tiny-moe/alpha-prose.npz").run()
    job = run_the_job(app, "Run the study", "affinity")
    assert app.session_state["study_jobs"] == {"affinity": job.id}
    assert len(titles(app)) == 5 and "tokens" in titles(app)[3] and "Plans from elsewhere" in titles(app)[4]
    assert "alpha-prose" in app.session_state["workloads"].values()
    assert app.multiselect(key="affinity-others").value == job.request.arguments["others"]
    for view in ("own", "row"):
        pick(app, "affinity-numbers", view)
        assert len(titles(app)) == 5
    press(visit(app, "workload"), "Alpha on man pages")
    assert len(titles(visit(app, "affinity"))) == 3
    assert "another recording" in said(app.info)
