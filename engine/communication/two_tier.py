"""Send orders in two tiers, for nodes with links of their own: every node's ports work as one.

Inside the sending domain bytes are balanced over its links, so that each of its ports has an equal share of the bytes for each
other domain; between domains runs an exact order of stages, each a matching of domains in which a pair uses all its ports side
by side; inside the receiving domain bytes are spread over its links. The idea is that of FAST ("An Efficient Scheduler for
All-to-All GPU Communication", NSDI'26, arXiv 2505.09764); schedule, pipeline and bound are our own.

With ports balanced, time between domains is preemptive open-shop scheduling on the matrix of domains, which `order` solves
exactly. Links work a step before and a step after the ports (see `steps`), so the losses are the first balancing and the last
spreading, and steps in which links need longer than ports. Any sequence of the stages has the same time at the ports; growing
and then shrinking stages keep both losses small: short ones come first and last, and neighbours are about as long.

Without relays (`order_on`) the links and the fabric are two networks that work at the same time: each gets its own exact
order, and the two run side by side.
"""

import time
from collections.abc import Callable

import numpy as np

from engine.communication.order import checked_traffic, matched_bound, met, order
from engine.communication.relays import Domains, counted
from engine.communication.steps import Steps
from engine.network import Network
from engine.plan import Schedule
from engine.result import Result, Status, Stop, never, result_of

FEWEST_PARTS = 16
"""A stage longer than this part of the order is cut: the first balancing and the last spreading wait for a whole stage."""


def two_tier(traffic: np.ndarray, network: Network, stop: Stop = never) -> Result[Schedule]:
    """An order of one all-to-all in which the GPUs of a scale-up domain (`Network.domain`) relay for each other.

    traffic: float64[src, dst] bytes, diagonal ignored. In the schedule src and dst are domains, each named by its first GPU;
    `Steps.of` turns it into the work of every port and link. Without links every GPU is a domain, and the order is `order`'s.

    `objective` and `bound` are seconds without start-up latency; status OPTIMAL when they are equal. The bound is of matchings
    of domains with bytes inside a domain only over links: several receivers at a time, or a way through the fabric and back,
    may be faster. It is the larger of

    * `matched_bound` of the domains' traffic at the rates of all their ports together: a byte crosses the fabric once, so the
      transfers of a domain share its ports and follow one another;
    * `Network.relayed_seconds`: bytes that leave (enter) a GPU take its port or its links, so no less than bytes / (port +
      link); those that stay in its domain the links alone.

    `stop` is `order`'s. Raises InputError for shapes that do not fit together and traffic that is negative or not finite.
    """
    started = time.perf_counter()
    traffic, _, _ = checked_traffic(traffic, network.send, network.receive)
    domains = Domains.of(network)
    between = domains.between(traffic)
    result = order(between, domains.send, domains.receive, "matched", stop)
    schedule = _in_sequence(result.solution, domains)
    bound = max(matched_bound(between, domains.send, domains.receive), network.relayed_seconds(traffic))
    objective = float(Steps.of(schedule, traffic, network).seconds.sum())
    status = Status.CANCELLED if result.status is Status.CANCELLED else met(objective, bound)
    return result_of("order/two-tier", started, status, objective, bound, schedule)


def fewest_seconds(traffic: np.ndarray, network: Network) -> float:
    """Seconds below which no order of `two_tier` brings this traffic (float64[src, dst] bytes), start-ups included.

    The stages between domains follow one another, each with a start-up of its own, and where anybody relays they are many.
    """
    domains = Domains.of(network)
    between = domains.between(traffic)
    stages = 0 if not between.any() else 1 if len(domains.first) == network.gpus else FEWEST_PARTS
    crossing = matched_bound(between, domains.send, domains.receive) + stages * network.latency
    return max(network.relayed_bound(traffic), crossing)


def _in_sequence(schedule: Schedule, domains: Domains) -> Schedule:
    """The stages of a schedule between numbered domains, cut where they are long and sorted to grow and then shrink; domains
    named by their first GPUs."""
    duration = schedule.duration
    if not len(duration) or len(domains.first) == len(domains.of_gpu):
        return schedule  # nobody relays: nothing waits for a whole stage
    pieces = np.maximum(np.ceil(duration * FEWEST_PARTS / duration.sum() * (1 - 1e-9)).astype(np.int64), 1)
    stage = np.repeat(np.arange(len(duration)), pieces)
    length = (duration / pieces)[stage]
    by_length = np.argsort(length, kind="stable")
    place = np.empty(len(stage), dtype=np.int64)
    place[np.concatenate([by_length[::2], by_length[1::2][::-1]])] = np.arange(len(stage))
    src, dst, phase = schedule.src, schedule.dst, schedule.phase
    # A stage's sends, once for each of its pieces
    copies = pieces[phase]
    send = np.repeat(np.arange(len(phase)), copies)
    at = place[(np.cumsum(pieces) - pieces)[phase[send]] + counted(copies)]
    listed = np.argsort(at, kind="stable")
    send, at = send[listed], at[listed]
    ends, size = (domains.first[end[send]] for end in (src, dst)), (schedule.bytes / copies)[send]
    columns = dict(zip(COLUMNS, (*ends, size, at), strict=True))
    return Schedule(duration=length[np.argsort(place)], **columns)


COLUMNS = "src", "dst", "bytes", "phase"
"""The columns of a schedule that have a row for every send."""

Kernel = Callable[[np.ndarray, np.ndarray, np.ndarray], Result[Schedule]]
"""Traffic, send and receive bandwidths to a phased order, such as `order` with its mode given."""


def order_on(network: Network, traffic: np.ndarray, kernel: Kernel) -> tuple[Schedule, list[Result[Schedule]]]:
    """The order of one all-to-all (float64[src, dst] bytes), and the kernel's results for the networks in use.

    Without links this is the kernel's own schedule.
    """
    results = results_on(network, traffic, kernel)
    parts = [result.solution for result in results]
    return parts[0] if len(parts) == 1 else _side_by_side(*parts), results


def results_on(network: Network, traffic: np.ndarray, kernel: Kernel) -> list[Result[Schedule]]:
    """The kernel's results for the networks in use: the fabric, and the links where anything is sent over them."""
    linked = network.linked & ~np.eye(network.gpus, dtype=bool)
    over_link = np.where(linked, traffic, 0.0)
    fabric = kernel(np.where(linked, 0.0, traffic), network.send, network.receive)
    if not over_link.any():
        return [fabric]
    # GPUs without links have no traffic here; the kernel still wants a positive rate for them.
    rate = np.where(network.link > 0, network.link, 1.0)
    return [fabric, kernel(over_link, rate, rate)]


def _side_by_side(first: Schedule, second: Schedule) -> Schedule:
    """Two schedules as one, cut wherever a phase of either ends; bytes divide in proportion to time."""
    if first.phases == second.phases == 1:  # nothing waits for anything: a cut would only cost a start-up
        columns = {name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in COLUMNS}
        return Schedule(duration=np.maximum(first.duration, second.duration), **columns)
    cuts = np.unique(np.concatenate([[0.0], np.cumsum(first.duration), np.cumsum(second.duration)]))
    # Ends that differ only by round-off would make empty phases.
    cuts = cuts[np.r_[True, np.diff(cuts) > 1e-12 * cuts[-1]]]
    length, middle = np.diff(cuts), (cuts[1:] + cuts[:-1]) / 2
    columns: dict[str, list[np.ndarray]] = {name: [] for name in COLUMNS}
    for schedule in (first, second):
        # The phase that each piece of time lies in; pieces of a phase stand together.
        own = np.searchsorted(np.cumsum(schedule.duration), middle)
        phase = schedule.phase
        begin, pieces = np.searchsorted(own, phase), np.bincount(own, minlength=schedule.phases + 1)[phase]
        send = np.repeat(np.arange(len(phase)), pieces)
        piece = begin[send] + np.arange(len(send)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        size = schedule.bytes[send] * (length[piece] / schedule.duration[phase[send]])
        for name, column in zip(COLUMNS, (schedule.src[send], schedule.dst[send], size, piece), strict=True):
            columns[name].append(column)
    both = {name: np.concatenate(parts) for name, parts in columns.items()}
    order = np.argsort(both["phase"], kind="stable")
    return Schedule(duration=length, **{name: column[order] for name, column in both.items()})
