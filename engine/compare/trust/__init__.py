"""All predictions that can be held against public measurements, on settings that were fitted and on those that were not."""

from collections.abc import Callable, Iterator

from engine.compare.trust.collectives import nccl, nvlink_exchanges
from engine.compare.trust.deepep import deepep
from engine.compare.trust.prediction import Prediction, Summary, summaries
from engine.compare.trust.serving import serving, skewed_experts
from engine.compare.trust.whole_steps import engine_steps

ENGINES = "steps of engines"
SECTIONS: dict[str, Callable[[], Iterator[Prediction]]] = {
    "DeepEP's dispatch and combine": deepep,
    "NCCL's collectives": nccl,
    "TensorRT-LLM's all-to-all": nvlink_exchanges,
    "experts under power laws": skewed_experts,
    "whole steps": serving,
    ENGINES: engine_steps,
}
"""The sections, by the predicted quantity."""


def predictions() -> Iterator[Prediction]:
    """The predictions of all sections. Raises InputError when the tables of measurements are absent."""
    for section in SECTIONS.values():
        yield from section()
