"""The goal of a problem or a plan: inference of one model, of two, or a training step."""

from enum import StrEnum


class Goal(StrEnum):
    """A goal; its value is its name in a sentence."""

    INFERENCE = "inference"  # one model has the GPUs to itself
    TWO_MODELS = "two models"  # inference of two models on the same GPUs (Aurora §6, §7)
    TRAINING = "a training step"


def goal_of(training: bool, two_models: bool) -> Goal:
    """The goal of a problem or plan with a training step, a second model, or neither."""
    if training:
        return Goal.TRAINING
    return Goal.TWO_MODELS if two_models else Goal.INFERENCE
