"""The rows that GPUs send each other when tokens travel copy by copy, GPU by GPU or node by node, and in an all-gather.

A matrix of rows has every hop of the way: with `node` travel the row that crosses the fabric stands between the GPUs of equal
places in their nodes, and the rows that are spread from there stand between GPUs of one node. Combine is its transpose.

For recordings of loads without tokens rows are expected ones. Each token has k different experts. Of all ways to choose them
that give every expert its recorded load, the one that assumes least is conditional Poisson sampling (Chen, Dempster & Liu
1994): sets of k experts are drawn with a probability proportional to the product of their weights, and the weights are found
from the loads. Real experts fire together, so real tokens meet fewer GPUs: the estimate is mostly one from above.
"""

from functools import cached_property

import numpy as np

from engine.plan import Placement, Travel, TravelUnit


class Stops:
    """The GPUs by which rows enter a node. domain: int[gpu], the same number for GPUs that talk over their node's links."""

    def __init__(self, domain: np.ndarray) -> None:
        number, self.of_gpu = np.unique(domain, return_inverse=True)
        self.sizes = np.bincount(self.of_gpu)
        order = np.argsort(self.of_gpu, kind="stable")
        begin = np.cumsum(self.sizes) - self.sizes
        self._place = np.empty(len(domain), dtype=np.int64)
        self._place[order] = np.arange(len(domain)) - begin[self.of_gpu[order]]
        self._members, self._begin, self.count = order, begin, len(number)

    @property
    def gpus(self) -> int:
        return len(self.of_gpu)

    @cached_property
    def entry(self) -> np.ndarray:
        """int64[source gpu, domain]: the GPU at which a row of the source enters a domain: the one with the source's place
        there (in its own domain itself); in a smaller domain places go round."""
        place = self._place[:, None] % self.sizes[None, :]
        return self._members[self._begin[None, :] + place]

    def dealt(self, rows: np.ndarray) -> np.ndarray:
        """float64[gpu]: the rows of every domain (float64[gpu], whole numbers) dealt out evenly to its GPUs, in whole rows."""
        total, sizes = np.bincount(self.of_gpu, rows)[self.of_gpu], self.sizes[self.of_gpu]
        return (total + sizes - 1 - self._place) // sizes


def rows_of_tokens(
    hosts: np.ndarray, source: np.ndarray, stops: Stops, unit: TravelUnit, weight: np.ndarray | None = None
) -> np.ndarray:
    """float64[src, dst] rows of a dispatch; on the diagonal those that stay.

    hosts: int[token, k], the GPU of every chosen expert, -1 = none
    source: int[token], the GPU that holds the token
    weight: float64[token], by which a token counts; None: once
    """
    gpus = stops.gpus
    hosts = hosts.astype(np.int64)
    source = np.asarray(source, dtype=np.int64)[:, None]
    counts = None if weight is None else np.broadcast_to(weight[:, None], hosts.shape)

    def counted(place: np.ndarray, real: np.ndarray) -> np.ndarray:
        pairs = np.bincount(place[real], None if counts is None else counts[real], minlength=gpus * gpus)
        return pairs.reshape(gpus, gpus).astype(np.float64)

    if unit == "copies":
        return counted(source * gpus + hosts, hosts >= 0)
    hosts = np.sort(hosts, axis=1)
    here = _first_of_equal(hosts)
    if unit == "gpu":
        return counted(source * gpus + hosts, here)
    domain = np.where(hosts >= 0, stops.of_gpu[hosts], -1)
    entry = stops.entry[source, domain]
    spread = counted(entry * gpus + hosts, here & (entry != hosts))
    # Rows that stay on their GPU are not spread; those of other nodes have crossed the fabric already.
    domain.sort(axis=1)
    foreign = domain != stops.of_gpu[source]
    crossed = _first_of_equal(domain) & foreign
    crossing = counted(source * gpus + stops.entry[source, domain], crossed)
    stays = counted(source * gpus + hosts, here & (hosts == source))
    return spread + crossing + stays


def rows_to_all(rows: np.ndarray, stops: Stops) -> np.ndarray:
    """float64[src, dst] rows of an all-gather, which gives every GPU all rows once; on the diagonal those that it has.

    It goes in two tiers: over its links a node gets the rows of its GPUs, each of which passes an even part of them on to the
    GPU with its own place in every other node, and from there they are spread over that node's links. So every row crosses
    the fabric once a node, and a GPU with many rows has the ports of its node to help. rows: float64[gpu], of every GPU
    """
    source, target = np.meshgrid(np.arange(stops.gpus), np.arange(stops.gpus), indexing="ij")
    entry = stops.entry[source, stops.of_gpu[target]]
    inside = stops.of_gpu[source] == stops.of_gpu[target]
    passed = np.where(inside, rows[:, None], stops.dealt(rows)[:, None])
    matrix = np.zeros(source.shape)
    np.add.at(matrix, (np.where(entry == target, source, entry), target), passed)
    return matrix


def _first_of_equal(ascending: np.ndarray) -> np.ndarray:
    """bool[token, k]: the first of each token's equal entries that are not -1."""
    first = ascending >= 0
    first[:, 1:] &= ascending[:, 1:] != ascending[:, :-1]
    return first


def places_of(share: np.ndarray, stops: Stops) -> np.ndarray:
    """float64[…, gpu and then domain]: shares of GPUs (float64[…, gpu]) with those of their domains behind them."""
    return np.concatenate([share, share @ np.eye(stops.count)[stops.of_gpu]], axis=-1)


def rows_by_chance(touched: np.ndarray, tokens: np.ndarray, stops: Stops, unit: TravelUnit) -> np.ndarray:
    """float64[src, dst] rows of a dispatch, in the mean, from how likely a token has an expert somewhere.

    touched: float64[source gpu, place], of a token of each source, the probability of every GPU and, with `node` travel, after
        them that of every domain
    tokens: float64[source gpu]
    """
    gpus = stops.gpus
    rows = touched[:, :gpus] * tokens[:, None]
    if unit == "gpu":
        return rows
    matrix = np.zeros((gpus, gpus))
    source, target = np.meshgrid(np.arange(gpus), np.arange(gpus), indexing="ij")
    entry = stops.entry[source, stops.of_gpu[target]]
    spread = (entry != target) | (source == target)
    np.add.at(matrix, (entry[spread], target[spread]), rows[spread])
    source, domain = np.meshgrid(np.arange(gpus), np.arange(stops.count), indexing="ij")
    foreign = stops.of_gpu[source] != domain
    crossing = (touched[:, gpus:] * tokens[:, None])[foreign]
    np.add.at(matrix, (source[foreign], stops.entry[source, domain][foreign]), crossing)
    return matrix


LIKELIEST = 1 - 1e-6
"""An expert that every token has would need an infinite weight."""
CLOSE, MOST_ROUNDS = 1e-6, 60


def touched_by_chance(load: np.ndarray, k: int, share: np.ndarray) -> np.ndarray:
    """float64[…, place]: the probability that a token has at least one of its k experts at a place.

    load: float64[…, expert] token copies; where nothing is loaded nothing is likely
    share: float64[…, expert, place], how likely a token that chose the expert is served there
    """
    shape = np.broadcast_shapes(load.shape[:-1], share.shape[:-2])
    # float64[…, expert]: the probability that a token has the expert; k in all, none above `LIKELIEST`
    total = load.sum(axis=-1, keepdims=True)
    likely = k * load / np.where(total > 0, total, 1.0)
    for _ in range(k):  # an expert that would be chosen twice leaves the rest to the others
        over = likely > LIKELIEST
        if not over.any():
            break
        rest = np.where(over, 0.0, likely)
        left = rest.sum(axis=-1, keepdims=True)
        room = k - over.sum(axis=-1, keepdims=True) * LIKELIEST
        likely = np.where(over, LIKELIEST, rest * np.maximum(room, 0.0) / np.where(left > 0, left, 1.0))
    weight = _weights(np.minimum(likely, LIKELIEST), k)
    whole = _symmetric(weight, k)[..., k]
    elsewhere = np.broadcast_to(weight[..., None], (*shape, *share.shape[-2:])) * (1 - share)
    missed = _symmetric(np.moveaxis(elsewhere, -1, -2), k)[..., k] / np.where(whole > 0, whole, 1.0)[..., None]
    return np.where((whole > 0)[..., None], np.clip(1 - missed, 0.0, 1.0), 0.0)


def _weights(inclusion: np.ndarray, k: int) -> np.ndarray:
    """float64[…, expert]: weights under which the experts are included with these probabilities."""
    weight = inclusion / (1 - inclusion)
    for _ in range(MOST_ROUNDS):
        before, after = _running(weight, k), _running(weight[..., ::-1], k)[..., ::-1, :]
        # Without expert e: k - 1 others, j of them before it and k - 1 - j after it
        without = (before[..., :-1, :k] * after[..., 1:, :k][..., ::-1]).sum(axis=-1)
        whole = before[..., -1, k]
        present = weight * without / np.where(whole > 0, whole, 1.0)[..., None]
        if np.abs(present - inclusion).max(initial=0.0) < CLOSE:
            break
        # By the ratio of probabilities the error vanishes at once for k = 1, by that of odds for experts that hardly depend on
        # one another; half-way between the two it halves at least.
        room = np.maximum(1 - present, 1 - LIKELIEST)
        factor = inclusion / np.where(present > 0, present, 1.0) * np.sqrt(room / (1 - inclusion))
        weight = weight * np.where(inclusion > 0, factor, 0.0)
    return weight


def _running(weight: np.ndarray, k: int) -> np.ndarray:
    """float64[…, expert + 1, k + 1]: elementary symmetric polynomials of the first so many weights."""
    experts = weight.shape[-1]
    sums = np.zeros((experts + 1, *weight.shape[:-1], k + 1))
    sums[0, ..., 0] = 1.0
    for expert in range(experts):
        sums[expert + 1] = sums[expert]
        sums[expert + 1, ..., 1:] += weight[..., expert, None] * sums[expert, ..., :-1]
    return np.moveaxis(sums, 0, -2)


def _symmetric(weight: np.ndarray, k: int) -> np.ndarray:
    """float64[…, k + 1]: elementary symmetric polynomials of all weights (float64[…, expert])."""
    sums = np.zeros((*weight.shape[:-1], k + 1))
    sums[..., 0] = 1.0
    for expert in range(weight.shape[-1]):
        sums[..., 1:] += weight[..., expert, None] * sums[..., :-1]
    return sums


def serving_gpus(
    placement: Placement,
    layer: int,
    experts: np.ndarray,
    travel: Travel,
    source: np.ndarray,
    stops: Stops,
    load: np.ndarray | None = None,
) -> np.ndarray:
    """int64[token, k]: the GPU that serves every choice of a layer's tokens, -1 where there is none.

    With "fewest" they are the copies with which a token touches fewest GPUs, or fewest nodes where tokens travel node by node
    and there are several; with another rule those of `engine.placement.dispatch_rules`. Without one copies serve in turn.

    experts: int[token, k], -1 = none
    source: int[token], the GPU that a token is sent from
    stops: the nodes
    load: float64[expert] token copies of the layer, if these tokens are not all of them
    """
    if travel.replicas is None or placement.single:
        return placement.hosts(layer, experts)
    # Imported here: a rank with tokens that do not choose starts half a second sooner without the compiler.
    if travel.replicas != "fewest":
        from engine.placement.dispatch_rules import hosts_of_tokens

        return hosts_of_tokens(placement, travel, layer, experts, source, load)
    from engine.placement.coactivation import chosen_copies

    group = stops.of_gpu if travel.unit == "node" and stops.count > 1 else np.arange(placement.gpus)
    return chosen_copies(experts, group[source], placement.share[layer] > 0, group)
