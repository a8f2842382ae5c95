"""Small models of every family that a plan can run, with random weights, for tests that run real models."""

from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import logging as transformers_logging

from engine.costs import Datasheet
from engine.model import MoEModel
from engine.plan import Plan
from engine.problem import make_problem
from engine.routing_recorder import RoutingRecorder
from engine.runtime.adapters import adapter_of
from engine.systems import run, system_named
from engine.workload import RoutingTrace
from tests.cases.two_nodes import cluster_of

transformers_logging.set_verbosity_error()

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK = LATENT | {
    **{"num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4},
    **{"topk_group": 2, "moe_intermediate_size": 24, "intermediate_size": 40, "routed_scaling_factor": 1.5},
    "num_key_value_heads": 4,
}
QWEN = {"num_experts": 8, "moe_intermediate_size": 24, "intermediate_size": 40, "decoder_sparse_step": 1, "mlp_only_layers": []}
CONFIGS = {
    "mixtral": {"num_local_experts": 8, "intermediate_size": 24},
    # Layer 1 of 4 is dense.
    "qwen2_moe": QWEN | {"num_hidden_layers": 4, "mlp_only_layers": [1], "shared_expert_intermediate_size": 24},
    "qwen3_moe": QWEN | {"norm_topk_prob": True, "head_dim": 8},
    "deepseek_v2": DEEPSEEK | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": DEEPSEEK | {"norm_topk_prob": True},
    "olmoe": {"num_experts": 8, "intermediate_size": 24},
    "gpt_oss": {"num_local_experts": 8, "intermediate_size": 24, "head_dim": 8, "sliding_window": 16},
}
"""By `model_type`, with 8 experts of 24."""


TEXTS = ["w5 w17 w3", "w8", "w41 w42 w43 w44 w45 w46 w47"]
"""Texts for a folder that `saved` has written."""


def config_of(family: str, **changed):
    """The small config of a family."""
    return AutoConfig.for_model(family, **(SMALL | CONFIGS[family] | changed))


def model_of(family: str, **changed) -> torch.nn.Module:
    """A small model of a family, the same every time. Its weights are ten times as far apart as a fresh model's, so that
    experts matter: with the usual 0.02 logits would be the same to four digits with the wrong experts."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family, initializer_range=0.2, **changed)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases, which begin as zeros, and norms, which begin as ones.
            if parameter.dim() == 1 or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.copy_(torch.rand_like(buffer))
    return model


def saved(folder: Path, family: str = "deepseek_v3", **config) -> Path:
    """A folder with a small model and a tokenizer of the words w0 to w95."""
    model_of(family, **config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(96)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference of two tensors, relative to the largest number of the second."""
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours - theirs).abs().max() / theirs.abs().max())


@cache
def tokens_of(batch: int = 3, length: int = 7, seed: int = 1) -> torch.Tensor:
    """int64[batch, length] without padding."""
    return torch.randint(1, SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


def recorded(model: torch.nn.Module) -> RoutingTrace:
    """The routing of some tokens in a model."""
    with RoutingRecorder(model) as recorder, torch.no_grad():
        model(input_ids=tokens_of(8, 16, seed=3))
    return recorder.trace("tiny")


def plan_of(model: torch.nn.Module, gpus: int, system: str = "linear", **options) -> Plan:
    """The plan of a system for a model's own routing. options: of the system"""
    layers = tuple(block.layer for block in adapter_of(model).blocks(model))
    sizes = {"layers": model.config.num_hidden_layers, "experts": 8, "experts_per_token": 2, "d_model": 32, "d_ff": 24}
    dense = tuple(sorted(set(range(sizes["layers"])) - set(layers)))
    of_model = MoEModel(name="tiny", dense_layers=dense, dtype="fp32", **sizes)
    problem = make_problem(recorded(model), cluster_of(*[(1, None)] * gpus), of_model, Datasheet())
    return run(system_named(system, problem), problem, options).result.solution
