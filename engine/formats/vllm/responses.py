"""Answers of serving engines that carry `routed_experts`: vLLM's and those of engines that speak as it does (LightLLM, ATOM,
NVIDIA Dynamo, prime-rl). One answer a file, a list of them, JSON lines, or a stream of parts as `curl` saves it.

vLLM, entrypoints/openai: one row a token that was forwarded, prompt + generated - 1 of them, the prompt's first. Since 0.31 all
of them are at the choice; from 0.14 to 0.21 those of the prompt were at the answer, as `prompt_routed_experts`. A request's
`routed_experts_prompt_start` leaves out the first rows of the prompt. Ids are of logical experts.

The routing of one request is a text, lists, or an object with shape and bytes:

* vLLM 0.31 and later: base64 of a complete `.npy`
* vLLM 0.14 to 0.21: lists `[rows][layers][k]`; some servers `{"encoding": "base64", "dtype", "shape", "data"}`
* LightLLM (docs/r3_routing_capture.md): `{"shape", "data"}`, base64 of int32
* NVIDIA Dynamo (components/src/dynamo/vllm/handlers.py): `{"shape", "dtype", "start", "data"}`, base64; before mid-2026 base85,
  as PrimeIntellect's prime-rl and verifiers sent it
* SGLang and older Dynamo: base64 of bare int32; only the open model knows its layers and k
"""

import base64
import binascii
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from engine.errors import InputError
from engine.formats.arrays import MAX_K, MAX_LAYERS
from engine.formats.format import MAX_LINE_BYTES, Format, Glance
from engine.formats.json_lines import lines, parse, parse_value
from engine.formats.number_lists import array_of_lists
from engine.formats.routed_experts import (
    GENERATED,
    PROMPT,
    answers_in,
    cached_tokens,
    count_of,
    decode_int32,
    decode_lists,
    decode_npy,
    say_cached,
)
from engine.formats.source import MAX_FILE_BYTES, MAX_JSON_BYTES, Source, in_order, quoted, read_json, without_ids
from engine.formats.vllm.requests import Request, trace_of_requests
from engine.model import MoEModel
from engine.workload import Finding, RoutingTrace

NPY_IN_BASE64 = "k05VTVB"
"""The beginning of `\\x93NUMPY` in base64."""
_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "int16", "uint16", "int32", "int64")}
_OF_WIDTH = {1: _DTYPES["uint8"], 2: _DTYPES["int16"], 4: _DTYPES["int32"], 8: _DTYPES["int64"]}
NAME = "routed-experts"
_KEYS = ("routed_experts", "prompt_routed_experts")
_SGLANG_KEYS = ("meta_info", "sglext", "sgl_ext")
_OBJECTS = ("chat.completion", "chat.completion.chunk", "text_completion")
_EVENT, _END = "data:", "[DONE]"


@dataclass(frozen=True)
class Encoded:
    """Decoded routing.

    experts: int16[row, layer, k]; -1 = not captured
    start: rows of the prompt left out before the first, None: not said
    """

    experts: np.ndarray
    start: int | None = None


def decode(value: object, model: MoEModel | None) -> Encoded:
    """The routing in a value of a `routed_experts` key; raises InputError, its text beginning with `routed_experts: `.

    value: as it is in JSON, lists perhaps read as an array
    model: the open model, for bytes without a shape
    """
    if isinstance(value, str):
        if value.startswith(NPY_IN_BASE64):
            return Encoded(decode_npy(value))
        if model is None:
            raise InputError(
                "routed_experts: is base64 without a shape, as SGLang sends it; say which model it is of (--model, or open the "
                "model first)"
            )
        return Encoded(decode_int32(value, model.layers, model.experts_per_token))
    if isinstance(value, dict):
        return _decode_object(value)
    if isinstance(value, list | np.ndarray):
        if (ids := array_of_lists(value, 3)) is None:
            raise InputError(
                "routed_experts: must be lists of whole numbers, [tokens][layers][k], as many layers and experts for each token"
            )
        return Encoded(decode_lists(ids))
    raise InputError(f"routed_experts: a text, lists or an object are needed, not {quoted(value)}")


def _decode_object(value: dict) -> Encoded:
    shape, data, start = value.get("shape"), value.get("data"), value.get("start")
    if not isinstance(data, str) or not isinstance(shape, list) or not all(_is_count(size) for size in shape):
        raise InputError("routed_experts: an object needs a text 'data' and a list 'shape'")
    if len(shape) != 3 or min(shape) < 1 or shape[1] > MAX_LAYERS or shape[2] > MAX_K:
        raise InputError(
            f"routed_experts: shape {quoted(shape)} must be [tokens, layers, k], at most {MAX_LAYERS} layers and k = {MAX_K}"
        )
    if start is not None and not _is_count(start):
        raise InputError(f"routed_experts: start {quoted(start)} must be a number of rows")
    if value.get("encoding") not in (None, "base64", "base85"):
        raise InputError(f"routed_experts: encoding {quoted(value['encoding'])} is neither base64 nor base85")
    said = value.get("dtype")
    if said is not None and not (isinstance(said, str) and said in _DTYPES):
        raise InputError(f"routed_experts: dtype {quoted(said)} is not one of {', '.join(_DTYPES)}")
    numbers = math.prod(shape)
    widths = tuple(_OF_WIDTH) if said is None else (_DTYPES[said].itemsize,)
    raw = _bytes_of(data, value.get("encoding"), {numbers * width for width in widths})
    dtype = _OF_WIDTH[len(raw) // numbers] if said is None else _DTYPES[said]
    return Encoded(decode_lists(np.frombuffer(raw, dtype).reshape(shape)), start)


def _bytes_of(data: str, encoding: str | None, sizes: set[int]) -> bytes:
    """The bytes, as many as one of `sizes`. Base64 makes more characters of them than base85, so the length tells an encoding
    that is not said."""
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"routed_experts: more than {MAX_FILE_BYTES // 1024**2} MB; record shorter requests")
    lengths = []
    for name, decode_bytes in (("base64", partial(base64.b64decode, validate=True)), ("base85", base64.b85decode)):
        if encoding in (None, name):
            try:
                raw = decode_bytes(data)
            except (ValueError, binascii.Error):
                continue
            if len(raw) in sizes:
                return raw
            lengths.append(len(raw))
    there = " or ".join(str(length) for length in lengths) if lengths else "no readable"
    needed = " or ".join(str(size) for size in sorted(sizes))
    raise InputError(f"routed_experts: data is cut short or too long: its shape needs {needed} bytes, there are {there}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


@dataclass
class Answer:
    """One choice of an answer, put together from all its parts.

    parts: int16[row, layer, k] each
    prompt, generated: tokens, None: not said
    usage: tokens of the prompts, generated ones and cached ones, of all choices together
    start: rows of the prompt left out before the first, None: not said
    rows_of_prompt: rows that came apart from the others, None if all came together
    keeps_prompt_apart: True if the engine has a place of its own for them, used or not
    cached: tokens of its prompt that were not computed
    """

    source: Source
    place: str
    parts: list[np.ndarray] = field(default_factory=list)
    prompt: int | None = None
    generated: int | None = None
    usage: tuple[int | None, int | None, int] = (None, None, 0)
    start: int | None = None
    rows_of_prompt: int | None = None
    keeps_prompt_apart: bool = False
    cached: int = 0

    def add(self, value: object) -> None:
        """Add the rows in a value of `routed_experts`; raises InputError."""
        if encoded := self._decoded(value):
            self.start = encoded.start if self.start is None else self.start
            self.parts.append(encoded.experts)

    def add_prompt(self, value: object) -> None:
        """Add the rows of the prompt if they came apart from the others; raises InputError."""
        if self.rows_of_prompt is None and (encoded := self._decoded(value)):
            self.parts.insert(0, encoded.experts)
            self.rows_of_prompt = len(encoded.experts)

    def count(self, tokens: int) -> None:
        """Count further generated tokens."""
        if tokens:
            self.generated = tokens + (self.generated or 0)

    def _decoded(self, value: object) -> Encoded | None:
        if value is None or (isinstance(value, list) and not value):
            return None
        try:
            encoded = decode(value, self.source.model)
        except InputError as error:
            raise self.source.fault(str(error), self.place) from None
        if self.parts and self.parts[0].shape[1:] != encoded.experts.shape[1:]:
            raise self.source.fault(
                f"routed_experts: parts of one answer are {_sizes(self.parts[0])} and {_sizes(encoded.experts)}", self.place
            )
        return encoded


@dataclass
class Tally:
    """Numbers of answers with something that a person should know; of rows, all and those of cached prefixes, and cached tokens
    of which the rows are not known."""

    rows: int = 0
    cached: int = 0
    unplaced: int = 0
    whole: int = 0
    without: int = 0
    cut: int = 0
    repeated: int = 0

    def findings(self) -> tuple[Finding, ...]:
        answers = self.whole + self.without
        told = (
            (
                self.unplaced,
                "warning",
                "cached-not-known",
                f"{self.unplaced:,} tokens of several prompts in one request were cached (cached_tokens); of which, is not "
                "said: they are still counted; send one prompt a request.",
            ),
            (
                self.without,
                "warning",
                "answers-without-routing",
                f"{self.without} of {answers} answers carry no routed_experts and were left out; were they cached or aborted?",
            ),
            (
                self.cut,
                "warning",
                "prompt-cut",
                f"{self.cut} of {answers} answers have fewer rows than prompt + generated − 1: the first rows of their prompts "
                "were left out (routed_experts_prompt_start), so prefill counts too little.",
            ),
            (
                self.repeated,
                "ok",
                "prompt-repeated",
                f"{self.repeated} choices repeat the prompt of the first choice, which was forwarded once and is counted once.",
            ),
        )
        found = (Finding(severity=severity, code=code, message=message) for count, severity, code, message in told if count)
        return (*say_cached(self.cached, self.rows), *found)


def requests_of(answers: Iterable[Answer], tally: Tally) -> Iterator[Request]:
    """The routing of the choices of one answer; those without routing are counted and left out. Rows of a prompt that all
    choices share are the first one's alone."""
    answers, first = list(answers), None
    prompt_apart = any(answer.rows_of_prompt is not None for answer in answers)
    _share_usage(answers, tally)
    for answer in answers:
        if not answer.parts:
            tally.without += 1
            continue
        tally.whole += 1
        experts = np.concatenate(answer.parts)
        prompt_rows = (answer.rows_of_prompt or 0) if prompt_apart else _rows_of_prompt(answer, len(experts), tally)
        request = Request(experts, prompt_rows, answer.source, answer.place)
        rows, shared = request.prompt_rows, first is not None and request.prompt_rows == first.prompt_rows
        if rows and shared and np.array_equal(experts[:rows], first.experts[:rows]):
            tally.repeated += 1
            request = Request(experts[prompt_rows:], 0, answer.source, answer.place)
        first = first or request
        tally.rows += len(request.experts)
        if cached := _cached_rows(answer, request):
            tally.cached += cached
            left = None if request.prompt_rows is None else request.prompt_rows - cached
            request = replace(request, experts=request.experts[cached:], prompt_rows=left)
        if len(request.experts):
            yield request


def _cached_rows(answer: Answer, request: Request) -> int:
    """The number of rows, from the first on, that a cache held; raises InputError for more than the prompt has."""
    if answer.prompt is not None and answer.cached > answer.prompt:
        raise answer.source.fault(f"cached_tokens is {answer.cached}, but the prompt has {answer.prompt} tokens", answer.place)
    if request.prompt_rows is None:
        return min(answer.cached, len(request.experts))
    missing = (answer.prompt or request.prompt_rows) - request.prompt_rows
    return min(max(answer.cached - missing, 0), request.prompt_rows)


def _share_usage(answers: list[Answer], tally: Tally) -> None:
    """Give the choices the counts of the usage that they lack: all of it to a single choice, the prompt to several, unless
    their rows show that every choice has a prompt of its own."""
    rows = sum(len(part) for answer in answers for part in answer.parts)
    for answer in answers:
        prompt, generated, cached = answer.usage
        if len(answers) == 1:
            answer.generated = answer.generated if generated is None else generated
        elif prompt is not None and generated is not None and rows != len(answers) * (prompt - 1) + generated:
            tally.unplaced += cached if answer is answers[0] else 0
            continue
        answer.cached = answer.cached or cached
        answer.prompt = prompt if answer.prompt is None else answer.prompt


def _rows_of_prompt(answer: Answer, rows: int, tally: Tally) -> int | None:
    """The number of an answer's rows that are of its prompt; None: not said."""
    if answer.keeps_prompt_apart and answer.generated is not None and rows <= answer.generated:
        return 0
    if answer.prompt is None:
        return None
    if answer.start is not None:
        return min(max(answer.prompt - answer.start, 0), rows)
    if answer.generated is None:
        return answer.prompt if answer.prompt <= rows else None
    missing = max(answer.prompt + answer.generated - 1 - rows, 0)
    tally.cut += missing > answer.cached
    if rows > answer.prompt + answer.generated:
        return None  # counts of other rows, as where a usage leaves out what a cache held
    return min(max(answer.prompt - missing, 0), rows)


def _sizes(experts: np.ndarray) -> str:
    return f"[tokens, {experts.shape[1]}, {experts.shape[2]}]"


def read_responses(sources: Sequence[Source]) -> RoutingTrace:
    """A trace with a sequence for each choice; cut into prefill and decode if every answer says how long its prompt is.

    Raises InputError if no answer carries routing.
    """
    tally = Tally()
    requests = [request for source in in_order(sources) for request in _requests(source, tally)]
    if not requests:
        raise sources[0].fault(
            "holds answers without routed_experts; start the server with --enable-return-routed-experts, and ask for it in the "
            "request where the engine wants that"
        )
    return trace_of_requests(requests, NAME, tally.findings())


def _requests(source: Source, tally: Tally) -> Iterator[Request]:
    """The routing of every choice in a file, whole answers first, then those of streams."""
    streamed: dict[str, dict[int, Answer]] = defaultdict(dict)
    for place, record, is_event in _answers(source):
        choices = _choices(record)
        if is_event or any("delta" in choice for choice in choices) or str(record.get("object")).endswith(".chunk"):
            _take(record, choices, streamed[str(record.get("id", record.get("request_id")))], source, place)
        else:
            answers: dict[int, Answer] = {}
            _take(record, choices, answers, source, place)
            yield from requests_of(answers.values(), tally)
    for answers in streamed.values():
        yield from requests_of(answers.values(), tally)


def _take(record: dict, choices: list[dict], answers: dict[int, Answer], source: Source, place: str) -> None:
    """Add a record, which is an answer or a part of one, to the answers of its choices (by their index)."""
    for position, choice in enumerate(choices):
        index = choice.get("index") if isinstance(choice.get("index"), int) else position
        if index not in answers:
            answers[index] = Answer(source, place if len(choices) == 1 else f"{place}, choice {index}")
        routing = choice.get("routed_experts")
        answers[index].add(_beside_choices(record) if routing is None and position == 0 else routing)
        answers[index].cached = cached_tokens(choice) or answers[index].cached
        answers[index].count(_length(choice.get("token_ids")))
        answers[index].prompt = _length(choice.get("prompt_token_ids")) or answers[index].prompt
    usage = record["usage"] if isinstance(record.get("usage"), dict) else {}
    for position, answer in enumerate(answers.values()):
        answer.prompt = _length(record.get("prompt_token_ids")) or answer.prompt
        answer.usage = (
            count_of(usage, PROMPT) or answer.usage[0],
            count_of(usage, GENERATED) or answer.usage[1],
            cached_tokens(record, usage) or answer.usage[2],
        )
        answer.keeps_prompt_apart |= "prompt_routed_experts" in record
        if position == 0:
            answer.add_prompt(record.get("prompt_routed_experts"))


def _choices(record: dict) -> list[dict]:
    """The choices of an answer; the answer itself if it has a single one that it does not wrap."""
    for key in ("choices", "outputs"):
        if isinstance(record.get(key), list):
            return [choice for choice in record[key] if isinstance(choice, dict)]
    return [record]


def _beside_choices(record: dict) -> object:
    """The routing that some servers keep outside the choices, NVIDIA Dynamo in its extension; None if there is none."""
    extension = record["nvext"] if isinstance(record.get("nvext"), dict) else {}
    inner = extension["engine_data"] if isinstance(extension.get("engine_data"), dict) else {}
    held = (part.get("routed_experts") for part in (record, extension, inner))
    return next((routing for routing in held if routing is not None), None)


def _length(value: object) -> int:
    return len(value) if isinstance(value, list) else 0


def _answers(source: Source) -> Iterator[tuple[str, dict, bool]]:
    """As `_records`, the answers alone that logs of requests and batches keep in their records."""
    for place, record, is_event in _records(source):
        inside = [record] if is_event else [each for each in answers_in(record, _carries) if isinstance(each, dict)]
        yield from ((place, answer, is_event) for answer in inside or [record])


def _records(source: Source) -> Iterator[tuple[str, dict, bool]]:
    """(place, object, True for a server-sent event) of a file in any of the forms."""
    line = Glance(source.path).first_line
    if line.startswith(_EVENT):
        for number, line in lines(source.path, MAX_JSON_BYTES):
            text = line.removeprefix(_EVENT.encode()).strip()
            if line.startswith(_EVENT.encode()) and text and text != _END.encode():
                yield f"line {number}", parse(source.path, number, text, arrays=True), True
    elif line.startswith("{") and (line.endswith("}") or _is_cut(line)):  # else an object over several lines
        for number, line in lines(source.path, MAX_JSON_BYTES):
            yield f"line {number}", parse(source.path, number, line, arrays=True), False
    else:
        content = read_json(source.path, arrays=True)
        for index, record in enumerate(content if isinstance(content, list) else [content]):
            if not isinstance(record, dict):
                raise source.fault("an answer is a JSON object {…}", f"entry {index}")
            yield f"answer {index}", record, False


def _is_cut(line: str) -> bool:
    return len(line.encode()) >= MAX_LINE_BYTES - 4


def _tells(glance: Glance) -> bool:
    if not glance.is_text:
        return False
    if glance.first_line.startswith(_EVENT):
        try:
            return _carries(parse_value(glance.path, 1, glance.first_line.removeprefix(_EVENT).encode(), arrays=True))
        except InputError:
            return False
    if _is_cut(glance.first_line) and glance.first_line.startswith("{"):
        return '"routed_experts"' in glance.first_line
    content = glance.record or glance.json
    first = content[0] if isinstance(content, list) and content else content
    return any(map(_carries, answers_in(first, _carries)))


def _carries(record: object) -> bool:
    """True if a record is an answer, with routing or without, other than SGLang's."""
    if not isinstance(record, dict):
        return False
    choices = _choices(record)
    if any(key in part for part in (record, *choices) for key in _SGLANG_KEYS):
        return False
    return (
        any(key in part for part in (record, *choices) for key in _KEYS)
        or _beside_choices(record) is not None
        or (record.get("object") in _OBJECTS and "choices" in record)
    )


FORMATS = (Format(NAME, "routing in the answers of a serving engine", "routing", _tells, read_responses, without_ids),)
