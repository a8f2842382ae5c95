"""PyTorch modules: the operator graph of a training step from the program that a module runs.

The module is traced with `torch.export` (nothing is executed, shapes only). What that refuses, experts in a Python loop
over the tokens that each got above all, is run once on the example and recorded (`make_fx`); the graph's name says which. The
program's calls become operators as follows.

* What is what is read off the module's path, or the weight's name: a component with "shared_expert" or "shared_mlp"; "expert";
  "attn" or "attention"; "router", "gating", or ending in "gate" or "wg"; "norm" or beginning with "ln"; ending in "head";
  "mlp", "ffn" or "feed_forward", in this order. `kind_of` overrides. Inside attention, products with weights are qkv in front
  of the scores and projection behind. Matrices that one batched product holds side by side are experts.
* Products with weights start an operator; those of the same input share it (q, k, v; gate and up). So do
  embedding, norms, additions of two operators' results (residual), and losses. All other work joins the operator whose
  result it reads; its `moved` is what it reads and writes from outside of its chain. Changes of shape, layout and dtype
  count nothing, nor does what depends on no weight and no floating-point input (masks, positions).
* Attention counts as two products with the scores written and read in between, though a fused kernel keeps these on the chip.
* Without a traced all-to-all, `dispatch` and `combine` are put where data enters and leaves the experts, with as many bytes as
  that data has; each GPU then keeps experts // gpus of the experts, and these get as many tokens as all GPUs send when
  all experts are equally popular. A traced `all_to_all_single` stands for itself, and the experts count as traced.
* Work in front of the dispatch that needs tokens and the gate's choice is an operator `encode`, of kind gate; work behind
  the combine is `aggregate`. Dense one-hot masks (GShard's einsums) are matrix products of a size with the experts', and
  the module does execute them: they are products of encode and aggregate, which the transformer graph, thinking of sparse
  kernels, does not have.
* Left out as in the transformer graph: weights of norms, biases, and other parameters that no product and no embedding reads.
* A module that computes no loss gets one, which reads its outputs and writes a 32-bit number for each of theirs.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import get_args

import torch

from engine.errors import InputError
from engine.formats.torch_program import Program, tensors_of, trace
from engine.overlap.calls import Call, Product, Read, family_of
from engine.overlap.lowering import lower
from engine.overlap.operator_graph import Kind, OperatorGraph, with_backward

VIEWS = {
    "view",
    "reshape",
    "_unsafe_view",
    "flatten",
    "unflatten",
    "transpose",
    "permute",
    "t",
    "mT",
    "movedim",
    "swapaxes",
    "unsqueeze",
    "squeeze",
    "expand",
    "expand_as",
    "slice",
    "select",
    "narrow",
    "chunk",
    "split",
    "split_with_sizes",
    "unbind",
    "getitem",
    "alias",
    "detach",
    "contiguous",
    "clone",
    "to",
    "_to_copy",
    "type_as",
    "float",
    "wait_tensor",
    "lift_fresh_copy",
}
CONSTANTS = ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "bernoulli")
LOOKUPS = ("index", "index_select", "gather", "embedding")
PRODUCTS = {
    "linear": (0, 1),
    "mm": (0, 1),
    "bmm": (0, 1),
    "matmul": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "mv": (0, 1),
    "_grouped_mm": (0, 1),
    "grouped_mm": (0, 1),
    "grouped_mm_fallback": (0, 1),
}
"""Which arguments are the factors."""

NEARLY_PRODUCTS = ("mm", "matmul", "conv", "attention", "lstm", "gru", "rnn", "bilinear", "tensordot", "addr", "dot")
"""In the name of a call that is no known product: counting it as element-wise work would be wrong."""


LayerOf = Callable[[str], int | None]


def layer_in_path(path: str) -> int | None:
    """The model layer a dotted module path lies in: its first number, those of experts left aside; None: in no layer."""
    outside = takewhile(lambda part: "expert" not in part.lower(), path.split("."))
    return next((int(part) for part in outside if part.isdigit()), None)


def read_module(
    module: torch.nn.Module,
    example: tuple[torch.Tensor, ...],
    *,
    gpus: int,
    layer_of: LayerOf = layer_in_path,
    kind_of: Mapping[str, Kind] | None = None,
    bytes_per_number: float | None = None,
    name: str | None = None,
) -> OperatorGraph:
    """The operators of one training step of a module on each of `gpus` GPUs.

    example: inputs of one GPU's size, on the module's device
    layer_of: model layer of a dotted module path, None outside of all layers
    kind_of: what a module is, by the beginning of its dotted path or of a parameter's name; the longest that fits counts
    bytes_per_number: of weights and activations; None: as the module has them

    Raises InputError when the module cannot be traced, or has shapes or calls that cannot be priced.
    """
    _check(module, example, gpus, kind_of)
    program, how = trace(module, example)
    reader = _Reader(module, layer_of, kind_of or {}, bytes_per_number)
    calls = reader.read(program)
    forward, tied = lower(calls, gpus)
    forward.graph["name"] = (name or f"{type(module).__name__} on each of {gpus} GPUs, {how}")[:120]
    return with_backward(forward, reader.number_bytes, tied)


def _check(module: torch.nn.Module, example: tuple, gpus: int, kind_of: Mapping[str, Kind] | None) -> None:
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"a torch.nn.Module is needed, not {type(module).__name__}")
    if not isinstance(example, tuple) or not all(isinstance(tensor, torch.Tensor) for tensor in example):
        raise InputError("the example inputs must be a tuple of tensors")
    if gpus < 1:
        raise InputError(f"gpus is {gpus}; at least 1 is needed")
    for path, kind in (kind_of or {}).items():
        if kind not in get_args(Kind):
            raise InputError(f"kind_of calls {path} a '{kind}'; known are {', '.join(get_args(Kind))}")


@dataclass(frozen=True)
class _Value:
    """What is known of a node's result.

    call: who made it, "" for an input; tensor: the node of which it is a view of full size
    weight: the parameter that it is or is part of, "" for activations; after: calls that chose the part
    part_of_stack: whether it is one of the matrices that the parameter holds
    """

    call: str
    tensor: str
    gradient: bool
    weight: str = ""
    after: tuple[Read, ...] = ()
    part_of_stack: bool = False


class _Reader:
    """Turns the nodes of a program into calls."""

    def __init__(
        self, module: torch.nn.Module, layer_of: LayerOf, kind_of: Mapping[str, Kind], number_bytes: float | None
    ) -> None:
        self.layer_of, self.kind_of, self.scale = layer_of, kind_of, number_bytes
        self.parameters = dict(module.named_parameters(remove_duplicate=False))
        first = next(iter(self.parameters.values()), None)
        self.number_bytes = number_bytes or (first.element_size() if first is not None else 4)
        self.canonical: dict[int, str] = {}
        self.values: dict[torch.fx.Node, _Value] = {}
        self.calls: list[Call] = []

    def read(self, program: Program) -> list[Call]:
        """The calls that lead to the loss, a loss among them, in program order. Raises InputError."""
        for node in program.graph.nodes:
            if node.op == "output":
                self.finish(
                    [all_input_node for all_input_node in node.all_input_nodes if all_input_node in self.values]
                )
            elif node.name in program.weights:
                name = program.weights[node.name]
                parameter = self.parameters[name]
                name = self.canonical.setdefault(id(parameter), name)
                self.values[node] = _Value("", name, parameter.requires_grad, name)
            elif node.name in program.inputs:
                if (tensors := tensors_of(node)) and tensors[0].is_floating_point():
                    self.values[node] = _Value("", node.name, True)
            elif node.op == "call_function":
                self.node(node)
        needed, kept = {self.calls[-1].name} if self.calls else set(), []
        for call in reversed(self.calls):
            if call.name in needed:
                kept.append(call)
                needed |= {read.call for read in call.reads}
        if not any(call.products and call.products[0].weight for call in kept):
            raise InputError("the module multiplies nothing by weights, so there is no training step to plan")
        return kept[::-1]

    def finish(self, outputs: list[torch.fx.Node]) -> None:
        """End with the loss."""
        losses = [node for node in outputs if math.prod(tensors_of(node)[0].shape) == 1 and self.values[node].call]
        ends = losses[:1] or outputs
        last = self.values[ends[0]].call if losses else ""
        if last and any("loss" in call.op or "log_softmax" in call.op for call in self.calls):
            self.calls.append(self.calls.pop(next(at for at, call in enumerate(self.calls) if call.name == last)))
            return
        reads = tuple(self.read_of(node) for node in ends if self.values[node].call)
        numbers = sum(math.prod(tensor.shape) for node in ends for tensor in tensors_of(node))
        self.calls.append(Call("loss", "loss", "", "loss", None, reads, 4.0 * numbers, True))

    def node(self, node: torch.fx.Node) -> None:
        operands = [all_input_node for all_input_node in node.all_input_nodes if all_input_node in self.values]
        op, tensors = _op(node), tensors_of(node)
        if not operands or not tensors or op in CONSTANTS:
            return
        first = self.values[operands[0]]
        if op in VIEWS:
            whole = _numbers(node) == _numbers(operands[0])
            chosen = op in ("select", "unbind", "getitem") and bool(first.weight)
            self.values[node] = _Value(
                first.call,
                first.tensor if whole else node.name,
                first.gradient and op != "detach",
                first.weight,
                first.after,
                first.part_of_stack or (chosen and not whole),
            )
            return
        weights = [operand for operand in operands if self.values[operand].weight]
        data = [operand for operand in operands if operand not in weights]
        if op in LOOKUPS and first.weight and (op == "embedding" or (not data and len(tensors[0].shape) > 1)):
            self.add(
                node, (), first.gradient, moved=self.bytes(node), table=first.weight, numbers=_numbers(operands[0])
            )
        elif not data or (op in LOOKUPS and first.weight):
            # Part of a weight, picked by what `data` says (the matrices of each token's expert), or made from weights only.
            after = tuple(self.read_of(operand) for operand in data)
            self.values[node] = _Value(
                "", node.name, first.gradient, self.values[weights[0]].weight, after, op in LOOKUPS
            )
        else:
            products = self.products(node, op)
            reads = [self.read_of(operand) for operand in data] + [
                read for weight in weights for read in self.values[weight].after
            ]
            gradient = tensors[0].is_floating_point() and any(self.values[operand].gradient for operand in operands)
            moved = 0.0
            if op == "scaled_dot_product_attention":
                moved = 2 * products[0].count * products[0].m * products[0].n * self.item_bytes(tensors[0])
            elif "loss" in op:
                moved = 4.0 * _numbers(operands[0])  # the probabilities, in 32 bits
            self.add(node, tuple(reads), gradient, moved=moved, products=products)

    def add(self, node: torch.fx.Node, reads: tuple[Read, ...], gradient: bool, **more) -> None:
        path = _path(node)
        products = more.get("products", ())
        named = products[0].weight if products and products[0].weight else more.get("table") or path
        layer = self.layer_of(path)
        call = Call(
            node.name,
            _op(node),
            path,
            self.family(path, named),
            self.layer_of(named) if layer is None else layer,
            reads,
            self.bytes(node),
            gradient,
            **more,
        )
        self.calls.append(call)
        self.values[node] = _Value(node.name, node.name, gradient)

    def family(self, path: str, named: str) -> Kind | None:
        """What the user says of a module or parameter, else what its name says."""
        names = (path, named)
        fits = [prefix for prefix in self.kind_of for name in names if name == prefix or name.startswith(f"{prefix}.")]
        return self.kind_of[max(fits, key=len)] if fits else family_of(named) or family_of(path)

    def read_of(self, node: torch.fx.Node) -> Read:
        value = self.values[node]
        return Read(
            value.call, value.tensor, self.bytes(node), value.gradient and tensors_of(node)[0].is_floating_point()
        )

    def bytes(self, node: torch.fx.Node) -> float:
        return float(sum(math.prod(tensor.shape) * self.item_bytes(tensor) for tensor in tensors_of(node)))

    def item_bytes(self, tensor: torch.Tensor) -> float:
        return self.scale if self.scale and tensor.is_floating_point() else tensor.element_size()

    def products(self, node: torch.fx.Node, op: str) -> tuple[Product, ...]:
        """The products of a call; empty for element-wise work. Raises InputError for one of unknown size."""
        if op == "scaled_dot_product_attention":
            (*outer, rows, width), (*_, length, _), (*_, value) = (
                tensors_of(operand)[0].shape for operand in node.args[:3]
            )
            batch = math.prod(outer)
            return Product(batch, rows, length, width), Product(batch, rows, value, length)
        if op == "einsum":
            return self.einsum(node)
        if op not in PRODUCTS:
            if any(part in op for part in NEARLY_PRODUCTS):
                raise InputError(
                    f"{_path(node) or 'the module'} calls {node.target}, whose size Switchyard does not know; write it as a "
                    "linear layer, matmul, einsum or scaled_dot_product_attention"
                )
            return ()
        left, right = (node.args[place] for place in PRODUCTS[op])
        a, b = (tuple(tensors_of(operand)[0].shape) for operand in (left, right))
        if op == "linear":
            return self.product(node, left, right, 1, math.prod(a[:-1]), b[0] if len(b) > 1 else 1, a[-1])
        if "grouped_mm" in op:
            return self.product(node, left, right, 1, math.prod(a[:-1]), b[-1], a[-1])
        columns = b[-1] if len(b) > 1 else 1
        rows, outer = (a[-2] if len(a) > 1 else 1), math.prod(tensors_of(node)[0].shape[:-2])
        if self.is_weight(right) and len(b) <= 2:  # one matrix for all batches
            return self.product(node, left, right, 1, math.prod(a[:-1]), columns, a[-1])
        if op in ("mm", "addmm", "mv"):
            outer = 1
        return self.product(node, left, right, outer, rows, columns, a[-1])

    def einsum(self, node: torch.fx.Node) -> tuple[Product, ...]:
        equation, factors = node.args[0].replace(" ", ""), node.args[1]
        if len(factors) == 1:
            return ()
        inputs, _, output = equation.partition("->")
        letters = inputs.split(",")
        if len(factors) > 2 or "." in equation or "->" not in equation:
            raise InputError(
                f"{_path(node) or 'the module'} has an einsum '{equation}'; only two factors, with all letters and '->' "
                "written out, are understood"
            )
        size = {
            letter: length
            for names, factor in zip(letters, factors, strict=True)
            for letter, length in zip(names, tensors_of(factor)[0].shape, strict=True)
        }

        def count(chosen: set[str]) -> int:
            return math.prod(size[letter] for letter in chosen)

        left, right, kept = set(letters[0]), set(letters[1]), set(output)
        if not (inner := (left & right) - kept):
            return ()
        rows, columns = count((left - right) & kept), count((right - left) & kept)
        return self.product(node, *factors, count(left & right & kept), rows, columns, count(inner))

    def product(
        self, node: torch.fx.Node, left: torch.fx.Node, right: torch.fx.Node, count: int, m: int, n: int, k: int
    ) -> tuple[Product, ...]:
        """A product, its weights on the right."""
        if self.is_weight(left) and not self.is_weight(right):
            left, right, m, n = right, left, n, m
        if not self.is_weight(right):
            return (Product(count, m, n, k),)
        weight, data = self.values[right], self.values.get(left)
        batched = count > 1 or "grouped_mm" in _op(node) or weight.part_of_stack
        held = self.parameters[weight.weight].shape
        experts = held[0] if batched and len(held) > 2 else 0
        return (Product(count, m, n, k, weight.weight, weight.tensor, experts, data.tensor if data else node.name),)

    def is_weight(self, node: object) -> bool:
        return isinstance(node, torch.fx.Node) and node in self.values and bool(self.values[node].weight)


def _op(node: torch.fx.Node) -> str:
    """`linear` for aten.linear.default."""
    target = node.target
    if hasattr(target, "_schema"):
        return target._schema.name.partition("::")[2]
    return getattr(target, "__name__", str(target))


def _path(node: torch.fx.Node) -> str:
    """The dotted path of the innermost module whose code the node is from; "" for the outermost."""
    stack = node.meta.get("nn_module_stack") or {}
    return list(stack.values())[-1][0] if stack else ""


def _numbers(node: torch.fx.Node) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors_of(node))
