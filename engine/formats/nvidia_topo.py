"""The text of `nvidia-smi topo -m`: which links join the GPUs of one machine. That of AMD's tools is read by `rocm_topo`.

A head `GPU0 GPU1 … NIC0 … CPU Affinity …`, one row for every GPU and NIC, then a legend. A cell is X (itself), NV# (so many
NVLinks), or a path over PCIe: PIX and PXB over switches, PHB over the host bridge, NODE and SYS (SOC in old drivers) between
bridges and sockets. Network cards are called NIC0 … or by their names, mlx5_0.

The text does not name the GPUs, so their type must come from elsewhere: from the person, or from the lines of `nvidia-smi -L`
(`GPU 0: NVIDIA H200 (UUID: …)`) if the file has them too, before or after the matrix. There a GPU that is split has its MIG
devices below it (`MIG 3g.40gb  Device 0: (UUID: …)`), which the matrix does not show.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engine import catalogue
from engine.catalogue.links import AMD, LINKS, Drawn, draw, type_of
from engine.errors import InputError
from engine.formats.format import Format, Glance
from engine.formats.rocm_topo import is_rocm, parse_rocm
from engine.formats.source import check_file, fault, one_clear_line, quoted

EXTENSIONS = (".txt", ".log", ".out")
MAX_BYTES = 4 * 1024**2

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GPU = re.compile(r"GPU\d+")

# Long lines lose blanks when they are copied from some terminals: NIC8NIC9 above NODEPXB.
_GLUED_NAMES, _NAME = re.compile(r"((GPU|NIC)\d+){2,}"), re.compile(r"(?:GPU|NIC)\d+")
_CELL = re.compile(r"NV\d{1,3}|PIX|PXB|PHB|NODE|SYS|SOC|X")
_GLUED_CELLS = re.compile(rf"(?:{_CELL.pattern})+")
_LISTED = re.compile(r"GPU (\d+): (.+?)(?: \(UUID: .*)?")
_MIG = re.compile(r"MIG (\S+)\s+Device\s+\d+:.*")
_NPU = re.compile(rb"^\s*(?:NPU|Phy-ID)0\s.*(?:HCCS|PHB|SYS|PIX|SIO|NPU1|Phy-ID1)", re.MULTILINE)
NPUS = (
    "the topology of Ascend NPUs",
    "the catalogue has no Ascend NPU, so their memory and rates and the speed of HCCS are missing: draw the machine on the "
    "Cluster page and type them in",
)
"""A kind of machine that cannot be drawn, and the advice."""


@dataclass(frozen=True, eq=False)
class Topology:
    """The matrix of one machine.

    nvlinks: int64[gpu, gpu]; 0 between GPUs that talk over PCIe and on the diagonal
    nics: number of network cards
    names: of the GPUs, () if the file does not have them
    across: True if a pair's path over PCIe crosses sockets (SYS)
    split: MIG profiles of the GPUs that are split, by GPU
    amd: True if it is of AMD's GPUs
    far: pairs of AMD's GPUs that are joined over several links
    """

    nvlinks: np.ndarray
    nics: int
    names: tuple[str, ...]
    across: bool
    split: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    amd: bool = False
    far: int = 0


def read_topology(path: Path, types: str | Sequence[str] | None = None) -> Drawn:
    """The machine as a cluster of one node, with notes on the facts that the text lacks; raises InputError.

    types: the catalogue's type of all GPUs, or one for each; None: as the lines of `nvidia-smi -L` in the file say
    """
    with one_clear_line(path):
        check_file(path, EXTENSIONS)
        if path.stat().st_size > MAX_BYTES:
            raise fault(path, f"too large for what nvidia-smi prints (over {MAX_BYTES // 1024**2} MB)")
        if is_of_npus(path.read_bytes()):
            raise fault(path, f"is {NPUS[0]}; {NPUS[1]}")
        topology = parse_topology(path.read_text(encoding="utf-8", errors="replace"), path)
        gpus = [catalogue.gpu(kind) for kind in _types(path, topology, types)]
        try:
            drawn = draw(path.stem, gpus, topology.nvlinks)
        except InputError as error:
            raise fault(path, str(error)) from None
    notes = list(drawn.notes)
    if topology.nics:
        notes.append(f"{topology.nics} network card{'s are' if topology.nics > 1 else ' is'} listed, without rates")
    if topology.across:
        notes.append("some pairs talk over PCIe between sockets (SYS) and reach less than the raw rate")
    if topology.far:
        notes.append(f"{topology.far} pairs are joined over several Infinity Fabric links in turn and are slower than drawn")
    for gpu, profiles in topology.split.items():
        devices = ", ".join(f"{profiles.count(profile)} × {profile}" for profile in dict.fromkeys(profiles))
        notes.append(f"GPU{gpu} is split into MIG devices ({devices}), without NVLink; it is drawn whole, as without MIG")
    return Drawn(drawn.cluster, tuple(notes))


def parse_topology(text: str, path: Path) -> Topology:
    """The matrix in the text; `path` is named in complaints. Raises InputError."""
    if is_rocm(text):
        rocm = parse_rocm(text, path)
        return Topology(rocm.links, 0, rocm.names, False, amd=True, far=rocm.far)
    columns: list[str] = []
    gpus: list[str] = []
    rows: dict[str, list[str]] = {}
    names: dict[int, str] = {}
    split: dict[int, list[str]] = {}
    for number, line in enumerate(_ESCAPE.sub("", text).splitlines(), 1):
        words, place = line.split(), f"line {number}"
        if listed := _LISTED.fullmatch(line.strip()):
            names[int(listed[1])] = listed[2]
        elif names and (device := _MIG.fullmatch(line.strip())):
            split.setdefault(list(names)[-1], []).append(device[1])
        elif not words or not _GPU.match(words[0]):
            continue
        elif len(words) == 1 or not _GLUED_CELLS.fullmatch(words[1]):
            if columns and words[0] in gpus[1:]:
                raise fault(path, f"the row of {words[0]} begins with {quoted(' '.join(words[1:2]))}", place)
            if columns:
                raise fault(path, "a second matrix begins here; keep one machine to a file", place)
            named = words[: words.index("CPU") if "CPU" in words else None]  # where `CPU Affinity` begins
            columns = [name for word in named for name in (_NAME.findall(word) if _GLUED_NAMES.fullmatch(word) else [word])]
            gpus = [column for column in columns if _GPU.fullmatch(column)]
            if len(set(columns)) < len(columns) or columns[: len(gpus)] != gpus:
                raise fault(path, "a head that begins with every GPU, once each, is needed", place)
        elif words[0] in gpus:
            if words[0] in rows:
                raise fault(path, f"a second row of {words[0]}", place)
            rows[words[0]] = _cells(words[1:])[: len(gpus)]
            if (width := len(rows[words[0]])) < len(gpus):
                raise fault(
                    path,
                    f"the row of {words[0]} has {width} cells like X, NV4, PIX or SYS; the head has {len(gpus)} GPUs",
                    place,
                )
    if not rows and names:
        raise fault(path, "names GPUs, but not their links; add what 'nvidia-smi topo -m' prints")
    if not rows:
        raise fault(path, "this is not what 'nvidia-smi topo -m' prints: no head and rows 'GPU0 GPU1 …'")
    if missing := [gpu for gpu in gpus if gpu not in rows]:
        raise fault(path, f"the row of {missing[0]} is missing; keep the whole output")
    cells = [rows[gpu] for gpu in gpus]
    for a, row in enumerate(cells):
        for b, cell in enumerate(row):
            if (cell == "X") != (a == b) or cell != cells[b][a]:
                raise fault(path, f"{gpus[a]} to {gpus[b]} is {cell}, back it is {cells[b][a]}; the matrix is damaged")
    nvlinks = np.array([[int(cell[2:]) if cell.startswith("NV") else 0 for cell in row] for row in cells], dtype=np.int64)
    across = any(cell in ("SYS", "SOC") for row in cells for cell in row)
    listed = [names[int(gpu[3:])] for gpu in gpus if int(gpu[3:]) in names]
    if names and len(listed) < len(gpus):
        raise fault(path, f"{len(listed)} of the {len(gpus)} GPUs of the matrix are listed by name; keep all or none")
    profiles = {gpu: tuple(found) for gpu, found in split.items() if gpu < len(gpus)}
    return Topology(nvlinks, len(columns) - len(gpus), tuple(listed), across, profiles)


def _cells(words: list[str]) -> list[str]:
    """The links at the beginning of a row."""
    cells: list[str] = []
    for word in words:
        if not _GLUED_CELLS.fullmatch(word):
            break
        cells += _CELL.findall(word)
    return cells


def _types(path: Path, topology: Topology, types: str | Sequence[str] | None) -> list[str]:
    """The catalogue's type of every GPU; raises InputError if it is neither given nor in the file."""
    count, maker = len(topology.nvlinks), "AMD's GPUs (rocm-smi)" if topology.amd else "NVIDIA's GPUs (nvidia-smi)"
    fitting = [kind for kind, links in LINKS.items() if (links.name == AMD) == topology.amd]
    known, listing = ", ".join(fitting), "rocm-smi --showproductname" if topology.amd else "nvidia-smi -L"
    if types is not None:
        chosen = [types] * count if isinstance(types, str) else list(types)
        if len(chosen) != count:
            raise fault(path, f"{len(chosen)} types were given for the {count} GPUs of the matrix")
        if other := next((kind for kind in chosen if kind in LINKS and kind not in fitting), None):
            raise fault(path, f"the text is of {maker}, and {other} is none of them; choose from {known}")
        return chosen
    if not topology.names:
        raise fault(
            path,
            f"the text does not say what the {count} GPUs are; choose their type ({known}), or put what "
            f"'{listing}' prints into the file too",
        )
    for name in topology.names:
        if type_of(name) is None:
            raise fault(path, f"{quoted(name)} is not in the catalogue; choose the nearest type ({known})")
    return [type_of(name) for name in topology.names]


def _tells(glance: Glance) -> bool:
    head = glance.head.decode(errors="replace") if glance.is_text and not glance.is_json else ""
    return bool(re.search(r"^\s*(\x1b\[\d*m)*\s*GPU0\s", head, re.MULTILINE)) or head.startswith("GPU 0: ")


def is_of_npus(text: bytes) -> bool:
    """True if a text is what `npu-smi info -t topo` prints."""
    return _NPU.search(text) is not None


FORMATS = (
    Format(
        *("amd-topology", "what rocm-smi --showtopo prints", "topology"),
        lambda glance: glance.is_text and is_rocm(glance.head.decode(errors="replace")),
    ),
    Format("nvidia-topology", "what nvidia-smi topo -m prints", "topology", _tells),
)
