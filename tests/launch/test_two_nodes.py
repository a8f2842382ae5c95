"""Launches of four ranks in two nodes, of plans with a two-tier order or a travel: their nodes, refusals, the simulated bytes,
and the output of one process."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest

from engine.cli import launch as command
from engine.cli import main
from engine.communication.order import order
from engine.communication.two_tier import two_tier
from engine.costs import CostProfile, Datasheet, Line
from engine.errors import InputError, UndecidedError
from engine.launch.places.destination import Slurm
from engine.launch.places.fold import fold_tiers, nearest_ranks
from engine.launch.preparation.launch import PreparedLaunch
from engine.launch.preparation.place_checks import relay_checks, traffic_check
from engine.launch.rank.difference import coarsest
from engine.launch.rank.instructions import MAX_PLANS
from engine.launch.rank.measure_machine import tier_peers
from engine.launch.results.prediction import predict
from engine.launch.results.run import MeasuredPlan, Run
from engine.launch.running.local import run_here
from engine.network import Network, off_diagonal
from engine.plan import Placement, Plan, SendOrder
from engine.problem import Problem
from engine.result import never
from engine.runtime.exchange.hops import Legs, hops
from engine.runtime.exchange.links import Tiers
from engine.runtime.exchange.routes import combined, route
from engine.simulate.work import works_of
from engine.systems.base import silent
from tests import everything
from tests.cases import launches, two_nodes
from tests.cases.launch_plans import MODES, beside, coherent
from tests.cases.refusals import refusal
from tests.cases.testbeds import MBIT
from tests.cases.two_nodes import (
    CONCURRENT,
    PADDED,
    TIERED,
    TWO_NODES,
    WIDE,
    cluster_of,
    hold_bytes,
    prepare,
    prepared,
    travelling,
)

pytestmark = pytest.mark.usefixtures("warm_python")


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


def test_the_usual_number_of_ranks_can_carry_out_a_two_tier_order():
    def tiered_on(nodes: int) -> PreparedLaunch:
        cluster, row = cluster_of(*((2, 8e9),) * nodes), tuple((expert,) for expert in range(8))
        rows = ((*row, *((),) * (2 * nodes - 8)),) * launches.LAYERS
        spread = Placement(experts=8, experts_of_gpu=rows, model_layers=range(launches.LAYERS))
        return prepare(None, cluster, two_nodes.tiered(CONCURRENT.model_copy(update={"placement": spread}), cluster))

    assert tiered_on(4).instructions.ranks == 4 and tiered_on(6).instructions.ranks == 6
    with pytest.raises(UndecidedError, match=r"^the plan two-tier .* takes at least 9 ranks, each a process: say how many$"):
        tiered_on(9)


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


# Tokens that travel, before anything runs.


PLAIN = launches.plan_for(PADDED, "concurrent")
BY_NODE = travelling(PLAIN, "node", "fp8", "bf16")


def test_what_no_rank_carries_out_is_refused_in_one_line():
    coherent, matched = PLAIN.model_copy(update={"execution": "context-coherent"}), launches.plan_for(PADDED, "matched")
    second = launches.recording_b(), launches.OTHER
    other = launches.plan_for(second[0], "matched", launches.UNEVEN, second[1])
    each_copy = "one row .* context-coherent launch sends one row per token copy .* --travel copies"
    for plan, part, more in (
        *((travelling(coherent, unit), each_copy, {}) for unit in ("gpu", "node")),
        (travelling(coherent, "copies", "fp8"), "fp8 out, but a context-coherent launch", {}),
        (
            travelling(matched, "node"),
            "node, .* all at once, not in a matched order; .* concurrent .* or with --travel gpu",
            {},
        ),
        (travelling(beside(PLAIN, other), "node"), "not in a matched order", {"second": second}),
    ):
        message = refusal(prepared, plan, **more)
        assert re.search(part, message) and plan.name in message
    assert prepared(travelling(matched, "gpu"), cluster=None).ready


def test_what_relays_in_nodes_needs_them():
    begin = "a token goes once to a node, whose GPUs pass it on to each other"
    for ready, reason in ((prepare, "^the plan two-tier has a two-tier order"), (partial(prepared, BY_NODE), begin)):
        assert re.search(rf"{reason}.*; say which nodes there are \(--cluster\)", refusal(ready, cluster=None))
        assert re.search(f"{reason}.*: it is for 4 GPUs, drawn has 3", refusal(ready, cluster=cluster_of((3, 8e9))))
        message = refusal(ready, ranks=2, cluster=cluster_of((1, None), (3, 8e9)))
        assert re.search(f"{reason}.* on 2 ranks .* several nodes: choose 4", message)
        assert ready().instructions.tiers.node == (0, 0, 1, 1) and ready(ranks=2).ready
    for plan in (*(launches.plan_for(two_nodes.TRACE, mode) for mode in MODES), travelling(PLAIN, "gpu")):
        assert prepare(plan=plan, cluster=None).instructions.tiers is None, "other modes need no cluster"


def test_the_checks_say_how_tokens_travel_and_what_the_coarsest_format_allows():
    launch = prepared(PLAIN, BY_NODE, travelling(PLAIN, "gpu", "fp16"))
    formats = [coarsest(launch.instructions.model, plan) for plan in launch.instructions.plans]
    assert formats == ["fp32", "fp8", "fp16"]

    def said(name: str, *plans: Plan) -> list[str]:
        return [check.text for check in prepared(*plans).checks if check.name == name]

    assert "to a relative tolerance of 0.05 of the largest number" in said("Numbers", BY_NODE)[0]
    assert not said("Rows", PLAIN) and said("Rows", BY_NODE) == ["one row per node, fp8 out, bf16 back"]
    assert said("Rows", PLAIN, travelling(PLAIN, "gpu")) == ["of concurrent one row per GPU one row per GPU"]


def on_links(launch: PreparedLaunch, port: float, link: float) -> PreparedLaunch:
    """As on a testbed of nodes of two, rates in Mbit/s."""
    tiers = Tiers(node=(0, 0, 1, 1), port=(port * MBIT,) * 4, link=(link * MBIT,) * 4)
    known = {"bandwidth": (port * MBIT,) * 4, "tiers": tiers}
    return replace(launch, instructions=launch.instructions.model_copy(update=known))


def seconds_of(launch: PreparedLaunch, start_up: float, rate: float) -> np.ndarray:
    """Predicted seconds of every plan's first dispatch. rate: bytes/s of the slowest link"""
    cost = {key: {"CPU": Line(alpha=0, beta=1e-15)} for key in ("gemm", "gate", "memory")}
    measured = {"network": [[1.0, 1.0]], "meetings": [[0, 0.0], [1, 0.0]]}
    measured["phases"] = [[size, size / rate + start_up] for size in (1e5, 1e6)]
    profile, seconds = CostProfile(name="p", origin="made up", **cost), []
    for plan in launch.instructions.plans:
        events = predict(launch, plan, profile, measured).events
        events = events[(events["kind"] == "dispatch") & (events["layer"] == 0)]
        seconds.append(events["end"].max() - events["start"].min())
    return np.array(seconds)


def test_a_prediction_knows_the_nodes_and_the_slices():
    """Tokens spread over links even if these are only as fast as ports, and each slice is spread after it has entered."""
    concurrent = launches.plan_for(PADDED, "concurrent", launches.EVEN, WIDE)
    by_node, by_gpu = (travelling(concurrent, unit) for unit in ("node", "gpu"))
    launch = on_links(prepared(by_node, by_gpu), 5, 5)
    problem = Problem(launch.workloads[0], TWO_NODES, launch.instructions.model, Datasheet())
    rows, network = off_diagonal(works_of(by_node, problem)[0].dispatch[0]), launch.instructions.tiers.network
    whole = network.fluid_seconds(*np.nonzero(rows), rows[rows > 0])
    sliced, gpu = seconds_of(launch, 0.0, 5 * MBIT)
    assert whole <= sliced < 1.4 * whole, "the first slice enters alone, and the last one is spread alone"
    hosts = launch.instructions.plans[0].placement.hosts(0, launch.workloads[0].experts[:, 0])
    legs = Legs.of(hosts, launch.workloads[0].rank_of_token(4), problem.stops)
    row, steps = by_node.travel.row_bytes(launch.instructions.model)[0], 0.0
    for step in (legs.second, ~legs.second):
        steps += network.fluid_seconds(legs.src[step], legs.dst[step], np.full(step.sum(), row))
    single, _ = seconds_of(on_links(prepared(by_node, by_gpu), 5000, 5000), 0.0, 5000 * MBIT)
    assert single == pytest.approx(steps / 1000) and steps > 1.1 * sliced, "too short for slices"
    late, late_gpu = seconds_of(launch, 0.02, 5 * MBIT)
    assert late_gpu == pytest.approx(gpu + 0.02) and late >= sliced + 0.03, "each step costs a start-up"


def test_a_testbed_has_time_for_the_rows_that_are_sent():
    def least(*plans: Plan) -> float:
        return float(traffic_check(on_links(prepared(*plans), 1, 9)).text.split()[2])

    copies, gpu, node = (least(plan) for plan in (PLAIN, travelling(PLAIN, "gpu"), travelling(PLAIN, "node")))
    assert gpu < copies and node < copies
    assert least(travelling(PLAIN, "copies", "bf16", "bf16")) == pytest.approx(copies / 2, rel=0.02)


# Launched.
@pytest.fixture(scope="module")
def whole(launch_once) -> tuple[PreparedLaunch, Run]:
    """A two-tier plan, a concurrent one and a context-coherent one in one launch of four ranks in two nodes."""
    launch = prepare(others=(CONCURRENT, coherent(CONCURRENT)))
    return launch, launch_once(launch)


def test_four_ranks_in_two_nodes_compute_the_same_and_show_what_they_relay(whole):
    launch, run = whole
    first_two = launch.instructions.model_copy(update={"plans": launch.instructions.plans[:2]})
    launches.hold_together(replace(launch, instructions=first_two), replace(run, runs=run.runs[:2]))
    relayed, plain, _ = run.runs
    assert relayed.difference == plain.difference, "the order changes when, never what"
    size, network = launch.instructions.model.bytes_per_token, launch.instructions.tiers.network
    experts, source = launch.workloads[0].experts, launch.workloads[0].rank_of_token(4)
    for layer in range(launches.LAYERS):
        out = route(experts[:, layer], source, launches.EVEN.share[layer])
        for kind, way in (("dispatch", out), ("combine", combined(out, source))):
            schedule = getattr(TIERED.send_order, kind)[layer]
            pieces = Counter()
            for piece in hops(schedule, way.counts, network).order:
                pieces[piece.src, piece.dst, (piece.end - piece.begin) * size] += 1
            sends = launches.of(relayed.measured, kind, layer)
            assert Counter(zip(sends["resource"], sends["peer"], sends["bytes"], strict=True)) == pieces
            predicted = launches.of(relayed.predicted, kind, layer)
            between = [part[part["resource"] // 2 != part["peer"] // 2] for part in (sends, predicted)]
            assert between[0]["bytes"].sum() == pytest.approx(between[1]["bytes"].sum())
            ports = [part.groupby("resource")["bytes"].sum() / size for part in between]
            assert (ports[0] - ports[1]).abs().max() <= 2 * len(set(schedule.phase))
    assert "inside nodes" in relayed.predicted.cost_source


def test_all_gathers_of_four_ranks_in_two_nodes_enter_every_node_once(whole):
    launch, run = whole
    gathered = run.runs[2]
    assert 0 <= gathered.difference.error <= 1e-5
    routed = (launch.workloads[0].experts >= 0).any(axis=(1, 2)).sum() * launch.instructions.model.bytes_per_token
    across = np.arange(4)[:, None] // 2 != np.arange(4) // 2
    for kind, layer in (("prompt_gather", 0), ("all_gather", launches.LAYERS - 1)):
        measured, predicted = (launches.sent(timeline, kind, layer, 4) for timeline in (gathered.measured, gathered.predicted))
        np.testing.assert_allclose(measured, predicted, rtol=1e-9)
        assert measured.sum() == 3 * routed and measured[across].sum() == routed
    assert "attention" not in set(gathered.predicted.events["kind"])
    assert prepare(plan=coherent(CONCURRENT), cluster=None).instructions.tiers is None


ERRORS = {(None, None): 1e-5, ("fp8", "bf16"): 1e-2, ("bf16", "fp16"): 1e-3, ("fp16", "fp8"): 1e-2}
"""The largest error of a run by the formats there and back: a last bit that becomes a step of a coarse format is rare, and
nothing compared with a row that is wrong."""
FORMATS = dict.fromkeys(("copies", "gpu", "node"), tuple(ERRORS))
"""The formats launched by the unit that travels; a rank has one way to write each format, whatever the unit."""
if not everything.WANTED:
    FORMATS |= dict.fromkeys(("copies", "node"), tuple(ERRORS)[:2])
SPARE = launches.placement((0, 1, 4, 6), (2, 3, 7), (4, 5, 0, 2), (6, 7, 1))
"""Replicas among which ranks can choose."""


def plans_to_launch() -> dict[str, list[Plan]]:
    """Plans for one launch of four ranks, by the test that looks at their runs.

    Copies of a replica divide equally in a simulation and in whole rows between ranks: the plans of copies have no replicas.
    """
    plans = {}
    for unit, formats in FORMATS.items():
        concurrent = launches.plan_for(PADDED, "concurrent", launches.EVEN if unit == "copies" else launches.UNEVEN, WIDE)
        plans[unit] = [travelling(concurrent, unit, *way) for way in formats]
    spare = launches.plan_for(PADDED, "concurrent", SPARE, WIDE)
    for unit in ("gpu", "node"):
        plans[f"fewest {unit}"] = [travelling(spare, unit, "fp8", "bf16", replicas) for replicas in ("fewest", None)]
    concurrent, rate = plans["gpu"][1], np.ones(4)
    launch = prepared(concurrent)
    problem = Problem(launch.workloads[0], TWO_NODES, launch.instructions.model, Datasheet())
    (work,), plans["orders"] = works_of(concurrent, problem), []
    for mode in ("matched", "shared", "sequential", "two-tier"):

        def scheduled(matrix: np.ndarray, mode: str = mode):
            if mode == "two-tier":
                return two_tier(matrix, Network.of(TWO_NODES)).solution
            return order(matrix, rate, rate, "matched" if mode == "sequential" else mode).solution

        ways = {kind: tuple(map(scheduled, getattr(work, kind))) for kind in ("dispatch", "combine")}
        plans["orders"].append(concurrent.model_copy(update={"name": mode, "send_order": SendOrder(mode=mode, **ways)}))
    return plans


@pytest.fixture(scope="module")
def measured(launch_once) -> dict[str, tuple[PreparedLaunch, tuple[MeasuredPlan, ...]]]:
    """The launch and the runs of each group of `plans_to_launch`. No group is divided between two launches."""
    parts, found = [[]], {}
    for name, plans in plans_to_launch().items():
        if len(parts[-1]) + len(plans) > MAX_PLANS:
            parts.append([])
        parts[-1] += [(name, plan) for plan in plans]
    for part in parts:
        launch = prepared(*(plan for _, plan in part))
        runs = launch_once(launch).runs
        for name in dict(part):
            own = [place for place, (other, _) in enumerate(part) if other == name]
            plans = tuple(launch.instructions.plans[place] for place in own)
            folded = replace(launch, instructions=launch.instructions.model_copy(update={"plans": plans}))
            found[name] = folded, tuple(runs[place] for place in own)
    return found


@pytest.mark.parametrize("unit", ["copies", "gpu", "node"])
def test_four_ranks_in_two_nodes_send_what_is_simulated_and_compute_the_same(measured, unit):
    launch, runs = measured[unit]
    hold_bytes(launch, runs, TWO_NODES)
    assert all(run.difference.error <= ERRORS[way] for run, way in zip(runs, FORMATS[unit], strict=True))
    assert all(run.plan.travel.in_words in run.predicted.cost_source for run in runs if run.plan.travel)


@pytest.mark.parametrize("unit", ["gpu", "node"])
def test_ranks_choose_the_copies_that_touch_fewest(measured, unit):
    launch, runs = measured[f"fewest {unit}"]
    hold_bytes(launch, runs, TWO_NODES)
    assert all(run.difference.error <= 1e-2 for run in runs)
    away = np.kron(~np.eye(2, dtype=bool), np.ones((2, 2))) if unit == "node" else ~np.eye(4, dtype=bool)
    ways = ([launches.sent(run.measured, "dispatch", layer, 4) for layer in range(launches.LAYERS)] for run in runs)
    fewest, usual = ((np.stack(way) * away).sum() for way in ways)
    assert fewest < 0.9 * usual


def test_rows_of_ranks_go_in_every_order(measured):
    launch, (*straight, relayed) = measured["orders"]
    direct = launch.instructions.model_copy(update={"plans": launch.instructions.plans[:3]})
    hold_bytes(replace(launch, instructions=direct), straight, TWO_NODES)
    assert all(run.difference.error <= 1e-2 for run in (*straight, relayed))


def test_tokens_of_two_models_travel_alike(tmp_path):
    other = launches.plan_for(launches.recording_b(), "concurrent", launches.UNEVEN, launches.OTHER)
    both = beside(launches.plan_for(PADDED, "concurrent", launches.EVEN, WIDE), other)
    plans = (travelling(both, unit, "fp8", "bf16") for unit in (("node", "gpu") if everything.WANTED else ("node",)))
    launch = prepared(*plans, second=(launches.recording_b(), launches.OTHER))
    runs = run_here(launch, tmp_path / "run", never, silent).runs
    hold_bytes(launch, runs, TWO_NODES)
    assert all(run.difference.error <= 1e-2 for run in runs)


def test_the_command_line_takes_the_nodes_from_the_cluster(tmp_path, capsys, own_data_folder, monkeypatch):
    np.savez(tmp_path / "trace.npz", experts=PADDED.experts)
    for name, document in (("two-tier", TIERED), ("by-node", BY_NODE), ("model", launches.MODEL), ("cluster", TWO_NODES)):
        (tmp_path / f"{name}.json").write_text(document.to_json())
    plans = [f"{tmp_path}/two-tier.json", f"{tmp_path}/by-node.json"]
    options = [f"--workload={tmp_path}/trace.npz", f"--model={tmp_path}/model.json", "--ranks=4"]
    for plan in plans:
        assert main(["launch", plan, *options]) == 2
        error = capsys.readouterr().err.strip()
        assert error.startswith("error: ") and "say which nodes there are (--cluster)" in error and "\n" not in error

    monkeypatch.setattr(command, "run_prepared", run := mock.MagicMock(side_effect=InputError("nothing runs here")))
    assert main(["launch", *plans, *options, f"--cluster={tmp_path}/cluster.json"]) == 2
    assert run.call_args.args[0].instructions.tiers.node == (0, 0, 1, 1)
