"""What an answer of `solve` is worth, by the validators alone: one function a kernel, which raises where a rule is broken."""

from typing import Any

import numpy as np

from engine.plan import Schedule
from engine.solve import KERNELS
from engine.validate import (
    check_affinity,
    check_assignment,
    check_axes,
    check_coactivation,
    check_colocation,
    check_colocation_heterogeneous,
    check_devices,
    check_partition,
    check_pipeline,
    check_popularity,
    check_replication,
    check_schedule,
    check_weight_gradients,
)

Instance = dict[str, Any]


def schedule_of(answer: dict) -> Schedule:
    """The phases of an answer as columns."""
    rows = [(send, phase) for phase, sent in enumerate(answer["phases"]) for send in sent["sends"]]
    columns = {name: tuple(send[name] for send, _ in rows) for name in ("src", "dst", "bytes")}
    duration = tuple(phase["duration"] for phase in answer["phases"])
    return Schedule(phase=tuple(phase for _, phase in rows), duration=duration, **columns)


def _order(instance: Instance, answer: dict) -> float:
    traffic = np.array(instance["traffic"], dtype=float)
    rate = np.broadcast_to(np.array(instance["bandwidth"], dtype=float), len(traffic))
    return check_schedule(schedule_of(answer), traffic, rate, rate, instance.get("mode", "matched"))[0]


def _two_tier(instance: Instance, answer: dict) -> float:
    """Every pair of nodes has all of its bytes sent, and steps take as long as the answer says."""
    sizes, traffic = instance["gpus_per_node"], np.array(instance["traffic"], dtype=float)
    sizes = [sizes] * (len(traffic) // sizes) if isinstance(sizes, int) else sizes
    node = np.repeat(np.arange(len(sizes)), sizes)
    wanted, sent = (np.zeros((len(sizes), len(sizes))) for _ in range(2))
    np.add.at(wanted, (node[:, None], node[None, :]), traffic)
    for phase in answer["phases"]:
        ends = [[send[name] for send in phase["sends"]] for name in ("src", "dst")]
        assert all(len(set(column)) == len(column) for column in ends), "no matching of nodes"
        for send in phase["sends"]:
            sent[send["src"], send["dst"]] += send["bytes"]
    off = np.abs(sent - np.where(np.eye(len(sizes), dtype=bool), 0, wanted))
    assert off.max() <= 1e-9 * max(wanted.max(), 1e-300)
    return float(sum(step["seconds"] for step in answer["steps"]))


def _assign(instance: Instance, answer: dict) -> float:
    tokens, rate = np.array(instance["tokens"], float), np.array(instance["bandwidth"], float)
    compute = np.outer(instance["seconds_per_token"], tokens.sum(axis=0))
    return check_assignment(
        np.array(answer["gpu_of_expert"]), tokens, compute, rate, rate, np.ones(len(tokens), dtype=int)
    )


def _colocate(instance: Instance, answer: dict) -> float:
    four = (np.array(instance[name], float) for name in ("send_a", "recv_a", "send_b", "recv_b"))
    return check_colocation(np.array(answer["partner"]), *four)


def _colocate_heterogeneous(instance: Instance, answer: dict) -> float:
    assignment = np.array(answer["assignment"])
    assert assignment[:, 0].tolist() == list(range(len(assignment)))
    return check_colocation_heterogeneous(assignment[:, 1:], np.array(instance["cost"], float))


def _affinity(instance: Instance, answer: dict) -> float:
    costs = {name: instance.get(name, 1) for name in ("cost_gpu", "cost_node")}
    transitions = np.array(instance["transitions"], float)
    place = np.array(answer["gpu_of_expert"])
    return check_affinity(place, transitions, instance["gpus"], instance.get("gpus_per_node"), **costs)[0]


def _travel(instance: Instance, answer: dict) -> float:
    """The most rows that a GPU sends or receives, counted token by token."""
    size, unit = instance["gpus_per_node"], instance["travel"]
    fabric = np.zeros((instance["gpus"], instance["gpus"]))
    for token, source in zip(instance["experts"], instance["source_gpu"], strict=True):
        hosts = [instance["gpu_of_expert"][expert] for expert in token if expert >= 0]
        away = [host for host in hosts if host // size != source // size]
        if unit == "node":
            away = {host // size * size + source % size for host in away}
        for host in away if unit != "gpu" else set(away):
            fabric[source, host] += 1
    assert np.array_equal(fabric, answer["fabric"])
    return float(max(fabric.sum(axis=0).max(), fabric.sum(axis=1).max()))


def _coactivation(instance: Instance, answer: dict) -> float:
    kept = answer["status"] in ("OPTIMAL", "FEASIBLE")
    rows, _ = check_coactivation(
        np.array(answer["gpu_of_expert"]),
        np.array(instance["experts"]),
        np.array(instance["source_gpu"]),
        instance["gpus"],
        instance.get("gpus_per_node"),
        instance.get("travel", "gpu"),
        instance.get("cap") if kept else None,
    )
    return float(sum(rows))


def _replicate(instance: Instance, answer: dict) -> float:
    loads = np.array(instance["loads"] if instance.get("loads") is not None else [instance["load"]], float)
    return check_replication(
        np.array(answer["physical_to_logical"]),
        loads,
        instance["gpus"],
        instance.get("slots_of_gpu"),
        instance.get("split", "equal"),
        instance.get("speed"),
    ).min()


def _replicate_devices(instance: Instance, answer: dict) -> float:
    sizes = instance["devices"], instance["max_experts_per_device"]
    return check_devices(answer["experts_of_device"], instance["popularity"], *sizes)


def _popularity(instance: Instance, answer: dict) -> float:
    return check_popularity(answer["devices_of_expert"], **instance)


def _pipeline_degree(instance: Instance, answer: dict) -> float:
    degree = answer["degree"]
    assert 1 <= degree <= instance["max_degree"]
    comm, comp = (
        [instance[f"alpha_{kind}"] + instance[f"beta_{kind}"] * instance[f"size_{kind}"] / degree] * degree
        for kind in ("comm", "comp")
    )
    return check_pipeline(comm, comp, comm, instance.get("streams", 1), instance.get("order", "dispatch-first"))


def _weight_gradients(instance: Instance, answer: dict) -> float:
    allowed = instance["allowed"] or [[]] * len(instance["dw"])
    return check_weight_gradients(instance["alltoall"], instance["dw"], allowed, answer["alltoall_of_dw"])


def _partition(instance: Instance, answer: dict) -> float:
    network = [op["kind"] == "comm" for op in instance["ops"]]
    times = [[np.inf if seconds is None else seconds for seconds in op["times"]] for op in instance["ops"]]
    ranges = [(part["first"], part["last"], part["parts"]) for part in answer["ranges"]]
    return check_partition(ranges, network, times, max_range=instance.get("max_range"))


def _partition_axes(instance: Instance, answer: dict) -> float:
    if answer["axis_of_tensor"] is not None:
        constraints = [(each["tensors"], each["allowed"]) for each in instance.get("constraints", ())]
        check_axes(answer["axis_of_tensor"], instance["domains"], constraints)
    return 0.0


def _priority(instance: Instance, answer: dict) -> float:
    """All-to-alls end after they had their own time; what they waited is what is beyond it."""
    waited, done = 0.0, set()
    for event in answer["events"]:
        if event["kind"] == "alltoall":
            arrival, duration = instance["alltoall"][event["index"]]
            assert event["start"] >= arrival and event["index"] not in done
            done.add(event["index"])
            waited += max(0.0, event["end"] - arrival - duration)
    assert len(done) == len(instance["alltoall"])
    return waited


RECOMPUTED = {
    "order": _order,
    "two-tier": _two_tier,
    "assign": _assign,
    "colocate": _colocate,
    "colocate-heterogeneous": _colocate_heterogeneous,
    "affinity": _affinity,
    "travel": _travel,
    "coactivation": _coactivation,
    "replicate": _replicate,
    "replicate-devices": _replicate_devices,
    "popularity": _popularity,
    "pipeline-degree": _pipeline_degree,
    "weight-gradients": _weight_gradients,
    "partition": _partition,
    "partition-axes": _partition_axes,
    "priority": _priority,
}
assert set(RECOMPUTED) == set(KERNELS)
MORE_IS_BETTER = {"replicate", "weight-gradients"}
