"""The emulated cluster: its links, also those inside nodes, are as slow as asked, a launch on it has the right output and
relays over them, and nothing of it stays."""

import json
import os
import re
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
from engine.cli import STOPPED, main
from engine.cli.launch import as_text
from engine.costs import CostProfile, Line
from engine.jobs.launches import LaunchAnswer
from engine.launch.places import testbed
from engine.launch.places.devices import Devices
from engine.launch.places.testbed import FASTEST_LINK, Testbed, emulated, emulated_cluster, remove_remains
from engine.launch.preparation.launch import Launch
from engine.launch.preparation.prepare import prepare
from engine.launch.rank.links import links_of
from engine.launch.results.prediction import predict
from engine.launch.running.local import run_here
from engine.result import never
from engine.runtime.exchange.links import Tiers
from engine.systems.base import silent
from tests.cases import launches, testbeds
from tests.cases.jobs import until
from tests.cases.processes import workers_of
from tests.cases.refusals import refusal
from tests.cases.testbeds import MBIT, MODEL, command, needs_testbed, nothing_left, own_namespaces, plan_for, recording
from tests.cases.two_nodes import CONCURRENT, TIERED, TWO_NODES, cluster_of, hold_bytes, prepared, travelling
from tests.cases.two_nodes import prepare as prepare_tiered

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
            assert testbeds.rate_between(testbed, src, dst, slower / 2) == pytest.approx(slower, rel=0.1)


@needs_testbed
def test_namespaces_exist_inside_and_the_host_sees_no_link():
    links = testbeds.host_links()
    with Testbed(np.full(2, MBIT)) as testbed, Testbed(np.full(1, MBIT)) as other:
        assert testbeds.host_links() == links
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
    assert re.search("refuse.*no-such-object.*sch_htb", refusal(Testbed(np.full(2, MBIT)).__enter__)) and not own_namespaces()


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


def test_bandwidths_that_make_no_sense():
    for bandwidth in ([], [[1e6]], *([1e6, other] for other in (np.nan, np.inf, 0.0, -1.0, 100.0))):
        assert "testbed" in refusal(Testbed, np.array(bandwidth))


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
        assert "scale" in refusal(emulated, plan, cluster, 8, scale)
    assert re.search("too slow.*smaller scale", refusal(emulated, plan, cluster, 8, 1e9))
    assert re.search("for 3 GPUs, .* has 8", refusal(emulated, plan_for(recording(), "concurrent", 3), cluster, 2))


def test_a_prediction_uses_the_links_and_the_start_up_of_a_phase():
    trace, rate = recording(), np.array([40, 10]) * MBIT
    launch = prepare(Launch((plan_for(trace, "concurrent", 2),), trace, MODEL, ranks=2), HOST)
    launch = replace(launch, instructions=launch.instructions.model_copy(update={"bandwidth": tuple(rate.tolist())}))
    of_cpu = {key: {"CPU": Line(alpha=0, beta=1e-12)} for key in ("gemm", "gate", "memory")}
    profile = CostProfile(name="p", origin="made up", **of_cpu, network=Line(alpha=7, beta=3))
    for start_up in (0.25, 0.0, -0.1):  # a send may seem faster than its link: a burst passes at once
        measured = {"network": [[1e6, 5.0], [2e6, 99.0]], "meetings": [[0, 0.0], [1, 0.0]]}
        measured["phases"] = [[size, size / rate[1] + start_up] for size in (1e5, 1e6, 2e6)]
        events = predict(launch, launch.instructions.plans[0], profile, measured).events
        sends = events[events["stream"] == "network"]
        assert len(sends) == 4 * testbeds.LAYERS
        expected = max(start_up, 0.0) + sends["bytes"] / rate[1]  # both ways are as fast as the slower end
        np.testing.assert_allclose(sends["end"] - sends["start"], expected, rtol=1e-9)


# Launches.


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
def engine(command, cold_python) -> Iterator[subprocess.Popen]:
    """The command line with a launch on a testbed that would take minutes."""
    words = [sys.executable, "-m", "engine", *command, "--on=testbed", "--repeats=100"]
    talk = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=ROOT, start_new_session=True, **talk) as engine:
        yield engine
        engine.kill()


def ranks_in(data: Path) -> list[psutil.Process]:
    return [process for folder in data.glob("run-*") for process in workers_of(folder)]


@needs_testbed
def test_ctrl_c_leaves_no_rank_and_no_namespace(engine, own_data_folder):
    until(lambda: len(ranks_in(own_data_folder)) == 2, 60)
    os.killpg(engine.pid, signal.SIGINT)  # as a terminal does
    errors = engine.communicate(timeout=20)[1]
    assert engine.returncode == STOPPED and errors.splitlines()[-1] == "error: the launch was ended: stopped"
    assert "Traceback" not in errors and not own_namespaces(engine.pid) and not list(own_data_folder.glob("run-*"))


@needs_testbed
def test_ranks_do_not_outlive_a_killed_launch_and_the_next_testbed_cleans_up(engine, own_data_folder):
    until(lambda: len(ranks_in(own_data_folder)) == 2, 120)
    ranks_in(own_data_folder)[0].suspend()  # one that cannot notice anything
    assert len(own_namespaces(engine.pid)) == 3
    engine.kill()
    engine.wait()
    until(lambda: not ranks_in(own_data_folder), 3.0)
    remove_remains()
    assert not own_namespaces(engine.pid)


# Nodes with links of their own.
def linked(port: float, link: float, node: tuple[int, ...] = (0, 0, 1, 1)) -> Testbed:
    """Ranks of these nodes with links and ports of so many Mbit/s."""
    ports = np.full(len(node), port * MBIT)
    return Testbed(ports, tiers=Tiers(node=node, port=tuple(ports), link=(link * MBIT,) * len(node)))


def test_drawn_links_are_folded_scaled_and_bearable():
    drawn = emulated_cluster(cluster_of((4, 20e9), (2, 10e9), port=10e9), 6)
    assert drawn.scale == pytest.approx(800) and drawn.bandwidth.tolist() == pytest.approx([100 * MBIT] * 6)
    assert drawn.near.tolist() == pytest.approx([200 * MBIT] * 4 + [100 * MBIT] * 2)
    folded = emulated_cluster(cluster_of((4, 20e9), (2, 10e9), port=10e9), 3)
    assert folded.near.tolist() == pytest.approx([200 * MBIT] * 2 + [0]), "the third rank is alone in its node"
    assert [folded.mates(rank) for rank in range(3)] == [[1], [0], []]
    h100 = emulated_cluster(cluster_presets()["hgx-h100-4-nodes"].cluster, 32)
    assert set(h100.near) == {FASTEST_LINK} and h100.to_dict()["near"] == [FASTEST_LINK] * 32
    slower = emulated_cluster(cluster_presets()["hgx-h100-4-nodes"].cluster, 32, 9000)
    assert slower.near / slower.bandwidth == pytest.approx(9)


def test_ranks_of_two_nodes_have_no_links():
    testbed = emulated_cluster(cluster_of((1, None), (3, 8e9)), 2)
    assert testbed.tiers is None and not testbed.near.any() and "near" not in testbed.to_dict()
    put_on = prepare_tiered().on_testbed
    assert "has no nodes, in which the ranks of two-tier relay" in refusal(put_on, Testbed(np.full(4, MBIT)))
    assert re.search("links for 3 ranks .* 4 ranks", refusal(put_on, Testbed(np.full(3, MBIT))))
    assert "too slow" in refusal(linked, 1, 1e-3)


@needs_testbed
def test_links_are_as_fast_as_asked_and_ports_stay_as_slow(cold_python):
    with linked(20, 160) as testbed:
        for src, dst, asked in ((0, 1, 160 * MBIT), (3, 2, 160 * MBIT), (0, 2, 20 * MBIT), (3, 1, 20 * MBIT)):
            assert testbeds.rate_between(testbed, src, dst, asked / 2) == pytest.approx(asked, rel=0.1)


def test_a_prediction_knows_the_links_of_a_testbed():
    launch = prepare_tiered().on_testbed(linked(20, 160))
    measured = {"network": [[1.0, 1.0]], "phases": [[1e6, 1e6 / (20 * MBIT) + 0.25]]}
    network = links_of(launch.instructions, measured).network
    assert network.domain.tolist() == [0, 0, 2, 2] and network.link.tolist() == [160 * MBIT] * 4
    assert network.start_up(np.array([0, 0]), np.array([1, 2])).tolist() == pytest.approx([0.25, 0.25])
    # A node alone is as slow as its links.
    launch = prepare_tiered(cluster=cluster_of((4, 8e9)), plan=CONCURRENT).on_testbed(linked(20, 160, (0, 0, 0, 0)))
    measured = {"network": [[1.0, 1.0]], "phases": [[1e6, 1e6 / (160 * MBIT) + 0.25]]}
    assert links_of(launch.instructions, measured).start_up == pytest.approx(0.25)


def test_links_that_are_too_fast_to_be_seen_are_given_no_rate():
    sizes = (1e3, 1e5, 1e6)
    measured = {"network": [[size, 1e-3] for size in sizes], "phases": [[1e6, 1e-3]]}
    links = links_of(prepare_tiered().instructions, measured)
    assert "Mbit/s" not in links.text and "too high to be seen" in links.text
    assert links.start_up == pytest.approx(1e-3, rel=1e-3)
    measured["network"] = [[size, 1e-3 + size / 1e9] for size in sizes]
    assert links_of(prepare_tiered().instructions, measured).text.startswith("links of 8,000 Mbit/s, a latency of")


@needs_testbed
def test_relayed_rows_go_over_links(tmp_path):
    launch = prepare_tiered(repeats=1, others=(CONCURRENT,))
    launch = launch.on_testbed(linked(10, 160))
    whole = run_here(launch, tmp_path / "run", never, silent)
    network = launch.instructions.tiers.network
    for run in whole.runs:
        assert 0 <= run.difference.error <= 1e-5
        for timeline in (run.predicted, run.measured):
            for layer in range(launches.LAYERS):
                sends = launches.of(timeline, "dispatch", layer)
                out, into = network.ports(sends["resource"].to_numpy(), sends["peer"].to_numpy())
                moved = np.bincount(out, sends["bytes"], 16) + np.bincount(into, sends["bytes"], 16)
                needed = (moved / network.capacity).max()
                # Bursts that pass at once are few bytes compared with those of the ranks.
                assert sends["end"].max() - sends["start"].min() > 0.8 * needed > 0.005
    assert "(inside nodes 160 Mbit/s)" in whole.runs[0].predicted.cost_source
    assert TIERED.send_order.mode == launch.instructions.plans[0].send_order.mode == "two-tier"


# Tokens that spread inside nodes.
PORT, LINK = 10 * MBIT, 40 * MBIT
LAUNCHES = 3
"""The most tries."""


@needs_testbed
def test_a_row_a_node_takes_as_long_as_predicted(tmp_path):
    """A machine with other work makes passes longer, and then the next launch may fare better."""
    trace, model = launches.recording(900), launches.MODEL.model_copy(update={"d_model": 512})
    concurrent = launches.plan_for(trace, "concurrent", launches.UNEVEN, model)
    plans = [travelling(concurrent, "node"), travelling(concurrent, "node", "fp8", "bf16")]
    launch = prepared(*plans, trace=trace, model=model, repeats=3)
    tiers = Tiers(node=(0, 0, 1, 1), port=(PORT,) * 4, link=(LINK,) * 4)
    launch = launch.on_testbed(Testbed(np.full(4, PORT), tiers=tiers))
    seen = []
    while len(seen) < LAUNCHES and not (seen and abs(np.log(seen[-1])).max() <= np.log(1.15)):
        runs = run_here(launch, tmp_path / f"run {len(seen)}", never, silent).runs
        hold_bytes(launch, runs, TWO_NODES)
        assert all(run.difference.share <= 1 for run in runs)
        seen.append([min(run.totals) / run.predicted.total for run in runs])
    assert abs(np.log(seen[-1])).max() <= np.log(1.15), seen
    in_fp32, in_8_bits = (run.predicted.total for run in runs)
    assert in_8_bits < 0.6 * in_fp32
    for layer in range(launches.LAYERS):
        sends = launches.of(runs[0].measured, "dispatch", layer)
        steps = sends.groupby(sends["resource"] // 2 == sends["peer"] // 2)
        assert steps["start"].max()[True] > steps["end"].min()[False], "what is spread has entered before"
        assert steps["start"].min()[True] < steps["end"].max()[False], "while others enter"
