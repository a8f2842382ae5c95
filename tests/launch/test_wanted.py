"""What a launch is to run and where: as the arguments of a job, and the checks that depend on the place."""

import json
import socket
from dataclasses import replace

import numpy as np
import pytest

from engine import store
from engine.errors import InputError
from engine.launch import preflight, testbed
from engine.launch.testbed import Testbed
from engine.launch.wanted import Wanted
from tests.launch.test_local import HOST, MODEL, UNEVEN, plan_for, recording
from tests.launch.test_request import destination
from tests.launch.test_testbed import cluster_of, needs_testbed, own_namespaces

TRACE = recording()
PLANS = (plan_for(TRACE, "matched"), plan_for(TRACE, "concurrent", UNEVEN))
DRAWN = cluster_of(50e9, 25e9, 10e9, 10e9)


def wanted(**more) -> Wanted:
    return Wanted(PLANS, TRACE, MODEL, DRAWN, **more)


def check(launch, name: str):
    return next(one for one in launch.checks if one.name == name)


def arguments_of(one: Wanted) -> dict:
    """As they arrive at a job."""
    return json.loads(json.dumps(one.to_arguments()))


@pytest.mark.parametrize("on", ["local", "testbed", "slurm", "kubernetes"])
def test_what_is_wanted_survives_the_way_to_a_job(on, tmp_path):
    where = destination(on, tmp_path) if on in ("slurm", "kubernetes") else None
    numbers = {"ranks": 3, "tokens": 50, "repeats": 2, "limit": 33.0, "dtype": "bf16", "scale": 700.0}
    one = wanted(on=on, destination=where, second=(TRACE, MODEL), **numbers)
    store.save_workload(TRACE)
    again = Wanted.from_arguments(arguments_of(one))
    assert again.plans == PLANS and again.model == MODEL and again.cluster == DRAWN and again.destination == where
    assert again.workload.digest == again.second[0].digest == TRACE.digest and again.second[1] == MODEL
    assert again.on == on and numbers == {name: getattr(again, name) for name in numbers}


def test_a_place_that_is_none_and_a_recording_that_is_gone_are_refused():
    with pytest.raises(InputError, match="no longer in the data folder"):
        Wanted.from_arguments(arguments_of(wanted()))
    store.save_workload(TRACE)
    with pytest.raises(InputError, match="not on 'the moon'"):
        Wanted.from_arguments(arguments_of(wanted()) | {"on": "the moon"})
    with pytest.raises(InputError, match="slurm: nodes: Field required"):
        Wanted.from_arguments(arguments_of(wanted()) | {"on": "slurm", "destination": {"scheduler": "slurm"}})


def test_numbers_reach_the_launch():
    launch, bed = wanted(ranks=2, tokens=40, repeats=5, limit=60.0, dtype="bf16").prepare(HOST)
    assert bed is None and launch.plans == PLANS and launch.workloads[0].tokens == 40 and launch.limit == 60
    assert (launch.spec.ranks, launch.spec.repeats, launch.spec.model.dtype) == (2, 5, "bf16")


def test_slots_are_those_of_the_fullest_layer_and_plan():
    launch, _ = wanted(ranks=4).prepare(HOST)
    assert check(launch, "Slots").text.startswith("4, 2, 2, 2 of 8 experts")


def test_a_port_of_this_machine_is_tried(monkeypatch):
    launch, _ = wanted(ranks=2).prepare(HOST)
    assert check(launch, "Port").passed and "torchrun picks" in check(launch, "Port").text

    def none_left(*_) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(socket.socket, "bind", none_left)
    launch, _ = wanted(ranks=2).prepare(HOST)
    assert not launch.ready and "no port of localhost can be had (Address already in use)" in check(launch, "Port").text


def test_a_testbed_has_the_drawn_links_and_no_gpus():
    gpus = replace(HOST, gpus=("H200",) * 4, memory=(80e9,) * 4)
    launch, bed = wanted(on="testbed", ranks=4, scale=1000.0).prepare(gpus)
    assert launch.spec.backend == "gloo"
    np.testing.assert_allclose(bed.bandwidth, [50e6, 25e6, 10e6, 10e6])
    assert check(launch, "Port").passed


def test_a_testbed_too_slow_for_its_time_limit_is_found_out_before():
    launch, bed = wanted(on="testbed", ranks=4, scale=100_000.0, repeats=1, limit=900.0).prepare(HOST)
    told = check(launch, "Links")
    assert told.passed
    # Every send of every layer by hand.
    least = 0.0
    for plan in launch.spec.plans:
        source, share = TRACE.rank_of_token(4), plan.placement.share
        for layer in range(TRACE.layers):
            out, into = np.zeros(4), np.zeros(4)
            for token in range(TRACE.tokens):
                for expert in TRACE.experts[token, layer]:
                    for rank in range(4):
                        if rank != source[token]:
                            out[source[token]] += share[layer, expert, rank]
                            into[rank] += share[layer, expert, rank]
            size = launch.spec.model.bytes_per_token
            least += 2 * max(np.maximum(out, into) * size / bed.bandwidth)
    assert preflight.seconds(least) in told.text and preflight.seconds(2 * least) in told.text
    limit = 2 * least / 0.81
    launch, _ = wanted(on="testbed", ranks=4, scale=100_000.0, repeats=1, limit=limit).prepare(HOST)
    assert not launch.ready and "replay fewer tokens" in check(launch, "Links").text


def test_an_order_that_drawn_links_make_slow_is_a_warning_and_no_obstacle(tmp_path):
    slow = replace(wanted(), plans=(plan_for(TRACE, "sequential"),))
    launch, _ = replace(slow, on="testbed", ranks=4).prepare(HOST)
    told = check(launch, "Order")
    assert told.warning and told.passed and launch.ready and "as long in its all-to-alls" in told.text
    launch, _ = replace(slow, on="local", ranks=4).prepare(HOST)
    assert not [one for one in launch.checks if one.warning]
    where = destination("slurm", tmp_path, nodes=2, ranks_per_node=2, gpus=0)
    launch, bed = replace(slow, on="slurm", destination=where).prepare(HOST)
    assert bed is None and launch.spec.ranks == 4 and "the nodes meet on the first one" in check(launch, "Port").text
    assert check(launch, "Shared folder").passed


def test_a_testbed_needs_not_be_built_to_be_checked(monkeypatch):
    monkeypatch.setattr(Testbed, "_build", None)
    assert wanted(on="testbed", ranks=2).prepare(HOST)[1].ranks == 2


@needs_testbed
def test_whether_a_testbed_can_be_built_is_tried(monkeypatch):
    def refuses(*_) -> None:
        raise InputError("no such module")

    assert preflight.testbed_fault() is None and not own_namespaces()
    monkeypatch.setattr(testbed, "_shape", refuses)
    assert preflight.testbed_fault() == "no such module" and not own_namespaces()
