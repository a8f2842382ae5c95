"""Plans with a two-tier order, launched: the nodes of their ranks, what is refused, and what four ranks in two nodes do."""

import json
from collections import Counter

import numpy as np
import pytest

from engine.cli import main
from engine.cluster import Cluster, Node
from engine.communication.two_tier import two_tier
from engine.errors import InputError, UndecidedError
from engine.launch.places.destination import Slurm
from engine.launch.places.fold import fold_tiers, nearest_ranks
from engine.launch.preparation.inference import prepare_inference
from engine.launch.preparation.launch import Launch, PreparedLaunch
from engine.launch.preparation.place_checks import relay_checks
from engine.launch.rank.hops import hops
from engine.launch.rank.measure_machine import tier_peers
from engine.launch.rank.routes import combined, route
from engine.launch.running.local import run_here
from engine.network import Network
from engine.plan import Placement, Plan, SendOrder
from engine.result import never
from engine.systems.base import silent
from tests.launch.plans import MODES
from tests.launch.test_local import EVEN, HOST, LAYERS, MODEL, hold_together, of, plan_for, recording
from tests.strategies import make_gpu

TRACE = recording()


def cluster_of(*nodes: tuple[int, float | None], port: float = 1e9) -> Cluster:
    """Nodes of so many alike GPUs and with links so fast."""
    drawn = [
        Node(name=f"node {at}", gpus=(make_gpu(send=port),) * size, link_bandwidth=link)
        for at, (size, link) in enumerate(nodes)
    ]
    return Cluster(name="drawn", nodes=drawn)


TWO_NODES = cluster_of((2, 8e9), (2, 8e9))


def tiered(plan: Plan, cluster: Cluster = TWO_NODES) -> Plan:
    """The plan with a two-tier order on a cluster."""
    traffic = TRACE.demand(plan.placement.gpus) @ plan.placement.share * MODEL.bytes_per_token
    schedules = [two_tier(matrix, Network.of(cluster)).solution for matrix in (*traffic, *traffic.transpose(0, 2, 1))]
    order = SendOrder(mode="two-tier", dispatch=schedules[:LAYERS], combine=schedules[LAYERS:])
    return plan.model_copy(update={"name": "two-tier", "send_order": order})


CONCURRENT = plan_for(TRACE, "concurrent")
TIERED = tiered(CONCURRENT)


def prepare(ranks: int = 4, cluster: Cluster | None = TWO_NODES, plan: Plan = TIERED, **more) -> PreparedLaunch:
    plans = (plan, *more.pop("beside", ()))
    return prepare_inference(Launch(plans, TRACE, MODEL, cluster, ranks=ranks, **{"repeats": 2} | more), HOST)


# The nodes of ranks.


def test_ranks_have_the_ports_and_links_of_their_gpus():
    tiers = fold_tiers(cluster_of((4, 8e9), (2, 4e9)), 3)
    assert tiers.node == (0, 0, 1) and tiers.port == (2e9,) * 3 and tiers.link == (16e9, 16e9, 0.0)
    assert tiers.network.domain.tolist() == [0, 0, 2]


def test_a_rank_is_never_of_two_nodes_with_links():
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
        spread = Placement(
            experts=8, experts_of_gpu=((*row, *((),) * (2 * nodes - 8)),) * LAYERS, model_layers=range(LAYERS)
        )
        return prepare(None, cluster, tiered(CONCURRENT.model_copy(update={"placement": spread}), cluster))

    assert tiered_on(4).instructions.ranks == 4 and tiered_on(6).instructions.ranks == 6
    with pytest.raises(
        UndecidedError, match=r"^the plan two-tier .* takes at least 9 ranks, each a process: say how many$"
    ):
        tiered_on(9)


def test_a_two_tier_order_needs_the_nodes():
    def refused(part: str, **options) -> None:
        with pytest.raises(InputError, match=part) as caught:
            prepare(**options)
        assert str(caught.value).startswith("the plan two-tier has a two-tier order") and "\n" not in str(caught.value)

    refused(r"say which nodes there are \(--cluster\)", cluster=None)
    refused("it is for 4 GPUs, drawn has 3", cluster=cluster_of((3, 8e9)))
    refused("on 2 ranks .* several nodes: choose 4", ranks=2, cluster=cluster_of((1, None), (3, 8e9)))
    assert (
        prepare().ready and prepare(ranks=2).ready and prepare(plan=CONCURRENT, cluster=None).instructions.tiers is None
    )


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


@pytest.mark.slow
def test_four_ranks_in_two_nodes_compute_the_same_and_show_what_they_relay(tmp_path, warm_python):
    launch = prepare(beside=(CONCURRENT,))
    whole = run_here(launch, tmp_path / "run", never, silent)
    hold_together(launch, whole)
    relayed, plain = whole.runs
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


@pytest.mark.slow
def test_ranks_that_stand_for_whole_nodes_need_no_relays(tmp_path, warm_python):
    whole = run_here(prepare(ranks=2, repeats=1), tmp_path / "run", never, silent)
    assert whole.runs[0].difference.error <= 1e-5


@pytest.mark.slow
def test_the_command_line_takes_the_nodes_from_the_cluster(tmp_path, capsys, own_data_folder, warm_python):
    np.savez(tmp_path / "trace.npz", experts=TRACE.experts)
    for name, document in (("plan", TIERED), ("model", MODEL), ("cluster", TWO_NODES)):
        (tmp_path / f"{name}.json").write_text(document.to_json())
    command = ["launch", f"{tmp_path}/plan.json", f"--workload={tmp_path}/trace.npz", f"--model={tmp_path}/model.json"]
    command += ["--ranks=4", "--repeats=1", "--tokens=100", "--json"]
    assert main(command) == 2
    assert "say which nodes there are (--cluster)" in capsys.readouterr().err
    assert main([*command, f"--cluster={tmp_path}/cluster.json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["difference"] < 1e-5 and "inside nodes" in run["predicted"]["cost_source"]


def test_other_modes_need_no_cluster():
    for mode in MODES:
        assert prepare(plan=plan_for(TRACE, mode), cluster=None).ready
