"""The recorder's dumps of single passes (`.pt`, modes `per_pass` and `per_token`), one file a rank, and the reader of the
first kind.

`{"records": [{forward_pass_id, rank, gatherer_key, …}], "last_physical_to_logical_map": int[decoder layer, slot]}`
(srt/eplb/expert_distribution.py). Records are of physical slots; the map that folds them to logical experts is that of the
moment of the dump. Recorders number all decoder layers, dense ones too.

In mode `per_pass` a record has `global_physical_count` int[decoder layer, slot]. A rank counts the choices of its own tokens
over all slots; only in DeepEP's low-latency mode it counts the copies that its own slots receive, and zero for all others, so
that the ranks' sum is right and a single rank is not.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from engine.formats import torch_files
from engine.formats.arrays import MAX_EXPERTS, MAX_LAYERS, MAX_RANKS, MAX_SLOTS, MAX_SPLIT, expert_load, fold_slots
from engine.formats.format import Format, Glance
from engine.formats.source import MAX_FILE_BYTES, Source, error, ok, quoted, warning
from engine.formats.step_spans import split_steps
from engine.workload import ExpertLoad, Finding, Origin

MAX_MAP = 2**22
"""Slots of all layers together; 61 layers of 1024 slots are a hundred times fewer."""
MAX_BYTES = 4 * MAX_FILE_BYTES
"""Limit of all ranks' files together."""
PRIMARY = "primary"
_DUMP_OF_RANK = re.compile(r"expert_distribution_recorder_(?P<time>\d+(?:\.\d+)?)_(?P<rank>\d+)\.pt")
MOST_MTP_LAYERS = 4
NAME = "sglang-passes"
COUNT = "global_physical_count"


@dataclass(frozen=True)
class Dump:
    """The dump of one rank.

    records: of the model itself, in the order of its passes
    drafts: number of records of a draft model, which were left out
    logical_of_slot: int64[decoder layer, slot]
    """

    source: Source
    rank: int
    records: list[dict]
    drafts: int
    logical_of_slot: np.ndarray

    @property
    def num_experts(self) -> int:
        return int(self.logical_of_slot.max()) + 1

    def place(self, record: dict) -> str:
        return f"rank {self.rank}, forward pass {record['forward_pass_id']}"

    def digest(self, key: str) -> bytes:
        """A digest of the passes and the tensors under this key, equal for ranks that hold the same tokens."""
        hasher = hashlib.blake2b()
        for record in self.records:
            numbers = torch_files.array_of(self.source.path, record.get(key), f"{self.place(record)}, {key}")
            hasher.update(f"{record['forward_pass_id']} {numbers.shape} {record.get('input_ids')}".encode())
            hasher.update(np.ascontiguousarray(numbers).data)
        return hasher.digest()


def read_dump(source: Source) -> Dump:
    """The dump in a file; raises InputError."""
    data = torch_files.load(source.path)
    records = data.get("records") if isinstance(data, dict) else None
    if not isinstance(records, list) or "last_physical_to_logical_map" not in data:
        raise source.fault("a dump of the recorder has 'records' and 'last_physical_to_logical_map'")
    ranks = set()
    for at, record in enumerate(records):
        whole = isinstance(record, dict) and all(type(record.get(key)) is int for key in ("forward_pass_id", "rank"))
        if not whole or not 0 <= record["rank"] < MAX_RANKS or abs(record["forward_pass_id"]) >= 2**53:
            raise source.fault("needs whole numbers 'forward_pass_id' and 'rank'", f"record {at}")
        ranks.add(record["rank"])
    if len(ranks) != 1:
        raise source.fault("holds records of several ranks; a dump is of one" if ranks else "no forward pass was recorded")
    own = [record for record in records if record.get("gatherer_key", PRIMARY) in (PRIMARY, "child_a", "child_b")]
    if not own:
        raise source.fault(f"holds passes of {quoted(records[0]['gatherer_key'])} alone, none of the model itself")
    own.sort(key=lambda record: record["forward_pass_id"])
    return Dump(source, ranks.pop(), own, len(records) - len(own), _map(source, data["last_physical_to_logical_map"]))


def _map(source: Source, tensor: object) -> np.ndarray:
    place = "last_physical_to_logical_map"
    slots = torch_files.array_of(source.path, tensor, place)
    if slots.dtype.kind not in "iu" or slots.ndim != 2 or 0 in slots.shape:
        raise source.fault(f"must be whole numbers [layers, slots], not {slots.dtype} {list(slots.shape)}", place)
    if slots.shape[0] > MAX_LAYERS or slots.shape[1] > MAX_SLOTS or slots.size > MAX_MAP:
        raise source.fault(f"{list(slots.shape)} are more layers or slots than there can be", place)
    if slots.min() < 0 or slots.max() >= MAX_EXPERTS:
        raise source.fault(f"experts are 0 … {MAX_EXPERTS - 1}", place)
    return slots.astype(np.int64)


def read_ranks(sources: Iterable[Source]) -> Iterator[Dump]:
    """The dump of every rank, one at a time; raises InputError unless they are of different ranks of one recording."""
    reference, ranks = None, set()
    for source in sources:
        dump = read_dump(source)
        reference = reference or replace(dump, records=[])
        sizes, others = ((*each.logical_of_slot.shape, each.num_experts) for each in (dump, reference))
        if sizes != others:
            raise source.fault(
                "has {} layers, {} slots and {} experts, but {} has {}, {} and {}; give the files of one recording".format(
                    *sizes, reference.source.path.name, *others
                )
            )
        if dump.rank in ranks:
            raise source.fault(f"is a second file of rank {dump.rank}; give the files of one recording")
        ranks.add(dump.rank)
        yield dump


def find_in_maps(by_rank: Sequence[Dump]) -> Iterator[Finding]:
    """Findings on ranks that folded slots to experts by different maps, and on records that were left out."""
    reference = by_rank[0]
    if apart := [dump.rank for dump in by_rank if (dump.logical_of_slot != reference.logical_of_slot).any()]:
        yield error(
            "balancer-moved",
            f"Rank {apart[0]} ended with another placement of experts than rank {reference.rank}: the balancer moved "
            "experts while recording, and what ran before is folded by the wrong map. Record again with the balancer off.",
        )
    if drafts := sum(dump.drafts for dump in by_rank):
        text = f"{drafts} records of the draft model are left out; its layers are placed by themselves."
        yield ok("draft-model-left-out", text)


def find_copies(kept: int, copies: Sequence[int]) -> Iterator[Finding]:
    """The finding on copies.

    kept: number of ranks that are counted
    copies: ranks with the same tokens as one of these
    """
    if copies:
        ranks = ", ".join(map(str, copies[:8])) + (" …" if len(copies) > 8 else "")
        yield ok(
            "copies-dropped",
            f"{len(copies)} of {kept + len(copies)} ranks ({ranks}) recorded the very tokens of another rank, as under tensor "
            "parallelism: every token is counted once, and which rank held it is left open.",
        )


def find_missing(ranks: Sequence[int]) -> Iterator[Finding]:
    """The finding on ranks below the highest that have no file."""
    if missing := sorted(set(range(max(ranks, default=0))) - set(ranks)):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        text = f"The file of rank {missing[0]}{more} is missing: what these ranks' tokens chose is not in; add all files."
        yield warning("ranks-missing", text)


def recording_of(path: Path, pattern: re.Pattern[str] = _DUMP_OF_RANK) -> str:
    """The name of the first file of the recording. Each rank puts its own clock into the name: in a folder, the files until a
    rank comes again are one recording. pattern: of names, with the groups `time` and `rank`"""
    if not pattern.fullmatch(path.name):
        return path.name
    return _recordings(path.parent, path.parent.stat().st_mtime_ns, pattern).get(path.name, path.name)


@lru_cache(maxsize=8)
def _recordings(folder: Path, _changed: int, pattern: re.Pattern[str]) -> dict[str, str]:
    """The name of the first dump of the recording, by the name of every dump in the folder."""
    matches = [match for path in folder.iterdir() if (match := pattern.fullmatch(path.name))]
    recording, ranks, first_of = "", set(), {}
    for match in sorted(matches, key=lambda match: (float(match["time"]), int(match["rank"]))):
        if not ranks or match["rank"] in ranks:
            recording, ranks = match.string, set()
        ranks.add(match["rank"])
        first_of[match.string] = recording
    return first_of


def moe_rows(source: Source, used: np.ndarray, experts: int) -> tuple[np.ndarray, list[Finding]]:
    """(the rows to keep, int64[...], findings on the others). Without a model of these sizes, every row with tokens is an MoE
    layer; with one, the rows of its dense layers are left out.

    used: bool[decoder layer]; True for a row with tokens
    experts: logical experts per layer of the recording
    """
    model = source.model
    if (
        model is None
        or experts not in (model.experts, model.router_choices)
        or not 0 <= len(used) - model.layers <= MOST_MTP_LAYERS
    ):
        return np.flatnonzero(used), []
    expected = np.isin(np.arange(len(used)), model.moe_layers)
    extra = np.flatnonzero(used & ~expected)
    told = (
        (
            extra[extra >= model.layers],
            ok,
            "mtp-layer-left-out",
            f"left out: {model.name} has {model.layers} decoder layers, what follows them is its MTP layer, which is placed by "
            "itself.",
        ),
        (
            extra[extra < model.layers],
            warning,
            "counts-in-dense-layers",
            f"left out: dense in {model.name}, yet with tokens. SGLang has counted passes of the MTP layer in layer 0 (sglang "
            "#19812), so look whether it ran, or whether this is another model's recording.",
        ),
        (
            np.flatnonzero(expected & ~used),
            warning,
            "layers-missing",
            f"without any tokens, though {model.name} has experts there: the recorder missed it; record again, or plan without "
            "it.",
        ),
    )
    findings = [finding(code, f"{_rows(layers)} {text}") for layers, finding, code, text in told if layers.size]
    return np.flatnonzero(used & expected), findings


def _rows(layers: Iterable[int]) -> str:
    """`Layer 3` or `Layers 3, 4 and 5`, by model layer."""
    *others, last = (str(layer) for layer in layers)
    return f"Layers {', '.join(others)} and {last}" if others else f"Layer {last}"


def read_passes(sources: Sequence[Source]) -> ExpertLoad:
    """Loads by span of passes and, where ranks counted their own tokens, by rank. Raises InputError."""
    read: list[Dump] = []
    copies, digests, loads, slots_used = [], set(), {}, {}
    spans, by_step = np.empty(0), None
    for dump in read_ranks(sources):
        if not read:  # ranks pass in step, so the spans of one serve for all
            passes = np.unique([record["forward_pass_id"] for record in dump.records])
            spans = np.array([span[0] for span in split_steps(passes, dump.logical_of_slot.size)])
        physical = _count(dump, spans)
        digest = dump.digest(COUNT) if len(sources) > 1 else b""
        read.append(replace(dump, records=[]))
        if physical.any() and digest in digests:
            copies.append(dump.rank)
            continue
        digests.add(digest)
        slots_used[dump.rank] = physical.any(axis=(0, 1))
        logical = fold_slots(physical, dump.logical_of_slot, dump.num_experts)
        by_step = logical if by_step is None else by_step + logical
        loads[dump.rank] = logical.sum(axis=0)
    by_source = None if copies or _of_own_slots(sources[0], slots_used) else _by_rank(loads)
    load = by_step.sum(axis=0)
    rows, findings = moe_rows(sources[0], load.any(axis=1), load.shape[1])
    workload = expert_load(
        sources[0],
        load[rows],
        tuple(rows.tolist()),
        by_source=None if by_source is None else by_source[:, rows],
        by_step=by_step[:, rows] if len(by_step) > 1 else None,
    )
    findings = (*find_in_maps(read), *find_copies(len(loads), copies), *find_missing([*loads, *copies]), *findings)
    return replace(workload, origin=Origin(format=NAME, findings=findings))


def _count(dump: Dump, spans: np.ndarray) -> np.ndarray:
    """The counts of a rank, float64[span, decoder layer, slot]."""
    physical = np.zeros((len(spans), *dump.logical_of_slot.shape))
    for record in dump.records:
        place = f"{dump.place(record)}, {COUNT}"
        counts = torch_files.array_of(dump.source.path, record.get(COUNT), place)
        if counts.shape != dump.logical_of_slot.shape or counts.dtype.kind not in "iu":
            raise dump.source.fault(
                f"must be whole numbers {list(dump.logical_of_slot.shape)}, not {counts.dtype} {list(counts.shape)}", place
            )
        if counts.min() < 0:
            raise dump.source.fault(f"counts are at least 0, not {counts.min()}", place)
        span = np.searchsorted(spans, record["forward_pass_id"], side="right") - 1
        physical[max(int(span), 0)] += counts
    return physical


def _of_own_slots(source: Source, slots_used: dict[int, np.ndarray]) -> bool:
    """True if every rank counted its own slots alone; raises InputError if it did and ranks are missing.

    slots_used: by rank, bool[slot]
    """
    slots, highest = len(next(iter(slots_used.values()))), max(slots_used)
    if not any(used.any() for used in slots_used.values()):
        return False
    for ranks in range(max(highest + 1, 2), slots + 1):
        if slots % ranks:
            continue
        blocks = [(rank, used.reshape(ranks, -1).any(axis=1)) for rank, used in slots_used.items()]
        if all(np.array_equal(np.flatnonzero(block), [rank]) or not block.any() for rank, block in blocks):
            if missing := set(range(ranks)) - set(slots_used):
                more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
                raise source.fault(
                    "every rank counted its own slots alone (DeepEP's low-latency mode), so the files of all are needed; "
                    f"that of rank {min(missing)} is missing{more}"
                )
            return True
    return False


def _by_rank(loads: dict[int, np.ndarray]) -> np.ndarray | None:
    """The loads by rank, float64[rank, decoder layer, expert]; None for a single rank, and for too many to keep apart."""
    load = next(iter(loads.values()))
    if len(loads) < 2 or (max(loads) + 1) * load.size > MAX_SPLIT:
        return None
    by_source = np.zeros((max(loads) + 1, *load.shape))
    for rank, load in loads.items():
        by_source[rank] = load
    return by_source


def _tells(glance: Glance) -> bool:
    return b"global_physical_count" in glance.pickled or (
        b"records" in glance.pickled and b"last_physical_to_logical_map" in glance.pickled
    )


FORMATS = (Format(NAME, "SGLang's counts of every pass", "loads", _tells, read_passes, recording_of=recording_of),)
