"""A block of one's own: a router and its experts, as a list of modules or as stacked parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from torch import Tensor, nn

from engine.errors import InputError
from engine.runtime.adapters.adapter import Adapter, Block
from engine.runtime.adapters.stack import CutStack, Gate, ListStack, cut

Choose = Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]
"""From a block and its tokens [token, d_model] the chosen experts int64[token, k] and their weights [token, k]."""


def chosen_by_router(block: nn.Module, tokens: Tensor, router: str = "router") -> tuple[Tensor, Tensor]:
    """The choice that a router returns: among its outputs the integers [token, k], and the numbers of the same shape.

    Raises InputError if it returns no such pair, as one that returns logits alone: whether their softmax is taken before or
    after the top k, and normalised, is the model's.
    """
    output = getattr(block, router)(tokens)
    parts = [part for part in (output if isinstance(output, tuple | list) else [output]) if isinstance(part, Tensor)]
    for chosen in (part for part in parts if not part.dtype.is_floating_point and part.dim() == 2):
        for weight in (part for part in parts if part.dtype.is_floating_point and part.shape == chosen.shape):
            return chosen.long(), weight
    raise InputError(
        f"the router {router} of {type(block).__name__} does not return chosen experts int64[token, k] with weights of "
        "the same shape; give the adapter choose=…, a function of the block and its tokens that does"
    )


@dataclass(frozen=True)
class Generic(Adapter):
    """Blocks of one's own class.

    block: the class of the MoE blocks
    experts_name, router_name: of the block's children
    choose: the routing of a block with a list of experts; default: what its router returns
    inward, outward: stacked parameters of `experts`, [expert, out, in], which the block calls with (x, chosen, weight)
    gate: the function between their two products
    transposed: True if they are [expert, in, out]
    """

    block: type[nn.Module]
    experts_name: str = "experts"
    router_name: str = "router"
    choose: Choose | None = None
    inward: str = "gate_up_proj"
    outward: str = "down_proj"
    gate: Gate | None = None
    transposed: bool = False

    def is_block(self, module: nn.Module) -> bool:
        return isinstance(module, self.block)

    def experts(self, block: Block) -> int:
        found = self._found(block)
        return len(found) if isinstance(found, nn.ModuleList) else len(getattr(found, self.inward))

    def stack(self, block: Block, held: Sequence[int]) -> CutStack | ListStack:
        found = self._found(block)
        if isinstance(found, nn.ModuleList):
            return ListStack(found, held)
        if self.gate is None:
            raise InputError(
                f"experts of {type(block.module).__name__}: give the adapter gate=…, the function between their products"
            )
        names = [name for name in (self.inward, self.outward) for name in (name, f"{name}_bias") if hasattr(found, name)]
        return CutStack(cut(found, names, held), self.inward, self.outward, self.gate, self.transposed)

    def replace(self, block: Block, planned: nn.Module) -> None:
        """A stack is called by its block, which stays. A list is called in a loop by its block's `forward`, which the planned
        experts therefore take over; whatever else that computes would be lost, so a block with other parts is refused."""
        if isinstance(self._found(block), nn.ModuleList):
            others = [
                name for name, child in block.module.named_children() if name not in (self.experts_name, self.router_name)
            ]
            own = [name for name, _ in block.module.named_parameters(recurse=False)]
            if more := list(chain(others, own)):
                raise InputError(
                    f"{block.name}: besides a router and a list of experts the block has {', '.join(more)}, which a plan would "
                    "leave out; let the block call its experts as experts(x, chosen, weight), and give their stack"
                )
            choose = self.choose or partial(chosen_by_router, router=self.router_name)
            block.module.forward = partial(_forward, block.module, planned, choose)
        setattr(block.module, self.experts_name, planned)

    def _found(self, block: Block) -> nn.Module:
        found = getattr(block.module, self.experts_name, None)
        if isinstance(found, nn.ModuleList) or (hasattr(found, self.inward) and hasattr(found, self.outward)):
            return found
        raise InputError(
            f"{block.name}: an adapter needs `{self.experts_name}` to be a ModuleList, or a module with parameters "
            f"`{self.inward}` and `{self.outward}` stacked by expert"
        )


def _forward(block: nn.Module, planned: nn.Module, choose: Choose, x: Tensor) -> Tensor:
    """[..., d_model]: the block's output for x [..., d_model], its experts' weighted sum."""
    tokens = x.reshape(-1, x.shape[-1])
    return planned(tokens, *choose(block, tokens)).reshape(x.shape)
