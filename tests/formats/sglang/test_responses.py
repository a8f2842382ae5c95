"""The choices of single requests in SGLang's answers, and in those of Dynamo's workers."""

import base64
import json
import struct

import pytest

from engine.formats import read_workload
from engine.model import MoEModel
from engine.workload import DECODE, PREFILL
from tests.formats.faults import refused
from tests.formats.sglang.recorder import codes

MODEL = MoEModel(name="small", layers=3, dense_layers=(0,), experts=300, experts_per_token=2, d_model=8, d_ff=8)

# Three tokens of a model with three decoder layers, the first one dense, and k = 2.
IDS = (0, 0, 3, 7, 255, 1, 0, 0, 0, 4, 2, 0, 0, 0, 9, 8, 7, 6)
TEXT = base64.b64encode(struct.pack("<18i", *IDS)).decode()
EXPERTS = [[[3, 7], [255, 1]], [[0, 4], [2, 0]], [[9, 8], [7, 6]]]


def generated(text=TEXT, prompt=2, completion=2, **more):
    """An answer of /generate."""
    usage = {"id": "a", "prompt_tokens": prompt, "completion_tokens": completion}
    return {"text": "…", "output_ids": [5, 6], "meta_info": usage | {"routed_experts": text} | more}


def saved(folder, *answers, name="answers.jsonl"):
    path = folder / name
    path.write_text("\n".join(json.dumps(answer) for answer in answers), encoding="utf-8")
    return path


def test_an_answer_is_a_sequence(tmp_path):
    trace = read_workload(saved(tmp_path, generated(), name="answer.json"), model=MODEL)
    assert trace.experts.tolist() == EXPERTS
    assert trace.num_experts == 300
    assert trace.model_layers == (1, 2)
    assert trace.sequence.tolist() == [0, 0, 0]
    assert trace.phase.tolist() == [PREFILL, PREFILL, DECODE]  # 2 + 2 - 1 tokens were forwarded
    assert codes(trace) == []


def test_lines_lists_and_folders_of_answers(tmp_path):
    answers = [generated(), generated(prompt=1, completion=3)]
    lines = saved(tmp_path, *answers)
    (tmp_path / "list").mkdir()
    listed = saved(tmp_path / "list", answers, name="answers.json")
    (tmp_path / "folder").mkdir()
    for at, answer in enumerate(answers):
        saved(tmp_path / "folder", answer, name=f"{at}.json")
    for path in (lines, listed, tmp_path / "folder"):
        trace = read_workload(path, model=MODEL)
        assert trace.experts.tolist() == EXPERTS * 2
        assert trace.sequence.tolist() == [0, 0, 0, 1, 1, 1]
        assert trace.phase.tolist() == [PREFILL, PREFILL, DECODE, PREFILL, DECODE, DECODE]


def test_a_start_that_was_asked_for_shortens_the_prompt(tmp_path):
    """routed_experts_start_len is not in the answer: the prompt has fewer rows than tokens."""
    trace = read_workload(saved(tmp_path, generated(prompt=1000)), model=MODEL)
    assert trace.phase.tolist() == [PREFILL, PREFILL, DECODE]


@pytest.mark.parametrize(
    "answer",
    [
        {"sglext": {"routed_experts": TEXT}, "choices": [{}]},
        {"choices": [{"sgl_ext": {"routed_experts": TEXT}}]},
        {"engine_data": {"routed_experts": TEXT}},
        {"token_ids": [1], "disaggregated_params": {"routed_experts": TEXT}},
    ],
)
def test_wrappers(tmp_path, answer):
    trace = read_workload(saved(tmp_path, answer), model=MODEL)
    assert trace.experts.tolist() == EXPERTS
    assert trace.phase is None


@pytest.mark.parametrize(
    "answer", [{"sglext": {"routed_experts": TEXT}}, {"choices": [{"sgl_ext": {"routed_experts": TEXT}}]}]
)
def test_the_usage_of_an_openai_answer_tells_the_phase(tmp_path, answer):
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    trace = read_workload(saved(tmp_path, answer | {"usage": usage}), model=MODEL)
    assert trace.phase.tolist() == [PREFILL] * 3


def test_thousands_of_answers(tmp_path):
    trace = read_workload(saved(tmp_path, *[generated()] * 3000), model=MODEL)
    assert trace.tokens == 9000
    assert trace.sequence[-1] == 2999


def test_narrower_numbers(tmp_path):
    text = base64.b64encode(bytes(IDS)).decode()
    trace = read_workload(saved(tmp_path, generated(text, routed_experts_dtype="uint8")), model=MODEL)
    assert trace.experts.tolist() == EXPERTS


def test_what_was_not_captured(tmp_path):
    ids = (*[0] * 6, *IDS[6:])
    text = base64.b64encode(struct.pack("<18i", *ids)).decode()
    trace = read_workload(saved(tmp_path, generated(text)), model=MODEL)
    assert trace.experts[0].tolist() == [[-1, -1], [-1, -1]]
    assert codes(trace) == ["tokens-not-captured"]


def test_a_layer_that_was_never_captured(tmp_path):
    text = base64.b64encode(struct.pack("<6i", 0, 0, 0, 0, 2, 1)).decode()
    trace = read_workload(saved(tmp_path, generated(text, 1, 1)), model=MODEL)
    assert trace.model_layers == (2,)
    assert codes(trace) == ["layers-missing"]


def test_the_model_is_needed(tmp_path):
    refused(saved(tmp_path, generated()), "open the model first, or give --model")


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([generated(TEXT[:-4])], ("no whole number of tokens of 3 layers × 2", "(small)")),
        ([generated(prompt=1, completion=1)], ("3 tokens by the model's layers", "0 … 1")),
        ([generated(prompt=1, completion=9)], ("3 tokens by the model's layers", "8 … 9")),
        ([generated(), generated({"data": TEXT})], ("line 2", "no text in base64 but dict")),
        ([generated(routed_experts_dtype="float")], ("'float' is not one of int32",)),
        ([generated(), 3, "x", {"meta_info": 3}, {"choices": [4]}, generated("")], ("line 6", "at least one of each")),
        ([generated(base64.b64encode(struct.pack("<6i", 0, 0, 1, 2, 3, 300)).decode(), 1, 1)], ("expert 300",)),
        ([generated(base64.b64encode(bytes(24)).decode(), 1, 1)], ("no token has a choice",)),
    ],
)
def test_bad_answers(tmp_path, answers, words):
    refused(saved(tmp_path, *answers), *words, model=MODEL)


@pytest.mark.parametrize(
    ("line", "part"), [("{", "not valid JSON"), ("9" * 5000, "too many digits"), ("[" * 200_000, "nested too deeply")]
)
def test_lines_that_are_no_json(tmp_path, line, part):
    path = saved(tmp_path, generated())
    path.write_text(path.read_text(encoding="utf-8") + f"\n{line}", encoding="utf-8")
    refused(path, "line 2", part, model=MODEL)
