"""The drawn cluster, emulated on one Linux machine: a network namespace per rank, joined by a bridge, every link shaped
in both directions; ranks of a node with links of its own reach each other over a second one. It gives a measured
all-to-all before there is a cluster.

Everything lives in namespaces of its own (also the bridge), so that nothing of the machine's network is touched. The
names of the namespaces tell the process that made them: the remains of a killed process are removed by the next testbed.
"""

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from engine.cluster import Cluster
from engine.errors import InputError
from engine.launch.places.fold import fold_tiers, rank_of_gpu
from engine.plan import Plan
from engine.runtime.exchange.links import Tiers

FASTEST = 100e6 / 8
"""Bytes/s of the fastest port unless a scale is given: a rate that two cores can carry for eight ranks."""

FASTEST_LINK = 4 * FASTEST
"""Most bytes/s of a link inside a node, whatever the scale: the more there are, the less two cores can keep up with."""

SLOWEST = 10e3
"""Bytes/s below which a launch would spend its time on handshakes."""

PREFIX, LINK, NEAR, PORT = "switchyard", "link0", "link1", 29500
NAME = re.compile(rf"{PREFIX}-\d+-\d+-[0-9a-f]{{6}}-(\d+|switch)")
"""Name of a namespace: process id and start of its maker, a token of the testbed, and the rank."""

SUBNET, FIRST_ADDRESS = "10.77.0.0/16", IPv4Address("10.77.0.1")
FRAME, PAYLOAD = 1514, 1448
"""Bytes of an Ethernet frame, and of the TCP data in it. htb counts frames, but a bandwidth here is of data."""

IN_FLIGHT, HANDED_OVER = 0.004, 0.01
"""Most seconds of the fastest link's data that a connection has in flight, and that the kernel takes from its sender
(counted with its own book-keeping). The buffers of a real cluster are as small relative to its sends; with the kernel's
own choice, all later data would queue up behind a send for tenths of a second."""

SYSTEM_FOLDERS = "/usr/sbin:/sbin"
"""Folders of `ip` and `tc` if they are not in the PATH of a user."""


def emulated(plan: Plan, cluster: Cluster, ranks: int, scale: float | None = None) -> "Testbed":
    """The cluster of a plan, drawn for its GPUs, as a testbed of `ranks` ranks; see `emulated_cluster`. Raises
    InputError if the cluster is not the plan's or the scale makes no sense."""
    if len(cluster.gpus) != plan.placement.gpus:
        raise InputError(f"the plan {plan.name} is for {plan.placement.gpus} GPUs, {cluster.name} has {len(cluster.gpus)}")
    return emulated_cluster(cluster, ranks, scale)


def emulated_cluster(cluster: Cluster, ranks: int, scale: float | None = None) -> "Testbed":
    """A drawn cluster as a testbed of `ranks` ranks, as many as it has GPUs or fewer. Raises InputError if the scale
    makes no sense.

    A rank that stands for several GPUs has their ports together, and their links. A port that sends and receives at
    different rates counts with the slower one. If a rank would stand for GPUs of several nodes, no links are emulated
    and all ranks meet on the fabric. Links inside nodes are never faster than `FASTEST_LINK`.

    scale: drawn / emulated bandwidth; None for the one that brings the fastest port to `FASTEST`
    """
    drawn = np.minimum(cluster.values("send_bandwidth"), cluster.values("receive_bandwidth"))
    folded = np.bincount(rank_of_gpu(len(drawn), ranks), drawn, ranks)
    scale = float(folded.max()) / FASTEST if scale is None else scale
    if not 0 < scale < np.inf:  # a NaN compares false
        raise InputError(f"the scale must be a number above 0, not {scale:g}")
    if (tiers := fold_tiers(cluster, ranks)) is not None:
        rates = {"port": tuple((folded / scale).tolist())}
        rates["link"] = tuple(min(rate / scale, FASTEST_LINK) for rate in tiers.link)
        tiers = tiers.model_copy(update=rates)
    return Testbed(folded / scale, f"the testbed of {cluster.name}", scale, tiers)


class Testbed:
    """A context manager: inside it the namespaces exist, after it they do not, however it is left. No latency is added
    to that of the kernel and Gloo, which is measured at the start of a launch. Raises InputError if the machine cannot
    do it, naming the missing part.

    bandwidth: float64[rank] bytes/s of TCP data, in each direction
    name: its name in messages
    scale: drawn / emulated bandwidth, for reports
    tiers: the nodes of the ranks and their links, if they have any
    """

    __test__ = False  # a class called Test… is not a test for pytest

    def __init__(
        self, bandwidth: np.ndarray, name: str = "the testbed", scale: float = 1.0, tiers: Tiers | None = None
    ) -> None:
        self.bandwidth = np.asarray(bandwidth, dtype=np.float64)
        self.name, self.scale, self.tiers = name, scale, tiers
        if self.bandwidth.ndim != 1 or not 1 <= len(self.bandwidth) <= 1024:
            raise InputError(f"{name}: 1 to 1024 ranks need one bandwidth each")
        rates = np.append(self.bandwidth, self.near[self.near > 0])
        if not np.isfinite(rates).all() or rates.min() < SLOWEST:
            raise InputError(
                f"{name}: a link of {rates.min() / 1e3:.3g} kB/s is too slow to run anything on (the least is "
                f"{SLOWEST / 1e3:g} kB/s); use a smaller scale"
            )
        self._token = f"{PREFIX}-{os.getpid()}-{_start_of(os.getpid())}-{secrets.token_hex(3)}"

    @property
    def ranks(self) -> int:
        return len(self.bandwidth)

    @property
    def near(self) -> np.ndarray:
        """float64[rank] bytes/s to the other ranks of the node in each direction, 0 if they meet on the fabric."""
        return np.zeros(self.ranks) if self.tiers is None else np.array(self.tiers.link)

    def mates(self, rank: int) -> list[int]:
        """The other ranks that a rank reaches over links."""
        if not self.near[rank]:
            return []
        node = self.tiers.node
        return [mate for mate in range(self.ranks) if mate != rank and node[mate] == node[rank]]

    def namespace(self, rank: int) -> str:
        """The name of a rank's network namespace."""
        return f"{self._token}-{rank}"

    def address(self, rank: int) -> str:
        """The address at which the others reach a rank."""
        return str(FIRST_ADDRESS + rank)

    def inside(self, rank: int, command: list[str]) -> list[str]:
        """The command as run in a rank's namespace."""
        return [_tools()["ip"], "netns", "exec", self.namespace(rank), *command]

    def __enter__(self) -> "Testbed":
        _tools()
        remove_remains()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *error) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in namespaces():
            if name.startswith(f"{self._token}-"):
                _remove_namespace(name)

    def _build(self) -> None:
        _ip("netns", "add", f"{self._token}-switch")
        self._add_bridge("bridge")
        for node in sorted({self.tiers.node[rank] for rank in range(self.ranks) if self.mates(rank)}):
            self._add_bridge(f"node{node}")
        for rank, rate in enumerate(self.bandwidth):
            own = self.namespace(rank)
            _ip("netns", "add", own)
            _ip("-n", own, "link", "set", "lo", "addrgenmode", "none", "up")
            self._connect(rank, LINK, f"port{rank}", "bridge", rate)
            _ip("-n", own, "addr", "add", f"{self.address(rank)}/16", "dev", LINK)
            self._route(rank, SUBNET, LINK, float(self.bandwidth.max()))
            if mates := self.mates(rank):
                self._connect(rank, NEAR, f"near{rank}", f"node{self.tiers.node[rank]}", self.near[rank])
            for mate in mates:
                self._route(rank, f"{self.address(mate)}/32", NEAR, float(self.near.max()))
            buffer = max(2**15, round(float(self.bandwidth.max()) * HANDED_OVER))
            _ip("netns", "exec", own, "tee", "/proc/sys/net/ipv4/tcp_wmem", standard_input=f"4096 16384 {buffer}")

    def _add_bridge(self, name: str) -> None:
        switch = f"{self._token}-switch"
        _ip("-n", switch, "link", "add", name, "type", "bridge")
        _ip("-n", switch, "link", "set", name, "addrgenmode", "none", "up")

    def _connect(self, rank: int, link: str, port: str, bridge: str, rate: float) -> None:
        """A link from a rank's namespace to a bridge, shaped at both ends."""
        own, switch = self.namespace(rank), f"{self._token}-switch"
        _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", link, "netns", own)
        _shape(own, link, rate)
        _shape(switch, port, rate)
        _ip("-n", switch, "link", "set", port, "master", bridge)
        # Without IPv6, so that Gloo finds one address on the link.
        _ip("-n", switch, "link", "set", port, "addrgenmode", "none", "up")
        # htb would let the kernel's bundles of frames, of all that is in flight, pass at once.
        most = str(_burst(rate) // FRAME)
        _ip("-n", own, "link", "set", link, "gso_max_segs", most, "addrgenmode", "none", "up")

    def _route(self, rank: int, to: str, link: str, fastest: float) -> None:
        """Send packets for these addresses by a link. TCP's data in flight is kept short and the same on every machine,
        whatever the machine's own settings are. Reno, because every kernel has it; without losses, it only differs from
        others in that it does not pace. fastest: bytes/s of links of this kind."""
        window, place = str(max(8, round(fastest * IN_FLIGHT / PAYLOAD))), ("-n", self.namespace(rank))
        source = ("proto", "kernel", "scope", "link", "src", self.address(rank))
        lasting = ("initcwnd", window, "cwnd", "lock", window, "congctl", "lock", "reno")
        _ip(*place, "route", "replace", to, "dev", link, *source, *lasting)

    def environment(self, rank: int) -> dict[str, str]:
        """The environment variables of a rank in place of torchrun's."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": LINK,
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # else every rank warns that the others' addresses have no host names
        }

    def to_dict(self) -> dict[str, Any]:
        """The testbed in a report of a run."""
        report = {"name": self.name, "scale": self.scale, "bandwidth": self.bandwidth.tolist()}
        return report | ({"near": self.near.tolist()} if self.near.any() else {})


def remove_remains() -> None:
    """Remove the testbeds of processes that are gone. A process id that has been used again is recognised by the start
    of its process."""
    for name in namespaces():
        pid, started = name.split("-")[1:3]
        if _start_of(int(pid)) != int(started):
            _remove_namespace(name)


def namespaces() -> list[str]:
    """The network namespaces of testbeds on this machine, of any maker."""
    names = [line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip()]
    return [name for name in names if NAME.fullmatch(name)]


def _remove_namespace(name: str) -> None:
    """End all processes in the namespace and remove it: with its last process, the kernel drops its links and rules."""
    try:
        for pid in _ip("netns", "pids", name).split():
            with contextlib.suppress(psutil.Error):  # has ended by itself
                psutil.Process(int(pid)).kill()
        _ip("netns", "del", name)
    except InputError:
        if name in namespaces():  # otherwise another testbed that was starting has removed it
            raise


def _shape(namespace: str, link: str, rate: float) -> None:
    """Let traffic leave by `link` at `rate` bytes/s of data and not faster. Acknowledgements, IP packets of TCP below 64 bytes,
    pass at once: behind the data of others they would come late, and with so little in flight a rank that receives from two
    would send at half its rate. On the networks of GPUs they wait for no data.

    limit: a queue of half a second, and not less than a window of data from each of some peers, so that TCP loses next
        to nothing, as on a lossless fabric
    """
    with_frames, burst = rate * FRAME / PAYLOAD, f"{_burst(rate)}b"
    bits, limit = f"{round(with_frames * 8)}bit", f"{max(round(with_frames * 0.5), 2**20)}b"
    for kind, words in (
        ("qdisc", "root handle 1: htb default 1"),
        ("class", f"parent 1: classid 1:1 htb rate {bits} burst {burst} cburst {burst} quantum {FRAME}"),
        ("qdisc", f"parent 1:1 bfifo limit {limit}"),
        # Of TCP; the packet's length is at byte 2.
        ("filter", "parent 1: protocol ip u32 match ip protocol 6 0xff match u16 0 0xffc0 at 2 flowid 1:0"),
    ):
        _command("tc", "-n", namespace, kind, "add", "dev", link, *words.split())


def _burst(rate: float) -> int:
    """Bytes that pass at once after a pause: two milliseconds' worth, and at least two frames."""
    return max(round(rate * FRAME / PAYLOAD * 0.002), 2 * FRAME)


def _tools() -> dict[str, str]:
    """The paths of `ip` and `tc`. Raises InputError if the testbed cannot work here, naming the missing part."""
    advice = "or launch with --on local"
    if not sys.platform.startswith("linux"):
        raise InputError(f"the testbed needs Linux with network namespaces; use a Linux machine, {advice}")
    if os.geteuid() != 0:
        raise InputError(f"the testbed needs root, to make network namespaces; start it as root, {advice}")
    folders = os.pathsep.join((os.environ.get("PATH", ""), SYSTEM_FOLDERS))
    paths = {tool: shutil.which(tool, path=folders) for tool in ("ip", "tc")}
    if missing := [tool for tool, path in paths.items() if path is None]:
        raise InputError(f"the testbed needs {' and '.join(missing)}; install iproute2, {advice}")
    return paths


def _ip(*arguments: str, standard_input: str = "") -> str:
    return _command("ip", *arguments, standard_input=standard_input)


def _command(tool: str, *arguments: str, standard_input: str = "") -> str:
    """Run the tool and return its output. Raises InputError if it fails. In a session of its own: a Ctrl-C is for
    Switchyard, which then cleans up with this very tool."""
    finished = subprocess.run(
        [_tools()[tool], *arguments], input=standard_input, capture_output=True, text=True, start_new_session=True, check=False
    )
    if finished.returncode:
        message = " ".join(finished.stderr.split()) or f"exit code {finished.returncode}"
        raise InputError(
            f"the kernel or its tools refuse the testbed: '{tool} {' '.join(arguments)}' says: {message}; it needs root with "
            "CAP_NET_ADMIN and CAP_SYS_ADMIN, and the modules veth, bridge, sch_htb and cls_u32"
        )
    return finished.stdout


def _start_of(pid: int) -> int | None:
    """Start of a process, in clock ticks since boot; None if there is no such process or it is dead."""
    try:
        # The command's name, in parentheses, may hold anything; state and the rest follow it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
