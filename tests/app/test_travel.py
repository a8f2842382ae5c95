"""How tokens travel, as it is chosen on the Optimise page and told on others."""

import pytest
from streamlit.testing.v1 import AppTest

from app.review.brief import words
from engine import store
from engine.jobs import runner
from engine.plan import Plan, Travel
from tests.app.test_optimise_page import choose
from tests.app.test_pages import ROOT, open_sample, plan_the_sample, press, visit

pytestmark = pytest.mark.slow


@pytest.fixture
def app(warm_python) -> AppTest:
    return open_sample(AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60).run())


def test_a_choice_is_kept_and_plans_are_made_with_it(app: AppTest) -> None:
    visit(app, "optimise")
    choose(app, "How tokens travel", "gpu")
    choose(app, "Dispatch format", "fp8")
    assert app.session_state.travel == Travel(unit="gpu", dispatch="fp8")
    plan_the_sample(app)
    visit(app, "timeline")
    assert any("one row per GPU, fp8 out" in (metric.help or "") for metric in app.metric)
    (candidate, *_) = runner.jobs(store.data_folder(), "optimise")[0].result["candidates"]
    plan = Plan.from_dict(candidate["plan"], "plan")
    said = " ".join(words(plan, None))
    assert "a token once to each GPU that has one of its experts, as fp8 in dispatch" in said and "fewest" not in said
    chosen = plan.model_copy(update={"travel": Travel(unit="node", replicas="fewest")})
    assert "each token to the copies of its experts that touch fewest nodes." in " ".join(words(chosen, None))


def test_tokens_choose_copies_where_rows_are_shared(app: AppTest) -> None:
    visit(app, "optimise")
    assert "Copies of an expert" not in [box.label for box in app.selectbox]
    choose(app, "How tokens travel", "gpu")
    choose(app, "Copies of an expert", "fewest")
    assert app.session_state.travel == Travel(unit="gpu", replicas="fewest")
    choose(app, "How tokens travel", "node")
    assert app.session_state.travel == Travel(unit="node", replicas="fewest")
    choose(app, "How tokens travel", "copies")
    assert app.session_state.travel is None


def test_the_plain_way_is_no_choice_at_all(app: AppTest) -> None:
    visit(app, "optimise")
    choose(app, "How tokens travel", "node")
    choose(app, "How tokens travel", "copies")
    assert app.session_state.travel is None


def test_co_activation_says_what_it_needs(app: AppTest) -> None:
    visit(app, "optimise")
    for box in app.checkbox:
        if box.label.startswith("**"):
            box.set_value("Co-activation" in box.label)
    app.run()
    press(app, "Run")
    job = runner.jobs(store.data_folder(), "optimise")[0]
    assert runner.wait(job, 90) is runner.State.DONE  # of what counts as deployed, which is planned first
    app.run()
    assert any("every copy of a token travels on its own" in text.value for text in app.warning)


def test_only_plans_of_the_chosen_way_are_compared(app: AppTest) -> None:
    plan_the_sample(app)
    visit(app, "optimise")
    assert len(app.dataframe) == 1 and "Rows per token" not in app.dataframe[0].value
    choose(app, "How tokens travel", "gpu")
    assert not len(app.dataframe)
    plan_the_sample(app)
    visit(app, "optimise")
    assert "Rows per token" in app.dataframe[0].value


def test_a_model_in_fp8_is_told_in_what_engines_combine(app: AppTest) -> None:
    visit(app, "optimise")
    assert not any("combine in bf16" in caption.value for caption in app.caption)
    app.session_state["model"] = app.session_state["model"].model_copy(update={"dtype": "fp8"})
    assert any("combine in bf16" in caption.value for caption in app.run().caption)
    choose(app, "Combine format", "bf16")
    assert not any("combine in bf16" in caption.value for caption in app.caption)
