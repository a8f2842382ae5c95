"""Models of every family under plans on four ranks, each with sequences of its own: logits, words and gradients are those of
the plain model; ranks that are done keep serving; each loads its own experts alone, into as much memory as predicted."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from engine.plan import Placement, Plan
from engine.runtime.adapters import FAMILIES
from engine.runtime.memory import weight_memory
from engine.runtime.weights import Checkpoint, Sources
from tests import everything
from tests.cases.plans import plan_of as plan_at
from tests.cases.tiny_models import CONFIGS, config_of, model_of, plan_of
from tests.runtime import model_ranks
from tests.runtime.model_ranks import BIG, RANKS

QUICK = ("mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss")
"""Families that differ in what ranks do: names on disk, a dense layer between, shared experts with groups and biases, and other
arithmetic in another layout. `make everything` runs all; on one process `test_adapters` always does."""
RUN = tuple(CONFIGS) if everything.WANTED else QUICK
EACH = [pytest.param(family, marks=[] if family in QUICK else pytest.mark.everything) for family in CONFIGS]
ONE_MORE = "qwen2_moe"
"""The family with a plan of a matched order as well, and with a training step."""


def meta(**changed) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of("olmoe", **changed))


@pytest.fixture(scope="module")
def plans() -> dict[str, dict[str, Plan]]:
    """By family and system. EPLB's has one more slot than experts on every GPU."""
    made = {}
    for family in RUN:
        model = model_of(family)
        made[family] = {"linear": plan_of(model, RANKS), "eplb": plan_of(model, RANKS, "eplb", algorithm="eplb")}
    made[ONE_MORE]["aurora"] = plan_of(model_of(ONE_MORE), RANKS, "aurora")
    return made


@pytest.fixture(scope="module")
def big_plan() -> Plan:
    """Uneven slots: 4, 4, 3 and 2 experts on the ranks."""
    slots = ((0, 1, 2, 3), (0, 4, 5, 6), (0, 1, 7), (6, 7))
    layers = tuple(range(BIG["num_hidden_layers"]))
    return plan_at(Placement(experts=8, experts_of_gpu=(slots,) * len(layers), model_layers=layers))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    model_ranks.save(folder, RUN)
    return folder


@pytest.fixture(scope="module")
def outcomes(outcomes_of, tmp_path_factory, plans, big_plan, folders) -> list[dict]:
    """The outcome of each rank."""
    of_family = {family: {name: plan.model_dump_json() for name, plan in made.items()} for family, made in plans.items()}
    cases = {
        "plans": of_family,
        "folders": str(folders),
        "big plan": big_plan.model_dump_json(),
        "family": ONE_MORE,
        "step": {name: of_family[ONE_MORE][name] for name in ("eplb", "aurora")},
    }
    path = tmp_path_factory.mktemp("cases") / "cases.json"
    path.write_text(json.dumps(cases))
    (ranks,) = outcomes_of("runtime.model_ranks", 1, CASES=str(path))
    return ranks


@pytest.mark.parametrize("family", EACH)
def test_logits_and_words_are_the_plain_models_on_every_rank(outcomes, plans, family):
    assert not plans[family]["eplb"].placement.single
    for rank in outcomes:
        assert set(rank["live"][family]) == set(plans[family])
        for outcome in rank["live"][family].values():
            assert outcome["logits"] < 1e-5  # promised: 1e-4
            assert outcome["same words"]


@pytest.mark.parametrize("family", EACH)
def test_a_rank_has_the_numbers_of_its_experts_and_of_what_all_have(outcomes, plans, family):
    model = model_of(family)
    for name, plan in plans[family].items():
        memory = weight_memory(model, FAMILIES[family], plan.placement)
        buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
        assert [rank["live"][family][name]["numbers"] * 4 for rank in outcomes] == (memory.of_rank - buffers).tolist()


@pytest.mark.parametrize("family", EACH)
def test_a_rank_reads_its_own_experts_alone(outcomes, plans, folders, family):
    placement = plans[family]["eplb"].placement
    model = model_of(family)
    sources = Sources(Checkpoint(folders / family), model, FAMILIES[family])
    blocks = FAMILIES[family].blocks(model)
    for rank, outcome in enumerate(outcomes):
        assert outcome["loaded"][family]["logits"] < 1e-5
        own = {
            (piece.name, piece.row)
            for layer, block in enumerate(blocks)
            for expert in placement.experts_of_gpu[layer][rank]
            for tensor in FAMILIES[family].tensors
            for piece in sources.pieces[block.name, tensor, expert]
        }
        read = [tuple(each) for each in outcome["loaded"][family]["read"]]
        assert sorted(read, key=str) == sorted([*own, *((name, None) for name in sources.names.values())], key=str)


@pytest.mark.parametrize("name", ["eplb", "aurora"])
def test_gradients_of_a_step_are_the_plain_models(outcomes, name):
    assert all(rank["gradients"][name] < 1e-4 for rank in outcomes)


def test_memory_grows_as_predicted(outcomes, big_plan):
    predicted = weight_memory(meta(**BIG), FAMILIES["olmoe"], big_plan.placement).of_rank
    assert len(set(predicted.tolist())) > 1 and predicted.min() > 8e6
    for rank, bytes_ in enumerate(predicted):
        assert outcomes[rank]["grown"] == pytest.approx(bytes_, rel=0.1)


def test_ranks_say_so_when_another_ends_while_weights_load(outcomes):
    assert all(rank["bereft"].startswith("a rank ended before it had loaded its weights") for rank in outcomes[:-1])


def test_a_rank_that_cannot_load_names_the_fault_and_the_others_name_the_rank(outcomes):
    said = [rank["refused"] for rank in outcomes]
    assert "there is no such folder of a model" in said[2]
    assert said[:2] + said[3:] == ["rank 2 has not checked the folder; its own message says why"] * 3
