"""What to know of a launch's send orders before it starts: on links of different rates an order that pairs ranks one to one
can be slower than a plain all-to-all, because a fast receiver could have served two slow senders at once."""

import numpy as np

from engine.goal import Goal
from engine.launch.preparation.prepared import PreparedLaunch
from engine.launch.preparation.traffic import sent_bytes
from engine.launch.rank.instructions import RankInstructions
from engine.launch.rank.links import known_links
from engine.network import Network
from engine.plan import Plan
from engine.simulate.flows import all_to_all
from engine.units import digits, ratio, seconds

START_UP = 2e-3
"""Seconds that a send is taken to need beside its bytes where nothing has been measured yet: what a phase costs over Gloo."""

WORTH_SAYING = 1.05
"""An order that is slower than a plain all-to-all by less than this may well be faster when it is measured."""

MOST_SENDS = 20_000
"""Sends simulated for an order. With more, every so many layers stand for the others."""


def emulated_network(instructions: RankInstructions) -> Network:
    """The network of links that are known before a launch, with a typical start-up."""
    return known_links(instructions, START_UP).network


def order_advice(launch: PreparedLaunch, network: Network) -> str | None:
    """Which of a launch's plans are slower by their order of sends than with everything sent at once, in one sentence each;
    None where no plan is. Only the network is simulated: its ports' rates and start-up, nothing measured.

    network: of as many GPUs as the launch has ranks
    """
    slow = []
    for asked_for, plan in zip(launch.plans, launch.instructions.plans, strict=True):
        if plan.send_order.mode == "concurrent" or plan.goal is Goal.TWO_MODELS or plan.execution != "vanilla":
            continue
        ordered, plain = _network_seconds(plan, launch, network)
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


def _network_seconds(plan: Plan, launch: PreparedLaunch, network: Network) -> tuple[float, float]:
    """Seconds of all all-to-alls in the plan's order, and sent at once."""
    order, model = plan.send_order, launch.instructions.model
    there, back = sent_bytes(launch.workloads[0], model, plan.placement, plan.travel, network)
    sends = 2 * len(there) * launch.instructions.ranks * (launch.instructions.ranks - 1)
    total = np.zeros(2)
    for layer in range(0, len(there), -(-sends // MOST_SENDS) or 1):
        for schedule, matrix in ((order.dispatch[layer], there[layer]), (order.combine[layer], back[layer])):
            total[0] += all_to_all(order.mode, schedule, matrix, network).seconds
            total[1] += all_to_all("concurrent", None, matrix, network).seconds
    return float(total[0]), float(total[1])
