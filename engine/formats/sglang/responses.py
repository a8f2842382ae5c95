"""The choices of single requests as SGLang answers with `return_routed_experts`: `meta_info.routed_experts` of /generate,
`sglext` (once `sgl_ext`) of the OpenAI endpoints, for the answer or a choice. Workers of Dynamo pass the same text on as
`engine_data.routed_experts` or `disaggregated_params.routed_experts`; the form of its front end (`nvext`) is read with the
answers of vLLM.

A file holds one answer, a list of them or one a line. Layers and k are not in it: they are the open model's. How many of
the tokens are the prompt's follows from the number that was generated: the last of these was never forwarded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.errors import InputError
from engine.formats import routed_experts
from engine.formats.arrays import routing_trace
from engine.formats.format import Format, Glance
from engine.formats.json_lines import lines, parse_value
from engine.formats.sglang.dumps import moe_rows
from engine.formats.source import MAX_FILE_BYTES, Source, without_ids
from engine.workload import DECODE, PREFILL, Origin, RoutingTrace

NAME = "sglang-routed-experts"
KEY = "routed_experts"
MAX_LINE_BYTES = 32 * 1024**2
"""Limit of one answer in a file of lines: ten thousand tokens of 61 layers and 8 experts."""


@dataclass(frozen=True)
class Routed:
    """The choices in an answer, still as text.

    dtype: of the numbers
    prompt, generated: tokens, None if the answer does not say
    cached: tokens of the prompt that were not computed
    """

    place: str
    text: object
    dtype: str
    prompt: int | None
    generated: int | None
    cached: int = 0


def read_responses(sources: Sequence[Source]) -> RoutingTrace:
    """A trace with a sequence for each answer, in the order of the files; by phase if every answer says how many tokens it
    generated. Raises InputError, also without a model."""
    model = sources[0].model
    if model is None:
        raise sources[0].fault(
            "holds expert ids without the number of layers and of experts per token; open the model first, or give --model"
        )
    if sum(source.path.stat().st_size for source in sources) > MAX_FILE_BYTES:
        raise sources[0].fault(f"is over {MAX_FILE_BYTES // 1024**2} MB with the other files; give fewer requests")
    experts, phases, cached = [], [], 0
    for source in sources:
        for place, value in _answers(source):
            for routed in (each for answer in routed_experts.answers_in(value, _carries) for each in _routed(answer, place)):
                if not isinstance(routed.text, str):
                    kind = "list" if isinstance(routed.text, np.ndarray) else type(routed.text).__name__
                    raise source.fault(f"{KEY} is no text in base64 but {kind}", routed.place)
                try:
                    ids = routed_experts.decode_int32(routed.text, model.layers, model.experts_per_token, str(routed.dtype))
                except InputError as error:
                    raise source.fault(f"{error} ({model.name})", routed.place) from None
                left_out = _cached_rows(source, len(ids), routed)
                phase = _phase(source, len(ids), routed)
                experts.append(ids[left_out:])
                phases.append(None if phase is None else phase[left_out:])
                cached += left_out
    if not experts:
        raise sources[0].fault(f"no answer has {KEY!r}; ask with return_routed_experts of a server that returns them")
    shapes = sorted({ids.shape[1:] for ids in experts})
    if len(shapes) > 1:
        raise sources[0].fault(f"answers differ in layers and choices: {shapes[0]} and {shapes[1]}")
    used = np.zeros(shapes[0][0], bool)
    for ids in experts:
        # With one choice a token, expert 0 and nothing captured look the same.
        used |= (ids >= (0 if shapes[0][1] > 1 else 1)).any(axis=(0, 2))
    rows, findings = moe_rows(sources[0], used, model.experts)
    findings = [*routed_experts.say_cached(cached, cached + sum(map(len, experts))), *findings]
    if not rows.size:
        raise sources[0].fault(f"no token has a choice in any MoE layer of {model.name}")
    sequence = np.repeat(np.arange(len(experts)), [len(ids) for ids in experts])
    together = np.empty((len(sequence), len(rows), shapes[0][1]), np.int16)
    ends = np.cumsum([len(ids) for ids in experts])
    for ids, end in zip(experts, ends, strict=True):
        together[end - len(ids) : end] = ids[:, rows]
    return replace(
        routing_trace(sources[0], together, sequence, recorded_experts=model.experts),
        phase=None if any(phase is None for phase in phases) else np.concatenate(phases),
        model_layers=tuple(rows.tolist()),
        origin=Origin(format=NAME, findings=tuple(findings)),
    )


def _answers(source: Source) -> Iterator[tuple[str, object]]:
    """(place, answer) of every JSON object in the file: one, a list, or one a line."""
    content = Glance(source.path).json
    if isinstance(content, dict):
        yield "", content
    elif isinstance(content, list):
        yield from ((f"answer {at}", answer) for at, answer in enumerate(content))
    else:
        for number, line in lines(source.path, MAX_LINE_BYTES):
            yield f"line {number}", parse_value(source.path, number, line)


def _routed(answer: object, place: str) -> Iterator[Routed]:
    """The choices in an answer and in each of its choices of text."""
    if not isinstance(answer, dict):
        return
    choices = answer.get("choices") if isinstance(answer.get("choices"), list) else []
    for at, part in enumerate([answer, *choices]):
        inside = [part.get(name) for name in routed_experts.PARTS] if isinstance(part, dict) else []
        wrapper = next((each for each in inside if isinstance(each, dict) and each.get(KEY) is not None), None)
        if wrapper is not None:
            of_answer = answer.get("usage") if len(choices) < 2 else None
            usages = (part.get("meta_info"), part.get("usage"), of_answer)
            usage = next((usage for usage in usages if isinstance(usage, dict)), {})
            cached = routed_experts.cached_tokens(*usages, wrapper, part)
            where = ", ".join(filter(None, (place, f"choice {at - 1}" if at else "")))
            counts = (routed_experts.count_of(usage, names) for names in (routed_experts.PROMPT, routed_experts.GENERATED))
            yield Routed(where, wrapper[KEY], wrapper.get("routed_experts_dtype", "int32"), *counts, cached)


def _carries(answer: object) -> bool:
    return any(True for _ in _routed(answer, ""))


def _cached_rows(source: Source, rows: int, routed: Routed) -> int:
    """The number of rows, from the first on, that a cache held; raises InputError for more than the prompt has. A request may
    have asked for fewer rows of the prompt (`routed_experts_start_len`)."""
    if routed.prompt is None:
        return min(routed.cached, max(rows - max((routed.generated or 1) - 1, 0), 0))
    if routed.cached > routed.prompt:
        raise source.fault(f"cached_tokens is {routed.cached}, but the prompt has {routed.prompt} tokens", routed.place)
    missing = 0 if routed.generated is None else routed.prompt + max(routed.generated - 1, 0) - rows
    return min(max(routed.cached - max(missing, 0), 0), rows)


def _phase(source: Source, rows: int, routed: Routed) -> np.ndarray | None:
    """The phase of every token, int8[token]; None if the answer does not say how many it generated. Raises InputError for a
    count that its rows contradict: then layers or k are another model's."""
    if routed.generated is None:
        return None
    decoded = max(routed.generated - 1, 0)
    most = rows if routed.prompt is None else routed.prompt + decoded
    if not decoded <= rows <= most:
        raise source.fault(
            f"{rows} tokens by the model's layers and experts per token, but {decoded} … {most} by the answer's counts; "
            "is it this model's?",
            routed.place,
        )
    return np.repeat(np.array([PREFILL, DECODE], np.int8), [rows - decoded, decoded])


def _tells(glance: Glance) -> bool:
    content = glance.json if glance.json is not None else glance.record
    first = content[0] if isinstance(content, list) and content else content
    if any(map(_carries, routed_experts.answers_in(first, _carries))):
        return True
    # A first line that is too long for a glance.
    return glance.is_json and b'"meta_info"' in glance.head and b'"routed_experts"' in glance.head


FORMATS = (Format(NAME, "SGLang's choices of requests", "routing", _tells, read_responses, without_ids),)
