"""Answers and archives of serving engines with `routed_experts`, in every dialect."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from engine.formats import identify, members, parts, read_workload
from engine.formats.arrays import model_layers_named
from engine.formats.source import Source
from engine.model import MoEModel
from tests.cases.files import json_lines, refused, saver
from tests.cases.recordings import holds
from tests.cases.refusals import refusal
from tests.cases.vllm import FORMS, ROWS, USAGE, answer, bare, chunk, npy

saved_text = saver("answers.jsonl")


def saved(folder: Path, *answers: dict, name: str = "answers.jsonl") -> Path:
    return saved_text(folder, json_lines(answers), name)


@pytest.mark.parametrize("form", FORMS)
def test_forms(tmp_path, form):
    path = saved(tmp_path, answer(FORMS[form]))
    assert identify(path).name == "routed-experts"
    trace = read_workload(path)
    holds(trace, experts=ROWS, num_experts=8, sequence=[0, 0, 0], phase=[0, 0, 1])
    assert trace.origin.format == "routed-experts"
    assert trace.origin.findings == ()


COUNTED = [([0, 1], (1, 2)), ([1, 2], (1, 2)), ([0], (1,)), ([2], (2,)), ([0, 2], None)]


@pytest.mark.parametrize(("numbers", "layers"), COUNTED)
def test_numbers_of_layers_count_moe_layers_or_decoder_layers_or_cannot_be_told(numbers, layers):
    model = MoEModel(name="m", layers=3, dense_layers=(0,), experts=2, experts_per_token=1, d_model=8, d_ff=8)
    assert model_layers_named(Source(Path("x"), "x", model=model), numbers) == layers


def test_files(tmp_path):
    one = answer(npy(ROWS))
    for text in (json.dumps(one, indent=1), json.dumps(one)):  # an object over several lines, or on one
        assert read_workload(saved_text(tmp_path, text)).sequence.tolist() == [0, 0, 0]
    path = saved_text(tmp_path, [one, one])
    assert read_workload(path).sequence.tolist() == [0, 0, 0, 1, 1, 1]
    path.unlink()
    for request in (1, 2, 10):
        saved(tmp_path, one, name=f"answer-{request}.json")
    trace = read_workload(tmp_path)
    assert (trace.name, trace.tokens, trace.sequence.max()) == ("answer", 9, 2)


def test_older_lists_in_two_places(tmp_path):
    older = answer(ROWS[2:], usage=None, prompt_routed_experts=ROWS[:2])
    older["choices"].append({"index": 1, "routed_experts": [[[7, 1], [0, 3]]]})
    holds(read_workload(saved(tmp_path, older)), experts=[*ROWS, [[7, 1], [0, 3]]], sequence=[0, 0, 0, 1], phase=[0, 0, 1, 1])
    # There is a place for the prompt's rows, and it is empty: the rows of the choice were generated.
    record = answer(ROWS[:2], usage={"prompt_tokens": 5, "completion_tokens": 2}, prompt_routed_experts=None)
    assert read_workload(saved(tmp_path, record)).phase.tolist() == [1, 1]


def test_routing_beside_the_choices_and_answers_without(tmp_path):
    for record in ({"choices": [{"index": 0, "text": "Yes"}], "usage": USAGE}, {"generated_text": ["Yes"]}):
        assert read_workload(saved(tmp_path, record | {"routed_experts": FORMS["LightLLM"]})).experts.tolist() == ROWS
    trace = read_workload(saved(tmp_path, answer(None), answer(npy(ROWS)), answer([])))
    assert trace.tokens == 3
    (finding,) = trace.origin.findings
    assert finding.code == "answers-without-routing"
    assert finding.message.startswith("2 of 3 answers")


def test_prompts_that_choices_share_or_do_not(tmp_path):
    several = answer(npy(ROWS), {"prompt_tokens": 2, "completion_tokens": 4})
    several["choices"].append({"index": 1, "routed_experts": npy([*ROWS[:2], [[4, 3], [7, 6]]])})
    trace = read_workload(saved(tmp_path, several))
    holds(trace, experts=[*ROWS, [[4, 3], [7, 6]]], phase=[0, 0, 1, 1], codes=["prompt-repeated"])
    # /v1/completions takes a list of prompts, and its usage counts those of all together.
    both = {"prompt_tokens": 2, "completion_tokens": 5}
    choices = [{"index": index, "text": "", "routed_experts": npy(ROWS[1 - index :])} for index in range(2)]
    record = {"object": "text_completion", "choices": choices, "usage": both}
    assert read_workload(saved(tmp_path, record)).phase is None
    choices[0]["prompt_token_ids"], choices[1]["prompt_token_ids"] = [9], [9]
    assert read_workload(saved(tmp_path, record)).phase.tolist() == [0, 1, 0, 1, 1]


def test_rows_of_a_prompt_left_out_in_the_request(tmp_path):
    """`routed_experts_prompt_start`: a row fewer than prompt + generated - 1, so one row of the prompt is not there."""
    trace = read_workload(saved(tmp_path, answer(npy(ROWS), {"prompt_tokens": 3, "completion_tokens": 2})))
    holds(trace, phase=[0, 0, 1], codes=["prompt-cut"])
    start = {"shape": [3, 2, 2], "dtype": "uint8", "start": 1, "data": base64.b64encode(bare(ROWS, "B")).decode()}
    record = {"nvext": {"engine_data": {"routed_experts": start}}, "choices": [{"index": 0}], "usage": {"prompt_tokens": 2}}
    assert read_workload(saved(tmp_path, record)).phase.tolist() == [0, 1, 1]


def test_prompt_ids_say_how_long_a_prompt_is_and_phases_are_all_known_or_none(tmp_path):
    offline = {"request_id": "7", "prompt_token_ids": [9, 9], "outputs": [{"token_ids": [1, 2], "routed_experts": ROWS}]}
    assert read_workload(saved(tmp_path, offline)).phase.tolist() == [0, 0, 1]
    trace = read_workload(saved(tmp_path, answer(npy(ROWS)), answer(npy(ROWS), usage=None)))
    assert trace.phase is None
    (finding,) = trace.origin.findings
    assert (finding.code, finding.severity) == ("phase-unknown", "warning")
    assert "1 alone of 2 requests" in finding.message


def test_streams_and_server_sent_events(tmp_path):
    parts = [
        chunk(0, npy(ROWS[:2])),
        chunk(1, npy(ROWS[:1])),
        chunk(0, npy(ROWS[2:])),
        chunk(1, None),
        {"id": "cmpl-9", "object": "chat.completion.chunk", "choices": [], "usage": {"prompt_tokens": 1}},
    ]
    trace = read_workload(saved(tmp_path, *parts))
    assert trace.experts.tolist() == ROWS
    assert trace.sequence.tolist() == [0, 0, 0]  # the second choice only repeats the prompt
    assert trace.phase.tolist() == [0, 1, 1]
    parts = [chunk(0, npy(ROWS[:2]), usage=None), chunk(0, npy(ROWS[2:]), usage=USAGE)]
    text = "".join(f"data: {json.dumps(part)}\n\n: ping\n\n" for part in parts) + "data: [DONE]\n\n"
    holds(read_workload(saved_text(tmp_path, text, "stream.txt")), experts=ROWS, phase=[0, 0, 1])


MODEL = MoEModel(name="m", layers=3, dense_layers=(0,), experts=8, experts_per_token=2, d_model=8, d_ff=8)


def test_layers_are_numbered_as_in_the_model(tmp_path):
    assert read_workload(saved(tmp_path, answer(npy(ROWS))), model=MODEL).model_layers == (1, 2)
    all_layers = [[[0, 0], *row] for row in ROWS]
    holds(read_workload(saved(tmp_path, answer(npy(all_layers))), model=MODEL), model_layers=(1, 2), experts=ROWS)
    assert read_workload(saved(tmp_path, answer(npy(all_layers)))).model_layers is None
    text = base64.b64encode(bare(all_layers)).decode()  # without a shape, which the model tells
    path = saved(tmp_path, {"choices": [{"index": 0}], "nvext": {"routed_experts": text}})
    assert read_workload(path, model=MODEL).experts.tolist() == ROWS
    refused(path, "line 1", "without a shape", "--model")


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        (answer(None), ("--enable-return-routed-experts",)),
        (answer(npy(ROWS)[:-8]), ("line 1", "cut short or too long")),
        (answer(7), ("line 1", "a text, lists or an object", "'7'")),
        (answer([[[1, 2], [3]]]), ("as many layers and experts",)),
        (answer([[[1, "2"]]]), ("whole numbers",)),
        (answer([1]), ("[tokens][layers][k]",)),
        (answer({"shape": [3, 2], "data": ""}), ("[tokens, layers, k]",)),
        (answer({"shape": [1, 1, 1], "data": 3}), ("'data'", "'shape'")),
        (answer({"shape": [3, 2, 2], "data": "AAAA"}), ("needs 12 or 24 or 48 or 96 bytes",)),
        (answer({"shape": [3, 2, 2], "data": "AAAA", "dtype": "float32"}), ("float32", "int16")),
        (answer({"shape": [3, 2, 2], "data": "AAAA", "encoding": "zip"}), ("'zip'",)),
        (answer({"shape": [10**6, 1000, 64], "data": "AAAA"}), ("there are 3",)),
        (answer({"shape": [1, 1, 1], "start": -1, "data": "AAAA"}), ("start",)),
        (answer([[[5, 40000]]]), ("expert 40000", "out of range")),
        (answer(ROWS[2:], prompt_routed_experts=[[[1, 2]]]), ("parts of one answer",)),
    ],
)
def test_bad_answers(tmp_path, record, parts):
    refused(saved(tmp_path, record), *parts)


def test_requests_of_different_models_and_other_answers(tmp_path):
    path = saved(tmp_path, answer(ROWS), answer([[[1, 2]]]))
    refused(path, "line 2", "1 layers and k = 2", "first request 2 layers", "one model")
    refused(saved_text(tmp_path, json.dumps([answer(ROWS), 3], indent=1), "list.json"), "entry 1", "JSON object")
    assert "routed-experts" not in refused(saved(tmp_path, {"text": "", "meta_info": {"routed_experts": "AAAA"}}))


def test_experts_are_held_against_the_model(tmp_path):
    few = answer([[[1, 2], [3, 0]]])
    paths = [saved(tmp_path, few, name="answer-1.json"), saved(tmp_path, few, answer(ROWS[1:]), name="answer-2.json")]
    said = "line 2, token 0, layer 1: expert 6 is out of range, experts are 0 … 5"
    refused(paths[1], said, num_experts=6)
    assert f"answer-2.json, {said}" in refusal(read_workload, paths, num_experts=6)


FIRST = np.array([[[1, 4], [2, 0]], [[7, 3], [5, 6]]], np.uint8)


def request(folder, name, experts, **more):
    np.savez(folder / name, routed_experts=experts, **more)
    return folder / name


def test_files_are_requests_of_one_recording(tmp_path):
    ids = ("550e8400-e29b-41d4-a716-446655440000", "0b9c1f6e-03aa-4c8e-9d7f-b1e1a2c3d4e5")
    for name, rows in zip(ids, (2, 1), strict=True):
        tokens = {"prompt_token_ids": np.arange(1), "output_token_ids": np.arange(rows)}
        path = request(tmp_path, f"{name}.npz", FIRST[:rows], **tokens)
    assert identify(path).name == "npz-requests"
    assert members(path) == ()
    trace = read_workload(tmp_path)
    holds(trace, experts=[*FIRST[:1].tolist(), *FIRST.tolist()], sequence=[0, 1, 1], phase=[0, 0, 1], codes=[])


def test_archives_of_requests(tmp_path):
    paths = [request(tmp_path, f"request-{number}.npz", np.full((1, 1, 1), number)) for number in (10, 9, 2)]
    assert read_workload(paths).experts.ravel().tolist() == [2, 9, 10]
    paths = [request(tmp_path, f"{name}.npz", FIRST) for name in ("code-1", "code-2", "prose-1")]
    assert sorted(len(part.paths) for part in parts(paths)) == [1, 2]
    trace = read_workload(request(tmp_path, "a.npz", FIRST, prompt_token_ids=np.array(None)))
    assert (trace.phase, trace.origin.findings[0].code) == (None, "phase-unknown")
    assert read_workload(request(tmp_path, "a.npz", FIRST[:, :, 0])).k == 1
    paths = [request(tmp_path, f"{name}.npz", experts) for name, experts in (("r1", FIRST), ("r2", FIRST[:, :1]))]
    assert refusal(read_workload, paths).startswith("r2.npz: has 1 layers and k = 2, but the first request 2 layers and k = 2")
    paths[1] = request(tmp_path, "r2.npz", FIRST + 90)
    assert "r2.npz, token 0, layer 0: expert 91 is out of range" in refusal(read_workload, paths, num_experts=8)


@pytest.mark.parametrize(
    ("experts", "part"),
    [
        (FIRST[0, 0], "must be [tokens, layers, k]"),
        (FIRST[:0], "must be [tokens, layers, k]"),
        (np.array(None), "Python objects, which are never loaded"),
        (np.full((1, 2, 2), -3), "token 0, layer 0: expert -3"),
        (np.full((1, 2, 2), 0.5), "token 0, layer 0"),
    ],
)
def test_bad_requests(tmp_path, experts, part):
    refused(request(tmp_path, "a.npz", experts), part)


@pytest.mark.parametrize(
    ("about", "rows"),
    [
        ({"usage": USAGE | {"prompt_tokens_details": {"cached_tokens": 1}}}, [1, 2]),
        ({"num_cached_tokens": 1}, [1, 2]),
        ({"usage": USAGE | {"prompt_tokens_details": None}}, [0, 1, 2]),
        ({"usage": {"input_tokens": 2, "output_tokens": 2, "input_tokens_details": {"cached_tokens": "1"}}}, [1, 2]),
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_cache_hit_tokens": 2}}, [1, 2]),  # a row not asked for
    ],
)
def test_rows_of_a_cached_prefix_are_left_out(tmp_path, about, rows):
    trace = read_workload(saved(tmp_path, answer(npy(ROWS)) | about))
    assert trace.experts.tolist() == [ROWS[row] for row in rows]
    assert trace.phase.tolist() == [[0, 0, 1][row] for row in rows]
    assert ("cached-left-out" in [finding.code for finding in trace.origin.findings]) == (len(rows) < 3)


def test_answers_in_the_records_of_logs_and_batches(tmp_path):
    whole = answer(npy(ROWS), USAGE)
    for record in (
        {"custom_id": "1", "response": {"status_code": 200, "body": whole}},
        {"requests": [{"request": {"prompt": "x"}, "answer": whole}]},
        {"level": "info", "msg": {"resp": whole}},
    ):
        assert read_workload(saved(tmp_path, record)).experts.tolist() == ROWS
    held = USAGE | {"prompt_tokens_details": {"cached_tokens": 1}}
    rest = read_workload(saved(tmp_path, answer(npy(ROWS[1:]), held)))  # rows of the cached prefix are not in it
    assert rest.phase.tolist() == [0, 1] and not rest.origin.findings
    other = read_workload(saved(tmp_path, answer(npy(ROWS), {"prompt_tokens": 1, "completion_tokens": 1})))
    assert other.phase is None and "in counts that its rows fit" in other.origin.findings[0].message


def test_cached_prefixes_of_several_choices(tmp_path):
    usage = {"prompt_tokens": 2, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 1}}
    several = answer(npy(ROWS), usage)
    several["choices"].append({"index": 1, "routed_experts": npy([*ROWS[:2], [[4, 3], [7, 6]]])})
    assert read_workload(saved(tmp_path, several)).experts.tolist() == [*ROWS[1:], [[4, 3], [7, 6]]]
    choices = [{"index": index, "text": "", "routed_experts": npy(ROWS[1 - index :])} for index in range(2)]
    record = {"object": "text_completion", "choices": choices, "usage": usage | {"completion_tokens": 5}}
    trace = read_workload(saved(tmp_path, record))
    assert trace.tokens == 5 and "cached-not-known" in [finding.code for finding in trace.origin.findings]
    over = {"prompt_tokens": 2, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 9}}
    refused(saved(tmp_path, answer(npy(ROWS), over)), "cached_tokens is 9, but the prompt has 2")
