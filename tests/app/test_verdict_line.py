"""The baseline, given by word or file, and the verdict line that compares with it on every page."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from app import verdict_line
from app.optimise.table import columns_in_sight
from engine import store, units
from engine.catalogue import cluster_presets
from engine.compare.figures import balance_of, cross_node_share, metrics, migration
from engine.compare.standing import Risk, Standing, gain_in_words, tokens_per_second
from engine.plan import Placement, Plan, SendOrder, Travel
from engine.result import Provenance
from engine.simulate import simulate
from engine.store import team
from engine.store.database import database
from engine.systems import SYSTEMS, TRAINING, run
from engine.training import usual_step
from engine.workload import RoutingTrace
from tests.cases.pages import chooser, complaints, field, gain, press, put, said, upload, visit
from tests.cases.pages import metrics as metrics_of
from tests.cases.samples import sample_problem
from tests.cases.sessions import ANOTHER, JOB, open_recording, plan, problem_of

LINE = ("Simulated pass", "Tokens/s per GPU, MoE layers", "Left to gain by order", "Moves")
OVER = "Gain over Linear placement"


def line(app: AppTest) -> dict[str, str]:
    return gain(app) | {label: value for label, value in metrics_of(app).items() if label in LINE}


def test_every_page_shows_the_same_figures_and_they_are_those_of_the_simulation(
    ana: AppTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    st.cache_resource.clear()  # other tests of this process may have had the same figures, and kept them in other folders
    problem, (linear, shortest) = problem_of(visit(ana, "optimise")), ana.plans
    shifted = RoutingTrace("shifted", (problem.workload.experts + 5) % 16, 16)
    put(ana, workloads={**ana.session_state["workloads"], store.save_workload(shifted): "shifted"})
    own, base = metrics(shortest, problem), metrics(linear, problem)
    there = problem.with_workload(shifted)
    worst = simulate(linear, there).total / simulate(shortest, there).total
    assert not migration(linear.placement, shortest.placement, problem, base.total, own.total).copies
    wanted = {
        f"{OVER}, held out": units.signed(worst - 1),
        "Simulated pass": units.seconds(own.total),
        "Tokens/s per GPU, MoE layers": units.digits(problem.workload.tokens / 8 / own.total),
        "Left to gain by order": units.share(own.order_gap),
        "Moves": "nothing",
    }
    assert line(ana) == wanted
    for page in ("timeline", "what_if", "launch"):
        assert line(visit(ana, page)) == wanted, page
    team.add_workspace(database(), "Autumn", "Ana")
    visit(ana, "review")
    press(ana, "Save")
    assert line(ana) == wanted
    # As after a restart of the studio: the figures are kept, so nothing is simulated for them.
    st.cache_resource.clear()
    monkeypatch.setattr("app.simulations.simulate", None)
    assert line(visit(ana, "launch")) == wanted


def test_the_title_of_the_timeline_compares_with_what_is_deployed_whatever_else_is_shown(ana: AppTest) -> None:
    visit(ana, "timeline")
    total, deployed = (simulate(plan, problem_of(ana)).total for plan in reversed(ana.plans))
    gained = gain_in_words(deployed / total, "Linear placement")
    wanted = f"{ana.plans[1].name} takes {units.seconds(total)}, {gained}, in sample"
    for beside in ([ana.plans[0].id], []):
        field(ana, "Compare with").set_value(beside).run()
        assert wanted in [chart.proto.alt for chart in ana.get("plotly_chart")]


def test_what_is_deployed_is_told_so_and_is_on_top(ana: AppTest) -> None:
    visit(ana, "optimise")
    table = ana.dataframe[0].value
    assert table["Plan"].tolist() == [ana.plans[0].name, ana.plans[1].name] and table[""].tolist() == ["", "▸"]
    put(ana, in_use=ana.plans[1].id)
    table = ana.dataframe[0].value
    assert table["Plan"].iloc[0] == ana.plans[1].name and table[""].tolist() == ["▸", ""]
    assert table["Gain over what is deployed, in sample"].iloc[0] == "deployed"
    assert line(ana)["Deployed now"] == "0.0 %"


@pytest.mark.parametrize("gain", ["Gain over Linear placement, in sample", "Gain over what is deployed", None])
def test_a_narrow_window_shows_plan_time_and_gain(gain: str | None) -> None:
    """Streamlit sets the width of all columns together, which neither a long name nor a long title may take: a table has 600
    pixels there."""
    text = pd.DataFrame(
        {"": ["▸"], "Plan": ["a"], "Time per token, ms (simulated)": ["1"]} | ({gain: ["+99.0 %"]} if gain else {})
    )
    first = columns_in_sight(text.assign(**{"Bound, ms": "1"}))
    assert list(first) == list(text.columns)
    assert sum(column["width"] for column in first.values()) <= 560
    assert [column["label"] for column in first.values()][2:] == [
        "Time, ms",
        "In sample" if gain and "sample" in gain else "Gain",
    ][: len(first) - 2]


def test_a_plan_whose_tokens_travel_otherwise_is_held_against_blocks_that_travel_like_it(ana: AppTest) -> None:
    problem = problem_of(visit(ana, "optimise"))
    travelling = replace(problem, travel=Travel(unit="gpu"))
    (shared,) = plan(travelling, ANOTHER, "sjf")
    ana.session_state["plan_jobs"], ana.session_state["plan"] = [ANOTHER, JOB], shared.id
    linear = run(SYSTEMS["linear"], travelling).result.solution
    total, deployed = (simulate(plan, problem).total for plan in (shared, linear))
    assert line(visit(ana, "timeline"))[f"{OVER}, in sample"] == units.signed(deployed / total - 1)


def test_a_training_step_is_held_against_deepspeed() -> None:
    problem = sample_problem("alpha-code", tokens=200)
    step = usual_step(problem.model, 8)
    assert tokens_per_second(problem, 2.0) == pytest.approx(200 / 8 / 2)
    training = replace(problem, step=step)
    total = simulate(run(TRAINING["deepspeed"], training).result.solution, training).total
    assert tokens_per_second(training, total) == pytest.approx(step.batch * step.sequence_length / total)


def test_other_recordings_and_gains_in_words() -> None:
    times = {"seconds": 1.0, "deployed_seconds": 1.5, "tokens_per_second": 1.0, "bound": 0.8, "bound_covers": "", "move": None}
    plan = Standing(plan="new", deployed="old", is_deployed=False, span="pass", **times)
    for risks, wanted in (
        ((), "+50.0 % in sample: on the recording that it was made from."),
        (None, "+50.0 % in sample. Scoring the other open recordings takes a while"),
        ((Risk("prose", 1.0, 1.2),), "+20.0 % held out (on prose); time and tokens/s: on the open recording."),
    ):
        assert verdict_line.scope_in_words(replace(plan, risks=risks)).startswith(wanted)
    assert verdict_line.scope_in_words(replace(plan, recorded=False)).startswith("Routing is assumed")
    words = {1.38: "+38.0 % over it", 1.004: "as fast as it", 0.996: "as fast as it", 0.5: "slower than it: −50.0 %"}
    assert {gain: gain_in_words(gain, "it") for gain in words} == words


def test_a_plan_that_was_made_for_another_recording_says_so_and_may_be_what_is_deployed(ana: AppTest) -> None:
    """All figures are for the open recording, the sidebar's too; this one the plan has not seen, so its gain is held out."""
    visit(ana, "optimise")
    assert "Made for" not in said(ana.caption)
    open_recording(ana, RoutingTrace("shifted", (problem_of(ana).workload.experts + 5) % 16, 16))
    for page in ("timeline", "what_if", "optimise"):
        visit(ana, page)
        assert "Made for alpha-code; the figures are for what is open now" in said(ana.caption), page
        assert "held out (on shifted)" in said(ana.caption), page
    # Contiguous blocks are the same plan on every recording of a model.
    assert next(iter(ana.dataframe[0].value.filter(like="Gain over").iloc[0])) == "deployed"


def test_a_loss_elsewhere_and_room_that_placements_leave_are_said_beside_the_gain() -> None:
    def page() -> None:
        from app import verdict_line
        from engine.compare.standing import Risk, Standing

        times = {"span": "pass", "seconds": 1.0, "deployed_seconds": 1.5, "tokens_per_second": 1.0, "bound": 0.8}
        plan = {"plan": "new", "deployed": "old", "is_deployed": False, "bound_covers": "bound", "move": None}
        risks = Risk("prose", 1.2, 1.0), Risk("man", 0.8, 1.0)
        verdict_line.show(Standing(**plan, **times, risks=risks, placement_gap=3.0), "simulated")

    app = AppTest.from_function(page).run()
    assert metrics_of(app)["Left to gain by order · placement"] == "25 % · 300 %"
    assert app.caption[-1].value.replace("\\", "").endswith("] On prose it is slower than old: −16.7 %.")


LAYERS, EXPERTS, GPUS = 8, 16, 8
FILE = "sglang-prod.json"


@pytest.fixture
def app(ana: AppTest) -> AppTest:
    """Ana's session on the Optimise page."""
    return visit(ana, "optimise")


def rows() -> list[list[int]]:
    """Three slots per GPU: every expert once, and experts 0 to 7 twice, on GPUs that have them not yet."""
    row = [slot for gpu in range(GPUS) for slot in (2 * gpu, 2 * gpu + 1, (gpu + 4) % 8)]
    return [row] * LAYERS


def deployed() -> Plan:
    """The rows of the file."""
    slots = np.full(GPUS, 3)
    placement = Placement.from_slots(np.array(rows()), slots, EXPERTS, tuple(range(LAYERS)))
    order, provenance = SendOrder(mode="concurrent"), Provenance(optimiser="")
    return Plan(name=FILE, placement=placement, send_order=order, provenance=provenance)


def test_contiguous_blocks_are_scored_until_something_else_is_chosen(app: AppTest) -> None:
    problem = problem_of(app)
    assert "Deployed today: linear" in said(app.markdown)
    linear, shown = metrics(app.plans[0], problem), metrics_of(app)
    assert shown["Balancedness"] == f"{linear.balancedness:.3f}"
    assert shown["Time, simulated"] == f"{1e3 * linear.total:.3g} ms"
    # Nothing is proven over placements until a system has proven it.
    assert shown["Ceiling by order alone"] == f"{linear.total / linear.order_bound:.3g}×"
    # A file that does not fit is refused in one line.
    upload(app, "deployed-file", {"plan.json": json.dumps({"physical_to_logical_map": rows()[:5]})})
    (refusal,) = complaints(app)
    assert "has 5 rows" in refusal and "plan.json" in refusal and app.session_state["in_use"] is None
    # The default layout of vLLM by word.
    box = chooser(app, "Deployed now")
    assert box.options[:2] == ["linear (contiguous blocks)", "round-robin (as vLLM)"]
    box.select_index(1).run()
    assert not app.exception and "Deployed today: round-robin" in said(app.markdown)
    dealt = Placement.from_gpu_of_expert(np.tile(np.arange(EXPERTS) % GPUS, (LAYERS, 1)), GPUS, tuple(range(LAYERS)))
    plan = deployed().model_copy(update={"placement": dealt})
    assert metrics_of(app)["Balancedness"] == f"{balance_of(plan, problem).balancedness:.3f}"
    chooser(app, "Deployed now").select_index(0).run()
    assert app.session_state["in_use"] is None and "Deployed today: linear" in said(app.markdown)


def test_an_engines_file_counts_as_deployed_everywhere_until_it_no_longer_fits(app: AppTest) -> None:
    upload(app, "deployed-file", {FILE: json.dumps({"physical_to_logical_map": rows()})})
    assert f"{FILE} counts as deployed now: SGLang" in said(app.caption)
    problem, plan = problem_of(app), deployed()
    assert f"Deployed today: {FILE}" in said(app.markdown)
    shown, total = metrics_of(app), simulate(plan, problem).total
    assert shown["Balancedness"] == f"{balance_of(plan, problem).balancedness:.3f}"
    assert shown["Cross-node share"] == f"{cross_node_share(plan, problem):.0%}".replace("%", " %")
    assert shown["Time, simulated"] == f"{1e3 * total:.3g} ms"
    table = app.dataframe[0].value.set_index("Plan")
    assert table.loc[FILE, "Copies to move"].startswith("0 ")
    assert table.loc[FILE, "Gain over what is deployed, in sample"] == "deployed"
    ours = app.plans[1]
    wanted = units.signed(total / simulate(ours, problem).total - 1)
    assert table.loc[ours.name, "Gain over what is deployed, in sample"] == wanted
    visit(app, "timeline")
    beside = field(app, "Compare with")
    assert app.session_state["in_use"] in beside.value
    assert any(option == f"{FILE} (deployed now)" for option in beside.options)
    # A review names it by its file.
    team.add_workspace(database(), "Autumn", "Ana")
    visit(app, "review")
    press(app, "Save")
    assert FILE in said(app.markdown) and "Placement in use" not in said(app.markdown)
    assert gain(app) == {f"Gain over {FILE}, in sample": wanted}
    # Where it no longer fits that is said.
    app.session_state["cluster"] = app.session_state["cluster"].part(list(range(6)))
    visit(app, "optimise")
    assert "is for 8 GPUs, but there are 6" in said(app.warning)
    assert "Deployed today: linear" in said(app.markdown)


def test_the_share_that_crosses_nodes() -> None:
    problem = sample_problem("alpha-code", tokens=None, cluster=cluster_presets()["mixed-8"].cluster)
    plan = run(SYSTEMS["linear"], problem).result.solution
    node = problem.cluster.node_of_gpu
    moved = problem.workload.demand(GPUS) @ plan.placement.share
    crossing = sum(moved[:, a, b].sum() for a in range(GPUS) for b in range(GPUS) if node[a] != node[b])
    assert cross_node_share(plan, problem) == pytest.approx(crossing / moved.sum())
