"""Models out of folders: the same as when they were saved, in every layout of a checkpoint; each fault of a folder in one line,
before any tensor is read; memory predicted and held; random weights that no plan changes."""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from engine.errors import StoppedError
from engine.plan import Placement, Plan
from engine.runtime import checkpoint
from engine.runtime.adapters import FAMILIES
from engine.runtime.apply import apply_plan, check_plan
from engine.runtime.checkpoint import INDEX, SWITCH, Reader, listed
from engine.runtime.memory import weight_memory
from engine.runtime.weights import Loading, load_model, load_planned
from tests.cases.plans import plan_of as plan_at
from tests.cases.refusals import refusal
from tests.cases.tiny_models import CONFIGS, model_of, plan_of, relative, tokens_of

WEIGHTS = "model.safetensors"


def saved(folder: Path, family: str = "mixtral", **more) -> tuple[torch.nn.Module, Path]:
    """A small model and a folder with it. more: options of `save_pretrained`, or `tie_word_embeddings`"""
    model = model_of(family, tie_word_embeddings=more.pop("tie_word_embeddings", False))
    model.save_pretrained(folder, **more)
    return model, folder


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens_of()).logits


def rewritten(folder: Path, change) -> Path:
    """The folder with changed tensors. change: of the dict of all"""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    return folder


def configured(folder: Path, **values) -> Path:
    """The folder with other values in its config."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_is_read_as_it_was_saved(tmp_path, family):
    model, folder = saved(tmp_path, family)
    read = load_model(str(folder))
    assert torch.equal(logits_of(read), logits_of(model))
    assert not read.training and {name for name, _ in read.named_parameters()} == {name for name, _ in model.named_parameters()}
    assert relative(logits_of(load_planned(folder, plan_of(model, 1))), logits_of(model)) < 1e-5


@pytest.mark.parametrize("tied", [True, False])
def test_in_several_files_with_tied_embeddings_or_without(tmp_path, tied):
    model, folder = saved(tmp_path, max_shard_size="30KB", tie_word_embeddings=tied)
    assert len(list(folder.glob("*.safetensors"))) > 2 and (folder / INDEX).is_file()
    read = load_model(folder)
    assert (read.lm_head.weight is read.model.embed_tokens.weight) == tied
    assert torch.equal(logits_of(read), logits_of(model))


def test_experts_that_are_fused_on_disk_are_read_row_by_row(tmp_path):
    model, folder = saved(tmp_path, "qwen3_moe")
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / WEIGHTS)
    with mock.patch.object(Reader, "copy", autospec=True, side_effect=Reader.copy) as copy:
        plan = plan_of(model, 1)
        assert relative(logits_of(load_planned(folder, plan)), logits_of(model)) < 1e-5
    rows = {(call.args[1], call.args[3]) for call in copy.call_args_list if ".experts." in call.args[1]}
    assert rows == {
        (f"model.layers.{layer}.mlp.experts.{name}", row)
        for layer in (0, 1)
        for name in ("gate_up_proj", "down_proj")
        for row in range(8)
    }


def test_another_number_format_and_what_stays_in_32_bits(tmp_path):
    _, folder = saved(tmp_path, "deepseek_v3")
    read = load_model(folder, Loading(dtype=torch.bfloat16))
    formats = {name: tensor.dtype for name, tensor in read.state_dict().items()}
    bias = [name for name in formats if name.endswith("e_score_correction_bias")]
    assert bias and all(formats[name] == torch.float32 for name in bias)
    assert {dtype for name, dtype in formats.items() if name not in bias} == {torch.bfloat16}


# Random weights.


def test_a_config_alone_gives_the_same_random_weights_under_every_plan(tmp_path, caplog):
    model, folder = saved(tmp_path, "deepseek_v3")
    (folder / WEIGHTS).unlink()
    plain, planned = load_model(folder), load_planned(folder, plan_of(model, 1))
    assert "has no weights: random ones of its config" in caplog.text
    assert relative(logits_of(planned), logits_of(plain)) < 1e-5
    assert relative(logits_of(load_model(folder, Loading(seed=1))), logits_of(plain)) > 0.1
    spread = [parameter.std().item() for name, parameter in plain.named_parameters() if ".experts." in name]
    assert spread == pytest.approx([model.config.initializer_range] * len(spread), rel=0.1)


# Faults.


def without(name: str):
    return lambda tensors: tensors.pop(name)


def damaged(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:5000])


def only_pickles(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


EXPERT = "model.layers.1.block_sparse_moe.experts.5.w3.weight"
FAULTS = {
    "a missing expert": (lambda folder: rewritten(folder, without(EXPERT)), f"the checkpoint lacks the tensor {EXPERT}"),
    "missing tensors of all": (
        lambda folder: rewritten(folder, lambda all: [all.pop("model.norm.weight"), all.pop("lm_head.weight")]),
        "the checkpoint lacks the tensor model.norm.weight and 1 more",
    ),
    "a tensor too many": (
        lambda folder: rewritten(folder, lambda all: all.update({"model.layers.2.extra": torch.ones(2)})),
        "the checkpoint has, and its config.json does not, the tensor model.layers.2.extra",
    ),
    "an expert of another size": (
        lambda folder: rewritten(folder, lambda all: all.update({EXPERT: torch.ones(23, 32)})),
        f"the tensor {EXPERT} is [23, 32], by config.json it is [24, 32]",
    ),
    "a format for storage": (
        lambda folder: rewritten(folder, lambda all: all.update({EXPERT: all[EXPERT].to(torch.float8_e4m3fn)})),
        f"the tensor {EXPERT} is in a number format that is not computed in",
    ),
    "another config": (
        lambda folder: configured(folder, num_local_experts=7),
        "the tensor model.layers.0.block_sparse_moe.gate.weight is [8, 32], by config.json it is [7, 32]",
    ),
    "quantised": (
        lambda folder: configured(folder, quantization_config={"quant_method": "fp8"}),
        "the weights are quantised (quantization_config: 'fp8'), and a plan runs in fp32, bf16 or fp16: write",
    ),
    "quantised by who knows what": (
        lambda folder: configured(folder, quantization_config=[8]),
        "the weights are quantised (quantization_config), and a plan",
    ),
    "a config that is none": (
        lambda folder: configured(folder, num_attention_heads="many"),
        "config.json: transformers cannot build the model of it",
    ),
    "more choices than experts": (
        lambda folder: configured(folder, num_experts_per_tok=9),
        "config.json: a token chooses 9 experts (num_experts_per_tok), and there are only 8",
    ),
    "a family without an adapter": (
        lambda folder: configured(folder, model_type="llama"),
        "config.json: the family 'llama' has no adapter",
    ),
    "a damaged file": (damaged, "model.safetensors: cannot be read as safetensors"),
    "pickles": (only_pickles, "pytorch_model.bin: weights are read from safetensors alone"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "a model's folder has a config.json"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json, line 1, column 2: not valid JSON"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_folder_is_one_line_before_anything_is_read(tmp_path, fault):
    _, folder = saved(tmp_path)
    change, line = FAULTS[fault]
    change(folder)
    with mock.patch.object(Reader, "copy") as copy:
        assert line in refusal(load_model, folder)
    copy.assert_not_called()


def test_an_index_that_names_other_files(tmp_path):
    _, folder = saved(tmp_path, max_shard_size="30KB")
    index = json.loads((folder / INDEX).read_text())
    first = sorted(set(index["weight_map"].values()))[0]
    (folder / first).rename(folder / "away")
    assert f"names the file '{first}', which is not there" in refusal(load_model, folder)
    outside = dict.fromkeys(index["weight_map"], "../elsewhere.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": outside}))
    assert "'../elsewhere.safetensors', which is not there" in refusal(load_model, folder)
    (folder / INDEX).write_text("[]")
    assert "a JSON object {…} is needed" in refusal(load_model, folder)


def test_code_of_a_folder_never_runs(tmp_path):
    _, folder = saved(tmp_path / "model")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nMixtralConfig = MixtralForCausalLM = None\n")
    auto = {"AutoConfig": "evil.MixtralConfig", "AutoModelForCausalLM": "evil.MixtralForCausalLM"}
    load_model(configured(folder, auto_map=auto))
    assert not (tmp_path / "ran").exists()


# Plans that do not fit.


@pytest.mark.parametrize(
    ("layers", "experts", "gpus", "line"),
    [
        ((0, 2), 8, 1, "places the MoE layers 0, 2, and MixtralForCausalLM has 0, 1"),
        (tuple(range(60)), 8, 1, "places the MoE layers 0 … 59 (60), and MixtralForCausalLM has 0, 1"),
        ((0, 1), 7, 1, "places 7 experts a layer, MixtralForCausalLM has 8 in layer 0"),
        ((0, 1), 8, 2, "the plan is for 2 GPUs, and the process group has 1 rank"),
    ],
)
def test_a_plan_of_another_model_or_group(tmp_path, layers, experts, gpus, line):
    _, folder = saved(tmp_path)
    rows = tuple(tuple(tuple(part.tolist()) for part in np.array_split(np.arange(experts), gpus)) for _ in layers)
    plan = plan_at(Placement(experts=experts, experts_of_gpu=rows, model_layers=layers))
    with mock.patch.object(Reader, "copy") as copy:
        assert line in refusal(load_planned, folder, plan)
    copy.assert_not_called()


def test_a_plan_with_an_expert_that_is_nobodys():
    content = plan_of(model_of("mixtral"), 2).model_dump(mode="json")
    content["placement"]["experts_of_gpu"][1][0].remove(3)
    assert refusal(Plan.from_json, json.dumps(content), "plan.json") == "plan.json: placement: layer 1: expert 3 is on no GPU"


# Calls that a model under a plan cannot answer.


def test_a_batch_without_a_token_is_refused_before_any_exchange():
    model = apply_plan(model_of("mixtral"), plan_of(model_of("mixtral"), 1))
    for ids in (torch.zeros((0, 5), dtype=torch.int64), torch.zeros((1, 0), dtype=torch.int64)):
        assert "MixtralForCausalLM takes no batch without tokens" in refusal(model, ids)
        assert "takes no batch without tokens" in refusal(model, input_ids=ids)
    assert logits_of(model).isfinite().all()


def test_a_rank_saves_its_state_and_no_folder_with_its_experts_alone(tmp_path):
    plan = plan_of(model_of("mixtral"), 2)
    ranks = mock.patch("engine.runtime.apply.ranks_of", return_value=(None, 2, 0))
    with ranks, mock.patch("engine.runtime.layer.LiveExchange"):
        model, other = (apply_plan(model_of("mixtral"), plan) for _ in range(2))
    assert "would write the experts of one rank alone" in refusal(model.save_pretrained, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    for parameter in other.parameters():
        parameter.data.zero_()
    other.load_state_dict(model.state_dict())
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))


# Memory, and folders that may be opened.


@pytest.mark.parametrize("family", CONFIGS)
def test_predicted_bytes_are_those_of_the_tensors(family):
    model = model_of(family, tie_word_embeddings=True)
    memory = weight_memory(model, FAMILIES[family], None)
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    assert memory.of_rank.tolist() == [sum(tensor.nbytes for tensor in tensors)]
    check_plan(model, plan_of(model, 1), FAMILIES[family], FAMILIES[family].blocks(model))


def test_weights_that_do_not_fit_are_refused_before_anything_is_read(tmp_path):
    _, folder = saved(tmp_path)
    room = mock.Mock(available=100_000)
    with mock.patch.object(psutil, "virtual_memory", return_value=room), mock.patch.object(Reader, "copy") as copy:
        said = refusal(load_model, folder)
    assert said.startswith("the weights do not fit: rank 0 needs 0.00 GiB, and 0.00 GiB of the host may be used (95% of")
    copy.assert_not_called()


def test_loading_tells_how_far_it_is_and_stops(tmp_path):
    _, folder = saved(tmp_path)
    told = []
    load_model(folder, Loading(report=lambda share, line: told.append(share)))
    assert told == sorted(told) and told[-1] == 1.0 and len(told) > 20
    with pytest.raises(StoppedError):
        load_model(folder, Loading(stop=lambda: True))


def test_only_listed_folders_are_opened_from_outside(tmp_path, monkeypatch):
    (tmp_path / "models" / "one").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "models" / "link").symlink_to(tmp_path / "other")
    monkeypatch.delenv(SWITCH, raising=False)
    assert f"{SWITCH} lists (none is)" in refusal(listed, tmp_path / "models" / "one")
    monkeypatch.setenv(SWITCH, f"/nowhere:{tmp_path / 'models'}")
    assert listed(tmp_path / "models" / "one") == tmp_path / "models" / "one"
    for outside in (tmp_path / "other", tmp_path / "models" / "link", tmp_path / "models" / ".." / "other"):
        assert "models are opened from the folders that" in refusal(listed, outside)
    assert checkpoint.SWITCH == "SWITCHYARD_MODELS"
