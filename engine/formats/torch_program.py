"""PyTorch modules traced: their program as a graph of single calls with shapes."""

import contextlib
import io
from dataclasses import dataclass, field

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from engine.errors import InputError


@dataclass
class Program:
    """A traced graph; weights: parameter names by node name; inputs: names of the nodes that are the module's inputs."""

    graph: torch.fx.Graph
    weights: dict[str, str] = field(default_factory=dict)
    inputs: set[str] = field(default_factory=set)

    def data_dependent(self) -> bool:
        """Whether some size is known only when it runs."""
        sizes = (size for node in self.graph.nodes for tensor in tensors_of(node) for size in tensor.shape)
        return any(not isinstance(size, int) for size in sizes)


def tensors_of(node: torch.fx.Node) -> list[torch.Tensor]:
    """The results of a node, with shapes and dtypes but perhaps no contents."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return [tensor for tensor in values if isinstance(tensor, torch.Tensor)]


def trace(module: torch.nn.Module, example: tuple[torch.Tensor, ...]) -> tuple[Program, str]:
    """The program of a module with shapes, and how it was got."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # where it prints, before it refuses, all of the program so far
            exported = torch.export.export(module, example)
        program = Program(exported.run_decompositions({}).graph_module.graph)
        signature = exported.graph_signature
        program.weights = dict(signature.inputs_to_parameters)
        program.inputs = {user_input for user_input in signature.user_inputs if isinstance(user_input, str)}
        if not program.data_dependent():
            return program, "traced by torch.export"
        refused = "the sizes of its tensors depend on their contents"
    except Exception as error:  # torch.export raises whatever the module's code or any part of the tracer raises
        refused = " ".join(str(error).split())[:200] or type(error).__name__
    try:
        return _recorded(module, example), "recorded from one run"
    except Exception as error:  # as above
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(
            f"{type(module).__name__} cannot be traced: torch.export says: {refused}; running it on the example says: {why}. "
            "Give the experts a capacity, so that all shapes are fixed, or a grouped product; or describe the model by its "
            "sizes and use the transformer graph"
        ) from None


def _recorded(module: torch.nn.Module, example: tuple[torch.Tensor, ...]) -> Program:
    """The calls that a run on the example makes, Python loops unrolled. Whatever a forward pass changes in the
    module, this one changes too."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}

    def run(*inputs: torch.Tensor) -> object:
        return module(*inputs)

    run._orig_mod = module  # what make_fx records the module's paths by
    graph_module = make_fx(
        run, tracing_mode="real", pre_dispatch=True, record_module_stack=True, _error_on_data_dependent_ops=False
    )(*example)
    program = Program(graph_module.graph)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            program.inputs.add(node.name)
        elif node.op == "get_attr":
            value = _attribute(graph_module, node.target)
            if (known := names.get(id(value))) is not None:
                program.weights[node.name] = known
    return program


def _attribute(module: torch.nn.Module, target: str) -> object:
    value: object = module
    for part in target.split("."):
        value = getattr(value, part)
    return value
