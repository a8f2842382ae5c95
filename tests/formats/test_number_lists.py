"""Lists of numbers read straight from the text of JSON: as Python's parser reads them, or not at all."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.formats import format, json_lines, number_lists, read_workload, source
from engine.formats.number_lists import BULK, UNREAD, array_of_lists, loads
from tests.cases.examples import examples
from tests.formats.fuzzing import EXAMPLES
from tests.formats.test_moe_balance import lines as batches
from tests.formats.vllm.test_eplb import FIRST, META, MOVED, SECOND, stats
from tests.formats.vllm.test_responses import ROWS, answer

MANY = 10**6


@pytest.fixture(autouse=True)
def short_texts_too(monkeypatch):
    monkeypatch.setattr(number_lists, "SHORTEST", 0)


def as_lists(value: object) -> object:
    """What was read, with lists again in place of arrays."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    return [as_lists(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (b'{"routed_experts": [[[1,2],[3,4]],[[5,6],[7,8]]]}', (2, 2, 2)),
        (b'{"topk_experts" :\n[ [ 0 , -1 ] ,\t[12,2147483647]\r\n] }', (2, 2)),
        (b'{"origin_rows":[3]}', (1,)),
    ],
)
def test_regular_lists_become_arrays(text, shape):
    record = loads(text, MANY)
    (array,) = record.values()
    assert (array.shape, array.dtype) == (shape, np.int32)
    assert as_lists(record) == json.loads(text)


@pytest.mark.parametrize(
    "value",
    [
        *(b"[]", b"[[]]", b"[[1],[]]", b"[[1],[2,3]]", b"[[1],2]", b"[1,[2]]", b"[[[[1]]]]", b"[1", b"[[1]", b"[[1]]]"),
        *(b"[01]", b"[-]", b"[--1]", b"[+1]", b"[1 2]", b"[1,]", b"[,1]", b"[1,,2]", b"[1]2", b"[[1]2]", b"[1\x0c]"),
        *(b"[1.0]", b"[1e3]", b'["1"]', b"[true]", b"[null]", b"[NaN]", b"[-Infinity]", b"[{}]", b"[2147483648]"),
        *(b"[" + b"9" * 5000 + b"]", b"[" * 2000, b"[1],", b"{}", b"1", b""),
    ],
)
def test_other_lists_are_left_to_the_parser(value):
    assert loads(b'{"top_indices": %b}' % value, MANY) is None


@pytest.mark.parametrize(
    "text",
    [
        b'{"text": "so \\"origin_rows\\": [1, 2]", "a": [3]}',
        b'{"text": "so \\"origin_rows": [1, 2]}',
        b'{"a"origin_rows": [1]}',
        b'{"origin_rows": [1], "a": -Infinity}',
        b'{"origin_rows": [1], "a": "-Infinity"}',
        b'{"origin_rows": [1], "a": }',
        b'{"origin_rows": [1], "a": "\xff"}',
        b'{"origin_rows": [1], "a": ' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"origin_rows": [1], "a": [[], [], []]}',
    ],
)
def test_other_texts_are_left_to_the_parser(text):
    assert loads(text, most_lists=3) is None


def test_the_last_of_equal_keys_counts_and_texts_stay():
    text = b'{"origin_rows": [1], "a": "\\"origin_rows\\": \\\\", "b": [NaN], "origin_rows": [2], "c": {"topk_experts": [[7]]}}'
    record = as_lists(loads(text, MANY))
    assert record.pop("b")[0] != 0
    assert record == {"origin_rows": [2], "a": '"origin_rows": \\', "c": {"topk_experts": [[7]]}}


@pytest.mark.parametrize(
    ("weights", "numbers"),
    [
        (b"[[0.5, 1e-3], [-0, 2.25E+10]]", True),
        (b"[1, [2, [3]]]", True),
        *(
            (b"[%b]" % number, False)
            for number in (b"1.", b".5", b"1e", b"1e+", b"0x1", b"NaN", b"", b"1.5.2", b"[[[1]]]")
        ),
    ],
)
def test_what_nobody_reads_is_checked_alone(weights, numbers):
    text = b'{"topk_weights": %b, "layer": 3}' % weights
    assert loads(text, MANY) == ({"topk_weights": None, "layer": 3} if numbers else None)


def test_short_texts_are_left_to_the_parser(monkeypatch):
    monkeypatch.setattr(number_lists, "SHORTEST", 30)
    assert loads(b'{"origin_rows": [1, 2, 3]}', MANY) is None
    assert loads(b'{"origin_rows": [1, 2, 3, 4, 5]}', MANY) is not None


def test_so_many_arrays_and_no_more(monkeypatch):
    monkeypatch.setattr(number_lists, "_MOST_ARRAYS", 2)
    records = loads(b'[{"p2l_map": [1]}, {"p2l_map": [[1], 2]}, {"p2l_map": [3]}]', MANY)
    assert [type(record["p2l_map"]) for record in records] == [np.ndarray, list, list]


def test_arrays_are_held_to_the_axes_asked_for():
    ids = np.array([[1, 2]], np.int32)
    assert array_of_lists(ids, 3) is None
    np.testing.assert_array_equal(array_of_lists(ids, 2), ids)


NUMBERS = st.one_of(
    st.integers(-3, 300), st.sampled_from([2**31, -(2**31), 2**70, 1.5, 1e300, None, True, "7", "-Infinity"])
)
LISTS = st.one_of(
    *(st.lists(st.integers(-1, 40000), min_size=1, max_size=4) for _ in range(2)),
    st.integers(1, 3).flatmap(
        lambda k: st.lists(
            st.lists(st.lists(st.integers(0, 255), min_size=k, max_size=k), min_size=2, max_size=2),
            min_size=1,
            max_size=3,
        )
    ),
    st.recursive(NUMBERS, lambda inner: st.lists(inner, max_size=3), max_leaves=8),
)
KEYS = st.sampled_from([*BULK, *UNREAD, "text", 'a "origin_rows": [1]'])
DOCUMENTS = st.recursive(
    st.dictionaries(KEYS, st.one_of(LISTS, st.text(max_size=3), st.just('"origin_rows": [1]')), max_size=4),
    lambda inner: st.one_of(st.dictionaries(KEYS, inner, max_size=3), st.lists(inner, max_size=3)),
    max_leaves=4,
)
EDITS = st.lists(
    st.tuples(
        st.integers(0, 10**4), st.sampled_from([b"", b",", b"[", b"]", b"0", b"-", b" ", b'"', b"\\", b".", b"\x0c"])
    ),
    max_size=2,
)


@given(DOCUMENTS, st.sampled_from([(",", ":"), None, (" ,\n", "\t: ")]), EDITS)
@settings(max_examples=examples(2) * EXAMPLES, deadline=None)
def test_read_as_the_parser_reads_it_or_not_at_all(document, separators, edits):
    text = json.dumps(document, separators=separators).encode()
    for place, inserted in edits:
        at = place % (len(text) + 1)
        text = text[:at] + inserted + text[at + 1 :]
    read = loads(text, MANY)
    if read is not None:
        expected = json.loads(text)
        assert repr(as_lists(_without_weights(read))) == repr(_without_weights(expected))


def _without_weights(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_weights(item) for key, item in value.items() if key not in UNREAD}
    return [_without_weights(item) for item in value] if isinstance(value, list) else value


def outcome(path: Path) -> object:
    """All that is known of the recording in a file, or why there is none."""
    try:
        workload = read_workload(path)
    except InputError as error:
        return str(error)
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(workload).items()}


FORMS = {
    "answers": [answer(ROWS), answer(ROWS[2:], prompt_routed_experts=ROWS[:2])],
    "batches": [record | {"topk_weights": [[0.5, 0.25]]} for record in batches()],
    "loads": [META, stats(1, FIRST), stats(2, SECOND, MOVED)],
    "statistics": [{"logical_count": [FIRST, SECOND]}],
}
ODD = st.sampled_from(
    [
        [[[1, 2], [3]]],
        [[[1, 2.0]]],
        [[["1"]]],
        [[[None]]],
        [[[2**70]]],
        [[[40000, 1]]],
        [[[-2, 1]]],
        [[1]],
        [[40000]],
        [],
        None,
        3,
    ]
)
CHANGES = st.lists(
    st.tuples(
        st.integers(0, 9), st.sampled_from([key for key in (*BULK, *UNREAD) if key != "prompt_routed_experts"]), ODD
    ),
    max_size=2,
)


@pytest.mark.parametrize("form", FORMS)
@given(changes=CHANGES, edits=EDITS, indented=st.booleans())
@settings(max_examples=EXAMPLES, deadline=None)
def test_recordings_read_alike_either_way(form, changes, edits, indented, tmp_path_factory):
    records = json.loads(json.dumps(FORMS[form]))
    for place, key, value in changes:
        record = records[place % len(records)]
        (record["choices"][0] if key == "routed_experts" and "choices" in record else record)[key] = value
    text = json.dumps(records, indent=1) if indented and form == "answers" else "\n".join(map(json.dumps, records))
    data = text.encode()
    for place, inserted in edits:
        at = place % (len(data) + 1)
        data = data[:at] + inserted + data[at + 1 :]
    path = tmp_path_factory.mktemp("either") / "recording.jsonl"
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        for module in (format, json_lines, source):
            patch.setattr(module, "loads", lambda *_: None)
        strict = outcome(path)
    assert outcome(path) == strict
