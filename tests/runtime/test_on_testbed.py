"""Models under plans on emulated nodes: eight ranks in two of them answer as the plain model and send the plan's bytes between
the nodes, and weights move in the seconds that a move is priced at."""

import json
from itertools import pairwise

import numpy as np
import pytest

from engine.communication.travel import Stops, rows_of_tokens
from engine.communication.two_tier import two_tier
from engine.launch.places.testbed import Testbed
from engine.model import MoEModel
from engine.placement.migration import transfers
from engine.plan import Placement, Plan, SendOrder, Travel
from engine.runtime.exchange.links import Tiers
from engine.runtime.exchange.routes import route
from tests.cases.plans import plan_of as plan_at
from tests.cases.testbeds import MBIT, needs_testbed, nothing_left

__all__ = ["nothing_left"]  # a fixture
MODEL = MoEModel(name="tiny", layers=3, experts=8, experts_per_token=2, d_model=32, d_ff=24, dtype="fp32")
EIGHT = Tiers(node=(0,) * 4 + (1,) * 4, port=(50 * MBIT,) * 8, link=(200 * MBIT,) * 8)


@pytest.fixture
def on_testbed(outcomes_of, tmp_path):
    """A function that runs a case of `testbed_ranks` on a testbed of these tiers; the outcome of each rank."""
    pytest.importorskip("transformers")

    def on_testbed(tiers: Tiers, **case) -> list:
        with Testbed(np.array(tiers.port), tiers=tiers) as testbed:
            names = [testbed.namespace(rank) for rank in range(testbed.ranks)]
            path = tmp_path / "case.json"
            path.write_text(json.dumps(case | {"tiers": tiers.model_dump(), "namespaces": names}))
            (ranks,) = outcomes_of("runtime.testbed_ranks", 1, CASES=str(path))
        return ranks

    return on_testbed


def plans_of(family: str) -> dict[str, Plan]:
    from tests.cases.tiny_models import model_of, plan_of, recorded

    model = model_of(family)
    linear, eplb = plan_of(model, 8), plan_of(model, 8, "eplb", algorithm="eplb")
    traffic = recorded(model).demand(8) @ eplb.placement.share * MODEL.bytes_per_token
    schedules = [[two_tier(matrix, EIGHT.network).solution for matrix in way] for way in (traffic, traffic.transpose(0, 2, 1))]
    order = SendOrder(mode="two-tier", dispatch=schedules[0], combine=schedules[1])
    by_node = eplb.with_parts(travel=Travel(unit="node"), claim=None)
    tiered = eplb.with_parts(send_order=order, claim=None)
    return {"linear": linear, "eplb": eplb, "two-tier": tiered, "once to every node": by_node}


def bytes_between_nodes(plan: Plan, experts: np.ndarray, source: np.ndarray) -> float:
    """Bytes of a pass, by the code that simulates. experts: int[token, layer, k]; source: int64[token] ranks"""
    travel, stops, total = plan.travel or Travel(), Stops(np.array(EIGHT.network.domain)), 0.0
    across = stops.of_gpu[:, None] != stops.of_gpu
    for layer, share in enumerate(plan.placement.share):
        chosen = experts[:, layer]
        copies = route(chosen, source, share)
        hosts = np.full(chosen.shape, -1)
        hosts[copies.token, copies.choice] = copies.dst
        total += (rows_of_tokens(hosts, source, stops, travel.unit) * across).sum() * sum(travel.row_bytes(MODEL))
    return total


@needs_testbed
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_eight_ranks_in_two_nodes_answer_as_the_plain_model(on_testbed, family):
    plans = plans_of(family)
    assert not plans["eplb"].placement.single
    ranks = on_testbed(EIGHT, family=family, plans={name: plan.model_dump_json() for name, plan in plans.items()})
    experts = np.concatenate([np.array(rank["experts"]) for rank in ranks])
    source = np.repeat(np.arange(8), [len(rank["experts"]) for rank in ranks])
    sent = {}
    for name, plan in plans.items():
        for rank in ranks:
            assert rank[name]["logits"] < 1e-4 and rank[name]["same words"]
        to = np.array([rank[name]["to"] for rank in ranks])
        sent[name] = to[:4, 4:].sum() + to[4:, :4].sum()
        assert sent[name] == bytes_between_nodes(plan, experts, source) > 0
    assert sent["once to every node"] < sent["two-tier"] == sent["eplb"]


# Weights that move.


FOUR = Tiers(node=(0, 0, 1, 1), port=(50 * MBIT,) * 4, link=(100 * MBIT,) * 4)
TRIES, WITHIN = 3, 0.25


def spread(layers: int, experts: int, seed: int) -> Plan:
    """Experts anywhere, an equal number on each of four ranks, and a second copy of some."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(layers):
        slots = rng.permutation(experts).reshape(4, -1)
        rows.append(tuple((*own, int(other[0])) for own, other in zip(slots.tolist(), np.roll(slots, 1, axis=0), strict=True)))
    return plan_at(Placement(experts=experts, experts_of_gpu=tuple(rows), model_layers=tuple(range(layers))))


def blocks(layers: int, experts: int) -> Plan:
    row = tuple(tuple(part.tolist()) for part in np.split(np.arange(experts), 4))
    return plan_at(Placement(experts=experts, experts_of_gpu=(row,) * layers, model_layers=tuple(range(layers))))


@needs_testbed
@pytest.mark.parametrize(("layers", "experts", "width", "d_ff"), [(4, 8, 256, 256), (4, 16, 256, 512), (12, 16, 256, 128)])
def test_weights_move_in_the_seconds_of_the_price(on_testbed, layers, experts, width, d_ff):
    """A machine with other work makes an exchange longer, and then the next one may fare better."""
    plans = [blocks(layers, experts), spread(layers, experts, 1), spread(layers, experts, 2), blocks(layers, experts)]
    held, size = [plan.placement.share > 0 for plan in plans], 3.0 * width * d_ff * 4
    priced = [transfers(*pair, size, FOUR.network) for pair in pairwise(held)]
    sizes = {"hidden_size": width, "intermediate_size": d_ff, "num_hidden_layers": layers, "num_experts": experts}
    seen = []
    while len(seen) < TRIES and not (seen and max(map(abs, seen[-1])) <= WITHIN):
        ranks = on_testbed(FOUR, sizes=sizes, plans=[plan.model_dump_json() for plan in plans])
        assert all(move["bytes"] == price.traffic.sum() for moves in ranks for move, price in zip(moves, priced, strict=True))
        seen.append([move["seconds"] / price.seconds - 1 for move, price in zip(ranks[0], priced, strict=True)])
    print(f"{size / 1e6:.2f} MB an expert, {[round(price.seconds, 3) for price in priced]} s: {np.round(seen, 3).tolist()}")
    assert max(map(abs, seen[-1])) <= WITHIN, seen
