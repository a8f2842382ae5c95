"""Every format that is recognised by its content, the most telling first; the documents that the studio saves as JSON among
them, by the keys that each kind must have."""

from engine.formats import (
    bare_lists,
    huggingface,
    megatron,
    moe_balance,
    numpy_files,
    nvidia_topo,
    placements,
    sglang,
    tables,
    tensorrt_llm,
)
from engine.formats.format import Format, Glance, Kind
from engine.formats.measured import aiconfigurator, deepep_tests, deepxtrace, kineto, nccl_pairs, serving_rows, times_table
from engine.formats.vllm import eplb, requests, responses, route_logs

_KEYS: tuple[tuple[str, str, Kind, set[str]], ...] = (
    ("cluster", "a cluster of the studio", "cluster", {"nodes"}),
    ("model", "a model of the studio", "model", {"experts", "experts_per_token", "d_model"}),
    ("serving-step", "a step of serving", "step", {"phase", "sequences", "context"}),
    ("training-step", "a training step", "step", {"batch", "sequence_length", "heads"}),
    ("operator-graph", "the operators of a training step", "graph", {"name", "operators"}),
    ("calibration", "a calibration", "measurements", {"kind", "measured"}),
    ("measured-times", "measured times", "measurements", {"kind", "origin"}),
)


def _is_plan(glance: Glance) -> bool:
    # A plan may be longer than what is parsed for a glance: its placement stands at its head.
    return (glance.is_json and b'"experts_of_gpu"' in glance.head) or {"placement", "provenance"} <= glance.keys


def _is_cost_profile(glance: Glance) -> bool:
    lines = {"gemm", "gate", "memory", "network", "all_reduce"}
    return {"name", "origin"} <= glance.keys and bool(lines & glance.keys)


_DOCUMENTS = (
    Format("plan", "a plan of the studio", "plan", _is_plan),
    *(Format(name, title, kind, lambda glance, keys=keys: keys <= glance.keys) for name, title, kind, keys in _KEYS),
    Format("cost-profile", "a profile of fitted lines", "measurements", _is_cost_profile),
)

FORMATS: tuple[Format, ...] = (
    *requests.FORMATS,
    *kineto.FORMATS,  # before those that parse the whole of a JSON file
    *numpy_files.FORMATS,
    eplb.LOADS,
    *responses.FORMATS,
    *sglang.FORMATS,
    *route_logs.FORMATS,
    *moe_balance.FORMATS,
    eplb.TENSOR,
    *placements.FORMATS,  # permutations are lists too
    *bare_lists.FORMATS,
    *_DOCUMENTS,
    *huggingface.FORMATS,
    *times_table.FORMATS,
    *serving_rows.FORMATS,
    *aiconfigurator.FORMATS,
    *nccl_pairs.FORMATS,
    *deepxtrace.FORMATS,
    *deepep_tests.FORMATS,
    *nvidia_topo.FORMATS,
    *megatron.FORMATS,
    *tensorrt_llm.FORMATS,
    *bare_lists.NAMED_FORMATS,
    *tables.FORMATS,  # any text with commas is taken for a table
)
