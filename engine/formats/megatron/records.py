"""The records of Megatron-Core's router tracer (megatron/core/transformer/moe/router_trace.py), one JSON object a line for
every (step, block, layer) of a rank:

{"step", "stage": "pre_dispatch", "block": "decoder" | "mtp", "layer", "rank", "num_tokens", "topk", "top_indices": [[k ids]
× tokens]}, of MTP also "mtp_idx", and "hs_…" and "logit_…" if hidden states and logits were saved with it.

Two numberings of layers share this schema: forward hooks write the module's index, from 0 within the pipeline stage; the
routing-replay sink writes `layer_number`, from 1 through all stages. Pipeline parallelism is the outermost in Megatron's order
of ranks (tp-cp-ep-dp-pp), so with P stages the first of P equal blocks of ranks is the first stage. A number of stages that the
recording or the model proves is taken; one that they leave open is asked for.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.formats.arrays import MAX_EXPERTS, MAX_K, MAX_LAYERS, MAX_RANKS
from engine.formats.json_lines import lines, parse
from engine.formats.number_lists import array_of_text
from engine.formats.source import MAX_CONTAINERS, Source, quoted
from engine.model import MoEModel

BLOCKS = ("decoder", "mtp")
_LIMITS = {"step": 2**31, "layer": MAX_LAYERS, "rank": MAX_RANKS}
_CHOICES, _KEY = "top_indices", b'"top_indices"'
_AT_ONCE = 4 * 1024**2
"""Bytes of lines that are parsed together."""

Line = tuple[int, bytes]
"""A line's number from 1, and its text."""
_TELLING = 64
"""Choices in a row that two different layers do not make alike by chance."""


@dataclass(frozen=True)
class Records:
    """The records of one rank, in the order of its file.

    step, layer, tokens: int64[record]
    is_mtp: bool[record]
    experts: int16[row, k]; the tokens of one record after another
    sidecars: True if hidden states or logits were saved with it
    """

    source: Source
    rank: int
    step: np.ndarray
    layer: np.ndarray
    tokens: np.ndarray
    is_mtp: np.ndarray
    experts: np.ndarray
    sidecars: bool

    @property
    def start(self) -> np.ndarray:
        """The row at which each record begins, int64[record]."""
        return np.cumsum(self.tokens) - self.tokens


def read_records(source: Source) -> Records:
    """All records of a rank's file; raises InputError that names the line at fault."""
    heads, experts, rank, k = [], [], None, None
    for chunk in _chunks(source):
        if k is None:
            firsts = (_rows(source, f"line {number}", parse(source.path, number, text))[:1] for number, text in chunk)
            k = next((len(rows[0]) for rows in firsts if rows), None)
        records, chosen = _parsed_together(chunk, k) or _parsed(source, chunk, k)
        experts.append(chosen)
        for (number, _), record in zip(chunk, records, strict=True):
            heads.append(_head(source, f"line {number}", record))
            rank = record["rank"] if rank is None else rank
            if record["rank"] != rank:
                raise source.fault(
                    f"is of rank {record['rank']}, the lines before of rank {rank}; give every rank's file", f"line {number}"
                )
    if rank is None or k is None:
        raise source.fault("no record has any tokens")
    step, layer, tokens, is_mtp, sidecars = np.array(heads, np.int64).T
    return Records(source, rank, step, layer, tokens, is_mtp.astype(bool), np.concatenate(experts), bool(sidecars.any()))


def _chunks(source: Source) -> Iterator[list[Line]]:
    chunk, size = [], 0
    for number, line in lines(source.path):
        chunk.append((number, line))
        size += len(line)
        if size > _AT_ONCE:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _parsed_together(chunk: list[Line], k: int | None) -> tuple[list[dict], np.ndarray] | None:
    """(records with numbers of tokens for their choices, the choices, int16[row, k]) of lines as the tracer writes them; None
    for others. The choices, nearly all of a file, are read as one list, thirty times as fast as JSON is."""
    if k is None:
        return None
    heads, bodies = [], []
    for _, line in chunk:
        start, end = line.find(b"[", line.find(_KEY)), line.rfind(b"]") + 1
        bodies.append(line[start:end])
        heads.append(line[:start] + b"null" + line[end:])
    together = b"[%b]" % b",".join(heads)
    if together.count(b"[") + together.count(b"{") > MAX_CONTAINERS:
        return None
    try:
        records = json.loads(together)
    except (ValueError, RecursionError):
        return None
    if len(records) != len(chunk) or not all(isinstance(record, dict) for record in records):
        return None
    tokens = [record.get("num_tokens") for record in records if record.get(_CHOICES, 0) is None]
    if len(tokens) < len(chunk) or not all(type(number) is int and number >= 0 for number in tokens):
        return None
    bodies, numbers = [body for body in bodies if body != b"[]"], [number for number in tokens if number]
    if [body.count(b"[") - 1 for body in bodies] != numbers:
        return None
    if not all(body.startswith(b"[[") and body.endswith(b"]]") for body in bodies):
        return None
    chosen = array_of_text(b"[%b]" % b",".join(body[1:-1] for body in bodies), 2)
    if chosen is None or chosen.shape[1] != k or chosen.min() < -1 or chosen.max() >= MAX_EXPERTS:
        return None
    return [{**record, _CHOICES: record["num_tokens"]} for record in records], chosen.astype(np.int16)


def _parsed(source: Source, chunk: list[Line], k: int | None) -> tuple[list[dict], np.ndarray]:
    """As `_parsed_together`, for any lines, one after another; raises InputError at the first that breaks a rule."""
    records, rows = [], []
    for number, line in chunk:
        place, record = f"line {number}", parse(source.path, number, line)
        chosen = _rows(source, place, record)
        for token, row in enumerate(chosen):
            if len(row) != k:
                raise source.fault(f"token {token} has {len(row)} experts, others {k}", place)
            if wrong := [expert for expert in row if type(expert) is not int or not -1 <= expert < MAX_EXPERTS]:
                raise source.fault(f"token {token} chose expert {quoted(wrong[0])}; ids are 0 … {MAX_EXPERTS - 1}", place)
        rows += chosen
        records.append({**record, _CHOICES: len(chosen)})
    return records, np.array(rows, np.int16).reshape(-1, k or 1)


def _rows(source: Source, place: str, record: dict) -> list[list]:
    """The choices of a record: lists of one length from 1 to the most there may be; raises InputError."""
    rows = record.get(_CHOICES)
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise source.fault(f"needs {_CHOICES}, the k expert ids of every token", place)
    if rows and not 1 <= len(rows[0]) <= MAX_K:
        raise source.fault(f"a token has {len(rows[0])} experts; between 1 and {MAX_K} are read", place)
    return rows


def _head(source: Source, place: str, record: dict) -> tuple[int, int, int, bool, bool]:
    """(step, layer, tokens, True for MTP, True if saved with sidecars) of a record, which has the number of tokens in place of
    its choices; raises InputError."""
    for name, limit in _LIMITS.items():
        if not (type(record.get(name)) is int and 0 <= record[name] < limit):
            raise source.fault(f"{name} must be a whole number from 0 to {limit - 1}", place)
    if (block := record.get("block", BLOCKS[0])) not in BLOCKS:
        raise source.fault(f"block must be {' or '.join(BLOCKS)}, not {quoted(block)}", place)
    tokens = record[_CHOICES]
    if record.get("num_tokens", tokens) != tokens:
        raise source.fault(f"num_tokens is {quoted(record['num_tokens'])}, but {_CHOICES} has {tokens}", place)
    return (record["step"], record["layer"], tokens, block == BLOCKS[1], "hs_offset" in record or "logit_offset" in record)


@dataclass(frozen=True)
class Stages:
    """Pipeline stages.

    layers: those recorded in each stage, ascending, as numbered there
    model_layers: the model's layers of all stages in order, None if the recording does not tell
    """

    layers: tuple[tuple[int, ...], ...]
    model_layers: tuple[int, ...] | None


def pipeline_stages(source: Source, ranks: Sequence[Records]) -> Stages:
    """The stages of ranks, which ascend; raises InputError, which says how to decide, if the recording leaves it open."""
    possible = {len(stages): stages for stages in _possible(ranks)}
    if source.stages is not None:
        if source.stages not in possible:
            can = " or ".join(map(str, possible)) or "no number"
            raise source.fault(f"{source.stages} pipeline stages do not fit its {len(ranks)} ranks; {can} would")
        possible = {source.stages: possible[source.stages]}
    if source.model is not None:
        return _of_model(source, possible, source.model)
    if len(possible) > 1:
        possible = {count: stages for count, stages in possible.items() if _counted_through(stages)} or possible
    if len(possible) != 1:
        raise source.fault(_open(possible, ranks))
    ((stages),) = possible.values()
    known = stages[0] if len(stages) == 1 and stages[0][0] == 0 else None
    return Stages(stages, known)


def _of_model(source: Source, possible: dict[int, tuple[tuple[int, ...], ...]], model: MoEModel) -> Stages:
    explained = [Stages(stages, layers) for stages in possible.values() if (layers := _layers_in(stages, model)) is not None]
    if not explained:
        recorded = sorted({layer for stages in possible.values() for stage in stages for layer in stage})
        seen = f"layers {recorded[0]} … {recorded[-1]}" if recorded else "different layers on its ranks"
        raise source.fault(
            f"has {seen}, which no number of pipeline stages makes the {len(model.moe_layers)} MoE layers of {model.name}; "
            "give the files of all ranks, and the model that was recorded"
        )
    if len(explained) > 1:
        raise source.fault(_open(possible, ()))
    return explained[0]


def _open(possible: dict[int, object], ranks: Sequence[Records]) -> str:
    if not possible:
        return f"its {len(ranks)} ranks recorded different layers, in no order of pipeline stages; give the files of all ranks"
    counts = " or ".join(map(str, possible))
    return (
        f"may be of {counts} pipeline stages: its layers may be counted within a stage; say how many there were (--stages, "
        "pipeline-model-parallel-size), or open the model (--model)"
    )


def _possible(ranks: Sequence[Records]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The layers of every stage, for each number of stages that the recording does not rule out."""
    layers = [tuple(np.unique(records.layer[~records.is_mtp]).tolist()) for records in ranks]
    whole = [records.rank for records in ranks] == list(range(len(ranks)))
    with_mtp = [place for place, records in enumerate(ranks) if records.is_mtp.any()]
    for count in (1, *range(2, len(ranks) + 1 if whole else 0)):
        if len(ranks) % count:
            continue
        width = len(ranks) // count
        blocks = [set(layers[at : at + width]) for at in range(0, len(ranks), width)]
        if any(len(block) != 1 or () in block for block in blocks):
            continue
        if with_mtp and with_mtp != list(range(len(ranks) - width, len(ranks))):
            continue  # the MTP layers are on the last stage
        if all(_one_token_stream([ranks[at] for at in range(place, len(ranks), width)]) for place in range(width)):
            yield tuple(block.pop() for block in blocks)


def _one_token_stream(stages: Sequence[Records]) -> bool:
    """True if these ranks may be stages that the same tokens went through: as many of them in every step, and other choices."""
    first = {}
    for records in stages:
        lowest = np.flatnonzero((records.layer == records.layer[~records.is_mtp].min()) & ~records.is_mtp)
        tokens: dict[int, list[int]] = {}
        for step, number in zip(records.step[lowest].tolist(), records.tokens[lowest].tolist(), strict=True):
            tokens.setdefault(step, []).append(number)
        start, number = records.start[lowest[0]], records.tokens[lowest[0]]
        choices = records.experts[start : start + number]
        for others, same in first.values():
            for step in tokens.keys() & others.keys():
                # The last micro-batches may be missing if a run was stopped.
                if any(mine != theirs for mine, theirs in zip(tokens[step], others[step], strict=False)):
                    return False
            if choices.size >= _TELLING and np.array_equal(choices, same):
                return False  # the same layer of the same tokens
        first[records.rank] = tokens, choices
    return True


def _counted_through(stages: tuple[tuple[int, ...], ...]) -> bool:
    """True if layers are counted through all stages: consecutive, and without 0. Counted within stages, each would have to
    begin with dense layers of its own."""
    numbers = [layer for stage in stages for layer in stage]
    return numbers[0] > 0 and numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def _layers_in(stages: tuple[tuple[int, ...], ...], model: MoEModel) -> tuple[int, ...] | None:
    """The model layers that the stages recorded, None unless they are all MoE layers of the model."""
    numbers, moe = tuple(layer for stage in stages for layer in stage), model.moe_layers
    if numbers == tuple(layer + 1 for layer in moe):
        return moe
    taken, end = 0, 0
    for stage in stages:
        own = moe[taken : taken + len(stage)]
        if len(own) < len(stage):
            return None
        offset = own[0] - stage[0]
        # Stages begin after the last layer of the one before, the first at the model's first layer.
        if offset < end or (not taken and offset) or tuple(layer - offset for layer in own) != stage:
            return None
        taken, end = taken + len(stage), own[-1] + 1
    return moe if taken == len(moe) else None
