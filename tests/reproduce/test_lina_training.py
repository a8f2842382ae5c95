"""Lina's training setting: its experts take the part of an all-to-all that the paper measured, so that packing has room."""

import pytest

from engine.cluster import Cluster, Gpu
from engine.launch.preparation.settled import computed_in
from engine.reproduce.lina import DESIGNS, MODELS, paper_problem
from engine.simulate.training import price_step
from engine.systems import TRAINING, run
from engine.systems.pieces import linear_placement

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model", MODELS)
def test_experts_take_about_a_fifth_of_an_all_to_all(model):
    """Figure 7: 1.6 ms of 7.6 ms."""
    problem = paper_problem(model)
    priced = price_step(problem, linear_placement(problem))
    seconds = {"experts": 0.0, "dispatch": 0.0}
    for operator, parts in zip(priced.graph.operators, priced.seconds, strict=True):
        if operator.phase == "forward" and operator.kind in seconds:
            seconds[operator.kind] += parts[0].max()
    assert 0.1 < seconds["experts"] / seconds["dispatch"] < 0.3


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
