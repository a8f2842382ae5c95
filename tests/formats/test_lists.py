"""JSON lists and lines: the fast scanner of numbers, bare lists, and the traces of moe-balance."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.formats import format, identify, json_lines, number_lists, read_workload, source
from engine.formats.json_lines import columns, line_of_row, records
from engine.formats.number_lists import BULK, UNREAD, array_of_lists, loads
from engine.model import MoEModel
from tests.cases.examples import examples
from tests.cases.files import balance_line, balance_lines, refused, saver
from tests.cases.files import json_lines as lines_of
from tests.cases.fuzzing import EXAMPLES
from tests.cases.recordings import holds
from tests.cases.vllm import FIRST, META, MOVED, ROWS, SECOND, answer, stats

MANY = 10**6


@pytest.fixture(autouse=True)
def short_texts_too(monkeypatch):
    monkeypatch.setattr(number_lists, "SHORTEST", 0)


def as_lists(value: object) -> object:
    """The value read, with lists again in place of arrays."""
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


BROKEN = (
    *(b"[]", b"[[]]", b"[[1],[]]", b"[[1],[2,3]]", b"[[1],2]", b"[1,[2]]", b"[[[[1]]]]", b"[1", b"[[1]", b"[[1]]]"),
    *(b"[01]", b"[-]", b"[--1]", b"[+1]", b"[1 2]", b"[1,]", b"[,1]", b"[1,,2]", b"[1]2", b"[[1]2]", b"[1\x0c]"),
    *(b"[1.0]", b"[1e3]", b'["1"]', b"[true]", b"[null]", b"[NaN]", b"[-Infinity]", b"[{}]", b"[2147483648]"),
    *(b"[" + b"9" * 5000 + b"]", b"[" * 2000, b"[1],", b"{}", b"1", b""),
)


@pytest.mark.parametrize(
    "text",
    [
        *(b'{"top_indices": %b}' % value for value in BROKEN),
        *(
            b'{"topk_weights": [%b]}' % number
            for number in (b"1.", b".5", b"1e", b"1e+", b"0x1", b"NaN", b"", b"1.5.2", b"[[[1]]]")
        ),
        b'{"text": "so \\"origin_rows\\": [1, 2]", "a": [3]}',
        b'{"text": "so \\"origin_rows": [1, 2]}',
        b'{"a"origin_rows": [1]}',
        *(
            b'{"origin_rows": [1], "a": %b}' % value
            for value in (b"-Infinity", b'"-Infinity"', b"", b'"\xff"', b"[" * 3000 + b"]" * 3000)
        ),
    ],
)
def test_other_texts_are_left_to_the_parser(text):
    assert loads(text, MANY) is None


def test_what_becomes_an_array_and_what_does_not(monkeypatch):
    text = b'{"origin_rows": [1], "a": "\\"origin_rows\\": \\\\", "b": [NaN], "origin_rows": [2], "c": {"topk_experts": [[7]]}}'
    record = as_lists(loads(text, MANY))
    assert record.pop("b")[0] != 0
    assert record == {"origin_rows": [2], "a": '"origin_rows": \\', "c": {"topk_experts": [[7]]}}
    ids = np.array([[1, 2]], np.int32)
    assert array_of_lists(ids, 3) is None
    np.testing.assert_array_equal(array_of_lists(ids, 2), ids)
    assert loads(b'{"origin_rows": [1], "a": [[], [], []]}', most_lists=3) is None
    for weights in (b"[[0.5, 1e-3], [-0, 2.25E+10]]", b"[1, [2, [3]]]"):  # which nobody reads
        assert loads(b'{"topk_weights": %b, "layer": 3}' % weights, MANY) == {"topk_weights": None, "layer": 3}
    monkeypatch.setattr(number_lists, "_MOST_ARRAYS", 2)
    records = loads(b'[{"p2l_map": [1]}, {"p2l_map": [[1], 2]}, {"p2l_map": [3]}]', MANY)
    assert [type(record["p2l_map"]) for record in records] == [np.ndarray, list, list]
    monkeypatch.setattr(number_lists, "SHORTEST", 30)
    assert loads(b'{"origin_rows": [1, 2, 3]}', MANY) is None
    assert loads(b'{"origin_rows": [1, 2, 3, 4, 5]}', MANY) is not None


NUMBERS = st.one_of(st.integers(-3, 300), st.sampled_from([2**31, -(2**31), 2**70, 1.5, 1e300, None, True, "7", "-Infinity"]))
LISTS = st.one_of(
    *(st.lists(st.integers(-1, 40000), min_size=1, max_size=4) for _ in range(2)),
    st.integers(1, 3).flatmap(
        lambda k: st.lists(
            st.lists(st.lists(st.integers(0, 255), min_size=k, max_size=k), min_size=2, max_size=2), min_size=1, max_size=3
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
    st.tuples(st.integers(0, 10**4), st.sampled_from([b"", b",", b"[", b"]", b"0", b"-", b" ", b'"', b"\\", b".", b"\x0c"])),
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
        assert repr(as_lists(_without_weights(read))) == repr(_without_weights(json.loads(text)))


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
    "batches": [record | {"topk_weights": [[0.5, 0.25]]} for record in balance_lines()],
    "loads": [META, stats(1, FIRST), stats(2, SECOND, MOVED)],
    "statistics": [{"logical_count": [FIRST, SECOND]}],
}
ODD = st.sampled_from(
    [
        *([[[1, 2], [3]]], [[[1, 2.0]]], [[["1"]]], [[[None]]], [[[2**70]]], [[[40000, 1]]], [[[-2, 1]]]),
        *([[1]], [[40000]], [], None, 3),
    ]
)
CHANGED = st.sampled_from([key for key in (*BULK, *UNREAD) if key != "prompt_routed_experts"])
CHANGES = st.lists(st.tuples(st.integers(0, 9), CHANGED, ODD), max_size=2)


@pytest.mark.parametrize("form", FORMS)
@given(changes=CHANGES, edits=EDITS, indented=st.booleans())
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_recordings_read_alike_either_way(tmp_path, form, changes, edits, indented):
    records = json.loads(json.dumps(FORMS[form]))
    for place, key, value in changes:
        record = records[place % len(records)]
        (record["choices"][0] if key == "routed_experts" and "choices" in record else record)[key] = value
    data = (json.dumps(records, indent=1) if indented and form == "answers" else "\n".join(map(json.dumps, records))).encode()
    for place, inserted in edits:
        at = place % (len(data) + 1)
        data = data[:at] + inserted + data[at + 1 :]
    path = saved(tmp_path, data, "recording.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        for module in (format, json_lines, source):
            patch.setattr(module, "loads", lambda *_: None)
        strict = outcome(path)
    assert outcome(path) == strict


saved = saver("counts.json")


def test_counts_with_what_was_assumed(tmp_path):
    path = saved(tmp_path, [[0, 0, 0], [1, 2, 3], [4.5, 0, 1]])
    assert identify(path).name == "bare-list"
    load = read_workload(path)
    holds(load, load=[[1, 2, 3], [4.5, 0, 1]], model_layers=(1, 2))
    (finding,) = load.origin.findings
    assert (finding.code, finding.severity) == ("assumed-counts", "warning")
    assert "3 rows" in finding.message
    assert "3 columns" in finding.message
    model = MoEModel(name="m", layers=4, dense_layers=(0, 1), experts=3, experts_per_token=1, d_model=8, d_ff=8)
    known = read_workload(saved(tmp_path, [[1, 2, 3], [3, 2, 1]]), model=model)
    assert known.model_layers == (2, 3)  # the open model's MoE layers, as there are as many
    low_counts = [[0, 1, 2, 0], [2, 1, 1, 1]]
    assert read_workload(saved(tmp_path, low_counts)).layers == 2  # and no placement


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([[1, 2], [3]], ("as many in every layer",)),
        ([[1, 2], [True, 4]], ("as many in every layer",)),
        ([[[1, 2]], [[3, 4]]], ("logical_count", "routed_experts")),
        ([[1], [2]], ("2 layers of 1 experts",)),
        ([[1, -2]], ("layer 0, expert 1", "-2")),
        ([[1, float("nan")]], ("layer 0, expert 1", "nan")),
        ([[0, 1, 2, 0], [2, 1, 0, 1]], ("every row holds each number from 0 to 2", "a placement")),
        ([1, 2, 3], ("JSON that Switchyard does not recognise",)),
    ],
)
def test_other_lists(tmp_path, rows, parts):
    refused(saved(tmp_path, rows), *parts)


def saved_batches(folder: Path, records: list[dict]) -> Path:
    return saved(folder, lines_of(records), "trace.jsonl")


def test_batches_and_their_rows(tmp_path):
    path = saved_batches(tmp_path, balance_lines(topk_weights=[[0.5, 0.5]]))
    assert identify(path).name == "moe-balance"
    trace = read_workload(path)
    holds(trace, experts=[[[0, 5], [4, 1]], [[3, 2], [0, 7]], [[6, 5], [2, 3]]], sequence=[0, 0, 1], source_rank=[1, 0, 3])
    holds(trace, codes=[])
    assert read_workload(saved_batches(tmp_path, balance_lines(rows=False))).source_rank is None
    mixed = [record | ({"origin_rows": []} if record["batch_id"] == "b" else {}) for record in balance_lines()]
    assert read_workload(saved_batches(tmp_path, mixed)).source_rank is None


def test_a_request_written_for_every_row_counts_once(tmp_path):
    copies = [
        record | {"origin_rows": [row] * len(record["topk_experts"]), "origin_row": row}
        for row in range(4)
        for record in balance_lines()
    ]
    trace = read_workload(saved_batches(tmp_path, copies))
    assert (trace.tokens, trace.source_rank) == (3, None)
    (finding,) = trace.origin.findings
    assert finding.code == "copies-left-out"
    assert finding.message.startswith("6 of 8 batches")
    records = [balance_line(1, 7, [[row, 4]], [row], origin_row=row) for row in range(3)]
    others = read_workload(saved_batches(tmp_path, records))  # the same name with other tokens
    assert others.experts[:, 0, 0].tolist() == others.source_rank.tolist() == [0, 1, 2]


LAYERS = [balance_line(1, 0, [[1]]), balance_line(2, 0, [[1]])]


@pytest.mark.parametrize(
    ("records", "parts"),
    [
        ([balance_line("1", 0, [[1]])], ("line 1", "'layer' is '1'")),
        ([balance_line(1, None, [[1]])], ("line 1", "'batch_id'")),
        ([balance_line(1, 0, [[1, 2], [3]])], ("line 1", "'topk_experts'", "[tokens][k]")),
        ([balance_line(1, 0, [])], ("'topk_experts'",)),
        ([balance_line(1, 0, [[1] * 65])], ("at most 64",)),
        ([balance_line(1, 0, [[40000]])], ("outside 0 … 4095",)),
        ([balance_line(1, 0, [[1]], [0, 1])], ("'origin_rows'", "each of 1 tokens")),
        ([balance_line(1, 0, [[1]], [5000])], ("'origin_rows'",)),
        ([balance_line(1, 0, [[1]], "x")], ("'origin_rows'",)),
        ([balance_line(1, 0, [[1]])] * 2, ("line 2", "layer 1 of batch '0' is there twice")),
        ([*LAYERS, balance_line(1, 1, [[1]])], ("batch '1' has no line of layer 2",)),
        ([LAYERS[0], balance_line(2, 0, [[1], [2]])], ("line 2", "2 tokens", "layer 1", "1 with k = 1")),
        ([balance_line(1, 0, [[1]], [0]), balance_line(2, 0, [[1]], [1])], ("line 2", "differ from those of layer 1")),
        ([balance_line(1, 0, [[1]]), balance_line(1, 1, [[1, 2]])], ("line 2", "k = 2, the first batch 1")),
    ],
)
def test_bad_traces(tmp_path, records, parts):
    refused(saved_batches(tmp_path, records), *parts)


written = saver("lines.jsonl")


def test_objects_with_their_line_numbers_of_so_many_bytes_and_lists_and_no_more(tmp_path, monkeypatch):
    path = written(tmp_path, b'\xef\xbb\xbf{"a": 1}\r\n\n  {"a": [2, 3]}\n{"a": "\xc3\xa9"}')
    assert list(records(path)) == [(1, {"a": 1}), (3, {"a": [2, 3]}), (4, {"a": "é"})]
    lines = records(written(tmp_path, b'{"a": 1}\n{"a": '))
    assert next(lines) == (1, {"a": 1})
    with pytest.raises(InputError, match=r"^lines.jsonl, line 2: is not valid JSON, or was cut short"):
        next(lines)
    path = written(tmp_path, b'{"a": 1}\n{"a": 22}\n')
    assert len(records_of(path, longest=10)) == 2
    refused(path, "line 2: has more than", read=records_of, longest=9)
    monkeypatch.setattr(json_lines, "MAX_CONTAINERS", 4)
    refused(written(tmp_path, b'{"a": [[], []]}\n{"a": [[], [], []]}\n'), "line 2: has more than 4 lists", read=records_of)


def records_of(path: Path, **options: int) -> list:
    return list(records(path, **options))


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "holds no JSON lines"),
        (b"[1]\n", "line 1: a JSON object"),
        (b'{"a": "\xff"}', "line 1: is not UTF-8"),
        (b'{"a": ' + b"[" * 100_000, "line 1: the JSON is nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "line 1: is not valid JSON, or was cut short (a number of too many digits)"),
        (b'{"a": 1} {"a": 2}', "line 1: is not valid JSON"),
    ],
)
def test_broken_lines(tmp_path, data, part):
    refused(written(tmp_path, data), part, read=records_of)


SCHEMA = pa.schema([("name", pa.string()), ("at", pa.int64()), ("ids", pa.list_(pa.int64()))])


@pytest.mark.parametrize("odd", ["", ', "odd": 1, "odd": 2'])
def test_columns_whichever_parser_reads_them(tmp_path, odd):
    """pyarrow refuses a key that stands twice."""
    path = written(tmp_path, f'\n{{"at": 1, "ids": [3, 4]{odd}}}\n\n{{"name": "x", "ids": null, "w": [NaN]}}\n')
    assert columns(path, SCHEMA).to_pylist() == [{"name": None, "at": 1, "ids": [3, 4]}, {"name": "x", "at": None, "ids": None}]
    assert [line_of_row(path, row) for row in (0, 1)] == ["line 2", "line 4"]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('{"at": 1.5}', "'at' is '1.5', not a whole number"),
        ('{"at": 9223372036854775808}', "not a whole number"),
        ('{"ids": {"a": 1}}', "not a list of whole numbers"),
        ('{"name": 3}', "not a text"),
        ('{"name": "\\ud800"}', "not a text"),
        ("[]", "a JSON object"),
    ],
)
def test_columns_of_another_type(tmp_path, line, part):
    path = written(tmp_path, b'{"at": 1}\n\n' + line.encode() + b"\n")
    refused(path, "line 3", part, read=lambda path: columns(path, SCHEMA))
