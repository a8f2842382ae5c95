"""The operator graph of a training step: computations and transfers with their sizes, and their dependencies.

Every operator of the forward pass has up to two in the backward pass: dX, the gradient of its input, which the operators
before it wait for, and dW, the gradient of its weights, which only the update waits for (Lancet §2.3). The program order is
the forward pass, then the backward pass in reverse, every dW just before its dX, as automatic differentiation emits both at
once, then all-reduces and the update.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from engine.errors import InputError
from engine.schema import Frozen

if TYPE_CHECKING:
    import networkx as nx

Kind = Literal[
    "embedding",
    "layer_norm",
    "qkv",
    "attention",
    "projection",
    "residual",
    "dense_ffn",
    "gate",
    "dispatch",
    "experts",
    "combine",
    "aggregate",
    "shared_experts",
    "loss",
    "gradient",
    "update",
]
Phase = Literal["forward", "dx", "dw", "all_reduce", "update"]


class Gemm(Frozen):
    """`count` products C[m, n] = A[m, k] B[k, n], one kernel each.

    tokens: the dimension that counts tokens, which gets shorter when the operator is cut
    """

    count: int = Field(default=1, ge=1)
    m: int = Field(ge=1)
    n: int = Field(ge=1)
    k: int = Field(ge=1)
    tokens: Literal["m", "k"] = "m"


class Operator(Frozen):
    """One instruction of the step, as every GPU executes it.

    layer: model layer; the embedding counts to the first, head and loss to the last
    gemms: matrix products
    moved: bytes through the GPU's memory besides those of the products
    sent: bytes in a GPU's buffer of an all-to-all or all-reduce
    parameters: of a forward operator, numbers of its weights on this GPU
    seconds: measured time, which then counts instead of any cost model's (Lancet §3 profiles its operators so)
    """

    name: str = Field(min_length=1, max_length=200)
    kind: Kind
    phase: Phase
    layer: int = Field(ge=0)
    gemms: tuple[Gemm, ...] = ()
    moved: float = Field(default=0, ge=0)
    sent: float = Field(default=0, ge=0)
    parameters: int = Field(default=0, ge=0)
    seconds: float | None = Field(default=None, ge=0)

    @property
    def network(self) -> bool:
        """True if it runs on the network."""
        return self.kind in ("dispatch", "combine", "gradient")


class Dependency(Frozen):
    """`after` reads the output of `before`.

    gradient: True if a gradient flows back along it (none flows through the choice of an expert)
    """

    before: str
    after: str
    gradient: bool = True


class OperatorGraph(Frozen):
    """All operators in program order, with their dependencies. Checked: names differ, every dependency points forwards."""

    name: str = Field(min_length=1, max_length=120)
    operators: tuple[Operator, ...] = Field(min_length=1, max_length=200_000)
    dependencies: tuple[Dependency, ...] = ()

    @model_validator(mode="after")
    def _ordered(self) -> "OperatorGraph":
        place = {operator.name: index for index, operator in enumerate(self.operators)}
        if len(place) < len(self.operators):
            names = [operator.name for operator in self.operators]
            raise ValueError(f"two operators are called '{next(name for name in names if names.count(name) > 1)}'")
        for dependency in self.dependencies:
            for end in (dependency.before, dependency.after):
                if end not in place:
                    raise ValueError(f"a dependency names '{end}', which is no operator")
            if place[dependency.before] >= place[dependency.after]:
                raise ValueError(f"'{dependency.after}' needs '{dependency.before}', but is listed before it")
        reduced = {dependency.after for dependency in self.dependencies}
        for operator in self.operators:
            for kind, phase in (("gradient", "all_reduce"), ("update", "update")):
                if (operator.kind == kind) != (operator.phase == phase):
                    raise ValueError(
                        f"'{operator.name}' is of kind {operator.kind} in phase {operator.phase}, but kind {kind} "
                        f"and phase {phase} belong together"
                    )
            if operator.phase == "all_reduce" and operator.name not in reduced:
                raise ValueError(f"the all-reduce '{operator.name}' needs no operator; name the one that makes the gradient")
        return self

    def graph(self) -> "nx.DiGraph":
        """The graph as networkx has it: nodes by name with the attribute `operator`, edges with `gradient`."""
        import networkx as nx

        graph = nx.DiGraph(name=self.name)
        graph.add_nodes_from((operator.name, {"operator": operator}) for operator in self.operators)
        graph.add_edges_from(
            (dependency.before, dependency.after, {"gradient": dependency.gradient}) for dependency in self.dependencies
        )
        return graph

    @classmethod
    def of(cls, graph: "nx.DiGraph") -> "OperatorGraph":
        """The graph that `graph()` described; the order of its nodes is the program order."""
        operators = tuple(operator for _, operator in graph.nodes(data="operator"))
        dependencies = tuple(
            Dependency(before=before, after=after, gradient=gradient)
            for before, after, gradient in graph.edges(data="gradient", default=True)
        )
        return cls(name=graph.name or "operators", operators=operators, dependencies=dependencies)

    def of_phase(self, *phases: Phase) -> tuple[Operator, ...]:
        """The operators of some phases, in program order."""
        return tuple(operator for operator in self.operators if operator.phase in phases)


UPDATE_BYTES = 20
"""Bytes moved for each number by SGD with momentum in 32 bits: read gradient, momentum and weight, write the last two."""


def with_backward(forward: "nx.DiGraph", bytes_per_number: float, tied: tuple[str, str] | None = None) -> OperatorGraph:
    """The whole step for a forward graph (nodes in program order): dX and dW of every operator, an all-reduce for every
    gradient of replicated weights, and the update.

    Experts' weights are not replicated; their gradients stay where they are (a packed placement adds its own all-reduces).

    tied: two operators that share one matrix; its gradient is then reduced once, when both parts are there

    Raises InputError for a graph with a cycle.
    """
    import networkx as nx

    if not nx.is_directed_acyclic_graph(forward):
        raise InputError("the operators need each other in a circle, so that none can run first")
    step = nx.DiGraph(forward)
    order: list[Operator] = [operator for _, operator in forward.nodes(data="operator")]
    dw: dict[str, str] = {}
    for operator in reversed(order):
        read_by = forward.out_edges(operator.name, data="gradient", default=True)
        sources = [backward_name("dx", reader) for _, reader, gradient in read_by if gradient]
        if operator.parameters:
            dw[operator.name] = _add(step, _gradient("dw", operator), sources)
        if operator.kind != "embedding":  # nothing comes before it
            _add(step, _gradient("dx", operator), [*sources, operator.name])
    gradients = [_add(step, all_reduce, after) for all_reduce, after in _all_reduces(order, dw, bytes_per_number, tied)]
    numbers = sum(operator.parameters for operator in order)
    numbers -= step.nodes[tied[0]]["operator"].parameters if tied else 0
    last = max(operator.layer for operator in order)
    update = Operator(name="update", kind="update", phase="update", layer=last, moved=float(UPDATE_BYTES * numbers))
    _add(step, update, [*gradients, *dw.values()])
    return OperatorGraph.of(step)


def backward_name(phase: Phase, forward_name: str) -> str:
    """The name of an operator of the backward pass, from the one it belongs to."""
    return f"{phase}.{forward_name}"


def _add(graph: "nx.DiGraph", operator: Operator, after: list[str]) -> str:
    graph.add_node(operator.name, operator=operator)
    graph.add_edges_from(((before, operator.name) for before in after), gradient=False)
    return operator.name


def _gradient(phase: Literal["dx", "dw"], operator: Operator) -> Operator:
    """dW[k, n] = Xᵀ[k, m] dY[m, n], a sum over the tokens. In a table every row that was read is read and written again.

    dX[m, k] = dY[m, n] Wᵀ[n, k]; attention has two such products for each of its own, as both inputs of its products
    have gradients, and so has an aggregation by a dense product. Element by element, a gradient reads the input again
    on top of the forward pass's bytes; where a sum was, the gradients of its readers are added up.
    """
    if phase == "dw":
        gemms = tuple(Gemm(count=gemm.count, m=gemm.k, n=gemm.n, k=gemm.m, tokens="k") for gemm in operator.gemms)
        sizes = {"moved": 0 if gemms else operator.moved}
    else:
        gemms = tuple(Gemm(count=gemm.count, m=gemm.m, n=gemm.k, k=gemm.n) for gemm in operator.gemms)
        gemms *= 2 if operator.kind in ("attention", "aggregate") else 1
        sizes = {"moved": operator.moved * (1 if operator.kind == "residual" else 1.5), "sent": operator.sent}
    own = {"name": backward_name(phase, operator.name), "kind": operator.kind, "layer": operator.layer}
    return Operator(**own, phase=phase, gemms=gemms, **sizes)


def _all_reduces(
    order: list[Operator], dw: dict[str, str], bytes_per_number: float, tied: tuple[str, str] | None
) -> Iterator[tuple[Operator, list[str]]]:
    """One all-reduce for the gradient of every replicated weight, with the dW operators it waits for, in the order in
    which those run."""
    for operator in reversed(order):
        if operator.name not in dw or operator.kind == "experts" or (tied and operator.name == tied[1]):
            continue
        parts = tied if tied and operator.name == tied[0] else (operator.name,)
        reduce = Operator(
            name=backward_name("all_reduce", operator.name),
            kind="gradient",
            phase="all_reduce",
            layer=operator.layer,
            sent=operator.parameters * bytes_per_number,
        )
        yield reduce, [dw[part] for part in parts]
