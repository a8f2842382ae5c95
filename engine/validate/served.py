"""Which GPU serves every choice of a token, read from a plan choice by choice."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from engine.plan import Placement, Travel


def served_choices(
    placement: Placement,
    layer: int,
    tokens: Iterable[Sequence[int]],
    travel: Travel,
    sources: Iterable[int],
    nodes: Sequence[range],
) -> Iterator[list[tuple[int, int]]]:
    """Of every token of a layer its (expert, GPU that serves it), in the order of its choices.

    tokens: the experts that each chose, -1 = none; sources: the GPU that each is on; nodes: of every GPU those that it reaches
    over the links of its node. Where tokens choose copies every way to serve them is tried: for few copies only.
    """
    homes: dict[int, list[int]] = {}
    for gpu, slots in enumerate(placement.experts_of_gpu[layer]):
        for expert in slots:
            homes.setdefault(expert, []).append(gpu)
    by_node = travel.unit == "node" and len(set(nodes)) > 1
    group_of_gpu = [nodes[gpu][0] if by_node else gpu for gpu in range(placement.gpus)]
    turn, served = dict.fromkeys(homes, 0), [0] * placement.gpus
    for source, choices in zip(sources, tokens, strict=True):
        real = [expert for expert in choices if expert >= 0]
        if travel.replicas is None:
            hosts = []
            for expert in real:
                hosts.append(homes[expert][turn[expert] % len(homes[expert])])
                turn[expert] += 1
        else:
            near = [{group_of_gpu[gpu] for gpu in homes[expert]} for expert in real]
            touched = _touched(near, group_of_gpu[source])
            hosts = []
            for expert in real:
                within = [gpu for gpu in sorted(set(homes[expert])) if group_of_gpu[gpu] in touched]
                hosts.append(min(within, key=served.__getitem__))
                served[hosts[-1]] += 1
        yield list(zip(real, hosts, strict=True))


def _touched(near: list[set[int]], home: int) -> set[int]:
    """The GPUs or nodes that a token may be served in. near: of every choice those that have it. Of several fewest sets that
    whose members come first, in the order in which the choices need them."""
    certain = {home}.union(*(groups for groups in near if len(groups) == 1))
    open_choices = [groups for groups in near if not groups & certain]
    best: list[int] | None = None
    for way in map(set, product(*open_choices)):
        needed: list[int] = []
        for groups in open_choices:
            if not groups & set(needed):
                needed.append(min(groups & way))
        if best is None or (len(needed), needed) < (len(best), best):
            best = needed
    return certain | set(best or ())
