"""Launches on a real Slurm of two nodes. Where the work of ranks does not matter, a shell script stands in for it."""

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from engine.errors import InputError
from engine.launch.places.destination import Destination
from engine.launch.rank.failure import log_tail
from engine.launch.running import clusters, local, torchx_application
from engine.launch.running.local import run_on_cluster
from engine.launch.running.processes import WORKER
from engine.result import never
from tests import warm
from tests.cases.cli import CommandLine
from tests.cases.cluster_launches import destination, hold_results, launch_for, shared_folder
from tests.slurm.real import NODES, until

SIZE = {"gpus": 0, "cpus_per_node": 2, "memory_per_node": 2.0**30}


@pytest.fixture
def engine(capsys) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def instead(tmp_path, monkeypatch) -> Callable[[str], None]:
    def put(script: str) -> None:
        path = tmp_path / "script"
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return put


@pytest.fixture
def warm_ranks(warm_python, monkeypatch) -> None:
    """Nodes start Python from a process that has everything imported already."""
    known = torchx_application.EXPORTED
    monkeypatch.setattr(torchx_application, "EXPORTED", re.compile(f"{known.pattern}|{warm.ADDRESS}"))


def place(shared: Path, **more) -> Destination:
    return destination("slurm", shared, **SIZE | more)


def submitted(shared: Path, limit: float = 600.0, **more) -> tuple[str, Path]:
    launch = launch_for(place(shared, **more), limit)
    with clusters.new_run_folder(launch) as folder:
        return clusters.submit(launch, folder), folder


def in_state(handle: str, state: str) -> clusters.Status:
    until(lambda: clusters.status(handle).state == state, 15, f"state {state}")
    return clusters.status(handle)


def watched(launch, seen: Path, act: Callable[[str], object], stop=never) -> list[str]:
    """The reports of a launch until it fails, with the failure at its end. act: reacts to a report."""
    said: list[str] = []

    def report(done, message, *_) -> None:
        said.append(message)
        act(message)

    with pytest.raises(InputError) as failure:
        run_on_cluster(launch, seen, stop, report)
    return [*said, str(failure.value)]


def test_a_launch_runs_on_two_nodes_and_its_results_are_read(slurm, tmp_path, engine, warm_ranks, monkeypatch, capsys):
    monkeypatch.setattr(local, "POLL", 0.2)
    shared = shared_folder(tmp_path)
    launch, reports = launch_for(place(shared)), []
    run = run_on_cluster(launch, tmp_path / "seen", never, lambda done, message, *_: reports.append(message))
    hold_results(run, launch)
    assert run.profile.cores == 4  # of both nodes, not of this machine
    # Which steps of the run it sees depends on when it asks.
    assert any(re.search(r" is running, \w", message) for message in reports), reports
    (folder,) = shared.glob("run-*")
    capsys.readouterr()
    assert engine.json("collect", folder)["tokens"] == 200
    assert "comparing with the unplanned computation" in log_tail(tmp_path / "seen", 0)
    assert not list(tmp_path.rglob("owned"))
    (folder / "events-1.npz").unlink()
    assert "has no events-1.npz yet: slurm://" in engine.refused("collect", folder)


@pytest.mark.parametrize(
    ("act", "limit", "fault"),
    [
        (psutil.Process.kill, 600.0, r"failed.*; rank 3 was killed by signal 9 \(SIGKILL"),
        pytest.param(  # Slurm counts limits in minutes
            *(psutil.Process.suspend, 60.0, r"failed: TIMEOUT \(TimeLimit\); Slurm says '.*'; what its nodes"),
            marks=pytest.mark.everything,
        ),
    ],
    ids=["killed", "hanging to the time limit"],
)
def test_a_rank_that_fails_is_told(slurm, shared, tmp_path, warm_ranks, monkeypatch, act, limit, fault):
    monkeypatch.setattr(local, "POLL", 0.1)
    launch = launch_for(place(shared, ranks_per_node=2), limit)
    # Ranks wait for each other beyond the time limit of the job.
    launch = replace(launch, instructions=launch.instructions.model_copy(update={"limit": 600.0}))

    def report(message: str) -> None:
        for process in slurm.processes(NODES[1]) if "measuring" in message else ():
            with contextlib.suppress(psutil.Error):
                if WORKER in process.cmdline() and process.environ().get("RANK") == "3":
                    act(process)

    said = watched(launch, tmp_path / "seen", report)[-1]
    assert re.search(fault, said), said


def test_ranks_get_of_the_environment_only_what_they_need(slurm, shared, tmp_path, instead, monkeypatch):
    for name in ("DATABASE_URL", "AWS_SECRET_ACCESS_KEY", "SWITCHYARD_PASSWORD"):
        monkeypatch.setenv(name, "let nobody see this")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0,ib1")
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    instead(f"env > {tmp_path}/$SLURMD_NODENAME; tr '\\0' '\\n' < /proc/$PPID/environ > {tmp_path}/steward; sleep 300")
    handle, _ = submitted(shared)
    until(lambda: all((tmp_path / name).exists() for name in NODES), 15, "job")
    kept = b"".join(path.read_bytes() for path in slurm.folder.rglob("*") if path.is_file())
    assert b"ib0,ib1" in kept and b"let nobody" not in kept  # the job as Slurm keeps it
    for name in NODES:
        lines = (tmp_path / name).read_text().splitlines()
        assert "let nobody" not in str(lines)
        for line in ("NCCL_SOCKET_IFNAME=ib0,ib1", "OMP_NUM_THREADS=2", f"PATH={os.environ['PATH']}"):
            assert line in lines
        assert "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=[rank ${rank}] " in lines
    clusters.cancel(handle)


def test_what_waits_says_why_and_what_is_cancelled_is_cancelled(slurm, shared, instead, engine):
    instead("exec sleep 300")
    first, _ = submitted(shared, cpus_per_node=16)
    in_state(first, "running")
    second, folder = submitted(shared, cpus_per_node=16)
    until(lambda: "(Resources)" in clusters.status(second).text, 15, "reason")
    assert clusters.status(second).text == "pending (Resources)"
    assert f"{second} is pending (Resources)" in engine.refused("collect", folder)
    assert engine.text("cancel", folder) == f"{second} is told to end\n"
    assert in_state(second, "cancelled").over
    assert "cancelled" in engine.refused("collect", folder)
    clusters.cancel(first)
    assert in_state(first, "cancelled").over


def test_a_node_that_dies_is_told(slurm, shared, tmp_path, instead, monkeypatch):
    monkeypatch.setattr(local, "POLL", 0.1)
    instead(f"touch {tmp_path}/$SLURMD_NODENAME; exec sleep 300")

    def act(message: str) -> None:
        if NODES[1] in slurm.daemons and all((tmp_path / name).exists() for name in NODES):
            slurm.kill_node(NODES[1])
            # The controller would see it by itself, some twenty seconds later.
            slurm.say("scontrol", "update", f"nodename={NODES[1]}", "state=down", "reason=dead")

    said = watched(launch_for(place(shared)), tmp_path / "seen", act)
    assert "failed: NODE_FAIL (NodeDown); " in said[-1] and f"Node failure on {NODES[1]}" in said[-1], said


def test_a_controller_that_is_away_is_asked_again(slurm, shared, tmp_path, instead, monkeypatch):
    monkeypatch.setattr(local, "POLL", 0.1)
    instead(f"touch {tmp_path}/begun; until [ -e {tmp_path}/enough ]; do sleep 0.1; done; exit 3")
    away: list[str] = []

    def act(message: str) -> None:
        if "no answer" in message:
            slurm.start_controller()
        elif away and message.endswith("is running"):
            (tmp_path / "enough").touch()
        elif not away and (tmp_path / "begun").exists():
            slurm.stop_controller()
            away.append(message)

    said = watched(launch_for(place(shared, nodes=1)), tmp_path / "seen", act)
    assert any("no answer (Slurm does not answer: Unable to contact" in message for message in said), said
    assert "failed (NonZeroExitCode)" in said[-1] and not any("gone" in message for message in said)


@pytest.mark.parametrize(
    ("asked", "limit", "fault"),
    [
        ({"nodes": 4}, 600, "main has 2 nodes, 2 of them with 2 CPUs and 1 GiB, and the job needs 4"),
        (
            {"nodes": 1, "gpus": 5, "memory_per_node": 2.0**35},
            600,
            "main has 2 nodes, 0 of them with 2 CPUs, 5 GPUs and 32 GiB",
        ),
        ({"partition": "short"}, 600, "short lets a job run for 2 minutes, and this one has a limit of 10"),
        ({"partition": "nowhere"}, 600, "Slurm refused the job: .*[Ii]nvalid partition"),
    ],
)
def test_what_could_never_start_is_refused_and_leaves_nothing(slurm, shared, tmp_path, asked, limit, fault):
    with pytest.raises(InputError, match=fault):
        submitted(shared, limit, **asked)
    assert not list(shared.iterdir()) and not slurm.say("squeue", "-h")


def test_of_several_partitions_one_is_enough(slurm, shared, instead):
    instead("exec sleep 300")
    handle, _ = submitted(shared, partition="short,main", nodes=1)
    clusters.cancel(handle)


def test_two_threads_submit_a_folder_once(slurm, shared, instead):
    instead("exec sleep 300")
    launch = launch_for(place(shared, nodes=1))
    clusters.write(launch, folder := shared / "run")
    ready = threading.Barrier(2)

    def submit(_: int) -> str:
        ready.wait()
        try:
            return clusters.submit(launch, folder)
        except InputError as error:
            return str(error)

    with ThreadPoolExecutor(2) as threads:
        answers = sorted(threads.map(submit, range(2)))
    assert len(slurm.say("squeue", "-h", "-o", "%A").split()) == 1
    assert "submitted" in answers[0] and answers[1].startswith("slurm://"), answers
    with pytest.raises(InputError, match=f"has been submitted as {answers[1]}"):
        clusters.submit(launch, folder)


def test_a_folder_that_nodes_do_not_see_is_named(slurm, shared, tmp_path, instead, monkeypatch):
    monkeypatch.setattr(local, "POLL", 0.1)
    instead("exec sleep 300")
    elsewhere = str(tmp_path / "not there")
    said = watched(launch_for(place(shared, nodes=1, seen_as=elsewhere)), tmp_path / "seen", bool)[-1]
    assert "left no log" in said and f"do not see it as {elsewhere}/run-" in said
