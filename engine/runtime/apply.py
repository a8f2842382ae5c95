"""A plan applied to a person's own PyTorch model: its experts where the plan puts them, its rows in the plan's order."""

import logging
from functools import wraps
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from engine.errors import InputError
from engine.plan import Plan
from engine.runtime.adapters import Adapter, Block, adapter_of
from engine.runtime.adapters.families import Family
from engine.runtime.exchange.links import Tiers
from engine.runtime.fit import check_fit, not_followed
from engine.runtime.layer import PlannedExperts
from engine.runtime.layer_plan import LayerPlan, layer_plans
from engine.runtime.ranks import among_ranks, ranks_of

Model = TypeVar("Model", bound=nn.Module)
_log = logging.getLogger("switchyard.runtime")


class Planned(NamedTuple):
    """An MoE block under a plan. stack: the experts that this rank holds of it"""

    block: Block
    way: LayerPlan
    stack: nn.Module


def apply_plan(
    model: Model,
    plan: Plan,
    group: dist.ProcessGroup | None = None,
    *,
    adapter: Adapter | None = None,
    tiers: Tiers | None = None,
) -> Model:
    """Run a model's MoE blocks under a plan from now on: this rank keeps the experts that the plan puts on it, and the memory
    of all others is free. Every rank of the group calls it, and then the model, with sequences of its own.

    model: as it is on every rank, with all experts
    plan: of the model's MoE layers, for as many GPUs as the group has ranks
    group: default: all ranks of the job if torch.distributed is initialised, else this process alone
    adapter: of a family that is not known; default: by the model's config
    tiers: the nodes of the ranks, for plans with two-tier orders or `node` travel

    Returns the same model. Raises InputError, before anything is changed, if the plan is not one of this model and group.
    """
    if any(isinstance(module, PlannedExperts) for module in model.modules()):
        raise InputError(f"{type(model).__name__} runs under a plan already: exchange_plan takes it to another one")
    adapter = adapter or adapter_of(model)
    check_plan(model, plan, adapter, adapter.blocks(model))
    place_experts(model, plan, group, adapter, tiers)
    return model


def place_experts(
    model: nn.Module, plan: Plan, group: dist.ProcessGroup | None, adapter: Adapter, tiers: Tiers | None = None
) -> list[Planned]:
    """`apply_plan` with a plan that is the model's, and the blocks for those who fill their weights; on the "meta" device there
    are none yet."""
    group, ranks, rank = ranks_of(group)
    blocks, ways = adapter.blocks(model), layer_plans(plan, ranks, rank, tiers)
    placed = []
    for block, way in zip(blocks, ways, strict=True):
        stack = adapter.stack(block, way.held)
        # One after another: the block's own experts are freed before the next ones are copied.
        adapter.replace(block, PlannedExperts(stack, way, group).train(block.module.training))
        placed.append(Planned(block, way, stack))
    if isinstance(adapter, Family):
        model.register_forward_pre_hook(_refuse_nothing, with_kwargs=True)
    if group is not None and ranks > 1 and hasattr(model, "generate"):
        _generate_together(model, ranks)
    if ranks > 1 and hasattr(model, "save_pretrained"):
        model.save_pretrained = _refuse_to_save
    if rank == 0:
        say_not_followed(plan)
    return placed


def say_not_followed(plan: Plan) -> None:
    """Log the parts of a plan that a live model does not carry out."""
    for line in not_followed(plan):
        _log.warning("plan %s on a live model: %s", plan.name, line)


def check_plan(model: nn.Module, plan: Plan, adapter: Adapter, blocks: list[Block]) -> None:
    """Raise InputError unless the plan's layers and experts are the model's."""
    check_fit(plan, type(model).__name__, [block.layer for block in blocks], list(map(adapter.experts, blocks)))


def _generate_together(model: nn.Module, ranks: int) -> None:
    """Let `generate` go on until the sequences of all ranks have ended: a rank that is done still has experts that others send
    tokens to. transformers does so with `synced_gpus`, among all ranks of the job."""
    generate = model.generate

    @wraps(generate)
    def together(*inputs: object, **options: object) -> object:
        if dist.get_world_size() != ranks:
            raise InputError(
                f"generate() goes on until all {dist.get_world_size()} ranks of the job are done, and the plan's group has "
                f"{ranks} of them: call the model itself, every rank equally often"
            )
        with among_ranks():
            return generate(*inputs, **{"synced_gpus": True} | options)

    model.generate = together


def _refuse_nothing(model: nn.Module, inputs: tuple, named: dict[str, object]) -> None:
    """Raise InputError for a batch without a token, which attention in transformers cannot reshape."""
    given = (*inputs[:1], named.get("input_ids"), named.get("inputs_embeds"))
    if any(isinstance(tensor, Tensor) and not tensor.numel() for tensor in given):
        raise InputError(
            f"{type(model).__name__} takes no batch without tokens: a rank that has none calls it with one token of any kind, "
            "and drops the answer"
        )


def _refuse_to_save(*_: object, **__: object) -> None:
    """`save_pretrained` of a rank, which would leave a folder without the experts of the other ranks."""
    raise InputError(
        "save_pretrained() would write the experts of one rank alone: save the state_dict() of each, which a model under the "
        "same plan takes again"
    )
