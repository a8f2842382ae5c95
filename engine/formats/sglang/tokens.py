"""The recorder's choices of every token (`.pt`, mode `per_token`), one file a rank.

Every record adds `input_ids`, `positions`, `extend_seq_lens`, `forward_mode` and `topk_ids_of_layer` int32[decoder layer,
token, 8]: physical slots, -1 where nothing was chosen. The last axis is fixed at 8, other numbers in forks, so that models
with fewer choices are padded. Dense layers are -1 throughout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engine.finding import Finding, Origin
from engine.formats import torch_files
from engine.formats.arrays import MAX_K, routing_trace
from engine.formats.format import Format
from engine.formats.glance import Glance
from engine.formats.sglang import dumps
from engine.formats.sglang.dumps import Dump
from engine.formats.sglang.layers import moe_rows
from engine.formats.sglang.sequences import IDLE, TARGET_VERIFY, Sequences, parts_of_pass, phase_of_pass
from engine.formats.sglang.traffic import read_traffic
from engine.formats.source import Source, quoted
from engine.workload import RoutingTrace, TrafficMatrix

NAME = "sglang-tokens"
IDS = "topk_ids_of_layer"
ROUTING, TRAFFIC = "routing", "traffic"
BLOCK = 2**20
"""Choices that are folded at once."""
MOST_COMPARED = 2**22
"""Choices that are looked through for a balancer that moved: it moves the experts of all tokens, so that some show it."""


@dataclass(frozen=True)
class Pass:
    """One forward pass on one rank. experts: int16[token, decoder layer, k]; sequence: int64[token], numbered on the rank;
    phase: int8[token]; verifies: whether its tokens are drafts under verification; unrouted: how many tokens without any
    choice were left out"""

    number: int
    rank: int
    experts: np.ndarray
    sequence: np.ndarray
    phase: np.ndarray
    verifies: bool
    unrouted: int


def read_tokens(sources: Sequence[Source]) -> RoutingTrace | TrafficMatrix:
    """Tokens in the order of passes, by rank in each; or, as member `traffic`, what DeepEP sent. With a single rank its tokens
    are of no known source. Raises InputError."""
    if (member := sources[0].member) not in (None, ROUTING, TRAFFIC):
        raise sources[0].fault(f"has no workload {quoted(member)}; it holds: {ROUTING}, {TRAFFIC}")
    if member == TRAFFIC:
        return read_traffic(sources, NAME)
    read, passes, copies = _read(sources)
    if not passes:
        raise sources[0].fault("no token chose any expert: every id is −1")
    ranks_known = not copies and len(read) > 1  # a trace with its ranks shows itself which are missing
    findings = [
        *dumps.find_in_maps(read),
        *dumps.find_copies(len(read) - len(copies), copies),
        *(() if ranks_known else dumps.find_missing([dump.rank for dump in read])),
        *_find_in_passes(passes),
    ]
    return _trace(sources[0], read[0], passes, findings, ranks_known)


def _read(sources: Sequence[Source]) -> tuple[list[Dump], list[Pass], list[int]]:
    """The dumps without their records, the passes of ranks with tokens of their own, and the ranks that repeat another's."""
    dumps.check_sizes(sources)
    read: list[Dump] = []
    passes: list[Pass] = []
    digests, copies = set(), []
    for dump in dumps.read_ranks(sources):
        digest, of_rank = dump.digest(IDS) if len(sources) > 1 else b"", _passes(dump)
        read.append(replace(dump, records=[]))
        if of_rank and digest in digests:
            copies.append(dump.rank)
        else:
            digests.add(digest)
            passes += of_rank
    return read, passes, copies


def _trace(
    source: Source, reference: Dump, passes: list[Pass], findings: list[Finding], ranks_known: bool
) -> RoutingTrace:
    """The passes as one trace. ranks_known: whether the rank that recorded a token is the only one that held it"""
    passes.sort(key=lambda part: (part.number, part.rank))
    chosen = np.zeros(passes[0].experts.shape[1:], bool)
    for part in passes:
        if part.experts.shape[2] != chosen.shape[1]:
            raise source.fault(f"{part.experts.shape[2]} choices a token in some passes, {chosen.shape[1]} in others")
        chosen |= (part.experts >= 0).any(axis=0)
    rows, layer_findings = moe_rows(source, chosen.any(axis=1), reference.num_experts)
    if not rows.size:
        raise source.fault("no token chose an expert in any MoE layer of the model")
    k = int(np.flatnonzero(chosen[rows].any(axis=0))[-1]) + 1
    experts = np.empty((sum(len(part.experts) for part in passes), len(rows), k), np.int16)
    at = 0
    for part in passes:
        experts[at : at + len(part.experts)] = part.experts[:, rows, :k]
        at += len(part.experts)
    rank = np.concatenate([np.full(len(part.experts), part.rank) for part in passes])
    sequence = _in_order(rank, np.concatenate([part.sequence for part in passes]))
    trace = routing_trace(source, experts, sequence, rank if ranks_known else None, reference.num_experts)
    if reference.logical_of_slot.shape[1] > reference.num_experts:
        findings = [*findings, *_find_moves(experts)]
    return replace(
        trace,
        phase=np.concatenate([part.phase for part in passes]),
        model_layers=tuple(rows.tolist()),
        origin=Origin(format=NAME, findings=(*findings, *layer_findings)),
    )


def _passes(dump: Dump) -> list[Pass]:
    """The passes of a rank that have tokens."""
    followed, passes = Sequences(), []
    for record in dump.records:
        mode = record.get("forward_mode")
        if type(mode) is not int:
            raise dump.source.fault("needs a whole number 'forward_mode'", dump.place(record))
        place = f"{dump.place(record)}, {IDS}"
        ids = torch_files.array_of(dump.source.path, record.get(IDS), place)
        layers = len(dump.logical_of_slot)
        if ids.ndim != 3 or ids.dtype.kind not in "iu" or ids.shape[0] != layers or not 1 <= ids.shape[2] <= MAX_K:
            raise dump.source.fault(
                f"must be whole numbers [{layers} layers, tokens, k], not {ids.dtype} {list(ids.shape)}", place
            )
        tokens = ids.shape[1]
        if mode == IDLE or not tokens:
            continue
        positions = _whole_numbers(dump, record, "positions")
        if len(positions) != tokens:
            raise dump.source.fault(f"{tokens} tokens, but {len(positions)} positions", place)
        extended = None if record.get("extend_seq_lens") is None else _whole_numbers(dump, record, "extend_seq_lens")
        lengths = parts_of_pass(mode, positions, extended)
        columns = followed.follow(mode, positions, lengths), phase_of_pass(mode, lengths, extended is not None)
        experts = _fold(dump, ids, place)
        routed = (experts >= 0).any(axis=(1, 2))
        if not routed.all():
            experts, *columns = (column[routed] for column in (experts, *columns))
        if len(experts):
            verifies, unrouted = mode == TARGET_VERIFY, tokens - len(experts)
            passes.append(Pass(record["forward_pass_id"], dump.rank, experts, *columns, verifies, unrouted))
    return passes


def _whole_numbers(dump: Dump, record: dict, key: str) -> np.ndarray:
    """int64[...] of a list, or of a tensor of one axis."""
    place, value = f"{dump.place(record)}, {key}", record.get(key)
    if isinstance(value, list) and all(type(number) is int and abs(number) < 2**53 for number in value):
        return np.array(value, np.int64)
    numbers = None if isinstance(value, list) else torch_files.array_of(dump.source.path, value, place)
    if numbers is None or numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise dump.source.fault("must be a list of whole numbers", place)
    return numbers.astype(np.int64)


def _fold(dump: Dump, ids: np.ndarray, place: str) -> np.ndarray:
    """int16[token, decoder layer, k]: logical experts of int[decoder layer, token, k], slots."""
    dump.check_ids(ids, place)
    layers, tokens, k = ids.shape
    experts = np.empty((tokens, layers, k), np.int16)
    for layer, logical in enumerate(dump.logical_of_slot.astype(np.int16)):
        with_none = np.append(logical, np.int16(-1))  # which is what -1 picks
        for start in range(0, tokens, max(BLOCK // k, 1)):
            block = slice(start, start + max(BLOCK // k, 1))
            experts[block, layer] = with_none[ids[layer, block]]
    return experts


def _in_order(rank: np.ndarray, sequence: np.ndarray) -> np.ndarray:
    """int64[token]: sequences of all ranks, numbered as they first appear. sequence: int64[token], numbered on each rank"""
    _, starts, number = np.unique((rank.astype(np.int64) << 32) | sequence, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(starts))[number]


def _find_in_passes(passes: list[Pass]) -> list[Finding]:
    findings = []
    if unrouted := sum(part.unrouted for part in passes):
        message = f"{unrouted} tokens without any choice are left out: padding, or never captured."
        findings.append(Finding(severity="ok", code="tokens-without-choices", message=message))
    if verified := sum(len(part.experts) for part in passes if part.verifies):
        message = (
            f"{verified} tokens are drafts under verification (speculative decoding): those that were rejected are "
            "among them, as they were routed too, and which sequence a draft is of is a guess from its position."
        )
        findings.append(Finding(severity="ok", code="drafts-verified", message=message))
    return findings


def _find_moves(experts: np.ndarray) -> list[Finding]:
    """Tokens with the same expert twice in a layer, where experts have replicas: these were folded by another map than ran.

    experts: int16[token, layer, k]
    """
    sample = np.arange(0, len(experts), -(-experts.size // MOST_COMPARED))
    chosen = np.sort(experts[sample], axis=2)
    twice = ((chosen[:, :, 1:] == chosen[:, :, :-1]) & (chosen[:, :, 1:] >= 0)).any(axis=(1, 2))
    rows = sample[twice]
    if not rows.size:
        return []
    message = (
        f"{rows.size} of {len(sample)} tokens come out with one expert twice, which no router chooses: the balancer moved "
        "experts while recording, and the map of the dump is not the one that ran. Record again with the balancer off, or "
        "dump before it moves."
    )
    return [Finding(severity="error", code="balancer-moved", message=message, rows=(int(rows[0]), int(rows[-1]) + 1))]


def _members(path: Path) -> tuple[str, ...]:
    """None that a single file holds: traffic takes the files of all ranks."""
    return ()


def _tells(glance: Glance) -> bool:
    return b"forward_pass_id" in glance.pickled and b"input_ids" in glance.pickled


FORMATS = (
    Format(
        NAME,
        "SGLang's choices of every token",
        "routing",
        _tells,
        read_tokens,
        recording_of=dumps.recording_of,
        members=_members,
    ),
)
