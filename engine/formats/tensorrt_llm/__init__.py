"""TensorRT-LLM's expert statistics: `files` reads and checks single files, `sums` adds them up, `slots` finds what their
ids are, `statistics` makes loads of them."""

from engine.formats.tensorrt_llm.statistics import FORMATS

__all__ = ["FORMATS"]
