"""From one placement to another: against every relabelling and every choice of senders on small clusters."""

from itertools import product

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.errors import IllegalError, InputError
from engine.network import Network
from engine.placement.migration import break_even, moved, seconds_of, transfers
from tests.cases.examples import tried
from tests.oracles.placing import check_transfers, seconds_of_moves
from tests.strategies import networks, seeds


def random_held(rng: np.random.Generator, layers: int, experts: int, gpus: int) -> np.ndarray:
    """bool[layer, expert, gpu]: every expert somewhere."""
    held = rng.random((layers, experts, gpus)) < 0.3
    home = rng.integers(gpus, size=(layers, experts))
    np.put_along_axis(held, home[..., None], True, axis=2)
    return held


def even_network(gpus: int, link: float = 0.0, nodes: int = 1, latency: float = 0.0) -> Network:
    ones = np.ones(gpus)
    return Network(ones, ones, link * ones, np.repeat(np.arange(nodes), gpus // nodes), latency, 0 * ones)


@tried(60, networks(5), seeds, st.integers(1, 3), st.integers(1, 6))
def test_transfers_are_legal_and_their_limit_holds(network, seed, layers, experts):
    rng = np.random.default_rng(seed)
    now, new = (random_held(rng, layers, experts, network.gpus) for _ in range(2))
    sent = transfers(now, new, 300.0, network)
    check_transfers(sent.source, sent.traffic, now, new, 300.0)
    assert sent.seconds == pytest.approx(seconds_of_moves(sent.source, 300.0, network))
    assert sent.seconds >= network.bound(sent.traffic) * (1 - 1e-9)
    assert sent.bound <= sent.seconds
    copies = np.argwhere(moved(now, new))
    assert copies.tolist() == np.argwhere(new & ~now).tolist()
    choices = [np.flatnonzero(now[layer, expert]) for layer, expert, _ in copies]
    if np.prod([float(len(choice)) for choice in choices]) > 2000:
        return
    fastest = np.inf
    for src in product(*choices):
        source = np.full(now.shape, -1)
        source[tuple(copies.T)] = src
        fastest = min(fastest, seconds_of(source, 300.0, network))
    assert sent.bound <= fastest * (1 + 1e-9)
    assert sent.seconds <= fastest * 1.5


def test_senders_share_the_work():
    """Four receivers, two who have the expert: each sends twice."""
    now = np.zeros((4, 1, 6), dtype=bool)
    now[:, :, :2] = True
    new = now.copy()
    new[range(4), 0, [2, 3, 4, 5]] = True
    sent = transfers(now, new, 10.0, even_network(6, latency=0.5))
    assert sent.traffic.sum(axis=1).tolist() == [20, 20, 0, 0, 0, 0]
    assert sent.seconds == pytest.approx(20.5) == pytest.approx(sent.bound, rel=1e-4)
    # Three copies from two senders: whole ones take 20 s, and no division under 15 s.
    new[3, 0, 5] = False
    sent = transfers(now, new, 10.0, even_network(6, latency=0.5))
    assert (sent.seconds, sent.bound) == (pytest.approx(20.5), pytest.approx(15.5, rel=1e-4))


def test_a_gpu_waits_for_its_partners_of_a_layer_alone():
    """0 sends to 1 in the first layer, 2 to 3 in the next two, and 1 to 2 and 3 in the last one."""
    source = np.full((4, 2, 4), -1)
    source[0, 0, 1], source[1:3, 0, 3] = 0, 2
    network = even_network(4, latency=0.5)
    assert seconds_of(source, 10.0, network) == pytest.approx(20.5)
    source[3, [0, 1], [2, 3]] = 1
    assert seconds_of(source, 10.0, network) == pytest.approx(40.5)


def test_links_of_a_node_are_taken_where_they_are_no_slower():
    now = np.zeros((1, 1, 4), dtype=bool)
    now[0, 0, [0, 2]] = True
    new = now.copy()
    new[0, 0, 3] = True
    assert transfers(now, new, 1.0, even_network(4, link=1.0, nodes=2)).source[0, 0].tolist() == [-1, -1, -1, 2]
    assert transfers(now, new, 1.0, even_network(4, link=9.0, nodes=2)).source[0, 0, 3] == 2


def test_nothing_to_send():
    now = np.ones((2, 3, 4), dtype=bool)
    sent = transfers(now, now, 5.0, even_network(4))
    assert (sent.seconds, sent.bound, sent.traffic.sum(), sent.source.max()) == (0, 0, 0, -1)
    more = np.zeros((1, 1, 2), dtype=bool)
    more[0, 0, 0] = True
    assert transfers(more, ~more, 0.0, even_network(2)).seconds == 0


def test_break_even():
    assert break_even(10.0, 1.0, 0.8) == pytest.approx(50)
    assert break_even(10.0, 1.0, 1.0) == break_even(10.0, 1.0, 1.1) == float("inf")
    assert break_even(0.0, 1.0, 0.5) == 0


@pytest.mark.parametrize(
    ("new", "size", "gpus", "says"),
    [
        (np.ones((1, 2, 2), dtype=bool), 1.0, 2, "layer 0, expert 1: no GPU has a copy"),
        (None, 1.0, 3, "3 GPUs"),
        (None, -1.0, 2, "bytes_per_expert"),
        (np.ones((1, 1, 2), dtype=bool), 1.0, 2, r"\(1, 2, 2\)"),
    ],
)
def test_bad_input_is_named(new, size, gpus, says):
    now = np.zeros((1, 2, 2), dtype=bool)
    now[0, 0, 0] = True
    with pytest.raises(InputError, match=says):
        transfers(now, now if new is None else new, size, even_network(gpus))


def test_the_check_refuses_wrong_senders():
    now = np.zeros((1, 1, 3), dtype=bool)
    now[0, 0, 0] = True
    new = np.array([[[True, True, False]]])
    traffic = np.zeros((3, 3))
    traffic[0, 1] = 7.0
    source = np.array([[[-1, 0, -1]]])
    check_transfers(source, traffic, now, new, 7.0)
    for wrong in ([-1, 2, -1], [-1, -1, -1], [-1, 0, 0]):
        with pytest.raises(IllegalError):
            check_transfers(np.array([[wrong]]), traffic, now, new, 7.0)
    with pytest.raises(IllegalError):
        check_transfers(source, traffic * 2, now, new, 7.0)
