"""Exclusions of sizing, proven again from their prices by weak duality, and all placements of a small model on a cluster."""

from itertools import product

import numpy as np

from engine.cluster import Cluster, Gpu, Node
from engine.costs import CostModel
from engine.model import MoEModel
from engine.problem import MEMORY_SHARE
from engine.sizing.bounds import CASES, Exclusion
from engine.sizing.inputs import Catalogue


def check_exclusion(proof: Exclusion, catalogue: Catalogue, model: MoEModel, cost: CostModel, load: np.ndarray) -> float:
    """Seconds that no pass on the cluster of an exclusion is below, every copy on its own, recomputed from its prices, which
    must be legal. load: float64[layer, expert]"""
    offers = [(number, offer.drawn) for number, offer in enumerate(catalogue.nodes)]
    kinds: list[tuple[int, Gpu, int, int]] = []  # type, GPU, number in a node, domain
    domains: list[tuple[int, int, float, float]] = []  # type, number in a node, bytes/s out and in
    for number, node in offers:
        linked = bool(node.link_bandwidth) and len(node.gpus) > 1
        if linked:
            rates = (sum(getattr(gpu, f"{way}_bandwidth") for gpu in node.gpus) for way in ("send", "receive"))
            domains.append((number, 1, *rates))
        for gpu in dict.fromkeys(node.gpus):
            count = node.gpus.count(gpu)
            if not linked:
                domains.append((number, count, gpu.send_bandwidth, gpu.receive_bandwidth))
            kinds.append((number, gpu, count, len(domains) - 1))
    seconds = [cost.expert_ffn(gpu, load, model) for _, gpu, _, _ in kinds]
    has = [proof.vector[number] * count for number, _, count, _ in kinds]
    size, expert_bytes = model.bytes_per_token, model.bytes_per_expert * load.shape[0]
    slots = [min(gpu.memory * MEMORY_SHARE // expert_bytes, load.shape[1]) for _, gpu, _, _ in kinds]
    if np.dot(has, slots) < load.shape[1]:
        return np.inf
    total = sum(proof.vector[number] * count for number, count, _, _ in domains)
    least = np.inf
    for place, (above, up_to) in enumerate(CASES):
        for special in range(-1, len(domains)):
            stands_out = special >= 0 and proof.vector[domains[special][0]] > 0
            if up_to < 1 / total or (special < 0) != (place == 0) or not (stands_out or special < 0):
                continue
            prices = proof.prices.get((place, special))
            columns = []  # price of a copy, of a second of FFNs and of a slot, by kind
            alone_seconds, always = [], 0.0
            if prices is not None:
                legal = (*prices.there, *prices.back, *prices.ffn, *prices.slot, prices.sent, prices.returned)
                assert min(legal) >= 0 and max(sum(prices.there) + prices.sent, sum(prices.back) + prices.returned) <= 1 + 1e-9
                assert sum(prices.ffn) <= 1 + 1e-9
                if special >= 0:
                    _, _, out, into = domains[special]
                    always = above * size * (prices.sent / out + prices.returned / into)
            speed = sum(count / float(each.sum()) for count, each in zip(has, seconds, strict=True))
            for inside in (False, True):
                for kind, (_, _, count, domain) in enumerate(kinds):
                    number, each, out, into = domains[domain]
                    alone = count // each if domain == special else 0
                    gpus = alone if inside else has[kind] - alone
                    if not gpus:
                        continue
                    share = (1 - up_to) if inside else max(1 - up_to, above)
                    alone_seconds.append((kind, share * size * (1 / into + 1 / out)))
                    if prices is None:
                        columns.append((kind, gpus, 0.0, 1 / float(seconds[kind].sum()) / speed, 0.0))
                        continue
                    at, column = (len(domains), len(kinds) + kind) if inside else (domain, kind)
                    others = 1 if inside else proof.vector[number] * each - (domain == special)
                    copy = share * size / others * (prices.there[at] / into + prices.back[at] / out) - always * inside
                    columns.append((kind, gpus, copy, prices.ffn[column] / gpus, prices.slot[column]))
            pass_seconds = 0.0
            for layer, copies in enumerate(load):
                hottest = max(min(seconds[kind][layer, expert] for kind, *_ in columns) for expert in range(len(copies)))
                at_one = max(
                    min(seconds[kind][layer, expert] + count * copy for kind, copy in alone_seconds)
                    for expert, count in enumerate(copies)
                )
                paid = always * copies.sum() - sum(slots[kind] * gpus * slot for kind, gpus, _, _, slot in columns)
                travel, both = paid, paid
                for expert, count in enumerate(copies):
                    travel += min(count * copy + slot for _, _, copy, _, slot in columns)
                    both += min(
                        count * copy + slot + ffn * seconds[kind][layer, expert] for kind, _, copy, ffn, slot in columns
                    )
                start = 2 * min(offer.start_up for offer, nodes in zip(catalogue.nodes, proof.vector, strict=True) if nodes)
                pass_seconds += max(both, travel + hottest, at_one) + (start if up_to <= 1 / 2 else 0.0)
            least = min(least, pass_seconds)
    return least + _beside(proof.vector, kinds, model, cost, load)


def _beside(vector: tuple[int, ...], kinds: list, model: MoEModel, cost: CostModel, load: np.ndarray) -> float:
    """Seconds of routers and sums with the best deal of the tokens, by halving."""
    tokens = load.sum(axis=1) / model.experts_per_token

    def seconds(gpu: Gpu, share: float) -> float:
        return float((cost.gate(gpu, share * tokens, model) + cost.aggregate(gpu, share * tokens, model)).sum())

    def share_within(gpu: Gpu, time: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if seconds(gpu, middle) <= time else (low, middle)
        return high

    early, late = 0.0, max(seconds(gpu, 1.0) for _, gpu, _, _ in kinds)
    for _ in range(40):
        middle = (early + late) / 2
        dealt = sum(vector[number] * count * share_within(gpu, middle) for number, gpu, count, _ in kinds)
        early, late = (early, middle) if dealt >= 1 else (middle, late)
    return late


def fastest_pass(cluster: Cluster, share: np.ndarray, model: MoEModel, cost: CostModel, load: np.ndarray) -> float:
    """Seconds of a pass under the best of all placements of one copy of every expert, all-to-alls at their busiest port and
    with one start-up where anything crosses the fabric. share: float64[gpu] of the tokens"""
    gpus, size = cluster.gpus, model.bytes_per_token
    of = np.array(list(product(range(len(gpus)), repeat=load.shape[1])))  # int[placement, expert]
    fits = np.array([gpu.memory * MEMORY_SHARE // (model.bytes_per_expert * len(load)) for gpu in gpus])
    of = of[(np.stack([(of == gpu).sum(axis=1) for gpu in range(len(gpus))], axis=1) <= fits).all(axis=1)]
    if not len(of):
        return np.inf
    tokens, total = load.sum(axis=1) / model.experts_per_token, 0.0
    node_of = np.repeat(np.arange(len(cluster.nodes)), cluster.node_sizes)
    for copies, held in zip(load, tokens, strict=True):
        rows = np.stack([((of == gpu) * copies).sum(axis=1) for gpu in range(len(gpus))], axis=1)
        ffn = np.zeros(rows.shape)
        there, back, crosses = np.zeros(len(of)), np.zeros(len(of)), np.zeros(len(of), dtype=bool)
        for number, gpu in enumerate(gpus):
            ffn[:, number] = ((of == number) * cost.expert_ffn(gpu, copies, model)).sum(axis=1)
            node: Node = cluster.nodes[node_of[number]]
            near = (node_of == node_of[number]) if node.link_bandwidth else np.arange(len(gpus)) == number
            received = rows[:, number] * share[~near].sum() * size
            sent = share[number] * rows[:, ~near].sum(axis=1) * size
            crosses |= received > 0
            there = np.maximum(there, np.maximum(received / gpu.receive_bandwidth, sent / gpu.send_bandwidth))
            back = np.maximum(back, np.maximum(received / gpu.send_bandwidth, sent / gpu.receive_bandwidth))
            if node.link_bandwidth:
                near[number] = False
                linked = np.maximum(rows[:, number] * share[near].sum(), share[number] * rows[:, near].sum(axis=1))
                there, back = (np.maximum(time, linked * size / node.link_bandwidth) for time in (there, back))
        beside = max(float(cost.gate(gpu, part * held, model)) for gpu, part in zip(gpus, share, strict=True))
        beside += max(float(cost.aggregate(gpu, part * held, model)) for gpu, part in zip(gpus, share, strict=True))
        total += beside + float((there + back + ffn.max(axis=1) + 2 * cluster.latency * crosses).min())
    return total
