"""Whatever JSON a server answers: a recording or one clear line."""

import base64

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.model import MoEModel
from engine.recording import sglang, vllm
from engine.recording.server import Server
from tests.cases.examples import examples

MODEL = MoEModel(name="tiny", layers=2, experts=4, experts_per_token=2, d_model=8, d_ff=8)
SERVER = Server("http://nobody", 1)

TEXTS = st.text(max_size=8) | st.binary(max_size=64).map(lambda data: base64.b64encode(data).decode())
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=12,
)
META = st.fixed_dictionaries(
    {"routed_experts": VALUES},
    optional={"prompt_tokens": VALUES, "completion_tokens": VALUES, "routed_experts_dtype": VALUES},
)
CHOICES = st.lists(st.fixed_dictionaries({"routed_experts": VALUES}) | VALUES, max_size=2)


def choices_or_one_line(decode, *arguments: object) -> None:
    try:
        experts = decode(*arguments)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert experts.dtype == np.int16 and experts.ndim == 3 and experts.size


@given(st.fixed_dictionaries({"meta_info": META | VALUES}) | VALUES)
@settings(max_examples=examples(60), deadline=None)
def test_any_answer_of_sglang(answer):
    choices_or_one_line(sglang._routing, SERVER, answer, MODEL)


@given(st.fixed_dictionaries({"choices": CHOICES | VALUES}, optional={"prompt_routed_experts": VALUES}) | VALUES)
@settings(max_examples=examples(60), deadline=None)
def test_any_answer_of_vllm(answer):
    choices_or_one_line(vllm._routing, SERVER, answer)


@given(
    st.dictionaries(st.sampled_from(["expert_distribution_recorder_mode", "enable_eplb", "tp_size", "pp_size"]), VALUES)
)
@settings(max_examples=examples(100), deadline=None)
def test_any_server_info(info):
    try:
        assert sglang.recorder_of(SERVER, info).files >= 1
    except InputError as error:
        assert "\n" not in str(error)
