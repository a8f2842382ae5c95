"""Output of `nvidia-smi topo -m` on machines of several kinds, and other texts."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.catalogue import gpu_types, node_types
from engine.catalogue.links import LANES, LINKS, PCIE_LANE, link_bandwidth, type_of
from engine.formats import identify
from engine.formats.nvidia_topo import parse_topology, read_topology
from tests.cases.files import BRIDGED, CUBE_MESH, everywhere, printed, rocm_tables, saver
from tests.cases.files import refused as refused_by

saved = saver("dgx.txt")
refused = partial(refused_by, read=read_topology, types="A100-80")


@pytest.mark.parametrize(
    ("rows", "kind", "gigabytes"),
    [
        (everywhere("NV12", 8), "A100-80", 300),  # DGX A100: through NVSwitch
        (everywhere("NV18", 8), "H100", 450),
        (everywhere("NV18", 8), "B200", 900),
        (everywhere("NV8", 8), "H100", 200),  # a build of the chip with fewer links
        (everywhere("NV6", 16), "V100-32", 150),  # DGX-2
        (everywhere("NV4", 4), "A100-80", 300),  # no switch: a third of the links to each of three peers
        (everywhere("NV2", 2), "RTX 2080 Ti", 50),
        (everywhere("PIX", 4), "L40S", 31.5),
        (everywhere("SYS", 8), "L40S", 31.5),
        (everywhere("SOC", 2), "V100-16", 15.75),
        (CUBE_MESH, "V100-32", 7 * 15.75 / 3),  # seven peers wait for the three that share a PCIe port
        (BRIDGED, "A100-80", 3 * 31.5 / 2),
    ],
)
def test_links_of_machines(tmp_path, rows, kind, gigabytes):
    drawn = read_topology(saved(tmp_path, printed(rows)), kind)
    (node,) = drawn.cluster.nodes
    assert (node.name, drawn.cluster.name, len(node.gpus)) == ("dgx", "dgx", len(rows))
    assert set(node.gpus) == {gpu_types()[kind].gpu()}
    assert node.link_bandwidth == pytest.approx(gigabytes * 1e9)
    assert node.link_latency == (5e-6 if "NV" in rows[0] and "SYS" not in rows[0] else 10e-6)


def test_the_notes_say_what_was_simplified(tmp_path):
    mesh = read_topology(saved(tmp_path, printed(CUBE_MESH, nics=4)), "V100-32").notes
    assert "8 pairs by 2 NVLinks, 8 pairs by 1 NVLink, 12 pairs by PCIe" in mesh[0] and "36.8 GB/s" in mesh[0]
    assert any("4 network cards" in note for note in mesh) and any("SYS" in note for note in mesh)
    assert any("catalogue's (V100-32 50 Gb/s)" in note for note in mesh)
    switched = read_topology(saved(tmp_path, printed(everywhere("NV12", 8), nics=1)), "A100-80").notes
    assert "12 NVLinks through a switch: 300 GB/s" in switched[0]
    assert any("1 network card is" in note for note in switched) and not any("SYS" in note for note in switched)
    direct = read_topology(saved(tmp_path, printed(everywhere("NV4", 4))), "A100-80").notes
    assert "4 NVLinks directly: 300 GB/s" in direct[0] and not any("network card" in note for note in direct)
    assert "PCIe, 31.5 GB/s" in read_topology(saved(tmp_path, printed(everywhere("NODE", 2))), "L40S").notes[0]


@pytest.mark.parametrize(
    "layout",
    [
        {"nics": 10, "escapes": True},
        {"nics": 10, "nic": "mlx5_", "affinity": "CPU"},
        {"nics": 2, "nic": "mlx5_bond_", "affinity": ""},
        {"affinity": ""},
    ],
)
def test_layouts(tmp_path, layout):
    topology = parse_topology(printed(CUBE_MESH, **layout), Path("x.txt"))
    assert topology.nics == layout.get("nics", 0)
    assert topology.nvlinks.tolist()[0] == [0, 1, 1, 2, 2, 0, 0, 0] and topology.nvlinks.sum() == 8 * 6
    assert (topology.names, topology.across) == ((), True)


def test_one_gpu_and_texts_as_terminals_copy_them(tmp_path):
    for layout in ({}, {"nics": 1}, {"affinity": ""}):
        drawn = read_topology(saved(tmp_path, printed(["X"], **layout)), "H200")
        assert drawn.cluster.nodes[0].link_bandwidth is None and len(drawn.cluster.gpus) == 1
    # Blanks that were lost, and lines around.
    text = printed(everywhere("NV18", 2), nics=2).replace("NIC0\tNIC1", "NIC0NIC1").replace("PXB\tPXB", "PXBPXB")
    text = "$ nvidia-smi topo -m\n" + text.replace("\n", "\r\n") + "$ exit\n"
    assert "NIC0NIC1" in text and "PXBPXB" in text
    topology = parse_topology(text, Path("x.txt"))
    assert (topology.nics, topology.nvlinks.tolist()) == (2, [[0, 18], [18, 0]])
    glued = printed(everywhere("NV18", 2)).replace("GPU0\tGPU1\t", "GPU0GPU1\t")
    assert parse_topology(glued, Path("x.txt")).nvlinks.tolist() == [[0, 18], [18, 0]]


def test_names_listed_in_the_same_file(tmp_path):
    listed = "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-1)\nGPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-2)\n"
    for text in (listed + printed(everywhere("NV12", 2)), printed(everywhere("NV12", 2)) + listed):
        drawn = read_topology(saved(tmp_path, text))
        assert [gpu.type for gpu in drawn.cluster.gpus] == ["A100-80", "A100-40"]
    chosen = read_topology(saved(tmp_path, listed + printed(everywhere("NV12", 2))), ["A100-40", "H100"])
    assert [gpu.type for gpu in chosen.cluster.gpus] == ["A100-40", "H100"]
    other = listed.replace("A100-SXM4-40GB", "A100-PG509-200")
    refused(saved(tmp_path, other + printed(everywhere("NV12", 2))), "'NVIDIA A100-PG509-200'", "choose", types=None)
    refused(saved(tmp_path, listed + printed(everywhere("NV12", 4))), "2 of the 4 GPUs", types=None)
    message = refused(saved(tmp_path, printed(everywhere("NV12", 8))), "8 GPUs", "choose", "nvidia-smi -L", types=None)
    assert all((kind in message) == (LINKS[kind].name == "NVLink") for kind in gpu_types())
    refused(saved(tmp_path, listed), "names GPUs, but not their links", "nvidia-smi topo -m", types=None)


def test_mig_devices_are_noted_and_the_gpu_is_drawn_whole(tmp_path):
    devices = "  MIG 3g.40gb     Device  0: (UUID: MIG-1)\n  MIG 3g.40gb     Device  1: (UUID: MIG-2)\n"
    text = f"GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-1)\n{devices}GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-2)\n"
    drawn = read_topology(saved(tmp_path, text + printed(everywhere("NV12", 2))))
    assert [gpu.type for gpu in drawn.cluster.gpus] == ["A100-80"] * 2
    assert drawn.notes[-1].startswith("GPU0 is split into MIG devices (2 × 3g.40gb), without NVLink; it is drawn whole")


PRODUCTS = "".join(
    f"GPU[{at}]\t\t: Card Series: \t\tAMD Instinct MI300X OAM\nGPU[{at}]\t\t: Card Model: 0x74a1\n" for at in range(8)
)
MESH = everywhere("XGMI", 8)


@pytest.mark.parametrize(
    ("text", "kind", "gigabytes", "note"),
    [
        (rocm_tables(MESH), "MI300X", 448, "every pair is joined by 1 Infinity Fabric link directly: 448 GB/s"),
        (rocm_tables(MESH), "MI355X", 537.6, "538 GB/s"),
        (rocm_tables(MESH, "0000:{}c:00.0", "{} TABLE:"), "MI325X", 448, "448 GB/s"),  # amd-smi
        (PRODUCTS + rocm_tables(MESH), None, 448, "448 GB/s"),
        (rocm_tables(everywhere("XGMI", 2)), "MI300X", 64, "64 GB/s"),
        (rocm_tables(everywhere("PCIE", 2)), "MI300X", 63, "over PCIe, 63 GB/s"),
        (
            rocm_tables(["X XGMI PCIE", "XGMI X PCIE", "PCIE PCIE X"]),
            "MI300X",
            63,
            "1 pairs by 1 Infinity Fabric link, 2 pairs by PCIe",
        ),
        (rocm_tables(MESH, hops=2), "MI300X", 448, "28 pairs are joined over several Infinity Fabric links"),
    ],
)
def test_links_of_amd(tmp_path, text, kind, gigabytes, note):
    drawn = read_topology(path := saved(tmp_path, text), kind)
    (node,) = drawn.cluster.nodes
    assert node.link_bandwidth == pytest.approx(gigabytes * 1e9) and any(note in said for said in drawn.notes), drawn.notes
    assert identify(path).name == "amd-topology"


def npus(rows: list[str], name: str = "NPU{}") -> str:
    """The text of `npu-smi info -t topo`; a row has its cells with blanks between."""
    names = [name.format(at) for at in range(len(rows))]
    lines = ["\t   " + "       ".join([*names, "CPU Affinity"])]
    lines += [f"{own}       " + "       ".join([*row.split(), "144-167"]) for own, row in zip(names, rows, strict=True)]
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", "  HCCS = Connection traversing HCCS.", ""])


HALVES = [" ".join("X" if a == b else "HCCS" if a // 2 == b // 2 else "SYS" for b in range(4)) for a in range(4)]
PAIRS = [" ".join("X" if a == b else "SIO" if a // 2 == b // 2 else "HCCS_SW" for b in range(16)) for a in range(16)]


@pytest.mark.parametrize(
    ("text", "kind", "gigabytes", "note"),
    [
        (npus(everywhere("HCCS", 8)), "Ascend-A2-313", 196, "joined by 1 HCCS link directly: 196 GB/s"),
        (npus(everywhere("HCCS", 4)), "Ascend-A2-376", 84, "84 GB/s"),
        (npus(everywhere("SYS", 8)), "Ascend-A2-280", 63, "between sockets (SYS)"),
        (npus(HALVES), "Ascend-A2-313", 84, "2 pairs by 1 HCCS link, 4 pairs by PCIe"),
        (npus(PAIRS, "Phy-ID{}"), "Ascend-A3", 196, "the two of a package (SIO) are faster"),
        (
            npus(everywhere("SIO", 2)).replace("NPU0", "Phy-ID12").replace("NPU1", "Phy-ID13"),
            "Ascend-A3",
            196,
            "through a switch",
        ),
    ],
    ids=lambda value: "",
)
def test_links_of_ascend(tmp_path, text, kind, gigabytes, note):
    drawn = read_topology(path := saved(tmp_path, text), kind)
    (node,) = drawn.cluster.nodes
    assert node.link_bandwidth == pytest.approx(gigabytes * 1e9) and any(note in said for said in drawn.notes), drawn.notes
    assert identify(path).name == "nvidia-topology"


LABELS = [
    "[pod/gpu-0/main] ",
    "2026-09-01T10:00:00.123456789Z stdout F ",
    "Sep  1 10:00:00 node1 bash[12]: ",
    "gpu-1  | ",
    "0: ",
]
LABELS += ["[1,0]<stdout>:", "[rank0]: ", "[default0]:", "(RayWorker pid=12, ip=10.0.0.1) ", "\x1b[32m"]


@pytest.mark.parametrize("label", LABELS)
def test_labels_of_launchers_and_logs_come_off(tmp_path, label):
    for text, kind in ((MATRIX, "A100-80"), (rocm_tables(MESH), "MI300X"), (npus(everywhere("HCCS", 8)), "Ascend-A2-376")):
        plain = read_topology(saved(tmp_path, text), kind)
        path = saved(tmp_path, "".join(f"{label}{line}\r\n" for line in text.splitlines()))
        assert read_topology(path, kind) == plain and identify(path).kind == "topology"


def of_amd(links: int = 8) -> list[dict]:
    """The list that `amd-smi topology --json` prints of GPUs that are joined in pairs."""
    kinds = [[("SELF", 0) if a == b else ("XGMI", 1) for b in range(links)] for a in range(links)]
    rows = [[{"gpu": b, "link_type": kind, "num_hops": hops} for b, (kind, hops) in enumerate(row)] for row in kinds]
    return [{"gpu": at, "bdf": f"0000:{at}c:00.0", "links": row} for at, row in enumerate(rows)]


def of_rocm(gpus: int = 8) -> dict:
    pairs = [(a, b) for b in range(gpus) for a in range(b)]
    keys = "(Topology) {} between DRM devices {} and {}"
    return {
        "system": {keys.format(fact, *pair): value for pair in pairs for fact, value in (("Link type", "XGMI"), ("Hops", "1"))}
    }


@pytest.mark.parametrize("content", [of_amd(), {"gpu_data": of_amd()}, of_rocm()])
def test_links_of_amd_as_json(tmp_path, content):
    path = saved(tmp_path, json.dumps(content, indent=1), "topo.json")
    assert read_topology(path, "MI300X").cluster.nodes[0].link_bandwidth == pytest.approx(448e9)
    assert identify(path).name == "amd-topology"


@pytest.mark.parametrize(
    ("text", "kind", "parts"),
    [
        (rocm_tables(MESH), "H100", ("of AMD's GPUs (rocm-smi)", "H100 is none of them", "MI300X, MI325X, MI355X")),
        (rocm_tables(MESH), None, ("8 GPUs", "rocm-smi --showproductname")),
        (printed(everywhere("NV4", 4)), "MI300X", ("of NVIDIA's GPUs", "MI300X is none")),
        (rocm_tables(MESH).split("====== Link")[0], "MI300X", ("no table of link types", "rocm-smi --showtopo")),
        (rocm_tables(MESH).replace("GPU7   XGMI", "GPU9   XGMI"), "MI300X", ("row of GPU9",)),
        (rocm_tables(MESH) + rocm_tables(MESH), "MI300X", ("second table 'hops",)),
        (rocm_tables(["X XGMI", "PCIE X"]), "MI300X", ("GPU0 to GPU1 is 'XGMI', back it is 'PCIE'",)),
        (rocm_tables(everywhere("XGMI", 9)), "MI300X", ("GPU0 is linked to 8 others, but MI300X has 7 links", "SPX")),
        (npus(everywhere("HCCS", 8)), "H100", ("Ascend NPUs (npu-smi)", "H100 is none of them", "Ascend-A2-376")),
        (npus(everywhere("HCCS", 8)), None, ("8 GPUs", "choose their type (Ascend-A2-376, Ascend-A2-313, Ascend-A2-280)")),
        (npus(PAIRS), "Ascend-A2-376", ("Ascend-A2-376 is none of them", "choose from Ascend-A3")),
        (npus(everywhere("HCCS", 9)), "Ascend-A2-376", ("linked to 8 others, but Ascend-A2-376 has 7 links", "Cluster page")),
        (npus(everywhere("UB", 4)), "Ascend-A2-376", ("joined by UB, whose speed is not known",)),
        (npus(everywhere("NA", 4)), None, ("joined by NA",)),
        (
            json.dumps([{"gpu": 0, "links": [{"link_type": "XGMI"}]}]),
            "MI300X",
            ("without the links of GPUs", "amd-smi topology"),
        ),
        (json.dumps(of_rocm()).replace("0 and 1", "0 and 9"), "MI300X", ("'nothing'",)),
    ],
    ids=lambda value: "",
)
def test_other_makers_and_damaged_tables(tmp_path, text, kind, parts):
    refused(saved(tmp_path, text), *parts, types=kind)


TYPES = {"H200": ["NVIDIA H200"], "H100": ["NVIDIA H100 80GB HBM3"], "B200": ["NVIDIA B200"], "L40S": ["NVIDIA L40S"]}
TYPES |= {"A100-80": ["NVIDIA A100-SXM4-80GB", "A100-SXM-80GB"], "A100-40": ["NVIDIA A100-SXM4-40GB"]}
TYPES |= {"V100-32": ["Tesla V100-SXM2-32GB"], "V100-16": ["Tesla V100-SXM2-16GB"]}
TYPES |= {"RTX 2080 Ti": ["NVIDIA GeForce RTX 2080 Ti"], None: ["NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA L40S-48Q"]}
TYPES[None] += ["NVIDIA L40", "Tesla V100-PCIE-32GB", "NVIDIA A100-SXM-64GB", ""]
TYPES |= {"MI300X": ["AMD Instinct MI300X", "AMD Instinct MI300X OAM"]}
TYPES |= {name: [f"AMD Instinct {name}"] for name in ("MI325X", "MI355X")}


def test_types_by_the_names_of_devices():
    assert {kind: [type_of(name) for name in names] for kind, names in TYPES.items()} == {
        kind: [kind] * len(names) for kind, names in TYPES.items()
    }


MATRIX = printed(everywhere("NV4", 4), nics=2)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hello\n", ("not what 'nvidia-smi topo -m' prints",)),
        ("GPU0\tGPU1\n", ("not what",)),
        (MATRIX + MATRIX, ("second matrix", "line 18")),
        (MATRIX.replace("GPU3\tNV4", "GPU9\tNV4"), ("row of GPU3 is missing",)),
        (MATRIX.replace("GPU3\tNV4", "GPU2\tNV4"), ("second row of GPU2", "line 5")),
        (MATRIX.replace("GPU2\tNV4\tNV4", "GPU2\tNV4\t???"), ("row of GPU2 has 1 cells", "line 4")),
        (MATRIX.replace("GPU2\tNV4", "GPU2\tN?4"), ("row of GPU2 begins with 'N?4'", "line 4")),
        (MATRIX[: MATRIX.index("GPU3\tNV4") + 13], ("row of GPU3 has 2 cells", "line 5")),
        (MATRIX.replace("GPU2\tNV4", "GPU2\tNV3"), ("GPU0 to GPU2 is NV4, back it is NV3",)),
        (MATRIX.replace(" X \tNV4", "PIX\tNV4", 1), ("GPU0 to GPU0 is PIX",)),
        (MATRIX.replace("\tGPU1\t", "\tGPU0\t"), ("once each", "line 1")),
        (MATRIX.replace("\tGPU3\t", "\tNIC7\tGPU3\t", 1), ("begins with every GPU",)),
        (MATRIX.replace("NV4", "NV13"), ("13 NVLinks", "A100-80 has only 12", "H100")),
        (MATRIX.replace("NV4", "NV99"), ("99 NVLinks", "none in the catalogue")),
        ("", ("empty",)),
        ("x" * (4 * 1024**2 + 1), ("too large",)),
    ],
    ids=lambda value: "",
)
def test_damaged_text(tmp_path, text, parts):
    refused(saved(tmp_path, text), *parts)


def test_other_files_and_types(tmp_path):
    assert read_topology(saved(tmp_path, MATRIX, "topo"), "A100-80") and read_topology(
        saved(tmp_path, MATRIX, "a.md"), "A100-80"
    )
    refused(tmp_path / "none.txt", "no such file")
    refused(saved(tmp_path, MATRIX), "no NVLinks", "A100-80", types="L40S")
    refused(saved(tmp_path, MATRIX), "3 types", "4 GPUs", types=["H100"] * 3)


def test_every_type_of_the_catalogue_has_its_links():
    assert list(LINKS) == list(gpu_types())
    for node in node_types().values():
        if node.link_bandwidth is not None:
            links = LINKS[node.gpu]
            own = PCIE_LANE[links.pcie] * LANES if "pcie" in node.name else links.nvlink * links.nvlinks
            assert node.link_bandwidth == pytest.approx(own), node.name


@given(st.integers(2, 6), st.integers(0, 2**32 - 1))
def test_pace_of_an_equal_exchange(gpus, seed):
    """Against the exchange written out: every GPU sends a byte to every other; a path carries its bytes one after
    another. Any numbering of the GPUs has the same pace, and a further link never slows it."""
    rng = np.random.default_rng(seed)
    upper = np.triu(rng.integers(0, 3, (gpus, gpus)), 1)
    nvlinks = upper + upper.T
    types = ["H100"] * gpus  # 18 links of an H100 are more than any row here: no switch
    pcie = rng.uniform(10e9, 60e9, gpus).tolist()
    ends = []
    for source, links in enumerate(nvlinks):
        others = [links[target] for target in range(gpus) if target != source]
        ends.append(max(others.count(0) / pcie[source], *(1 / (25e9 * link) for link in others if link), 0))
    pace = link_bandwidth(types, nvlinks, pcie)
    assert pace == pytest.approx((gpus - 1) / max(ends))
    order = rng.permutation(gpus)
    assert link_bandwidth(types, nvlinks[np.ix_(order, order)], [pcie[at] for at in order]) == pytest.approx(pace)
    better = nvlinks.copy()
    a, b = rng.choice(gpus, 2, replace=False)
    if better[a, b]:
        better[[a, b], [b, a]] += 1
        assert link_bandwidth(types, better, pcie) >= pace * (1 - 1e-12)
