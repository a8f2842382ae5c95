"""Names of files that belong together."""

from pathlib import Path

import pytest

from engine.formats.source import without_ids


@pytest.mark.parametrize(
    ("names", "common"),
    [
        (("routes-layer3.jsonl", "routes-layer12.jsonl"), "routes-layer#.jsonl"),
        (("550e8400-e29b-41d4-a716-446655440000.npz", "0b9c1f6e-03aa-4c8e-9d7f-b1e1a2c3d4e5.npz"), "#.npz"),
        (
            ("chatcmpl-8f3adeadbeefcafe0123456789ab.json", "chatcmpl-0000000000000000000000000000.json"),
            "chatcmpl-#.json",
        ),
        (("cmpl-AbC123xYzQrS.json", "cmpl-9ZZtop0aaaaBB.json"), "cmpl-#.json"),
        (("step_100_rank0.npz", "step_20_rank13.npz"), "step_#_rank#.npz"),
    ],
)
def test_files_of_one_recording(names, common):
    assert {without_ids(Path(name)) for name in names} == {common}


def test_other_words_are_other_recordings():
    names = ("code.npz", "prose.npz", "deepseekv3-code.npz", "qwen3-code.npz", "beef.npz", "conversation.npz")
    assert len({without_ids(Path(name)) for name in names}) == len(names)
