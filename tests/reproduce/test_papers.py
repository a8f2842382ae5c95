"""Figures of the papers of Lina and PipeMoE, recomputed."""

import numpy as np
import pytest

from engine.cluster import Cluster, Gpu
from engine.launch.preparation.settled import computed_in
from engine.plan import Pipeline
from engine.reproduce.lina.training import DESIGNS, TABLE_1, TASKS, paper_problem
from engine.reproduce.papers import PAPERS
from engine.reproduce.pipemoe.layers import MOST_PARTS, TABLE_VI, table_iv, table_vi
from engine.reproduce.pipemoe.steps import in_a_step
from engine.reproduce.pipemoe.testbed import TIMES, example_step
from engine.simulate import simulate
from engine.simulate.training import price_step
from engine.systems import TRAINING, run
from engine.systems.pieces import linear_placement
from tests.cases.pipemoe import GPUS, walked


@pytest.mark.parametrize("model", [*TASKS, TABLE_1], ids=str)
def test_experts_take_about_a_fifth_of_an_all_to_all(model):
    """Figure 7, of a backward pass: 1.6 ms of 7.6 ms."""
    problem = paper_problem(model)
    priced = price_step(problem, linear_placement(problem))
    seconds = {"experts": 0.0, "dispatch": 0.0}
    for operator, parts in zip(priced.graph.operators, priced.seconds, strict=True):
        if operator.phase in ("dx", "dw") and operator.kind in seconds:
            seconds[operator.kind] += parts[0].max()
    assert 0.15 < seconds["experts"] / seconds["dispatch"] < 0.3


def test_the_papers_rule_packs_where_experts_leave_room():
    plan = run(TRAINING["lina"], paper_problem("GPT-2"), DESIGNS["+ packing, the paper's rule"]).result.solution
    assert plan.placement.slots.max() > 1


def test_a_gpu_without_tf32_multiplies_32_bits_on_its_cuda_cores_and_old_documents_keep_their_names():
    data = {"type": "V", "memory": 1, "memory_bandwidth": 1, "flops_fp32": 2, "flops_fp16": 8, "send_bandwidth": 1}
    old = Gpu(**data, receive_bandwidth=1)
    assert old.flops("tf32") == 2 and old.model_copy(update={"flops_tf32": 4.0}).flops("tf32") == 4
    cluster = Cluster(name="old", nodes=({"name": "a", "gpus": (old,)},))
    assert cluster.digest == "dd36c6e55594ce454264cbe07daa7b7b1ca9c4057a1e08d1d094db6e05e215ec"


@pytest.mark.parametrize("on_gpus", [True, False])
def test_a_launch_computes_tf32_models_in_32_bits(on_gpus):
    assert computed_in(paper_problem("GPT-2").model, None, on_gpus).dtype == "fp32"


def test_figures_of_another_implementation():
    """Fixed degrees against the exact one on the 522 layers, and the gap to the limit, from a separate prototype.

    It kept 522 layers of all sizes together, not 174 of each: six equally large ones fall on either side of the line.
    """
    seconds = np.concatenate([table_iv(gpus).time_of_degree() for gpus in GPUS])
    assert seconds.shape == (522, MOST_PARTS)
    least = seconds.min(axis=1)
    two, swept = seconds[:, 1] / least - 1, seconds[:, [0, 1, 3, 7]].min(axis=1) / least - 1
    assert (two.mean(), two.max()) == (pytest.approx(0.031, abs=5e-4), pytest.approx(0.36, abs=5e-3))
    assert (swept > 1e-12).mean() == pytest.approx(0.18, abs=5e-4)
    assert (swept.mean(), swept.max()) == (pytest.approx(0.0032, abs=5e-5), pytest.approx(0.089, abs=5e-4))
    limit = np.concatenate([table_iv(gpus).limit() for gpus in GPUS])
    assert (least / limit - 1).mean() == pytest.approx(0.078, abs=1e-3)


def test_table_vi_has_what_the_exact_degree_saves():
    table = table_vi()
    assert table.index.tolist() == [(gpus, degree) for gpus in GPUS for degree in (1, 2, 4, 8)]
    assert (table["mean"] >= 0).all() and (table["mean"] <= table["highest"]).all() and (table["highest"] < 1).all()
    assert table.loc[(32, 4), ["paper_mean", "paper_highest"]].tolist() == [*TABLE_VI[32][2]] == [0.061, 0.339]
    passes = [table_iv(16, width=2.0, experts=experts) for experts in (1.0, 2.0)]
    whole = sum(walked(instance, 1) for instance in passes)
    saved = 1 - np.array([sum(walked(instance, parts) for instance in passes) for parts in range(1, 60)]).min(axis=0) / whole
    assert table.loc[(16, 1), ["mean", "highest"]].tolist() == pytest.approx([saved.mean(), saved.max()])
    # Dearer start-ups of larger clusters: fewer parts pay.
    assert table["mean"].xs(1, level="degree").is_monotonic_decreasing
    assert table["mean"].xs(8, level="degree").is_monotonic_increasing


def test_eight_parts_of_the_example_are_faster_in_a_step_with_and_without_all_reduces():
    """§V-E: 253 ms in eight parts, 289 in two; the paper names all-reduces, here it is the backward pass."""
    problem = example_step()
    two, eight = (in_a_step(problem, parts) for parts in (2, 8))
    assert 0.8 < eight / two < 0.95
    alone = in_a_step(problem, 8, reduced=0.0) / in_a_step(problem, 2, reduced=0.0)
    assert alone == pytest.approx(eight / two, abs=0.01)
    degrees = (2,) * TIMES
    plan = run(TRAINING["deepspeed"], problem).result.solution
    timeline = simulate(plan.model_copy(update={"pipeline": Pipeline(forward=degrees, backward=degrees)}), problem)
    events = timeline.events[(timeline.events["resource"] == 0) & timeline.events["kind"].isin(("dispatch", "combine"))]
    spans = 0.0
    for _, own in events.groupby("layer"):
        own, half = own.sort_values("start"), len(own) // 2
        spans += sum(part["end"].max() - part["start"].min() for part in (own.iloc[:half], own.iloc[half:]))
    assert two == pytest.approx(spans / TIMES)


@pytest.mark.parametrize(
    "opening", [each for entry in PAPERS["pipemoe"].entries for each in entry.openings], ids=lambda o: o.title
)
def test_pipemoes_settings_can_be_planned(opening):
    problem = opening.problem()
    assert TRAINING[opening.system].settings(opening.options)
    assert problem.step is not None and len(problem.cluster.gpus) in GPUS
