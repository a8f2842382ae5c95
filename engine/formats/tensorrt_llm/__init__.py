"""TensorRT-LLM's expert statistics: `files` reads and checks single files, `statistics` makes loads of them."""

from engine.formats.tensorrt_llm.statistics import FORMATS
