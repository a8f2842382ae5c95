"""The links of AMD's GPUs as `rocm-smi --showtopo` and `amd-smi topology` print them.

Both print a table for each fact, of which two count: the type of link (XGMI, which is Infinity Fabric, or PCIE) and the hops
between two GPUs. A table has a heading (`=== Link Type between two GPUs ===`, or `LINK TYPE TABLE:`), a head with every GPU, by
number or by bus, and one row for each; a GPU is 0, SELF or N/A to itself.

With `--json` the same is one object, `{"system": {"(Topology) Link type between DRM devices 0 and 1": "XGMI", …}}` of rocm-smi,
or a list of GPUs with `links` of `link_type` and `num_hops`, of amd-smi.

The names of the GPUs are in `rocm-smi --showproductname`: `GPU[0] : Card Series: AMD Instinct MI300X`.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.formats.source import fault, quoted

_HEADING = re.compile(r"=+ (.+?) =+|([A-Z ]+ TABLE):")
_TYPES, _HOPS = ("link type between two gpus", "link type table"), ("hops between two gpus", "hops table")
_GPU = re.compile(r"GPU\d+|[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d")
_CARD = re.compile(r"GPU\[(\d+)\]\s*: Card Series:\s*(\S.*?)\s*", re.IGNORECASE)
_SELF = ("0", "SELF", "N/A")
_BETWEEN = re.compile(r"\(Topology\) (Link type|Hops) between DRM devices (\d{1,4}) and (\d{1,4})", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class RocmLinks:
    """The tables of one machine.

    links: int64[gpu, gpu]; 1 where Infinity Fabric joins two GPUs, 0 for PCIe and on the diagonal
    names: of the GPUs, () if the text does not have them
    far: pairs that reach each other over several links
    """

    links: np.ndarray
    names: tuple[str, ...]
    far: int


def is_rocm(text: str) -> bool:
    """True if a text is of AMD's tools, with a table of links or without."""
    marks = (" between two GPUs ", " TABLE:\n", "Card Series:", '"link_type"', "(Topology) Numa")
    return any(mark in text for mark in marks) or _BETWEEN.search(text) is not None


def _tables_of_json(content: dict | list) -> dict[str, dict[str, list[str]]]:
    """The tables of types and hops of JSON, by title."""
    types, hops = {}, {}
    if isinstance(content, dict) and "system" in content:
        for key, value in content["system"].items():
            if found := _BETWEEN.fullmatch(key):
                pair = (int(found[2]), int(found[3]))
                (types if found[1].lower() == "link type" else hops).update({pair: str(value), pair[::-1]: str(value)})
    else:
        for gpu in content["gpu_data"] if isinstance(content, dict) else content:
            for link in gpu["links"]:
                pair = (int(gpu["gpu"]), int(link["gpu"]))
                types[pair], hops[pair] = str(link["link_type"]), str(link.get("num_hops", ""))
    gpus = sorted({gpu for pair in types for gpu in pair})
    return {
        title: {f"GPU{a}": [of_pair.get((a, b), "SELF" if a == b else "nothing") for b in gpus] for a in gpus}
        for title, of_pair in ((_TYPES[0], types), (_HOPS[0], hops))
    }


def parse_rocm(text: str, path: Path) -> RocmLinks:
    """The links in the text; `path` is named in complaints. Raises InputError."""
    tables: dict[str, dict[str, list[str]]] = {}
    try:
        tables = _tables_of_json(json.loads(text))
    except (KeyError, TypeError, AttributeError):
        raise fault(
            path, "is JSON of AMD's tools without the links of GPUs; save what 'amd-smi topology --json' prints"
        ) from None
    except ValueError:
        pass  # a text
    names: dict[int, str] = {}
    title, head = "", []
    for number, line in enumerate(() if tables else text.splitlines(), 1):
        words, place = line.split(), f"line {number}"
        if heading := _HEADING.fullmatch(line.strip()):
            title, head = (heading[1] or heading[2]).lower(), []
        elif card := _CARD.fullmatch(line.strip()):
            names[int(card[1])] = card[2]
        elif title not in (*_TYPES, *_HOPS) or not words or not _GPU.fullmatch(words[0]):
            continue
        elif not head:
            head = words
            if title in tables:
                raise fault(path, f"a second table '{title}' begins here; keep one machine to a file", place)
            tables[title] = {}
        else:
            if len(words) != len(head) + 1 or words[0] not in head or words[0] in tables[title]:
                raise fault(path, f"the row of {words[0]} needs {len(head)} cells, once; keep the whole table", place)
            tables[title][words[0]] = words[1:]
    rows = next((tables[name] for name in _TYPES if tables.get(name)), None)
    if rows is None:
        raise fault(path, "has no table of link types; save what 'rocm-smi --showtopo' or 'amd-smi topology' prints")
    cells = list(rows.values())
    if len(cells) != len(cells[0]):
        raise fault(path, f"{len(cells)} of {len(cells[0])} rows of link types are there; keep the whole table")
    for a, row in enumerate(cells):
        for b, cell in enumerate(row):
            if (cell not in _SELF if a == b else cell not in ("XGMI", "PCIE")) or (a != b and cell != cells[b][a]):
                raise fault(
                    path,
                    f"GPU{a} to GPU{b} is {quoted(cell)}, back it is {quoted(cells[b][a])}; XGMI or PCIE is read, both ways",
                )
    links = np.array([[cell == "XGMI" for cell in row] for row in cells], dtype=np.int64)
    hops = next((list(tables[name].values()) for name in _HOPS if tables.get(name)), [])
    far = sum(
        bool(links[a, b]) and cell.isdigit() and int(cell) > 1
        for a, row in enumerate(hops[: len(cells)])
        for b, cell in enumerate(row[:a])
    )
    if names and len(names) < len(cells):
        raise fault(path, f"{len(names)} of the {len(cells)} GPUs of the table are listed by name; keep all or none")
    return RocmLinks(links, tuple(names[gpu] for gpu in sorted(names))[: len(cells)], far)
