"""Schedules of training steps as flags and arguments of frameworks.

Names as read in Megatron-LM at d98e8a6 (its own parser takes the file), DeepSpeed 0.19.8 and Tutel at 82af7aa.
"""

import argparse
import json
import shlex

import pytest

from engine.errors import InputError
from engine.formats.placements import write_placement
from engine.formats.placements.export import Export
from engine.formats.placements.training_step import STEP_TARGETS, write_step
from engine.model import MoEModel
from engine.plan import Overlap, PartitionRange, Pipeline, Placement, Plan, Priority
from engine.training import TrainingStep
from tests.cases.refusals import refusal
from tests.cases.steps import MODEL, STEP, plan_of

NUMBERS = (
    *("num-layers", "hidden-size", "num-attention-heads", "ffn-hidden-size", "micro-batch-size", "seq-length", "num-experts"),
    *("moe-ffn-hidden-size", "moe-router-topk", "expert-model-parallel-size", "ddp-bucket-size"),
    "moe-shared-expert-intermediate-size",
)
TEXTS = ["moe-layer-freq", "moe-token-dispatcher-type"]
SWITCHES = (
    *("overlap-grad-reduce", "moe-pad-expert-input-to-capacity", "untie-embeddings-and-output-weights"),
    *("swiglu", "bf16", "fp16"),
)
HALVES = Placement(
    experts=8, experts_of_gpu=(((0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 3), (4, 5, 6, 7)),) * 2, model_layers=(1, 2)
)
FAIR = Priority(policy="fair", bucket=25e6)
RANGE = PartitionRange(first="1.dispatch", last="2.dispatch", parts=2)
LANCET = Overlap(ranges=(RANGE,), under={"dw.head": "dx.2.combine"}, irregular=True)


def megatron(text: str) -> argparse.Namespace:
    """The flags as Megatron-LM's parser types them."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in NUMBERS:
        parser.add_argument(f"--{name}", type=int)
    for name in TEXTS:
        parser.add_argument(f"--{name}")
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--moe-expert-capacity-factor", type=float)
    parser.add_argument("--high-priority-stream-groups", nargs="*", default=[])
    return parser.parse_args(shlex.split(text))


def written(target: str, plan: Plan, model: MoEModel = MODEL, step: TrainingStep = STEP) -> tuple[str, Export]:
    export = write_step(target, plan, model, step, "step.out")
    return export.files["step.out"].decode(), export


def test_megatron_flags_say_the_step_and_its_groups():
    said = megatron(written("megatron-step", plan_of(HALVES))[0])
    assert (said.num_layers, said.hidden_size, said.num_experts, said.moe_router_topk) == (3, 32, 8, 2)
    assert (said.micro_batch_size, said.seq_length, said.num_attention_heads, said.ffn_hidden_size) == (4, 6, 4, 40)
    assert json.loads(said.moe_layer_freq) == [0, 1, 1] and said.expert_model_parallel_size == 2
    assert said.overlap_grad_reduce and said.ddp_bucket_size == 750, "3 kB of fp32"
    assert said.high_priority_stream_groups == ["ep"] and said.swiglu and not said.bf16
    assert said.moe_expert_capacity_factor == 1 and said.moe_pad_expert_input_to_capacity


@pytest.mark.parametrize(
    ("plan", "step", "padded", "capacity"),
    [
        (plan_of(priority=FAIR), STEP, True, 1.0),
        (plan_of(priority=FAIR, overlap=LANCET), STEP, False, 1.0),
        (plan_of(priority=FAIR), STEP.model_copy(update={"capacity_factor": 0.0}), False, None),
    ],
)
def test_megatron_pads_buffers_only_where_the_plan_does(plan, step, padded, capacity):
    said = megatron(written("megatron-step", plan, step=step)[0])
    assert (said.moe_pad_expert_input_to_capacity, said.moe_expert_capacity_factor) == (padded, capacity)
    assert said.high_priority_stream_groups == [] and said.ddp_bucket_size == 6_250_000


def test_deepspeed_gets_its_buckets_in_numbers_and_its_layer():
    text, export = written("deepspeed", plan_of(HALVES, FAIR), MODEL.model_copy(update={"dtype": "bf16"}))
    assert json.loads(text) == {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 12_500_000},
    }
    assert "--deepspeed_config step.out" in export.lines[0]
    assert "num_experts=8, ep_size=2, k=2, capacity_factor=1.0, drop_tokens=True" in export.lines[1]


def test_tutel_gets_every_layers_degree():
    pipeline = Pipeline(forward=(2, 4), backward=(2, 2))
    text, export = written("tutel", plan_of(HALVES, FAIR, pipeline=pipeline))
    layers = json.loads(text)
    assert [layer["a2a_ffn_overlap_degree"] for layer in layers] == [2, 4]
    assert layers[0]["experts"] == {"type": "ffn", "num_experts_per_device": 4, "hidden_size_per_expert": 24}
    assert layers[0]["gate_type"] == {"type": "top", "k": 2, "capacity_factor": 1.0} and layers[0]["model_dim"] == 32
    notes = " ".join(export.notes)
    assert "other degrees of the backward pass" in notes and "2 neighbouring ranks" in notes and "bucket_cap_mb=24" in notes


@pytest.mark.parametrize("target", STEP_TARGETS)
def test_all_else_in_a_plan_is_named(target):
    cut = Pipeline(forward=(3, 3), backward=(3, 3))
    for plan, says in (
        (plan_of(priority=FAIR, overlap=LANCET), "1 stretches of the forward pass"),
        (plan_of(priority=FAIR, overlap=LANCET), "weight gradients under each all-to-all"),
        (plan_of(), "gradients cut into pieces of 3 kB"),
        (plan_of(HALVES), "2 groups of 2 ranks hold all experts"),
        (plan_of(priority=Priority(policy="fixed", bucket=1e6)), "the order of the network (fixed)"),
        (plan_of(priority=FAIR, pipeline=cut), "" if target == "tutel" else "MoE layers in up to 3 parts"),
    ):
        assert says in " ".join(written(target, plan)[1].notes)


def test_plans_go_only_where_they_can_run():
    plan = plan_of()
    for target in ("sglang", "vllm", "trtllm"):
        assert "is for a training step" in refusal(write_placement, target, plan, MODEL)
    inference = plan.model_copy(update={"priority": None})
    uneven = Placement(experts=8, experts_of_gpu=(((0, 1, 2, 3, 4), (5, 6, 7)),) * 2, model_layers=(1, 2))
    for target in STEP_TARGETS:
        assert "is for inference" in refusal(write_step, target, inference, MODEL, STEP, "x")
        with pytest.raises(InputError, match="as many slots on every GPU"):
            write_step(target, plan_of(uneven), MODEL, STEP, "x")
