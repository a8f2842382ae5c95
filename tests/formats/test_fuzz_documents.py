"""JSON of the studio, configs of models and texts of nvidia-smi that are nearly right: each is read or gets one clear line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster import Cluster
from engine.costs import AlphaBeta, MeasuredTimes, Profiled
from engine.formats import (
    identify,
    is_huggingface,
    read_cluster,
    read_collectives,
    read_costs,
    read_document,
    read_model,
    read_plan,
    read_sizes,
)
from engine.formats.nvidia_topo import read_topology
from engine.overlap.operator_graph import OperatorGraph
from engine.plan import Plan
from engine.schema import Frozen
from engine.serving.step import ServingStep
from engine.training import TrainingStep
from tests.cases import files
from tests.cases.files import BRIDGED, CUBE_MESH, everywhere, printed, rocm_tables, saver
from tests.cases.fuzzing import answer_or_one_line, any_input
from tests.cases.mutations import PIECES, changed_text, damaged, json_texts, mutated, values_with
from tests.cases.plan_files import PLAN
from tests.costs.device_profiles import device_profile

saved = saver("document.json")
GPU = {"type": "H100", "memory": 8e10, "memory_bandwidth": 3e12, "flops_fp32": 6e13, "flops_fp16": 9e14}
GPU |= {"send_bandwidth": 5e10, "receive_bandwidth": 5e10}
CLUSTER = {
    "name": "two",
    "nodes": [{"name": "a", "gpus": [GPU, GPU], "link_bandwidth": 4e11}, {"name": "b", "gpus": [GPU], "link_latency": 1e-6}],
    "latency": 1e-5,
    "efficiency": {"fabric": [[1, 1.0], [8, 0.5]], "links": [[1, 0.9]], "origin": "measured"},
}
SEND = {"src": [0, 1], "dst": [1, 0], "bytes": [10.0, 20.0], "phase": [0, 1], "duration": [1.0, 2.0]}
ORDERED = PLAN | {"send_order": {"mode": "matched", "dispatch": [SEND, SEND], "combine": [SEND, SEND]}}
QKV = {"name": "qkv", "kind": "attention", "gemms": [{"m": 8, "n": 8, "k": 8}], "moved": 64.0}
DISPATCH = {"name": "dispatch", "kind": "dispatch", "sent": 128.0, "seconds": 1e-3}
GRAPH = {
    "name": "step",
    "operators": [operator | {"phase": "forward", "layer": 0} for operator in (QKV, DISPATCH)],
    "dependencies": [{"before": "qkv", "after": "dispatch", "gradient": True}],
}
MODEL = {"name": "m", "layers": 4, "dense_layers": [0], "experts": 8, "experts_per_token": 2, "d_model": 64, "d_ff": 96}
SERVING = {"phase": "decode", "sequences": 8, "context": 512, "output": 32, "overlap": "two-batch", "kv_dtype": "fp8"}
TRAINING = {"batch": 2, "sequence_length": 64, "heads": 4, "dense_d_ff": 256, "gate": "top-k", "capacity_factor": 1.25}
LINE = {"alpha": 1e-5, "beta": 1e-10, "error": 0.1}
PROFILE = {"name": "ours", "origin": "measured", "gemm": {"H100": LINE}, "memory": {"H100": LINE}, "network": LINE}
PROFILE |= {"ranks": 2}
CALIBRATION = device_profile().model_dump(mode="json")
DOCUMENTS: dict[str, tuple[dict, object]] = {
    "cluster": (CLUSTER, read_cluster),
    "model": (MODEL, read_model),
    "plan": (ORDERED, read_plan),
    "serving-step": (SERVING, lambda path: read_document(ServingStep, path)),
    "training-step": (TRAINING, lambda path: read_document(TrainingStep, path)),
    "operator-graph": (GRAPH, lambda path: read_document(OperatorGraph, path)),
    "calibration": (CALIBRATION, read_costs),
    "measured-times": (CALIBRATION["measured"], read_costs),
    "cost-profile": (PROFILE, read_costs),
}


@pytest.mark.parametrize("kind", DOCUMENTS)
@given(data=st.data())
@any_input
def test_any_document(tmp_path, kind, data):
    content, read = DOCUMENTS[kind]
    path = saved(tmp_path, data.draw(damaged(data.draw(json_texts(data.draw(mutated(content)))))))
    answer_or_one_line(lambda: identify(path))
    answer_or_one_line(lambda: said_by(read(path)))
    if read is read_costs:
        answer_or_one_line(lambda: read_collectives(path))


def said_by(document: object) -> str:
    """Read a document as every page does."""
    match document:
        case Cluster():
            assert len(document.gpus) == len(document.node_of_gpu)
        case Plan():
            assert document.placement.share.shape[0] == document.placement.layers
            assert document.id
        case MeasuredTimes():
            assert Profiled(document).digest
            return ""
    assert document.digest
    return AlphaBeta(document).source if type(document).__name__ == "CostProfile" else document.to_json()


def test_what_is_mutated_is_right(tmp_path):
    for kind, (content, read) in DOCUMENTS.items():
        path = saved(tmp_path, content)
        assert identify(path).name == kind
        assert isinstance(read(path), Frozen)
    assert "H…" in answer_or_one_line(lambda: read_costs(saved(tmp_path, PROFILE | {"memory": {"H" * 5000: {}}})))


NESTED = [
    {"text_config": files.QWEN2_MOE, "architectures": ["X"], "model_type": "x"},
    {"thinker_config": {"text_config": files.MIXTRAL}, "model_type": "omni"},
    {"hybrid_override_pattern": "M-E*E", **files.MIXTRAL},
    {**files.DEEPSEEK_V3, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58}
    | {"sliding_window": 128, "layer_types": ["sliding_attention"]},
]
SIZES = {"num_attention_heads": 128, "num_key_value_heads": 8, "kv_lora_rank": 512, "q_lora_rank": 1536}
SIZES |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280}
SIZES |= {"tie_word_embeddings": False}
texts = values_with("moe", "dense", "E", "0,1,2", "fp8", "float8_e4m3fn", "torch.bfloat16", "sliding_attention", "mixtral")


@given(
    data=st.data(),
    config=st.sampled_from([files.MIXTRAL, files.DEEPSEEK_V3, files.QWEN2_MOE, files.LLAMA_4, files.GPT_OSS, *NESTED]),
    sizes=st.booleans(),
)
@any_input
def test_any_config(tmp_path, data, config, sizes):
    config = config | SIZES if sizes else config
    path = saved(tmp_path, data.draw(damaged(data.draw(json_texts(data.draw(mutated(config, texts)))))))
    for read in (identify, is_huggingface, read_sizes, read_model):
        answer_or_one_line(lambda read=read: read(path))


CELLS = (
    *PIECES,
    *("X", "NV4", "NV18", "NV999", "PIX", "SYS", "SOC", "GPU0", "GPU7", "NIC0", "NIC0NIC1", "NODEPXB", "CPU", "XGMI"),
    "\x1b[4m",
)
LISTED = "GPU 0: NVIDIA H200 (UUID: GPU-1)\nGPU 1: NVIDIA H200 (UUID: GPU-2)\n"
TOPOLOGIES = [
    printed(CUBE_MESH, nics=2),
    printed(BRIDGED, nics=1, nic="mlx5_", affinity="CPU", escapes=True),
    printed(everywhere("NV18", 2), affinity="") + LISTED,
    rocm_tables(everywhere("XGMI", 4)),
]


@given(data=st.data(), text=st.sampled_from(TOPOLOGIES), types=st.sampled_from([None, "A100-80", "MI300X", ("H100", "H200")]))
@any_input
def test_any_topology(tmp_path, data, text, types):
    path = saved(tmp_path, data.draw(damaged(data.draw(changed_text(text, CELLS)).encode())), "topology.txt")
    answer_or_one_line(lambda: identify(path))
    answer_or_one_line(lambda: said_by(read_topology(path, types).cluster))
