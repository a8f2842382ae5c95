"""Training steps that papers measured on their own clusters, against ours: the counterpart of Lancet's Figure 14.

Public are the times of PipeMoE's Table VII, three systems on four models, and those of its §V-E; and of Lina's Table 1 the
seconds and the part of a DeepSpeed step that all-to-alls take. Lancet's Figures 11 and 12 are drawn without numbers.

The papers print neither all sizes of their models nor number formats; `pipemoe.testbed.MODELS` and `lina.training.TASKS` say
what stands in. Lina's tokens follow from an all-to-all of its Figure 7, so that this part of its six steps is no forecast.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from engine.compare.trust.prediction import Prediction
from engine.costs import Datasheet
from engine.problem import Problem
from engine.reproduce.exhibits import each
from engine.reproduce.lina.motivation import TRAINED
from engine.reproduce.lina.training import LINK, TABLE_1, paper_problem
from engine.reproduce.pipemoe.layers import layers_of_table_iv, table_iv
from engine.reproduce.pipemoe.steps import IN_EIGHT, IN_TWO, SLOW, TABLE_VII
from engine.reproduce.pipemoe.testbed import CHOICES, EXAMPLE, WIDTH, model_step
from engine.result import Provenance, Stop, never
from engine.simulate.training import step_seconds
from engine.systems import TRAINING
from engine.systems.base import silent

TRAINING_STEPS = "training steps of papers"
"""The section of these predictions."""
WHOLE = ("training step, PipeMoE's Table VII", "training step, Lina's Table 1")
"""Whole steps by the datasheet."""
BY_LINES = "an MoE layer's step by lines through its cluster's times, PipeMoE §V-E"

LAYER = {2: IN_TWO, 8: IN_EIGHT}
"""PipeMoE §V-E: seconds of one layer on 64 GPUs, by parts."""


def training_steps() -> Iterator[Prediction]:
    """Every public measurement of a training step with ours; none was fitted to the step that it measures."""
    for gpus, printed in TABLE_VII.items():
        for name, measured in zip(("TM-1", "TM-2", "RM-1", "RM-2"), printed, strict=True):
            problem = model_step(name, gpus)
            for system, seconds in zip(("tutel", "fastermoe", "pipemoe"), measured, strict=True):
                setting = f"{name} by {TRAINING[system].title}, {gpus} GPUs"
                yield Prediction(WHOLE[0], "RTX 2080 Ti", gpus // 4, setting, seconds, planned_seconds(problem, system), False)
    for (experts, layers), (exchanged, part) in TRAINED.items():
        problem = lina_step(layers, experts)
        setting = f"Transformer-XL of {layers} layers by DeepSpeed, {experts} GPUs"
        ours = planned_seconds(problem, "deepspeed")
        yield Prediction(WHOLE[1], "A100-40", experts // 4, setting, exchanged / part, ours, False)
    for (parts, seconds), ours in zip(LAYER.items(), layer_seconds(), strict=True):
        setting = f"(B, L, M, H, E/P) = (2, 2048, 8192, 4096, 2) in {parts} parts, 64 GPUs"
        yield Prediction(BY_LINES, "RTX 2080 Ti", 16, setting, seconds, ours, False)


def layer_seconds(choices: int = CHOICES) -> list[float]:
    """Forward and backward pass of the layer of §V-E on the lines of Figure 6, in each number of parts of `LAYER`.

    choices: experts of a token, which the paper does not print
    """
    at = int(np.flatnonzero((layers_of_table_iv() == EXAMPLE).all(axis=1))[0])
    share, seconds = choices / CHOICES, 0.0
    for experts in (1.0, 2.0):
        two = table_iv(64, False, width=WIDTH, experts=experts)
        own = replace(two, size_comm=share * two.size_comm, size_comp=share * two.size_comp)
        seconds = seconds + own.time_of_degree()[at]
    return [float(seconds[parts - 1]) for parts in LAYER]


def errors_on_slower_networks(stop: Stop = never) -> np.ndarray:
    """float64[step]: errors without sign of the same whole steps in 32 bits on a fifth of Table III's network, and with the
    links of a node that Lina's own all-to-alls of four GPUs had. Raises StoppedError once the stop is True."""
    errors = []
    for gpus, printed in TABLE_VII.items():
        for name, measured in each(zip(("TM-1", "TM-2", "RM-1", "RM-2"), printed, strict=True), stop):
            problem = model_step(name, gpus, "fp32", SLOW)
            ours = [planned_seconds(problem, system) for system in ("tutel", "fastermoe", "pipemoe")]
            errors += [own / seconds - 1 for own, seconds in zip(ours, measured, strict=True)]
    for (experts, layers), (exchanged, part) in each(TRAINED.items(), stop):
        ours = planned_seconds(lina_step(layers, experts, link=LINK), "deepspeed")
        errors.append(ours * part / exchanged - 1)
    return np.abs(errors)


def lina_step(layers: int, experts: int, link: float | None = None) -> Problem:
    """A model of Lina's Table 1 on as many GPUs as experts. link: see `lina.training.testbed`"""
    return paper_problem(replace(TABLE_1, layers=layers), experts, Datasheet(), link=link)


def planned_seconds(problem: Problem, system: str) -> float:
    """Simulated seconds of a system's plan; no bound is sought."""
    recipe = TRAINING[system]
    draft = recipe.recipe(problem, recipe.settings({}), never, silent)
    return step_seconds(draft.plan(system, Provenance(optimiser=system)), problem)
