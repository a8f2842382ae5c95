"""Recordings and plans of any size for launches. The GPU check imports this module on machines without pytest."""

import numpy as np

from engine.communication.order import order, random_order
from engine.model import MoEModel
from engine.plan import OrderMode, Placement, Plan, Schedule, SendOrder
from engine.result import Provenance
from engine.workload import RoutingTrace

MODES: tuple[OrderMode, ...] = ("matched", "shared", "sequential", "concurrent")
"""Orders in which a launch sends without nodes."""


def skewed(tokens: int, model: MoEModel, padding: float = 0.0) -> RoutingTrace:
    """Skewed routing in which the experts of a token differ. padding: share of tokens without a choice"""
    rng, experts = np.random.default_rng(7), model.experts
    keys = rng.random((tokens, len(model.moe_layers), experts)) ** (1 / np.arange(1, experts + 1))
    chosen = np.argsort(-keys, axis=-1)[:, :, : model.experts_per_token].astype(np.int16)
    chosen[rng.random(chosen.shape[:2]) < padding] = -1
    return RoutingTrace("made up", chosen, experts)


def blocks(model: MoEModel, gpus: int) -> Placement:
    """Blocks of neighbouring experts on GPUs, of sizes that differ by one at most."""
    slots = tuple(tuple(block.tolist()) for block in np.array_split(np.arange(model.experts), gpus))
    layers = model.moe_layers
    return Placement(experts=model.experts, experts_of_gpu=(slots,) * len(layers), model_layers=layers)


def plan_with(placement: Placement, **parts) -> Plan:
    """A plan with a placement. parts: other fields, by default a concurrent order"""
    about = {"name": "test", "send_order": SendOrder(mode="concurrent"), "provenance": Provenance(optimiser="test")}
    return Plan(placement=placement, **about | parts)


def plan_in(mode: OrderMode, trace: RoutingTrace, where: Placement, model: MoEModel) -> Plan:
    """A plan with an order for the traffic of `trace`, in 32-bit numbers."""
    size = model.model_copy(update={"dtype": "fp32"}).bytes_per_token
    traffic = trace.demand(where.gpus) @ where.share * size
    rate = np.linspace(1e9, 2e9, where.gpus)

    def scheduled(matrix: np.ndarray, seed: int) -> Schedule:
        if mode == "sequential":
            return random_order(matrix, seed)
        return order(matrix, rate, rate, mode).solution

    schedules = [] if mode == "concurrent" else [(scheduled(m, 0), scheduled(m.T, 1)) for m in traffic]
    send_order = SendOrder(mode=mode, dispatch=[out for out, _ in schedules], combine=[back for _, back in schedules])
    return plan_with(where, name=mode, send_order=send_order)


def coherent(plan: Plan) -> Plan:
    """The plan executed context-coherently."""
    return plan.model_copy(update={"name": f"coherent {plan.name}", "execution": "context-coherent"})


def beside(first: Plan, second: Plan) -> Plan:
    """A plan of two models from a plan of each."""
    name = f"{first.name} beside {second.name}"
    return first.model_copy(update={"name": name, "placement_b": second.placement, "send_order_b": second.send_order})
