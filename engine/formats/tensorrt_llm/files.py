"""The files of TensorRT-LLM's expert statistics (tensorrt_llm/_torch/expert_statistic.py), each held to the recorder's form:

* `meta_info.json`: `num_experts`, the ids counted, which are slots while a load balancer is on; `num_experts_per_token`; with
  `EXPERT_STATISTIC_DUMP_DISPATCH`, which a fork has, `ep_size` and `experts_per_rank`
* `rank{r}.safetensors`: int64[num_experts] under "{iteration}_{layer}", token copies that rank r sent to every id
* `rank{r}_numtokens.json`, of the fork: {"{iteration}_{layer}": tokens of rank r}
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import safetensors

from engine.formats.arrays import MAX_EXPERTS, MAX_LAYERS, MAX_RANKS, MAX_SLOTS, first
from engine.formats.format import MAX_SAFETENSORS_HEADER, Glance
from engine.formats.source import Source, quoted, read_json_object

_KEY = re.compile(r"([0-9]{1,9})_([0-9]{1,4})")
_RANK = re.compile(r"rank(\d{1,6})(?!\d)")
_NUMBERS = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4")}
File = TypeVar("File")
_META_KEYS = frozenset({"num_experts", "num_experts_per_token", "ep_size", "experts_per_rank"})


@dataclass(frozen=True)
class Meta:
    """The recording's sizes.

    ids: number of ids that are counted
    experts_per_token: k
    ranks: number that the experts are spread over, None if unsaid
    """

    ids: int
    experts_per_token: int
    ranks: int | None


@dataclass(frozen=True)
class RankFile:
    """A rank's file of counts, and the records that its header names. iteration, layer: int64[record]"""

    source: Source
    iteration: np.ndarray
    layer: np.ndarray


@dataclass(frozen=True)
class Counts:
    """The counts of one rank.

    iteration, layer: int64[record]
    copies: int64[record, id]
    """

    iteration: np.ndarray
    layer: np.ndarray
    copies: np.ndarray


@dataclass(frozen=True)
class Files:
    """The files of one recording by their kind, those of ranks by rank. further: files of tensors that are no counts"""

    meta: Source | None
    counts: dict[int, RankFile]
    tokens: dict[int, Source]
    further: tuple[Source, ...]


def is_counts(glance: Glance) -> bool:
    """True if every tensor is named after an iteration and a layer."""
    return bool(glance.tensors) and all(_KEY.fullmatch(name) for name in glance.tensors)


def is_meta(glance: Glance) -> bool:
    return {"num_experts", "num_experts_per_token"} <= glance.keys <= _META_KEYS


def is_tokens(glance: Glance) -> bool:
    if not isinstance(glance.json, dict) or not glance.json:
        return False
    return all(_KEY.fullmatch(key) and type(tokens) is int for key, tokens in glance.json.items())


def sort_files(sources: Sequence[Source]) -> Files:
    """The files by kind and rank; raises InputError if two are of one rank, or none has counts."""
    meta, counts, tokens, further = [], {}, {}, []
    for source in sources:
        glance = Glance(source.path)
        if is_meta(glance):
            meta.append(source)
        elif not glance.tensors:
            _add(tokens, source, source)
        elif _has_rows(source):
            keys = np.array([name.split("_") for name in glance.tensors if _KEY.fullmatch(name)], np.int64).reshape(-1, 2)
            _add(counts, source, RankFile(source, *keys.T))
        else:
            further.append(source)
    if len(meta) > 1:
        raise meta[1].fault("is a second meta_info.json; give the files of one recording")
    if not counts:
        raise sources[0].fault("the counts are missing; give the rank….safetensors files beside it too")
    return Files(meta[0] if meta else None, dict(sorted(counts.items())), tokens, tuple(further))


def _has_rows(source: Source) -> bool:
    """True if the tensors are one count an id; forks also save pairs of experts and every token's choices under these names."""
    try:
        with safetensors.safe_open(source.path, framework="numpy") as file:
            return len(file.get_slice(next(iter(file.keys()))).get_shape()) == 1
    except safetensors.SafetensorError:
        return True  # `read_counts` names the fault


def _add(files: dict[int, File], source: Source, file: File) -> None:
    matched = _RANK.search(source.path.stem)
    rank = int(matched[1]) if matched else 0
    if rank >= MAX_RANKS:
        raise source.fault(f"rank {rank} is out of range, at most {MAX_RANKS} ranks are read")
    if rank in files:
        raise source.fault(f"is a second file of rank {rank}; give the files of one recording")
    files[rank] = file


def read_meta(source: Source) -> Meta:
    """The content of `meta_info.json`; raises InputError."""
    data = read_json_object(source.path)
    for key, most in (("num_experts", MAX_EXPERTS), ("num_experts_per_token", MAX_EXPERTS), ("ep_size", MAX_RANKS)):
        if key in data and not (type(data[key]) is int and 1 <= data[key] <= most):
            raise source.fault(f"{key} must be a whole number from 1 to {most}, not {quoted(data[key])}")
    return Meta(data["num_experts"], data["num_experts_per_token"], data.get("ep_size"))


def read_counts(source: Source, ids: int | None) -> Counts:
    """The counts of a rank. Raises InputError, also for records that are no counts.

    ids: number that each record must have, None: as many as the first
    """
    with source.path.open("rb") as file:
        if int.from_bytes(file.read(8), "little") > MAX_SAFETENSORS_HEADER:
            raise source.fault(f"has a header of more than {MAX_SAFETENSORS_HEADER // 1024**2} MB")
        file.seek(0)
        try:
            tensors = safetensors.deserialize(file.read())
        except safetensors.SafetensorError as error:
            raise source.fault(f"is damaged ({str(error).removeprefix('Error while deserializing: ')})") from None
    if ids is None:
        ids = (tensors[0][1]["shape"] or [0])[0]
        if not 1 <= ids <= MAX_SLOTS:
            raise source.fault(f"counts {ids} ids; between 1 and {MAX_SLOTS} are read", quoted(tensors[0][0]))
    for name, tensor in tensors:
        if not _KEY.fullmatch(name):
            raise source.fault("a tensor must be named ITERATION_LAYER", quoted(name))
        if tensor["shape"] != [ids] or tensor["dtype"] not in _NUMBERS:
            raise source.fault(f"must be int64 [{ids}], one count an id, not {tensor['dtype']} {tensor['shape']}", quoted(name))
    iteration, layer = np.array([name.split("_") for name, _ in tensors], np.int64).T
    copies = np.empty((len(tensors), ids), np.int64)
    for record, (_, tensor) in enumerate(tensors):
        copies[record] = np.frombuffer(tensor["data"], _NUMBERS[tensor["dtype"]])
    if layer.max(initial=0) >= MAX_LAYERS:
        raise source.fault(f"layer {layer.max()} is out of range, at most {MAX_LAYERS} layers are read")
    if (faulty := (copies < 0) | (copies >= 2**53)).any():
        record, place = first(faulty)
        text = f"iteration {iteration[record]}, layer {layer[record]}, id {place}"
        raise source.fault(f"a count must be at least 0, not {copies[record, place]}", text)
    return Counts(iteration, layer, copies)


def read_tokens(source: Source) -> dict[tuple[int, int], int]:
    """Tokens that a rank routed, by (iteration, layer); raises InputError."""
    tokens = {}
    for key, number in read_json_object(source.path).items():
        matched = _KEY.fullmatch(key)
        if not matched or type(number) is not int or number < 0:
            raise source.fault(f"needs a number of tokens under ITERATION_LAYER, not {quoted(number)}", quoted(key))
        tokens[int(matched[1]), int(matched[2])] = number
    return tokens
