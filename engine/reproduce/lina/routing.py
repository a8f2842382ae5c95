"""The recordings that stand in for Lina's inference tasks, and its patterns in the choice of experts (§5): Table 2, Figure 9.

Its models and their choices are not public. The shipped recordings of a small model with 16 experts stand in: every second
sequence teaches, the others are served, in random orders so that there are enough batches for a percentile. Deeper models have
its 8 layers several times; fewer experts are neighbours put together.
"""

from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np

from engine.formats import read_workload
from engine.reproduce.exhibits import Chart, Claim, Exhibit
from engine.result import Stop
from engine.workload import RoutingTrace

FOLDER = Path(__file__).resolve().parents[3] / "sample_traces" / "tiny-moe"
NAMES = ("alpha-code", "alpha-prose", "alpha-man")
STAND_IN = "Its recordings are not public: three shipped ones of a small model stand in, of code, prose and manual pages."
BATCH = 2048
"""Recorded tokens of a batch: a sequence for each of 16 GPUs."""
ROUNDS = 10

TABLE_2 = {
    "Transformer-XL": {3: (9, 4, 5, 10), 8: (9, 2, 3, 13), 12: (4, 5, 15, 8)},
    "BERT-Large": {6: (7, 6, 10, 1), 8: (10, 6, 2, 15), 10: (9, 4, 11, 8), 12: (1, 8, 10, 14)},
}
"""Most popular experts by layer; one entry of Transformer-XL's layer 4 cannot be read."""
FIGURE_9 = {1: 0.4194, 2: 0.5459}


RANKED = ", by rank"
"""After a recording's name: experts are put together by popularity instead, the most popular with the next ones."""


@cache
def recording(name: str, experts: int = 16, layers: int = 8) -> RoutingTrace:
    """A shipped recording as one of fewer experts, a divisor of its own, and of as many layers."""
    trace = read_workload(FOLDER / f"{name.removesuffix(RANKED)}.npz")
    chosen = np.arange(layers) % trace.layers
    place = np.broadcast_to(np.arange(trace.num_experts), trace.load.shape)
    if name.endswith(RANKED):
        place = np.argsort(np.argsort(-trace.load, axis=1, kind="stable"), axis=1)
    of_expert = place // (trace.num_experts // experts)
    table = np.stack([of_expert[layer][trace.experts[:, layer]] for layer in chosen], axis=1).astype(trace.experts.dtype)
    return RoutingTrace(name, table, experts, trace.sequence)


def half(trace: RoutingTrace, which: int) -> RoutingTrace:
    """Every second sequence: which 0 or 1."""
    keep = trace.sequence % 2 == which
    return RoutingTrace(f"{trace.name} {which}", trace.experts[keep], trace.num_experts, trace.sequence[keep])


def shuffled(trace: RoutingTrace, tokens: int, seed: int = 0) -> RoutingTrace:
    """Whole batches of `tokens` tokens, of sequences in `ROUNDS` random orders one after another."""
    rng = np.random.default_rng(seed)
    ids, length = np.unique(trace.sequence), int((trace.sequence == trace.sequence[0]).sum())
    place = np.arange(trace.tokens).reshape(len(ids), length)
    whole = len(ids) // (tokens // length) * (tokens // length)
    order = np.concatenate([place[rng.permutation(len(ids))[:whole]].ravel() for _ in range(ROUNDS)])
    return RoutingTrace(trace.name, trace.experts[order], trace.num_experts, trace.sequence[order])


def _shared(tops: list[tuple[int, ...]]) -> Iterator[int]:
    """Experts that two of these lists have in common, for every two."""
    yield from (len({*one} & {*other}) for one, other in combinations(tops, 2))


def popular_experts(stop: Stop) -> Exhibit:
    """Table 2: the most popular experts differ from layer to layer."""
    rows, ours = [], []
    for name in NAMES:
        order = np.argsort(-recording(name).load, axis=1, kind="stable")[:, :4].tolist()
        rows += [
            {"recording": name, "layer": layer, "place": place + 1, "expert": expert}
            for layer, row in enumerate(order)
            for place, expert in enumerate(row)
        ]
        ours.append(float(np.mean(list(_shared([tuple(row) for row in order])))))
    printed = [shared for layers in TABLE_2.values() for shared in _shared(list(layers.values()))]
    claim = Claim(
        quantity="experts that the top 4 of two layers have in common, of 4, mean",
        published=float(np.mean(printed)),
        ours=(min(ours), max(ours)),
        spread=0.25,
        why="by chance it is one of 16 experts' four; spread: a quarter of an expert, as the table has nine pairs of layers",
    )
    chart = Chart(
        kind="points", x="layer", y="expert", series="place", facet="recording", x_title="layer", y_title="most popular experts"
    )
    return Exhibit(claims=(claim,), rows=tuple(rows), chart=chart, note=STAND_IN)


def followers(trace: RoutingTrace, top: int) -> np.ndarray:
    """float64[layer - 1]: part of the tokens of an expert that go on to one of its `top` most frequent next experts, mean over
    the layer's experts."""
    shares = []
    for layer in range(trace.layers - 1):
        pair = trace.experts[:, layer, 0].astype(np.int64) * trace.num_experts + trace.experts[:, layer + 1, 0]
        counts = np.bincount(pair, minlength=trace.num_experts**2).reshape(trace.num_experts, -1)
        used = counts[counts.sum(axis=1) > 0]
        shares.append((np.sort(used, axis=1)[:, -top:].sum(axis=1) / used.sum(axis=1)).mean())
    return np.array(shares)


def selection_patterns(stop: Stop) -> Exhibit:
    """Figure 9: tokens of one expert go on to few."""
    claims, rows = [], []
    for top, published in FIGURE_9.items():
        found = {name: followers(recording(name), top) for name in NAMES}
        rows += [
            {"recording": name, "k": f"k = {top}", "layer": layer, "ratio": share, "published": published}
            for name, shares in found.items()
            for layer, share in enumerate(shares.tolist())
        ]
        means = [float(shares.mean()) for shares in found.values()]
        claims.append(
            Claim(
                quantity=f"tokens of an expert that go on to one of its {top} most frequent next experts, mean",
                published=published,
                ours=(min(means), max(means)),
                why=f"over chance, {top / 16:.2f}; by recording " + ", ".join(f"{mean:.2f}" for mean in means),
            )
        )
    chart = Chart(
        kind="lines",
        x="layer",
        y="ratio",
        series="recording",
        facet="k",
        published="published",
        x_title="layer",
        y_title="tokens that go on to the top k",
    )
    return Exhibit(claims=tuple(claims), rows=tuple(rows), chart=chart, note=STAND_IN)
