"""From the single calls of a traced program to the operators of a forward graph.

Every matrix product with weights starts an operator, so do attention, embedding, norm, residual and loss; element-wise work
joins the operator that made the last of what it reads, as a compiler would fuse it. A call never joins an operator that
stands before one whose result it needs, so no cycle can arise. See `engine.formats.torch_graph` for the rules in words.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.errors import InputError
from engine.overlap.calls import Call, Product, slot_of
from engine.overlap.operator_graph import Gemm, Kind, Operator

if TYPE_CHECKING:
    import networkx as nx

RESIDUAL_ADDS = ("add", "add_")
ALL_TO_ALLS = ("all_to_all_single",)


def lower(calls: Sequence[Call], gpus: int) -> "tuple[nx.DiGraph, tuple[str, str] | None]":
    """The forward graph, nodes in program order, and the pair of operators that share one matrix if there is one.

    calls: in program order. Without a traced all-to-all the experts are those of all `gpus` GPUs: each GPU keeps its share
    of them and gets the tokens of all GPUs for these. Raises InputError when two operators other than one pair share a
    matrix, or when data goes into the experts of a layer and comes back from them more than once.
    """
    import networkx as nx

    groups = _Grouping(calls).groups
    traced = {group.layer for group in groups if group.kind in ("dispatch", "combine")}
    graph = nx.DiGraph()
    names = _names(groups)
    for group, name in zip(groups, names, strict=True):
        graph.add_node(name, operator=group.operator(name, gpus if group.layer not in traced else 1))
    name_of = {call.name: name for group, name in zip(groups, names, strict=True) for call in group.calls}
    for group, name in zip(groups, names, strict=True):
        for read in (read for call in group.calls for read in call.reads):
            before = name_of.get(read.call, name)
            if before != name:
                known = graph.get_edge_data(before, name, {"gradient": False})["gradient"]
                graph.add_edge(before, name, gradient=known or read.gradient)
    for layer in dict.fromkeys(group.layer for group in groups if group.kind == "experts"):
        if layer not in traced:
            _exchange(graph, [(group, name) for group, name in zip(groups, names, strict=True)], layer)
    return _ordered(graph), _tied(groups, names)


@dataclass
class _Group:
    """An operator being put together."""

    kind: Kind
    label: str
    layer: int
    inside: bool
    path: str
    calls: list[Call] = field(default_factory=list)
    ancestors: set[int] = field(default_factory=set)
    read_later: set[str] = field(default_factory=set)
    """Calls of this operator that others read."""

    @property
    def products(self) -> list[Product]:
        return [product for call in self.calls for product in call.products]

    def operator(self, name: str, gpus: int) -> Operator:
        """The finished operator on one of `gpus` GPUs."""
        gemms, parameters = self._experts(gpus) if self.kind == "experts" else self._plain()
        sent = self.calls[0].reads[0].bytes if self.kind in ("dispatch", "combine") else 0
        moved = 0 if sent else self._moved()
        return Operator(
            name=name,
            kind=self.kind,
            phase="forward",
            layer=self.layer,
            gemms=gemms,
            moved=moved,
            sent=sent,
            parameters=parameters,
        )

    def _plain(self) -> tuple[tuple[Gemm, ...], int]:
        weights = {product.part: product.count * product.n * product.k for product in self.products if product.weight}
        weights |= {call.table: call.numbers for call in self.calls if call.table}
        # Products of two activations are one batched kernel, as the transformer graph has them.
        counts = [(product, product.count if product.weight else 1) for product in self.products]
        gemms = (
            Gemm(count=count, m=product.m * product.count // count, n=product.n, k=product.k)
            for product, count in counts
        )
        return tuple(gemms), sum(weights.values())

    def _experts(self, gpus: int) -> tuple[tuple[Gemm, ...], int]:
        """Products of all experts with weights of one name are one; every expert gets equally many rows."""
        slots: dict[tuple[str, int, int], list[Product]] = defaultdict(list)
        for product in self.products:
            slots[slot_of(product.weight), product.n, product.k].append(product)
        gemms, parameters = [], 0
        for (_, n, k), parts in slots.items():
            experts = parts[0].experts or len({part.part for part in parts})
            rows = sum(part.count * part.m for part in parts)
            own = max(1, experts // gpus)
            gemms.append(Gemm(count=own, m=max(1, round(rows * gpus / experts)), n=n, k=k))
            parameters += own * n * k
        return tuple(gemms), parameters

    def _moved(self) -> float:
        """Bytes that element-wise work reads from and writes to memory; what one such call hands to the next stays on the
        chip."""
        plain = {call.name: call for call in self.calls if not call.products}
        outside = {read.tensor: read.bytes for call in plain.values() for read in call.reads if read.call not in plain}
        read_on = {read.call for call in self.calls if call.products for read in call.reads}
        last = plain.keys() - {read.call for call in plain.values() for read in call.reads}
        written = sum(call.writes for name, call in plain.items() if name in last or name in read_on | self.read_later)
        return sum(outside.values()) + written + sum(call.moved for call in self.calls)


class _Grouping:
    """Puts calls together to operators, one after the other."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.groups: list[_Group] = []
        self.at: dict[str, int] = {}
        self.last = max((call.layer for call in calls if call.layer is not None), default=0)
        self.seen = False
        self.to_experts = _lead_to_experts(calls)
        for call in calls:
            if call.layer is not None:
                self.seen = True
            place = self.place(call)
            group = self.groups[place]
            group.calls.append(call)
            self.at[call.name] = place
            for read in (read for read in call.reads if read.call):
                other = self.at[read.call]
                if other != place:
                    group.ancestors |= {other} | self.groups[other].ancestors
                    self.groups[other].read_later.add(read.call)

    def new(self, kind: Kind, call: Call, label: str = "") -> int:
        self.groups.append(_Group(kind, label or kind, self.layer_of(call), call.layer is not None, call.path))
        return len(self.groups) - 1

    def layer_of(self, call: Call) -> int:
        """The layer that a call counts to: outside of all of them the first, and behind the first the last."""
        return call.layer if call.layer is not None else self.last if self.seen else 0

    def place(self, call: Call) -> int:
        """The operator that the call belongs to, a new one if need be."""
        before = {self.at[read.call] for read in call.reads if read.call}
        latest = max(before, default=-1)
        if call.table:
            return self.new("embedding", call)
        if "loss" in call.op or call.op in ("log_softmax", "_log_softmax"):
            return latest if before and self.groups[latest].kind == "loss" else self.new("loss", call)
        if call.op in ALL_TO_ALLS:
            return self.new("dispatch" if call.name in self.to_experts else "combine", call)
        if call.products and call.products[0].weight:
            return self.weight_product(call, latest)
        if call.products:
            return self.activation_product(call, before, latest)
        if not before:
            return self.new("layer_norm" if call.family == "layer_norm" else "residual", call)
        return self.element_wise(call, before, latest)

    def weight_product(self, call: Call, latest: int) -> int:
        product = call.products[0]
        kind = self.kind_of_weight(call, latest)
        for index in range(len(self.groups) - 1, max(latest, 0) - 1, -1):
            group = self.groups[index]
            if group.kind == kind and group.layer == self.layer_of(call):
                # q, k and v, or gate and up, of the same input; the same matrix of another expert.
                alike = any(product.data == other.data for other in group.products)
                slots = {slot_of(other.weight) for other in group.products}
                if alike or (kind == "experts" and slot_of(product.weight) in slots):
                    return index
        return self.new(kind, call, "head" if kind == "projection" and call.layer is None and self.seen else "")

    def kind_of_weight(self, call: Call, latest: int) -> Kind:
        if call.family == "attention":
            above = self.groups[latest].ancestors | {latest} if latest >= 0 else set()
            attended = {self.groups[index].layer for index in above if self.groups[index].kind == "attention"}
            return "projection" if self.layer_of(call) in attended else "qkv"
        if call.family in ("dense_ffn", None) and call.products[0].experts:
            return "experts"
        if call.family is None and call.layer is None and self.seen:
            return "projection"
        return call.family if call.family not in (None, "layer_norm") else "dense_ffn"

    def activation_product(self, call: Call, before: set[int], latest: int) -> int:
        kinds = {self.groups[index].kind for index in before}
        if call.family != "attention" and kinds & {"gate", "experts", "combine"}:
            return self.aggregate(call, latest) if kinds & {"experts", "combine"} else self.encode(call, latest)
        return latest if before and self.groups[latest].kind == "attention" else self.new("attention", call)

    def element_wise(self, call: Call, before: set[int], latest: int) -> int:
        group, kinds = self.groups[latest], {self.groups[index].kind for index in before}
        outside = any(not read.call for read in call.reads)
        full = max(read.bytes for read in call.reads) >= call.writes
        sum_of_two = call.op in RESIDUAL_ADDS and full and len(before) + outside > 1
        if call.family == "layer_norm":
            return latest if group.kind == "layer_norm" and group.path == call.path else self.new("layer_norm", call)
        if group.kind in ("experts", "combine") and call.name not in self.to_experts:
            if "gate" in kinds or call.family != "experts":
                return self.aggregate(call, latest)
        elif group.kind == "gate" and (kinds != {"gate"} or outside) and call.gradient:
            return self.encode(call, latest)
        if sum_of_two and call.family in (None, "dense_ffn", "shared_experts"):
            return latest if group.kind in ("residual", "loss", "gate") else self.new("residual", call)
        return latest

    def aggregate(self, call: Call, latest: int) -> int:
        return self.joined("aggregate", call, latest)

    def encode(self, call: Call, latest: int) -> int:
        """What brings the tokens and the gate's choice together: of a kind with the gate, but with no weights."""
        return self.joined("encode", call, latest)

    def joined(self, label: str, call: Call, latest: int) -> int:
        """The operator of this label in the layer, if it stands late enough."""
        for index in range(latest, len(self.groups)):
            if self.groups[index].label == label and self.groups[index].layer == self.groups[latest].layer:
                return index
        place = self.new("gate" if label == "encode" else "aggregate", call, label)
        self.groups[place].layer, self.groups[place].inside = self.groups[latest].layer, self.groups[latest].inside
        return place


def _lead_to_experts(calls: Sequence[Call]) -> set[str]:
    """Calls whose result goes, in the same layer, into a product with experts' weights."""
    leading: set[str] = set()
    layer_of = {call.name: call.layer for call in calls}
    for call in reversed(calls):
        weights = [product for product in call.products if product.weight]
        batched = call.family in ("dense_ffn", None) and any(weight.experts for weight in weights)
        if call.name in leading or batched or (weights and call.family == "experts"):
            leading |= {read.call for read in call.reads if read.call and layer_of[read.call] == call.layer}
    return leading


def _names(groups: Sequence[_Group]) -> list[str]:
    """Names: layer and label, numbered where a layer has several of a label."""
    labels = [(f"{group.layer}.{group.label}" if group.inside else group.label) for group in groups]
    often, used, names = Counter(labels), Counter(), []
    for label in labels:
        used[label] += 1
        names.append(f"{label}_{used[label]}" if often[label] > 1 else label)
    return names


def _exchange(graph: "nx.DiGraph", groups: Iterable[tuple[_Group, str]], layer: int) -> None:
    """Put the two all-to-alls of expert parallelism where data enters and leaves the experts of a layer."""
    groups = list(groups)
    experts = {name: group for group, name in groups if group.kind == "experts" and group.layer == layer}
    own = {call.name for group in experts.values() for call in group.calls}
    prefix = f"{layer}." if next(iter(experts.values())).inside else ""
    into = {
        read.tensor: read.bytes
        for group in experts.values()
        for call in group.calls
        for read in call.reads
        if read.call not in own and read.gradient
    }
    out = {
        read.tensor: read.bytes
        for group, name in groups
        if name not in experts
        for call in group.calls
        for read in call.reads
        if read.call in own
    }
    for kind, sent in (("dispatch", into), ("combine", out)):
        name = f"{prefix}{kind}"
        operator = Operator(name=name, kind=kind, phase="forward", layer=layer, sent=sum(sent.values()))
        graph.add_node(name, operator=operator)
        for expert in experts:
            edges = graph.in_edges if kind == "dispatch" else graph.out_edges
            for before, after, gradient in list(edges(expert, data="gradient")):
                outer = before if kind == "dispatch" else after
                if outer in experts or outer in (f"{prefix}dispatch", f"{prefix}combine"):
                    continue
                graph.remove_edge(before, after)
                for edge in ((before, name), (name, after)):
                    known = graph.get_edge_data(*edge, {"gradient": False})["gradient"]
                    graph.add_edge(*edge, gradient=known or gradient)


def _ordered(graph: "nx.DiGraph") -> "nx.DiGraph":
    """The same graph, its nodes in an order that can run: program order, an all-to-all as early as it can be."""
    import networkx as nx

    place = {name: index for index, name in enumerate(graph)}
    for name, operator in graph.nodes(data="operator"):
        if operator.network:
            place[name] = max((place[before] for before in graph.predecessors(name)), default=-1) + 0.5
    if not nx.is_directed_acyclic_graph(graph):
        raise InputError(
            "data goes into the experts of a layer and back more than once, which one pair of all-to-alls cannot do; "
            "say with kind_of which modules are experts"
        )
    ordered = nx.DiGraph()
    for name in nx.lexicographical_topological_sort(graph, key=place.__getitem__):
        ordered.add_node(name, **graph.nodes[name])
    ordered.add_edges_from(graph.edges(data=True))
    return ordered


def _tied(groups: Sequence[_Group], names: Sequence[str]) -> tuple[str, str] | None:
    users: dict[str, list[str]] = defaultdict(list)
    for group, name in zip(groups, names, strict=True):
        tables = {call.table for call in group.calls if call.table}
        for weight in tables | {product.weight for product in group.products if product.weight}:
            users[weight].append(name)
    shared = {weight: names for weight, names in users.items() if len(names) > 1}
    if not shared:
        return None
    weight, pair = next(iter(shared.items()))
    if len(shared) > 1 or len(pair) > 2:
        raise InputError(
            f"the weights {weight} are used by {', '.join(pair)}; only one matrix may be shared, and by two operators "
            "(an input and an output embedding)"
        )
    return pair[0], pair[1]
