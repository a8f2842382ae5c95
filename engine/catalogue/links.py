"""The links of NVIDIA's and AMD's GPUs and of Ascend NPUs, the names that their makers' tools give them, and a node drawn from
both.

A node has one number for its links. It is the pace of an equal exchange: every GPU sends as much to each other GPU of
the node, and the GPU that ends last counts. Where all pairs are alike this is the plain sum of a GPU's links; where
they differ (NVLink for some pairs and PCIe for others) the slowest path of the slowest GPU bounds it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from engine.cluster import Cluster, Gpu, Node
from engine.errors import InputError
from engine.units import bandwidth, digits

PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 15.75e9 / 16, 4: 31.5e9 / 16, 5: 63e9 / 16, 6: 121e9 / 16}
"""Raw bytes/s of one lane in one direction by generation (PCI Express Base Specification)."""
LANES = 16
FASTEST_PCIE = LANES * PCIE_LANE[6]

NVLINK_LATENCY, PCIE_LATENCY, FABRIC_LATENCY = 5e-6, 10e-6, 10e-6
"""Seconds, assumed until calibrated; those of the catalogue's nodes."""


AMD, ASCEND = "Infinity Fabric link", "HCCS link"


@dataclass(frozen=True)
class Links:
    """The links of GPUs of a type in a node.

    pcie: generation of the GPU's x16 port
    nvlink: bytes/s of one link in one direction
    nvlinks: links of a GPU
    bridge: True if its NVLinks are a bridge of two cards that is sold apart
    name: of the kind of link; AMD's join two GPUs each and know no switch, Ascend's do in A2 machines and have one in A3
    """

    pcie: int
    nvlink: float = 0.0
    nvlinks: int = 0
    bridge: bool = False
    name: Literal["NVLink", "Infinity Fabric link", "HCCS link"] = "NVLink"


LINKS = {
    # Turing whitepaper: two x8 links, 100 GB/s in both directions together
    "RTX 2080 Ti": Links(3, 25e9, 2, bridge=True),
    "V100-16": Links(3, 25e9, 6),  # V100 datasheet, SXM2: NVLink 2, 300 GB/s in both directions together
    "V100-32": Links(3, 25e9, 6),
    "A100-40": Links(4, 25e9, 12),  # A100 datasheet: NVLink 3, 600 GB/s in both directions together
    "A100-80": Links(4, 25e9, 12),
    "L40S": Links(4),  # L40S datasheet: no NVLink
    "H100": Links(5, 25e9, 18),  # H100 datasheet: NVLink 4, 900 GB/s in both directions together
    "MI300X": Links(5, 64e9, 7, name=AMD),  # MI300X datasheet: 7 links, 128 GB/s in both directions together
    "H200": Links(5, 25e9, 18),  # H200 datasheet: as the H100
    "MI325X": Links(5, 64e9, 7, name=AMD),  # MI325X datasheet: as the MI300X
    "B200": Links(5, 50e9, 18),  # HGX B200: NVLink 5, 1.8 TB/s in both directions together
    "MI355X": Links(5, 76.8e9, 7, name=AMD),  # MI355X datasheet: 7 links, 153.6 GB/s in both directions together
    # MindStudio Modeling: 196 GB/s to seven peers and through a switch; PCIe 64 GB/s
    **dict.fromkeys(("Ascend-A2-376", "Ascend-A2-313", "Ascend-A2-280", "Ascend-A3"), Links(5, 28e9, 7, name=ASCEND)),
}
"""The links by GPU type of the catalogue."""

_NAMES = {
    r"GeForce RTX 2080 Ti": "RTX 2080 Ti",
    r"Tesla V100-SXM[23]-16GB": "V100-16",
    r"Tesla V100-SXM[23]-32GB": "V100-32",
    r"A100-SXM4?-40GB": "A100-40",
    r"A100-SXM4?-80GB": "A100-80",
    r"L40S": "L40S",
    r"H100 80GB HBM3": "H100",
    r"H200": "H200",
    r"B200": "B200",
    r"AMD Instinct MI300X(?: OAM)?": "MI300X",
    r"AMD Instinct MI325X(?: OAM)?": "MI325X",
    r"AMD Instinct MI355X(?: OAM)?": "MI355X",
}
"""The whole name that the driver prints, without 'NVIDIA' before it. Other builds of a chip (PCIe, NVL, vGPU) have other
rates and memory, so they are not taken for the catalogue's."""


@dataclass(frozen=True)
class Drawn:
    """A cluster that was read off a machine. notes: assumptions and simplifications, one sentence each"""

    cluster: Cluster
    notes: tuple[str, ...]


def type_of(name: str) -> str | None:
    """The catalogue's type of a GPU by the driver's name for it ('NVIDIA A100-SXM4-80GB'); None if it has none."""
    short = name.strip().removeprefix("NVIDIA ")
    return next((kind for pattern, kind in _NAMES.items() if re.fullmatch(pattern, short)), None)


def link_bandwidth(types: Sequence[str], nvlinks: np.ndarray, pcie: Sequence[float]) -> float:
    """Bytes/s out of every GPU while all exchange equal shares with all, as the module says; for two GPUs or more.

    types: GPU type of each GPU
    nvlinks: int64[gpu, gpu]; links between each pair, 0 where they talk over PCIe. When a GPU's row adds up to more links than
        the GPU has, the same links reach every peer through a switch; otherwise each peer has links of its own
    pcie: bytes/s of each GPU's port, which its PCIe peers share
    """
    count, paces = len(types), []
    for own, row in enumerate(nvlinks):
        peers = [peer for peer in range(count) if peer != own]
        direct = [row[peer] * min(LINKS[types[own]].nvlink, LINKS[types[peer]].nvlink) for peer in peers if row[peer]]
        port = min(direct, default=np.inf)
        if row.sum() > LINKS[types[own]].nvlinks:
            port /= len(direct)
        # Seconds in which one byte has gone to each peer.
        longest = max(1 / port, (len(peers) - len(direct)) / pcie[own])
        paces.append(len(peers) / longest)
    return float(min(paces))


def draw(name: str, gpus: Sequence[Gpu], nvlinks: np.ndarray, pcie: Sequence[float | None] = ()) -> Drawn:
    """One node of these GPUs. Raises InputError when a GPU has more NVLinks to a peer than its type has at all.

    name: of the node and cluster
    gpus: of types of the catalogue
    nvlinks: int64[gpu, gpu]; symmetric, see `link_bandwidth`
    pcie: bytes/s of each GPU's port; None, or empty: 16 lanes of the type's generation
    """
    types = [gpu.type for gpu in gpus]
    for gpu, kind in enumerate(types):
        if LINKS[kind].name != "NVLink" and (peers := int((nvlinks[gpu] == 1).sum())) > LINKS[kind].nvlinks:
            instead = (
                "a GPU in several partitions is listed once for each, so save the text in SPX mode"
                if LINKS[kind].name == AMD
                else "draw the machine on the Cluster page"
            )
            raise InputError(f"GPU{gpu} is linked to {peers} others, but {kind} has {LINKS[kind].nvlinks} links; {instead}")
        if (most := int(nvlinks[gpu].max())) > LINKS[kind].nvlinks:
            fitting = [other for other, links in LINKS.items() if links.name == "NVLink" and links.nvlinks >= most]
            has = f"only {LINKS[kind].nvlinks}" if LINKS[kind].nvlinks else "no"
            raise InputError(
                f"GPU{gpu} is linked by {most} NVLinks, but {kind} has {has} NVLinks; "
                f"types that fit: {', '.join(fitting) or 'none in the catalogue'}"
            )
    port_rates = list(pcie) or [None] * len(gpus)
    ports = [
        PCIE_LANE[LINKS[kind].pcie] * LANES if rate is None else rate for kind, rate in zip(types, port_rates, strict=True)
    ]
    usual = ", ".join(f"{gpu.type} {bandwidth(gpu.send_bandwidth)}" for gpu in dict.fromkeys(gpus))
    notes = [f"the rates of the network ports are not known: GPUs keep the catalogue's ({usual})"]
    rate, latency = None, 0.0
    if len(gpus) > 1:
        rate = link_bandwidth(types, nvlinks, ports)
        kinds = nvlinks[~np.eye(len(gpus), dtype=bool)]
        latency = NVLINK_LATENCY if kinds.all() else PCIE_LATENCY
        notes.insert(0, _about_links(types, nvlinks, kinds, rate, ports))
    notes.append("start-up latencies are assumed until calibrated")
    node = Node(name=name[:60], gpus=tuple(gpus), link_bandwidth=rate, link_latency=latency)
    return Drawn(Cluster(name=name[:80], nodes=(node,), latency=FABRIC_LATENCY), tuple(notes))


def _about_links(types: list[str], nvlinks: np.ndarray, kinds: np.ndarray, rate: float, ports: list[float]) -> str:
    """A sentence on the links of a node.

    kinds: int64[pair]; NVLinks of every ordered pair
    rate: bytes/s; see `link_bandwidth`
    ports: bytes/s of each GPU's PCIe port
    """
    if not kinds.any():
        if len(set(ports)) > 1:
            return f"the GPUs talk over PCIe, {_gigabytes(rate)} raw through the slowest port; through host memory less"
        return f"the GPUs talk over PCIe, {_gigabytes(rate)} raw for each in one direction; through host memory less"
    if len(set(kinds)) == 1 and len(set(types)) == 1:
        switched = nvlinks[0].sum() > LINKS[types[0]].nvlinks
        how = "through a switch" if switched else "directly"
        joined = f"{kinds[0]} {LINKS[types[0]].name}{'s' * bool(kinds[0] > 1)} {how}"
        return f"every pair is joined by {joined}: {_gigabytes(rate)} out of each GPU"
    pairs = ", ".join(
        f"{(kinds == links).sum() // 2} pairs by {f'{links} {LINKS[types[0]].name}' + 's' * (links > 1) if links else 'PCIe'}"
        for links in sorted(set(kinds.tolist()), reverse=True)
    )
    return (
        f"the pairs are joined differently ({pairs}), but a node has one number: {_gigabytes(rate)} is the pace of an "
        "equal exchange of all GPUs, which the slowest path sets; exchanges between well-linked pairs are faster"
    )


def _gigabytes(rate: float) -> str:
    return f"{digits(rate / 1e9)} GB/s"
