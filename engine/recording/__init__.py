"""The making of recordings: a guide for each engine, the size to expect, and recording from a running server."""

from engine.recording.guide import MEGATRON, PYTORCH, SGLANG, TENSORRT_LLM, VLLM, VLLM_ASCEND

GUIDES = (SGLANG, VLLM, VLLM_ASCEND, TENSORRT_LLM, MEGATRON, PYTORCH)
"""The guides, engine by engine, in the order of the page."""
