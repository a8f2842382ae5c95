"""The source of the operators of a step: the measured one if it can time them, else the datasheet."""

from pathlib import Path

from engine.cluster import Gpu
from engine.errors import InputError
from engine.model import MoEModel
from engine.serving.aiconfigurator import AiconfiguratorOperators
from engine.serving.roofline import RooflineOperators
from engine.serving.sizes import TransformerSizes
from engine.serving.step import OperatorSource, ServingStep

OPERATORS = ("aiconfigurator", "datasheet")


def choose_operators(
    config: Path, model: MoEModel, sizes: TransformerSizes, gpu: Gpu, step: ServingStep, wanted: str | None = None
) -> tuple[OperatorSource, list[str]]:
    """The wanted source, one of OPERATORS, or without a wish the first that can time the step; and why it is not the first.

    config: the model's `config.json`. Raises InputError when the wanted source cannot time the step.
    """
    roofline = RooflineOperators(model, sizes, gpu)
    if wanted == "datasheet":
        return roofline, []
    measured = AiconfiguratorOperators(config, model, sizes, gpu.type)
    try:
        measured.operators(step.half() if step.overlap == "two-batch" else step)
    except InputError as error:
        if wanted:
            raise
        return roofline, [f"operators by the datasheet: {error}"]
    return measured, []
