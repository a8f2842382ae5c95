"""Files of prompts."""

import pytest

from engine.recording import prompts
from engine.recording.prompts import read_prompts
from tests.formats.faults import refused


def test_one_a_line(tmp_path):
    (tmp_path / "p.txt").write_text('Explain MoE.\n\n  {"prompt": "taken as it is"}  \r\nletzte\u2028Zeile')
    assert read_prompts(tmp_path / "p.txt") == ["Explain MoE.", '{"prompt": "taken as it is"}', "letzte\u2028Zeile"]


def test_json_lines(tmp_path):
    (tmp_path / "p.jsonl").write_text('"a"\n{"prompt": "two\\nlines", "max_tokens": 9}\n{"text": "c"}\n[5, 0, 7]\n')
    assert read_prompts(tmp_path / "p.jsonl") == ["a", "two\nlines", "c", [5, 0, 7]]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "line 2: is not valid JSON"),
        ('{"id": 7}', "line 2: needs 'prompt' or 'text', has 'id'"),
        ('{"messages": []}', "chat template"),
        ('{"prompt": ""}', "a text, or a list of token ids"),
        ("[]", "a text, or a list of token ids"),
        ("[1, -1]", "a text, or a list of token ids"),
        ("[true]", "a text, or a list of token ids"),
        ("3", "a text, or a list of token ids"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_lines_that_are_no_prompt(tmp_path, line, part):
    (tmp_path / "p.jsonl").write_text(f'"a"\n{line}\n')
    refused(tmp_path / "p.jsonl", part, read=read_prompts)


def test_files_that_hold_none(tmp_path, monkeypatch):
    refused(tmp_path / "none.txt", "no such file", read=read_prompts)
    (tmp_path / "p.txt").write_text(" \n")
    refused(tmp_path / "p.txt", "has no prompt", read=read_prompts)
    (tmp_path / "p.txt").write_bytes(b"\xff\xfe")
    refused(tmp_path / "p.txt", "not UTF-8", read=read_prompts)
    monkeypatch.setattr(prompts, "MAX_FILE_BYTES", 1)
    refused(tmp_path / "p.txt", "larger than", read=read_prompts)
