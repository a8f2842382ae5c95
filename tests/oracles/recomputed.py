"""The objective of an answer of `solve`, recomputed by the checks alone: one function a kernel, which raises IllegalError."""

from collections import defaultdict
from typing import Any

import numpy as np
import pandas as pd
import pytest

from engine.network import Network
from engine.plan import Schedule
from engine.solve import KERNELS
from tests.oracles import placing
from tests.oracles.communication import check_relayed, check_schedule
from tests.oracles.overlapping import check_axes, check_partition, check_pipeline, check_weight_gradients

Instance = dict[str, Any]


def schedule_of(answer: dict) -> Schedule:
    """The phases of an answer as columns."""
    rows = [(send, phase) for phase, sent in enumerate(answer["phases"]) for send in sent["sends"]]
    columns = {name: tuple(send[name] for send, _ in rows) for name in ("src", "dst", "bytes")}
    duration = tuple(phase["duration"] for phase in answer["phases"])
    return Schedule(phase=tuple(phase for _, phase in rows), duration=duration, **columns)


def _order(instance: Instance, answer: dict) -> float:
    """Orders meet the bound of every order."""
    traffic = np.array(instance["traffic"], dtype=float)
    rate = np.broadcast_to(np.array(instance["bandwidth"], dtype=float), len(traffic))
    seconds, bound = check_schedule(schedule_of(answer), traffic, rate, rate, instance.get("mode", "matched"))
    assert answer["bound"] == pytest.approx(bound, rel=1e-9, abs=1e-300)
    return seconds


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
    return placing.check_assignment(
        np.array(answer["gpu_of_expert"]), tokens, compute, rate, rate, np.ones(len(tokens), dtype=int)
    )


def _colocate(instance: Instance, answer: dict) -> float:
    four = (np.array(instance[name], float) for name in ("send_a", "recv_a", "send_b", "recv_b"))
    return placing.check_colocation(np.array(answer["partner"]), *four)


def _colocate_heterogeneous(instance: Instance, answer: dict) -> float:
    assignment = np.array(answer["assignment"])
    assert assignment[:, 0].tolist() == list(range(len(assignment)))
    return placing.check_colocation_heterogeneous(assignment[:, 1:], np.array(instance["cost"], float))


def _affinity(instance: Instance, answer: dict) -> float:
    costs = {name: instance.get(name, 1) for name in ("cost_gpu", "cost_node")}
    transitions = np.array(instance["transitions"], float)
    place = np.array(answer["gpu_of_expert"])
    return placing.check_affinity(place, transitions, instance["gpus"], instance.get("gpus_per_node"), **costs)[0]


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
    tables = (np.array(table) for table in (answer["gpu_of_expert"], instance["experts"], instance["source_gpu"]))
    cap = instance.get("cap") if answer["status"] in ("OPTIMAL", "FEASIBLE") else None
    sizes = instance["gpus"], instance.get("gpus_per_node"), instance.get("travel", "gpu")
    return float(sum(placing.check_coactivation(*tables, *sizes, cap)[0]))


def _replicate(instance: Instance, answer: dict) -> float:
    loads = np.array(instance["loads"] if instance.get("loads") is not None else [instance["load"]], float)
    more = instance.get("slots_of_gpu"), instance.get("split", "equal"), instance.get("speed")
    return placing.check_replication(np.array(answer["physical_to_logical"]), loads, instance["gpus"], *more).min()


def _replicate_devices(instance: Instance, answer: dict) -> float:
    sizes = instance["devices"], instance["max_experts_per_device"]
    return placing.check_devices(answer["experts_of_device"], instance["popularity"], *sizes)


def _popularity(instance: Instance, answer: dict) -> float:
    return placing.check_popularity(answer["devices_of_expert"], **instance)


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
    """The seconds that all-to-alls take beyond their own duration."""
    waited, done = 0.0, set()
    for event in answer["events"]:
        if event["kind"] == "alltoall":
            arrival, duration = instance["alltoall"][event["index"]]
            assert event["start"] >= arrival and event["index"] not in done
            done.add(event["index"])
            waited += max(0.0, event["end"] - arrival - duration)
    assert len(done) == len(instance["alltoall"])
    return waited


RECOMPUTED = {kernel: globals()[f"_{kernel.replace('-', '_')}"] for kernel in KERNELS}
MORE_IS_BETTER = {"replicate", "weight-gradients"}


def held_against_the_rules(kernel: str, instance: Instance, answer: dict, relative: float = 1e-9) -> None:
    """Check that an answer is legal, that its objective is right to `relative`, and that its bound is on the right side."""
    worth, claimed, bound = RECOMPUTED[kernel](instance, answer), answer["objective"], answer["bound"]
    slack = relative * max(abs(worth), abs(claimed))
    if kernel == "priority":  # a difference of times
        slack = relative * (1 + answer["finish"])
    assert abs(worth - claimed) <= slack, (worth, claimed)
    assert bound >= claimed - slack if kernel in MORE_IS_BETTER else bound <= claimed + slack
    if answer["status"] == "OPTIMAL":
        assert abs(bound - claimed) <= max(slack, 1e-5 * abs(claimed))


def carried_out(instance: Instance, answer: dict) -> tuple[float, float]:
    """Check a two-tier answer byte by byte, carried out as docs/kernels.md says; (makespan, bound) in seconds."""
    traffic = np.array(instance["traffic"], dtype=float) * (1 - np.eye(len(instance["traffic"])))
    gpus, sizes = len(traffic), instance["gpus_per_node"]
    node = np.arange(gpus) // sizes if isinstance(sizes, int) else np.repeat(np.arange(len(sizes)), sizes)
    rates = [np.broadcast_to(np.array(instance[name], float), gpus) for name in ("bandwidth", "link_bandwidth")]
    network = Network(rates[0], rates[0], rates[1], node, 0.0, np.zeros(gpus))
    seconds = np.array([step["seconds"] for step in answer["steps"]])
    return check_relayed(_carried_out(answer, traffic, node), seconds, traffic, network)


def _parts(listed: list[dict], held: dict[int, float]) -> dict[int, dict[int, float]]:
    """The part of each GPU's bytes that goes to each GPU; bytes that are not listed stay."""
    goes: dict[int, dict[int, float]] = defaultdict(dict)
    for send in listed:
        goes[send["src"]][send["dst"]] = send["bytes"] / held[send["src"]]
    for gpu in held:
        stays = 1 - sum(goes[gpu].values())
        if stays > 1e-12:
            goes[gpu][gpu] = stays
    return goes


def _carried_out(answer: dict, traffic: np.ndarray, node: np.ndarray) -> pd.DataFrame:
    """All hops of an answer, with the origin and the target of their bytes."""
    hops = []
    total = {pair: traffic[np.ix_(node == pair[0], node == pair[1])].sum() for pair in np.ndindex(*[node.max() + 1] * 2)}
    for pair in answer["relays"]:
        a, b = pair["src"], pair["dst"]
        at = {(i, j): {i: traffic[i, j]} for i in np.flatnonzero(node == a) for j in np.flatnonzero(node == b)}
        moves = []
        for offset, name in enumerate(("balance", "rails")):
            held: dict[int, float] = defaultdict(float)
            for place in at.values():
                for gpu, size in place.items():
                    held[gpu] += size
            goes = _parts(pair[name], {gpu: size for gpu, size in held.items() if size > 0})
            for whose, place in at.items():
                arrived: dict[int, float] = defaultdict(float)
                for gpu, size in place.items():
                    for peer, part in goes[gpu].items() if size > 0 else ():
                        moves.append((offset, gpu, peer, size * part, *whose))
                        arrived[peer] += size * part
                at[whose] = arrived
        moves += [(2, gpu, whose[1], size, *whose) for whose, place in at.items() for gpu, size in place.items()]
        spread: dict[tuple[int, int], float] = defaultdict(float)
        for offset, src, dst, size, _, _ in moves:
            if offset == 2 and src != dst:
                spread[src, dst] += size
        said = {(send["src"], send["dst"]): send["bytes"] for send in pair["spread"]}
        for key in set(spread) | set(said):
            assert said.get(key, 0.0) == pytest.approx(spread[key], rel=1e-6, abs=1e-9 * traffic.max())
        for phase, sent in enumerate(answer["phases"]):
            for send in sent["sends"]:
                if (send["src"], send["dst"]) == (a, b):
                    part = send["bytes"] / total[a, b]
                    hops += [(phase + move[0], *move[1:3], move[3] * part, *move[4:]) for move in moves]
    for step, entry in enumerate(answer["steps"]):
        for i, j in zip(*np.nonzero(traffic * (node[:, None] == node)), strict=True):
            hops.append((step, i, j, traffic[i, j] * entry["local"][node[i]], i, j))
    table = pd.DataFrame(hops, columns=["step", "src", "dst", "bytes", "origin", "target"])
    return table[(table["src"] != table["dst"]) & (table["bytes"] > 1e-13 * traffic.max())]
