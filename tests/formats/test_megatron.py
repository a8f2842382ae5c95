"""Router traces of Megatron-Core: tokens joined over layers, ranks and micro-batches, pipeline stages, and records."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cli import main
from engine.formats import parts, read_workload
from engine.formats.megatron.records import _parsed, _parsed_together
from engine.formats.source import Source
from tests.cases.examples import examples
from tests.cases.files import refused, saver
from tests.cases.fuzzing import EXAMPLES
from tests.cases.megatron import AFTER_DENSE, MODEL, codes, record, run, trace
from tests.cases.recordings import holds
from tests.cases.refusals import refusal

saved = saver("router_trace_rank0.jsonl")
FOUR = [run([0, 1], rank, seed=rank) for rank in range(4)]
"""Two layers, counted within a stage or the same ones, on four ranks."""


def of_mtp(step: int, rank: int, chosen: list) -> dict:
    return record(step, 0, rank, chosen, block="mtp", mtp_idx=0)


def test_layers_of_a_step_are_put_together(tmp_path):
    records = [record(0, 0, 0, [[1, 2], [3, 4]]), record(0, 1, 0, [[5, 6], [7, 0]])]
    folder = trace(tmp_path / "run", [*records, record(1, 0, 0, [[2, 1]]), record(1, 1, 0, [[0, 3]])])
    (folder / "hidden_states_rank0.bin").write_bytes(b"\0\1" * 40)
    (part,) = parts([folder])
    assert (part.format.name, len(part.paths)) == ("megatron-router-trace", 1)
    experts = [[[1, 2], [5, 6]], [[3, 4], [7, 0]], [[2, 1], [0, 3]]]
    holds(read_workload(folder), experts=experts, model_layers=(0, 1), num_experts=8, source_rank=[0, 0, 0], codes={})


# Data-parallel ranks are sources, in the order of steps.
SOURCES = [
    [record(0, 0, 0, [[0, 1]]), record(1, 0, 0, [[0, 2]])],
    [record(0, 0, 1, [[0, 3], [0, 4]]), record(1, 0, 1, [[0, 5]])],
]
# The rank in the file counts, not its name.
TWELVE = [[record(0, 0, rank, [[0, rank]] * (1 + rank % 2))] for rank in range(12)]
IN_ORDER = [rank for rank in range(12) for _ in range(1 + rank % 2)]
# Two micro-batches, forward one after the other.
BATCHES = [[record(0, layer, 0, [[batch, 2 + layer], [batch, 4 + layer]]) for batch in (0, 1) for layer in (0, 1)]]


@pytest.mark.parametrize(
    ("ranks", "stages", "second", "sources"),
    [
        (SOURCES, None, [[1], [3], [4], [2], [5]], [0, 1, 1, 0, 1]),
        (TWELVE, 1, [[rank] for rank in IN_ORDER], IN_ORDER),
        (BATCHES, None, [[2, 3], [4, 5], [2, 3], [4, 5]], [0] * 4),
    ],
)
def test_order_of_tokens(tmp_path, ranks, stages, second, sources):
    read = read_workload(trace(tmp_path / "run", *ranks), stages=stages)
    assert (read.experts[:, :, 1].tolist(), read.source_rank.tolist()) == (second, sources)


SIDECARS = {"hs_offset": 0, "hs_bytes": 8, "hs_shape": [1, 4], "logit_offset": 0}


@pytest.mark.parametrize(
    ("ranks", "options", "tokens", "sources", "code", "severity"),
    [
        ([run([0, 1], 0, 1, 1) + run([1, 0], 0, 1, 1)], {}, 40, [0], "recomputed-copies", "warning"),
        (
            [run([0, 1], rank, seed=rank // 2) for rank in range(4)],
            {"stages": 1},
            *(2 * 80, [0, 1], "tensor-parallel-copies", "warning"),
        ),
        ([[record(0, 0, 0, [[1, 2]], **SIDECARS)]], {}, 1, [0], "sidecars", "ok"),
        ([run([0, 1, 2, 3], 0, seed=1)[:-1]], {"model": MODEL}, 40, [0], "incomplete-steps", "warning"),
        ([run([0, 1], 0, seed=1), run([0, 1], 2, seed=2)], {}, 160, [0, 1], "missing-ranks", "warning"),
    ],
)
def test_what_is_said_of_a_run(tmp_path, ranks, options, tokens, sources, code, severity):
    read = read_workload(trace(tmp_path / "run", *ranks), **options)
    assert read.tokens == tokens and sorted(set(read.source_rank.tolist())) == sources
    assert codes(read)[code] == severity


def test_layers_that_a_capacity_factor_left_out_are_not_blamed_on_cuda_graphs(tmp_path):
    """The tracer writes no record of a layer in which choices were dropped: micro-batches of its step shift against others."""
    lines = run([0, 1, 2, 3], 0, seed=1, steps=4, micro_batches=2)
    for dropped, said in (((3, 14), "capacity factor"), ((3, 11), "CUDA graphs"), ((31,), "ended in its last step")):
        read = read_workload(trace(tmp_path / "run", [line for at, line in enumerate(lines) if at not in dropped]), model=MODEL)
        (finding,) = (finding for finding in read.origin.findings if finding.code == "incomplete-steps")
        assert said in finding.message, finding.message
        assert read.tokens == 40 * (7 if dropped == (31,) else 4)
        kept = read_workload(trace(tmp_path / "run", lines), model=MODEL).experts
        np.testing.assert_array_equal(read.experts, kept[:280] if dropped == (31,) else kept[-160:])


def test_the_share_of_layers_without_a_record_and_rows_that_were_padded_are_said(tmp_path):
    lines = run([0, 1, 2, 3], 0, seed=1, steps=4, micro_batches=2)
    read = read_workload(trace(tmp_path / "run", [line for at, line in enumerate(lines) if at not in (3, 10, 14)]), model=MODEL)
    assert "at least 3 of 24 layers of micro-batches (12 %)" in str(read.origin.findings)
    one_each = [line for at, line in enumerate(lines[:16]) if at not in (3, 14)]
    said = refusal(read_workload, trace(tmp_path / "run", one_each), model=MODEL)
    assert "here at least 1 of 8 layers of micro-batches (12 %): record without one" in said, said
    # Four places of each expert, in the order of tokens: two tokens have all experts, the others none.
    rows = np.arange(32).reshape(16, 2) % 8
    padded = read_workload(trace(tmp_path / "padded", [record(0, 0, 0, rows.tolist())]))
    assert "padded-to-capacity" not in codes(padded)  # every row ascends, as a router's does
    rows = np.roll(rows, 1)
    padded = read_workload(trace(tmp_path / "padded", [record(0, 0, 0, rows.tolist())]))
    assert codes(padded)["padded-to-capacity"] == "error"
    rows[5, 1] = (rows[5, 1] + 1) % 8
    assert "padded-to-capacity" not in codes(read_workload(trace(tmp_path / "padded", [record(0, 0, 0, rows.tolist())])))


def test_mtp_is_never_mixed_with_the_decoder(tmp_path):
    mtp = [of_mtp(step, 0, [[6, 7]] * 5) for step in range(2)]
    read = read_workload(trace(tmp_path / "run", run([0, 1, 2, 3], 0, seed=1) + mtp), model=MODEL)
    assert read.experts.shape == (80, 4, 2)
    alone = read_workload(trace(tmp_path / "alone", run([0, 1, 2, 3], 0, seed=1)), model=MODEL)
    np.testing.assert_array_equal(read.load, alone.load)
    assert codes(read)["mtp-left-out"] == "warning"


def test_compact_json_choices_of_minus_one_and_steps_without_tokens(tmp_path):
    lines = [record(0, 0, 0, [[1, -1], [2, 3]]), record(0, 1, 0, [[0, 1], [-1, -1]])]
    path = saved(tmp_path, "\n".join(json.dumps(line, separators=(",", ":")) for line in lines))
    assert read_workload(path).experts.tolist() == [[[1, -1], [0, 1]], [[2, 3], [-1, -1]]]
    read = read_workload(trace(tmp_path / "run", [record(0, 0, 0, []), record(1, 0, 0, [[1, 2]])]))
    holds(read, experts=[[[1, 2]]], codes={})


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (record(0, 0, 0, [[1, 2, 3]]), "line 2: token 0 has 3 experts, others 2"),
        (record(0, 0, 0, [[1, 40_000]]), "line 2: token 0 chose expert '40000'"),
        (record(0, 0, 0, [[1, -2]]), "line 2: token 0 chose expert '-2'"),
        (record(0, 0, 0, [[1, 1.5]]), "line 2: token 0 chose expert '1.5'"),
        (record(0, 0, 0, [[1, 2]], num_tokens=10**12), "line 2: num_tokens is '1000000000000'"),
        (record(0, 0, 0, [[1, 2]], block="encoder"), "line 2: block must be decoder or mtp, not 'encoder'"),
        (record(0, 0, 1, [[1, 2]]), "line 2: is of rank 1"),
        (record(0, True, 0, [[1, 2]]), "line 2: layer must be a whole number"),
        (record(2**40, 0, 0, [[1, 2]]), "line 2: step must be a whole number"),
        ({"step": 0, "layer": 0, "rank": 0}, "line 2: needs top_indices"),
        (record(0, 0, 0, [[1, 2]]) | {"top_indices": [1, 2]}, "line 2: needs top_indices"),
        *((end, "line 2") for end in ('{"step": 0', "[1, 2]", '{"step": 0}, {"step": 1}', '{"top_indices": [[1 2]]}')),
    ],
)
def test_bad_lines(tmp_path, line, part):
    text = line if isinstance(line, str) else json.dumps(line)
    refused(saved(tmp_path, json.dumps(record(0, 0, 0, [[1, 2]])) + "\n" + text), part)


@pytest.mark.parametrize(
    ("ranks", "options", "said"),
    [
        ([[of_mtp(0, 0, [[1, 2]])]], {}, ["multi-token prediction (MTP) alone"]),
        ([[record(0, 0, 0, [])]], {}, ["no record has any tokens"]),
        ([run([0], 0, 1), [record(0, 0, 1, [[1, 2, 3]], topk=3)]], {}, ["have 2 and 3 experts per token"]),
        (FOUR, {}, ["may be of 1 or 2 or 4 pipeline stages", "(--stages", "(--model)"]),
        (FOUR, {"stages": 4, "model": MODEL}, ["which no number of pipeline stages makes the 4 MoE layers of small"]),
        (FOUR[:1], {"model": MODEL}, ["has layers 0 … 1, ", " give the files of all ranks"]),  # one of several
        ([FOUR[0], FOUR[3]], {"stages": 2}, ["2 pipeline stages do not fit its 2 ranks; 1 would"]),
        ([FOUR[0], run([0], 1, seed=1), FOUR[3]], {}, ["recorded different layers, in no order of pipeline stages"]),
    ],
)
def test_ranks_that_make_no_recording(tmp_path, ranks, options, said):
    message = refusal(read_workload, trace(tmp_path / "run", *ranks), **options)
    assert message.startswith("router_trace_rank") and all(part in message for part in said), message


def test_two_files_of_one_rank_and_files_too_large_together(tmp_path, monkeypatch):
    folder = trace(tmp_path / "run", run([0], 0, seed=1))
    (folder / "router_trace_rank1.jsonl").write_bytes((folder / "router_trace_rank0.jsonl").read_bytes())
    assert "is of rank 0, as is router_trace_rank0.jsonl" in refusal(read_workload, folder)
    monkeypatch.setattr("engine.formats.megatron.trace.MOST_TEXT", 500)
    assert "is one of 2 files of more than" in refusal(read_workload, folder)


def test_layers_counted_through_all_stages_or_within_one(tmp_path):
    """Forward hooks: layer 0 of rank 0 and layer 0 of rank 2 are different layers."""
    read = read_workload(trace(tmp_path / "run", *FOUR), model=MODEL)
    holds(read, model_layers=(0, 1, 2, 3), tokens=2 * 80)
    assert sorted(set(read.source_rank.tolist())) == [0, 1]
    of_source = read.experts[read.source_rank == 0]
    np.testing.assert_array_equal(of_source[:40, 0], FOUR[0][0]["top_indices"])
    np.testing.assert_array_equal(of_source[:40, 2], FOUR[2][0]["top_indices"])
    assert codes(read) == {"pipeline-stages": "ok"}
    # The sink of routing replay: the numbers prove the stages, even without a model.
    folder = trace(tmp_path / "replayed", run([1, 2], 0, seed=0), run([3, 4], 1, seed=1))
    read = read_workload(folder)
    assert read.experts.shape == (80, 4, 2)
    holds(read, model_layers=None, codes={"pipeline-stages": "ok", "layer-numbering": "warning"})
    assert read_workload(folder, model=MODEL).model_layers == (0, 1, 2, 3)


def test_numbers_from_1_and_stages_that_begin_with_a_dense_layer(tmp_path):
    folder = trace(tmp_path / "run", run([1, 2, 3, 4], 0, seed=0))
    read = read_workload(folder)
    assert read.model_layers is None
    assert codes(read)["layer-numbering"] == "warning"
    assert read_workload(folder, model=MODEL).model_layers == (0, 1, 2, 3)
    for numbers in ([1, 2, 3, 4], [2, 3, 4, 5]):
        read = read_workload(trace(tmp_path / "dense", run(numbers, 0, seed=0)), model=AFTER_DENSE)
        assert read.model_layers == (1, 2, 3, 4)
    # Model layers 1, 2 of the first stage (0 is dense), 3 and 4 of the second, counted within it.
    folder = trace(tmp_path / "run", run([1, 2], 0, seed=0), run([0, 1], 1, seed=1))
    assert read_workload(folder, model=AFTER_DENSE).model_layers == (1, 2, 3, 4)
    assert read_workload(folder).layers == 4


LAST_WITH_MTP = [own + [of_mtp(0, rank, [[0, 1]] * 40)] * (rank > 1) for rank, own in enumerate(FOUR)]


@pytest.mark.parametrize(
    ("ranks", "stages", "shape"),
    [
        # Layers 2 to 5, the first being dense, on two ranks a stage: four stages would repeat numbers.
        ([run([2, 3] if rank < 2 else [4, 5], rank, seed=rank) for rank in range(4)], None, (160, 4, 2)),
        ([run([2, 3, 4, 5], rank, seed=rank) for rank in range(4)], None, (320, 4, 2)),
        (FOUR, 1, (320, 2, 2)),
        (FOUR, 2, (160, 4, 2)),
        (LAST_WITH_MTP, None, (160, 4, 2)),
        ([FOUR[0], run([0], 1, seed=1), run([0, 1], 2, seed=2)], 3, (80, 5, 2)),
        # Serving batches differ between data-parallel ranks; stages have the same ones.
        ([run([0, 1], rank, seed=rank, tokens=10 + rank) for rank in range(2)], None, (2 * (10 + 11), 2, 2)),
    ],
)
def test_layers_and_sources_of_ranks(tmp_path, ranks, stages, shape):
    assert read_workload(trace(tmp_path / "run", *ranks), stages=stages).experts.shape == shape


def test_the_same_choices_are_the_same_layer_and_micro_batches_go_through_all_stages(tmp_path):
    ranks = [run([0, 1], rank, seed=rank, micro_batches=3) for rank in range(2)]
    read = read_workload(trace(tmp_path / "run", *ranks), model=MODEL)
    assert read.experts.shape == (2 * 3 * 40, 4, 2)
    np.testing.assert_array_equal(read.experts[40:80, 2], ranks[1][2]["top_indices"])
    read = read_workload(trace(tmp_path / "run", *(run([0, 1], rank, seed=5) for rank in range(4))))
    assert read.experts.shape == (80, 2, 2)
    assert codes(read) == {"tensor-parallel-copies": "warning"}


def test_stages_on_the_command_line(tmp_path, capsys):
    folder = trace(tmp_path / "run", *FOUR)
    assert main(["inspect", str(folder), "--json"]) == 2
    assert "--stages" in capsys.readouterr().err
    assert main(["inspect", str(folder), "--stages", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["layers"], answer["tokens"]) == (4, 160)


def lines_of(*choices: list, separators: tuple[str, str] | None = None) -> list[tuple[int, bytes]]:
    return [(at, json.dumps(record(0, at, 0, rows), separators=separators).encode()) for at, rows in enumerate(choices, 1)]


BROKEN = (b"[[01, 2]]", b"[[1 2]]", b"[[1, 2, 3]]", b"[[1, 2.0]]", b"[[1, 40000]]", b"[[1]]", b"[[]12, 2]", b"[[1, 2],]")


def test_lines_that_are_broken_alone_or_whole_only_together():
    first, (number, line), last = lines_of([[3, 4]], [[1, 2]], [[5, 6]])
    for before, after in (
        *((b"[[1, 2]]", broken) for broken in (*BROKEN, b"[[1, 2]", b"[1, 2]]", b"[1, 2]", b"[[[1, 2]]]")),
        *((b'"num_tokens": 1', b'"num_tokens": 2'), (b'"top_indices"', b'"indices"')),
    ):
        assert _parsed_together([first, (number, line.replace(before, after)), last], 2) is None
    (_, first), (_, second) = lines_of([[1, 5], [2, 2]], [[3, 3]])
    halves = [(1, first.replace(b"[2, 2]]", b"[2]")), (2, second.replace(b"[[3, 3]]", b"[3], [4, 6]]"))]
    assert _parsed_together(halves, 2) is None


@given(
    st.lists(st.lists(st.lists(st.integers(-1, 300), min_size=2, max_size=2), max_size=3), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 10**4), st.sampled_from([b"", b",", b"[", b"]", b"0", b" ", b"}", b'"'])), max_size=2),
    st.sampled_from([None, (",", ":")]),
)
@settings(max_examples=examples(2) * EXAMPLES, deadline=None)
def test_together_as_one_by_one(tmp_path_factory, choices, edits, separators):
    lines = lines_of(*choices, separators=separators)
    for place, inserted in edits:
        number, line = lines[place % len(lines)]
        at = place % (len(line) + 1)
        lines[number - 1] = number, line[:at] + inserted + line[at + 1 :]
    if not edits and any(choices):
        assert _parsed_together(lines, 2)[1].tolist() == [row for rows in choices for row in rows]
    if (together := _parsed_together(lines, 2)) is not None:
        records, experts = _parsed(Source(tmp_path_factory.getbasetemp() / "trace.jsonl", "trace"), lines, 2)
        assert together[0] == records
        assert together[1].tolist() == experts.tolist()
