"""Lina's packing: popular experts on several devices, unpopular ones together on few (section 5.2).

The paper says first-fit decreasing and little more. n_e sums to the number of devices, so the bins are to be filled to
the brim, which first fit hardly ever manages. What it leaves open is decided so:

* An expert gets n_e rounded up devices, at least one, and equal pieces n_e / devices: its tokens divide equally, so one
  whole device for each whole part of n_e and the rest elsewhere would not be what the devices then carry.
* Pieces go, the largest first, to the first device where the sum stays within 1, a slot is free and no other piece of
  the expert is. Where there is none, to the emptiest device with a free slot.
* A further piece of an expert is left out where only as many slots are free as experts have no device yet: the cap on
  experts per device always holds.
* Experts without an estimate are dealt to the devices that are still empty, in turn; without any, or with those full,
  to a random device with a free slot.
"""

import numpy as np
from numpy.typing import NDArray

from engine.errors import InputError

ROUND_OFF = 1e-9

Hosting = tuple[tuple[int, ...], ...]
"""The experts of every device, in rising order, none twice on a device."""


def pack_devices(
    devices_of_expert: NDArray[np.float64], devices: int, max_experts_per_device: int, seed: int = 0
) -> Hosting:
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
