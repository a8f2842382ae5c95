"""Plans exchanged while a model runs: the same tokens, the bytes that a move is priced at, one layer more in memory, and one
line on every rank for what does not fit."""

from itertools import pairwise

import numpy as np
import pytest

from engine.model import MoEModel
from engine.placement.migration import transfers
from engine.plan import Placement
from engine.runtime.exchange.links import Links

RANKS, WORDS, EXPERT, LAYER = 4, 64, 3 * 256 * 1024 * 4, 2
"""As in `moving_ranks`, which imports transformers, and the experts of a layer on a rank of its large model."""
MODEL = MoEModel(name="tiny", layers=2, experts=8, experts_per_token=2, d_model=32, d_ff=24, dtype="fp32")
BIASES = {"mixtral": None, "gpt_oss": 2 * 24 + 32}


@pytest.fixture(scope="module")
def outcome(outcomes_of) -> dict:
    pytest.importorskip("transformers")
    (outcome,) = outcomes_of("runtime.moving_ranks", 1)
    return outcome


@pytest.mark.parametrize("family", BIASES)
def test_a_generation_goes_on_with_the_same_tokens(outcome, family):
    for rank in outcome["ranks"]:
        generated = rank["generated"][family]
        assert generated["same"] and generated["length"] == WORDS and len(generated["moves"]) == 2


@pytest.mark.parametrize("family", BIASES)
def test_the_bytes_that_move_are_those_of_the_price(outcome, family):
    placements = [Placement(**placement) for placement in outcome["placements"][family]]
    assert placements[0].single and not placements[1].single
    size = MODEL.model_copy(update={"expert_biases": BIASES[family]}).bytes_per_expert
    for number, (now, new) in enumerate(pairwise(placements)):
        priced = transfers(now.share > 0, new.share > 0, size, Links(np.ones(RANKS)).network)
        moves = [rank["generated"][family]["moves"][number] for rank in outcome["ranks"]]
        np.testing.assert_array_equal([move["to"] for move in moves], priced.traffic)
        for move in moves:
            assert move["moved"]["bytes"] == priced.traffic.sum() > 0
            assert move["moved"]["copies"] == now.moved_experts(new) and 0 < move["moved"]["seconds"] < 10


def test_a_step_of_training_after_it_is_that_of_the_plan(outcome):
    assert all(rank["trained"] for rank in outcome["ranks"])


def test_at_most_one_layer_is_held_twice(outcome):
    """All of the six layers' experts change places."""
    for rank in outcome["ranks"]:
        assert 0.5 * LAYER * EXPERT < rank["grown"] < 2 * LAYER * EXPERT


@pytest.mark.parametrize(
    ("wrong", "line"),
    {
        "layers": "places the MoE layers 0, 1, 2, and MixtralForCausalLM has 0, 1",
        "experts": "places 12 experts a layer, MixtralForCausalLM has 8 in layer 0",
        "ranks": "the plan is for 2 GPUs, and the process group has 4 ranks",
        "different": "the ranks were given different plans: all of them need the same one",
        "nodes": "the plan has tokens that travel once to every node: say which ranks share a node",
        "no plan": "MixtralForCausalLM runs under no plan yet: apply_plan or load_planned give it the first one",
        "memory": "the weights do not fit: ranks 0, 1, 2, 3 need 0.00 GiB",
    }.items(),
)
def test_what_does_not_fit_is_one_line_on_every_rank(outcome, wrong, line):
    for rank in outcome["ranks"]:
        said = rank["refused"][wrong]
        assert line in said and "\n" not in said and not rank["refused"]["changed"]


def test_a_plan_that_one_rank_cannot_take_is_taken_by_none(outcome):
    said = [rank["refused"]["one rank alone"] for rank in outcome["ranks"]]
    assert "places the MoE layers 0, 1, 2" in said.pop(2)
    assert said == ["rank 2 has not taken the plan; its own message says why"] * 3


def test_ranks_say_so_when_another_ends_while_weights_move(outcome):
    *left, gone = (rank["broken off"] for rank in outcome["ranks"])
    assert gone == "ends here"
    for said in left:
        assert said.startswith("the exchange of plans broke off, and MixtralForCausalLM is under neither of the two: ")
