"""The recorder's choices of every token (`.pt`, mode `per_token`), one file a rank.

Every record adds `input_ids`, `positions`, `extend_seq_lens`, `forward_mode` and `topk_ids_of_layer` int32[decoder layer,
token, 8]: physical slots, -1 where nothing was chosen. The last axis is fixed at 8, other numbers in forks, so that models
with fewer choices are padded. Dense layers are -1 throughout.

Sequences: the recorder notes positions, but no requests. A pass is parts of sequences one after another: one token each when
decoding, as many as `extend_seq_lens` says when extending. A part continues a sequence of this rank that ends where the part
begins: when decoding, the first such one in the order of the batch, which SGLang keeps, adding extended sequences at its end;
when extending, the one that ran last, as chunks of a prompt do. A sequence that is missing in a pass that decodes has ended,
as a rule. Between sequences of equal length, one of which has just ended, that is a guess.

Traffic: with DeepEP's normal kernels the recorder also notes, by layer, how many tokens a rank sends to each rank
(`misc_objects`). A token goes once to a rank, for however many experts there. The recorder hangs the same list into the
records of all passes and empties it at every start of one, so a dump holds the traffic of the last pass alone
(srt/eplb/expert_distribution.py, `_DetailSinglePassGatherer`).
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.formats import torch_files
from engine.formats.arrays import MAX_K, MAX_RANKS, MAX_SPLIT, first, routing_trace, traffic_matrix
from engine.formats.format import Format
from engine.formats.sglang import dumps
from engine.formats.sglang.dumps import Dump, moe_rows
from engine.formats.source import Source, error, ok, quoted, warning
from engine.workload import DECODE, PREFILL, Finding, Origin, RoutingTrace, TrafficMatrix

EXTEND, DECODING, MIXED, IDLE, TARGET_VERIFY = 1, 2, 3, 4, 5
"""SGLang's `ForwardMode` (srt/model_executor/forward_batch_info.py). Later values have changed their meaning between
versions."""
SENT = "num_tokens_per_rank"
NAME = "sglang-tokens"
IDS = "topk_ids_of_layer"
ROUTING, TRAFFIC = "routing", "traffic"
BLOCK = 2**20
"""Choices that are folded at once."""
MOST_COMPARED = 2**22
"""Choices that are searched for a balancer that moved: it moves the experts of all tokens, so that some show it."""


class Sequences:
    """The sequences of one rank, pass by pass in their order."""

    def __init__(self) -> None:
        self._running: dict[int, deque[tuple[int, int]]] = defaultdict(deque)
        """(turn, sequence) by the position that may come next; turns count parts of passes."""
        self._ended: dict[int, deque[tuple[int, int]]] = defaultdict(deque)
        self._turn_of: list[int] = []
        self._turns = self._first_running = 0

    def follow(self, mode: int, positions: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The sequence of every token, int64[token], numbered from 0.

        mode: the pass's `forward_mode`
        positions: int64[token]
        lengths: int64[part]; at least 1 each
        """
        ends = np.cumsum(lengths)
        parts = list(zip(positions[ends - lengths].tolist(), positions[ends - 1].tolist(), strict=True))
        decodes = mode in (DECODING, MIXED, TARGET_VERIFY)
        sequences = [
            self._continued(start, decodes and (mode != MIXED or length == 1))
            for (start, _), length in zip(parts, lengths.tolist(), strict=True)
        ]
        if decodes:
            self._first_running = self._turns
        # Only now: a sequence that ends in this pass cannot be continued in it.
        for sequence, (_, end), length in zip(sequences, parts, lengths.tolist(), strict=True):
            self._turn_of[sequence] = self._turns
            # Of drafts under verification, at least one is accepted.
            for following in range(end + 2 - length if mode == TARGET_VERIFY else end + 1, end + 2):
                self._running[following].append((self._turns, sequence))
            self._turns += 1
        return np.repeat(np.array(sequences, np.int64), lengths)

    def _continued(self, start: int, decodes: bool) -> int:
        """The sequence that a part continues from this position, or a new one."""
        running, ended = self._running[start], self._ended[start]
        if decodes:
            while running and running[0][0] < self._first_running:
                ended.append(running.popleft())
        for candidates, take in ((running, running.popleft if decodes else running.pop), (ended, ended.pop)):
            while candidates and start > 0:
                turn, sequence = take()
                if self._turn_of[sequence] == turn:  # it has not run since
                    return sequence
        self._turn_of.append(-1)
        return len(self._turn_of) - 1


def parts_of_pass(mode: int, positions: np.ndarray, extended: np.ndarray | None) -> np.ndarray:
    """The number of tokens in each part of a pass, int64[part].

    mode: the pass's `forward_mode`
    positions: int64[token]
    extended: int64[part] or None; the pass's `extend_seq_lens`
    """
    tokens = len(positions)
    if mode == DECODING:
        return np.ones(tokens, np.int64)
    if extended is not None and ((extended >= 0) & (extended <= tokens)).all() and extended.sum() == tokens:
        return extended[extended > 0]
    # Drafts under verification: a run of positions is of one sequence.
    starts = np.flatnonzero(np.diff(positions, prepend=positions[0] - 2) != 1)
    return np.diff(starts, append=tokens)


def phase_of_pass(mode: int, lengths: np.ndarray, extends: bool) -> np.ndarray:
    """The phase of every token, int8[token], `PREFILL` or `DECODE`. In a mixed pass, parts of one token are taken to decode.

    mode: the pass's `forward_mode`
    lengths: int64[part]
    extends: True if the pass says how many tokens it extends sequences by
    """
    if mode == MIXED:
        phase = np.where(lengths == 1, DECODE, PREFILL)
    else:
        prefills = mode == EXTEND or (mode not in (DECODING, TARGET_VERIFY) and extends)
        phase = np.full(len(lengths), PREFILL if prefills else DECODE)
    return np.repeat(phase.astype(np.int8), lengths)


def read_traffic(sources: Sequence[Source], name: str) -> TrafficMatrix:
    """The dispatch between all ranks, in every layer that has any. Raises InputError, also if the file of a rank is missing.

    name: of the format
    """
    amounts, passes, written = None, 0, 0
    senders: set[int] = set()
    for dump in dumps.read_ranks(sources):
        senders.add(dump.rank)
        lists = {id(record["misc_objects"]): record for record in dump.records if record.get("misc_objects")}
        passes, written = max(passes, len(dump.records)), max(written, len(lists))
        for record in lists.values():
            for layer, tokens in _rows(dump, record):
                if amounts is None:
                    layers, ranks = len(dump.logical_of_slot), len(tokens)
                    if not 2 <= ranks <= MAX_RANKS or layers * ranks * ranks > MAX_SPLIT:
                        said = f"traffic of {layers} layers between {ranks} ranks is more than can be planned for"
                        raise dump.source.fault(said)
                    amounts = np.zeros((layers, ranks, ranks))
                if len(tokens) != amounts.shape[1] or dump.rank >= len(tokens) or layer >= len(amounts):
                    raise dump.source.fault(
                        f"another number of ranks or layers than elsewhere, {len(tokens)}", dump.place(record)
                    )
                amounts[layer, dump.rank] += tokens
    if amounts is None:
        raise sources[0].fault("holds no traffic (misc_objects): only DeepEP's normal kernels note it")
    if missing := set(range(amounts.shape[1])) - senders:
        raise sources[0].fault(
            f"traffic between {amounts.shape[1]} ranks needs the files of all; that of rank {min(missing)} is missing"
        )
    matrix = traffic_matrix(sources[0], amounts[amounts.any(axis=(1, 2))] * sources[0].bytes_per_token)
    findings = ()
    if written < passes:
        message = (
            f"The traffic is of {written} of {passes} passes: SGLang's recorder keeps one list for all, so only the "
            "last pass is left. For more, record the tokens and let the studio count what they send."
        )
        findings = (warning("traffic-of-last-pass", message),)
    return replace(matrix, origin=Origin(format=name, findings=findings))


def _rows(dump: Dump, record: dict) -> list[tuple[int, np.ndarray]]:
    """(decoder layer, float64[dst]) of every dispatch that a record notes."""
    rows = []
    for entry in record["misc_objects"] if isinstance(record["misc_objects"], list) else [None]:
        layer = entry.get("layer_id") if isinstance(entry, dict) else None
        counts = entry.get(SENT) if isinstance(entry, dict) else None
        whole = isinstance(counts, list) and all(type(count) is int and 0 <= count < 2**53 for count in counts)
        if type(layer) is not int or layer < 0 or not whole:
            raise dump.source.fault(
                f"needs a 'layer_id' and a list of whole numbers {SENT!r}", f"{dump.place(record)}, misc_objects"
            )
        rows.append((layer, np.array(counts, np.float64)))
    return rows


@dataclass(frozen=True)
class Pass:
    """One forward pass on one rank.

    experts: int16[token, decoder layer, k]
    sequence: int64[token]; numbered on the rank
    phase: int8[token]
    verifies: True if its tokens are drafts under verification
    unrouted: number of tokens without any choice, which were left out
    """

    number: int
    rank: int
    experts: np.ndarray
    sequence: np.ndarray
    phase: np.ndarray
    verifies: bool
    unrouted: int


def read_tokens(sources: Sequence[Source]) -> RoutingTrace | TrafficMatrix:
    """The tokens in the order of passes, by rank in each; or, as member `traffic`, DeepEP's dispatch. With a single rank its
    tokens are of no known source. Raises InputError."""
    if (member := sources[0].member) not in (None, ROUTING, TRAFFIC):
        raise sources[0].fault(f"has no workload {quoted(member)}; it holds: {ROUTING}, {TRAFFIC}")
    if member == TRAFFIC:
        return read_traffic(sources, NAME)
    if (total := sum(source.path.stat().st_size for source in sources)) > dumps.MAX_BYTES:
        raise sources[0].fault(
            f"with the other ranks' {total / 1024**2:.0f} MB, more than the limit of {dumps.MAX_BYTES // 1024**2} MB; record "
            "fewer passes"
        )
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


def _trace(source: Source, reference: Dump, passes: list[Pass], findings: list[Finding], ranks_known: bool) -> RoutingTrace:
    """The passes as one trace. ranks_known: True if the rank that recorded a token is the only one that held it"""
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
    # Numbered on every rank until here, from here on through all as they first appear.
    own = (rank.astype(np.int64) << 32) | np.concatenate([part.sequence for part in passes])
    _, starts, number = np.unique(own, return_index=True, return_inverse=True)
    sequence = np.argsort(np.argsort(starts))[number]
    trace = routing_trace(source, experts, sequence, rank if ranks_known else None, reference.num_experts)
    if reference.logical_of_slot.shape[1] > reference.num_experts:
        findings = [*findings, *_find_moves(experts)]
    origin = Origin(format=NAME, findings=(*findings, *layer_findings))
    return replace(
        trace, phase=np.concatenate([part.phase for part in passes]), model_layers=tuple(rows.tolist()), origin=origin
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
    """A list, or a tensor of one axis, as int64[...]; raises InputError."""
    place, value = f"{dump.place(record)}, {key}", record.get(key)
    if isinstance(value, list) and all(type(number) is int and abs(number) < 2**53 for number in value):
        return np.array(value, np.int64)
    numbers = None if isinstance(value, list) else torch_files.array_of(dump.source.path, value, place)
    if numbers is None or numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise dump.source.fault("must be a list of whole numbers", place)
    return numbers.astype(np.int64)


def _fold(dump: Dump, ids: np.ndarray, place: str) -> np.ndarray:
    """The logical experts, int16[token, decoder layer, k], of slots, int[decoder layer, token, k]; raises InputError."""
    layers, tokens, k = ids.shape
    slots = dump.logical_of_slot.shape[1]
    spare = dump.source.zero_experts  # which have no slot
    if ids.size and (ids.min() < -1 or ids.max() >= slots + spare):
        slot = ids[first((ids < -1) | (ids >= slots + spare))]
        raise dump.source.fault(f"slot {slot} is out of range, slots are 0 … {slots - 1}", place)
    experts = np.empty((tokens, layers, k), np.int16)
    for layer, logical in enumerate(dump.logical_of_slot.astype(np.int16)):
        zeros = np.arange(dump.num_experts, dump.num_experts + spare)
        with_none = np.concatenate([logical, zeros, [-1]]).astype(np.int16)  # -1 picks the last
        for start in range(0, tokens, max(BLOCK // k, 1)):
            block = slice(start, start + max(BLOCK // k, 1))
            experts[block, layer] = with_none[ids[layer, block]]
    return experts


def _find_in_passes(passes: list[Pass]) -> Iterator[Finding]:
    if unrouted := sum(part.unrouted for part in passes):
        text = f"{unrouted} tokens without any choice are left out: padding, or never captured."
        yield ok("tokens-without-choices", text)
    if verified := sum(len(part.experts) for part in passes if part.verifies):
        yield ok(
            "drafts-verified",
            f"{verified} tokens are drafts under verification (speculative decoding): those that were rejected are "
            "among them, as they were routed too, and which sequence a draft is of is a guess from its position.",
        )


def _find_moves(experts: np.ndarray) -> Iterator[Finding]:
    """The finding on tokens with the same expert twice in a layer of replicated experts, which another map than ran folded.

    experts: int16[token, layer, k]
    """
    sample = np.arange(0, len(experts), -(-experts.size // MOST_COMPARED))
    chosen = np.sort(experts[sample], axis=2)
    twice = ((chosen[:, :, 1:] == chosen[:, :, :-1]) & (chosen[:, :, 1:] >= 0)).any(axis=(1, 2))
    rows = sample[twice]
    if rows.size:
        yield error(
            "balancer-moved",
            f"{rows.size} of {len(sample)} tokens come out with one expert twice, which no router chooses: the balancer moved "
            "experts while recording, and the map of the dump is not the one that ran. Record again with the balancer off, or "
            "dump before it moves.",
            rows=(int(rows[0]), int(rows[-1]) + 1),
        )


FORMATS = (
    Format(
        NAME,
        "SGLang's choices of every token",
        "routing",
        lambda glance: b"forward_pass_id" in glance.pickled and b"input_ids" in glance.pickled,
        read_tokens,
        recording_of=dumps.recording_of,
        members=lambda path: (),  # a single file holds none: traffic takes the files of all ranks
    ),
)
