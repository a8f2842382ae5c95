"""Launches of plans with a two-tier order: the nodes of their ranks, refusals, and four ranks in two nodes."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from engine.errors import InputError, UndecidedError
from engine.launch.places.destination import Slurm
from engine.launch.places.fold import fold_tiers, nearest_ranks
from engine.launch.preparation.launch import PreparedLaunch
from engine.launch.preparation.place_checks import relay_checks
from engine.launch.rank.hops import hops
from engine.launch.rank.measure_machine import tier_peers
from engine.launch.rank.routes import combined, route
from engine.launch.results.run import Run
from engine.launch.running.local import run_here
from engine.plan import Placement, SendOrder
from engine.result import never
from engine.systems.base import silent
from tests.cases.launch_plans import MODES, coherent
from tests.cases.launches import EVEN, LAYERS, hold_together, of, plan_for, sent
from tests.cases.two_nodes import CONCURRENT, TIERED, TRACE, cluster_of, prepare, tiered


# The nodes of ranks.
def test_ranks_have_the_ports_and_links_of_their_gpus_and_none_is_of_two_nodes_with_links():
    tiers = fold_tiers(cluster_of((4, 8e9), (2, 4e9)), 3)
    assert tiers.node == (0, 0, 1) and tiers.port == (2e9,) * 3 and tiers.link == (16e9, 16e9, 0.0)
    assert tiers.network.domain.tolist() == [0, 0, 2]
    assert fold_tiers(cluster_of((2, 8e9), (2, 8e9), (2, 8e9)), 4) is None
    assert fold_tiers(cluster_of((2, 8e9), (1, None)), 1) is None
    alone = fold_tiers(cluster_of((2, None), (2, None)), 2)
    assert alone.link == (0.0, 0.0) and alone.network.domain.tolist() == [0, 1]
    mixed = fold_tiers(cluster_of((2, 8e9), (2, None)), 4)
    assert mixed.link == (8e9, 8e9, 0.0, 0.0) and mixed.network.domain.tolist() == [0, 0, 2, 3]


def test_plans_run_on_the_nearest_number_of_ranks_that_keeps_nodes_whole():
    def nearest(ranks: int, *nodes: tuple[int, float | None], order: SendOrder = TIERED.send_order) -> int:
        cluster = cluster_of(*nodes)
        row = ((0,), *((),) * (len(cluster.gpus) - 1))
        placed = {"placement": Placement(experts=1, experts_of_gpu=(row,), model_layers=(0,))}
        plans = [CONCURRENT.model_copy(update=placed), TIERED.model_copy(update=placed | {"send_order": order})]
        return nearest_ranks(plans, cluster, ranks)

    eight = ((8, 9e9),) * 8
    assert [nearest(ranks, *eight) for ranks in (1, 4, 8, 15, 16, 31, 64)] == [8, 8, 8, 8, 16, 24, 64]
    assert nearest(4, *((8, 9e9),) * 3) == 3 and nearest(4, (8, 9e9)) == 4 and nearest(2, (5, 9e9), (2, 9e9)) == 3
    assert nearest(3, *((2, None),) * 4) == 3, "without links there is nothing to keep"
    assert nearest(4, *eight, order=CONCURRENT.send_order) == 4
    assert nearest_ranks([TIERED], None, 3) == 3 and nearest_ranks([TIERED], cluster_of(*eight), 3) == 3


# Before anything runs.
def test_the_usual_number_of_ranks_can_carry_out_a_two_tier_order():
    def tiered_on(nodes: int) -> PreparedLaunch:
        cluster, row = cluster_of(*((2, 8e9),) * nodes), tuple((expert,) for expert in range(8))
        rows = ((*row, *((),) * (2 * nodes - 8)),) * LAYERS
        spread = Placement(experts=8, experts_of_gpu=rows, model_layers=range(LAYERS))
        return prepare(None, cluster, tiered(CONCURRENT.model_copy(update={"placement": spread}), cluster))

    assert tiered_on(4).instructions.ranks == 4 and tiered_on(6).instructions.ranks == 6
    message = r"^the plan two-tier .* takes at least 9 ranks, each a process: say how many$"
    with pytest.raises(UndecidedError, match=message):
        tiered_on(9)


def test_a_two_tier_order_needs_the_nodes():
    def refused(part: str, **options) -> None:
        with pytest.raises(InputError, match=part) as caught:
            prepare(**options)
        assert str(caught.value).startswith("the plan two-tier has a two-tier order") and "\n" not in str(caught.value)

    refused(r"say which nodes there are \(--cluster\)", cluster=None)
    refused("it is for 4 GPUs, drawn has 3", cluster=cluster_of((3, 8e9)))
    refused("on 2 ranks .* several nodes: choose 4", ranks=2, cluster=cluster_of((1, None), (3, 8e9)))
    assert prepare().ready and prepare(ranks=2).ready
    assert prepare(plan=CONCURRENT, cluster=None).instructions.tiers is None
    assert all(prepare(plan=plan_for(TRACE, mode), cluster=None).ready for mode in MODES), "other modes need no cluster"


def test_relays_of_a_job_on_other_nodes_are_warned_of():
    def warned(nodes: int, each: int) -> list[str]:
        sizes = {"gpus_per_node": 0, "cpus_per_node": 4, "memory_per_node": 2.0**33, "shared": "/shared"}
        job = Slurm(nodes=nodes, ranks_per_node=each, **sizes)
        return [check.text for check in relay_checks(prepare(nodes * each), job)]

    assert not warned(2, 2)
    (text,) = warned(1, 4)
    assert text == "the nodes of the plan have 2 ranks, those of the job 4: ranks would relay over the fabric"


def test_links_are_measured_where_ranks_relay_over_them():
    peers = tier_peers(prepare().instructions)
    assert peers["inside nodes"].astype(int).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]
    assert (peers["between nodes"] == ~(peers["inside nodes"] | np.eye(4, dtype=bool))).all()
    assert not tier_peers(prepare(ranks=2).instructions), "each rank is a node: nobody relays"
    assert not tier_peers(prepare(plan=CONCURRENT).instructions)


# Launched.
@pytest.fixture(scope="module")
def whole(launch_once) -> tuple[PreparedLaunch, Run]:
    """A two-tier plan, a concurrent one and a context-coherent one in one launch of four ranks in two nodes."""
    launch = prepare(beside=(CONCURRENT, coherent(CONCURRENT)))
    return launch, launch_once(launch)


def test_four_ranks_in_two_nodes_compute_the_same_and_show_what_they_relay(whole):
    launch, run = whole
    first_two = launch.instructions.model_copy(update={"plans": launch.instructions.plans[:2]})
    hold_together(replace(launch, instructions=first_two), replace(run, runs=run.runs[:2]))
    relayed, plain, _ = run.runs
    assert relayed.difference == plain.difference, "the order changes when, never what"
    size, network = launch.instructions.model.bytes_per_token, launch.instructions.tiers.network
    experts, source = launch.workloads[0].experts, launch.workloads[0].rank_of_token(4)
    for layer in range(LAYERS):
        out = route(experts[:, layer], source, EVEN.share[layer])
        for kind, way in (("dispatch", out), ("combine", combined(out, source))):
            schedule = getattr(TIERED.send_order, kind)[layer]
            pieces = Counter()
            for piece in hops(schedule, way.counts, network).order:
                pieces[piece.src, piece.dst, (piece.end - piece.begin) * size] += 1
            sends = of(relayed.measured, kind, layer)
            assert Counter(zip(sends["resource"], sends["peer"], sends["bytes"], strict=True)) == pieces
            predicted = of(relayed.predicted, kind, layer)
            between = [part[part["resource"] // 2 != part["peer"] // 2] for part in (sends, predicted)]
            assert between[0]["bytes"].sum() == pytest.approx(between[1]["bytes"].sum())
            ports = [part.groupby("resource")["bytes"].sum() / size for part in between]
            assert (ports[0] - ports[1]).abs().max() <= 2 * len(set(schedule.phase))
    assert "inside nodes" in relayed.predicted.cost_source


@pytest.mark.everything
def test_ranks_that_stand_for_whole_nodes_need_no_relays(tmp_path, warm_python):
    whole = run_here(prepare(ranks=2, repeats=1), tmp_path / "run", never, silent)
    assert whole.runs[0].difference.error <= 1e-5


def test_all_gathers_of_four_ranks_in_two_nodes_enter_every_node_once(whole):
    launch, run = whole
    gathered = run.runs[2]
    assert 0 <= gathered.difference.error <= 1e-5
    routed = (launch.workloads[0].experts >= 0).any(axis=(1, 2)).sum() * launch.instructions.model.bytes_per_token
    across = np.arange(4)[:, None] // 2 != np.arange(4) // 2
    for kind, layer in (("prompt_gather", 0), ("all_gather", LAYERS - 1)):
        measured, predicted = (sent(timeline, kind, layer, 4) for timeline in (gathered.measured, gathered.predicted))
        np.testing.assert_allclose(measured, predicted, rtol=1e-9)
        assert measured.sum() == 3 * routed and measured[across].sum() == routed
    assert "attention" not in set(gathered.predicted.events["kind"])
    assert prepare(plan=coherent(CONCURRENT), cluster=None).instructions.tiers is None
