"""Router traces of Megatron-Core: tokens joined over layers, ranks and micro-batches, pipeline stages, and records."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cli import main
from engine.errors import InputError
from engine.formats import parts, read_workload
from engine.formats.megatron.records import _parsed, _parsed_together
from engine.formats.source import Source
from tests.cases.examples import examples
from tests.cases.files import refused
from tests.cases.fuzzing import EXAMPLES
from tests.cases.megatron import AFTER_DENSE, MODEL, codes, record, run, trace


def test_layers_of_a_step_are_put_together(tmp_path):
    folder = trace(
        tmp_path / "run",
        [
            record(0, 0, 0, [[1, 2], [3, 4]]),
            record(0, 1, 0, [[5, 6], [7, 0]]),
            record(1, 0, 0, [[2, 1]]),
            record(1, 1, 0, [[0, 3]]),
        ],
    )
    read = read_workload(folder)
    np.testing.assert_array_equal(read.experts, [[[1, 2], [5, 6]], [[3, 4], [7, 0]], [[2, 1], [0, 3]]])
    assert read.model_layers == (0, 1)
    assert read.num_experts == 8
    assert read.source_rank.tolist() == [0, 0, 0]
    assert codes(read) == {}


def test_files_of_ranks_are_one_recording(tmp_path):
    folder = trace(tmp_path / "run", *(run([0, 1, 2, 3], rank, seed=rank) for rank in range(3)))
    (folder / "hidden_states_rank0.bin").write_bytes(b"\0\1" * 40)
    (part,) = parts([folder])
    assert part.format.name == "megatron-router-trace"
    assert len(part.paths) == 3


def test_data_parallel_ranks_are_sources_in_order_of_steps(tmp_path):
    folder = trace(
        tmp_path / "run",
        [record(0, 0, 0, [[0, 1]]), record(1, 0, 0, [[0, 2]])],
        [record(0, 0, 1, [[0, 3], [0, 4]]), record(1, 0, 1, [[0, 5]])],
    )
    read = read_workload(folder)
    assert read.experts[:, 0, 1].tolist() == [1, 3, 4, 2, 5]
    assert read.source_rank.tolist() == [0, 1, 1, 0, 1]


def test_the_rank_in_the_file_counts_not_its_name(tmp_path):
    folder = trace(tmp_path / "run", *([record(0, 0, rank, [[0, rank]] * (1 + rank % 2))] for rank in range(12)))
    read = read_workload(folder, stages=1)
    assert read.experts[:, 0, 1].tolist() == [0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7, 8, 9, 9, 10, 11, 11]


def test_micro_batches_of_a_training_step_follow_each_other(tmp_path):
    lines = [
        record(0, layer, 0, [[batch, 2 + layer], [batch, 4 + layer]])  # two micro-batches, forward one after the other
        for batch in (0, 1)
        for layer in (0, 1)
    ]
    read = read_workload(trace(tmp_path / "run", lines))
    assert read.experts.tolist() == [[[0, 2], [0, 3]], [[0, 4], [0, 5]], [[1, 2], [1, 3]], [[1, 4], [1, 5]]]


def test_recomputed_activations_count_once(tmp_path):
    lines = run([0, 1], 0, seed=1, steps=1) + run([1, 0], 0, seed=1, steps=1)
    read = read_workload(trace(tmp_path / "run", lines))
    assert read.tokens == 40
    assert codes(read)["recomputed-copies"] == "warning"


def test_tensor_parallel_copies_count_once(tmp_path):
    copies = [run([0, 1], rank, seed=rank // 2) for rank in range(4)]
    read = read_workload(trace(tmp_path / "run", *copies), stages=1)
    assert read.tokens == 2 * 80
    assert sorted(set(read.source_rank.tolist())) == [0, 1]
    assert codes(read)["tensor-parallel-copies"] == "warning"


def test_mtp_is_never_mixed_with_the_decoder(tmp_path):
    mtp = [record(step, 0, 0, [[6, 7]] * 5, block="mtp", mtp_idx=0) for step in range(2)]
    read = read_workload(trace(tmp_path / "run", run([0, 1, 2, 3], 0, seed=1) + mtp), model=MODEL)
    assert read.experts.shape == (80, 4, 2)
    alone = read_workload(trace(tmp_path / "alone", run([0, 1, 2, 3], 0, seed=1)), model=MODEL)
    np.testing.assert_array_equal(read.load, alone.load)
    assert codes(read)["mtp-left-out"] == "warning"


def test_saved_hidden_states_are_a_note(tmp_path):
    lines = [record(0, 0, 0, [[1, 2]], hs_offset=0, hs_bytes=8, hs_shape=[1, 4], logit_offset=0)]
    assert codes(read_workload(trace(tmp_path / "run", lines)))["sidecars"] == "ok"


def test_a_step_cut_short_is_left_out(tmp_path):
    read = read_workload(trace(tmp_path / "run", run([0, 1, 2, 3], 0, seed=1)[:-1]), model=MODEL)
    assert read.tokens == 40
    assert codes(read)["incomplete-steps"] == "warning"


def test_a_missing_rank_is_said(tmp_path):
    read = read_workload(trace(tmp_path / "run", run([0, 1], 0, seed=1), run([0, 1], 2, seed=2)))
    assert sorted(set(read.source_rank.tolist())) == [0, 1]
    assert codes(read)["missing-ranks"] == "warning"


def test_compact_json_and_choices_of_minus_one(tmp_path):
    lines = [record(0, 0, 0, [[1, -1], [2, 3]]), record(0, 1, 0, [[0, 1], [-1, -1]])]
    path = tmp_path / "router_trace_rank0.jsonl"
    path.write_text("\n".join(json.dumps(line, separators=(",", ":")) for line in lines))
    assert read_workload(path).experts.tolist() == [[[1, -1], [0, 1]], [[2, 3], [-1, -1]]]


def test_a_step_without_tokens_on_a_rank(tmp_path):
    lines = [record(0, 0, 0, []), record(1, 0, 0, [[1, 2]])]
    read = read_workload(trace(tmp_path / "run", lines))
    assert read.experts.tolist() == [[[1, 2]]]
    assert codes(read) == {}


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (record(0, 0, 0, [[1, 2, 3]]), "line 2: token 0 has 3 experts, others 2"),
        (record(0, 0, 0, [[1, 2], [3]]), "line 2: token 1 has 1 experts, others 2"),
        (record(0, 0, 0, [[1, 40_000]]), "line 2: token 0 chose expert '40000'"),
        (record(0, 0, 0, [[1, 10**30]]), "line 2: token 0 chose expert"),
        (record(0, 0, 0, [[1, -2]]), "line 2: token 0 chose expert '-2'"),
        (record(0, 0, 0, [[1, 1.5]]), "line 2: token 0 chose expert '1.5'"),
        (record(0, 0, 0, [[1, None]]), "line 2: token 0 chose expert 'None'"),
        (record(0, 0, 0, [[1, 2]], num_tokens=10**12), "line 2: num_tokens is '1000000000000'"),
        (record(0, 0, 0, [[1, 2]], num_tokens="1"), "line 2: num_tokens is '1'"),
        (record(0, 0, 0, [[1, 2]], block="encoder"), "line 2: block must be decoder or mtp, not 'encoder'"),
        (record(0, 0, 1, [[1, 2]]), "line 2: is of rank 1"),
        (record(0, -1, 0, [[1, 2]]), "line 2: layer must be a whole number"),
        (record(0, True, 0, [[1, 2]]), "line 2: layer must be a whole number"),
        (record(2**40, 0, 0, [[1, 2]]), "line 2: step must be a whole number"),
        ({"step": 0, "layer": 0, "rank": 0}, "line 2: needs top_indices"),
        (record(0, 0, 0, [[1, 2]]) | {"top_indices": [1, 2]}, "line 2: needs top_indices"),
    ],
)
def test_bad_lines(tmp_path, line, part):
    path = tmp_path / "router_trace_rank0.jsonl"
    path.write_text(json.dumps(record(0, 0, 0, [[1, 2]])) + "\n" + json.dumps(line))
    refused(path, part)


@pytest.mark.parametrize("end", ['{"step": 0', "[1, 2]", '{"step": 0}, {"step": 1}', '{"top_indices": [[1 2]]}'])
def test_lines_that_are_no_objects(tmp_path, end):
    path = tmp_path / "router_trace_rank0.jsonl"
    path.write_text(json.dumps(record(0, 0, 0, [[1, 2]])) + "\n" + end)
    refused(path, "line 2")


def test_mtp_alone(tmp_path):
    lines = [record(0, 0, 0, [[1, 2]], block="mtp", mtp_idx=0)]
    refused(trace(tmp_path / "run", lines) / "router_trace_rank0.jsonl", "multi-token prediction (MTP) alone")


def test_ranks_of_different_runs(tmp_path):
    folder = trace(tmp_path / "run", run([0], 0, seed=1), [record(0, 0, 1, [[1, 2, 3]], topk=3)])
    with pytest.raises(InputError, match="have 2 and 3 experts per token"):
        read_workload(folder)


def test_no_tokens_at_all(tmp_path):
    refused(trace(tmp_path / "run", [record(0, 0, 0, [])]) / "router_trace_rank0.jsonl", "no record has any tokens")


def test_two_files_of_one_rank(tmp_path):
    folder = trace(tmp_path / "run", run([0], 0, seed=1))
    (folder / "router_trace_rank1.jsonl").write_bytes((folder / "router_trace_rank0.jsonl").read_bytes())
    with pytest.raises(InputError, match=r"is of rank 0, as is router_trace_rank0\.jsonl"):
        read_workload(folder)


def test_files_too_large_together(tmp_path, monkeypatch):
    folder = trace(tmp_path / "run", *(run([0], rank, seed=rank) for rank in range(2)))
    monkeypatch.setattr("engine.formats.megatron.trace.MOST_TEXT", 500)
    with pytest.raises(InputError, match="is one of 2 files of more than"):
        read_workload(folder)


def test_layers_counted_within_a_stage_are_placed_by_the_model(tmp_path):
    """Forward hooks: layer 0 of rank 0 and layer 0 of rank 2 are different layers."""
    ranks = [run([0, 1], rank, seed=rank) for rank in range(4)]
    read = read_workload(trace(tmp_path / "run", *ranks), model=MODEL)
    assert read.model_layers == (0, 1, 2, 3)
    assert read.tokens == 2 * 80
    assert sorted(set(read.source_rank.tolist())) == [0, 1]
    of_source = read.experts[read.source_rank == 0]
    np.testing.assert_array_equal(of_source[:40, 0], ranks[0][0]["top_indices"])
    np.testing.assert_array_equal(of_source[:40, 2], ranks[2][0]["top_indices"])
    assert codes(read) == {"pipeline-stages": "ok"}


def test_layers_counted_from_1_through_all_stages(tmp_path):
    """The sink of routing replay: the numbers prove the stages, even without a model."""
    folder = trace(tmp_path / "run", run([1, 2], 0, seed=0), run([3, 4], 1, seed=1))
    read = read_workload(folder)
    assert read.experts.shape == (80, 4, 2)
    assert read.model_layers is None
    assert codes(read) == {"pipeline-stages": "ok", "layer-numbering": "warning"}
    assert read_workload(folder, model=MODEL).model_layers == (0, 1, 2, 3)


@pytest.mark.parametrize("numbers", [[1, 2, 3, 4], [2, 3, 4, 5]])
def test_a_dense_first_layer_in_both_numberings(tmp_path, numbers):
    read = read_workload(trace(tmp_path / "run", run(numbers, 0, seed=0)), model=AFTER_DENSE)
    assert read.model_layers == (1, 2, 3, 4)


def test_numbers_without_0_or_a_model_may_be_either(tmp_path):
    folder = trace(tmp_path / "run", run([1, 2, 3, 4], 0, seed=0))
    read = read_workload(folder)
    assert read.model_layers is None
    assert codes(read)["layer-numbering"] == "warning"
    assert read_workload(folder, model=MODEL).model_layers == (0, 1, 2, 3)


def test_layers_counted_through_stages_of_several_ranks(tmp_path):
    """Layers 2 to 5, the first being dense, on two ranks a stage: four stages would repeat numbers."""
    ranks = [run([2, 3] if rank < 2 else [4, 5], rank, seed=rank) for rank in range(4)]
    assert read_workload(trace(tmp_path / "two", *ranks)).experts.shape == (160, 4, 2)
    ranks = [run([2, 3, 4, 5], rank, seed=rank) for rank in range(4)]
    assert read_workload(trace(tmp_path / "all", *ranks)).experts.shape == (320, 4, 2)


def test_uneven_stages_with_a_dense_first_layer(tmp_path):
    """Model layers 1, 2 of the first stage (0 is dense), 3 and 4 of the second, counted within it."""
    folder = trace(tmp_path / "run", run([1, 2], 0, seed=0), run([0, 1], 1, seed=1))
    assert read_workload(folder, model=AFTER_DENSE).model_layers == (1, 2, 3, 4)
    assert read_workload(folder).layers == 4


def test_the_same_layers_on_all_ranks_may_be_stages(tmp_path):
    folder = trace(tmp_path / "run", *(run([0, 1], rank, seed=rank) for rank in range(4)))
    with pytest.raises(InputError, match=r"may be of 1 or 2 or 4 pipeline stages.*\(--stages.*\(--model\)"):
        read_workload(folder)
    assert read_workload(folder, stages=1).experts.shape == (320, 2, 2)
    assert read_workload(folder, stages=2).experts.shape == (160, 4, 2)
    assert read_workload(folder, stages=4).experts.shape == (80, 8, 2)


def test_a_number_that_does_not_fit_is_refused(tmp_path):
    folder = trace(tmp_path / "run", *(run([0, 1], rank, seed=rank) for rank in range(4)))
    with pytest.raises(InputError, match="3 pipeline stages do not fit its 4 ranks; 1 or 2 or 4 would"):
        read_workload(folder, stages=3)
    with pytest.raises(InputError, match="which no number of pipeline stages makes the 4 MoE layers of small"):
        read_workload(folder, stages=4, model=MODEL)


def test_other_numbers_of_tokens_are_other_tokens(tmp_path):
    """Serving batches differ between data-parallel ranks; stages have the same ones."""
    folder = trace(tmp_path / "run", *(run([0, 1], rank, seed=rank, tokens=10 + rank) for rank in range(2)))
    assert read_workload(folder).experts.shape == (2 * (10 + 11), 2, 2)


def test_the_same_choices_are_the_same_layer(tmp_path):
    folder = trace(tmp_path / "run", *(run([0, 1], rank, seed=5) for rank in range(4)))
    read = read_workload(folder)
    assert read.experts.shape == (80, 2, 2)
    assert codes(read) == {"tensor-parallel-copies": "warning"}


def test_mtp_is_on_the_last_stage(tmp_path):
    ranks = [run([0, 1], rank, seed=rank) for rank in range(4)]
    for rank in (2, 3):
        ranks[rank] += [record(0, 0, rank, [[0, 1]] * 40, block="mtp", mtp_idx=0)]
    read = read_workload(trace(tmp_path / "run", *ranks))
    assert read.experts.shape == (160, 4, 2)


def test_one_rank_of_several_is_refused_under_its_model(tmp_path):
    folder = trace(tmp_path / "run", run([0, 1], 0, seed=0))
    with pytest.raises(InputError, match=r"has layers 0 … 1, .* give the files of all ranks"):
        read_workload(folder, model=MODEL)


def test_missing_ranks_leave_no_stages(tmp_path):
    folder = trace(tmp_path / "run", run([0, 1], 0, seed=0), run([0, 1], 3, seed=3))
    with pytest.raises(InputError, match="2 pipeline stages do not fit its 2 ranks; 1 would"):
        read_workload(folder, stages=2)


def test_layers_in_no_order_of_stages(tmp_path):
    folder = trace(tmp_path / "run", run([0, 1], 0, seed=0), run([0], 1, seed=1), run([0, 1], 2, seed=2))
    folder_of_three = read_workload(folder, stages=3)
    assert folder_of_three.layers == 5
    (folder / "router_trace_rank2.jsonl").unlink()
    trace(folder, run([0, 1], 3, seed=2))
    with pytest.raises(InputError, match="recorded different layers, in no order of pipeline stages"):
        read_workload(folder)


def test_training_steps_of_two_stages(tmp_path):
    ranks = [run([0, 1], rank, seed=rank, micro_batches=3) for rank in range(2)]
    read = read_workload(trace(tmp_path / "run", *ranks), model=MODEL)
    assert read.experts.shape == (2 * 3 * 40, 4, 2)
    np.testing.assert_array_equal(read.experts[40:80, 2], ranks[1][2]["top_indices"])


def test_stages_on_the_command_line(tmp_path, capsys):
    folder = trace(tmp_path / "run", *(run([0, 1], rank, seed=rank) for rank in range(4)))
    assert main(["inspect", str(folder), "--json"]) == 2
    assert "--stages" in capsys.readouterr().err
    assert main(["inspect", str(folder), "--stages", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["layers"], answer["tokens"]) == (4, 160)


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
