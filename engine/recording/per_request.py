"""Prompts from a file (one a line, or JSON lines), sent to a running server, and the routing that its answers carry, as one
recording."""

import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engine.errors import InputError, StoppedError
from engine.files import open_atomically
from engine.formats.source import MAX_FILE_BYTES, fault, one_clear_line, quoted
from engine.recording.server import ServerError
from engine.result import Stop

Prompt = str | list[int]
"""A text, or the ids of its tokens."""
Ask = Callable[[Prompt], np.ndarray]
"""Sends one prompt, returns the choices in its answer, int16[row, layer, k]. Raises InputError."""
Report = Callable[[float, str], None]
"""Takes the share that is done and a line about it."""

MAX_RECORDED_BYTES = MAX_FILE_BYTES
"""Limit of the ids as int16, so that the file can be read back: random ids of 256 experts compress to 0.65 of their bytes, of
512 to 0.71, which leaves room for the last answer."""

REFUSED = (400, 413, 422)
"""Statuses about one prompt (too long, not allowed), not about the server."""

_LOOK_SECONDS = 0.1


@dataclass
class Recorded:
    """The recording so far.

    rows: by number of the prompt, int16[token, layer, k]; layers and k are alike
    refused: the server's words by the number of each prompt that it refused
    ended: why recording ended before the last prompt; "" if it did not
    fault: the error after the first answer, if any
    """

    rows: dict[int, np.ndarray] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    ended: str = ""
    fault: InputError | None = None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rows.values()))

    @property
    def bytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows.values())


def record_requests(
    ask: Ask, prompts: Sequence[Prompt], concurrency: int, seconds: float | None, stop: Stop, report: Report
) -> Recorded:
    """Send the prompts, `concurrency` at a time, until all are answered, `seconds` have passed or `stop` is true.

    The first goes alone: its answer shows whether the server records at all. Later, a prompt that is refused is left out; any
    other fault ends the recording, and the answers so far stay.

    Raises InputError if there is no answer to the first prompt.
    """
    begin, recorded = time.monotonic(), Recorded()
    end = begin + seconds if seconds is not None else float("inf")
    for numbers, threads in ((range(1), 1), (range(1, len(prompts)), concurrency)):
        answers = _Answers(ask, prompts, numbers, threads)
        for _ in numbers:
            while (answer := answers.next()) is None and not _is_over(recorded, end, seconds, stop):
                pass
            if answer is None or not _take(recorded, *answer) or _is_over(recorded, end, seconds, stop):
                answers.close()
                return _or_fault(recorded)
            done, passed = len(recorded.rows) + len(recorded.refused), time.monotonic() - begin
            left = min(passed / done * (len(prompts) - done), end - time.monotonic())
            text = f"{done:,} of {len(prompts):,} prompts, {recorded.tokens:,} tokens, about {time_left(left)}"
            report(max(done / len(prompts), passed / (passed + left) if left > 0 else 1.0), text)
    return _or_fault(recorded)


class _Answers:
    """Prompts sent by threads of their own, answers in the order in which they come. The threads are daemons: a request that
    hangs keeps nobody from leaving, and its connection ends with the process, upon which the server drops it."""

    def __init__(self, ask: Ask, prompts: Sequence[Prompt], numbers: range, threads: int) -> None:
        self._answers: queue.Queue[tuple[int, np.ndarray | InputError]] = queue.Queue()
        self._ahead = iter(numbers)
        self._lock = threading.Lock()
        self._closed = False
        for _ in range(min(threads, len(numbers))):
            threading.Thread(target=self._work, args=(ask, prompts), daemon=True).start()

    def next(self) -> tuple[int, np.ndarray | InputError] | None:
        """The number of a prompt and its answer or fault; None if there is none within a moment."""
        try:
            return self._answers.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Send no further prompt."""
        self._closed = True

    def _work(self, ask: Ask, prompts: Sequence[Prompt]) -> None:
        while not self._closed:
            with self._lock:
                number = next(self._ahead, None)
            if number is None:
                return
            try:
                answer: np.ndarray | InputError = ask(prompts[number])
            except InputError as error:
                answer = error
            self._answers.put((number, answer))


def _take(recorded: Recorded, number: int, answer: np.ndarray | InputError) -> bool:
    """Add an answer to the recording; True if recording goes on."""
    if isinstance(answer, ServerError) and answer.status in REFUSED and recorded.rows:
        recorded.refused[number] = answer.reason
        return True
    if isinstance(answer, InputError):
        recorded.fault = answer
        return False
    first = next(iter(recorded.rows.values()), answer)
    if answer.shape[1:] != first.shape[1:]:
        recorded.fault = InputError(
            f"prompt {number + 1}: its routing is {list(answer.shape)}, that of the first answer {list(first.shape)}; "
            "layers and experts per token must be the same in all"
        )
        return False
    recorded.rows[number] = answer
    return True


def _is_over(recorded: Recorded, end: float, seconds: float | None, stop: Stop) -> bool:
    if stop():
        recorded.ended = "stopped"
    elif time.monotonic() > end:
        recorded.ended = f"{seconds:g} s have passed"
    elif recorded.bytes > MAX_RECORDED_BYTES:
        recorded.ended = f"more would not fit into a file of {MAX_FILE_BYTES // 1024**2} MB"
    return bool(recorded.ended)


def _or_fault(recorded: Recorded) -> Recorded:
    """The recording; raises its fault if nothing was recorded."""
    if recorded.rows:
        return recorded
    raise recorded.fault or StoppedError(f"nothing was recorded: {recorded.ended} before the first answer")


def time_left(seconds: float) -> str:
    """`90 s left`, `12 min left`."""
    return f"{max(seconds, 0):.0f} s left" if seconds < 120 else f"{seconds / 60:.0f} min left"


def save_requests(path: Path, recorded: Recorded, num_experts: int | None) -> np.ndarray:
    """Write `experts` int16[token, layer, k], `sequence` int32[token] (the number of the prompt, from 0) and, if it is known,
    `num_experts` as a compressed `.npz`; returns `experts`. Layers in which no token has a choice are dense ones and left out,
    and so are tokens without any choice.
    Raises InputError if the file cannot be written, or if no layer is left."""
    numbers = sorted(recorded.rows)
    chosen = [rows[(rows >= 0).any(axis=(1, 2))] for rows in (recorded.rows[number] for number in numbers)]
    experts = np.concatenate(chosen)
    experts = experts[:, (experts >= 0).any(axis=(0, 2))]
    if not experts.shape[1]:
        raise InputError(
            "the server's routing is all zeros: it captured nothing. Known of speculative decoding in some SGLang builds; "
            "record without it"
        )
    arrays = {"experts": experts, "sequence": np.repeat(numbers, list(map(len, chosen))).astype("i4")}
    if num_experts is not None:
        arrays["num_experts"] = np.int64(num_experts)
    try:
        with open_atomically(path) as file:
            np.savez_compressed(file, **arrays)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None
    return experts


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file, in order; empty lines are left out.

    Raises InputError as `prompts_in`.
    """
    with one_clear_line(path):
        if not path.is_file():
            raise fault(path, "there is no such file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise fault(path, f"is larger than {MAX_FILE_BYTES // 1024**2} MB; take fewer prompts")
        return prompts_in(path, path.read_bytes())


def prompts_in(path: Path, content: bytes) -> list[Prompt]:
    """The prompts in the content of a file, which need not be on any disk.

    A `.jsonl` file has one JSON value a line: a text, a list of token ids, or an object with `prompt` or `text`. Any other
    file is one prompt a line. Raises InputError that names the line.
    """
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError:
        raise fault(path, "is not UTF-8 text; save it as UTF-8") from None
    parse = _from_json if path.suffix.lower() == ".jsonl" else lambda path, number, line: line
    prompts = [parse(path, number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise fault(path, "has no prompt; write one a line")
    return prompts


def _from_json(path: Path, number: int, line: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError:
        raise fault(path, "is not valid JSON", f"line {number}") from None
    if isinstance(value, dict):
        if "prompt" not in value and "text" not in value:
            keys = ", ".join(quoted(key) for key in list(value)[:4]) or "nothing"
            hint = "; messages have to go through the chat template first" if "messages" in value else ""
            raise fault(path, f"needs 'prompt' or 'text', has {keys}{hint}", f"line {number}")
        value = value.get("prompt", value.get("text"))
    tokens = isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value)
    if not tokens and not (isinstance(value, str) and value):
        raise fault(path, "a prompt must be a text, or a list of token ids", f"line {number}")
    return value
