"""Lines of the pre-flight check that depend on where a launch runs: ports, slots, and whether the links carry it in time."""

import socket
from collections.abc import Iterator

import numpy as np

from engine.cluster import Cluster
from engine.errors import InputError
from engine.launch.advice import emulated_network, order_advice
from engine.launch.destination import Destination
from engine.launch.prepare import Check, Launch
from engine.launch.request import FIRST_PORT, PORTS
from engine.launch.testbed import PORT, Testbed
from engine.model import MoEModel
from engine.network import Network
from engine.plan import Placement
from engine.units import seconds
from engine.workload import Workload

LISTED = 16
"""Ranks that are told one by one."""


def place_checks(launch: Launch, bed: Testbed | None) -> Iterator[Check]:
    """Of a launch on this machine, or on a testbed of it (which need not be built)."""
    yield slots_check(launch)
    if bed is None:
        yield port_check()
    else:
        yield Check("Port", True, f"{PORT}, in a network of the testbed's own, where nothing else listens")
        if all(plan.execution == "vanilla" and plan.priority is None for plan in launch.spec.plans):
            yield traffic_check(launch, bed)
        yield from _advice(launch, emulated_network(bed.bandwidth))


def cluster_checks(launch: Launch, destination: Destination, cluster: Cluster | None) -> Iterator[Check]:
    """Of a launch by a scheduler. cluster: as drawn; what its links say of the orders counts when there is a rank a GPU."""
    yield slots_check(launch)
    yield from destination.checks
    if destination.nodes == 1:
        yield Check("Port", True, "torchrun picks a free one on the node by itself")
    else:
        last = FIRST_PORT + PORTS - 1
        yield Check(
            "Port", True, f"the nodes meet on the first one, at a port between {FIRST_PORT} and {last} of the job's own"
        )
    if cluster is not None and len(cluster.gpus) == launch.spec.ranks:
        yield from _advice(launch, Network.of(cluster))


def _advice(launch: Launch, network: Network) -> Iterator[Check]:
    if advice := order_advice(launch, network):
        yield Check("Order", True, advice, warning=True)


def testbed_fault() -> str | None:
    """Why no testbed can be built on this machine; None when one can. It is tried, with one rank: only the kernel knows."""
    try:
        with Testbed(np.full(1, 1e6)):
            return None
    except InputError as error:
        return str(error)


def slots_check(launch: Launch) -> Check:
    """How many experts every rank holds, of the layer where it holds most."""
    slots = np.max([plan.placement.slots.max(axis=0) for plan in launch.spec.plans], axis=0)
    each = ", ".join(map(str, slots)) if len(slots) <= LISTED else f"{slots.min()} to {slots.max()}"
    return Check("Slots", True, f"{each} of {launch.spec.model.experts} experts in a layer on each rank")


def port_check() -> Check:
    """Whether the ranks can meet on this machine. torchrun asks for a free port when it starts."""
    try:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
    except OSError as error:
        return Check("Port", False, f"no port of localhost can be had ({error.strerror}); close what holds them")
    return Check("Port", True, "torchrun picks a free one on localhost by itself")


def traffic_check(launch: Launch, bed: Testbed) -> Check:
    """Whether the emulated links carry all passes through the layers within the time limit: no order of sends is faster
    than the busiest port, and of two models each has its own sends."""
    spec, least = launch.spec, 0.0
    models = (spec.model, spec.model_b or spec.model)
    for plan in spec.plans:
        placements = (plan.placement, plan.placement_b)
        each = zip(launch.workloads, models, placements, strict=False)
        least += max(_port_seconds(workload, model, where, bed) for workload, model, where in each)
    whole = least * (spec.repeats + 1)
    which = "all plans" if len(launch.plans) > 1 else "the plan"
    text = f"they need {seconds(least)} or more for a pass of {which}, {seconds(whole)} in all"
    if whole < 0.8 * launch.limit:
        return Check("Links", True, text)
    return Check("Links", False, f"{text}, but the time limit is {launch.limit:g} s: replay fewer tokens")


def _port_seconds(workload: Workload, model: MoEModel, placement: Placement, bed: Testbed) -> float:
    """Seconds that the busiest port needs for the dispatches and combines of all layers."""
    traffic = workload.demand(bed.ranks) @ placement.share * model.bytes_per_token * (1 - np.eye(bed.ranks))
    ports = np.maximum(traffic.sum(axis=1), traffic.sum(axis=2)) / bed.bandwidth
    return 2 * float(ports.max(axis=1).sum())
