"""Where a recording comes from: how to record with each engine, how large it becomes, and recording from a running server."""

from engine.recording.guide import MEGATRON, PYTORCH, SGLANG, TENSORRT_LLM, VLLM, VLLM_ASCEND

GUIDES = (SGLANG, VLLM, VLLM_ASCEND, TENSORRT_LLM, MEGATRON, PYTORCH)
"""How to record, engine by engine, in the order in which a page shows them."""
