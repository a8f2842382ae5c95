"""Launches as the arguments of a job, and the checks that depend on the place."""

import json
import socket
from dataclasses import replace

import numpy as np
import pytest

from engine import store
from engine.errors import InputError
from engine.launch.places import testbed
from engine.launch.places.testbed import Testbed
from engine.launch.preparation import place_checks
from engine.launch.preparation.launch import Launch
from engine.launch.preparation.prepare import prepare
from tests.cases.cluster_launches import destination
from tests.cases.launches import HOST, MODEL, UNEVEN, plan_for, recording
from tests.cases.testbeds import cluster_of, needs_testbed, own_namespaces

TRACE = recording()
PLANS = (plan_for(TRACE, "matched"), plan_for(TRACE, "concurrent", UNEVEN))
DRAWN = cluster_of(50e9, 25e9, 10e9, 10e9)


def asked(**more) -> Launch:
    return Launch(PLANS, TRACE, MODEL, DRAWN, **more)


def check(launch, name: str):
    return next(check for check in launch.checks if check.name == name)


def arguments_of(launch: Launch) -> dict:
    """As they arrive at a job."""
    return json.loads(json.dumps(launch.to_arguments()))


@pytest.mark.parametrize("on", ["local", "testbed", "slurm", "kubernetes"])
def test_what_is_asked_for_survives_the_way_to_a_job(on, tmp_path):
    where = destination(on, tmp_path) if on in ("slurm", "kubernetes") else None
    numbers = {"ranks": 3, "tokens": 50, "repeats": 2, "limit": 33.0, "dtype": "bf16", "scale": 700.0}
    launch = asked(on=on, destination=where, second=(TRACE, MODEL), **numbers)
    store.save_workload(TRACE)
    again = Launch.from_arguments(arguments_of(launch))
    assert again.plans == PLANS and again.model == MODEL and again.cluster == DRAWN and again.destination == where
    assert again.workload.digest == again.second[0].digest == TRACE.digest and again.second[1] == MODEL
    assert again.on == on and numbers == {name: getattr(again, name) for name in numbers}


def test_a_place_that_is_none_and_a_recording_that_is_gone_are_refused():
    with pytest.raises(InputError, match="no longer in the data folder"):
        Launch.from_arguments(arguments_of(asked()))
    store.save_workload(TRACE)
    with pytest.raises(InputError, match="not on 'the moon'"):
        Launch.from_arguments(arguments_of(asked()) | {"on": "the moon"})
    with pytest.raises(InputError, match="slurm: nodes: Field required"):
        Launch.from_arguments(arguments_of(asked()) | {"on": "slurm", "destination": {"scheduler": "slurm"}})


def test_numbers_reach_the_launch_and_slots_are_those_of_the_fullest_layer_and_plan():
    launch = prepare(asked(ranks=2, tokens=40, repeats=5, limit=60.0, dtype="bf16"), HOST)
    assert launch.testbed is None and launch.plans == PLANS and launch.workloads[0].tokens == 40 and launch.limit == 60
    assert (launch.instructions.ranks, launch.instructions.repeats, launch.instructions.model.dtype) == (2, 5, "bf16")
    launch = prepare(asked(ranks=4), HOST)
    assert check(launch, "Slots").text.startswith("of a layer's 8 experts, 4, 2, 2, 2 on ranks")


def test_a_port_of_this_machine_is_tried(monkeypatch):
    launch = prepare(asked(ranks=2), HOST)
    assert check(launch, "Port").passed and "torchrun picks" in check(launch, "Port").text

    def none_left(*_) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(socket.socket, "bind", none_left)
    launch = prepare(asked(ranks=2), HOST)
    assert not launch.ready and "no port of localhost can be had (Address already in use)" in check(launch, "Port").text


def test_a_testbed_has_the_drawn_links_and_no_gpus_and_need_not_be_built_to_be_checked(monkeypatch):
    monkeypatch.setattr(Testbed, "_build", None)
    gpus = replace(HOST, gpus=("H200",) * 4, memory=(80e9,) * 4)
    launch = prepare(asked(on="testbed", ranks=4, scale=1000.0), gpus)
    assert launch.instructions.backend == "gloo"
    np.testing.assert_allclose(launch.testbed.bandwidth, [50e6, 25e6, 10e6, 10e6])
    assert check(launch, "Port").passed


def test_a_testbed_too_slow_for_its_time_limit_is_found_out_before():
    launch = prepare(asked(on="testbed", ranks=4, scale=100_000.0, repeats=1, limit=900.0), HOST)
    link_check = check(launch, "Links")
    assert link_check.passed
    # Every send of every layer by hand.
    least = 0.0
    for plan in launch.instructions.plans:
        source, share = TRACE.rank_of_token(4), plan.placement.share
        for layer in range(TRACE.layers):
            out, into = np.zeros(4), np.zeros(4)
            for token in range(TRACE.tokens):
                for expert in TRACE.experts[token, layer]:
                    for rank in range(4):
                        if rank != source[token]:
                            out[source[token]] += share[layer, expert, rank]
                            into[rank] += share[layer, expert, rank]
            size = launch.instructions.model.bytes_per_token
            least += 2 * max(np.maximum(out, into) * size / launch.testbed.bandwidth)
    assert place_checks.seconds(least) in link_check.text and place_checks.seconds(2 * least) in link_check.text
    limit = 2 * least / 0.81
    launch = prepare(asked(on="testbed", ranks=4, scale=100_000.0, repeats=1, limit=limit), HOST)
    assert not launch.ready and "replay fewer tokens" in check(launch, "Links").text


def test_an_order_that_drawn_links_make_slow_is_a_warning_and_no_obstacle(tmp_path):
    slow = replace(asked(), plans=(plan_for(TRACE, "sequential"),))
    launch = prepare(replace(slow, on="testbed", ranks=4), HOST)
    order_check = check(launch, "Order")
    assert order_check.warning and order_check.passed and launch.ready
    assert "as long in its all-to-alls" in order_check.text
    launch = prepare(replace(slow, on="local", ranks=4), HOST)
    assert not [check for check in launch.checks if check.warning]
    where = destination("slurm", tmp_path, nodes=2, ranks_per_node=2, gpus=0)
    launch = prepare(replace(slow, on="slurm", destination=where), HOST)
    assert launch.testbed is None and launch.instructions.ranks == 4
    assert "the nodes meet on the first one" in check(launch, "Port").text
    assert check(launch, "Shared folder").passed


@needs_testbed
def test_whether_a_testbed_can_be_built_is_tried(monkeypatch):
    def refuses(*_) -> None:
        raise InputError("no such module")

    assert place_checks.testbed_fault() is None and not own_namespaces()
    monkeypatch.setattr(testbed, "_shape", refuses)
    assert place_checks.testbed_fault() == "no such module" and not own_namespaces()
