"""Replicas of experts on GPUs, and the copies that a change of placement needs."""

import numpy as np

from engine.errors import IllegalError


def check_replication(
    physical_to_logical: np.ndarray,
    loads: np.ndarray,
    gpus: int,
    slots_of_gpu: np.ndarray | None = None,
    split: str = "equal",
    speed: np.ndarray | None = None,
) -> np.ndarray:
    """Check replicas on GPUs and return their balancedness float64[load, layer], summed up slot by slot.

    physical_to_logical: int[layer, slot], slots in the order of their GPUs; loads: float64[load, layer, expert];
    slots_of_gpu: int[gpu], equal if not given; split: "equal", or "free" (solved here as a linear program); speed:
    float64[gpu], 1 if not given. Balancedness: the time every GPU would need if all work were divided perfectly, over
    the time of the slowest GPU; 1 where there is no work.
    """
    workloads, layers, experts = loads.shape
    if len(physical_to_logical) != layers:
        raise IllegalError(f"{len(physical_to_logical)} layers are placed, not {layers}")
    slots = len(physical_to_logical[0])
    if slots_of_gpu is None:
        if slots % gpus:
            raise IllegalError(f"{slots} slots do not divide over {gpus} GPUs")
        slots_of_gpu = [slots // gpus] * gpus
    speed = [1.0] * gpus if speed is None else speed
    gpu_of_slot = [gpu for gpu in range(gpus) for _ in range(slots_of_gpu[gpu])]
    answer = np.ones((workloads, layers))
    for layer in range(layers):
        row = list(physical_to_logical[layer])
        if len(row) != len(gpu_of_slot):
            raise IllegalError(f"layer {layer} fills {len(row)} slots of {len(gpu_of_slot)}")
        for expert in row:
            if not 0 <= expert < experts:
                raise IllegalError(f"layer {layer} places an expert {expert}, which does not exist")
        for expert in range(experts):
            if expert not in row:
                raise IllegalError(f"layer {layer} has no place for expert {expert}")
        for load in range(workloads):
            work = loads[load, layer]
            if sum(work) == 0:
                continue
            slowest = (_free if split == "free" else _equal)(row, gpu_of_slot, work, speed)
            answer[load, layer] = sum(work) / sum(speed) / slowest
    return answer


def _equal(row: list, gpu_of_slot: list, work: np.ndarray, speed: np.ndarray) -> float:
    time = [0.0] * len(speed)
    for expert, gpu in zip(row, gpu_of_slot, strict=True):
        time[gpu] += work[expert] / row.count(expert) / speed[gpu]
    if not np.isclose(np.dot(time, speed), sum(work)):
        raise IllegalError("the GPUs do not do all the work")
    return max(time)


def _free(row: list, gpu_of_slot: list, work: np.ndarray, speed: np.ndarray) -> float:
    """Least time of the slowest GPU: how much of each expert each slot does, in shares of all the work."""
    from scipy.optimize import linprog

    slots, gpus, experts = len(row), len(speed), len(work)
    total = sum(work)
    on_gpu, of_expert = np.zeros((gpus, slots + 1)), np.zeros((experts, slots + 1))
    for slot, (expert, gpu) in enumerate(zip(row, gpu_of_slot, strict=True)):
        on_gpu[gpu, slot] = 1 / speed[gpu]
        of_expert[expert, slot] = 1
    on_gpu[:, slots] = -1
    cost = np.r_[np.zeros(slots), 1.0]
    solution = linprog(cost, A_ub=on_gpu, b_ub=np.zeros(gpus), A_eq=of_expert, b_eq=np.array(work) / total)
    return float(solution.fun) * total


def check_transfers(
    source: np.ndarray, traffic: np.ndarray, held_now: np.ndarray, held_new: np.ndarray, bytes_per_expert: float
) -> None:
    """Check that every new copy comes once, whole, from a GPU that has it, and that the traffic is their sum.

    source: int[layer, expert, gpu], the GPU that sends the new copy, -1 where there is none; traffic: float64[src, dst]
    bytes; held_now, held_new: bool[layer, expert, gpu].
    """
    added = np.zeros_like(traffic)
    layers, experts, gpus = held_now.shape
    for layer in range(layers):
        for expert in range(experts):
            for gpu in range(gpus):
                needed = held_new[layer, expert, gpu] and not held_now[layer, expert, gpu]
                sender = source[layer, expert, gpu]
                if not needed:
                    if sender != -1:
                        raise IllegalError(f"layer {layer}, expert {expert} is sent to GPU {gpu} without need")
                    continue
                if not 0 <= sender < gpus or not held_now[layer, expert, sender]:
                    raise IllegalError(f"GPU {sender} sends layer {layer}, expert {expert} without having it")
                added[sender, gpu] += bytes_per_expert
    if not np.allclose(added, traffic):
        raise IllegalError("the traffic is not the sum of the copies sent")
