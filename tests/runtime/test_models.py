"""Models of every family under plans on four ranks, each with sequences of its own: logits, words and gradients are those of
the plain model; ranks that are done keep serving; each loads its own experts alone, into as much memory as predicted."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from engine.plan import Pipeline, Placement, Plan, Priority
from engine.runtime.adapters import FAMILIES
from engine.runtime.memory import weight_memory
from engine.runtime.weights import Checkpoint, Sources
from tests import everything
from tests.cases.plans import plan_of as plan_at
from tests.cases.tiny_models import CONFIGS, config_of, model_of, plan_of
from tests.runtime import model_ranks
from tests.runtime.model_ranks import BIG, RANKS

UNEVEN = ((0, 1, 2, 7), (3, 7), (4, 5, 0), (6,))
"""Expert 7 has two homes, and expert 0 too; one rank has a single expert."""


def in_parts(plan: Plan, degree: int, order: str) -> Plan:
    degrees = (degree,) * plan.placement.layers
    return plan.with_parts(
        pipeline=Pipeline(forward=degrees, backward=degrees, order=order), priority=Priority(policy="fair", bucket=25e6)
    )


def placed(linear: Plan, *slots: tuple[int, ...]) -> Plan:
    """The same slots in all layers of a plan."""
    layers = linear.placement.model_layers
    return plan_at(Placement(experts=8, experts_of_gpu=(slots,) * len(layers), model_layers=layers))


def plans_of(family: str, wanted: Sequence[str]) -> dict[str, Plan]:
    """The plans of these names for a family's model."""
    model = model_of(family)
    made = {
        "linear": lambda: plan_of(model, RANKS),
        "eplb with replicas": lambda: plan_of(model, RANKS, "eplb", redundant=4),
        "exflow": lambda: plan_of(model, RANKS, "exflow", hops="all"),
        "aurora, matched": lambda: plan_of(model, RANKS, "aurora", order="matched"),
        "aurora, shared": lambda: plan_of(model, RANKS, "aurora", order="shared"),
        "uneven slots": lambda: placed(plan_of(model, RANKS), *UNEVEN),
        "degree 2": lambda: in_parts(plan_of(model, RANKS), 2, "dispatch-first"),
        "degree 3, matched": lambda: in_parts(plan_of(model, RANKS, "aurora", order="matched"), 3, "interleaved"),
    }
    assert set(made) == set(PLANS)
    return {name: made[name]() for name in wanted}


PLANS = ("linear", "eplb with replicas", "exflow", "aurora, matched", "aurora, shared", "uneven slots", "degree 2")
PLANS += ("degree 3, matched",)
QUICK = {
    "mixtral": ("aurora, matched",),
    "olmoe": ("aurora, shared",),
    "qwen2_moe": ("linear",),
    "qwen3_moe": ("exflow",),
    "deepseek_v2": ("degree 2",),
    "deepseek_v3": ("eplb with replicas",),
    "gpt_oss": ("uneven slots", "degree 3, matched"),
}
"""Every family once, and every plan once: names on disk, a dense layer between, shared experts with groups and biases, another
arithmetic in another layout. `make everything` runs each family under each plan."""
RUN = {family: PLANS if everything.WANTED else QUICK[family] for family in CONFIGS}
EACH = [
    pytest.param(family, plan, marks=[] if plan in QUICK[family] else pytest.mark.everything)
    for family in CONFIGS
    for plan in PLANS
]


def meta(family: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(family, **BIG[family]))


@pytest.fixture(scope="module")
def plans() -> dict[str, dict[str, Plan]]:
    """By family and name."""
    return {family: plans_of(family, names) for family, names in RUN.items()}


@pytest.fixture(scope="module")
def big_plans() -> dict[str, Plan]:
    """Uneven slots: 4, 4, 3 and 2 experts on the ranks."""
    slots, layers = ((0, 1, 2, 3), (0, 4, 5, 6), (0, 1, 7), (6, 7)), {"olmoe": (0, 1, 2), "deepseek_v3": (1, 2, 3)}
    return {family: plan_at(Placement(experts=8, experts_of_gpu=(slots,) * 3, model_layers=layers[family])) for family in BIG}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    model_ranks.save(folder, RUN)
    return folder


@pytest.fixture(scope="module")
def outcomes(outcomes_of, tmp_path_factory, plans, big_plans, folders) -> list[dict]:
    """The outcome of each rank."""
    of_family = {family: {name: plan.model_dump_json() for name, plan in made.items()} for family, made in plans.items()}
    ends = plan_of(model_of("mixtral"), RANKS)
    cases = {
        "plans": of_family,
        "folders": str(folders),
        "ends": {
            "4": ends.model_dump_json(),
            "3": placed(ends, (0, 1, 2), (3, 4, 5), (6, 7)).model_dump_json(),
            "2": plan_of(model_of("mixtral"), 2, "aurora", order="matched").model_dump_json(),
        },
        "big plans": {family: plan.model_dump_json() for family, plan in big_plans.items()},
    }
    path = tmp_path_factory.mktemp("cases") / "cases.json"
    path.write_text(json.dumps(cases))
    (ranks,) = outcomes_of("runtime.model_ranks", 1, CASES=str(path))
    return ranks


@pytest.mark.parametrize(("family", "plan"), EACH)
def test_logits_words_and_gradients_are_the_plain_models_on_every_rank(outcomes, family, plan):
    for rank in outcomes:
        assert set(rank["live"][family]) == set(RUN[family])
        outcome = rank["live"][family][plan]
        assert outcome["logits"] < 1e-5  # promised: 1e-4
        assert outcome["same words"]
        assert outcome["gradients"] < 1e-5


def test_the_plans_are_what_their_names_say(plans):
    named = {name: plan for of_family in plans.values() for name, plan in of_family.items()}
    assert set(named) == set(PLANS)
    modes = {name: plan.send_order.mode for name, plan in named.items() if plan.send_order.mode != "concurrent"}
    assert modes == {"aurora, matched": "matched", "aurora, shared": "shared", "degree 3, matched": "matched"}
    assert {name for name, plan in named.items() if not plan.placement.single} == {"eplb with replicas", "uneven slots"}
    assert named["exflow"].execution == "context-coherent"


@pytest.mark.parametrize(("family", "plan"), EACH)
def test_a_rank_has_the_numbers_of_its_experts_and_of_what_all_have(outcomes, plans, family, plan):
    model = model_of(family)
    memory = weight_memory(model, FAMILIES[family], plans[family][plan].placement)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert [rank["live"][family][plan]["numbers"] * 4 for rank in outcomes] == (memory.of_rank - buffers).tolist()


@pytest.mark.parametrize(("family", "plan"), EACH)
def test_a_rank_reads_its_own_experts_alone(outcomes, plans, folders, family, plan):
    placement = plans[family][plan].placement
    sources = Sources(Checkpoint(folders / family), model_of(family), FAMILIES[family])
    blocks = FAMILIES[family].blocks(model_of(family))
    for rank, outcome in enumerate(outcomes):
        loaded = outcome["live"][family][plan]["loaded"]
        assert loaded["logits"] < 1e-5
        own = {
            (piece.name, piece.row)
            for layer, block in enumerate(blocks)
            for expert in placement.experts_of_gpu[layer][rank]
            for tensor in FAMILIES[family].tensors
            for piece in sources.pieces[block.name, tensor, expert]
        }
        read = [tuple(each) for each in loaded["read"]]
        assert sorted(read, key=str) == sorted([*own, *((name, None) for name in sources.names.values())], key=str)


@pytest.mark.parametrize("family", BIG)
def test_a_ranks_process_grows_as_predicted(outcomes, big_plans, family):
    predicted = weight_memory(meta(family), FAMILIES[family], big_plans[family].placement)
    assert len(set(predicted.of_rank.tolist())) > 1 and predicted.of_rank.min() > 8e6
    for rank, outcome in enumerate(outcomes):
        assert outcome["memory"][family]["kept"] == pytest.approx(predicted.of_rank[rank], rel=0.1)
        assert outcome["memory"][family]["peak"] == pytest.approx(predicted.peak[rank], rel=0.1)


def test_ranks_say_in_a_line_that_another_one_is_gone(outcomes):
    """While weights load, in a forward pass and in a backward one; that nothing is left behind the ranks look at themselves."""
    loading, forward, backward = ([rank["bereft"][at] for rank in outcomes[: 3 - at]] for at in range(3))
    for said in loading:
        assert re.match(r"a rank ended before it had loaded its weights: .*Connection (closed|reset) by peer", said)
    for rank, said in [*enumerate(forward), *enumerate(backward)]:
        assert re.match(rf"rank {rank} lost another rank: .*Connection (closed|reset) by peer.* says why$", said)


def test_a_rank_that_cannot_load_names_the_fault_and_the_others_name_the_rank(outcomes):
    said = [rank["refused"] for rank in outcomes]
    assert "there is no such folder of a model" in said[2]
    assert said[:2] + said[3:] == ["rank 2 has not checked the folder; its own message says why"] * 3
