"""`solve two-tier`: every answer carried out as docs/kernels.md says, byte by byte, and held against the rules."""

from collections import defaultdict

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.network import Network
from engine.validate import check_relayed
from tests.cases.examples import examples

INSTANCE = {"traffic": [[0, 3, 1, 0], [2, 0, 0, 0], [1, 1, 0, 5], [0, 9, 2, 0]], "bandwidth": 1, "link_bandwidth": 9}


def parts(listed: list[dict], held: dict[int, float]) -> dict[int, dict[int, float]]:
    """GPU by GPU, which part of what it holds goes where; what is not listed stays."""
    goes: dict[int, dict[int, float]] = defaultdict(dict)
    for send in listed:
        goes[send["src"]][send["dst"]] = send["bytes"] / held[send["src"]]
    for gpu in held:
        stays = 1 - sum(goes[gpu].values())
        if stays > 1e-12:
            goes[gpu][gpu] = stays
    return goes


def carried_out(answer: dict, traffic: np.ndarray, node: np.ndarray) -> pd.DataFrame:
    """All hops of an answer, by whose bytes they are."""
    hops = []
    total = {
        pair: traffic[np.ix_(node == pair[0], node == pair[1])].sum() for pair in np.ndindex(*[node.max() + 1] * 2)
    }
    for pair in answer["relays"]:
        a, b = pair["src"], pair["dst"]
        at = {(i, j): {i: traffic[i, j]} for i in np.flatnonzero(node == a) for j in np.flatnonzero(node == b)}
        moves = []
        for offset, name in enumerate(("balance", "rails")):
            held: dict[int, float] = defaultdict(float)
            for place in at.values():
                for gpu, size in place.items():
                    held[gpu] += size
            goes = parts(pair[name], {gpu: size for gpu, size in held.items() if size > 0})
            for whose, place in at.items():
                arrived: dict[int, float] = defaultdict(float)
                for gpu, size in place.items():
                    for peer, part in goes[gpu].items() if size > 0 else ():
                        moves.append((offset, gpu, peer, size * part, *whose))
                        arrived[peer] += size * part
                at[whose] = arrived
        moves += [(2, gpu, whose[1], size, *whose) for whose, place in at.items() for gpu, size in place.items()]
        spread: dict[tuple[int, int], float] = defaultdict(float)
        for offset, src, dst, size, _, _ in moves:
            if offset == 2 and src != dst:
                spread[src, dst] += size
        said = {(send["src"], send["dst"]): send["bytes"] for send in pair["spread"]}
        for key in set(spread) | set(said):
            assert said.get(key, 0.0) == pytest.approx(spread[key], rel=1e-6, abs=1e-9 * traffic.max())
        for phase, sent in enumerate(answer["phases"]):
            for send in sent["sends"]:
                if (send["src"], send["dst"]) == (a, b):
                    part = send["bytes"] / total[a, b]
                    hops += [(phase + move[0], *move[1:3], move[3] * part, *move[4:]) for move in moves]
    for step, entry in enumerate(answer["steps"]):
        for i, j in zip(*np.nonzero(traffic * (node[:, None] == node)), strict=True):
            hops.append((step, i, j, traffic[i, j] * entry["local"][node[i]], i, j))
    table = pd.DataFrame(hops, columns=["step", "src", "dst", "bytes", "origin", "target"])
    return table[(table["src"] != table["dst"]) & (table["bytes"] > 1e-13 * traffic.max())]


def held_against_the_rules(answer: dict, instance: dict) -> None:
    traffic = np.array(instance["traffic"], dtype=float) * (1 - np.eye(len(instance["traffic"])))
    gpus, sizes = len(traffic), instance["gpus_per_node"]
    node = np.arange(gpus) // sizes if isinstance(sizes, int) else np.repeat(np.arange(len(sizes)), sizes)
    rates = [np.broadcast_to(np.array(instance[name], float), gpus) for name in ("bandwidth", "link_bandwidth")]
    network = Network(rates[0], rates[0], rates[1], node, 0.0, np.zeros(gpus))
    seconds = np.array([step["seconds"] for step in answer["steps"]])
    makespan, bound = check_relayed(carried_out(answer, traffic, node), seconds, traffic, network)
    assert answer["objective"] == pytest.approx(makespan, rel=1e-9)
    assert answer["bound"] == pytest.approx(bound, rel=1e-9)
    assert set(answer) == {"status", "objective", "bound", "runtime", "phases", "relays", "steps"}


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=4).flatmap(
        lambda sizes: st.fixed_dictionaries(
            {
                "traffic": st.lists(
                    st.lists(st.one_of(st.just(0), st.integers(1, 10**6)), min_size=sum(sizes), max_size=sum(sizes)),
                    min_size=sum(sizes),
                    max_size=sum(sizes),
                ),
                "bandwidth": st.one_of(
                    st.floats(1, 1e11),
                    st.lists(st.sampled_from([5e9, 1.25e10]), min_size=sum(sizes), max_size=sum(sizes)),
                ),
                "link_bandwidth": st.sampled_from([4.5e11, 1e9]),
                "gpus_per_node": st.just(sizes),
            }
        )
    )
)
def test_any_answer_is_legal(solver, instance):
    held_against_the_rules(solver.answer("two-tier", instance), instance)


def test_nodes_of_one_size_need_one_number(solver):
    listed, number = (INSTANCE | {"gpus_per_node": sizes} for sizes in ([2, 2], 2))
    answers = [solver.answer("two-tier", instance) for instance in (listed, number)]
    assert answers[0]["phases"] == answers[1]["phases"]
    held_against_the_rules(answers[1], number)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"gpus_per_node": 3}, "gpus_per_node must divide the 4 GPUs of traffic, or list every node's (3)"),
        ({"gpus_per_node": [2, 1]}, "gpus_per_node must list nodes of at least 1 GPU, 4 in all, not 3"),
        ({"gpus_per_node": [4, 0]}, "nodes of at least 1 GPU"),
        ({"link_bandwidth": 0}, "link_bandwidth must be a positive number, or one for each of 4 GPUs"),
        ({"bandwidth": [1, 2]}, "bandwidth must be a positive number, or one for each of 4 GPUs"),
        ({"traffic": [[0, 1], [1]]}, "traffic must be a matrix"),
    ],
)
def test_malformed_instances_are_one_line(solver, change, part):
    solver.refused("two-tier", INSTANCE | {"gpus_per_node": 2} | change, part)
