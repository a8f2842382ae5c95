"""Every format that is told by its content, the most telling first."""

from engine.formats import (
    bare_lists,
    huggingface,
    megatron,
    moe_balance,
    numpy_files,
    nvidia_topo,
    sglang,
    studio_documents,
    tables,
    tensorrt_llm,
)
from engine.formats.format import Format
from engine.formats.measured import aiconfigurator, deepxtrace, kineto, nccl_pairs, times_table
from engine.formats.placements import detection
from engine.formats.vllm import eplb, requests, responses, route_logs

FORMATS: tuple[Format, ...] = (
    *requests.FORMATS,
    *kineto.FORMATS,  # before those that parse the whole of a JSON file
    *numpy_files.FORMATS,
    *eplb.FORMATS,
    *responses.FORMATS,
    *sglang.FORMATS,
    *route_logs.FORMATS,
    *moe_balance.FORMATS,
    *eplb.ASCEND_FORMATS,
    *detection.FORMATS,  # permutations are lists too
    *bare_lists.FORMATS,
    *studio_documents.FORMATS,
    *huggingface.FORMATS,
    *times_table.FORMATS,
    *aiconfigurator.FORMATS,
    *nccl_pairs.FORMATS,
    *deepxtrace.FORMATS,
    *nvidia_topo.FORMATS,
    *megatron.FORMATS,
    *tensorrt_llm.FORMATS,
    *tables.FORMATS,  # any text with commas is taken for a table
)
