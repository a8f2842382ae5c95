"""All predictions that can be held against public measurements."""

from collections.abc import Callable, Iterator

from engine.studies.trust.collectives import nccl, nvlink_exchanges
from engine.studies.trust.deepep import deepep
from engine.studies.trust.prediction import Prediction
from engine.studies.trust.serving import serving, skewed_experts

SECTIONS: dict[str, Callable[[], Iterator[Prediction]]] = {
    "DeepEP's dispatch and combine": deepep,
    "NCCL's collectives": nccl,
    "TensorRT-LLM's all-to-all": nvlink_exchanges,
    "experts under power laws": skewed_experts,
    "whole steps": serving,
}
"""By what is predicted."""


def predictions() -> Iterator[Prediction]:
    """Of all sections. Raises InputError when the tables of measurements are absent."""
    for section in SECTIONS.values():
        yield from section()
