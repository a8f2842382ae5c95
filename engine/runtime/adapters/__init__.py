"""The families of models that a plan can run, an adapter each.

adapter: the part that all adapters have in common, and blocks
families: those of transformers, by the `model_type` of their config
generic: a block of one's own
stack: the experts of a rank, cut out of a model's
"""

from torch import nn

from engine.errors import InputError
from engine.runtime.adapters.adapter import Adapter, Block
from engine.runtime.adapters.families import FAMILIES, Family
from engine.runtime.adapters.generic import Generic

NEEDS = (
    "where its MoE blocks are, how a rank's experts are cut out of them and computed, and the names of their tensors in a "
    "checkpoint: adapter=Generic(…) for a router with a list or stack of experts, or as in engine/runtime/adapters/families.py"
)
"""The knowledge that an adapter consists of, for a person who has none for a model."""


def adapter_of(model: nn.Module) -> Adapter:
    """The adapter of a model by the `model_type` of its config; raises InputError for a family that has none."""
    family = getattr(getattr(model, "config", None), "model_type", None)
    return family_of(family, type(model).__name__)


def family_of(family: object, where: str) -> Family:
    """The adapter of a `model_type`; raises InputError if there is none. where: the file or the model that has it"""
    if family in FAMILIES:
        return FAMILIES[family]
    named = f"the family {str(family)[:40]!r}" if family else "a model without a model_type"
    raise InputError(f"{where}: {named} has no adapter (there are {', '.join(FAMILIES)}). One has to say {NEEDS}")
