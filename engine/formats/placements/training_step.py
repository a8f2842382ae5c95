"""A plan for a training step as its user sets it: flags of Megatron-LM, a configuration of DeepSpeed, arguments of Tutel's
layers, and in words the parts that these have no knob for.

Names and meanings as read in Megatron-LM at d98e8a6 (Megatron-Core 0.20.0), DeepSpeed 0.19.8 and Tutel at 82af7aa (0.3).
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

from engine.errors import InputError
from engine.formats.placements.export import Export, check_model, refuse_uneven
from engine.model import MoEModel
from engine.plan import Plan, expert_groups
from engine.training import TrainingStep
from engine.units import size

StepTarget = Literal["megatron-step", "deepspeed", "tutel"]


def write_step(target: StepTarget, plan: Plan, model: MoEModel, step: TrainingStep | None, name: str) -> Export:
    """The file of a framework, the lines that use it, and notes on the rest of the plan. Raises InputError for a plan that is
    not for training, or has experts where the framework cannot place them.

    target: the framework
    name: the file's, as it stands in the lines
    """
    if plan.priority is None or step is None:
        raise InputError(f"{target} takes a plan for a training step; {plan.name} is for inference")
    placement = plan.placement
    check_model(placement, model)
    refuse_uneven(placement, NAMES[target])
    groups = expert_groups(placement)
    if not placement.single and groups == 1:
        raise InputError(f"{NAMES[target]} holds every expert once in each group of ranks; plan without other replicas")
    content, lines, notes = _WRITERS[target](plan, model, step, name, placement.gpus // groups)
    return Export({name: content.encode()}, lines, (*notes, *_for_all(plan, groups)))


Parts = tuple[str, tuple[str, ...], tuple[str, ...]]


def _megatron(plan: Plan, model: MoEModel, step: TrainingStep, name: str, together: int) -> Parts:
    """Flags, one a line; Megatron-LM's command line takes the file by `$(cat FILE)`."""
    priority, dense = plan.priority, set(model.dense_layers)
    pattern = "".join(str([int(layer not in dense) for layer in range(model.layers)]).split())
    flags = [
        f"--num-layers {model.layers}",
        f"--hidden-size {model.d_model}",
        f"--num-attention-heads {step.heads}",
        f"--ffn-hidden-size {step.dense_d_ff}",
        f"--micro-batch-size {step.batch}",
        f"--seq-length {step.sequence_length}",
        f"--num-experts {model.experts}",
        f"--moe-layer-freq {pattern}",
        f"--moe-ffn-hidden-size {model.d_ff}",
        f"--moe-router-topk {model.experts_per_token}",
        f"--expert-model-parallel-size {together}",
        "--moe-token-dispatcher-type alltoall",
        "--overlap-grad-reduce",
        f"--ddp-bucket-size {_numbers(plan, model)}",
    ]
    if model.shared_experts:
        flags.append(f"--moe-shared-expert-intermediate-size {model.shared_width}")
    if step.capacity_factor:
        flags.append(f"--moe-expert-capacity-factor {step.capacity_factor:g}")
        if not _irregular(plan):
            flags.append("--moe-pad-expert-input-to-capacity")
    if priority.policy == "priority":
        flags.append("--high-priority-stream-groups ep")
    if not step.tied_embeddings:
        flags.append("--untie-embeddings-and-output-weights")
    if model.ffn_matrices == 3:
        flags.append("--swiglu")
    if model.dtype in ("bf16", "fp16"):
        flags.append(f"--{model.dtype}")
    notes = [f"--ddp-bucket-size counts numbers, here of {model.bytes_per_number:g} bytes; gradients in fp32 have 4 each"]
    if priority.policy == "priority":
        notes.append(
            "--high-priority-stream-groups ep is the nearest to all-to-alls first: their kernels start before others that "
            "wait, but no all-reduce that runs is held back"
        )
    elif priority.policy != "fair":
        notes.append(f"not carried: the order of the network ({priority.policy})")
    if plan.overlap is not None and plan.overlap.under:
        notes.append(
            "not carried: the weight gradients under each all-to-all; the nearest is --overlap-moe-expert-parallel-comm with "
            "--delay-wgrad-compute, which needs two micro-batches or more, bf16 or fp16, and expert parallelism"
        )
    notes += _cuts(plan, "Megatron-Core cuts no tokens of a micro-batch within a layer")
    return "\n".join(flags) + "\n", (f"torchrun … pretrain_gpt.py $(cat {name})",), tuple(notes)


def _deepspeed(plan: Plan, model: MoEModel, step: TrainingStep, name: str, together: int) -> Parts:
    """The JSON of `--deepspeed_config`, and the arguments of `deepspeed.moe.layer.MoE`."""
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": step.batch}
    if model.dtype in ("bf16", "fp16"):
        config[model.dtype] = {"enabled": True}
    config["zero_optimization"] = {"stage": 1, "overlap_comm": True, "reduce_bucket_size": _numbers(plan, model)}
    layer = {"hidden_size": model.d_model, "num_experts": model.experts, "ep_size": together, "k": model.experts_per_token}
    layer |= {"capacity_factor": step.capacity_factor or 1.0, "drop_tokens": bool(step.capacity_factor)}
    notes = [
        f"reduce_bucket_size counts numbers, here of {model.bytes_per_number:g} bytes",
        "overlap_comm needs ZeRO, at stage 1 the least: it shards the optimizer's state, which the plan's memory counts whole",
    ]
    if _irregular(plan):
        notes.append("not carried: only real tokens in all-to-alls; DeepSpeed's buffers are filled up to the capacity")
    if plan.priority.policy != "fair":
        notes.append(f"not carried: the order of the network ({plan.priority.policy}); DeepSpeed has no knob for it")
    if plan.overlap is not None and plan.overlap.under:
        notes.append("not carried: the weight gradients under each all-to-all")
    notes += _cuts(plan, "DeepSpeed's MoE layer is not cut")
    arguments = ", ".join(f"{key}={value}" for key, value in layer.items())
    lines = (f"--deepspeed --deepspeed_config {name}", f"deepspeed.moe.layer.MoE(expert=…, {arguments})")
    return json.dumps(config, indent=2) + "\n", lines, tuple(notes)


def _tutel(plan: Plan, model: MoEModel, step: TrainingStep, name: str, together: int) -> Parts:
    """JSON, the arguments of `tutel.moe.moe_layer` for every MoE layer, in their order."""
    layers, pipeline = len(model.moe_layers), plan.pipeline
    forward = (1,) * layers if pipeline is None else pipeline.forward
    each = [
        {
            "gate_type": {"type": "top", "k": model.experts_per_token, "capacity_factor": step.capacity_factor},
            "model_dim": model.d_model,
            "experts": {
                "type": "ffn",
                "num_experts_per_device": model.experts // together,
                "hidden_size_per_expert": model.d_ff,
            },
            "a2a_ffn_overlap_degree": degree,
            "batch_prioritized_routing": step.gate == "batch-prioritised",
        }
        for degree in forward
    ]
    notes = []
    if pipeline is not None and pipeline.backward != forward:
        notes.append("not carried: other degrees of the backward pass, which Tutel cuts as the forward pass")
    if pipeline is not None and pipeline.order == "interleaved":
        notes.append("not carried: dispatches and combines in turn; Tutel starts every dispatch first")
    if together < plan.placement.gpus:
        notes.append(f"give moe_layer(group=…) the process group of {together} neighbouring ranks that a rank belongs to")
    if model.ffn_matrices == 3:
        notes.append("Tutel's own ffn has two matrices: replace it by experts of your own with a gate")
    if _irregular(plan):
        notes.append("not carried: only real tokens in all-to-alls; Tutel's buffers are filled up to the capacity")
    if plan.overlap is not None and plan.overlap.under:
        notes.append("not carried: the weight gradients under each all-to-all")
    notes += _cuts(plan, None)
    notes.append(
        f"not carried: all-reduces {_reduced(plan)}, which are PyTorch's or yours: DistributedDataParallel takes bucket_cap_mb="
        f"{max(1, round((plan.priority.bucket or plan.priority.micro_op) / 2**20))}"
    )
    if plan.priority.policy != "fair":
        notes.append(f"not carried: the order of the network ({plan.priority.policy}); Tutel has no knob for it")
    lines = (f"tutel.moe.moe_layer(**json.load(open({name!r}))[l])  # l: the MoE layer, from 0",)
    return json.dumps(each, indent=2) + "\n", lines, tuple(notes)


NAMES: dict[StepTarget, str] = {"megatron-step": "Megatron-Core", "deepspeed": "DeepSpeed", "tutel": "Tutel"}
_WRITERS: dict[StepTarget, Callable[[Plan, MoEModel, TrainingStep, str, int], Parts]] = {
    "megatron-step": _megatron,
    "deepspeed": _deepspeed,
    "tutel": _tutel,
}
STEP_TARGETS: tuple[StepTarget, ...] = tuple(_WRITERS)


def _for_all(plan: Plan, groups: int) -> Iterator[str]:
    placement = plan.placement
    together, whole = placement.gpus // groups, list(range(placement.experts))
    if any([expert for held in row[:together] for expert in sorted(held)] != whole for row in placement.experts_of_gpu):
        yield "ranks hold contiguous blocks of experts: reorder the checkpoint by the permutation that 'megatron' exports"
    if groups > 1:
        yield f"{groups} groups of {together} ranks hold all experts each, whose gradients are added up between the groups"
    if plan.offload is not None:
        yield f"not carried: {plan.offload.experts} experts of each GPU and layer in the host's memory"
    if plan.priority.micro_op is not None:
        yield f"not carried: gradients cut into pieces of {size(plan.priority.micro_op)}: frameworks only fuse them, up to it"


def _reduced(plan: Plan) -> str:
    limit = plan.priority.bucket
    return f"in buckets of {size(limit)}" if limit is not None else f"in pieces of {size(plan.priority.micro_op)}"


def _numbers(plan: Plan, model: MoEModel) -> int:
    """Gradients of a bucket, or of a piece."""
    return max(1, round((plan.priority.bucket or plan.priority.micro_op) / model.bytes_per_number))


def _irregular(plan: Plan) -> bool:
    return plan.overlap is not None and plan.overlap.irregular


def _cuts(plan: Plan, why: str | None) -> Iterator[str]:
    """Cuts of operators that a framework does not make. why: its limit; None: it cuts MoE layers, but nothing else."""
    most = 1 if plan.pipeline is None else max(plan.pipeline.forward + plan.pipeline.backward)
    if why is not None and most > 1:
        yield f"not carried: MoE layers in up to {most} parts: {why}"
    if plan.overlap is not None and plan.overlap.ranges:
        yield f"not carried: {len(plan.overlap.ranges)} stretches of the forward pass, cut into parts"
