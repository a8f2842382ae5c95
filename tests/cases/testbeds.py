"""The emulated cluster in tests: skipped without root, and nothing of it may stay."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.catalogue import cluster_presets
from engine.cluster import Cluster, Node
from engine.communication.order import order
from engine.errors import InputError
from engine.launch.places.testbed import Testbed
from engine.model import MoEModel
from engine.plan import Plan, SendOrder
from engine.workload import RoutingTrace
from tests.cases.examples import EVERYTHING
from tests.cases.launch_plans import blocks, plan_with

MBIT = 1e6 / 8
LAYERS, EXPERTS, K = 2, 6, 2
MODEL = MoEModel(name="tiny", layers=LAYERS, experts=EXPERTS, experts_per_token=K, d_model=64, d_ff=64)


def why_not() -> str:
    """Why no testbed can be built on this machine; empty when one can."""
    try:
        with Testbed(np.array([MBIT])):
            return ""
    except InputError as error:
        return str(error)


REFUSED = why_not() if EVERYTHING in os.environ else "only `make everything` builds testbeds"


def needs_testbed(test: Callable) -> Callable:
    """Mark a test that builds a testbed: for root, and for `make everything`."""
    return pytest.mark.everything(pytest.mark.skipif(bool(REFUSED), reason=REFUSED)(test))


def own_namespaces(process: int | None = None) -> list[str]:
    """The namespaces of testbeds of a process, by default this one."""
    folder = Path("/run/netns")
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    return [name for name in names if name.startswith(f"switchyard-{process or os.getpid()}-")]


def host_links() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a namespace of its own or a link of the host behind."""
    before = host_links()
    yield
    assert host_links() == before and not own_namespaces()


RECEIVE = """
import socket, time
server = socket.create_server(("", 5001))
server.settimeout(10)
print("ready", flush=True)
stream, begin, total = server.accept()[0], time.monotonic(), 0
while part := stream.recv(65536):
    total += len(part)
print(total / (time.monotonic() - begin))
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5001)) as stream:
    stream.sendall(bytes(int(sys.argv[2])))
"""


def rate_between(testbed: Testbed, src: int, dst: int, size: float) -> float:
    """Bytes/s of one TCP stream of `size` bytes."""
    with subprocess.Popen(testbed.inside(dst, [sys.executable, "-c", RECEIVE]), stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout.readline() == "ready\n"
        subprocess.run(testbed.inside(src, [sys.executable, "-c", SEND, testbed.address(dst), str(int(size))]), check=True)
        return float(receiver.stdout.read())


def plan_for(trace: RoutingTrace, mode: str, gpus: int = 3) -> Plan:
    """A plan in an order for the traffic of a recording."""
    where = blocks(MODEL, gpus)
    traffic = trace.demand(gpus) @ where.share * MODEL.model_copy(update={"dtype": "fp32"}).bytes_per_token
    rate = np.ones(gpus)
    schedules = [] if mode == "concurrent" else [[order(m, rate, rate, mode).solution for m in (t, t.T)] for t in traffic]
    send_order = SendOrder(mode=mode, dispatch=[out for out, _ in schedules], combine=[back for _, back in schedules])
    return plan_with(where, name=mode, send_order=send_order)


def recording(tokens: int = 240) -> RoutingTrace:
    """Skewed routing for `MODEL`."""
    rng = np.random.default_rng(3)
    keys = rng.random((tokens, LAYERS, EXPERTS)) ** (1 / np.arange(1, EXPERTS + 1))
    return RoutingTrace("made up", np.argsort(-keys, axis=-1)[:, :, :K].astype(np.int16), EXPERTS)


def cluster_of(*bandwidth: float) -> Cluster:
    """One node a GPU; bytes/s each way."""
    like = cluster_presets()["mixed-8"].cluster.gpus[0]
    gpus = [like.model_copy(update={"send_bandwidth": rate, "receive_bandwidth": rate}) for rate in bandwidth]
    return Cluster(name="drawn", nodes=tuple(Node(name=f"n{at}", gpus=(gpu,)) for at, gpu in enumerate(gpus)))


@pytest.fixture
def command(tmp_path) -> list[str]:
    """`launch` of a plan for two GPUs, one half as fast as the other."""
    trace = recording()
    np.savez(tmp_path / "trace.npz", experts=trace.experts)
    (tmp_path / "model.json").write_text(MODEL.to_json())
    (tmp_path / "cluster.json").write_text(cluster_of(50e9, 25e9).to_json())
    (tmp_path / "plan.json").write_text(plan_for(trace, "concurrent", 2).to_json())
    files = [f"--{what}={tmp_path / what}.json" for what in ("cluster", "model")]
    return ["launch", str(tmp_path / "plan.json"), *files, f"--workload={tmp_path / 'trace.npz'}", "--ranks=2"]
