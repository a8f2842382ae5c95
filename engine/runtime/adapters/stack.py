"""The experts that a rank holds of somebody else's model: parameters cut out of its own ones, slot after slot, under their
names and in their layout, so that checkpoints, optimisers and gradients stay comparable.

Both kinds have parameters [slot, …] alone, and return [row, d_model] of rows ordered by slot and the rows of each slot.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from engine.errors import InputError
from engine.runtime.experts import pay_grouped

Gate = Callable[[Tensor], Tensor]
"""[row, n] between the two products of an expert: [row, d_ff]."""


def cut(experts: nn.Module, names: Iterable[str], held: Sequence[int]) -> dict[str, nn.Parameter]:
    """Copies of parameters [expert, …] of a module, with the held experts alone, in the order of the slots: [slot, …]. On the
    device of the module's own; on "meta" without numbers."""
    wholes = {name: getattr(experts, name) for name in names}
    index = {device: torch.tensor(held, dtype=torch.int64, device=device) for device in {one.device for one in wholes.values()}}
    return {
        name: nn.Parameter(whole.detach().index_select(0, index[whole.device]), whole.requires_grad)
        for name, whole in wholes.items()
    }


class CutStack(nn.Module):
    """Experts of two products with something between them.

    parameters: by name, [slot, …]: `inward` and `outward`, and as `NAME_bias` the biases of those that have one
    inward, outward: names of the matrices
    gate: the function between the two products
    transposed: True for matrices [slot, in, out]; False for [slot, out, in], as `torch.nn.Linear` has them
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], inward: str, outward: str, gate: Gate, transposed: bool) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)
        self._names, self._gate, self._transposed = (inward, outward), gate, transposed

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """[row, d_model]: the outputs of the experts.

        rows: [row, d_model], ordered by slot
        counts: rows of each slot
        """
        if not len(rows):
            return rows
        matrices = [getattr(self, name) if self._transposed else getattr(self, name).transpose(1, 2) for name in self._names]
        biases = [getattr(self, f"{name}_bias", None) for name in self._names]
        if pay_grouped(rows, counts, [width for matrix in matrices for width in matrix.shape[1:]]):
            number = torch.tensor(counts, device=rows.device)
            ends = number.cumsum(0, dtype=torch.int32)
            for matrix, bias, gate in zip(matrices, biases, (self._gate, None), strict=True):
                rows = nn.functional.grouped_mm(rows, matrix, offs=ends)
                rows = rows if bias is None else rows + bias.repeat_interleave(number, dim=0, output_size=len(rows))
                rows = rows if gate is None else gate(rows)
            return rows
        # Each expert's rows through both products, so that what stands between them stays in the caches.
        slots = [[None] * len(counts) if each is None else each.unbind() for each in (*matrices, *biases)]
        outputs = []
        for part, inward, outward, inward_bias, outward_bias in zip(rows.split(counts), *slots, strict=True):
            if len(part):
                outputs.append(_product(self._gate(_product(part, inward, inward_bias)), outward, outward_bias))
        return torch.cat(outputs)


def _product(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """[row, out]: rows times one expert's matrix, plus its bias if it has one."""
    return rows @ matrix if bias is None else torch.addmm(bias, rows, matrix)


class ListStack(nn.Module):
    """Experts that are modules of their own, all of one kind. Their parameters are stacked, and one module without numbers
    computes with each slot's in turn.

    experts: all of the block, each of which takes [row, d_model]
    held: those of this rank, in the order of the slots
    """

    def __init__(self, experts: Sequence[nn.Module], held: Sequence[int]) -> None:
        super().__init__()
        first = experts[0]
        if any(True for _ in first.buffers()):
            raise InputError(f"experts of the class {type(first).__name__} have buffers, which a plan cannot place")
        template = copy.deepcopy(first).to("meta")
        self._template = (template,)  # in a tuple: its parameters are none of this module's
        shapes = {name: parameter.shape for name, parameter in first.named_parameters()}
        for expert in experts:
            if type(expert) is not type(first) or {name: one.shape for name, one in expert.named_parameters()} != shapes:
                raise InputError(
                    f"experts of the class {type(first).__name__} differ in class or sizes; a plan needs them alike"
                )
        for name, parameter in first.named_parameters():
            own = [experts[expert].get_parameter(name).detach() for expert in held]
            stacked = torch.stack(own) if own else parameter.detach().new_empty((0, *parameter.shape))
            self.register_parameter(_flat(name), nn.Parameter(stacked, parameter.requires_grad))

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """[row, d_model]: the outputs of the experts. rows: [row, d_model], ordered by slot; counts: rows of each slot"""
        (template,) = self._template
        template.train(self.training)
        names = [name for name, _ in template.named_parameters()]
        outputs = []
        for slot, part in enumerate(rows.split(counts)):
            if len(part):
                outputs.append(functional_call(template, {name: getattr(self, _flat(name))[slot] for name in names}, (part,)))
        return torch.cat(outputs) if outputs else rows


def _flat(name: str) -> str:
    """A parameter's name without dots, which names of a module's own parameters cannot have; of each name another."""
    return name.replace("_", "__").replace(".", "_")
