"""Records that are read many at once are read as one by one, broken ones not at all."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats.megatron.records import _parsed, _parsed_together
from engine.formats.source import Source
from tests.cases.examples import examples
from tests.formats.fuzzing import EXAMPLES
from tests.formats.megatron.recordings import record


def lines_of(*choices: list, separators: tuple[str, str] | None = None) -> list[tuple[int, bytes]]:
    return [
        (at, json.dumps(record(0, at, 0, rows), separators=separators).encode()) for at, rows in enumerate(choices, 1)
    ]


@pytest.mark.parametrize("separators", [None, (",", ":")])
def test_lines_as_they_are_written(separators):
    records, experts = _parsed_together(lines_of([[3, -1], [0, 7]], [], [[2, 1]], separators=separators), 2)
    assert [record["top_indices"] for record in records] == [2, 0, 1]
    assert experts.tolist() == [[3, -1], [0, 7], [2, 1]]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *((b"[[1, 2]]", b"[[%b]]" % broken) for broken in (b"01, 2", b"1 2", b"1, 2, 3", b"1, 2.0", b"1, 40000", b"1")),
        *(
            (b"[[1, 2]]", broken)
            for broken in (b"[[]12, 2]", b"[[1, 2],]", b"[[1, 2]", b"[1, 2]]", b"[1, 2]", b"[[[1, 2]]]")
        ),
        (b'"num_tokens": 1', b'"num_tokens": 2'),
        (b'"top_indices"', b'"indices"'),
    ],
)
def test_lines_that_are_broken(before, after):
    first, (number, line), last = lines_of([[3, 4]], [[1, 2]], [[5, 6]])
    assert _parsed_together([first, (number, line.replace(before, after)), last], 2) is None


def test_lines_that_only_together_are_whole():
    (_, first), (_, second) = lines_of([[1, 5], [2, 2]], [[3, 3]])
    halves = [(1, first.replace(b"[2, 2]]", b"[2]")), (2, second.replace(b"[[3, 3]]", b"[3], [4, 6]]"))]
    assert _parsed_together(halves, 2) is None


@given(
    st.lists(st.lists(st.lists(st.integers(-1, 300), min_size=2, max_size=2), max_size=3), min_size=1, max_size=3),
    st.lists(
        st.tuples(st.integers(0, 10**4), st.sampled_from([b"", b",", b"[", b"]", b"0", b" ", b"}", b'"'])), max_size=2
    ),
    st.sampled_from([None, (",", ":")]),
)
@settings(max_examples=examples(2) * EXAMPLES, deadline=None)
def test_together_as_one_by_one(tmp_path_factory, choices, edits, separators):
    lines = lines_of(*choices, separators=separators)
    for place, inserted in edits:
        number, line = lines[place % len(lines)]
        at = place % (len(line) + 1)
        lines[number - 1] = number, line[:at] + inserted + line[at + 1 :]
    if (together := _parsed_together(lines, 2)) is not None:
        records, experts = _parsed(Source(tmp_path_factory.getbasetemp() / "trace.jsonl", "trace"), lines, 2)
        assert together[0] == records
        assert together[1].tolist() == experts.tolist()
