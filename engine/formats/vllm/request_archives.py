"""Routing of single requests in `.npz` archives, one a request: `routed_experts` int[token, layer, k] as vLLM's offline
`CompletionOutput` holds it, optionally `prompt_token_ids`, which say how many of the tokens are of the prompt."""

import zipfile
from collections.abc import Sequence

from engine.errors import InputError
from engine.formats.format import Format
from engine.formats.glance import Glance
from engine.formats.numpy_files import array_names, read_member
from engine.formats.recording_names import in_order, without_ids
from engine.formats.source import Source, one_clear_line
from engine.formats.vllm.requests import Request, trace_of_requests
from engine.workload import RoutingTrace

NAME = "npz-requests"
_EXPERTS, _PROMPT = "routed_experts", "prompt_token_ids"


def read_requests(sources: Sequence[Source]) -> RoutingTrace:
    """A trace, a sequence a file; cut into prefill and decode where every file has the ids of its prompt."""
    return trace_of_requests((_request(source) for source in in_order(sources)), NAME)


def _request(source: Source) -> Request:
    with one_clear_line(source.path), zipfile.ZipFile(source.path) as archive:
        names, prompt = array_names(source.path, archive), None
        experts = read_member(source.path, archive, _EXPERTS)
        if _PROMPT in names:
            try:
                prompt = read_member(source.path, archive, _PROMPT).size
            except InputError:  # texts or objects; the prompt alone is not worth refusing the request
                prompt = None
    return Request(experts[:, :, None] if experts.ndim == 2 else experts, prompt, source)


def _tells(glance: Glance) -> bool:
    names = glance.archived
    return f"{_EXPERTS}.npy" in names and "experts.npy" not in names and all(name.endswith(".npy") for name in names)


FORMATS = (Format(NAME, "the routing of single requests", "routing", _tells, read_requests, without_ids),)
