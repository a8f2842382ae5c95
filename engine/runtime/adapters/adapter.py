"""An adapter: all that a plan has to know of a family of models to run it.

It says where the MoE blocks are and which decoder layer each is, takes the experts of a rank out of a live block, knows their
arithmetic, and knows the names of their tensors in a checkpoint. The router, its normalisation, group limits and biases and the
shared experts stay the model's own code.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from engine.errors import InputError

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True)
class Block:
    """An MoE block of a model.

    name: of the module, as in `named_modules`
    layer: its decoder layer, counted over dense ones too
    module: the block, which has the router and the experts
    """

    name: str
    layer: int
    module: nn.Module


class Adapter(ABC):
    """The knowledge of one family."""

    @abstractmethod
    def is_block(self, module: nn.Module) -> bool:
        """True if this module of the model is an MoE block."""

    @abstractmethod
    def experts(self, block: Block) -> int:
        """The number of logical experts of a block that is as the model has it."""

    @abstractmethod
    def stack(self, block: Block, held: Sequence[int]) -> nn.Module:
        """A copy of these experts of a block, in the order of the slots, see `engine.runtime.adapters.stack`."""

    @abstractmethod
    def replace(self, block: Block, planned: nn.Module) -> None:
        """Put `planned`, called with (x [token, d_model], chosen int64[token, k], weight [token, k]), in the place of the
        block's experts."""

    def blocks(self, model: nn.Module) -> list[Block]:
        """The MoE blocks of a model, in the order of their layers. Raises InputError if there are none, or if it cannot be told
        which layer one is."""
        found = []
        for name, module in model.named_modules():
            if not self.is_block(module):
                continue
            # The first number in the name counts decoder layers: model.layers.3.mlp.
            number = _NUMBER.search(name)
            if number is None:
                raise InputError(f"the MoE block {name or type(module).__name__} has no number of its layer in its name")
            found.append(Block(name, int(number[1]), module))
        layers = [block.layer for block in found]
        if not found:
            raise InputError(f"{type(model).__name__} has no MoE block that a plan could place")
        if len(set(layers)) < len(layers):
            twice = next(layer for layer in layers if layers.count(layer) > 1)
            raise InputError(f"{type(model).__name__} has several MoE blocks in layer {twice}; a plan places one a layer")
        return sorted(found, key=lambda block: block.layer)
