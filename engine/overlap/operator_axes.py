"""The axes along which the operators of an MoE transformer can be cut, and the ranges of operators that can be.

Lancet §5.2 and figures 4 and 8, §2.3 for the gates. Activations count as matrices, tokens in rows, whole sequences
next to each other: axis 0 is the batch, axis 1 the features.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from engine.errors import InputError
from engine.overlap.partition_axes import Axis, AxisConstraint, AxisProblem, partition_axes
from engine.result import Ints

WHOLE, BATCH, FEATURES = -1, 0, 1
CAPACITY, IRREGULAR = "capacity", "irregular"
"""Equal slots of every expert's buffer, and the tokens of some sequences wherever they are in it (figure 5)."""

ACTIVATION: tuple[Axis, ...] = (BATCH, FEATURES, IRREGULAR, CAPACITY)
WEIGHT: tuple[Axis, ...] = (WHOLE, FEATURES)

FLOW: dict[str, tuple[tuple[str, ...], str]] = {
    "embedding": (("tokens",), "stream"),
    "layer_norm": (("stream",), "normed"),
    "qkv": (("normed", "weight"), "heads"),
    "attention": (("heads",), "mixed"),
    "projection": (("mixed", "weight"), "branch"),
    "residual": (("stream", "branch"), "stream"),
    "dense_ffn": (("normed",), "branch"),
    "gate": (("normed",), "routed"),
    "dispatch": (("routed",), "routed"),
    "experts": (("routed",), "routed"),
    "combine": (("routed",), "routed"),
    "aggregate": (("routed",), "branch"),
    "shared_experts": (("normed",), "shared"),
    "loss": (("branch",), "value"),
}
"""The tensors that each operator reads, and the one it writes. A residual also adds the shared experts' output if there is
one. dispatch and combine are the two all-to-alls, aggregate brings the tokens back into order (the paper's gather). The head
in front of the loss counts as a projection: that it reads a layer norm does not change its axes."""

GATES: dict[str, bool] = {"switch": True, "top-k": True, "random": True, "hash": True, "batch-prioritised": False}
"""True for a gate that can decide on some sequences without the others, with capacity passed on from part to part.

top-k: when a token takes all its experts before the next token does; a gate that serves the first choices of the whole
batch before any second one cannot (see `capacity`), and is to be treated as batch-prioritised.
"""


def constraint_of(kind: str, gate: str = "switch", only_experts: bool = False) -> tuple[tuple[Axis, ...], ...]:
    """The combinations of axes an operator allows: of the tensors it reads, in the order of `FLOW`, then of its output.

    Every combination makes parts of the output, from which it can be put together; none: the operator cannot be cut.

    only_experts: True if the range has nothing but all-to-alls and experts. Then the buffers are cut into equal slots, as
        Tutel does; in any other range only the irregular cut leads back to whole sequences.

    Raises InputError for an operator or a gate that is not known.
    """
    if kind not in FLOW:
        raise InputError(f"there is no operator '{kind}' (there are: {', '.join(FLOW)})")
    if gate not in GATES:
        raise InputError(f"there is no gate '{gate}' (there are: {', '.join(GATES)})")
    if kind in ("qkv", "projection"):
        # The paper's matrix product: rows of the activations, or columns of the weights.
        return ((BATCH, WHOLE, BATCH), (WHOLE, FEATURES, FEATURES))
    if kind == "residual":
        return ((BATCH, BATCH, BATCH), (FEATURES, FEATURES, FEATURES))
    if kind == "gate":
        # A gate that looks at the whole batch is not cut: its range starts behind it, at the dispatch (figure 4c).
        return ((BATCH, IRREGULAR),) if GATES[gate] else ()
    if kind in ("dispatch", "experts", "combine"):
        axis = CAPACITY if only_experts else IRREGULAR
        return ((axis, axis),)
    if kind == "aggregate":
        return ((IRREGULAR, BATCH),)
    if kind == "loss":
        return ()  # one number of the whole batch
    # Layer norm and the feed-forward pair mix the features, attention the tokens of a sequence.
    return ((BATCH, BATCH),)


def range_problem(kinds: Sequence[str], gate: str = "switch") -> AxisProblem:
    """The axes that the tensors of a range can be cut along; tensors are named `name.version`, inputs have version 0.

    A weight that every part uses whole is not an input that is cut; an activation must be, except under a product with a
    weight that is cut. kinds: the operators of the range in the order of the chain.
    """
    version: dict[str, int] = {}
    domains: dict[str, tuple[Axis, ...]] = {}
    constraints = []
    only_experts = set(kinds) <= {"dispatch", "experts", "combine"}
    shared = False

    def tensor(name: str) -> str:
        versioned = f"{name}.{version.setdefault(name, 0)}"
        domains[versioned] = WEIGHT if name == "weight" else (*ACTIVATION, WHOLE)
        return versioned

    for kind in kinds:
        allowed = constraint_of(kind, gate, only_experts)
        reads, writes = FLOW[kind]
        inputs = [tensor(name) for name in reads]
        if kind == "residual" and shared:
            inputs.append(tensor("shared"))
            allowed = tuple((*combination, combination[-1]) for combination in allowed)
        shared = kind == "shared_experts" or (shared and kind != "residual")
        if "weight" in reads:
            version["weight"] += 1
        version[writes] = version.get(writes, 0) + 1
        constraints.append(AxisConstraint((*inputs, tensor(writes)), allowed))
    return AxisProblem(domains, tuple(constraints))


def range_axes(kinds: Sequence[str], gate: str = "switch") -> dict[str, Axis] | None:
    """An axis for every tensor of a range of operators, None if the range cannot be cut."""
    return partition_axes(range_problem(kinds, gate)).solution


@lru_cache(maxsize=4096)
def _can_be_cut(kinds: tuple[str, ...], gate: str) -> bool:
    return range_axes(kinds, gate) is not None


def range_is_valid(kinds: Sequence[str], gate: str = "switch") -> bool:
    """True if a range of operators can be cut into parts."""
    return _can_be_cut(tuple(kinds), gate)


def latest_last(kinds: Sequence[str], gate: str = "switch") -> Ints:
    """int64[op], the last operator up to which a range that starts here can be cut; before the start if not at all.

    A range that can be cut can also be cut when operators are left out at either end. So from the first conflict
    behind an operator one looks for the last start that still runs into it, by bisection both times.
    """
    ops, first = len(kinds), 0
    latest = np.full(ops, ops - 1)
    while first < ops:
        conflict = first + bisect_left(
            range(first, ops), True, key=lambda last, first=first: not range_is_valid(kinds[first : last + 1], gate)
        )
        if conflict == ops:
            break
        free = first + bisect_left(
            range(first, conflict + 1), True, key=lambda start, end=conflict + 1: range_is_valid(kinds[start:end], gate)
        )
        latest[first:free] = conflict - 1
        first = free
    return latest
