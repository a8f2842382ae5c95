"""The way from the placement in use to another one: copies, transfers, seconds, and when it pays.

A placement is held: bool[layer, expert, gpu], True if the GPU has a copy of the expert.
"""

from dataclasses import dataclass

import numpy as np

from engine.errors import InputError
from engine.network import Network
from engine.result import Bools, Floats, Ints

FABRIC_PRICE = 1e-6
"""Cost of a transfer over the fabric on top of the busiest port, so that links are taken where both are as fast."""

RELIEFS = 200
"""Copies that may be taken off the busiest port one after another, after rounding."""


def moved(held_now: Bools, held_new: Bools) -> Bools:
    """bool[layer, expert, gpu]: the copies that are new."""
    held_now, held_new = np.asarray(held_now, dtype=bool), np.asarray(held_new, dtype=bool)
    if held_now.ndim != 3 or held_now.shape != held_new.shape:
        raise InputError(
            f"placements of shapes {held_now.shape} and {held_new.shape}: wanted two of the same [layer, expert, gpu]"
        )
    return held_new & ~held_now


@dataclass(frozen=True, eq=False)
class Transfers:
    """The senders of the new copies.

    source: int64[layer, expert, gpu], the GPU that sends the copy, -1 where nothing is sent
    traffic: float64[src, dst] bytes
    seconds: of moving layer after layer, see `seconds_of`
    bound: seconds below which no choice of senders gets, in any order
    """

    source: Ints
    traffic: Floats
    seconds: float
    bound: float


def transfers(held_now: Bools, held_new: Bools, bytes_per_expert: float, network: Network) -> Transfers:
    """The senders of all new copies, chosen so that the busiest port of the network is done soonest.

    Every copy is sent whole by one GPU that has it now. A linear program divides the copies that have the same receiver and
    the same possible senders; copies that it leaves in fractions go, one by one, to the sender that is done first. Raises
    InputError for an expert that no GPU has, or a negative size.

    bytes_per_expert: of one copy
    """
    new = moved(held_now, held_new)
    held_now = np.asarray(held_now, dtype=bool)
    gpus = new.shape[2]
    if network.gpus != gpus:
        raise InputError(f"the network has {network.gpus} GPUs, the placements have {gpus}")
    if not np.isfinite(bytes_per_expert) or bytes_per_expert < 0:
        raise InputError(f"bytes_per_expert: must be a number of at least 0, not {bytes_per_expert}")
    orphan = np.argwhere(new.any(axis=2) & ~held_now.any(axis=2))
    if len(orphan):
        raise InputError(
            f"layer {orphan[0][0]}, expert {orphan[0][1]}: no GPU has a copy to send; start from a whole placement"
        )
    source = np.full(new.shape, -1, dtype=np.int64)
    layer, expert, dst = np.nonzero(new)
    if not len(dst):
        return Transfers(source, np.zeros((gpus, gpus)), 0.0, 0.0)

    holders = held_now[layer, expert]
    # Bytes that sort as receiver and holders do; rows of many columns would be compared number by number.
    key = np.hstack([dst.astype(">i8")[:, None].view(np.uint8), np.packbits(holders, axis=1)])
    key = np.ascontiguousarray(key).view(f"S{key.shape[1]}").ravel()
    _, first, kind_of_copy, copies = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    dst_of_kind = dst[first]
    # One variable for each kind of copy and each GPU that can send it.
    kind, src = np.nonzero(holders[first])
    part, busiest = _divided(kind, src, dst_of_kind, copies, network)
    chosen = _whole(kind, src, dst_of_kind, copies, part, network)

    by_kind = np.argsort(kind_of_copy, kind="stable")
    sender = np.repeat(src, chosen)
    source[layer[by_kind], expert[by_kind], dst[by_kind]] = sender
    traffic = np.zeros((gpus, gpus))
    np.add.at(traffic, (src, dst_of_kind[kind]), chosen * float(bytes_per_expert))
    seconds = seconds_of(source, bytes_per_expert, network)
    start_up = float(network.start_up(src, dst_of_kind[kind]).min()) if bytes_per_expert else 0.0
    bound = busiest * bytes_per_expert * (1 - 10 * FABRIC_PRICE) + start_up
    return Transfers(source, traffic, seconds, min(bound, seconds))


def seconds_of(source: Ints, bytes_per_expert: float, network: Network) -> float:
    """Seconds in which copies move layer after layer, so that a GPU needs room for one layer more and not for all. It begins
    with a layer when it and those that it exchanges copies of it with have done the layers before; the layer takes it as long
    as the busiest of their ports. One start-up is included.

    source: as in `Transfers`
    """
    done, start_ups = np.zeros(network.gpus), []
    for row in source:
        expert, dst = np.nonzero(row >= 0)
        src = row[expert, dst]
        out, into = network.ports(src, dst)
        ports = np.bincount(np.r_[out, into], minlength=4 * network.gpus) * bytes_per_expert
        took = np.divide(ports, network.capacity, out=np.zeros(len(ports)), where=ports > 0).reshape(4, -1).max(axis=0)
        begin, end = done.copy(), took.copy()
        for mine, theirs in ((src, dst), (dst, src)):
            np.maximum.at(begin, mine, done[theirs])
            np.maximum.at(end, mine, took[theirs])
        done = np.where(took > 0, begin + end, done)
        start_ups += network.start_up(src, dst).tolist() if bytes_per_expert else []
    return float(done.max()) + min(start_ups, default=0.0)


def break_even(seconds_to_move: float, seconds_per_step_now: float, seconds_per_step_new: float) -> float:
    """Steps after which the time spent on moving is won back; infinite if the new placement is not faster."""
    saved = seconds_per_step_now - seconds_per_step_new
    return seconds_to_move / saved if saved > 0 else float("inf")


def _divided(kind: Ints, src: Ints, dst_of_kind: Ints, copies: Ints, network: Network) -> tuple[Floats, float]:
    """Copies float64[variable] in fractions, and the seconds per byte of a copy that the busiest port needs at least.

    kind, src: int64[variable]
    dst_of_kind, copies: int64[kind]
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    dst = dst_of_kind[kind]
    out, into = network.ports(src, dst)
    variables, ports = len(src), len(network.capacity)
    capacity = np.where(network.capacity > 0, network.capacity, 1.0)
    column = np.arange(variables)
    # Seconds per byte of a copy, in units of the mean over the ports: the answer is then near 1.
    unit = 2 * copies.sum() / capacity[np.unique(np.r_[out, into])].sum()
    seconds = np.r_[1 / capacity[out], 1 / capacity[into], np.full(ports, -unit)] / unit
    rows = np.r_[out, into, np.arange(ports)]
    columns = np.r_[column, column, np.full(ports, variables)]
    fabric = ~network.linked[src, dst]
    solved = linprog(
        np.r_[FABRIC_PRICE * fabric / copies.sum(), 1.0],
        A_ub=coo_array((seconds, (rows, columns)), shape=(ports, variables + 1)).tocsr(),
        b_ub=np.zeros(ports),
        A_eq=coo_array((np.ones(variables), (kind, column)), shape=(len(copies), variables + 1)).tocsr(),
        b_eq=copies.astype(np.float64),
        method="highs",
    )
    if solved.x is None:
        return np.zeros(variables), 0.0
    return np.maximum(solved.x[:variables], 0.0), max(float(solved.fun) - FABRIC_PRICE, 0.0) * unit


def _whole(kind: Ints, src: Ints, dst_of_kind: Ints, copies: Ints, part: Floats, network: Network) -> Ints:
    """int64[variable]: whole copies near `part`, the rest one by one where the ports are done first."""
    chosen = np.floor(part + 1e-6).astype(np.int64)
    out, into = network.ports(src, dst_of_kind[kind])
    per_copy = 1 / np.where(network.capacity > 0, network.capacity, 1.0)
    ports = len(per_copy)
    busy = (np.bincount(out, chosen, ports) + np.bincount(into, chosen, ports)) * per_copy
    first = np.searchsorted(kind, np.arange(len(copies) + 1))
    left = copies - np.bincount(kind, chosen, len(copies)).astype(np.int64)
    # Those with the fewest senders first: the others can still avoid them.
    for copied in np.argsort(np.diff(first), kind="stable"):
        here = slice(first[copied], first[copied + 1])
        for _ in range(left[copied]):
            sent = busy[out[here]] + per_copy[out[here]]
            done = np.maximum(sent, busy[into[here]] + per_copy[into[here]])
            # Among senders that are done as soon one that has a link.
            pick = int(np.lexsort((sent, out[here] < ports // 2, done))[0]) + first[copied]
            chosen[pick] += 1
            busy[out[pick]] += per_copy[out[pick]]
            busy[into[pick]] += per_copy[into[pick]]
    # Copies leave the busiest port while another sender can send one and be done before it.
    for _ in range(RELIEFS):
        worst = int(busy.argmax())
        users = np.flatnonzero(((out == worst) | (into == worst)) & (chosen > 0))
        best, change = busy[worst], None
        for user in users:
            here = np.arange(first[kind[user]], first[kind[user] + 1])
            for taker in here[(out[here] != worst) & (into[here] != worst)]:
                done = max(busy[out[taker]] + per_copy[out[taker]], busy[into[taker]] + per_copy[into[taker]])
                if done < best * (1 - 1e-9):
                    best, change = done, (user, taker)
        if change is None:
            break
        for which, sign in zip(change, (-1, 1), strict=True):
            chosen[which] += sign
            busy[out[which]] += sign * per_copy[out[which]]
            busy[into[which]] += sign * per_copy[into[which]]
    return chosen
