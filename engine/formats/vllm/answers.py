"""What one choice of an answer was routed to, put together from all that its parts say."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from engine.errors import InputError
from engine.finding import Finding
from engine.formats.source import Source
from engine.formats.vllm.encoded_experts import Encoded, decode
from engine.formats.vllm.requests import Request


@dataclass
class Answer:
    """prompt, generated: tokens, None: not said
    usage: tokens of the prompts and generated ones, of all choices together
    start: rows of the prompt left out before the first, None: not said
    rows_of_prompt: rows that came apart from the others, None where all came together
    keeps_prompt_apart: whether the engine has a place of its own for them, used or not
    """

    source: Source
    place: str
    parts: list[np.ndarray] = field(default_factory=list)
    prompt: int | None = None
    generated: int | None = None
    usage: tuple[int | None, int | None] = (None, None)
    start: int | None = None
    rows_of_prompt: int | None = None
    keeps_prompt_apart: bool = False

    def add(self, value: object) -> None:
        """Rows in a value of `routed_experts`, after those that are there; raises InputError."""
        if encoded := self._decoded(value):
            self.start = encoded.start if self.start is None else self.start
            self.parts.append(encoded.experts)

    def add_prompt(self, value: object) -> None:
        """The rows of the prompt where they came apart from the others; raises InputError."""
        if self.rows_of_prompt is None and (encoded := self._decoded(value)):
            self.parts.insert(0, encoded.experts)
            self.rows_of_prompt = len(encoded.experts)

    def count(self, tokens: int) -> None:
        """Further generated tokens."""
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
                f"routed_experts: parts of one answer are {_sizes(self.parts[0])} and {_sizes(encoded.experts)}",
                self.place,
            )
        return encoded


@dataclass
class Tally:
    """How many answers had what a person should know of."""

    whole: int = 0
    without: int = 0
    cut: int = 0
    repeated: int = 0

    def findings(self) -> tuple[Finding, ...]:
        answers = self.whole + self.without
        told = (
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
        return tuple(
            Finding(severity=severity, code=code, message=message) for count, severity, code, message in told if count
        )


def requests_of(answers: Iterable[Answer], tally: Tally) -> Iterator[Request]:
    """What the choices of one answer were routed to; those without routing are counted and left out. Rows of a prompt that all
    choices share are the first one's alone."""
    answers, first = list(answers), None
    prompt_apart = any(answer.rows_of_prompt is not None for answer in answers)
    _share_usage(answers)
    for answer in answers:
        if not answer.parts:
            tally.without += 1
            continue
        tally.whole += 1
        experts = np.concatenate(answer.parts)
        prompt_rows = (answer.rows_of_prompt or 0) if prompt_apart else _rows_of_prompt(answer, len(experts), tally)
        request = Request(experts, prompt_rows, answer.source, answer.place)
        if first is not None and _repeats_prompt(request, first):
            tally.repeated += 1
            request = Request(experts[prompt_rows:], 0, answer.source, answer.place)
        first = first or request
        if len(request.experts):
            yield request


def _share_usage(answers: list[Answer]) -> None:
    """Take from the usage what the choices do not say themselves: of a single choice all of it, of several the prompt, unless
    their rows show that every choice has a prompt of its own."""
    rows = sum(len(part) for answer in answers for part in answer.parts)
    for answer in answers:
        prompt, generated = answer.usage
        if len(answers) == 1:
            answer.generated = answer.generated if generated is None else generated
        elif prompt is not None and generated is not None and rows != len(answers) * (prompt - 1) + generated:
            continue
        answer.prompt = prompt if answer.prompt is None else answer.prompt


def _rows_of_prompt(answer: Answer, rows: int, tally: Tally) -> int | None:
    """How many of an answer's rows are of its prompt; None: not said."""
    if answer.keeps_prompt_apart and answer.generated is not None and rows <= answer.generated:
        return 0
    if answer.prompt is None:
        return None
    if answer.start is not None:
        return min(max(answer.prompt - answer.start, 0), rows)
    if answer.generated is None:
        return answer.prompt if answer.prompt <= rows else None
    missing = max(answer.prompt + answer.generated - 1 - rows, 0)
    tally.cut += missing > 0
    return min(max(answer.prompt - missing, 0), rows)


def _repeats_prompt(request: Request, first: Request) -> bool:
    rows = request.prompt_rows
    return bool(rows) and rows == first.prompt_rows and np.array_equal(request.experts[:rows], first.experts[:rows])


def _sizes(experts: np.ndarray) -> str:
    return f"[tokens, {experts.shape[1]}, {experts.shape[2]}]"
