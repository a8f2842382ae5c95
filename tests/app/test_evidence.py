"""Measured times are chosen by themselves where there are any, and a person's choice stays."""

from streamlit.testing.v1 import AppTest

from app import samples
from app.state.stored import DATASHEET
from engine.catalogue import cluster_presets
from engine.costs import choice
from engine.plan import Travel
from tests.cases.pages import put, run

CLUSTERS = cluster_presets()


def opened(app: AppTest, cluster: str, model: str = "DeepSeek-R1", **more) -> tuple[dict, Travel | None]:
    run(app.switch_page("../pages/cluster.py"))
    put(app, cluster=CLUSTERS[cluster].cluster, model=samples.models()[model].model, **more)
    return app.session_state["cost"], app.session_state["travel"]


def test_deepseek_on_h100_nodes_takes_deepep_s_tables_and_gives_them_up_elsewhere(app: AppTest):
    cost, travel = opened(app, "hgx-h100-4-nodes")
    assert choice.short(cost) == "measured tables, network by DeepEP's tables"
    assert travel == Travel(unit="node", combine="bf16")
    assert opened(app, "hgx-h100-4-nodes", "DeepSeek-V2-Lite") == (cost, travel), "these tables can time it, so they stay"
    assert opened(app, "exflow-4-nodes") == (DATASHEET, None)


def test_a_choice_of_a_person_stays(app: AppTest):
    own = {"source": "silicon"}
    assert opened(app, "hgx-h100-8", cost=own) == (own, None)
    put(app, cost=DATASHEET)
    assert opened(app, "mixed-8") == (DATASHEET, None)
    assert opened(app, "hgx-h100-4-nodes")[1] is not None
    run(put(app, cost=DATASHEET, travel=None))
    assert app.session_state["cost"] == DATASHEET, "taken back for this model and cluster"
