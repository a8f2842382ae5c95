"""Lines of the pre-flight check that depend on the destination of a launch: ports, slots, the time on its links, and
its send orders. On links of different rates an order that pairs ranks one to one can be slower than a plain all-to-all,
because a fast receiver could have served two slow senders at once."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from engine.cluster import Cluster
from engine.communication.travel import Stops, rows_of_tokens, serving_gpus
from engine.errors import InputError
from engine.goal import Goal
from engine.launch.places.destination import FIRST_PORT, OR, PORTS, Destination
from engine.launch.places.testbed import PORT, Testbed
from engine.launch.preparation.launch import Check, PreparedLaunch
from engine.launch.rank.links import known_links
from engine.model import MoEModel
from engine.network import Network
from engine.plan import Placement, Travel
from engine.simulate.flows import all_to_all
from engine.units import digits, ratio, seconds
from engine.workload import RoutingTrace

START_UP = 2e-3
"""Assumed seconds of a send in addition to its bytes before anything is measured: the cost of a phase over Gloo."""

WORTH_SAYING = 1.05
"""An order that is slower than a plain all-to-all by less than this may well be faster when it is measured."""

MOST_SENDS = 20_000
"""Sends simulated for an order. With more, every so many layers stand for the others."""

LISTED = 16
"""Ranks that are listed one by one."""


def sent_bytes(
    trace: RoutingTrace, model: MoEModel, placement: Placement, travel: Travel | None, network: Network
) -> tuple[np.ndarray, np.ndarray]:
    """float64[layer, src, dst] bytes of the dispatches and of the combines of a model with vanilla execution. network:
    of the ranks."""
    travel, ranks = travel or Travel(), network.gpus
    if travel.unit == "copies" and travel.replicas is None:
        rows = trace.demand(ranks) @ placement.share
    else:
        source, stops = trace.rank_of_token(ranks), Stops(network.domain)
        hosts = (
            serving_gpus(placement, layer, trace.experts[:, layer], travel, source, stops) for layer in range(trace.layers)
        )
        rows = np.array([rows_of_tokens(of_layer, source, stops, travel.unit) for of_layer in hosts])
    out, back = travel.row_bytes(model)
    return rows * out, rows.transpose(0, 2, 1) * back


def order_advice(launch: PreparedLaunch, network: Network) -> str | None:
    """A sentence for each of a launch's plans that is slower by its order of sends than with everything sent at once;
    None if no plan is. Only the network is simulated: its ports' rates and start-up, nothing measured.

    network: of as many GPUs as the launch has ranks
    """
    slow = []
    for asked_for, plan in zip(launch.plans, launch.instructions.plans, strict=True):
        if plan.send_order.mode == "concurrent" or plan.goal is Goal.TWO_MODELS or plan.execution != "vanilla":
            continue
        order, model, ranks = plan.send_order, launch.instructions.model, launch.instructions.ranks
        there, back = sent_bytes(launch.workloads[0], model, plan.placement, plan.travel, network)
        ordered = plain = 0.0
        for layer in range(0, len(there), -(-2 * len(there) * ranks * (ranks - 1) // MOST_SENDS) or 1):
            for schedule, matrix in ((order.dispatch[layer], there[layer]), (order.combine[layer], back[layer])):
                ordered += all_to_all(order.mode, schedule, matrix, network).seconds
                plain += all_to_all("concurrent", None, matrix, network).seconds
        if ordered > WORTH_SAYING * plain:
            slow.append(
                f"{asked_for.name} ({plan.send_order.mode} sends) is predicted to take {ratio(ordered / plain)} as long in its "
                "all-to-alls as sending to all peers at once"
            )
    if not slow:
        return None
    rates = np.concatenate([network.send, network.receive]) * 8 / 1e6
    spread = f"{digits(rates.min())} to {digits(rates.max())}" if rates.min() < rates.max() else digits(rates.min())
    return (
        "; ".join(slow)
        + f" (links of {spread} Mbit/s, {seconds(network.latency)} to start a send: not measured); compare it with a "
        "concurrent or a shared order"
    )


def place_checks(launch: PreparedLaunch, cluster: Cluster | None) -> Iterator[Check]:
    """Checks of a launch at its destination. cluster: as drawn; for a launch by a scheduler, advice on its links is
    given if there is a rank a GPU."""
    yield slots_check(launch)
    if launch.destination is not None:
        yield from destination_checks(launch.destination)
        yield from relay_checks(launch, launch.destination)
        if launch.workloads and cluster is not None and len(cluster.gpus) == launch.instructions.ranks:
            yield from _advice(launch, Network.of(cluster))
    elif launch.testbed is not None:
        yield Check("Port", True, f"{PORT}, in a network of the testbed's own, where nothing else listens")
        if not launch.workloads:  # what a model sends is known when it has run
            return
        if all(plan.execution == "vanilla" and plan.goal is not Goal.TRAINING for plan in launch.instructions.plans):
            yield traffic_check(launch)
        yield from _advice(launch, known_links(launch.instructions, START_UP).network)
    else:
        try:
            with socket.socket() as probe:  # torchrun asks for a port when it starts
                probe.bind(("localhost", 0))
        except OSError as error:
            yield Check("Port", False, f"no port of localhost can be had ({error.strerror}); close what holds them")
        else:
            yield Check("Port", True, "torchrun picks a free one on localhost")


def destination_checks(destination: Destination) -> Iterator[Check]:
    """Checks of a cluster's nodes: the program on them, the folder that they share, and the port at which they meet."""
    shared = Path(destination.shared)
    usable = shared.is_dir() and os.access(shared, os.W_OK | os.X_OK)
    elsewhere = destination.mount != destination.shared
    seen = f"{shared}, which the nodes see as {destination.mount}" if elsewhere else f"{shared}"
    gpus = f"{destination.gpus_per_node} × {destination.gpu}, " if destination.gpus_per_node else ""
    # All nodes are asked for alike, and ranks are numbered in the order of the nodes' names.
    mixed = "; which type a rank gets is the scheduler's choice, not the plan's" if OR in destination.gpu else ""
    each = f"{gpus}{destination.cpus_per_node} CPUs, {destination.ranks_per_node} ranks each{mixed}"
    here = f"this installation with {sys.executable}, which the nodes have to see at the same place"
    yield Check("Nodes", True, f"{destination.nodes} with {each}")
    yield Check("Program", True, f"in the image {destination.image}" if destination.image else here)
    yield Check("Shared folder", usable, seen if usable else f"{shared} is no folder that can be written to here")
    port = "torchrun picks a free one on the node"
    if destination.nodes > 1:
        last = FIRST_PORT + PORTS - 1
        port = f"the nodes meet on the first one, at a port between {FIRST_PORT} and {last} of the job's own"
    yield Check("Port", True, port)


def relay_checks(launch: PreparedLaunch, destination: Destination) -> Iterator[Check]:
    """Check that the ranks that relay for each other will be on one node of the job."""
    tiers, each = launch.instructions.tiers, destination.ranks_per_node
    if tiers is None:
        return
    sizes = {tiers.node.count(node) for node in tiers.node}
    if sizes != {each}:
        drawn = " or ".join(map(str, sorted(sizes)))
        text = f"the nodes of the plan have {drawn} ranks, those of the job {each}: ranks would relay over the fabric"
        yield Check("Relays", True, text, warning=True)


def _advice(launch: PreparedLaunch, network: Network) -> Iterator[Check]:
    if advice := order_advice(launch, network):
        yield Check("Order", True, advice, warning=True)


def testbed_fault() -> str | None:
    """The reason why no testbed can be built on this machine; None if one can. It is tried, with one rank: only the
    kernel knows."""
    try:
        with Testbed(np.full(1, 1e6)):
            return None
    except InputError as error:
        return str(error)


def slots_check(launch: PreparedLaunch) -> Check:
    """The line on the experts of every rank, in the layer with most."""
    slots = np.max([plan.placement.slots.max(axis=0) for plan in launch.instructions.plans], axis=0)
    if slots.min() == slots.max():
        each = f"{slots[0]} on every rank"
    elif len(slots) <= LISTED:
        each = f"{', '.join(map(str, slots))} on ranks 0 to {len(slots) - 1}"
    else:
        each = f"{slots.min()} to {slots.max()} on each rank"
    return Check("Slots", True, f"of a layer's {launch.instructions.model.experts} experts, {each}")


def traffic_check(launch: PreparedLaunch) -> Check:
    """Check that the emulated links carry all passes through the layers within the time limit: no order of sends is
    faster than the busiest port, and of two models each has its own sends."""
    instructions, least, network = launch.instructions, 0.0, known_links(launch.instructions, START_UP).network
    models = (instructions.model, instructions.model_b or instructions.model)
    for plan in instructions.plans:
        if plan.reaction is not None:  # its scheduler moves experts
            continue
        placements = (plan.placement, plan.placement_b)
        sent = zip(launch.workloads, models, placements, strict=False)
        sent_by_model = (sent_bytes(*of_model, plan.travel, network) for of_model in sent)
        # The busiest port, for the dispatches and combines of all layers, with any relays.
        least += max(sum(network.relayed_seconds(m) for layers in both for m in layers) for both in sent_by_model)
    whole = least * (instructions.repeats + 1)
    which = "all plans" if len(launch.plans) > 1 else "the plan"
    text = f"they need {seconds(least)} or more for a pass of {which}, {seconds(whole)} in all"
    fits = whole < 0.8 * launch.limit
    late = "" if fits else f", but the time limit is {launch.limit:g} s: replay fewer tokens"
    return Check("Links", fits, f"{text}{late}")
