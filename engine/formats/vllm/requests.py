"""Routing that was recorded request by request, as one trace; and such requests in `.npz` archives.

An archive holds one request: `routed_experts` int[token, layer, k] as vLLM's offline `CompletionOutput` has it, optionally
`prompt_token_ids`, which say how many of the tokens are of the prompt, and `num_cached_tokens`, of which a cache held the
first.
"""

import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.errors import InputError
from engine.formats.arrays import model_layers_of, routing_trace
from engine.formats.format import Format, Glance
from engine.formats.numpy_files import array_names, read_member
from engine.formats.routed_experts import CACHED, say_cached
from engine.formats.source import MAX_UNPACKED_BYTES, Source, in_order, one_clear_line, warning, without_ids
from engine.workload import DECODE, PREFILL, Finding, Origin, RoutingTrace

NAME = "npz-requests"
_EXPERTS, _PROMPT = "routed_experts", "prompt_token_ids"


@dataclass(frozen=True)
class Request:
    """The routing of one request, or of one choice of its answer.

    experts: int[row, layer, k]; -1 = no choice; rows of the prompt first
    prompt_rows: number of rows of the prompt; None: the recording does not say
    source, place: the file and the place in it, for messages
    """

    experts: np.ndarray
    prompt_rows: int | None
    source: Source
    place: str = ""


def trace_of_requests(requests: Iterable[Request], format: str, findings: tuple[Finding, ...] = ()) -> RoutingTrace:
    """One trace with a sequence for each request in their order; with phases if every request says where its prompt ends.
    Layers that the open model knows as dense are left out.

    Raises InputError if requests differ in layers or k, or hold more than 2 GB together.
    """
    held: list[Request] = []
    size = 0
    for request in requests:
        if request.experts.ndim != 3 or 0 in request.experts.shape:
            raise request.source.fault(
                f"must be [tokens, layers, k] with at least one of each, not {list(request.experts.shape)}", request.place
            )
        if held and request.experts.shape[1:] != held[0].experts.shape[1:]:
            raise request.source.fault(
                f"has {_sizes(request)}, but the first request {_sizes(held[0])}; give the files of one model", request.place
            )
        if (size := size + request.experts.nbytes) > MAX_UNPACKED_BYTES:
            raise request.source.fault(
                f"all requests together hold more than {MAX_UNPACKED_BYTES // 1024**3} GB; give fewer requests", request.place
            )
        held.append(request)
    source = held[0].source
    rows = np.array([len(request.experts) for request in held])
    experts = np.concatenate([request.experts for request in held])
    ends = np.cumsum(rows)

    def place(index: tuple[int, ...]) -> str:
        number = int(np.searchsorted(ends, index[0], side="right"))
        request = held[number]
        row = index[0] - int(ends[number]) + len(request.experts)
        file = "" if request.source.path == held[0].source.path else request.source.path.name
        return ", ".join(part for part in (file, request.place, f"token {row}, layer {index[1]}") if part)

    trace = routing_trace(source, experts, np.repeat(np.arange(len(held)), rows), place=place)
    if silent := sum(request.prompt_rows is None for request in held):
        phase, which = None, "None" if silent == len(held) else f"{len(held) - silent} alone"
        unknown = warning(
            "phase-unknown",
            f"{which} of {len(held)} requests says how long its prompt is, in counts that its rows fit, so prefill and decode "
            "cannot be told apart; keep the answers' usage, or prompt_token_ids, when recording.",
        )
        findings = (*findings, unknown)
    else:
        row_of_token = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
        prompt = np.repeat([request.prompt_rows for request in held], rows)
        phase = np.where(row_of_token < prompt, PREFILL, DECODE).astype(np.int8)
    origin = Origin(format=format, findings=findings)
    if (numbers := model_layers_of(source, trace.layers)) is not None:
        moe = [layer for layer, number in enumerate(numbers) if number in source.model.moe_layers]
        kept = trace.experts if len(moe) == trace.layers else np.ascontiguousarray(trace.experts[:, moe])
        trace = replace(trace, experts=kept, model_layers=tuple(numbers[layer] for layer in moe))
    return replace(trace, phase=phase, origin=origin)


def _sizes(request: Request) -> str:
    return f"{request.experts.shape[1]} layers and k = {request.experts.shape[2]}"


def _request(source: Source) -> tuple[Request, int]:
    """(the request in an archive without the rows that a cache held, their number)"""
    with one_clear_line(source.path), zipfile.ZipFile(source.path) as archive:
        names = array_names(source.path, archive)

        def size_of(name: str, number: bool) -> int | None:
            try:
                array = read_member(source.path, archive, name) if name in names else None
            except InputError:  # texts or objects; they alone are not worth refusing the request
                return None
            if array is None or not number:
                return None if array is None else array.size
            return int(array.reshape(-1)[0]) if array.size == 1 and array.dtype.kind in "iu" else None

        experts, prompt = read_member(source.path, archive, _EXPERTS), size_of(_PROMPT, False)
        held = next((held for name in CACHED if (held := size_of(name, True)) is not None), 0)
    experts = experts[:, :, None] if experts.ndim == 2 else experts
    rows = len(experts) if experts.ndim == 3 else 0
    cached = max(min(held, rows - 1 if prompt is None else prompt, rows), 0)
    return Request(experts[cached:], None if prompt is None else prompt - cached, source), cached


def _read(sources: Sequence[Source]) -> RoutingTrace:
    read = [_request(source) for source in in_order(sources)]
    kept, cached = [request for request, held in read if len(request.experts) or not held], sum(held for _, held in read)
    if not kept:
        raise sources[0].fault("all rows are of prefixes that a cache held (num_cached_tokens)")
    return trace_of_requests(kept, NAME, say_cached(cached, cached + sum(len(request.experts) for request in kept)))


def _tells(glance: Glance) -> bool:
    names = glance.archived
    return f"{_EXPERTS}.npy" in names and "experts.npy" not in names and all(name.endswith(".npy") for name in names)


FORMATS = (Format(NAME, "the routing of single requests", "routing", _tells, _read, without_ids),)
