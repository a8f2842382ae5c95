"""The rules of one all-to-all's schedule, one by one. Each raises `IllegalError` that names the phase and the GPUs."""

from dataclasses import dataclass

import numpy as np

from engine.errors import IllegalError
from engine.network import Network
from engine.plan import OrderMode, Schedule

RELATIVE = 1e-9
"""Round-off that counts as equal, relative to the largest number of its kind."""


@dataclass(frozen=True, eq=False)
class Sends:
    """The sends of a schedule as arrays.

    src, dst, phase: int64[send]
    bytes: float64[send]
    duration: float64[phase] seconds
    """

    src: np.ndarray
    dst: np.ndarray
    bytes: np.ndarray
    phase: np.ndarray
    duration: np.ndarray

    @classmethod
    def of(cls, schedule: Schedule) -> "Sends":
        src, dst, phase = (column.astype(np.int64) for column in (schedule.src, schedule.dst, schedule.phase))
        return cls(src, dst, schedule.bytes, phase, schedule.duration)

    def only(self, here: np.ndarray) -> "Sends":
        """Some of the sends, bool[send], in the same phases."""
        return Sends(self.src[here], self.dst[here], self.bytes[here], self.phase[here], self.duration)


@dataclass(frozen=True, eq=False)
class Ports:
    """The ports that sends leave by and arrive at.

    out, into: int64[send], indices into capacity
    capacity: float64[port] bytes/s
    """

    out: np.ndarray
    into: np.ndarray
    capacity: np.ndarray

    def only(self, here: np.ndarray) -> "Ports":
        """Those of some of the sends, bool[send]."""
        return Ports(self.out[here], self.into[here], self.capacity)


def node_ports(sends: Sends, network: Network) -> Ports:
    """The ports of a two-tier order: all of a node's together, under the number of its first GPU. (A node here is GPUs that
    reach each other over links; a GPU without them counts as one.)"""
    rates = [np.bincount(network.domain, rate, network.gpus) for rate in (network.send, network.receive)]
    return Ports(sends.src, sends.dst + network.gpus, np.concatenate(rates))


def between_nodes(traffic: np.ndarray, network: Network) -> np.ndarray:
    """float64[src, dst] bytes between nodes, each under the number of its first GPU; 0 inside them.

    traffic: float64[src, dst] bytes
    """
    summed, node = np.zeros_like(traffic), network.domain
    np.add.at(summed, (node[:, None], node[None, :]), traffic)
    return np.where(np.eye(len(traffic), dtype=bool), 0.0, summed)


def check_sends(sends: Sends) -> None:
    """Every send goes to another GPU and carries something."""
    if (own := np.flatnonzero(sends.src == sends.dst)).size:
        raise IllegalError(f"GPU {sends.src[own[0]]} sends to itself")
    if (empty := np.flatnonzero(sends.bytes <= 0)).size:
        raise IllegalError(f"GPU {sends.src[empty[0]]} sends no bytes to GPU {sends.dst[empty[0]]}")


def check_names(sends: Sends, network: Network) -> None:
    """The sends of a two-tier order are between nodes, each named by its first GPU."""
    ends = np.concatenate([sends.src, sends.dst])
    if (other := np.flatnonzero(network.domain[ends] != ends)).size:
        gpu = ends[other[0]]
        raise IllegalError(f"a two-tier order names nodes by their first GPU, but GPU {gpu} is of GPU {network.domain[gpu]}'s")


def check_listing(sends: Sends) -> None:
    """The sends of a phased order are listed phase by phase."""
    if (late := np.flatnonzero(np.diff(sends.phase) < 0)).size:
        before, after = sends.phase[late[0]], sends.phase[late[0] + 1]
        raise IllegalError(f"a send of phase {after} is listed after one of phase {before}; list them phase by phase")


def check_matching(sends: Sends, ports: Ports | None) -> None:
    """In every phase a port (all ports of a node in a two-tier order) sends to at most one peer and receives from at most one.

    ports: None if it is unknown which GPUs have links of their own; a GPU may then have two peers, one over the fabric and
        one over its links
    """
    most = 2 if ports is None else 1
    out, into = (sends.src, sends.dst) if ports is None else (ports.out, ports.into)
    for verb, port, gpu, peer in (("sends to", out, sends.src, sends.dst), ("receives from", into, sends.dst, sends.src)):
        key = sends.phase * (port.max(initial=0) + 1) + port
        order = np.argsort(key, kind="stable")
        crowded = np.flatnonzero(key[order][most:] == key[order][:-most])
        if crowded.size:
            together = order[crowded[0] : crowded[0] + most + 1]
            peers = " and ".join(f"GPU {number}" for number in peer[together])
            raise IllegalError(
                f"phase {sends.phase[together[0]]}: GPU {gpu[together[0]]} {verb} {peers} at once, which is no matching"
            )


def check_bytes(sends: Sends, traffic: np.ndarray) -> None:
    """Every byte is sent, none twice.

    traffic: float64[src, dst] bytes, the diagonal is ignored
    """
    gpus = len(traffic)
    wanted = np.where(np.eye(gpus, dtype=bool), 0.0, traffic)
    sent = np.bincount(sends.src * gpus + sends.dst, sends.bytes, gpus * gpus).reshape(gpus, gpus)
    off = np.abs(sent - wanted)
    if off.max(initial=0) > RELATIVE * wanted.max(initial=0):
        src, dst = np.unravel_index(off.argmax(), off.shape)
        raise IllegalError(f"GPU {src} sends {sent[src, dst]:.12g} bytes to GPU {dst} instead of {wanted[src, dst]:.12g}")


def check_durations(sends: Sends, mode: OrderMode, ports: Ports) -> None:
    """Every phase is long enough: in a shared order for all bytes of a port, in others for each send at the slower of its two
    ports' rates."""
    duration, capacity = sends.duration, ports.capacity
    slack = duration * (1 + RELATIVE) + RELATIVE * duration.sum() * 1e-3
    if mode == "shared":
        loads = []
        for verb, port, gpu in (("send", ports.out, sends.src), ("receive", ports.into, sends.dst)):
            _, busy = np.unique(sends.phase * len(capacity) + port, return_inverse=True)
            moved = np.bincount(busy, sends.bytes)[busy]
            loads.append((moved / capacity[port], gpu, verb, moved, "in it"))
    else:
        seconds = sends.bytes / np.minimum(capacity[ports.out], capacity[ports.into])
        loads = [(seconds, sends.src, "send", sends.bytes, "to GPU {}")]
    for needed, gpu, verb, moved, where in loads:
        if (short := np.flatnonzero(needed > slack[sends.phase])).size:
            first = short[0]
            raise IllegalError(
                f"phase {sends.phase[first]} lasts {duration[sends.phase[first]]:g} s, but GPU {gpu[first]} needs "
                f"{needed[first]:g} s to {verb} {moved[first]:.12g} bytes {where.format(sends.dst[first])}"
            )
