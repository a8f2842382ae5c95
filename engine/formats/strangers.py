"""Well-known files that are no recordings: what they are, and what to bring in their place. They are told apart only once
nothing else here has taken a file, so that this list cannot hide a format."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.formats.glance import Glance

_SQLITE = b"SQLite format 3\0"
_RECORD = "record routing from the server (How to record, docs/recording.md)"
_CONFIG = "open the config.json beside it for the model"


@dataclass(frozen=True)
class Stranger:
    """is_: in a sentence, after "FILE: is"; instead: what to do; tells: whether a file is one of these"""

    is_: str
    instead: str
    tells: Callable[[Glance], bool]


def stranger(glance: Glance) -> Stranger | None:
    """The well-known file that this is, if any."""
    return next((known for known in STRANGERS if known.tells(glance)), None)


def _is_list_of_events(glance: Glance) -> bool:
    """Chrome traces may be a bare list of events."""
    events = glance.json
    return isinstance(events, list) and bool(events) and isinstance(events[0], dict) and {"ph", "pid"} <= set(events[0])


def _is_nsight(glance: Glance) -> bool:
    """A report, by its name, as its content is NVIDIA's own; or an export to SQLite, by its tables."""
    if glance.head.startswith(_SQLITE):
        return b"CUPTI_ACTIVITY" in glance.head
    return glance.path.suffix.lower() in (".nsys-rep", ".qdrep") and not glance.is_text


def _has_one(glance: Glance, *words: bytes) -> bool:
    return glance.is_text and any(word in glance.head for word in words)


STRANGERS = (
    Stranger(
        "a tokenizer of Hugging Face, which says nothing of routing",
        f"{_CONFIG}, and {_RECORD}",
        lambda glance: {"added_tokens", "model"} <= glance.keys or "tokenizer_class" in glance.keys,
    ),
    Stranger("the index of a checkpoint's safetensors files", _CONFIG, lambda glance: "weight_map" in glance.keys),
    Stranger(
        "a generation_config.json, which has no sizes of the model",
        _CONFIG,
        lambda glance: "transformers_version" in glance.keys and "model_type" not in glance.keys,
    ),
    Stranger(
        "a safetensors file without token counts or routing: weights of a model, by all appearance",
        _CONFIG,
        lambda glance: bool(glance.tensors),
    ),
    Stranger(
        "a model in GGUF",
        "open the config.json of the model that it was made from",
        lambda glance: glance.head[:4] == b"GGUF",
    ),
    Stranger(
        "a report of Nsight Systems",
        "its times are not read; profile with the PyTorch profiler and export a Chrome trace (.json), or run python -m engine "
        "calibrate on the machine",
        _is_nsight,
    ),
    Stranger(
        "a database of SQLite", "save its table as CSV or Parquet", lambda glance: glance.head.startswith(_SQLITE)
    ),
    Stranger(
        "a Chrome trace that is a bare list of events",
        'times are read from traces of the PyTorch profiler: export_chrome_trace writes {"traceEvents": [...]}',
        _is_list_of_events,
    ),
    Stranger(
        "a log of vLLM without routing",
        _RECORD,
        lambda glance: _has_one(
            glance, b"Avg prompt throughput", b"Initializing a V1 LLM engine", b"vLLM API server version"
        ),
    ),
    Stranger(
        "a log of SGLang without routing",
        _RECORD,
        lambda glance: _has_one(
            glance, b"server_args=ServerArgs(", b"Prefill batch. #new-seq", b"Decode batch. #running-req"
        ),
    ),
)
