"""Local search for experts on devices, with replicas that share an expert's tokens equally.

A state says which device holds which expert. The starts deal replicas, the largest first, to the lightest device with a free
slot, for several numbers of replicas in all. From there the heaviest device is relieved, by handing an expert over or swapping
two, and where that does not help by changing how many replicas an expert has; kicks leave a local optimum.

`pack_devices` is Lina's packing: popular experts on several devices, unpopular ones together on few (section 5.2). The paper
says first-fit decreasing and little more. n_e sums to the number of devices, so the bins are to be filled to the brim, which
first fit hardly ever manages. Questions that it leaves open are decided so:

* An expert gets n_e rounded up devices, at least one, and equal pieces n_e / devices: its tokens divide equally, so one
  whole device for each whole part of n_e and the rest elsewhere would not be the load that the devices then carry.
* Pieces go, the largest first, to the first device where the sum stays within 1, a slot is free and no other piece of
  the expert is. Where there is none, to the emptiest device with a free slot.
* A further piece of an expert is left out where only as many slots are free as experts have no device yet: the cap on
  experts per device always holds.
* Experts without an estimate are dealt to the devices that are still empty, in turn; without any, or with those full,
  to a random device with a free slot.
"""

from collections.abc import Callable

import numpy as np

from engine.errors import InputError
from engine.result import Bools, Floats, Ints, Stop

STARTS = 24
KICK_MOVES = 6
"""Most random changes of one kick."""
LIGHTEST = 12
"""Devices that may take one more replica, the lightest ones: more hardly ever help and cost time on many devices."""
MOST_CELLS = 2**23
"""Cells of the table of all moves from the heaviest device: where it would be larger, the dealt states have to do."""
TOLERANCE = 1e-12
ROUND_OFF = 1e-9

Hosts = Bools
"""bool[expert, device]: True where the device holds the expert."""

Hosting = tuple[tuple[int, ...], ...]
"""The experts of every device, in rising order, none twice on a device."""


def largest_load(hosts: Hosts, weight: Floats) -> float:
    """Largest sum on a device when an expert's weight divides equally over its hosts. weight: float64[expert]."""
    return float(((weight / hosts.sum(axis=1)) @ hosts).max())


def search(
    weight: Floats,
    devices: int,
    cap: int,
    kicks: int,
    seed: int,
    good_enough: float,
    stop: Stop,
    on_incumbent: Callable[[float], None],
) -> Hosts:
    """A good state; deterministic for a seed unless stopped. weight: float64[expert], at least 0.

    Ends after `kicks` kicks, at a largest load of at most `good_enough`, or when `stop` answers True.
    """
    # Dealt states for numbers of replicas from the least to the most possible, the best first.
    experts, dealt = len(weight), []
    for replicas in np.unique(np.linspace(min(devices * cap, devices * experts), experts, STARTS).astype(np.int64))[::-1]:
        hosts = _deal(weight, replicas_of_expert(weight, devices, int(replicas)), devices, cap, stop)
        dealt.append((largest_load(hosts, weight), len(dealt), hosts))
        if stop():
            break
    starts = [hosts for _, _, hosts in sorted(dealt, key=lambda ranked: ranked[:2])]
    best = _Search(weight, cap, starts[0])
    for hosts in starts[:3]:
        if best.worst <= good_enough or stop():
            break
        local = _Search(weight, cap, hosts)
        local.descend(stop)
        if local.worst < best.worst or hosts is starts[0]:
            best = local
    on_incumbent(best.worst)
    rng = np.random.default_rng(seed)
    for _ in range(kicks):
        if best.worst <= good_enough or stop():
            break
        local = _Search(weight, cap, best.hosts.copy())
        local.kick(rng)
        local.descend(stop)
        if local.worst <= best.worst * (1 + TOLERANCE):
            if local.worst < best.worst:
                on_incumbent(local.worst)
            best = local
    return best.hosts


def usual_kicks(experts: int, devices: int) -> int:
    """As many kicks as take about half a second on an ordinary core, at least ten."""
    return max(10, min(400, 100_000 // (experts * devices)))


def replicas_of_expert(weight: Floats, devices: int, replicas: int) -> Ints:
    """int64[expert]: counts that make the largest replica smallest, with at most `replicas` in all and one a device.

    One more to whoever has the largest replica, until none is left or the largest cannot be divided further.
    """
    count = np.ones(len(weight), dtype=np.int64)
    spare = replicas - len(weight)
    if spare <= 0 or weight.sum() <= 0:
        return count
    # With pieces of at most sum / spare nobody can have more than this rule will give: only the last few are dealt.
    sure = np.ceil(weight / (weight.sum() / spare) - ROUND_OFF).astype(np.int64)
    count = np.clip(sure, 1, devices)
    for _ in range(replicas - int(count.sum())):
        size = np.where(count < devices, weight / count, 0.0)
        expert = int(size.argmax())
        if size[expert] <= 0:
            break
        count[expert] += 1
    return count


def _deal(weight: Floats, count: Ints, devices: int, cap: int, stop: Stop) -> Hosts:
    """Replicas by falling size, each to the lightest device that has a free slot and not the expert; one that finds no
    such device is left out, which an expert's first never is. Once `stop` answers True there are only firsts."""
    hosts = np.zeros((len(weight), devices), dtype=bool)
    load, used = np.zeros(devices), np.zeros(devices, dtype=np.int64)
    size = weight / count
    for expert in np.argsort(-size, kind="stable"):
        for _ in range(1 if stop() else count[expert]):
            able = (used < cap) & ~hosts[expert]
            if not able.any():
                break
            device = int(np.where(able, load, np.inf).argmin())
            hosts[expert, device] = True
            load[device] += size[expert]
            used[device] += 1
    return hosts


class _Search:
    """One state with its loads. Expert number `experts` stands for nobody: it weighs nothing and sits nowhere."""

    def __init__(self, weight: Floats, cap: int, hosts: Hosts) -> None:
        self.weight, self.cap, self.hosts = weight, cap, hosts
        self.refresh()

    def refresh(self) -> None:
        self.count = self.hosts.sum(axis=1)
        self.used = self.hosts.sum(axis=0)
        self.size = self.weight / self.count
        self.load = self.size @ self.hosts
        self.worst = float(self.load.max())

    def descend(self, stop: Stop) -> None:
        """Apply the best move at the heaviest device until none helps."""
        while not stop() and (self._hand_over() or self._recount()):
            pass

    def kick(self, rng: np.random.Generator) -> None:
        """A few random changes: an expert takes the place of another, or a free slot, on some device."""
        nobody = len(self.weight)
        for _ in range(rng.integers(1, KICK_MOVES + 1)):
            device = int(rng.integers(len(self.load)))
            here = np.flatnonzero(self.hosts[:, device])
            droppable = [*here[self.count[here] > 1].tolist()] + ([nobody] if self.used[device] < self.cap else [])
            addable = np.append(np.flatnonzero(~self.hosts[:, device]), nobody)
            if droppable:
                self._change(device, int(rng.choice(droppable)), int(rng.choice(addable)))

    def _hand_over(self) -> bool:
        """Move an expert away from the heaviest device, or swap it for a lighter one; counts stay."""
        worst = int(self.load.argmax())
        here = np.flatnonzero(self.hosts[:, worst])
        if len(here) * self.hosts.size > MOST_CELLS:
            return False
        not_here = ~self.hosts[:, worst]
        # saved[expert here, expert or nobody there]: by how much the heaviest device would be relieved
        there_size = np.append(np.where(not_here, self.size, np.inf), 0.0)
        saved = self.size[here][:, None] - there_size
        # carried[expert or nobody, device]: whether it can come from that device in exchange
        room = (self.used < self.cap)[None, :]
        carried = np.vstack([self.hosts, room])
        carried[:, worst] = False
        legal = carried[None, :, :] & ~self.hosts[here][:, None, :]
        after = np.maximum(self.worst - saved[:, :, None], self.load[None, None, :] + saved[:, :, None])
        after = np.where(legal & (saved > 0)[:, :, None], after, np.inf)
        place = int(after.argmin())
        if after.flat[place] >= self.worst * (1 - TOLERANCE):
            return False
        mine, theirs, device = np.unravel_index(place, after.shape)
        expert = here[mine]
        self.hosts[expert, worst], self.hosts[expert, device] = False, True
        if theirs < len(self.weight):
            self.hosts[theirs, worst], self.hosts[theirs, device] = True, False
        self.refresh()
        return True

    def _recount(self) -> bool:
        """On some device drop an expert that has other hosts, add one, or both, such that the heaviest device gains."""
        nobody, worst = len(self.weight), int(self.load.argmax())
        here = np.flatnonzero(self.hosts[:, worst])
        if LIGHTEST * len(here) * self.hosts.size > MOST_CELLS:
            return False
        drop_ok = np.vstack([self.hosts & (self.count > 1)[:, None], self.used < self.cap])
        add_ok = np.vstack([~self.hosts, np.ones(len(self.load), dtype=bool)])
        # An expert of the heaviest device gets one more host ...
        light = np.argsort(self.load, kind="stable")[:LIGHTEST]
        device, drop, add = (
            part.ravel()
            for part in np.broadcast_arrays(light[:, None, None], np.arange(nobody + 1)[None, :, None], here[None, None, :])
        )
        # ... or leaves it to its other hosts, with or without another in its place.
        gone, instead = (part.ravel() for part in np.broadcast_arrays(here[:, None], np.arange(nobody + 1)[None, :]))
        device = np.concatenate([device, np.full(len(gone), worst)])
        drop, add = np.concatenate([drop, gone]), np.concatenate([add, instead])
        legal = drop_ok[drop, device] & add_ok[add, device] & (drop != add)
        device, drop, add = device[legal], drop[legal], add[legal]
        if not len(device):
            return False
        weight, count = np.append(self.weight, 0.0), np.append(self.count, 2).astype(np.float64)
        size = weight / count
        smaller, larger = weight / (count + 1), weight / np.maximum(count - 1, 1)
        hosts = np.vstack([self.hosts, np.zeros(len(self.load), dtype=bool)])
        load = self.load + hosts[add] * (smaller - size)[add, None] + hosts[drop] * (larger - size)[drop, None]
        load[np.arange(len(device)), device] += smaller[add] - larger[drop]
        after = load.max(axis=1)
        at_worst = (load >= self.worst * (1 - TOLERANCE)).sum(axis=1)
        chosen = int(np.lexsort((at_worst, after))[0])
        fewer = at_worst[chosen] < (self.load >= self.worst * (1 - TOLERANCE)).sum()
        if after[chosen] >= self.worst * (1 - TOLERANCE) and not (after[chosen] <= self.worst and fewer):
            return False
        self._change(int(device[chosen]), int(drop[chosen]), int(add[chosen]))
        return True

    def _change(self, device: int, drop: int, add: int) -> None:
        if drop < len(self.weight):
            self.hosts[drop, device] = False
        if add < len(self.weight):
            self.hosts[add, device] = True
        self.refresh()


def pack_devices(devices_of_expert: Floats, devices: int, max_experts_per_device: int, seed: int = 0) -> Hosting:
    """First-fit decreasing of the pieces of n_e.

    devices_of_expert: float64[expert], n_e of equation 1, at most `devices` in all; 0 = no estimate. Raises InputError
    if the sum is larger, a value negative or not finite, or the experts do not fit the slots.
    """
    wanted = np.asarray(devices_of_expert, dtype=np.float64)
    check_slots(len(wanted), devices, max_experts_per_device)
    if not np.isfinite(wanted).all() or wanted.min() < 0 or wanted.sum() > devices * (1 + ROUND_OFF):
        raise InputError(
            f"devices_of_expert: wanted finite values of at least 0 with a sum of at most {devices}, the devices there "
            f"are; the sum is {wanted.sum():g}"
        )
    held: list[list[int]] = [[] for _ in range(devices)]
    filled, free = np.zeros(devices), np.full(devices, max_experts_per_device)
    homeless, slots = len(wanted), devices * max_experts_per_device

    def put(expert: int, device: int, size: float) -> None:
        held[device].append(expert)
        filled[device] += size
        free[device] -= 1

    pieces = np.maximum(np.ceil(wanted - ROUND_OFF), 1.0).astype(np.int64)
    size_of_expert = wanted / pieces
    for expert in np.argsort(-size_of_expert, kind="stable").tolist():
        size = float(size_of_expert[expert])
        if size <= 0:
            continue
        homeless -= 1
        able = free > 0
        for _ in range(int(pieces[expert])):
            if slots <= homeless or not able.any():
                break
            fits = able & (filled + size <= 1 + ROUND_OFF)
            device = int(fits.argmax() if fits.any() else np.where(able, filled, np.inf).argmin())
            put(expert, device, size)
            able[device] = False  # for another piece of this expert
            slots -= 1
    empty = [device for device in range(devices) if not held[device]]
    rng = np.random.default_rng(seed)
    for turn, expert in enumerate(np.flatnonzero(size_of_expert <= 0).tolist()):
        if turn < len(empty) * max_experts_per_device:
            put(expert, empty[turn % len(empty)], 0.0)
        else:
            put(expert, int(rng.choice(np.flatnonzero(free))), 0.0)
    return tuple(tuple(sorted(experts)) for experts in held)


def check_slots(experts: int, devices: int, max_experts_per_device: int) -> None:
    """Raise InputError unless every expert finds a slot."""
    if devices < 1 or max_experts_per_device < 1 or experts < 1:
        raise InputError(
            f"{experts} experts, {devices} devices, {max_experts_per_device} experts per device: wanted at least one of each"
        )
    if experts > devices * max_experts_per_device:
        raise InputError(
            f"{experts} experts do not fit {devices} devices with at most {max_experts_per_device} experts on each; take "
            f"{-(-experts // max_experts_per_device)} devices or allow {-(-experts // devices)} experts per device"
        )
