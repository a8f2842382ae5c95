"""The calls of a traced program: what each computes, reads and writes, and what it is part of. See
`engine.formats.torch_graph`, which makes them, and `engine.overlap.lowering`, which puts them together to operators."""

import re
from dataclasses import dataclass

from engine.overlap.operator_graph import Kind


@dataclass(frozen=True)
class Read:
    """What a call reads. call: who made it, "" for an input of the program; tensor: name of the tensor, the same for all its
    views of full size; gradient: whether a gradient flows back."""

    call: str
    tensor: str
    bytes: float
    gradient: bool


@dataclass(frozen=True)
class Product:
    """`count` products [m, k] × [k, n]. weight: name of the parameter, "" when both factors are activations; part: which part
    of it; experts: how many experts' matrices the parameter holds, 0 when it is one matrix; data: the tensor multiplied."""

    count: int
    m: int
    n: int
    k: int
    weight: str = ""
    part: str = ""
    experts: int = 0
    data: str = ""


@dataclass(frozen=True)
class Call:
    """One call that does work. family: what the module or the user says it is part of, see `family_of`; layer: None outside
    of all layers; writes: bytes of its result; moved: bytes besides what it reads and writes; products: of attention two,
    else at most one; table, numbers: of an embedding, the name of its parameter and how many numbers that has"""

    name: str
    op: str
    path: str
    family: Kind | None
    layer: int | None
    reads: tuple[Read, ...]
    writes: float
    gradient: bool
    moved: float = 0
    products: tuple[Product, ...] = ()
    table: str = ""
    numbers: int = 0


FAMILIES: tuple[tuple[Kind, str], ...] = (
    ("shared_experts", r"shared_(expert|mlp)"),
    ("experts", r"expert"),
    ("attention", r"^(?!.*norm).*(attn|attention)"),
    ("gate", r"router|gating|(^|_)(gate|wg)$"),
    ("layer_norm", r"norm|^ln(_|\d|$)"),
    ("projection", r"head$|^unembed"),
    ("dense_ffn", r"mlp|ffn|feed_?forward"),
)
"""What a component of a module's path says, the most telling first."""


def family_of(path: str) -> Kind | None:
    """What a dotted module path or parameter name says about what is in it; None when it says nothing."""
    parts = path.lower().split(".")
    return next((kind for kind, pattern in FAMILIES if any(re.search(pattern, part) for part in parts)), None)


def slot_of(weight: str) -> str:
    """The name of an expert's parameter without the number of the expert, the first one inside of the experts' module."""
    return re.sub(r"(expert[^.]*\.)\d+(?=\.)", r"\1*", weight, count=1, flags=re.IGNORECASE)
