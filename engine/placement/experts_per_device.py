"""The number of experts a device holds in training, so that expert computation fills the time of the all-to-alls.

Lina, section 4.2: all-to-alls cut into micro-ops are pipelined with the experts' FFN, which is far shorter. More experts on
a device give a longer FFN micro-op and a shorter all-to-all, so the number is doubled until the FFN is no longer the shorter
one, memory is full, or all experts are on every device. Where memory is full the paper moves parameters to the host's DRAM;
the answer here only says which choices would need it, and `engine.simulate.training.offload` has the traffic.
"""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from engine.errors import InputError
from engine.result import Bools, Floats, Ints, Result, Status, result_of


@dataclass(frozen=True)
class ExpertPacking:
    """The choice made, and all of them.

    experts_per_device: the choice made; None if not even the fewest experts fit
    choices: int64[choice], experts per device
    efficiency: float64[choice], share of the all-to-all in which the device computes, 0..1 (Lina, Table 3)
    memory: float64[choice], bytes of the experts of a device
    needs_offloading: bool[choice], more than the device's memory
    """

    experts_per_device: int | None
    choices: Ints
    efficiency: Floats
    memory: Floats
    needs_offloading: Bools


def packing_choices(experts: int, devices: int) -> Ints:
    """int64[choice], experts per device: as few as hold them all, doubled until every device holds all.

    Raises InputError unless both numbers are at least 1.
    """
    if min(experts, devices) < 1:
        raise InputError(f"{experts} experts on {devices} devices: wanted at least one of each")
    choices = [-(-experts // devices)]
    while choices[-1] < experts:
        choices.append(min(2 * choices[-1], experts))
    return np.array(choices, dtype=np.int64)


def pack_experts(
    ffn: ArrayLike, alltoall: ArrayLike, experts: int, devices: int, bytes_per_expert: float, memory: float
) -> Result[ExpertPacking]:
    """The fewest experts per device with the highest pipelining efficiency that fits; `objective` is its idle share.

    ffn, alltoall: float64[choice] seconds of one micro-op at each of `packing_choices(experts, devices)`
    bytes_per_expert: on a device, over all layers, with gradients and optimiser state where those stay there
    memory: bytes that a device has for experts

    Efficiency is min(1, ffn / alltoall), 1 where no all-to-all is left. The paper stops doubling at the first choice that
    reaches 1; so does this one, and where none does, or more experts are worse, trying all few choices proves the best.
    Status INFEASIBLE, with the table, if not even the first choice fits. Raises InputError for wrong shapes and values.
    """
    began = time.perf_counter()
    choices = packing_choices(experts, devices)
    seconds = {"ffn": ffn, "alltoall": alltoall}
    for name, value in seconds.items():
        seconds[name] = table = np.asarray(value, dtype=np.float64)
        if table.shape != choices.shape or not np.isfinite(table).all() or table.min() < 0:
            raise InputError(f"{name}: wanted finite seconds of at least 0 for {choices.tolist()} experts per device")
    for name, value in {"bytes_per_expert": bytes_per_expert, "memory": memory}.items():
        if not value >= 0:
            raise InputError(f"{name}: wanted bytes of at least 0, not {value:g}")
    hidden = np.minimum(seconds["ffn"], seconds["alltoall"])
    efficiency = np.divide(hidden, seconds["alltoall"], out=np.ones(len(choices)), where=seconds["alltoall"] > 0)
    needed = choices * float(bytes_per_expert)
    fits = needed <= memory
    best = int(np.argmax(np.where(fits, efficiency, -1.0)))
    chosen = int(choices[best]) if fits[best] else None
    objective = float(1 - efficiency[best]) if fits[best] else float("inf")
    status = Status.OPTIMAL if fits[best] else Status.INFEASIBLE
    packing = ExpertPacking(chosen, choices, efficiency, needed, ~fits)
    return result_of("pack-experts", began, status, objective, objective, packing)
