"""Nodes with links of their own on the testbed: as fast as asked, apart from the ports, and relays go over them."""

import numpy as np
import pytest

from engine.catalogue import cluster_presets
from engine.errors import InputError
from engine.launch.places.testbed import FASTEST_LINK, Testbed, emulated_cluster
from engine.launch.rank.instructions import Tiers
from engine.launch.rank.links import links_of
from engine.launch.running.local import run_here
from engine.result import never
from engine.systems.base import silent
from tests.cases.launches import LAYERS, MODEL, UNEVEN, of, plan_for, recording
from tests.cases.testbeds import MBIT, needs_testbed, nothing_left, rate_between
from tests.cases.two_nodes import CONCURRENT, TIERED, TWO_NODES, cluster_of, hold_bytes, prepare, prepared, travelling

pytestmark = pytest.mark.usefixtures("warm_python")
__all__ = ["nothing_left"]  # a fixture of all tests here too


def linked(port: float, link: float, node: tuple[int, ...] = (0, 0, 1, 1)) -> Testbed:
    """Ranks of these nodes with links and ports of so many Mbit/s."""
    ports = np.full(len(node), port * MBIT)
    return Testbed(ports, tiers=Tiers(node=node, port=tuple(ports), link=(link * MBIT,) * len(node)))


def test_drawn_links_are_folded_scaled_and_bearable():
    drawn = emulated_cluster(cluster_of((4, 20e9), (2, 10e9), port=10e9), 6)
    assert drawn.scale == pytest.approx(800) and drawn.bandwidth.tolist() == pytest.approx([100 * MBIT] * 6)
    assert drawn.near.tolist() == pytest.approx([200 * MBIT] * 4 + [100 * MBIT] * 2)
    folded = emulated_cluster(cluster_of((4, 20e9), (2, 10e9), port=10e9), 3)
    assert folded.near.tolist() == pytest.approx([200 * MBIT] * 2 + [0]), "the third rank is alone in its node"
    assert [folded.mates(rank) for rank in range(3)] == [[1], [0], []]
    h100 = emulated_cluster(cluster_presets()["hgx-h100-4-nodes"].cluster, 32)
    assert set(h100.near) == {FASTEST_LINK} and h100.to_dict()["near"] == [FASTEST_LINK] * 32
    slower = emulated_cluster(cluster_presets()["hgx-h100-4-nodes"].cluster, 32, 9000)
    assert slower.near / slower.bandwidth == pytest.approx(9)


def test_ranks_of_two_nodes_have_no_links():
    testbed = emulated_cluster(cluster_of((1, None), (3, 8e9)), 2)
    assert testbed.tiers is None and not testbed.near.any() and "near" not in testbed.to_dict()
    with pytest.raises(InputError, match="has no nodes, in which the ranks of two-tier relay"):
        prepare().on_testbed(Testbed(np.full(4, MBIT)))
    with pytest.raises(InputError, match=r"links for 3 ranks .* 4 ranks"):
        prepare().on_testbed(Testbed(np.full(3, MBIT)))
    with pytest.raises(InputError, match="too slow"):
        linked(1, 1e-3)


@needs_testbed
def test_links_are_as_fast_as_asked_and_ports_stay_as_slow(cold_python):
    with linked(20, 160) as testbed:
        for src, dst, asked in ((0, 1, 160 * MBIT), (3, 2, 160 * MBIT), (0, 2, 20 * MBIT), (3, 1, 20 * MBIT)):
            assert rate_between(testbed, src, dst, asked / 2) == pytest.approx(asked, rel=0.1)


def test_a_prediction_knows_the_links_of_a_testbed():
    launch = prepare().on_testbed(linked(20, 160))
    measured = {"network": [[1.0, 1.0]], "phases": [[1e6, 1e6 / (20 * MBIT) + 0.25]]}
    network = links_of(launch.instructions, measured).network
    assert network.domain.tolist() == [0, 0, 2, 2] and network.link.tolist() == [160 * MBIT] * 4
    assert network.start_up(np.array([0, 0]), np.array([1, 2])).tolist() == pytest.approx([0.25, 0.25])
    # A node alone is as slow as its links.
    launch = prepare(cluster=cluster_of((4, 8e9)), plan=CONCURRENT).on_testbed(linked(20, 160, (0, 0, 0, 0)))
    measured = {"network": [[1.0, 1.0]], "phases": [[1e6, 1e6 / (160 * MBIT) + 0.25]]}
    assert links_of(launch.instructions, measured).start_up == pytest.approx(0.25)


def test_links_that_are_too_fast_to_be_seen_are_given_no_rate():
    sizes = (1e3, 1e5, 1e6)
    measured = {"network": [[size, 1e-3] for size in sizes], "phases": [[1e6, 1e-3]]}
    links = links_of(prepare().instructions, measured)
    assert "Mbit/s" not in links.text and "too high to be seen" in links.text
    assert links.start_up == pytest.approx(1e-3, rel=1e-3)
    measured["network"] = [[size, 1e-3 + size / 1e9] for size in sizes]
    assert links_of(prepare().instructions, measured).text.startswith("links of 8,000 Mbit/s, a latency of")


@needs_testbed
def test_relayed_rows_go_over_links(tmp_path):
    launch = prepare(repeats=1, beside=(CONCURRENT,))
    launch = launch.on_testbed(linked(10, 160))
    whole = run_here(launch, tmp_path / "run", never, silent)
    network = launch.instructions.tiers.network
    for run in whole.runs:
        assert 0 <= run.difference.error <= 1e-5
        for timeline in (run.predicted, run.measured):
            for layer in range(LAYERS):
                sends = of(timeline, "dispatch", layer)
                out, into = network.ports(sends["resource"].to_numpy(), sends["peer"].to_numpy())
                moved = np.bincount(out, sends["bytes"], 16) + np.bincount(into, sends["bytes"], 16)
                needed = (moved / network.capacity).max()
                # Bursts that pass at once are few bytes compared with those of the ranks.
                assert sends["end"].max() - sends["start"].min() > 0.8 * needed > 0.005
    assert "(inside nodes 160 Mbit/s)" in whole.runs[0].predicted.cost_source
    assert TIERED.send_order.mode == launch.instructions.plans[0].send_order.mode == "two-tier"


# Tokens that spread inside nodes.
PORT, LINK = 10 * MBIT, 40 * MBIT
LAUNCHES = 3
"""The most tries."""


@needs_testbed
def test_a_row_a_node_takes_as_long_as_predicted(tmp_path):
    """A machine with other work makes passes longer, and then the next launch may fare better."""
    trace, model = recording(900), MODEL.model_copy(update={"d_model": 512})
    concurrent = plan_for(trace, "concurrent", UNEVEN, model)
    plans = [travelling(concurrent, "node"), travelling(concurrent, "node", "fp8", "bf16")]
    launch = prepared(*plans, trace=trace, model=model, repeats=3)
    tiers = Tiers(node=(0, 0, 1, 1), port=(PORT,) * 4, link=(LINK,) * 4)
    launch = launch.on_testbed(Testbed(np.full(4, PORT), tiers=tiers))
    seen = []
    while len(seen) < LAUNCHES and not (seen and abs(np.log(seen[-1])).max() <= np.log(1.15)):
        runs = run_here(launch, tmp_path / f"run {len(seen)}", never, silent).runs
        hold_bytes(launch, runs, TWO_NODES)
        assert all(run.difference.share <= 1 for run in runs)
        seen.append([min(run.totals) / run.predicted.total for run in runs])
    assert abs(np.log(seen[-1])).max() <= np.log(1.15), seen
    in_fp32, in_8_bits = (run.predicted.total for run in runs)
    assert in_8_bits < 0.6 * in_fp32
    for layer in range(LAYERS):
        sends = of(runs[0].measured, "dispatch", layer)
        steps = sends.groupby(sends["resource"] // 2 == sends["peer"] // 2)
        assert steps["start"].max()[True] > steps["end"].min()[False], "what is spread has entered before"
        assert steps["start"].min()[True] < steps["end"].max()[False], "while others enter"
