"""The prompts to record with: a text file with one a line, or JSON lines."""

import json
from pathlib import Path

from engine.formats.source import MAX_FILE_BYTES, fault, one_clear_line, quoted

Prompt = str | list[int]
"""A text, or the ids of its tokens."""


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file, in order; empty lines are left out.

    A `.jsonl` file has one JSON value a line: a text, a list of token ids, or an object with `prompt` or `text`. Any other
    file is one prompt a line. Raises InputError that names the line.
    """
    with one_clear_line(path):
        if not path.is_file():
            raise fault(path, "there is no such file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise fault(path, f"is larger than {MAX_FILE_BYTES // 1024**2} MB; take fewer prompts")
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
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
