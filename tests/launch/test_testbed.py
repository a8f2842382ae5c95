"""The emulated cluster: its links are as slow as asked, a launch on it has the right output, and nothing of it stays."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from engine.catalogue import cluster_presets
from engine.cli import main
from engine.cli.launch import as_text
from engine.costs import CostProfile, Line
from engine.errors import InputError
from engine.jobs.launches import LaunchAnswer
from engine.launch.places import testbed
from engine.launch.places.devices import Devices
from engine.launch.places.testbed import Testbed, emulated, remove_remains
from engine.launch.preparation.launch import Launch
from engine.launch.preparation.prepare import prepare
from engine.launch.results.prediction import predict
from engine.launch.running.local import run_here
from engine.result import never
from engine.systems.base import silent
from tests.cases.jobs import until
from tests.cases.processes import workers_of
from tests.cases.refusals import refusal
from tests.cases.testbeds import (
    LAYERS,
    MBIT,
    MODEL,
    command,
    host_links,
    needs_testbed,
    nothing_left,
    own_namespaces,
    plan_for,
    rate_between,
    recording,
)

pytestmark = pytest.mark.usefixtures("warm_python")
__all__ = ["command", "nothing_left"]  # fixtures
ROOT = Path(__file__).parent.parent.parent
HOST = Devices(gpus=(), memory=(), cores=2, host_memory=8 * 2.0**30)


@needs_testbed
def test_every_link_is_as_fast_as_asked_in_both_directions(cold_python):
    asked = np.array([80, 80, 20]) * MBIT
    with Testbed(asked) as testbed:
        for src, dst in ((0, 1), (0, 2), (2, 1)):
            slower = min(asked[src], asked[dst])
            # Half a second of data; the 2 ms that pass at once after a pause are below one percent of it.
            assert rate_between(testbed, src, dst, slower / 2) == pytest.approx(slower, rel=0.1)


@needs_testbed
def test_namespaces_exist_inside_and_the_host_sees_no_link():
    links = host_links()
    with Testbed(np.full(2, MBIT)) as testbed, Testbed(np.full(1, MBIT)) as other:
        assert host_links() == links
        assert set(own_namespaces()) >= {testbed.namespace(0), testbed.namespace(1), other.namespace(0)}
        assert len(own_namespaces()) == 5  # with the two bridges'
    assert not own_namespaces()


@needs_testbed
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_after_an_error_not_even_a_process_inside(error):
    with pytest.raises(error), Testbed(np.full(2, MBIT)) as testbed:
        inside = subprocess.Popen(testbed.inside(1, ["sleep", "60"]))
        until(lambda: psutil.Process(inside.pid).name() == "sleep", 120)
        raise error
    assert inside.wait(2.0) == -signal.SIGKILL
    assert not own_namespaces()


@needs_testbed
def test_nothing_is_left_when_it_cannot_be_finished(monkeypatch):
    monkeypatch.setattr(testbed, "_shape", lambda *arguments: testbed._ip("no-such-object"))
    with pytest.raises(InputError, match=r"refuse.*no-such-object.*sch_tbf") as caught:
        Testbed(np.full(2, MBIT)).__enter__()
    assert "\n" not in str(caught.value) and not own_namespaces()


WAITING = """
import sys, time
import numpy as np
from engine.launch.places.testbed import Testbed
with Testbed(np.full(2, 1e6)) as testbed:
    print(testbed.namespace(0), flush=True)
    time.sleep(60)
"""


@needs_testbed
def test_what_a_killed_process_left_goes_when_the_next_testbed_starts_and_a_living_ones_stays(cold_python):
    killed, living = (
        subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)
    )
    try:
        for process in (killed, living):
            assert process.stdout.readline()
        killed.kill()
        # Not reaped yet: a process that is dead but still listed owns nothing.
        until(lambda: psutil.Process(killed.pid).status() == psutil.STATUS_ZOMBIE, 120)
        assert len(own_namespaces(killed.pid)) == 3
        with Testbed(np.full(1, MBIT)):
            assert not own_namespaces(killed.pid) and len(own_namespaces(living.pid)) == 3
    finally:
        for process in (killed, living):
            process.kill()
            process.wait()
            process.stdout.close()
    remove_remains()
    assert not own_namespaces(living.pid)


@needs_testbed
def test_a_process_id_used_again_owns_nothing():
    forged = Testbed(np.full(1, MBIT))
    forged._token = f"{testbed.PREFIX}-{os.getpid()}-1-abcdef"  # made by this process id, but long before this process
    forged._build()
    assert len(own_namespaces()) == 2
    remove_remains()
    assert not own_namespaces()


# Refusals, also without root.
def refuse(part: str) -> None:
    message = refusal(Testbed(np.full(2, MBIT)).__enter__)
    assert part in message and "--on local" in message


@pytest.mark.parametrize("there", [(), ("ip",), ("tc",)])
def test_without_its_tools_it_says_which_is_missing(tmp_path, monkeypatch, there):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(testbed, "SYSTEM_FOLDERS", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    for tool in there:
        (tmp_path / tool).touch(0o755)
    missing = [tool for tool in ("ip", "tc") if tool not in there]
    refuse(f"needs {' and '.join(missing)}; install iproute2")


def test_without_root_and_elsewhere_than_on_linux_it_says_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    refuse("needs root")
    monkeypatch.setattr(sys, "platform", "darwin")
    refuse("needs Linux")


@pytest.mark.parametrize("bandwidth", [[], [[1e6]], [1e6, np.nan], [1e6, np.inf], [1e6, 0.0], [1e6, -1.0], [1e6, 100.0]])
def test_bandwidths_that_make_no_sense(bandwidth):
    with pytest.raises(InputError, match="testbed"):
        Testbed(np.array(bandwidth))


def test_drawn_bandwidths_are_folded_and_scaled():
    cluster = cluster_presets()["mixed-8"].cluster
    drawn = np.minimum(cluster.values("send_bandwidth"), cluster.values("receive_bandwidth"))
    plan = plan_for(recording(), "concurrent", 8)
    whole, half = emulated(plan, cluster, 8), emulated(plan, cluster, 4)
    assert whole.bandwidth.max() == pytest.approx(100 * MBIT) == half.bandwidth.max()
    np.testing.assert_allclose(whole.bandwidth * whole.scale, drawn)
    np.testing.assert_allclose(half.bandwidth * half.scale, drawn.reshape(4, 2).sum(axis=1))
    np.testing.assert_allclose(emulated(plan, cluster, 8, 500.0).bandwidth, drawn / 500)
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="scale"):
            emulated(plan, cluster, 8, scale)
    with pytest.raises(InputError, match=r"too slow.*smaller scale"):
        emulated(plan, cluster, 8, 1e9)
    with pytest.raises(InputError, match=r"for 3 GPUs, .* has 8"):
        emulated(plan_for(recording(), "concurrent", 3), cluster, 2)


def test_a_prediction_uses_the_links_and_the_start_up_of_a_phase():
    trace, rate = recording(), np.array([40, 10]) * MBIT
    launch = prepare(Launch((plan_for(trace, "concurrent", 2),), trace, MODEL, ranks=2), HOST)
    launch = replace(launch, instructions=launch.instructions.model_copy(update={"bandwidth": tuple(rate.tolist())}))
    linear_cost = Line(alpha=0, beta=1e-12)
    of_cpu = {key: {"CPU": linear_cost} for key in ("gemm", "gate", "memory")}
    profile = CostProfile(name="p", origin="made up", **of_cpu, network=Line(alpha=7, beta=3))
    for start_up in (0.25, 0.0, -0.1):  # a send may seem faster than its link: a burst passes at once
        measured = {
            "network": [[1e6, 5.0], [2e6, 99.0]],
            "phases": [[size, size / rate[1] + start_up] for size in (1e5, 1e6, 2e6)],
            "meetings": [[0, 0.0], [1, 0.0]],
        }
        events = predict(launch, launch.instructions.plans[0], profile, measured).events
        sends = events[events["stream"] == "network"]
        assert len(sends) == 4 * LAYERS
        expected = max(start_up, 0.0) + sends["bytes"] / rate[1]  # both ways are as fast as the slower end
        np.testing.assert_allclose(sends["end"] - sends["start"], expected, rtol=1e-9)


# Launches.
@needs_testbed
def test_a_launch_computes_what_one_process_computes_and_its_network_is_the_shaped_one(tmp_path):
    trace = recording()
    rate = np.array([40, 40, 10]) * MBIT
    launch = prepare(Launch((plan_for(trace, "matched"),), trace, MODEL, ranks=3, repeats=1), HOST)
    whole = run_here(launch.on_testbed(Testbed(rate)), tmp_path / "run", never, silent)
    (run,) = whole.runs
    assert 0 <= run.difference.error <= 1e-5 and whole.tokens == trace.tokens
    for timeline in (run.predicted, run.measured):
        events = timeline.events
        for (_, kind), sends in events[events["stream"] == "network"].groupby(["layer", "kind"], observed=True):
            moved = np.bincount(sends["resource"], sends["bytes"], 3) / rate
            moved = max(moved.max(), (np.bincount(sends["peer"], sends["bytes"], 3) / rate).max())
            # Bursts that pass at once are few bytes compared with those of the ranks.
            assert kind in ("dispatch", "combine") and sends["end"].max() - sends["start"].min() > 0.8 * moved > 0.005
    assert run.predicted.resources == run.measured.resources == ("rank 0", "rank 1", "rank 2")


@needs_testbed
def test_the_command_line_tells_the_scale_and_the_links(command, capsys):
    assert main([*command, "--on=testbed", "--repeats=1", "--json"]) == 0
    out, errors = capsys.readouterr()
    answer = json.loads(out)
    assert answer["testbed"]["scale"] == pytest.approx(4000) and answer["runs"][0]["difference"] < 1e-5
    assert answer["testbed"]["bandwidth"] == pytest.approx([100 * MBIT, 50 * MBIT])
    links = "links of the testbed of drawn: 100, 50 Mbit/s each way, the drawn bandwidths / 4,000"
    assert links in as_text(LaunchAnswer(**answer))
    assert "netns exec switchyard-" in errors and "Warning" not in errors


@pytest.fixture
def engine(command) -> Iterator[subprocess.Popen]:
    """The command line with a launch on a testbed that would take minutes."""
    words = [sys.executable, "-m", "engine", *command, "--on=testbed", "--repeats=100"]
    talk = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=ROOT, start_new_session=True, **talk) as engine:
        yield engine
        engine.kill()


def ranks_in(data: Path) -> list[psutil.Process]:
    return [process for folder in data.glob("run-*") for process in workers_of(folder)]


@needs_testbed
def test_ctrl_c_leaves_no_rank_and_no_namespace(engine, own_data_folder, cold_python):
    until(lambda: len(ranks_in(own_data_folder)) == 2, 60)
    os.killpg(engine.pid, signal.SIGINT)  # as a terminal does
    errors = engine.communicate(timeout=20)[1]
    assert engine.returncode == 2 and errors.splitlines()[-1] == "error: the launch was ended: stopped"
    assert "Traceback" not in errors and not own_namespaces(engine.pid) and not list(own_data_folder.glob("run-*"))


@needs_testbed
def test_ranks_do_not_outlive_a_killed_launch_and_the_next_testbed_cleans_up(engine, own_data_folder, cold_python):
    until(lambda: len(ranks_in(own_data_folder)) == 2, 120)
    ranks_in(own_data_folder)[0].suspend()  # one that cannot notice anything
    assert len(own_namespaces(engine.pid)) == 3
    engine.kill()
    engine.wait()
    until(lambda: not ranks_in(own_data_folder), 3.0)
    remove_remains()
    assert not own_namespaces(engine.pid)
