"""Answers of serving engines that carry `routed_experts`: vLLM's and those of what speaks as it does (LightLLM, ATOM, NVIDIA
Dynamo, prime-rl). One answer a file, a list of them, JSON lines, or a stream of parts as `curl` saves it.

vLLM, entrypoints/openai: one row a token that was forwarded, prompt + generated - 1 of them, the prompt's first. Since 0.31 all
of them are at the choice; from 0.14 to 0.21 those of the prompt were at the answer, as `prompt_routed_experts`. A request's
`routed_experts_prompt_start` leaves out the first rows of the prompt. Ids are of logical experts.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from engine.errors import InputError
from engine.formats.format import Format
from engine.formats.glance import MAX_LINE_BYTES, Glance
from engine.formats.json_lines import lines, parse, parse_value
from engine.formats.recording_names import in_order, without_ids
from engine.formats.source import MAX_JSON_BYTES, Source, read_json
from engine.formats.vllm.answers import Answer, Tally, requests_of
from engine.formats.vllm.requests import Request, trace_of_requests
from engine.workload import RoutingTrace

NAME = "routed-experts"
_KEYS = ("routed_experts", "prompt_routed_experts")
_SGLANG_KEYS = ("meta_info", "sglext", "sgl_ext")
_OBJECTS = ("chat.completion", "chat.completion.chunk", "text_completion")
_EVENT, _END = "data:", "[DONE]"


def read_responses(sources: Sequence[Source]) -> RoutingTrace:
    """A trace, a sequence a choice; cut into prefill and decode where every answer says how long its prompt is.

    Raises InputError where no answer carries routing.
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
    """What every choice in a file was routed to, whole answers first, then those of streams."""
    streamed: dict[str, dict[int, Answer]] = defaultdict(dict)
    for place, record, is_event in _records(source):
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
    """Add what a record, an answer or a part of one, says to the answers of its choices (by their index)."""
    for position, choice in enumerate(choices):
        index = choice.get("index") if isinstance(choice.get("index"), int) else position
        if index not in answers:
            answers[index] = Answer(source, place if len(choices) == 1 else f"{place}, choice {index}")
        routing = choice.get("routed_experts")
        answers[index].add(_beside_choices(record) if routing is None and position == 0 else routing)
        answers[index].count(_length(choice.get("token_ids")))
        answers[index].prompt = _length(choice.get("prompt_token_ids")) or answers[index].prompt
    usage = record["usage"] if isinstance(record.get("usage"), dict) else {}
    for position, answer in enumerate(answers.values()):
        answer.prompt = _length(record.get("prompt_token_ids")) or answer.prompt
        answer.usage = (
            _count(usage.get("prompt_tokens")) or answer.usage[0],
            _count(usage.get("completion_tokens")) or answer.usage[1],
        )
        answer.keeps_prompt_apart |= "prompt_routed_experts" in record
        if position == 0:
            answer.add_prompt(record.get("prompt_routed_experts"))


def _choices(record: dict) -> list[dict]:
    """The choices of an answer; the answer itself where it has a single one that it does not wrap."""
    for key in ("choices", "outputs"):
        if isinstance(record.get(key), list):
            return [choice for choice in record[key] if isinstance(choice, dict)]
    return [record]


def _beside_choices(record: dict) -> object:
    """The routing that some servers keep beside the choices, NVIDIA Dynamo in its extension; None where there is none."""
    extension = record["nvext"] if isinstance(record.get("nvext"), dict) else {}
    inner = extension["engine_data"] if isinstance(extension.get("engine_data"), dict) else {}
    held = (part.get("routed_experts") for part in (record, extension, inner))
    return next((routing for routing in held if routing is not None), None)


def _length(value: object) -> int:
    return len(value) if isinstance(value, list) else 0


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else None


def _records(source: Source) -> Iterator[tuple[str, dict, bool]]:
    """(place, object, whether it is a server-sent event) of a file in any of the forms."""
    glance = Glance(source.path)
    if glance.first_line.startswith(_EVENT):
        yield from _events(source)
    elif _is_lines(glance):
        for number, line in lines(source.path, MAX_JSON_BYTES):
            yield f"line {number}", parse(source.path, number, line, arrays=True), False
    else:
        content = read_json(source.path, arrays=True)
        for index, record in enumerate(content if isinstance(content, list) else [content]):
            if not isinstance(record, dict):
                raise source.fault("an answer is a JSON object {…}", f"entry {index}")
            yield f"answer {index}", record, False


def _events(source: Source) -> Iterable[tuple[str, dict, bool]]:
    for number, line in lines(source.path, MAX_JSON_BYTES):
        if line.startswith(_EVENT.encode()):
            text = line.removeprefix(_EVENT.encode()).strip()
            if text and text != _END.encode():
                yield f"line {number}", parse(source.path, number, text, arrays=True), True


def _is_lines(glance: Glance) -> bool:
    """Whether each line is an object, by how the first one ends where a glance can see that. An object over several lines
    begins with a line that stays open."""
    line = glance.first_line
    return line.startswith("{") and (line.endswith("}") or _is_cut(line))


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
    return _carries(content[0] if isinstance(content, list) and content else content)


def _carries(record: object) -> bool:
    """Whether a record is an answer, with routing or without, other than SGLang's."""
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
