"""What is deployed now: by word, from an engine's file, on Optimise, Timeline and Review; and files that do not fit."""

import json

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from engine.compare.figures import balance_of, cross_node_share, metrics
from engine.plan import Placement, Plan, SendOrder
from engine.result import Provenance
from engine.simulate import simulate
from engine.store import team
from engine.store.database import database
from tests.app.test_launch_page import problem_of
from tests.app.test_pages import chooser, press, visit
from tests.app.test_step_page import said
from tests.app.test_verdict_line import gain

pytestmark = pytest.mark.slow

LAYERS, EXPERTS, GPUS = 8, 16, 8
FILE = "sglang-prod.json"


@pytest.fixture
def app(ana: AppTest) -> AppTest:
    """That session on the Optimise page."""
    return visit(ana, "optimise")


def rows() -> list[list[int]]:
    """Three slots per GPU: every expert once, and experts 0 to 7 twice, on GPUs that have them not yet."""
    row = [slot for gpu in range(GPUS) for slot in (2 * gpu, 2 * gpu + 1, (gpu + 4) % 8)]
    return [row] * LAYERS


def drop(app: AppTest, name: str, text: str) -> AppTest:
    app.file_uploader(key="deployed-file").set_value([(name, text.encode(), "application/json")])
    app.run()
    assert not app.exception, app.exception
    return app


def drop_map(app: AppTest) -> AppTest:
    return drop(app, FILE, json.dumps({"physical_to_logical_map": rows()}))


def figures(app: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in app.metric}


def deployed() -> Plan:
    """What the file says."""
    slots = np.full(GPUS, 3)
    placement = Placement.from_slots(np.array(rows()), slots, EXPERTS, tuple(range(LAYERS)))
    order, provenance = SendOrder(mode="concurrent"), Provenance(optimiser="")
    return Plan(name=FILE, placement=placement, send_order=order, provenance=provenance)


def test_contiguous_blocks_are_scored_until_something_else_is_chosen(app: AppTest) -> None:
    problem = problem_of(app)
    assert "Deployed today: linear" in said(app.markdown).replace("\\", "")
    linear = metrics(app.plans[0], problem)
    assert figures(app)["Balancedness"] == f"{linear.balancedness:.3f}"
    assert figures(app)["Time, simulated"] == f"{1e3 * linear.total:.3g} ms"
    # Nothing is proven over placements until a system has proven it.
    assert figures(app)["Ceiling by order alone"] == f"{linear.total / linear.order_bound:.3g}×"


def test_an_engines_file_counts_as_deployed_everywhere(app: AppTest) -> None:
    drop_map(app)
    assert f"{FILE} counts as deployed now: SGLang" in said(app.caption).replace("\\", "")
    problem, plan = problem_of(app), deployed()
    assert f"Deployed today: {FILE}" in said(app.markdown).replace("\\", "")
    shown = figures(app)
    assert shown["Balancedness"] == f"{balance_of(plan, problem).balancedness:.3f}"
    assert shown["Cross-node share"] == f"{cross_node_share(plan, problem):.0%}".replace("%", " %")
    assert shown["Time, simulated"] == f"{1e3 * simulate(plan, problem).total:.3g} ms"
    table = app.dataframe[0].value.set_index("Plan")
    assert table.loc[FILE, "Copies to move"].startswith("0 ")
    assert table.loc[FILE, "Against what is deployed"] == "deployed"
    aurora = app.plans[1]
    wanted = simulate(plan, problem).total / simulate(aurora, problem).total
    assert table.loc[aurora.name, "Against what is deployed"] == f"{wanted:.3g}×"
    visit(app, "timeline")
    beside = next(box for box in app.multiselect if box.label == "Compare with")
    assert app.session_state["in_use"] in beside.value
    assert any(option == f"{FILE} (deployed now)" for option in beside.options)


def test_a_review_names_what_is_deployed_by_its_file(app: AppTest) -> None:
    drop_map(app)
    team.add_workspace(database(), "Autumn", "Ana")
    visit(app, "review")
    press(app, "Save")
    assert f"as {FILE}" in said(app.markdown).replace("\\", "") or FILE in said(app.markdown).replace("\\", "")
    assert "Placement in use" not in said(app.markdown)
    problem = problem_of(app)
    wanted = simulate(deployed(), problem).total / simulate(app.plans[1], problem).total
    assert gain(app) == {f"Gain over {FILE}": f"{wanted:.3g}×"}


def test_the_default_layout_of_vllm_by_word(app: AppTest) -> None:
    box = chooser(app, "Deployed now")
    assert box.options[:2] == ["linear (contiguous blocks)", "round-robin (as vLLM)"]
    box.select_index(1)
    app.run()
    assert not app.exception and "Deployed today: round-robin" in said(app.markdown).replace("\\", "")
    dealt = Placement.from_gpu_of_expert(np.tile(np.arange(EXPERTS) % GPUS, (LAYERS, 1)), GPUS, tuple(range(LAYERS)))
    plan = deployed().model_copy(update={"placement": dealt})
    assert figures(app)["Balancedness"] == f"{balance_of(plan, problem_of(app)).balancedness:.3f}"
    chooser(app, "Deployed now").select_index(0)
    app.run()
    assert app.session_state["in_use"] is None and "Deployed today: linear" in said(app.markdown).replace("\\", "")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"physical_to_logical_map": [[1, 2', "not valid JSON"),
        (json.dumps({"physical_to_logical_map": rows()[:5]}), "has 5 rows"),
        (json.dumps({"physical_to_logical_map": [[*row[:-1], 99] for row in rows()]}), "99"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_line(app: AppTest, text: str, complaint: str) -> None:
    drop(app, "plan.json", text)
    assert len(app.error) == 1 and complaint in app.error[0].value.replace("\\", "")
    assert "plan.json" in app.error[0].value.replace("\\", "") and app.session_state["in_use"] is None


def test_what_no_longer_fits_is_said(app: AppTest) -> None:
    drop_map(app)
    cluster = app.session_state["cluster"]
    app.session_state["cluster"] = cluster.part(list(range(6)))
    app.run()
    assert not app.exception
    assert "is for 8 GPUs, but there are 6" in said(app.warning).replace("\\", "")
    assert "Deployed today: linear" in said(app.markdown).replace("\\", "")


def test_the_share_that_crosses_nodes(app: AppTest) -> None:
    problem, plan = problem_of(app), app.plans[0]
    node = problem.cluster.node_of_gpu
    moved = problem.workload.demand(GPUS) @ plan.placement.share
    crossing = sum(moved[:, a, b].sum() for a in range(GPUS) for b in range(GPUS) if node[a] != node[b])
    assert cross_node_share(plan, problem) == pytest.approx(crossing / moved.sum())
