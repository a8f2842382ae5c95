"""What a step of serving is: its tokens, and the load of its experts."""

import numpy as np
import pytest

from engine.errors import InputError
from engine.serving import step as serving_step
from engine.serving.step import ServingStep, load_of_step, recording_of_step
from engine.workload import ExpertLoad, RoutingTrace
from tests.serving.samples import DECODE, PREFILL
from tests.strategies import make_model


def test_a_decode_step_makes_one_token_of_each_sequence():
    assert DECODE.tokens == DECODE.head_rows == 64
    assert DECODE.keys == 2000 + 1001 / 2  # half-way through the output, the token itself included
    assert DECODE.longest == 3000
    assert DECODE.keys_within(128) == 128 and DECODE.keys_within(10_000) == DECODE.keys


def test_a_prefill_step_takes_whole_prompts():
    assert PREFILL.tokens == 2 * 4096 and PREFILL.head_rows == 2
    keys = [position + 1 for position in range(PREFILL.context)]
    assert pytest.approx(np.mean(keys)) == PREFILL.keys
    for window in (1, 1000, 4096, 5000):
        assert pytest.approx(np.minimum(keys, window).mean()) == PREFILL.keys_within(window)
    assert PREFILL.longest == 4096  # what comes after is another step's


def test_half_a_step_is_one_of_two_batches():
    both = DECODE.model_copy(update={"overlap": "two-batch"})
    assert both.half() == DECODE.model_copy(update={"sequences": 32})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequences": 3, "overlap": "two-batch"}, "3 sequences on a GPU are odd"),
        ({"sequences": 0}, "step: sequences: Input should be greater than or equal to 1"),
        ({"phase": "both"}, "step: phase: Input should be 'prefill' or 'decode'"),
        ({"tensor_parallel": 2}, "step: tensor_parallel: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_step_is_refused_in_one_line(change, message):
    with pytest.raises(InputError) as error:
        ServingStep.from_dict({"phase": "decode", "sequences": 64, "context": 2000} | change, "step")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_load_of_a_step_keeps_the_popularity_of_the_recording():
    model = make_model(3, 4, 2)
    recorded = ExpertLoad("recorded", np.array([[1.0, 2, 3, 4], [0, 0, 0, 10], [0, 0, 0, 0]]), model.moe_layers)
    load = load_of_step(recorded, DECODE, model, gpus=8).load
    assert load.sum(axis=1) == pytest.approx(np.full(3, 64 * 8 * 2))
    assert load[0] / load[0].sum() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert load[1] == pytest.approx([0, 0, 0, 1024])
    assert load[2] == pytest.approx(np.full(4, 256))  # nothing was recorded: balanced


def test_a_routing_log_counts_by_its_loads():
    model = make_model(1, 4, 1)
    trace = RoutingTrace("log", np.array([[[0]], [[0]], [[3]]], dtype=np.int16), 4)
    load = load_of_step(trace, PREFILL, model, gpus=2).load
    assert load[0] / PREFILL.tokens == pytest.approx([4 / 3, 0, 0, 2 / 3])


@pytest.mark.parametrize("recorded", [10, 16, 50])
def test_a_routing_log_to_plan_for_has_the_tokens_of_the_step(recorded):
    model = make_model(2, 8, 2)
    rng = np.random.default_rng(0)
    chosen = np.argsort(rng.random((recorded, 2, 8)), axis=2)[:, :, :2].astype(np.int16)
    log = RoutingTrace("log", chosen, 8, source_rank=np.zeros(recorded, dtype=np.int32))
    step = ServingStep(phase="decode", sequences=4, context=10)
    trace = recording_of_step(log, step, model, gpus=4)
    assert trace.experts.shape == (16, 2, 2) and trace.name == "log, at 4 tokens per GPU"
    assert {row.tobytes() for row in trace.experts} <= {row.tobytes() for row in chosen}
    assert len({row.tobytes() for row in trace.experts}) == len({row.tobytes() for row in chosen[:16]})
    assert np.bincount(trace.rank_of_token(4)).tolist() == [4, 4, 4, 4]  # not all on the first GPU


def test_a_step_too_large_for_tokens_is_planned_by_loads(monkeypatch):
    model = make_model(1, 4, 1)
    log = RoutingTrace("log", np.array([[[0]], [[0]], [[3]]], dtype=np.int16), 4)
    monkeypatch.setattr(serving_step, "MOST_CHOICES", 2 * PREFILL.tokens - 1)
    loads = recording_of_step(log, PREFILL, model, gpus=2)
    assert isinstance(loads, ExpertLoad)
    assert loads.load == pytest.approx(load_of_step(log, PREFILL, model, gpus=2).load)
