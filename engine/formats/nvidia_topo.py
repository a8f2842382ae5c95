"""The text of `nvidia-smi topo -m` and of `npu-smi info -t topo`: which links join the GPUs of one machine. That of AMD's tools
is read by `rocm_topo`.

A head `GPU0 GPU1 … NIC0 … CPU Affinity …`, one row for every GPU and NIC, then a legend. A cell is X (itself), NV# (so many
NVLinks), or a path over PCIe: PIX and PXB over switches, PHB over the host bridge, NODE and SYS (SOC in old drivers) between
bridges and sockets. Network cards are called NIC0 … or by their names, mlx5_0.

`npu-smi info -t topo` prints the same of Ascend NPUs, called NPU0 … or by their dies Phy-ID0 …: HCCS is a link of their own
between two, HCCS_SW the same through a switch, SIO joins two dies of a package; NA is no path that is known.

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
from engine.catalogue.links import AMD, ASCEND, LINKS, Drawn, draw, type_of
from engine.errors import InputError
from engine.formats.format import Format, Glance
from engine.formats.rocm_topo import is_rocm, parse_rocm
from engine.formats.source import check_size, check_there, fault, one_clear_line, plain, quoted

MAX_BYTES = 4 * 1024**2

_GPU = re.compile(r"(?:GPU|NPU|Phy-ID)\d+")

# Long lines lose blanks when they are copied from some terminals: NIC8NIC9 above NODEPXB.
_GLUED_NAMES, _NAME = re.compile(r"((GPU|NPU|NIC)\d+){2,}"), re.compile(r"(?:GPU|NPU|NIC)\d+")
_CELL = re.compile(r"NV\d{1,3}|HCCS_SW|HCCS|SIO|PIX|PXB|PIB|PHB|NODE|SYS|SOC|UB|NA|X")
_GLUED_CELLS = re.compile(rf"(?:{_CELL.pattern})+")
_LISTED = re.compile(r"GPU (\d+): (.+?)(?: \(UUID: .*)?")
_MIG = re.compile(r"MIG (\S+)\s+Device\s+\d+:.*")
_SWITCHED = ("HCCS_SW", "SIO")
_MAKERS = {
    "NVLink": ("NVIDIA's GPUs (nvidia-smi)", "nvidia-smi -L"),
    AMD: ("AMD's GPUs (rocm-smi)", "rocm-smi --showproductname"),
    ASCEND: ("Ascend NPUs (npu-smi)", ""),
}
"""The maker, its tool and the command that prints names, by the kind of link."""
_HEAD = re.compile(r"^[ \t]*(?:GPU\d|NPU\d+|Phy-ID\d+)[ \t]+(?:GPU\d+|NPU\d+|Phy-ID\d+|NIC0|CPU|X)[ \t]|^GPU 0: ", re.MULTILINE)


@dataclass(frozen=True, eq=False)
class Topology:
    """The matrix of one machine.

    nvlinks: int64[gpu, gpu]; 0 between GPUs that talk over PCIe and on the diagonal
    nics: number of network cards
    names: of the GPUs, () if the file does not have them
    across: True if a pair's path over PCIe crosses sockets (SYS)
    split: MIG profiles of the GPUs that are split, by GPU
    kind: of the links of such GPUs, as `Links.name`
    switched: True if NPUs meet through a switch, as dies of A3 machines
    far: pairs of AMD's GPUs that are joined over several links
    """

    nvlinks: np.ndarray
    nics: int
    names: tuple[str, ...]
    across: bool
    split: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    kind: str = "NVLink"
    switched: bool = False
    far: int = 0


def read_topology(path: Path, types: str | Sequence[str] | None = None) -> Drawn:
    """The machine as a cluster of one node, with notes on the facts that the text lacks; raises InputError.

    types: the catalogue's type of all GPUs, or one for each; None: as the lines of `nvidia-smi -L` in the file say
    """
    with one_clear_line(path):
        check_there(path)
        check_size(path)
        if path.stat().st_size > MAX_BYTES:
            raise fault(path, f"too large for what nvidia-smi prints (over {MAX_BYTES // 1024**2} MB)")
        topology = parse_topology(path.read_text(encoding="utf-8-sig", errors="replace"), path)
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
    if topology.switched:
        rate = f"{LINKS['Ascend-A3'].nvlink * LINKS['Ascend-A3'].nvlinks / 1e9:.0f} GB/s out of each"
        notes[0] = f"all pairs of dies are drawn with HCCS through a switch, {rate}; the two of a package (SIO) are faster"
    if topology.far:
        notes.append(f"{topology.far} pairs are joined over several Infinity Fabric links in turn and are slower than drawn")
    for gpu, profiles in topology.split.items():
        devices = ", ".join(f"{profiles.count(profile)} × {profile}" for profile in dict.fromkeys(profiles))
        notes.append(f"GPU{gpu} is split into MIG devices ({devices}), without NVLink; it is drawn whole, as without MIG")
    return Drawn(drawn.cluster, tuple(notes))


def parse_topology(text: str, path: Path) -> Topology:
    """The matrix in the text; `path` is named in complaints. Raises InputError."""
    text = plain(text)
    if is_rocm(text):
        rocm = parse_rocm(text, path)
        return Topology(rocm.links, 0, rocm.names, False, kind=AMD, far=rocm.far)
    columns: list[str] = []
    gpus: list[str] = []
    rows: dict[str, list[str]] = {}
    names: dict[int, str] = {}
    split: dict[int, list[str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
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
    flat = {cell for row in cells for cell in row}
    if unknown := flat & {"UB", "NA"}:
        known = "HCCS" if not gpus[0].startswith("GPU") else "NVLink"
        raise fault(
            path, f"some pairs are joined by {min(unknown)}, whose speed is not known; machines with {known} or PCIe are read"
        )
    switched = bool(flat & {*_SWITCHED})
    whole = LINKS["Ascend-A3"].nvlinks  # a switch gives all links to each pair

    def links(cell: str) -> int:
        if cell.startswith("HCCS") or cell in _SWITCHED:
            return whole if switched else 1
        return int(cell[2:]) if cell.startswith("NV") else 0

    nvlinks = np.array([[links(cell) for cell in row] for row in cells], dtype=np.int64)
    across = bool(flat & {"SYS", "SOC"})
    if not gpus[0].startswith("GPU"):
        return Topology(nvlinks, len(columns) - len(gpus), (), across, kind=ASCEND, switched=switched)
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
    count, (maker, listing) = len(topology.nvlinks), _MAKERS[topology.kind]
    fitting = [kind for kind, links in LINKS.items() if links.name == topology.kind]
    if topology.kind == ASCEND:
        fitting = [kind for kind in fitting if (kind == "Ascend-A3") == topology.switched]
    known = ", ".join(fitting)
    if types is not None:
        chosen = [types] * count if isinstance(types, str) else list(types)
        if len(chosen) != count:
            raise fault(path, f"{len(chosen)} types were given for the {count} GPUs of the matrix")
        if other := next((kind for kind in chosen if kind in LINKS and kind not in fitting), None):
            raise fault(path, f"the text is of {maker}, and {other} is none of them; choose from {known}")
        return chosen
    if not topology.names:
        listed = f", or put what '{listing}' prints into the file too" if listing else ""
        raise fault(path, f"the text does not say what the {count} GPUs are; choose their type ({known}){listed}")
    for name in topology.names:
        if type_of(name) is None:
            raise fault(path, f"{quoted(name)} is not in the catalogue; choose the nearest type ({known})")
    return [type_of(name) for name in topology.names]


def _tells(glance: Glance) -> bool:
    return glance.is_text and not glance.is_json and _HEAD.search(plain(glance.head.decode(errors="replace"))) is not None


FORMATS = (
    Format(
        *("amd-topology", "what rocm-smi --showtopo or amd-smi topology prints", "topology"),
        lambda glance: glance.is_text and is_rocm(glance.head.decode(errors="replace")),
    ),
    Format("nvidia-topology", "what nvidia-smi topo -m or npu-smi info -t topo prints", "topology", _tells),
)
