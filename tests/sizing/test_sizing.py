"""Sizing: targets in words, clusters by price, every cluster of a small catalogue by brute force, and proofs proven again."""

import json
from itertools import pairwise

import numpy as np
import pytest

from engine import store
from engine.cluster import Node
from engine.costs import Datasheet, choice
from engine.errors import InputError
from engine.jobs import tasks
from engine.sizing.bounds import CASES
from engine.sizing.inputs import Catalogue, Need, NodeOffer, Target, read_target
from engine.sizing.search import Sizing, proven
from engine.store.problems import as_json
from engine.workload import ExpertLoad
from tests.jobs.asking import FakeContext, in_json
from tests.oracles.sizing import check_exclusion, fastest_pass
from tests.strategies import make_gpu, make_model

MODEL = make_model(2, 4, 1, d_model=64, d_ff=96)
COST = Datasheet(launch=0.0)
LOADS = np.array([[40.0, 25, 20, 15], [10, 10, 10, 70]])
SMALL = make_gpu(0, memory=2.5 * 2 * MODEL.bytes_per_expert, send=2e6)
FAST = make_gpu(1, flops=6e9, send=4e6, memory_bandwidth=1e9)
LINKED = make_gpu(2, send=1e6)


def offer(name: str, price: float, gpus: tuple, link: float | None = None, most: int = 4) -> NodeOffer:
    return NodeOffer(type=name, price=price, most=most, node=Node(name=name, gpus=gpus, link_bandwidth=link))


CATALOGUE = Catalogue(
    nodes=(offer("small", 1.0, (SMALL,)), offer("fast", 2.5, (FAST,)), offer("linked", 2.2, (LINKED,) * 2, link=2e7))
)
NEED = Need((ExpertLoad("loads", LOADS, MODEL.moe_layers),), MODEL, CATALOGUE, COST)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("50 ms a token", Target(0.05)),
        ("50ms/token", Target(0.05)),
        ("first token in 2 s", Target(2.0, phase="prefill")),
        ("2 s to first token at 4 prompts", Target(2.0, None, 4, "prefill")),
        ("20000 tokens/s at 512 sequences", Target(0.0256, None, 512)),
        ("at least 20k tokens per second for 1,024 users, under €40/h", Target(0.0512, 40.0, 1024)),
        ("at most $40 an hour", Target(None, 40.0)),
        ("tpot < 30 ms and at most 40 dollars per hour", Target(0.03, 40.0)),
        ("10 µs a pass", Target(1e-5)),
        ("10 tokens/s at 512 sequences, 20 s a token", Target(20.0, None, 512)),
    ],
)
def test_targets_in_words(text, target):
    read = read_target(text)
    assert (read.price, read.sequences, read.phase) == (target.price, target.sequences, target.phase)
    assert read.seconds == (None if target.seconds is None else pytest.approx(target.seconds))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("50 parsecs", "'50 parsecs' is not understood; write such as '50 ms a token'"),
        ("at least 50 ms", "'at least' is not understood"),
        ("-5 ms", "'-' is not understood"),
        ("50 ms, 20 ms", "two limits of a kind"),
        ("50 ms a token, first token in 2 s", "two limits of a kind"),
        ("5 tokens/s", "tokens/s need a number of sequences"),
        ("0 ms", "its time must be above 0 and at most 1,000,000,000"),
        ("1e400 ms", "its time must"),
        ("5 ms at 1e30 sequences", "its number of sequences must"),
        ("0 tokens/s at 4 sequences", "its tokens/s must"),
        ("5 ms at 1.5 sequences", "1.5 is no number of sequences"),
        ("512 sequences", "names no limit"),
        ("", "names no limit"),
    ],
)
def test_targets_that_say_nothing_are_one_line(text, message):
    with pytest.raises(InputError, match=message):
        read_target(text)


def test_every_cluster_comes_once_and_by_price():
    vectors = list(CATALOGUE.by_price())
    assert len(vectors) == len(set(vectors)) == 5**3 - 1
    prices = [CATALOGUE.price(vector) for vector in vectors]
    assert prices == sorted(prices)
    even = Catalogue(nodes=(offer("a", 1.0, (SMALL,)), offer("b", 2.0, (FAST,))))
    assert [vector for vector in even.by_price() if even.price(vector) == 4.0] == [(0, 2), (4, 0), (2, 1)]


@pytest.fixture(scope="module")
def brute() -> dict[tuple[int, ...], float]:
    """The seconds of every cluster of at most four nodes, under the best of all placements and of the deals that are tried."""
    times = {}
    sizing = Sizing(NEED)
    for vector in (each for each in CATALOGUE.by_price() if sum(each) <= 4):
        cluster = CATALOGUE.cluster(vector)
        times[vector] = min(fastest_pass(cluster, share, MODEL, COST, LOADS) for share, _ in sizing._deals(cluster))
    return times


@pytest.mark.parametrize("part", [0.05, 0.3, 0.6, 0.9])
def test_brute_force_over_all_clusters_of_four_nodes_agrees(brute, part, monkeypatch):
    every = Catalogue.by_price
    monkeypatch.setattr(Catalogue, "by_price", lambda catalogue: (each for each in every(catalogue) if sum(each) <= 4))
    finite = sorted(time for time in brute.values() if np.isfinite(time))
    target = finite[int(part * len(finite))] * 1.001
    cheapest = min(CATALOGUE.price(vector) for vector, time in brute.items() if time <= target)
    sizing = Sizing(NEED)
    *undecided, found = sizing.cheapest(target)
    assert found.met and found.price == pytest.approx(cheapest)
    assert found.objective >= brute[found.vector] * (1 - 1e-9) and found.bound <= found.objective
    for vector, time in brute.items():
        assert sizing.bounds.known(vector) <= time and sizing.bounds.least(vector) <= time * (1 + 1e-9)
    assert all(point.price <= found.price and brute[point.vector] > target for point in undecided)
    for proof in sizing.bounds.excluded:
        again = check_exclusion(proof, CATALOGUE, MODEL, COST, LOADS)
        assert again >= proof.seconds * (1 - 1e-6) > target * (1 - 1e-6)
        if np.isfinite(proof.seconds):
            assert again == pytest.approx(proof.seconds, rel=0.05)


def test_a_cluster_that_cannot_be_timed_is_undecided_not_left_out(monkeypatch):
    def without_times(cost, cluster) -> str | None:
        return "no times" if all(node.name.startswith("small") for node in cluster.nodes) else None

    monkeypatch.setattr(Datasheet, "lacks_network", without_times)
    *undecided, found = Sizing(NEED).cheapest(1e3)
    assert found.met and found.vector == (0, 0, 1)
    assert [(point.vector, point.objective, point.plan) for point in undecided] == [((2, 0, 0), None, None)]
    assert 0 < undecided[0].bound <= 1e3


def test_no_cluster_below_an_excluded_one_is_faster(brute):
    """Proofs of the whole catalogue hold for all smaller clusters, whatever their rung."""
    sizing, rungs = Sizing(NEED), set()
    for target in np.geomspace(min(brute.values()) * 0.8, max(time for time in brute.values() if np.isfinite(time)), 3):
        for vector in brute:
            sizing.bounds.exclude(vector, target, (4, 4, 4))
        rungs |= {proof.rung for proof in sizing.bounds.excluded}
    assert rungs >= {"memory", "experts by type"}
    assert all(sizing.bounds.known(vector) <= time * (1 + 1e-9) for vector, time in brute.items())


ROOMY = make_gpu(0, send=2e6, memory_bandwidth=1e9)
PAIRS = Catalogue(
    nodes=(
        offer("slow", 1.0, (make_gpu(1, send=5e5, flops=1e9),)).model_copy(update={"latency": 2e-3}),
        offer("roomy", 2.5, (ROOMY,)).model_copy(update={"latency": 1e-3}),
        offer("linked", 2.2, (LINKED,) * 2, link=2e7).model_copy(update={"latency": 3e-3}),
    )
)


SIX, EVEN = make_model(2, 6, 1, d_model=64, d_ff=96), np.full((2, 6), 30.0)


@pytest.mark.parametrize("vector", [(1, 1, 0), (0, 2, 0), (2, 1, 0), (0, 1, 1), (1, 0, 1), (0, 0, 2)])
def test_the_bound_of_a_case_holds_at_its_edges(vector):
    """The domain with most tokens has just more than one end of the case, or just the other; the rest is anywhere."""
    of = Sizing(Need((ExpertLoad("even", EVEN, SIX.moe_layers),), SIX, PAIRS, COST)).bounds.of[0]
    cluster, tight = PAIRS.cluster(vector), []
    starts = np.cumsum([0, *cluster.node_sizes])
    for place, special in of.cases(vector):
        if special < 0:
            continue
        prices = of.prices(vector, place, special)
        bound = of.before(vector) + of.case(vector, place, special, prices)
        assert of.before(vector) + of.case(vector, place, special, None) <= bound * (1 + 1e-9)
        first = sum(vector[:special])
        for part in (CASES[place][0] + 1e-6, CASES[place][1]):
            share = np.zeros(starts[-1])
            for node, size in enumerate(cluster.node_sizes):
                nodes = len(cluster.nodes) - 1
                share[starts[node] : starts[node] + size] = (part if node == first else (1 - part) / max(nodes, 1)) / size
            if max(share[starts[node] : starts[node + 1]].sum() for node in range(len(starts) - 1)) > part + 1e-9:
                continue  # another has more
            time = fastest_pass(cluster, share, SIX, COST, EVEN)
            assert bound <= time * (1 + 1e-9)
            tight.append(bound / time)
    assert max(tight) > 0.8


def test_a_front_falls_and_keeps_its_plans(brute):
    sizing = Sizing(NEED)
    fronts = list(sizing.front(max(time for time in brute.values() if np.isfinite(time)), np.inf, 3))
    met = [found[-1] for found in fronts if found[-1].met]
    assert len(met) >= 2
    for sooner, later in pairwise(met):
        assert later.objective <= 0.8 * sooner.objective and later.price >= sooner.price
    tried = len(sizing.trials)
    again = sizing.cheapest(met[0].objective)
    assert again[-1].vector == met[0].vector and len(sizing.trials) == tried
    fastest = sizing.fastest(met[-1].price)
    assert fastest[-1].met and fastest[-1].objective <= met[-1].objective * 1.02 and fastest[-1].price <= met[-1].price


def test_the_slowest_of_several_recordings_counts():
    other = ExpertLoad("other", LOADS[:, ::-1].copy(), MODEL.moe_layers)
    both = Need((*NEED.recordings, other), MODEL, CATALOGUE, COST)
    alone = Sizing(NEED).cheapest(1.0)[-1]
    assert Sizing(both).cheapest(1.0)[-1].objective >= alone.objective * (1 - 1e-9)


def test_a_stopped_search_keeps_what_it_has():
    asked = iter([False] * 3 + [True] * 10_000)
    assert all(not point.met or point.plan for point in Sizing(NEED, lambda: next(asked)).cheapest(1e-9))


def test_a_stopped_job_keeps_the_cluster_that_it_had_found_and_proves_nothing(own_data_folder):
    asked = {"recordings": [store.save_workload(NEED.recordings[0])], "model": as_json(MODEL), "catalogue": as_json(CATALOGUE)}
    asked |= {"target": "1 s a pass", "front": 3, "cost": choice.to_dict(COST)}
    stopped, whole = FakeContext(enough=1), FakeContext()
    first, answer = (in_json(tasks.size)(asked, context) for context in (stopped, whole))
    (row,) = stopped.kept[0]["candidates"]
    assert [each["point"] for each in first["candidates"]] == [row["point"]] and row["point"]["objective"] <= 1.0
    assert (
        row["plan"]["provenance"]["optimiser"] == "size" and answer["candidates"][0]["point"]["nodes"] == row["point"]["nodes"]
    )
    assert len(answer["candidates"]) > 1 and answer["excluded"]
    shares = [done for done, _ in whole.said]
    assert shares == sorted(shares) and shares[-1] < 1
    for each in answer["excluded"]:
        assert each["seconds"] is None or each["rung"] != "memory"


@pytest.mark.parametrize(
    ("target", "front", "met", "undecided", "stopped", "words"),
    [
        (Target(1.0), False, 1, 0, False, "proven: no cheaper cluster of this catalogue meets the target"),
        (Target(None, 9.0), False, 1, 0, False, "proven: no cluster of this catalogue at this price takes 1.0 % less time"),
        (Target(None, 9.0), True, 2, 0, False, "proven: no cheaper cluster"),
        (Target(1.0), False, 1, 2, True, "2 undecided, nearest first"),
        (Target(1.0), False, 1, 0, True, ""),
        (Target(1.0), False, 0, 0, False, ""),
    ],
)
def test_no_more_is_said_than_is_proven(target, front, met, undecided, stopped, words):
    said = proven(target, front, met, undecided, stopped)
    assert said.startswith(words) and bool(said) == bool(words)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([{"type": "nothing", "price": 1, "most": 1}], "no node type 'nothing' is known"),
        ([{"type": "hgx-h100", "price": -1, "most": 1}], "price"),
        ([{"type": "hgx-h100", "price": 1, "most": 1}] * 2, "two offers are called 'hgx-h100'"),
        ([], "nodes"),
    ],
)
def test_catalogues_that_cannot_be_are_one_line(nodes, message):
    with pytest.raises(InputError, match=message):
        Catalogue.from_json(json.dumps({"nodes": nodes}), "catalogue.json")
