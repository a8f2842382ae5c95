"""Routed experts recorded from the answers of a server, and any JSON that a server may send."""

import json
import os
import signal
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.formats import read_workload
from engine.model import MoEModel
from engine.recording import per_request, sglang, vllm
from engine.recording.server import Server
from tests.cases.fuzzing import answer_or_one_line, any_input
from tests.cases.mutations import mutated, values_with
from tests.cases.recordings import holds
from tests.recording.stand_in import Reply, fault


def test_sglang_s_answers_become_one_recording(sglang, from_sglang, out):
    code, text, _ = from_sglang("--max-tokens", "5", "--json")
    assert code == 0
    answer = json.loads(text)
    assert (answer["answered"], answer["tokens"], answer["layers"], answer["k"]) == (3, 21, 3, 2)
    assert answer["notes"] == ["1 layer without any choice left out, as dense"]
    assert sglang.asked("/generate")[0] == {
        "text": "one two three",
        "sampling_params": {"max_new_tokens": 5},
        "return_routed_experts": True,
    }
    trace = read_workload(out)
    rows = [3 + 5 - 1, 2 + 5 - 1, 4 + 5 - 1]
    holds(trace, experts=np.concatenate([sglang.ids(n)[:, 1:] for n in rows]), sequence=np.repeat([0, 1, 2], rows))
    holds(trace, num_experts=8)


def test_rows_of_a_cached_prefix_are_left_out(sglang, from_sglang, vllm, from_vllm, out):
    def generate(body: dict) -> dict:
        answer = sglang.generate(body)
        answer["meta_info"]["cached_tokens"] = 1
        return answer

    sglang.answers["/generate"] = generate
    answer = json.loads(from_sglang("--max-tokens", "5", "--json")[1])
    assert answer["tokens"] == 18
    assert "3 of 21 tokens without any choice left out: cached prefixes, or not captured" in answer["notes"]
    np.testing.assert_array_equal(read_workload(out).experts[:6], sglang.ids(7)[1:, 1:])

    def complete(body: dict) -> dict:
        return vllm.complete(body) | {"usage": {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 99}}}

    vllm.answers["/v1/completions"] = complete
    assert json.loads(from_vllm("--max-tokens", "4", "--json")[1])["tokens"] == 12  # no more than the prompt


def test_vllm_s_answers_become_one_recording(vllm, prompts, record, out):
    code, text, err = record("--vllm", vllm.url + "/v1", "--prompts", prompts, "--max-tokens", "4", "-o", out, "--json")
    assert code == 0 and "3 of 3 prompts, 18 tokens" in err
    assert vllm.asked("/v1/completions")[0] == {"model": "tiny", "prompt": "one two three", "max_tokens": 4}
    trace = read_workload(out)
    rows = [6, 5, 7]
    np.testing.assert_array_equal(trace.experts, np.concatenate([vllm.ids(n) for n in rows]))
    assert json.loads(text)["metrics"] == {
        'vllm:eplb_balancedness_avg{engine="0",model_name="tiny"}': [0.71, 0.71],
        'vllm:generation_tokens_total{engine="0",model_name="tiny"}': [0.0, 12.0],
    }


def test_vllm_s_older_lists(vllm, from_vllm, out):
    def complete(body: dict) -> dict:
        prompt = len(body["prompt"].split())
        ids = vllm.ids(prompt + 2).tolist()
        return {"prompt_routed_experts": ids[:prompt], "choices": [{"routed_experts": ids[prompt:]}]}

    vllm.answers |= {"/v1/completions": complete, "/metrics": lambda body: None}
    assert from_vllm()[0] == 0
    np.testing.assert_array_equal(read_workload(out).experts, np.concatenate([vllm.ids(n + 2) for n in (3, 2, 4)]))


def test_several_at_a_time_give_the_same_recording(vllm, record, tmp_path):
    (tmp_path / "p.jsonl").write_text("\n".join([json.dumps({"prompt": list(range(1 + number % 7))}) for number in range(20)]))
    for concurrency in (1, 8):
        options = ("--prompts", tmp_path / "p.jsonl", "--concurrency", concurrency)
        assert record("--vllm", vllm.url, *options, "-o", tmp_path / f"{concurrency}.npz")[0] == 0
    one, eight = (read_workload(tmp_path / f"{n}.npz") for n in (1, 8))
    holds(one, experts=eight.experts, sequence=eight.sequence)


def without_routing(answer: dict) -> dict:
    answer["choices"][0]["routed_experts"] = None
    return answer


@pytest.mark.parametrize(
    ("complete", "part"),
    [
        (lambda answer: without_routing(answer), "start the server with --enable-return-routed-experts"),
        (lambda answer: {"choices": []}, "is this a vLLM server?"),
        (lambda answer: ["no object"], "is this a vLLM server?"),
        (lambda answer: "{", "not valid JSON, or was cut short"),
        (lambda answer: Reply(400, {"error": {"message": "too long", "code": 400}}), "HTTP 400 (too long)"),
        (lambda answer: Reply(500, "<html>" + "x" * 500), "HTTP 500 (<html>xxx"),
        (lambda answer: {"choices": [{"routed_experts": [[1]]}]}, "at least one of each"),
        (lambda answer: {"prompt_routed_experts": [[[1]]], "choices": [{"routed_experts": [[[1, 2]]]}]}, "differ in"),
    ],
)
def test_a_vllm_that_cannot_be_recorded(vllm, from_vllm, out, complete, part):
    vllm.answers["/v1/completions"] = lambda body: complete(vllm.complete(body))
    message = fault(from_vllm())
    assert part in message and len(message) < 400
    assert not out.exists() and len(vllm.asked("/v1/completions")) == 1


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"routed_experts": None}, "start the server with --enable-return-routed-experts"),
        ({"prompt_tokens": 2}, "is that the model it serves?"),
        ({"routed_experts_dtype": "float16"}, "dtype 'float16'"),
    ],
)
def test_an_sglang_that_cannot_be_recorded(sglang, from_sglang, change, part):
    def generate(body: dict) -> dict:
        answer = sglang.generate(body)
        answer["meta_info"] |= change
        return answer

    sglang.answers["/generate"] = generate
    assert part in fault(from_sglang())


@pytest.mark.parametrize(
    ("before", "after", "part"),
    [
        ('"experts": 8', '"experts": 7', "chose expert 7, but tiny has only 7"),
        ('"layers": 4', '"layers": 9', "the model has 8 MoE layers, the recording 3"),
    ],
)
def test_another_model_than_the_server_s(from_sglang, from_vllm, model, before, after, part):
    model.write_text(model.read_text().replace(before, after))
    assert part in fault(from_sglang() if "experts" in before else from_vllm("--model", model))


def test_a_server_that_returns_no_routing_or_zeros_throughout(sglang, from_sglang):
    sglang.ids = lambda rows: np.zeros((rows, 4, 2), int)
    assert "it captured nothing" in fault(from_sglang())
    asked = len(sglang.asked("/generate"))
    sglang.info["enable_return_routed_experts"] = False
    assert "--enable-return-routed-experts" in fault(from_sglang())
    assert len(sglang.asked("/generate")) == asked


def test_the_model_is_asked_for_where_the_server_s_is_unknown(sglang, prompts, record, out):
    message = fault(record("--sglang", sglang.url, "--prompts", prompts, "-o", out))
    assert "'/models/tiny'" in message and "--model" in message


def test_a_prompt_that_is_refused_later_is_left_out(vllm, from_vllm, out):
    def complete(body: dict) -> object:
        refused = body["prompt"] == "four five"
        return Reply(400, {"error": {"message": "not this one"}}) if refused else vllm.complete(body)

    vllm.answers["/v1/completions"] = complete
    code, text, _ = from_vllm("--max-tokens", 1)
    assert code == 0 and "2 of 3 prompts" in text and "prompt 2: not this one" in text
    np.testing.assert_array_equal(read_workload(out).sequence, [0, 0, 0, 2, 2, 2, 2])


@pytest.mark.parametrize(
    ("later", "part"),
    [
        (lambda answer: Reply(500, "died"), "HTTP 500 (died)"),
        (lambda answer: without_routing(answer), "without routed experts"),
        (lambda answer: {"choices": [{"routed_experts": [[[1]]]}]}, "must be the same in all"),
    ],
)
def test_what_was_recorded_before_a_fault_is_kept(vllm, from_vllm, out, later, part):
    def complete(body: dict) -> object:
        answer = vllm.complete(body)
        return answer if body["prompt"] == "one two three" else later(answer)

    vllm.answers["/v1/completions"] = complete
    code, text, err = from_vllm("--max-tokens", 1)
    assert code == 2 and "1 of 3 prompts" in text
    assert part in err and "what was recorded before is in" in err
    assert read_workload(out).tokens == 3


def test_seconds_bound_the_prompts(vllm, from_vllm, prompts):
    def complete(body: dict) -> object:
        time.sleep(0.06)
        return vllm.complete(body)

    vllm.answers["/v1/completions"] = complete
    prompts.write_text("a b c\n" * 1000)
    code, text, _ = from_vllm("--seconds", "0.4")
    assert code == 0 and "ended before the last prompt: 0.4 s have passed" in text
    assert 1 <= len(vllm.asked("/v1/completions")) <= 8


@pytest.mark.clock
def test_a_signal_ends_a_request_that_hangs_and_keeps_the_rest(vllm, from_vllm):
    hanging, released = threading.Event(), threading.Event()

    def complete(body: dict) -> object:
        if body["prompt"] != "one two three":
            hanging.set()
            released.wait(20)
        return vllm.complete(body)

    vllm.answers["/v1/completions"] = complete
    threading.Thread(target=lambda: hanging.wait(10) and os.kill(os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    code, text, _ = from_vllm()
    released.set()
    assert time.monotonic() - begin < 5
    assert code == 0 and "1 of 3 prompts" in text and "stopped" in text


def test_what_would_not_fit_into_a_readable_file_is_not_recorded(from_vllm, monkeypatch):
    monkeypatch.setattr(per_request, "MAX_RECORDED_BYTES", 10)
    code, text, _ = from_vllm()
    assert code == 0 and "1 of 3 prompts" in text and "would not fit" in text


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--vllm", "http://h", "-o", "r.npz"), "name the --prompts to send"),
        (("--sglang", "http://h", "-o", "out"), "--seconds is missing"),
        (("--sglang", "http://h", "--prompts", "p", "--from-folder", "d", "-o", "r.npz"), "name one of them"),
        (("--vllm", "http://h", "--prompts", "p", "-o", "r.json"), "give it a name that ends so"),
        (("--vllm", "http://h", "--prompts", "p", "-o", "/none/r.npz"), "/none/r.npz cannot be written: No such file"),
        (("--vllm", "http://h", "--prompts", "p", "-o", "r.npz", "--concurrency", "0"), "between 1 and 256"),
        (("--vllm", "http://h", "--prompts", "p", "-o", "r.npz", "--max-tokens", "0"), "at least one"),
        (("--sglang", "http://h", "--seconds", "nan", "-o", "out"), "--seconds nan"),
        (("--sglang", "http://h", "--seconds", "1", "--timeout", "-1", "-o", "out"), "--timeout -1"),
        (("--vllm", "http://h", "--prompts", "none.txt", "-o", "r.npz"), "none.txt: there is no such file"),
        (("--sglang", "ftp://h", "--seconds", "1", "-o", "out"), "http://HOST:PORT"),
    ],
)
def test_options_that_do_not_go_together(record, options, part):
    assert part in fault(record(*options))


TINY = MoEModel(name="tiny", layers=2, experts=4, experts_per_token=2, d_model=8, d_ff=8)
SERVER = Server("http://nobody", 1)
OF_SGLANG = {"routed_experts": "AAAAAAAAAAAAAAAAAQAAAA==", "prompt_tokens": 1, "completion_tokens": 1}
OF_VLLM = {"choices": [{"routed_experts": [[[0, 1]]]}], "prompt_routed_experts": [[[1, 0]]]}
INFO = {"expert_distribution_recorder_mode": "stat", "enable_eplb": False, "tp_size": 1, "pp_size": 1}


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ({"meta_info": OF_SGLANG | {"routed_experts_dtype": "int32"}}, lambda sent: sglang._routing(SERVER, sent, TINY)),
        (OF_VLLM, lambda sent: vllm._routing(SERVER, sent)),
        (INFO, lambda sent: np.zeros(sglang.recorder_of(SERVER, sent).files, np.int16)[:, None, None]),
    ],
    ids=["SGLang", "vLLM", "server info"],
)
@given(data=st.data())
@any_input
def test_any_json_of_a_server(sent, read, data):
    choices = answer_or_one_line(lambda: read(data.draw(mutated(sent, values_with("AAAA", "AAAAAA==", "stat", "uint8")))))
    assert isinstance(choices, str) or (choices.dtype == np.int16 and choices.ndim == 3 and choices.size)
