"""The operators of a step's graph as nodes with tensors on one rank."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.launch.rank.context import RankContext
from engine.launch.step import nodes as step_nodes
from engine.launch.step.layout import Choice, Layout
from engine.launch.step.operators import causal_mask
from engine.launch.step.weights import Weight
from engine.model import MoEModel
from engine.overlap.operator_graph import Operator, OperatorGraph
from engine.overlap.transformer import EMBEDDING, HEAD
from engine.plan import Plan
from engine.training import TrainingStep


def text(context: RankContext, rank: int) -> tuple[Tensor, Tensor]:
    """(ids, targets) int64[token] of a rank: random, every token's target is the next one of its sequence."""
    step = context.instructions.step
    generator = torch.Generator().manual_seed(context.instructions.seed * 1_000_003 + rank)
    ids = torch.randint(step.vocabulary, (step.batch, step.sequence_length + 1), generator=generator).to(context.device)
    return ids[:, :-1].reshape(-1), ids[:, 1:].reshape(-1)


def layouts_of(
    plan: Plan, step: TrainingStep, choices: Sequence[Choice], groups: int, rank: int, device: torch.device
) -> dict[int, Layout]:
    """{model layer: exchange} of every MoE layer. Layers that route alike share one."""
    size = plan.placement.gpus // groups
    group = list(range(rank // size * size, rank // size * size + size))
    filled = plan.overlap is None or not plan.overlap.irregular
    layouts: dict[int, Layout] = {}
    known: dict[tuple, Layout] = {}
    for layer, row, choice in zip(plan.placement.model_layers, plan.placement.experts_of_gpu, choices, strict=True):
        hosted = tuple(tuple(sorted(set(row[member]))) for member in group)
        key = (hosted, id(choice))
        if key not in known:
            known[key] = Layout(choice, group, [list(experts) for experts in hosted], rank, filled, step.batch, device)
        layouts[layer] = known[key]
    return layouts


class Builder:
    """Makes the nodes of one rank."""

    def __init__(self, context: RankContext, weights: dict[str, Weight], layouts: dict[int, Layout]) -> None:
        self.context, self.weights, self.layouts = context, weights, layouts
        self.model: MoEModel = context.instructions.model
        self.step: TrainingStep = context.instructions.step
        self.gated = self.model.ffn_matrices == 3
        self.ids, self.targets = text(context, context.rank)
        self.mask = causal_mask(self.step.sequence_length, context.dtype, context.device)
        self.tokens = self.step.tokens * context.instructions.ranks

    def nodes(self, graph: OperatorGraph) -> dict[str, step_nodes.Node]:
        """All nodes by name, in program order. An operator's inputs are the dependencies that a gradient flows back to;
        results that it merely waits for (a dispatch for the gate's choice) come from elsewhere."""
        read: dict[str, list[str]] = {}
        for dependency in graph.dependencies:
            if dependency.gradient:
                read.setdefault(dependency.after, []).append(dependency.before)
        nodes: dict[str, step_nodes.Node] = {}
        for operator in graph.of_phase("forward"):
            inputs = [nodes[name] for name in read.get(operator.name, ())]
            node = nodes[operator.name] = self.node(operator, inputs)
            for before, gradient in zip(node.inputs, node.gradients, strict=True):
                before.readers.append(gradient)
        return nodes

    def node(self, operator: Operator, inputs: list[step_nodes.Node]) -> step_nodes.Node:
        name, kind, weight = operator.name, operator.kind, self.weights.get(operator.name)
        layout = self.layouts.get(operator.layer)
        if kind in ("dense_ffn", "shared_experts", "experts"):
            parameters = (name, inputs, weight) if kind != "experts" else (name, inputs, weight, layout)
            if name.endswith("_up"):
                return step_nodes.Linear(*parameters) if kind != "experts" else step_nodes.Experts(*parameters)
            return (step_nodes.Activated if kind != "experts" else step_nodes.ActivatedExperts)(*parameters, gated=self.gated)
        if kind in ("qkv", "projection"):
            tied = name == HEAD and self.step.tied_embeddings
            return step_nodes.Linear(name, inputs, self.weights[EMBEDDING] if tied else weight, transposed=tied)
        made: dict[str, Callable[[], step_nodes.Node]] = {
            "embedding": lambda: step_nodes.Embedding(name, weight, self.ids),
            "layer_norm": lambda: step_nodes.LayerNorm(name, inputs),
            "attention": lambda: step_nodes.Attention(name, inputs, self.mask, self.step.heads),
            "residual": lambda: step_nodes.Residual(name, inputs),
            "gate": lambda: step_nodes.Gate(name, inputs, weight, layout.chosen),
            "dispatch": lambda: step_nodes.Dispatch(name, inputs, layout),
            "combine": lambda: step_nodes.Combine(name, inputs, layout),
            "aggregate": lambda: step_nodes.Aggregate(
                name, sorted(inputs, key=lambda node: isinstance(node, step_nodes.Gate)), layout
            ),
            "loss": lambda: step_nodes.Loss(name, inputs, self.targets, self.tokens),
        }
        return made[kind]()
