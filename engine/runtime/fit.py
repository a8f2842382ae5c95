"""A plan and a model by its sizes alone: if the two fit, the memory that they take, and the parts of the plan that are not
followed. Needs no PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import InputError
from engine.plan import Placement, Plan
from engine.schema import Frozen


@dataclass(frozen=True)
class WeightMemory:
    """Bytes of the weights on each rank, rows of tokens and caches of attention left out.

    shared: parameters and buffers that every rank has
    expert: int64[layer]; those of one expert of each MoE layer
    held: int64[layer, rank]; experts that each rank holds
    largest: the largest tensor on its way from the file to its place
    """

    shared: int
    expert: np.ndarray
    held: np.ndarray
    largest: int

    @property
    def of_rank(self) -> np.ndarray:
        """int64[rank]: bytes that each rank keeps."""
        return self.shared + self.expert @ self.held

    @property
    def peak(self) -> np.ndarray:
        """int64[rank]: most bytes at once while weights load."""
        return self.of_rank + self.largest


class Weights(Frozen):
    """The sizes of a model's weights.

    layers: the decoder layers with experts
    experts: of each of them
    shared, largest: see `WeightMemory`
    expert: bytes of one expert of each of these layers
    """

    layers: tuple[int, ...]
    experts: tuple[int, ...]
    shared: int
    expert: tuple[int, ...]
    largest: int

    def memory(self, placement: Placement | None) -> WeightMemory:
        """The memory of the weights under a placement; None: with every expert on one rank."""
        if placement is None:
            held = np.array(self.experts)[:, None]
        else:
            held = np.array([[len(set(slots)) for slots in row] for row in placement.experts_of_gpu])
        return WeightMemory(self.shared, np.array(self.expert), held, self.largest)


def check_fit(plan: Plan, name: str, layers: Sequence[int], experts: Sequence[int]) -> None:
    """Raise InputError unless the plan's layers and experts are those of a model.

    name: of the model
    layers: its decoder layers with experts
    experts: of each of them
    """
    placement = plan.placement
    if placement.model_layers != tuple(layers):
        raise InputError(
            f"the plan {plan.name} places the MoE layers {_numbers(placement.model_layers)}, and {name} has {_numbers(layers)}"
        )
    for layer, count in zip(layers, experts, strict=True):
        if count != placement.experts:
            raise InputError(
                f"the plan {plan.name} places {placement.experts} experts a layer, {name} has {count} in layer {layer}"
            )


def _numbers(layers: Sequence[int]) -> str:
    """`1 … 60 (60)`, `0, 2, 3`."""
    if len(layers) > 4 and tuple(layers) == tuple(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]} … {layers[-1]} ({len(layers)})"
    return ", ".join(map(str, layers[:12])) + (f", … ({len(layers)})" if len(layers) > 12 else "")


def not_followed(plan: Plan) -> list[str]:
    """The parts of a plan that a live model does not carry out, one line each."""
    lines = {
        "execution context-coherent: run as vanilla, tokens return to their rank after every layer, for attention needs all of "
        "a sequence": plan.execution == "context-coherent",
        "a second model: only the first one is run": plan.placement_b is not None,
        "start of tokens: each rank runs the tokens that it is given": plan.token_gpus is not None,
        "scheduling at run time: the placement stays as it is": plan.reaction is not None,
        "overlaps of a training step: operators run in the model's own order": plan.overlap is not None,
        "priority on the network: all-reduces of gradients come after the backward pass": plan.priority is not None,
        "pacing: a shared order goes phase by phase, at the rates that ports have": plan.send_order.mode == "shared",
        "experts in the host's memory: all of a rank's are on its device": plan.offload is not None,
        "degree of the backward pass: it runs in the parts of the forward pass": plan.pipeline is not None
        and plan.pipeline.backward != plan.pipeline.forward,
    }
    return [line for line, applies in lines.items() if applies]
