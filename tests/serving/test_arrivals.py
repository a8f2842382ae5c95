"""Requests that arrive at random or as recorded: queueing theory where it has a formula, and conservation where it has none."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cli import main
from engine.errors import InputError, StoppedError
from engine.formats.measured.request_traces import read_requests
from engine.serving.arrivals import Requests, at_random, serve_arrivals
from engine.serving.deployment import Demand, Deployment, Ranks
from engine.serving.forecast import forecast
from engine.serving.sizes import usual_sizes
from tests.cases.cli import SAMPLES
from tests.cases.examples import examples
from tests.strategies import make_model

MODEL = make_model(layers=12, experts=64, k=4, d_model=2048, d_ff=1024)
SIZES = usual_sizes(MODEL)
EIGHT = Ranks(tensor=8, expert=8)
TOGETHER = Deployment(engine="sglang", version="0.5.9", checkpoint="ours", gpu="H200", precision="fp8", decode=EIGHT)
APART = TOGETHER.model_copy(update={"prefill": EIGHT})


def served(requests: Requests, deployment: Deployment = TOGETHER):
    return serve_arrivals(requests, deployment, MODEL, SIZES)


def test_a_server_of_prompts_is_a_queue_with_equal_service():
    """Waiting before a single server with random arrivals and equal service is rho S / (2 (1 - rho)) in the mean (M/D/1)."""
    alone = served(at_random(1e-3, 1, 1000, 1), APART).first[0]
    service = served(Requests(np.zeros(2), np.full(2, 1000), np.ones(2, int)), APART).first[1] - alone
    for load in (0.3, 0.6):
        waited = served(at_random(load / service, 60_000, 1000, 1), APART).first - alone
        assert waited.min() > -1e-9
        assert waited.mean() == pytest.approx(load * service / (2 * (1 - load)), rel=0.05)


def test_rare_requests_have_a_server_of_their_own():
    """Each is as fast as one user alone in a closed loop: its tokens wait for no other prompt."""
    quiet = served(at_random(1e-3, 5, 1000, 200), APART)
    alone = forecast(APART, Demand(prompt=1000, output=200, users=1), MODEL, SIZES)
    np.testing.assert_allclose(quiet.token, alone.token, rtol=0.02)
    assert np.ptp(quiet.first) < 1e-9 * quiet.first[0] + 1e-9


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 3000), st.integers(1, 60)), min_size=1, max_size=40),
    st.sampled_from([TOGETHER, APART, TOGETHER.model_copy(update={"decode": Ranks(tensor=1, data=4, expert=4, servers=2)})]),
)
def test_every_request_is_served_once_and_none_before_it_came(rows, deployment):
    arrival, prompt, output = (np.array(column) for column in zip(*sorted(rows), strict=True))
    found = served(Requests(arrival, prompt, output), deployment)
    assert np.all(found.first > 0) and np.all(found.end >= arrival + found.first - 1e-9)
    assert np.all((found.token > 0) == (output > 1))
    again = served(Requests(arrival, prompt, output), deployment)
    assert np.array_equal(again.end, found.end)


def test_more_arrivals_wait_longer():
    figures = [served(at_random(rate, 3000, 1000, 200)).percentiles() for rate in (1, 20, 60)]
    for of in ("first", "token"):
        assert [each[of][50] for each in figures] == sorted(each[of][50] for each in figures)
        assert all(each[of][50] <= each[of][90] <= each[of][99] for each in figures)


MOONCAKE = '{"timestamp": 2000, "input_length": 10, "output_length": 3, "hash_ids": [1]}\n'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", MOONCAKE + MOONCAKE.replace("2000", "500")),
        ("a.csv", "timestamp,input_length,output_length\n2,10,3\n0.5,10,3\n"),
    ],
)
def test_traces_are_read_in_order_of_time(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    requests = read_requests(tmp_path / name)
    assert requests.arrival.tolist() == [0.0, 1.5] and requests.prompt.tolist() == [10, 10]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", "", "has no requests"),
        ("a.jsonl", "7\n", "line 1: is no JSON object"),
        ("a.jsonl", '{"timestamp": 1}\n', "needs the numbers timestamp, input_length"),
        ("a.jsonl", MOONCAKE.replace("10", "0"), "at least one token"),
        ("a.csv", "time,in\n1,2\n", "the columns timestamp, input_length, output_length are missing"),
        ("a.csv", "timestamp,input_length,output_length\n1,x,3\n", "line 2: needs the numbers"),
        ("a.csv", 'timestamp,input_length,output_length\n"1', "damaged or not"),
    ],
)
def test_other_files_are_refused_in_a_line(name, text, says, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=says):
        read_requests(tmp_path / name)


def test_a_stop_is_heard():
    with pytest.raises(StoppedError):
        serve_arrivals(at_random(1, 10, 1000, 20), TOGETHER, MODEL, SIZES, stop=lambda: True)


def test_the_command(capsys, tmp_path):
    pytest.importorskip("aiconfigurator_core")
    rows = str(SAMPLES / "serving-steps.csv")
    assert main(["predict", rows, "--rate", "2", "--requests", "50", "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert len(answers) == 12 and all(row["ttft_p50"] <= row["ttft_p99"] and row["requests"] == 50 for row in answers)
    (tmp_path / "a.jsonl").write_text(MOONCAKE)
    assert main(["predict", rows, "--replay", str(tmp_path / "a.jsonl")]) == 0
    assert "first token p99" in capsys.readouterr().out
    assert main(["predict", rows, "--rate", "0"]) == 2 and "above 0" in capsys.readouterr().err
